"""What a run says it will take, against what it took; and what does not fit is refused before it starts."""

import json
import re
import subprocess
import sys
import time
from functools import partial
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import yaml

import pubsel.training.loop as training_loop
from pubsel import algorithms, distances, selection
from pubsel.algorithms import build, noisy_sgd, pillar
from pubsel.algorithms.dp_sgd import DPSGD
from pubsel.cli import main
from pubsel.commands import run
from pubsel.data import Split, Task
from pubsel.distances.gsd import GSD
from pubsel.gradients.factored import LinearGradients
from pubsel.gradients.matrix import PerExampleGradients
from pubsel.messages import UserError
from pubsel.models import small
from pubsel.models.memory import Held
from pubsel.privacy.sampling import Schedule, schedule
from pubsel.settings import CONF
from pubsel.settings.keys import SHARED_GPU
from pubsel.training import duration, estimate, rehearsal
from pubsel.training.loop import Job, fit, noisy_sum, public_stream, view_of
from pubsel.training.rehearsal import rehearse
from tests import synthetic
from tests.synthetic import secret_named
from tests.test_training import training

# What a process comes to hold above what is loaded while it trains, and what it said that would be. The plain run takes
# no estimate, whose rehearsal would leave memory behind.
MEASURE = """
import json, re, sys
import pubsel.commands.run as run
from pubsel.cli import main

def status(key):
    return int(re.search(key + r":\\s+(\\d+) kB", open("/proc/self/status").read())[1]) * 1024

made, begun = run.guarantee, []
def guarantee(*given):
    found = made(*given)
    open("/proc/self/clear_refs", "w").write("5")
    begun.append(status("VmRSS"))
    return found
run.guarantee = guarantee
code = main(sys.argv[1:])
print(json.dumps([code, status("VmHWM") - begun[0]]), file=sys.stderr)
"""


def task(n=400, side=32):
    x, y = torch.randint(256, (n, 6, side, side), dtype=torch.uint8), torch.randint(10, (n,))
    return Task(Split(x, y), Split(x, y), Split(x, y), 10, "accuracy", (0.5,), (0.5,), ())


def setup(name="gep", **changes):
    torch.manual_seed(0)
    problem = task()
    network = torch.nn.Sequential(Float(), small.linear(6, 32, 32, 10)).eval()
    settings = yaml.safe_load((CONF / "algorithm" / f"{name}.yaml").read_text())
    gradients = PerExampleGradients(network)
    view = view_of(network, gradients, problem, "test", Schedule(400, 0.05, 1, 20))
    return gradients, algorithms.build(settings | changes), view, problem


def test_frozen_layers_below_hold_nothing():
    """Their outputs are gone when the next layer has its own."""
    network = torch.nn.Sequential(Float(), *(torch.nn.Conv2d(6, 6, 3, padding=1) for _ in range(10))).eval()
    whole = estimate._activations(network, task().private)
    network[:10].requires_grad_(False)
    image = 4 * 6 * 32 * 32
    assert whole == 11 * image
    assert estimate._activations(network, task().private) == 3 * image


class Float(torch.nn.Module):
    def forward(self, x):
        return x.float() / 255


def values(name):
    """The settings of an algorithm, with those that its file takes from another."""
    found = yaml.safe_load((CONF / "algorithm" / f"{name}.yaml").read_text())
    inherited = [values(base) for base in found.pop("defaults", []) if base != "_self_"]
    return {key: value for one in [*inherited, found] for key, value in one.items()}


def needs(k):
    gradients, algorithm, view, problem = setup(k=k)
    return estimate.memory(gradients, algorithm, view, problem)


KINDS = {
    "cnn": ["pair=digits_digits", "model=digits_cnn", "algorithm=dp_sgd", "training.steps=3",
            "training.batch_size=600"],
    "gep": ["pair=digits_digits", "pair.m=400", "model=digits_cnn", "algorithm=gep_digits", "algorithm.k=200",
            "training.steps=2", "training.batch_size=600"],
    "linear": ["pair=digits_digits", "model=pixels", "algorithm=fully_private", "training=adamix",
               "training.epochs=20"],
}  # fmt: skip


