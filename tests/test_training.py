"""The loop: what is sampled, what is added, and that a killed run ends like an uninterrupted one."""

import json
from itertools import count, pairwise
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from scipy import stats

from pubsel.algorithms import Mechanism, View, added
from pubsel.algorithms.dp_sgd import DPSGD, NOISE
from pubsel.algorithms.non_private import NonPrivate
from pubsel.cell import Cell
from pubsel.cli import main
from pubsel.commands.audit import Audited, _planned
from pubsel.data import Split, Task
from pubsel.gradients.matrix import PerExampleGradients, gpu_precision
from pubsel.messages import UsageError, UserError
from pubsel.models import small
from pubsel.privacy.randomness import Secret, SystemEntropy, stream
from pubsel.privacy.sampling import poisson_sample, schedule
from pubsel.rules import canonical
from pubsel.training import loop
from pubsel.training.loop import Job, fit, noisy_mean
from tests.forked import Command
from tests.made import Scaled, build, checked, training
from tests.synthetic import secret_named

COMMAND = """
run +experiment=quickstart training.epochs=5 training.batch_size=1297 distance=none threads=1
""".split()


def task(n=50):
    torch.manual_seed(0)
    x, y = torch.randint(256, (n, 1, 8, 8), dtype=torch.uint8), torch.randint(3, (n,))
    return Task(Split(x, y), None, Split(x, y), 3, "accuracy", (0.5,), (0.5,), ())


def network(dtype=torch.float64):
    torch.manual_seed(1)
    return torch.nn.Sequential(Scaled(dtype), small.linear(1, 8, 8, 3).to(dtype)).eval()


def job_of(settings, folder, noise, algorithm=DPSGD("dp_sgd", 1.0), n=50):  # noqa: B008 (immutable)
    return Job(algorithm, schedule(n, settings), noise, settings, "name", folder / "checkpoint.pt")


def train(folder, algorithm=None, noise=0.0, secure=False, key="key", report=lambda p: None, **changes):
    model, settings = network(), training(**changes)
    folder.mkdir(exist_ok=True)
    job = job_of(settings, folder, noise, algorithm or DPSGD("dp_sgd", 1.0))
    fit(model, task(), job, secret_named(key, secure), report)
    return torch.cat([p.detach().flatten() for p in model.parameters()])


@pytest.mark.parametrize(("batch", "momentum"), [(400, 0.9), (400, 0.0), (40, 0.9)])
@pytest.mark.parametrize("noise", [30.0, 80.0])
def test_a_rate_that_follows_from_the_noise_leaves_the_same_noise_in_a_logit(tmp_path, batch, momentum, noise):
    """No row counts, since none is finite: all that moves the weights is noise."""
    private = Split(torch.full((400, 30), torch.nan), torch.zeros(400, dtype=torch.long))
    problem = Task(private, None, private, 10, "accuracy", (0.5,), (0.5,), ())
    model = torch.nn.Linear(30, 10)
    for parameter in model.parameters():
        torch.nn.init.zeros_(parameter)
    settings = training(steps=60, batch_size=batch, momentum=momentum, learning_rate=None, milestones=[])
    algorithm = DPSGD("dp_sgd", 1.0, unit=True)
    fit(model, problem, job_of(settings, tmp_path, noise, algorithm, 400), secret_named())

    rows = torch.nn.functional.normalize(torch.randn(5000, 30, generator=torch.Generator().manual_seed(0)), dim=1)
    spread = float(model(rows).detach().square().mean().sqrt())
    kept = np.sqrt(np.mean([(1 - momentum**t) ** 2 for t in range(1, 61)]))  # the start of the momentum
    assert spread == pytest.approx(NOISE * kept, rel=0.3)  # of 310 random weights


