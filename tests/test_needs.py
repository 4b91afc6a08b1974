"""The memory that a run needs: what is counted against what is held; what does not fit is refused before it starts."""

from types import SimpleNamespace

import pytest
import torch

from pubsel.algorithms import View, build
from pubsel.cli import main
from pubsel.data import Split, Task
from pubsel.messages import UserError
from pubsel.models import small
from pubsel.models.memory import Held
from pubsel.privacy.sampling import schedule
from pubsel.release import run
from pubsel.training import needs
from pubsel.training.loop import Job, clipped_sum, engine, fit
from tests import synthetic
from tests.made import Scaled, training
from tests.synthetic import option, secret_named

CPU = torch.device("cpu")


def images(n=400, side=32):
    x, y = torch.randint(256, (n, 6, side, side), dtype=torch.uint8), torch.randint(10, (n,))
    return Task(Split(x, y), Split(x, y), Split(x, y), 10, "accuracy", (0.5,), (0.5,), ())


def network():
    return torch.nn.Sequential(Scaled(), small.linear(6, 32, 32, 10)).eval()


def of_training(name, chunk=None, batch_size=100, **changes):
    """The settings of training, the algorithm, and the memory that both are counted to need."""
    settings = training(batch_size=batch_size, epochs=1, chunk=chunk)
    algorithm = build(option("algorithm", name) | changes)
    cell = SimpleNamespace(
        algorithm=algorithm,
        training=settings,
        model=SimpleNamespace(once=False),
        name="name",
        network=lambda task: network(),
    )
    return settings, algorithm, needs.of_training(cell, images(), schedule(400, settings))


@pytest.mark.parametrize(("name", "changes"), [("dp_sgd", {}), ("dp_sgd", {"batch_size": 400}), ("gep", {"k": 20})])
def test_what_is_counted_is_what_the_loop_holds(name, changes, tmp_path):
    settings, algorithm, counted = of_training(name, **changes)
    job = Job(algorithm, schedule(400, settings), 1.0, settings, "name", tmp_path / "c.pt")
    with Held(CPU) as held:
        fit(network(), images(), job, secret_named())
    assert held.peak / 2 < counted.peak < 2 * held.peak


@pytest.mark.parametrize("name", ["resnet20", "wrn_10_1"])
def test_a_batch_of_any_size_is_summed_in_the_memory_of_one_pass(name):
    torch.manual_seed(0)
    model = small.NETWORKS[name](3, 8, 8, 10).eval()
    x, y = torch.randn(48, 3, 8, 8), torch.arange(48) % 10
    gradients = engine(model, chunk=8)
    mechanism = build(option("algorithm", "dp_sgd")).mechanism(View(model, gradients, None, 10, False, None), 0)
    sums, peaks = [], []
    for batch in [Split(x[:8], y[:8])] * 2 + [Split(x, y)]:  # the first compares the gradients with vmap's
        with Held(CPU) as held:
            sums.append(clipped_sum(mechanism, gradients, batch)[0])
        peaks.append(held.peak)
    assert peaks[2] <= 1.01 * peaks[1]
    parts = zip(x.split(8), y.split(8), strict=True)
    total = sum(clipped_sum(mechanism, gradients, Split(*part))[0] for part in parts)
    torch.testing.assert_close(sums[2], total)


def test_a_full_batch_is_copied_once(monkeypatch):
    """Slot by slot, if it is not too large to copy."""
    copied = of_training("dp_sgd", batch_size=400)[2].training - of_training("dp_sgd", batch_size=399)[2].training
    assert copied == images().private.x.nbytes
    monkeypatch.setattr(needs, "COPIED", copied - 1)
    assert of_training("dp_sgd", batch_size=400)[2] == of_training("dp_sgd", batch_size=399)[2]


def test_more_of_anything_takes_more():
    assert of_training("gep", k=40)[2].training > of_training("gep", k=20)[2].training
    assert of_training("gep", chunk=64, k=20)[2].passes == 8 * of_training("gep", chunk=8, k=20)[2].passes


def test_frozen_layers_below_hold_nothing():
    """Their outputs are gone when the next layer has its own."""
    model = torch.nn.Sequential(Scaled(), *(torch.nn.Conv2d(6, 6, 3, padding=1) for _ in range(10))).eval()
    image = 4 * 6 * 32 * 32
    assert needs.bytes_of_outputs(model, images().private) == 11 * image
    model[:10].requires_grad_(False)
    assert needs.bytes_of_outputs(model, images().private) == 3 * image


@pytest.mark.parametrize("name", ["gsd", "frechet", "mmd", "whitening"])
def test_the_memory_of_a_distance_is_what_it_holds(name):
    """Of tensors: what LAPACK holds for itself is in the count alone."""
    changes, y = {"k": 8} if name == "gsd" else {}, torch.arange(2000) % 5
    distance = synthetic.distance(name, m=1000, initialisations=1, **changes)
    if name == "gsd":
        x = torch.randint(256, (2000, 1, 32, 32), dtype=torch.uint8)
        model = torch.nn.Sequential(Scaled(), small.linear(1, 32, 32, 5)).eval()
    else:
        x, model = torch.randn(2000, 400), torch.nn.Linear(400, 5)
    split = Split(x, y)
    counted = needs.held_by(distance, model, split, split)
    with Held(CPU) as held:
        distance.measure(lambda i: model, split, {"public": split}, 5, key="memory")
    assert held.peak / 1.2 < counted < 1.8 * held.peak


@pytest.mark.parametrize(
    ("words", "remedy"),
    [
        (["distance=none"], "lower algorithm.k, if it has one, or training.chunk"),
        (["model=pixels", "algorithm=pillar", "algorithm.k=4", "training=pillar", "distance=none"], "take fewer"),
        (["distance.m=1000000000"], "lower distance.m, or set distance=none"),
    ],
)
@pytest.mark.usefixtures("folder")
def test_what_does_not_fit_is_refused_before_anything_is_computed(words, remedy, monkeypatch, capsys):
    """Neither the distance nor outputs of frozen layers are begun."""
    for begun in ("pair_distance", "prepare"):
        monkeypatch.setattr(run, begun, lambda *given, begun=begun: pytest.fail(begun))
    if "distance=none" in words:
        monkeypatch.setattr(needs, "free", lambda device: 2**10)
    assert main(["run", "+experiment=quickstart", "threads=1", "device=cpu", *words]) == 1
    line = capsys.readouterr().err.splitlines()[-1]
    assert "this run needs about" in line
    assert f"are free on cpu: {remedy}" in line


@pytest.mark.parametrize(
    ("held", "remedy"),
    [((2**50, 0, 0), r"algorithm\.k"), ((0, 2**50, 0), r"distance\.m"), ((0, 0, 2**50), r"training\.chunk")],
)
def test_a_refusal_names_the_setting_to_change(held, remedy):
    with pytest.raises(UserError, match=rf"1048576\.0 GiB of memory and .* free on cpu: .*{remedy}"):
        needs.refuse_memory(needs.Memory(*held), CPU)
    needs.refuse_memory(needs.Memory(0, 0, 0), CPU)