@pytest.mark.slow
@pytest.mark.long
@pytest.mark.parametrize("kind", KINDS)
def test_estimated_memory_is_near_what_a_run_takes(kind, tmp_path):
    """As the system counts it, with what is loaded on the way."""
    words = [*KINDS[kind], "distance=none", "threads=1", "device=cpu"]
    found = []
    for estimated in ("false", "true"):
        command = ["run", *words, f"estimate={estimated}", f"results={tmp_path / estimated}"]
        done = subprocess.run([sys.executable, "-c", MEASURE, *command], capture_output=True, text=True, check=True)
        lines = done.stderr.splitlines()
        code, taken = json.loads(lines[-1])
        assert code == 0
        found.append(taken)
    (said,) = (re.search(r"about ([\d.]+) MiB of memory", line) for line in lines if "of memory beside" in line)
    assert 0.5 < float(said[1]) * 2**20 / found[0] < 2


@pytest.mark.parametrize("name", ["dp_sgd", "gep"])
def test_held_memory_is_what_the_loop_holds(name, tmp_path):
    """Of tensors, in a whole training with batches as they are drawn, against what a rehearsal of one pass found."""
    _, algorithm, view, problem = setup(name, **({"k": 20} if name == "gep" else {}))
    settings = training(batch_size=100, epochs=1, chunk=None)
    plan = schedule(400, settings)
    said = rehearse(view.model, problem, algorithm, plan, settings, True, False).held
    with Held(torch.device("cpu")) as counted:
        nowhere = tmp_path / "c.pt"
        fit(view.model, problem, Job(algorithm, plan, 1.0, settings, "name", nowhere), secret_named())
    assert counted.peak / 1.5 < said < 1.5 * counted.peak


@pytest.mark.parametrize("public", [True, False], ids=["with public data", "without"])
@pytest.mark.parametrize("rate", [1.0, 0.3], ids=["full batches", "Poisson"])
def test_held_memory_of_a_linear_classifier_grows_with_the_batch(rate, public, tmp_path, monkeypatch):
    """The stand-in is smaller than the batch here."""
    monkeypatch.setattr(rehearsal, "STAND_IN", 2**18)
    x, y = torch.randn(4000, 64), torch.randint(5, (4000,))
    problem = Task(Split(x, y), Split(x[:500], y[:500]), Split(x, y), 5, "accuracy", (), (), (), same_task=True)
    algorithm, model = (
        build(values("ngd") | {"pretrain_epochs": 2} if public else values("fully_private")),
        torch.nn.Linear(64, 5),
    )
    settings = training(batch_size=int(4000 * rate), epochs=2, chunk=None, learning_rate=1e-6)
    plan = schedule(4000, settings)
    said = rehearse(model, problem, algorithm, plan, settings, True, False).held
    with Held(torch.device("cpu")) as counted:
        fit(model, problem, Job(algorithm, plan, 1.0, settings, "name", tmp_path / "c.pt"), secret_named())
    assert counted.peak / 1.5 < said < 1.5 * counted.peak


class Clock:
    """Time that passes only by what is done: so much for each example of a batch, and for each step."""

    def __init__(self):
        self.now = 0.0

    def perf_counter(self):
        return self.now


@pytest.mark.parametrize("rate", [1.0, 0.25], ids=["full batches", "Poisson"])
@pytest.mark.parametrize("name", ["dp_sgd", "linear"])
def test_a_step_is_timed_whatever_part_of_its_batch_is_rehearsed(name, rate, monkeypatch):
    """0.1 s and 1 ms an example, and 3 s that the first step takes in addition, which is not counted."""
    clock, mean, done = Clock(), training_loop.noisy_mean, []

    def slow(mechanism, gradients, batch, *given):
        clock.now += 0.1 + 1e-3 * len(batch.x) + 3 * (not done)
        done.append(len(batch.x))
        return mean(mechanism, gradients, batch, *given)

    monkeypatch.setattr(rehearsal, "time", clock)
    monkeypatch.setattr(training_loop, "noisy_mean", slow)
    settings = training(batch_size=int(20_000 * rate), chunk=None)
    plan, algorithm = schedule(20_000, settings), DPSGD("dp_sgd", 1.0)
    if name == "linear":
        x, y = torch.zeros(20_000, 8), torch.randint(5, (20_000,))
        model = torch.nn.Linear(8, 5)
    else:
        x, y = torch.zeros(20_000, 1, 8, 8, dtype=torch.uint8), torch.randint(5, (20_000,))
        model = torch.nn.Sequential(Float(), small.linear(1, 8, 8, 5)).eval()
    problem = Task(Split(x, y), None, Split(x, y), 5, "accuracy", (), (), ())
    before = {key: value.clone() for key, value in model.state_dict().items()}
    needs = rehearse(model, problem, algorithm, plan, settings, True, False)
    assert needs.step == pytest.approx(0.1 + 1e-3 * plan.batch_size, rel=0.1)
    assert sum(done) < 5 * 20_000
    assert all(torch.equal(value, before[key]) for key, value in model.state_dict().items())