@pytest.mark.parametrize(("alike", "momentum"), [(1.0, 0.0), (0.8, 0.9), (0.0, 0.9)])
def test_without_noise_a_rate_that_follows_is_what_gradient_descent_bears(tmp_path, alike, momentum):
    """Rows that all lie in one direction have the largest curvature, and their labels cannot be told apart."""
    torch.manual_seed(0)
    x = torch.nn.functional.normalize(torch.randn(64, 8), dim=1) * (1 - alike)
    x[:, 0] += alike
    x = torch.nn.functional.normalize(x, dim=1)
    y = torch.arange(64) % 2 if alike == 1 else (x[:, 1] > 0).long()
    model = torch.nn.Linear(8, 2)
    torch.nn.init.constant_(model.weight, 3.0)
    torch.nn.init.constant_(model.weight[0], -3.0)
    settings = training(steps=300, batch_size=64, momentum=momentum, learning_rate=None, milestones=[])
    job = job_of(settings, tmp_path, 0.0, DPSGD("dp_sgd", 100.0, unit=True), 64)
    fit(model, Task(Split(x, y), None, Split(x, y), 2, "accuracy", (), (), ()), job, secret_named())
    assert torch.nn.functional.cross_entropy(model(x), y) < (0.7 if alike == 1 else 0.4)  # log 2 is 0.69


HEAD = ["run", "pair=digits_digits", "training=head", "training.steps=5", "distance=none", "threads=1"]


