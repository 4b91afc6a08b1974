"""Whether public data of the private kind ever cost `whitened_head` accuracy, for features with known spectra, and
for texts:

    python scripts/spectra.py --to results/spectra.csv

d features, of no images, vary in directions that are turned at random, with variances j^-power; a tenth of each is of
the class means. Texts are those of race_sets.py, of other seeds; their power is empty. A tenth as many public examples
as private ones have no labels. own, none: accuracy on 2,000 other examples in percent, of texts on 1,200, with and
without public data; rest: the share of all features (`rest_of`). Nothing of it is private.
"""

import argparse
import itertools
import math
import statistics
import tempfile
from pathlib import Path
from typing import Any

import measuring
import race_sets
import torch
from torch import Tensor, nn

from pubsel import algorithms
from pubsel.algorithms import Facts, FirstRelease
from pubsel.algorithms.whitened_head import WhitenedHead
from pubsel.data import Split, Task
from pubsel.data.texts import hashed
from pubsel.privacy import accountant
from pubsel.privacy.randomness import Secret, stream
from pubsel.privacy.sampling import schedule
from pubsel.settings.keys import Training
from pubsel.settings.methods import option
from pubsel.training.loop import Job, fit, noisy_sum

CASES = (  # features, classes, private examples
    (30, 2, 300),
    (100, 5, 3000),
    (300, 20, 8000),
    (300, 77, 9000),
    (300, 200, 9000),
    (4096, 20, 5000),
)
MANY = (100, 50, 100_000), 0.5  # a minute each
POWERS, EPSILONS, SEEDS, DELTA = (0.0, 0.5, 0.75, 1.0, 1.5), (1.0, 3.0, 8.0), 2, 1e-5
TEXTS = (480, 4320, 1200)  # public, private and test ones
OF_MEANS = 0.1  # of the variance


def drawn(d: int, classes: int, power: float, sizes: tuple[int, ...], seed: int) -> list[Split]:
    """Return that many examples each, of one random problem."""
    source = torch.Generator().manual_seed(seed)
    variances = torch.arange(1, d + 1) ** -power
    turn = torch.linalg.qr(torch.randn(d, d, generator=source)).Q
    means = torch.randn(classes, d, generator=source) * (OF_MEANS * variances).sqrt()

    def part(n: int) -> Split:
        y = torch.randint(classes, (n,), generator=source)
        rows = means[y] + torch.randn(n, d, generator=source) * ((1 - OF_MEANS) * variances).sqrt()
        return Split(rows @ turn, y)

    return [part(n) for n in sizes]


def texts(seed: int) -> list[Split]:
    """Return made-up texts as rows, with their topics."""
    frame = race_sets.topics(seed)
    x, y = hashed(frame.text), torch.tensor(frame.label.factorize(sort=True)[0])
    return [Split(*part) for part in zip(x.split(TEXTS), y.split(TEXTS), strict=True)]


def accuracy(parts: list[Split], classes: int, epsilon: float, public: bool, seed: int) -> tuple[float, float]:
    """Return the accuracy of a training in percent, and its share of all features."""
    known, private, test = parts
    n, d = private.x.shape
    mu = accountant.gaussian_mu(epsilon, DELTA)
    m, features = (len(known.x), known.x) if public else (0, None)
    facts = Facts(n, d, m, classes, mu=mu, images=False, public=features)
    head = algorithms.build(option("algorithm", "whitened_head") | {"public_labels": "none"})
    assert isinstance(head, WhitenedHead)
    head = head.derived(facts)

    # as pubsel.training.once and release.run do
    training = Training(chunk=None, checkpoint_seconds=math.inf, **head.training)
    plan = schedule(n, training)._replace(steps=head.steps)
    noise = math.sqrt(head.steps + head.first_steps) / mu
    frozen = head.frozen(known if public else None, d, lambda purpose, step: stream(purpose, "spectra", step))
    if isinstance(frozen, FirstRelease):
        source = stream(f"{seed}", "first release")
        frozen = noisy_sum(frozen, private.x, noise / math.sqrt(head.first_steps), source)
    private, test = (Split(frozen(part.x), part.y) for part in (private, test))
    model = nn.Linear(private.x.shape[1], classes)
    for parameter in model.parameters():
        nn.init.zeros_(parameter)
    task = Task(private, None, test, classes, "accuracy", (), (), ())
    with tempfile.TemporaryDirectory() as folder:
        job = Job(head, plan, noise, training, "spectra", Path(folder, "checkpoint.pt"))
        fit(model, task, job, Secret({"seed": f"{seed} {public}"}, {}, ["0 here"], False))
    with torch.no_grad():
        right: Tensor = model(test.x).argmax(1) == test.y
    return 100 * float(right.double().mean()), head.rest


def main() -> None:
    """Train all cells, and write the file."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--to", type=measuring.target, required=True, help="file to write")
    to = parser.parse_args().to
    torch.set_num_threads(1)

    rows: list[dict[str, Any]] = []
    of_texts = (4096, race_sets.TOPICS, TEXTS[1]), None
    for (d, classes, n), power in (*itertools.product(CASES, POWERS), MANY, of_texts):
        if power is None:
            parts = [texts(1 + seed) for seed in range(SEEDS)]
        else:
            parts = [drawn(d, classes, power, (n // 10, n, 2000), seed) for seed in range(SEEDS)]
        for epsilon in EPSILONS:
            row: dict[str, Any] = {"d": d, "classes": classes, "n": n, "power": power, "epsilon": epsilon}
            cells = [
                [accuracy(part, classes, epsilon, public, i) for i, part in enumerate(parts)]
                for public in (True, False)
            ]
            row["rest"] = f"{cells[0][0][1]:.2f}"
            for name, cell in zip(("own", "none"), cells, strict=True):
                values = [value for value, _ in cell]
                row |= {name: f"{statistics.mean(values):.2f}", f"{name}_std": f"{statistics.stdev(values):.2f}"}
            row["gain"] = f"{float(row['own']) - float(row['none']):.2f}"
            rows.append(row | {"seeds": SEEDS})
            print(*rows[-1].values(), flush=True)
    measuring.write(to, rows, measuring.origin("cpu", 1))


if __name__ == "__main__":
    main()