@pytest.mark.parametrize("name", ["adamix", "second_phase", "ppgd", "only_public"])
def test_public_training_is_timed_over_all_its_epochs(name, monkeypatch):
    """Ten epochs of 1,000 public examples, at 1 ms an example, which pass through the network once in each."""
    clock = Clock()
    monkeypatch.setattr(rehearsal, "time", clock)
    key = next(key for key in rehearsal.EPOCHS if key in values(name))
    algorithm = build(values(name) | {key: 10})
    x, y = torch.randn(1000, 8), torch.randint(5, (1000,))
    problem = Task(Split(x, y), Split(x, y), Split(x, y), 5, "accuracy", (), (), (), same_task=True)
    model, plan = torch.nn.Linear(8, 5), Schedule(1000, 1.0, 0, 1000)

    def passed(rows):
        clock.now += 1e-3 * rows

    blocks, forward = LinearGradients.blocks, torch.nn.Linear.forward
    monkeypatch.setattr(LinearGradients, "blocks", lambda self, x, *rest: passed(len(x)) or blocks(self, x, *rest))
    monkeypatch.setattr(
        torch.nn.Linear,
        "forward",
        lambda self, x: (passed(len(x)) if torch.is_grad_enabled() else None) or forward(self, x),
    )
    needs = rehearse(model, problem, algorithm, plan, training(chunk=None), True, False)
    assert needs.public == pytest.approx(10.0, rel=0.05)
    assert algorithm == build(values(name) | {key: 10})