@pytest.mark.parametrize(
    "words",
    [
        ["model=pixels", "algorithm=dp_sgd"],  # rows of any norm
        ["model=digits_cnn", "algorithm=dp_sgd_clip1"],
        ["model=pixels", "algorithm=gep_digits"],
        ["model=pixels", "algorithm=dp_sgd_clip1", "training.optimizer=adam"],
        ["model=pixels", "algorithm=dp_sgd_clip1", "training.inverse_decay=0.1"],
    ],
)
def test_a_rate_that_cannot_follow_from_the_noise_is_refused(words, tmp_path, capsys):
    assert main([*HEAD, *words, f"results={tmp_path}"]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("pubsel: training.learning_rate=null is for a linear classifier on rows of norm 1")


def test_the_record_says_which_rate_followed(tmp_path):
    for words in (["algorithm=dp_sgd_clip1"], ["algorithm=pillar", "algorithm.k=5"]):
        assert main([*HEAD, "model=pixels", *words, f"results={tmp_path}", "epsilon=2"]) == 0
    for path in (tmp_path / "runs").glob("*/result.json"):
        record = json.loads(path.read_text())
        assert record["settings"]["training"]["learning_rate"] is None
        noise = record["privacy"]["noise_multiplier"] * np.sqrt(2 * 5) * 10 / record["private_examples"]
        assert record["derived"] == {"learning_rate": pytest.approx(min(NOISE / noise, 2 * 1.9 / 1.1))}


def test_the_control_of_an_audit_has_the_rate_of_the_run(tmp_path):
    """A third of its noise, and not three times its rate too."""
    settings = checked("audit", *HEAD[1:], "model=pixels", "algorithm=dp_sgd_clip1", "epsilon=2")
    audited = Audited(Cell.of(canonical(settings)), settings.audit, task(), tmp_path)
    planned, control = (_planned(audited, "run", audited.task, weaker)[0] for weaker in (False, True))
    assert control.rate == planned.rate > 0


@pytest.mark.parametrize(
    ("n", "changes", "steps"),
    [
        (60_000, {"epochs": 50, "batch_size": 1000}, 3000),
        (50, {"epochs": 2.96}, 15),  # of 14.8
        (50, {"epochs": 2.84}, 14),  # of 14.2
        (1297, {"epochs": 10, "batch_size": 130}, 100),  # of 99.8
        (40, {"epochs": 2.6, "batch_size": 1000}, 3),  # full batches
        (50, {"epochs": 0.01}, 1),
        (50, {"epochs": 2, "steps": 7}, 7),
    ],
)
def test_the_number_of_steps_is_the_nearest_one_and_one_at_least(n, changes, steps):
    settings = training(**changes)
    batch = min(n, settings.batch_size)
    assert schedule(n, settings) == (n, batch / n, steps, batch)


def test_each_example_is_sampled_independently_at_the_rate():
    """Sizes are binomial, single and pairwise inclusions at the rate; the same test rejects fixed batches."""
    n, rate, draws = 60, 0.1, 20_000
    hits = np.zeros((draws, n), dtype=bool)
    for i in range(draws):
        hits[i, poisson_sample(stream("test", "sample", i), n, rate)] = True
    sizes = np.bincount(hits.sum(1), minlength=n + 1)[:16]
    want = stats.binom.pmf(np.arange(16), n, rate) * draws
    assert stats.chisquare(sizes, want * sizes.sum() / want.sum()).pvalue > 1e-6
    assert np.abs(hits.mean(0) - rate).max() < 5 * np.sqrt(rate * 0.9 / draws)
    pairs = (hits[:, 0] & hits[:, 1]).mean()
    assert abs(pairs - rate**2) < 5 * np.sqrt(rate**2 / draws)
    fixed = np.full(draws, n * rate, dtype=int)
    assert stats.chisquare(np.bincount(fixed, minlength=16)[:16] + 1, want + 1, sum_check=False).pvalue < 1e-6


def test_an_example_is_taken_if_its_number_is_below_the_rate():
    class Source:
        def random(self, n):
            return np.array([0.0, 0.1, np.nextafter(0.1, 0), 0.2])

    assert poisson_sample(Source(), 4, 0.1).tolist() == [0, 2]
    assert poisson_sample(Source(), 4, 1.0).tolist() == [0, 1, 2, 3]


@pytest.mark.parametrize("noise", [0.01, 0.5, 1.0])
def test_little_noise_is_noise(noise):
    gradients = PerExampleGradients(network(), 4)
    mechanism = DPSGD("dp_sgd", 1.0).mechanism(_view(gradients), 0)
    empty = Split(task().private.x[:0], task().private.y[:0])
    values, _ = noisy_mean(mechanism, gradients, empty, noise, stream("test", "noise"), 1)
    assert float(values.std()) == pytest.approx(noise, rel=0.1)


@pytest.mark.parametrize("batch_size", [45, 10], ids=["large batches", "small batches"])
@pytest.mark.parametrize("secure", [True, False])
def test_every_batch_is_sampled_and_sample_and_noise_come_from_one_kind_of_source(
    secure, batch_size, tmp_path, monkeypatch
):
    """At a high rate too; with `secure` both from the operating system."""
    seen, call = [], Secret.__call__

    def source(self, purpose, step=0):
        seen.append((purpose, step))
        found = call(self, purpose, step)
        assert type(found) is (SystemEntropy if secure else np.random.Generator)
        return found

    monkeypatch.setattr(Secret, "__call__", source)
    train(tmp_path, noise=1.0, secure=secure, batch_size=batch_size)
    steps = schedule(50, training(batch_size=batch_size)).steps
    assert seen == [(purpose, step) for step in range(steps) for purpose in ("sample", "noise")]


def test_rates_fall_at_the_nearest_step_and_epochs_end_at_the_nearest(tmp_path, monkeypatch):
    """Milestones at 0.5 of 15 steps (7.5, to the even 8) and 0.77 (11.55); epochs of 2.94 steps, of 17 in 50."""
    settings, seen = training(steps=15, milestones=[0.5, 0.77]), []
    optimizer, decay = loop.optimizer_of([torch.nn.Parameter(torch.zeros(1))], job_of(settings, tmp_path, 0.0))
    rates = [round(decay.get_last_lr()[0], 6) for _ in range(15) if optimizer.step() or decay.step() or True]
    assert rates == [0.1] * 7 + [0.01] * 4 + [0.001] * 4

    monkeypatch.setattr(loop, "FIRST_REPORT", 1e9)
    train(tmp_path, steps=9, batch_size=17, report=seen.append)
    assert [p.step for p in seen] == [3, 6, 9]


def test_the_first_report_comes_within_two_seconds_however_long_an_epoch_is(tmp_path, monkeypatch):
    """The next ones after at least twice the time, and one at the end."""
    clock, seen = count(), []
    monkeypatch.setattr(loop, "time", SimpleNamespace(monotonic=lambda: next(clock) / 10))
    train(tmp_path, steps=100, batch_size=1, report=seen.append)
    seconds = [p.seconds for p in seen if p.step % 50]
    assert 1 <= seconds[0] <= 2
    assert all(later >= 2 * earlier for earlier, later in pairwise(seconds))
    assert [p.step for p in seen if p.step % 50 == 0] == [50, 100]


@pytest.mark.parametrize("scale", [1.0, 1.02, 0.98])
def test_noise_has_the_declared_scale(scale):
    """std = noise multiplier * sensitivity / batch size; the same test rejects 2 % more or less."""
    gradients = PerExampleGradients(network(), 4)
    mechanism = DPSGD("dp_sgd", 1.0).mechanism(_view(gradients), 0)._replace(sensitivity=3.0 * scale)
    empty = Split(task().private.x[:0], task().private.y[:0])
    sources = [stream("test", "noise", i) for i in range(600)]
    values = torch.cat([noisy_mean(mechanism, gradients, empty, 2.0, source, 10)[0] for source in sources])
    total = float((values / (2.0 * 3.0 / 10)).square().sum())
    p = 2 * min(stats.chi2.cdf(total, len(values)), stats.chi2.sf(total, len(values)))
    assert (p > 1e-6) == (scale == 1.0)


def _view(gradients):
    return View(gradients.model, gradients, None, 3, False, lambda purpose, step: stream("k", purpose, step))


def test_every_step_draws_its_own_sample_and_noise_and_divides_by_the_batch_size(tmp_path, monkeypatch):
    """Weights written out from the streams of each step: sample, clipped gradients, noise, fixed denominator, SGD."""
    calls = []

    def spy(mechanism, gradients, batch, noise_multiplier, source, batch_size, processes):
        before = source.bit_generator.state
        calls.append((len(batch.x), noise_multiplier, batch_size, before["state"]["state"].tolist()))
        return noisy_mean(mechanism, gradients, batch, noise_multiplier, source, batch_size, processes)

    monkeypatch.setattr("pubsel.training.loop.noisy_mean", spy)
    found = train(tmp_path, noise=1.5, momentum=0.0, milestones=[])

    model, problem = network(), task()
    parameters = list(model.parameters())
    for step in range(10):
        chosen = secret_named()("sample", step).random(50) < 0.2
        total = torch.zeros(sum(p.numel() for p in parameters), dtype=torch.float64)
        for i in np.flatnonzero(chosen):
            model.zero_grad()
            logits = model(problem.private.x[i : i + 1])
            torch.nn.functional.cross_entropy(logits, problem.private.y[i : i + 1]).backward()
            row = torch.cat([p.grad.flatten() for p in parameters])
            total += row / max(1.0, float(row.norm()))
        total += 1.5 * 1.001 * torch.from_numpy(secret_named()("noise", step).standard_normal(len(total)))
        with torch.no_grad():
            for p, part in zip(parameters, total.split([p.numel() for p in parameters]), strict=True):
                p -= 0.1 * part.view_as(p) / 10
        assert calls[step][:3] == (chosen.sum(), 1.5, 10)
    torch.testing.assert_close(found, torch.cat([p.detach().flatten() for p in parameters]), rtol=1e-4, atol=1e-5)
    assert len({tuple(call[3]) for call in calls}) == 10
    assert len({call[0] for call in calls}) > 1  # sizes vary, the denominator does not


def test_what_an_algorithm_draws_depends_on_no_private_example(tmp_path):
    """The key of sample and noise is computed from private data; it must not reach the basis or the public labels."""
    drawn = []

    class Watching(DPSGD):
        def mechanism(self, view, step):
            drawn.append(float(view.random("basis", step).random()))
            return super().mechanism(view, step)

    for key in ("data", "other data"):
        train(tmp_path / key, Watching("dp_sgd", 1.0), noise=1.0, key=key)
    assert drawn[:10] == drawn[10:]
    assert len(set(drawn)) == 10


def test_empty_batches_are_steps_too(tmp_path):
    """At a tiny rate most batches are empty: noise is still added, the weights stay finite."""
    seen = []
    weights = train(tmp_path, noise=1.0, epochs=0.4, batch_size=1, report=seen.append)
    assert torch.isfinite(weights).all()
    assert seen[-1].step == 20


def test_chunks_do_not_change_the_result(tmp_path):
    torch.testing.assert_close(*(train(tmp_path / f"{chunk}", noise=1.0, chunk=chunk) for chunk in (1, 50)))


def test_without_noise_and_clipping_it_is_sgd(tmp_path):
    """Full batches, no privacy: the loop equals torch's SGD on the mean loss, momentum, decay and schedule included."""
    found = train(tmp_path, NonPrivate("non_private"), batch_size=50, epochs=6, weight_decay=0.01)
    model, problem = network(), task()
    optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9, weight_decay=0.01)
    for step in range(6):
        optimizer.param_groups[0]["lr"] = 0.1 if step < 3 else 0.01
        optimizer.zero_grad()
        torch.nn.functional.cross_entropy(model(problem.private.x), problem.private.y).backward()
        optimizer.step()
    torch.testing.assert_close(found, torch.cat([p.detach().flatten() for p in model.parameters()]))


