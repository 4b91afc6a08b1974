"""What a short script without pubsel reaches: a linear classifier on rows of norm 1, by Opacus, in forty lines.

    python scripts/opacus_head.py results/opacus_head.csv pair.private=flowers5 model=mobilenetv2_coral

The words are pubsel's settings. pair.private and seed may be given several times; the others, such as data_root=FOLDER,
hold for all. All training images are private. Every learning rate is a row: taking the best of them is a choice by the
test set (oracle). A row is written as soon as it is there, and is not run again.
"""

import argparse
import csv
import itertools
import time
import warnings

import measuring
import torch
from hydra import compose, initialize_config_dir
from opacus import PrivacyEngine
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from pubsel.cell import load_task
from pubsel.data import Task
from pubsel.rules import Inputs
from pubsel.settings import CONF
from pubsel.settings.keys import RunConfig
from pubsel.settings.schema import check
from pubsel.training.evaluation import utility

EPSILONS, RATES, EPOCHS, BATCH, CLIP = (0.1, 0.3, 1.0, 2.0), (0.5, 2.0, 8.0), 20, 1024, 1.0
COMMON = "algorithm=dp_sgd_clip1 training=pillar distance=none pair.public=null"
COLUMNS = ("private", "model", "epsilon", "seed", "learning_rate", "metric", "utility", "seconds")


def trained(x: Tensor, y: Tensor, classes: int, epsilon: float, rate: float, seed: int) -> nn.Linear:
    """Return a linear classifier on x [n, d] with labels y [n], by DP-SGD with Opacus: (epsilon, 1e-5)."""
    torch.manual_seed(seed)
    model: nn.Module = nn.Linear(x.shape[1], classes)
    optimizer: torch.optim.Optimizer = torch.optim.SGD(model.parameters(), rate)
    batches = DataLoader(TensorDataset(x, y), min(BATCH, len(x)))
    private, optimizer, batches = PrivacyEngine(accountant="prv").make_private_with_epsilon(
        module=model,
        optimizer=optimizer,
        data_loader=batches,
        target_epsilon=epsilon,
        target_delta=1e-5,
        epochs=EPOCHS,
        max_grad_norm=CLIP,
    )
    for _ in range(EPOCHS):
        for inputs, labels in batches:
            optimizer.zero_grad()
            nn.functional.cross_entropy(private(inputs), labels).backward()
            optimizer.step()
    return private._module


def task_of(words: list[str]) -> Task:
    """Return the features of a data set, as pubsel reads them."""
    with initialize_config_dir(str(CONF), version_base="1.3"):
        settings = check(RunConfig, compose("run", [*COMMON.split(), *words]))
    return load_task(Inputs.of(settings), torch.device("cpu"))


def main() -> None:
    """Run what is not in the CSV yet."""
    arguments = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    arguments.add_argument("to", type=measuring.target)
    arguments.add_argument("words", nargs="+", metavar="pair.private=NAME")
    given = arguments.parse_args()
    warnings.simplefilter("ignore")

    sets = [word for word in given.words if word.startswith("pair.private=")]
    seeds = [int(word.partition("=")[2]) for word in given.words if word.startswith("seed=")] or [0]
    others = [word for word in given.words if word not in sets and not word.startswith("seed=")]
    rows = list(csv.DictReader(given.to.path.open())) if given.to.path.is_file() else []
    done = {tuple(row[c] for c in COLUMNS[:5]) for row in rows}
    with given.to.path.open("a", newline="") as file:
        table = csv.DictWriter(file, COLUMNS, lineterminator="\n")
        if not rows:
            table.writeheader()
        for word, seed in itertools.product(sets, seeds):
            task = task_of([word, f"seed={seed}", *others])
            x, test = (nn.functional.normalize(split.x, dim=1) for split in (task.private, task.test))
            name = next((word.partition("=")[2] for word in others if word.startswith("model=")), "")
            for epsilon, rate in itertools.product(EPSILONS, RATES):
                key = (word.partition("=")[2], name, str(epsilon), str(seed), str(rate))
                if key in done:
                    continue
                began = time.perf_counter()
                model = trained(x, task.private.y, task.classes, epsilon, rate, seed)
                with torch.no_grad():
                    reached = utility(model(test), task.test.y, task.metric)
                seconds = time.perf_counter() - began
                figures = (task.metric, f"{reached:.4f}", f"{seconds:.1f}")
                table.writerow(dict(zip(COLUMNS, (*key, *figures), strict=True)))
                file.flush()
                print(*key, *figures, flush=True)


if __name__ == "__main__":
    main()