def test_what_does_not_fit_is_refused_before_anything_is_computed(tmp_path, monkeypatch, capsys):
    """Neither the distance nor outputs of frozen layers are begun."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HYDRA_FULL_ERROR", "0")
    monkeypatch.setattr(sys, "argv", sys.argv)
    for begun in ("pair_distance", "prepare"):
        monkeypatch.setattr(run, begun, lambda *given, begun=begun: pytest.fail(begun))
    monkeypatch.setattr(estimate, "free", lambda device: 2**10)
    words = ["run", "+experiment=quickstart", "threads=1", "device=cpu"]
    for more in ([], ["model=pixels", "algorithm=pillar", "algorithm.k=4", "training=pillar"]):
        assert main([*words, *more]) == 1
        said = capsys.readouterr().err.splitlines()[-1]
        assert "this run needs about" in said
        assert "are free on cpu: lower" in said or "are free on cpu: take" in said


def test_a_distance_that_does_not_fit_is_refused(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HYDRA_FULL_ERROR", "0")
    monkeypatch.setattr(sys, "argv", sys.argv)
    monkeypatch.setattr(run, "pair_distance", lambda *given: pytest.fail("distance"))
    assert main(["run", "+experiment=quickstart", "threads=1", "distance.m=1000000000"]) == 1
    assert "lower distance.m, or set distance=none" in capsys.readouterr().err


def test_what_is_told():
    needs = rehearsal.Needs(0, 0.5, 30.0, 0.9)
    said = "  about 1.0 GiB of memory beside the data"
    public = ", 30 s of training on public data"
    assert estimate.told(2**30, needs, 1000, {"PCA": 2.0}) == f"{said}, 0.5 s a step: 8 min of training{public}"
    before = {"the distance": 200.0, "PCA": 0.5, "frozen layers": 3.0}
    assert estimate.told(2**30, needs, 0, before) == f"{said}, 3 min of the distance, 3 s of frozen layers{public}"
    assert estimate.told(2**30, needs, 2000, {}) == f"{said}, 0.5 s a step: 17 min of training"


# Small pieces


@pytest.mark.parametrize("power", [1, 2, 3])
def test_a_piece_stands_for_the_whole(power, monkeypatch):
    """1 us times the size to a power, 3 s for what is loaded at first, and 10 s to make ready, which do not count."""
    clock, sizes = Clock(), []
    monkeypatch.setattr(rehearsal, "time", clock)

    def piece(size):
        clock.now += 10

        def work():
            sizes.append(size)
            clock.now += 1e-6 * size**power + 3 * (len(sizes) == 1)

        return work

    assert rehearsal.foreseen(piece, 10**7, power, least=3) == pytest.approx(1e-6 * 10 ** (7 * power))
    assert sizes[:2] == [3, 3]
    assert 1e-6 * sizes[-1] ** power < 2 * rehearsal.ENOUGH_SECONDS
    assert rehearsal.foreseen(piece, 2, power, least=3) == pytest.approx(1e-6 * 2**power)


def measurement(name, m=1000, d=64, k=8, initialisations=3):
    """Of features, or of gradients of a linear network at images."""
    distance = synthetic.distance(name, m=m, initialisations=initialisations, **({"k": k} if name == "gsd" else {}))
    y = torch.arange(2000) % 5
    if name == "gsd":
        x = torch.randint(256, (2000, 1, d, d), dtype=torch.uint8)
        model = torch.nn.Sequential(Float(), small.linear(1, d, d, 5)).eval()
    else:
        x, model = torch.randn(2000, d), torch.nn.Linear(d, 5)
    return duration.Measurement(distance, model, Split(x, y), Split(x, y), 5)


COUNTED = {  # what takes time in a distance: examples or entries that pass through, at so many a second
    "gsd": ((duration, "gradients_of"), lambda engine, distance, x, y: len(x)),
    "frechet": ((duration.frechet, "frechet"), lambda a, b: a.root.numel() * len(b.root)),
    "mmd": ((duration.mmd, "mmd"), lambda x, y, bandwidth: len(x) * len(y) * x.shape[1]),
    "task2vec": ((duration, "fit_head"), lambda z, y: len(z)),
    "otdd": ((duration.otdd, "otdd"), lambda a, b, exact: len(a.x) ** duration.TRANSPORT),
}


@pytest.mark.parametrize("name", COUNTED)
def test_the_time_of_a_distance_is_told_from_a_piece_of_it(name, monkeypatch):
    """What it counts takes 1 s for the whole, and is done for both sides, or between them, in each initialisation."""
    clock, this, counts = Clock(), measurement(name), []
    monkeypatch.setattr(rehearsal, "time", clock)
    (module, called), count = COUNTED[name]
    do = getattr(module, called)
    m, d = this.distance.m, 64
    whole = {"gsd": m, "task2vec": m, "otdd": m**duration.TRANSPORT, "mmd": m * m * d, "frechet": d * d * d}[name]

    def slow(*given):
        counts.append(count(*given))
        clock.now += counts[-1] / whole
        return do(*given)

    monkeypatch.setattr(module, called, slow)
    sides = {"gsd": (1, 1), "task2vec": (1, 1)}.get(name, (0, 1))
    assert duration.seconds(this) == pytest.approx(3 * sum(sides), rel=0.05)
    assert duration.seconds(this, candidates=4) == pytest.approx(3 * (sides[0] + 4 * sides[1]), rel=0.05)
    assert min(counts) < whole / 2
    assert duration.seconds(measurement(name, initialisations=6)) == pytest.approx(6 * sum(sides), rel=0.05)


@pytest.mark.parametrize("name", ["gsd", "frechet", "mmd", "whitening"])
def test_the_memory_of_a_distance_is_what_it_holds(name):
    """Of tensors: what LAPACK holds for itself is told, and not counted."""
    this = measurement(name, m=1000, d=32 if name == "gsd" else 400)
    told = duration.held(this)
    with Held(torch.device("cpu")) as counted:
        this.distance.measure(lambda i: this.model, this.private, {"public": this.public}, 5, key="memory")
    assert counted.peak / 1.2 < told < 1.8 * counted.peak


def test_a_distance_that_has_no_use_for_the_examples_is_told_by_its_measurement():
    this = measurement("otdd")
    assert duration.seconds(this._replace(public=this.public._replace(y=torch.zeros(2000, dtype=torch.long)))) == 0


@pytest.mark.parametrize("name", ["pillar", "noisy_sgd", "dp_pca", "jl"])
def test_the_time_of_pca_is_told_from_one_at_a_smaller_scale(name, monkeypatch):
    """Products take 8 s for the whole: of standardised public features, or of private ones."""
    clock, algorithm = Clock(), build(values(name) | {"k": 40})
    monkeypatch.setattr(rehearsal, "time", clock)
    private, public, d = 4000, 3000, 1024
    task = Task(
        *(Split(torch.zeros(n, d), torch.zeros(n, dtype=torch.long)) for n in (private, public, 100)), 2, "accuracy",
        (), (), (),
    )  # fmt: skip
    rows = {"pillar": public, "noisy_sgd": public, "dp_pca": private, "jl": 0}[name]
    widths = []
    if name == "dp_pca":
        summed = rehearsal.noisy_sum
        monkeypatch.setattr(rehearsal, "noisy_sum", lambda made, x, *rest: passed(*x.shape) or summed(made, x, *rest))
    elif name != "jl":
        projected = pillar.public_pca
        for module in (pillar, noisy_sgd):
            monkeypatch.setattr(module, "public_pca", lambda x, k: passed(*x.shape) or projected(x, k))

    def passed(n, width):
        widths.append(width)
        clock.now += 8 * n * width**2 / (rows * d**2)

    assert rehearsal.freezing(algorithm, task) == pytest.approx(8 if rows else 0, rel=0.05)
    assert not rows or max(widths) < d
    assert rehearsal.freezing(DPSGD("dp_sgd", 1.0), task) == 0
    assert algorithm == build(values(name) | {"k": 40})


@pytest.mark.parametrize("name", ["pillar", "noisy_sgd"])
def test_the_time_of_pca_of_wide_features_is_told_from_one_that_is_computed_as_theirs_is(name, monkeypatch):
    """The covariance of fewer features is decomposed, which for 15,552 would take minutes in place of seconds."""
    d, widths, fit = 4 * pillar.WIDE, [], pillar.PCA.fit
    monkeypatch.setattr(pillar.PCA, "fit", lambda self, x: widths.append((self.svd_solver, x.shape)) or fit(self, x))
    task = Task(*(Split(torch.zeros(n, d), torch.arange(n) % 2) for n in (200, 160, 10)), 2, "accuracy", (), (), ())
    told = rehearsal.freezing(build(values(name) | {"k": 8}), task)
    assert told > 0
    assert widths
    assert all(solver == "arpack" and shape[1] >= pillar.WIDE for solver, shape in widths)


def test_a_loop_of_its_own_is_timed_by_a_few_of_its_steps(monkeypatch):
    clock, algorithm = Clock(), build(values("noisy_sgd") | {"steps": 10**6})
    monkeypatch.setattr(rehearsal, "time", clock)
    draw, done = noisy_sgd.base_run, []

    def slow(signed, loss, deviation, steps, source):
        clock.now += 1e-3 * steps
        done.append(steps)
        return draw(signed, loss, deviation, steps, source)

    monkeypatch.setattr(noisy_sgd, "base_run", slow)
    x = torch.zeros(500, 10)
    task = Task(*(Split(x, torch.arange(500) % 2) for _ in range(3)), 2, "accuracy", (), (), ())
    needs = rehearse(torch.nn.Linear(10, 2), task, algorithm, Schedule(500, 1.0, 0, 500), training(), True, False)
    assert needs.step == pytest.approx(1e-3)
    assert sum(done) < 3000
    assert algorithm.all_steps == 3 * 10**6
    assert needs.held > 3 * 8 * 500 * 10


def told_and_work(name):
    """What was told of a piece of work, and the work."""
    if name in COUNTED:
        sizes = {"gsd": (1500, 32), "task2vec": (4000, 500), "frechet": (2500, 1500), "mmd": (3000, 500)}
        this = measurement(name, *sizes.get(name, (2500, 300)), initialisations=1)
        x, y = torch.randn(5000, *this.public.x.shape[1:]), torch.arange(5000) % 5
        x = (x + y.view(-1, *[1] * (x.dim() - 1)) / 2).clamp(-2, 2)
        split = Split(x if name != "gsd" else (x * 50 + 100).to(torch.uint8), y)
        this = this._replace(private=split, public=split._replace(x=split.x.flip(0)))
        work = partial(this.distance.measure, lambda i: this.model, split, {"public": this.public}, 5, key="told")
        return duration.seconds(this), work

    if name == "noisy_sgd":
        algorithm = build(values(name) | {"steps": 40_000})
        split = Split(torch.randn(3000, 10), torch.arange(3000) % 2)
        told = algorithm.all_steps * rehearsal.solving(algorithm, split, secure=False)
        algorithm.account(3000, 1.0, 1e-5)
        return told, lambda: algorithm.solve(split, 1.0, 1e-5, np.random.default_rng(0))

    if name in ("pillar", "dp_pca"):
        algorithm = build(values(name) | {"k": 40})
        split = Split(torch.randn(10_000, 1500), torch.arange(10_000) % 5)
        told = rehearsal.freezing(algorithm, Task(split, split, split, 5, "accuracy", (), (), ()))

        def work():
            frozen = algorithm.frozen(split, 1500, public_stream("told"))
            if name == "dp_pca":
                frozen = noisy_sum(frozen, split.x, 1.0, np.random.default_rng(0))
            frozen(split.x)

        return told, work

    algorithm, problem = build(values(name)), task(n=2000)._replace(same_task=True)
    network = torch.nn.Sequential(Float(), small.linear(6, 32, 32, 10)).eval()
    plan = Schedule(2000, 0.05, 1, 20)
    told = rehearse(network, problem, algorithm, plan, training(chunk=None), True, False).public
    view = view_of(network, PerExampleGradients(network), problem, "told", plan)
    return told, lambda: algorithm.pretrain(view)


@pytest.mark.slow
@pytest.mark.long
@pytest.mark.parametrize("name", [*COUNTED, "noisy_sgd", "pillar", "dp_pca", "second_phase"])
def test_the_time_that_is_told_is_what_the_work_takes(name, monkeypatch):
    """In seconds of one processor core, which others on the machine leave alone."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    monkeypatch.setattr(rehearsal, "time", SimpleNamespace(perf_counter=time.thread_time))
    try:
        told, work = told_and_work(name)
        began = time.thread_time()
        work()
        taken = time.thread_time() - began
    finally:
        torch.set_num_threads(threads)
    data_decides = name in ("task2vec", "otdd")
    factor = 2 if data_decides else 1.5
    print(f"{name}: told {told:.2f} s, took {taken:.2f} s")
    assert taken / factor < told < factor * taken