def test_sgd_is_that_of_torch_bit_for_bit():
    """Its state too, as a checkpoint has it, also one that it goes on from."""
    states = []
    for optimizer in (torch.optim.SGD, loop.SGD):
        weights = torch.nn.Parameter(torch.arange(1.0, 4.0))
        made = optimizer([weights], 0.1, 0.9, weight_decay=0.01)
        for step in range(4):
            weights.grad = torch.full((3,), 0.3 / (step + 1))
            made.step()
            again = optimizer([weights], 0.5)
            again.load_state_dict(made.state_dict())
            made = again
        states.append((weights.tolist(), str(made.state_dict())))
    assert states[0] == states[1]
    assert weights.requires_grad


def stop_at_5(progress):
    if progress.step == 5:
        raise KeyboardInterrupt


def test_a_run_stopped_at_a_checkpoint_goes_on_bit_for_bit(tmp_path):
    parts = tmp_path / "parts"
    want = train(tmp_path / "whole", noise=1.0, checkpoint_seconds=0)
    with pytest.raises(KeyboardInterrupt):
        train(parts, noise=1.0, checkpoint_seconds=0, report=stop_at_5)
    assert torch.load(parts / "checkpoint.pt")["step"] == 5
    assert torch.equal(train(parts, noise=1.0, checkpoint_seconds=0), want)


