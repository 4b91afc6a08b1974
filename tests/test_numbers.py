"""What decides the numbers of a record, held by tiny cells of all algorithms and distances (golden/numbers.json).

The file has the cells of several versions of torch and processors, by how they round sums. Where sums are rounded as in
one of these, weights have to be equal bit for bit. Elsewhere the noise is another, because it depends on every bit of
what is trained on; there, only cells without noise are compared, to a thousandth. `records` are the roundings of the
machines that made the shipped records, a list that is kept by hand. If a change is meant to change
numbers: raise `records.NUMBERS`, and make the file again. It keeps the cells of other machines if numbers are the same:

    python -m tests.test_numbers
"""

import contextlib
import hashlib
import json
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hydra import compose, initialize_config_dir
from omegaconf import DictConfig
from scipy.sparse.linalg import eigsh
from sklearn.datasets import load_digits
from threadpoolctl import threadpool_info

from pubsel import records
from pubsel.cell import use_threads
from pubsel.commands import rank
from pubsel.release import run
from pubsel.settings import CONF
from pubsel.settings.keys import RankConfig, RunConfig
from pubsel.settings.schema import check

FILE = Path(__file__).parent / "golden" / "numbers.json"
STREAMS = {"code": "golden", "place": "golden"}  # in place of the digest of the code, which every change changes
HERE = "device=cpu threads=1 download=false seed=1"
NETWORK = (
    f"{HERE} pair=digits_digits pair.m=40 model=digits_cnn distance=none epsilon=2 label=golden "
    "training=digits training.steps=4 training.epochs=1 training.batch_size=100"
)
FEATURES = (
    f"{HERE} pair=own_part pair.private=digits pair.m=60 model=scattering distance=none epsilon=2 "
    "label=golden pair.private_share=0.3 pair.validation=0.2"
)
RATE = "algorithm.pretrain_rate=0.01"
CELLS = {
    "dp_sgd": f"{NETWORK} algorithm=dp_sgd pair.public=null",
    "gep": f"{NETWORK} algorithm=gep algorithm.k=20",
    "b_gep": f"{NETWORK} algorithm=b_gep algorithm.k=20",
    "dp_md": f"{NETWORK} algorithm=dp_md",
    "dope_sgd": f"{NETWORK} algorithm=dope_sgd",
    "noisy_sgd": f"{FEATURES} algorithm=noisy_sgd pair.private=two.npz",
    "second_phase": f"{NETWORK} algorithm=second_phase algorithm.public_epochs=1",
    "non_private": f"{NETWORK} algorithm=non_private pair.public=null",
    "adadps": f"{FEATURES} algorithm=adadps training=pillar training.steps=5",
    "pillar": f"{FEATURES} algorithm=pillar training=head",
    "jl": f"{FEATURES} algorithm=jl algorithm.k=20 training=head",
    "dp_pca": f"{FEATURES} algorithm=dp_pca algorithm.k=10 training=head",
    "dp_raft": f"{FEATURES} algorithm=dp_raft training=dp_raft",
    "adamix": f"{FEATURES} algorithm=adamix training=adamix privacy=adamix algorithm.rank=null {RATE}",
    "ppgd": f"{FEATURES} pair.seed=1 algorithm=ppgd training=adamix privacy=adamix algorithm.finish_rate=0.01",
    "only_public": f"{FEATURES} algorithm=only_public training=adamix privacy=adamix {RATE}",
    "dp_fc": f"{FEATURES} algorithm=dp_fc algorithm.ridge=null",
    "adassp": f"{FEATURES} algorithm=adassp",
    "public_second_moment": f"{FEATURES} algorithm=public_second_moment",
    "dppl_public": f"{FEATURES} algorithm=dppl_public",
    "whitened_head": f"{FEATURES} algorithm=whitened_head",
    "whitened_head_once": f"{FEATURES} algorithm=whitened_head_once",
    "whitened_head_start": f"{FEATURES} algorithm=whitened_head_start",
}
RANKS = f"{HERE} private=digits public=[noise] model=digits_cnn distance.m=40 distance.initialisations=1"
WITHOUT_NOISE = ("non_private", "only_public", "whitened_head_start")
DISTANCES = {
    "gsd": f"{RANKS} distance=gsd distance.k=5",
    "task2vec": f"{RANKS} distance=task2vec",
    "otdd": f"{RANKS} distance=otdd",
    "frechet": f"{RANKS} distance=frechet",
    "mmd": f"{RANKS} distance=mmd",
    "whitening": f"{RANKS} distance=whitening model=scattering distance.n=500 distance.epsilon=1",
}