def test_a_distance_that_was_measured_takes_nothing(tmp_path, monkeypatch, capsys):
    """It is told before it is measured, and is read by the next run."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", sys.argv)
    asked = []
    monkeypatch.setattr(run.duration, "seconds", lambda this: asked.append(this.distance.name) or 70.0)
    words = ["run", "pair=digits_digits", "model=pixels", "algorithm=pillar", "algorithm.k=4", "training=pillar"]
    words += ["training.epochs=1", "distance=frechet", "distance.m=100", "threads=1", "device=cpu"]
    lines = []
    for seed in (0, 1):
        assert main([*words, f"seed={seed}"]) == 0
        lines.append(capsys.readouterr().err)
    assert asked == ["frechet"]
    assert lines[0].index("70 s of the distance") < lines[0].index("initialisation 0")
    assert "of the distance" not in lines[1]
    assert "initialisation" not in lines[1]


def test_noisy_sgd_is_told_and_refused(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HYDRA_FULL_ERROR", "0")
    monkeypatch.setattr(sys, "argv", sys.argv)
    rng = torch.Generator().manual_seed(0)
    x, y = torch.randint(256, (300, 8, 8), dtype=torch.uint8, generator=rng), torch.arange(300) % 2
    np.savez(
        "two.npz", train_images=x[:200], train_labels=y[:200], test_images=x[200:], test_labels=y[200:]
    )  # fmt: skip
    words = ["run", "pair.private=two.npz", "pair.public=digits", "pair.m=100", "model=pixels", "algorithm=noisy_sgd"]
    words += ["algorithm.k=4", "algorithm.steps=400", "distance=none", "threads=1", "device=cpu", "pair.overlap=drop"]
    monkeypatch.setattr(estimate, "free", lambda device: 2**10)
    assert main(words) == 1
    assert "this run needs about" in capsys.readouterr().err.splitlines()[-1]
    monkeypatch.undo()
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", sys.argv)
    assert main(words) == 0
    lines = capsys.readouterr().err
    assert re.search(r"1200 steps, sampling rate \S+, noise multiplier \S+", lines)
    assert re.search(r"memory beside the data, \S+ s a step: \d+ s of training", lines)


def test_more_of_anything_takes_more():
    assert needs(40).training > needs(20).training
    small_passes, large_passes = (
        estimate.memory(PerExampleGradients(view.model, chunk), algorithm, view, problem).passes
        for chunk in (8, 64)
        for _, algorithm, view, problem in [setup(k=20)]
    )
    assert large_passes == 8 * small_passes


@pytest.mark.parametrize(
    ("held", "remedy"),
    [((2**50, 0, 0), r"algorithm\.k"), ((0, 2**50, 0), r"distance\.m"), ((0, 0, 2**50), r"training\.chunk")],
)
def test_what_cannot_fit_is_refused_with_the_setting_to_change(held, remedy):
    with pytest.raises(UserError, match=rf"1048576\.0 GiB of memory and .* free on cpu.*{remedy}"):
        estimate.refuse(estimate.Memory(*held), torch.device("cpu"))
    estimate.refuse(estimate.Memory(0, 0, 0), torch.device("cpu"))


def test_a_cell_that_shares_a_gpu_waits_for_its_memory(monkeypatch, capsys):
    """On a GPU that is made up: 8 GiB, of which the others leave 3, then 5, then 6."""
    left, slept, gpu = [3, 5, 6], [], torch.device("cuda")
    monkeypatch.setattr(estimate, "total", lambda device: 8 * 2**30)
    monkeypatch.setattr(estimate, "free", lambda device: left[0] * 2**30)
    monkeypatch.setattr(estimate, "taken", lambda size, device: size <= left[0] * 2**30)
    monkeypatch.setattr(estimate.time, "sleep", lambda seconds: slept.append((seconds, left.pop(0))))
    needed = estimate.Memory(2 * 2**30, 11 * 2**29, 2**29)
    with pytest.raises(UserError, match=r"5\.5 GiB of memory and 3\.0 GiB are free"):
        estimate.claim(needed, gpu)
    monkeypatch.setenv(SHARED_GPU, "1")
    estimate.claim(needed, gpu)
    assert (left, len(slept)) == ([6], 2)
    assert capsys.readouterr().err == "  waits for 5.5 GiB of cuda, where 3.0 GiB are free\n"
    with pytest.raises(UserError, match=r"6\.5 GiB of the 8\.0 GiB of cuda.*per_gpu=1"):
        estimate.claim(needed._replace(distance=13 * 2**29), gpu)
    with pytest.raises(UserError, match="free on cpu"):
        estimate.claim(needed._replace(distance=13 * 2**29), torch.device("cpu"))


@pytest.mark.gpu(real=True)
def test_memory_that_is_taken_stays_with_the_process():
    gpu = torch.device("cuda")
    assert not estimate.taken(2 * estimate.total(gpu), gpu)
    before = estimate.free(gpu)
    assert estimate.taken(2**30, gpu)
    assert estimate.free(gpu) <= before - 2**30
    torch.cuda.empty_cache()


@pytest.mark.parametrize("name", ["gep", "dp_sgd", "non_private"])
def test_a_step_is_profiled_without_private_examples(name, tmp_path):
    changes = {"k": 20} if name == "gep" else {}
    gradients, algorithm, view, problem = setup(name, **changes)
    private = Split(problem.private.x, problem.private.y)
    before = private.x.clone()
    trace = tmp_path / "trace.json"
    estimate.profile_step(gradients, algorithm, view, private, schedule(400, training(batch_size=100)), trace)
    assert "aten::" in trace.read_text()
    table = (tmp_path / "costliest.txt").read_text().splitlines()
    assert len([line for line in table if "%" in line and "Name" not in line]) == 5
    assert torch.equal(private.x, before)
    assert rehearsal.random_like(private, 50, 10).x.shape == (50, 6, 32, 32)


def test_the_time_of_a_private_choice_is_told_before_and_reads_no_private_example(tmp_path, capsys):
    """More candidates, examples and networks take in proportion; nobody can time it without running it."""
    noise = torch.Generator().manual_seed(0)
    public = Split(torch.rand(300, 1, 8, 8, generator=noise), torch.arange(300) % 10)
    private = Split(torch.full((50, 1, 8, 8), torch.nan), torch.zeros(50, dtype=torch.long))
    values = yaml.safe_load((CONF / "distance" / "gsd.yaml").read_text()) | {"m": 200, "k": 4, "initialisations": 2}
    distance = distances.build(values)
    assert isinstance(distance, GSD)

    def build(i):
        return torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(64, 10)).eval()

    asked = []
    sets = selection.Comparison(build, private, {"a": public, "b": public}, 10, "key", lambda *what: asked.append(what))
    seconds = duration.of_choice(distance, 256, sets, 100)
    assert 0 < seconds < 100
    assert asked == []  # nothing secret was drawn for it