def test_divergence_is_an_error(tmp_path):
    with pytest.raises(UserError, match=r"diverged.*learning_rate"):
        train(tmp_path, NonPrivate("non_private"), learning_rate=1.7e308, epochs=5)
    with pytest.raises(UserError, match=r"diverged.*learning_rate"):  # again, without a new step
        train(tmp_path, NonPrivate("non_private"), learning_rate=1.7e308, epochs=5, report=pytest.fail)


class Evil:
    """A pickle that makes a file when it is read."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return Path.touch, (self.path,)


@pytest.mark.attack
def test_a_checkpoint_runs_no_code(tmp_path):
    payload = tmp_path / "payload"
    torch.save({"step": 0, "seconds": 0.0, "release": {}, "state": Evil(payload)}, tmp_path / "checkpoint.pt")
    with pytest.raises(UserError, match=r"checkpoint\.pt cannot be read"):
        train(tmp_path)
    assert not payload.exists()


class TimeLimit(RuntimeError):
    """What the handler of a signal raises in the middle of whatever runs, as submitit's does."""


def test_a_time_limit_while_a_file_is_written_is_not_taken_for_a_full_disk(tmp_path, monkeypatch):
    def interrupted(content, path):
        Path(path).write_bytes(b"half")
        raise TimeLimit

    loop.save(tmp_path / "model.pt", {"w": torch.zeros(2)})
    monkeypatch.setattr(torch, "save", interrupted)
    with pytest.raises(TimeLimit):
        loop.save(tmp_path / "model.pt", {"w": torch.ones(2)})
    assert [path.name for path in tmp_path.iterdir()] == ["model.pt"]
    assert not torch.load(tmp_path / "model.pt")["w"].any()