def rounding() -> str:
    """Return a digest of how sums are rounded here, by products, convolutions, transforms and decompositions."""
    use_threads(1)
    random = np.random.RandomState(0)
    x, images = random.rand(300, 300), torch.from_numpy(random.rand(8, 16, 24, 24))
    results = [x @ x, np.linalg.eigh(x @ x.T)[0], eigsh(x @ x.T, 5, v0=x[0])[0]]
    for kind in (torch.float32, torch.float64):
        y, filters = images.to(kind), torch.from_numpy(random.rand(16, 16, 3, 3)).to(kind)
        parts = (y.flatten(1) @ y.flatten(1).T, torch.fft.fft2(y).real, torch.nn.functional.conv2d(y, filters), y.exp())
        results += [part.numpy() for part in parts]
    digest = hashlib.blake2b(torch.__version__.encode(), digest_size=8)
    for result in results:
        digest.update(np.ascontiguousarray(result).tobytes())
    return digest.hexdigest()


def rounds_as_records_were_made() -> bool:
    """Return whether sums are rounded here as where the shipped records were made, so that their noise is the same."""
    return rounding() in json.loads(FILE.read_text())["records"]


def composed(command: str, words: str) -> DictConfig:
    with initialize_config_dir(str(CONF), version_base="1.3"):
        return compose(command, words.split())


def numbers(name: str, folder: Path) -> dict[str, Any]:
    """Return the numbers of one cell, which is made in a folder."""
    with contextlib.chdir(folder):  # a path is a part of the settings, and so decides the noise
        if name in DISTANCES:
            return {"values": rank.rank(check(RankConfig, composed("rank", DISTANCES[name])))["values"]["noise"]}
        rows, labels = load_digits(n_class=2, return_X_y=True)
        images = (rows.reshape(-1, 8, 8) * 15).astype(np.uint8)
        np.savez(
            "two.npz",
            train_images=images[60:],
            train_labels=labels[60:],
            test_images=images[:60],
            test_labels=labels[:60],
        )
        record = run.run(check(RunConfig, composed("run", CELLS[name])), STREAMS)

    weights = torch.load(folder / "results" / "runs" / record["identity"] / "model.pt", weights_only=False)
    tensors = [value.double() for value in _tensors(weights) if value.is_floating_point()]
    norm = float(sum(tensor.square().sum() for tensor in tensors)) ** 0.5
    return {"weights": record["weights"], "norm": norm, "utility": record["utility"]}


def _tensors(values: Any) -> list[torch.Tensor]:
    if isinstance(values, torch.Tensor):
        return [values]
    inner = values.values() if isinstance(values, dict) else values if isinstance(values, list | tuple) else []
    return [tensor for value in inner for tensor in _tensors(value)]


@pytest.mark.parametrize("name", [*CELLS, *DISTANCES])
def test_numbers_change_with_their_version_alone(name: str, tmp_path: Path) -> None:
    kept = json.loads(FILE.read_text())
    assert kept["numbers"] == records.NUMBERS, "make tests/golden/numbers.json again"
    rounded = rounding()
    exact = rounded in kept["cells"]
    if not exact and name not in (*WITHOUT_NOISE, *DISTANCES):
        pytest.skip("sums are rounded otherwise on this processor, so the noise is another")
    old, new = kept["cells"][rounded if exact else min(kept["cells"])][name], numbers(name, tmp_path)
    assert old.keys() == new.keys()
    for key in old:
        if key == "weights":
            assert not exact or old[key] == new[key], "numbers changed: raise records.NUMBERS"
        else:
            tolerance = 0.02 if key == "utility" and not exact else 1e-6 if exact else 1e-3
            assert new[key] == pytest.approx(old[key], abs=tolerance, rel=tolerance), "numbers changed"


ELSEWHERE = {  # a text encoder is not at hand; noise that no record repeats
    "_target_: pubsel.algorithms.adamix.AdaMixCLIP",
    "_target_: pubsel.distances.dp_gsd.DPGSD",
    "_target_: null",
}


def test_every_algorithm_and_distance_has_a_cell() -> None:
    """By class: of those that differ in settings, one is enough."""
    for group, cells in (("algorithm", CELLS), ("distance", DISTANCES)):
        files = {path.stem: path.read_text().splitlines() for path in (CONF / group).glob("*.yaml")}
        classes = {name: {line for line in lines if line.startswith("_target_")} for name, lines in files.items()}
        assert set.union(*classes.values()) - ELSEWHERE == set.union(*(classes[name] for name in cells))


def test_threads_hold_for_all_libraries() -> None:
    """The products of numpy and scipy are rounded by their number too."""
    before = torch.get_num_threads()
    try:
        for threads in (1, 2):
            use_threads(threads)
            assert {library["num_threads"] for library in threadpool_info()} == {threads}
            assert torch.get_num_threads() == threads
    finally:
        use_threads(before)


def main() -> None:
    """Write the cells of this machine into the file."""
    before = json.loads(FILE.read_text())
    others = before["cells"] if before["numbers"] == records.NUMBERS else {}
    cells = {}
    for name in (*CELLS, *DISTANCES):
        with tempfile.TemporaryDirectory() as folder:
            cells[name] = numbers(name, Path(folder))
    kept = before | {"numbers": records.NUMBERS, "cells": others | {rounding(): cells}}
    FILE.write_text(json.dumps(kept, indent=1, sort_keys=True) + "\n")


if __name__ == "__main__":
    main()