def test_two_processes_train_one_cell_once(tmp_path):
    """One waits for the other, and then finds it finished."""
    both = [Command(tmp_path, *COMMAND) for _ in range(2)]
    assert [one.code() for one in both] == [0, 0]
    assert both[0].out == both[1].out
    assert sum("epoch" in one.err for one in both) == 1
    assert len(list(tmp_path.glob("results/runs/*/result.json"))) == 1


@pytest.mark.gpu
@pytest.mark.parametrize("devices", [("cpu", "cuda"), ("cuda", "cpu")])
def test_a_run_is_resumed_on_another_kind_of_device(tmp_path, devices):
    """Its optimizer, its average and the start of its private training included."""
    settings = training(average=True, checkpoint_seconds=0)

    def part(device, report):
        model = network(torch.float32).to(device)
        fit(model, task(), job_of(settings, tmp_path, 1.0), secret_named(place=device), report)
        return model

    with pytest.raises(KeyboardInterrupt):
        part(devices[0], stop_at_5)
    assert torch.load(tmp_path / "checkpoint.pt", map_location="cpu")["step"] == 5
    seen = []
    part(devices[1], seen.append)
    assert [progress.step for progress in seen if progress.step % 5 == 0] == [10]


def test_sums_are_added_up_and_noised_in_float64_whatever_a_method_returns():
    """A float32 sum would have steps that are coarser than the lattice of the noise."""
    model = network(torch.float32)
    engine, problem = PerExampleGradients(model, 16), task().private
    mechanism = Mechanism(
        lambda g, total=None: added(g.written_out().sum(0), total), lambda mean: mean, 1.0, engine.size
    )
    assert mechanism.clipped_sum(engine.matrix(problem.x[:3], problem.y[:3])).dtype == torch.float32
    assert loop.clipped_sum(mechanism, engine, Split(problem.x[:40], problem.y[:40]))[0].dtype == torch.float64


@pytest.mark.gpu
def test_a_gpu_run_repeats_the_cpu_run(tmp_path):
    """Same sample, same noise: weights after a few steps agree up to rounding."""
    found = []
    for device in ("cpu", "cuda"):
        model = network(torch.float32).to(device)
        fit(model, task(), job_of(training(), tmp_path, 1.0), secret_named())
        found.append(torch.cat([p.detach().flatten().cpu() for p in model.parameters()]))
    torch.testing.assert_close(found[0], found[1], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("precision", ["float32", "ieee"])
def test_lower_precision_on_a_gpu_never_reaches_private_gradients(monkeypatch, precision):
    """What torch is set to while public and while private gradients are taken."""
    gradients, fill, seen = PerExampleGradients(network(torch.float32), 16), PerExampleGradients._fill, []
    cudnn = torch.backends.cudnn
    parts = torch.backends.cuda.matmul, cudnn.conv, cudnn.rnn

    def spy(self, rows, x, y):
        seen.append((len(x), *(part.fp32_precision for part in parts)))
        return fill(self, rows, x, y)

    monkeypatch.setattr(PerExampleGradients, "_fill", spy)
    problem = task()
    view = _view(gradients)._replace(public=Split(problem.private.x[:20], problem.private.y[:20]))
    mechanism = build("gep", k=5, public_precision=precision).mechanism(view, 0)
    cudnn.conv.fp32_precision = cudnn.rnn.fp32_precision = "tf32"  # torch's own default
    noisy_mean(mechanism, gradients, problem.private, 1.0, stream("test", "noise"), 50)
    public = "ieee" if precision == "ieee" else "tf32"
    assert seen == [(20, *3 * [public]), (50, *3 * ["ieee"])]
    with gpu_precision("tf32"):
        with gpu_precision("ieee"):
            pass
        assert {part.fp32_precision for part in parts} == {"tf32"}


def test_more_steps_than_can_be_accounted_for_are_refused_at_once():
    with pytest.raises(UsageError, match=r"training.epochs=1e\+30: more than 10,000,000 steps: lower it"):
        schedule(1000, training(epochs=1e30))
    assert schedule(1000, training(epochs=1e-30)).steps == 1
