"""The audit: its bounds against binomials and published values; and that it finds every fault planted in the loop."""

import contextlib
import json
import math

import numpy as np
import pytest
import torch
import yaml
from scipy import stats

import pubsel.training
from pubsel import algorithms, privacy
from pubsel.algorithms import dp_sgd, gep
from pubsel.attacks.canaries import (
    HUGE,
    SURE,
    WithCanaries,
    Witness,
    draw,
    mislabelled,
    repeated_noise,
    uneven_samples,
)
from pubsel.attacks.one_run import Guesses, epsilon_of_any, epsilon_of_plan, guess_all, guess_extremes, p_value, stands
from pubsel.cli import main
from pubsel.config import CONF, Training, UsageError
from pubsel.data import Split, Task
from pubsel.factored import LinearGradients
from pubsel.gradients import DenseGradients, PerExampleGradients
from pubsel.models import small
from pubsel.randomness import stream
from pubsel.training import Schedule, fit

NETWORKS = {"dp_sgd": {}, "gep": {"k": 100}, "b_gep": {"k": 100}, "dp_md": {}, "second_phase": {"head": "own"}}
SHORT = {"pretrain_epochs": 2}
LINEAR = {"pillar": {}, "jl": {}, "dp_pca": {}, "dp_raft": {}, "adadps": {}, "ppgd": {}, "fully_private": {},
          "ngd": SHORT, "adamix": SHORT | {"rank": 45}, "adamix_clipping": SHORT,
          "adamix_projection": SHORT | {"rank": 45}}  # fmt: skip
CLASSES, N, M = 10, 60, 500
POISSON = {"epsilon": 8.0, "rate": 0.1, "steps": 60}


def settings(name):
    values = yaml.safe_load((CONF / "algorithm" / f"{name}.yaml").read_text())
    for parent in values.pop("defaults", []):
        values = settings(parent) | values
    return values


def build(name):
    return algorithms.build(settings(name) | (NETWORKS | LINEAR)[name])


def problem(name):
    """A tiny task, and a network or a linear classifier of 500 parameters or more."""
    torch.manual_seed(0)
    y = torch.randint(CLASSES, (N,))
    if name in LINEAR:
        x = torch.randn(N, 50)
        return torch.nn.Linear(50, CLASSES, bias=False), task_of(Split(x, y))
    x = torch.randint(256, (N, 1, 8, 8), dtype=torch.uint8)
    return torch.nn.Sequential(Scaled(), small.linear(1, 8, 8, CLASSES)).eval(), task_of(Split(x, y))


def task_of(split):
    public = Split(torch.cat([split.x, split.x.flip(-1)]), torch.cat([split.y, split.y]))
    return Task(split, public, split, CLASSES, "accuracy", (0.5,), (0.5,), (), same_task=True)


class Scaled(torch.nn.Module):
    def forward(self, x):
        return x.float() / 255


class Stop(Exception):
    pass


def audited(folder, name="dp_sgd", epsilon=4.0, rate=1.0, steps=20, seed=0, stop_at=None):
    """The witness of one training with canaries, killed after step `stop_at` and resumed; and what was planned."""
    model, task = problem(name)
    algorithm = build(name)
    plan = privacy.plan(epsilon, 1e-5, rate, steps, algorithm.sensitivity())
    inner = LinearGradients(model) if name in LINEAR else PerExampleGradients(model)
    engine = WithCanaries(inner, draw(M, inner.size, np.random.default_rng(seed), torch.device("cpu")))
    private = engine.canaries.join(task.private)
    n = len(private.x)
    schedule = Schedule(n, rate, steps, max(1, round(rate * n)))
    witness = Witness(engine, schedule, plan.noise_multiplier)
    training = Training(epochs=1, batch_size=1, learning_rate=1e-3, momentum=0.0, weight_decay=0.0, milestones=[],
                        decay=1.0, chunk=None, checkpoint_seconds=0 if stop_at else 1e9)  # fmt: skip

    def stop(now):
        if now.step == stop_at:
            raise Stop

    for report in [stop, lambda now: None] if stop_at else [stop]:
        with contextlib.suppress(Stop):
            fit(model, task._replace(private=private), witness.watching(algorithm), schedule, plan.noise_multiplier,
                training, "name", f"key {seed}", False, folder / "checkpoint.pt", report, engine)  # fmt: skip
    return witness, plan


def verdict(witness, plan, sensitivity):
    """(what was guessed, checks that fail)."""
    included, ratios = witness.engine.canaries.included.numpy(), witness.ratios.numpy()
    return guess_all(ratios, included), {name for name, p in witness.checks(sensitivity).items() if p < SURE}


# The bounds


@pytest.mark.parametrize(
    ("canaries", "made", "right", "delta", "published"),
    [(1000, 100, 75, 1e-4, 0.673), (100_000, 1510, 1439, 1e-5, 2.675)],  # arXiv:2305.08846, Appendix D; Section 7
)
def test_the_one_run_bound_is_the_published_one(canaries, made, right, delta, published):
    assert abs(epsilon_of_any(Guesses(canaries, made, right), delta, 0.95) - published) < 1e-3


def test_without_delta_the_p_value_is_the_binomial_tail():
    """Written out, for randomised response; and it grows with delta as the theorem says."""
    q = math.exp(1.5) / (1 + math.exp(1.5))
    tail = sum(math.comb(40, i) * q**i * (1 - q) ** (40 - i) for i in range(37, 41))
    assert p_value(Guesses(100, 40, 37), 1.5, 0.0) == pytest.approx(tail)
    below = [sum(stats.binom.pmf(37 - j, 40, q) for j in range(1, i + 1)) / i for i in range(1, 38)]
    assert p_value(Guesses(100, 40, 37), 1.5, 1e-3) == pytest.approx(min(1, tail + 2 * 100 * 1e-3 * max(below)))
    assert p_value(Guesses(100, 40, 0), 0.0, 1e-5) == 1.0


def test_no_bound_from_coins_alone():
    assert epsilon_of_any(Guesses(1000, 100, 52), 1e-5, 0.95) == 0.0
    assert epsilon_of_plan(Guesses(1000, 1000, 505), privacy.plan(1, 1e-5, 1.0, 10, 1.0), 0.95) == (0.0, math.inf)


def test_guesses_are_counted():
    scores, included = np.array([3.0, -1.0, 0.5, -2.0, 0.1]), np.array([True, False, False, True, True])
    assert guess_extremes(scores, included, 0.8) == (5, 4, 2)  # in: 3.0, 0.5; out: -2.0, -1.0
    assert guess_all(scores, included) == (5, 5, 3)


@pytest.mark.parametrize(("rate", "steps"), [(1.0, 30), (0.05, 60)])
def test_the_bounds_hold_as_often_as_they_say_and_are_close_to_the_truth(rate, steps):
    """Simulated steps, noise as planned: of 40 audits at 95 % few exceed the truth; with half the noise, all do."""
    plan = privacy.plan(4.0, 1e-5, rate, steps, 1.0)
    s, random = plan.noise_multiplier, np.random.default_rng(0)

    def right(scale):
        included = random.random(2000) < 0.5
        sums = random.normal(0, scale * s, (2000, steps))
        sums += included[:, None] * (random.random((2000, steps)) < rate)
        exponent = (sums - 0.5) / (scale * s) ** 2
        ratios = exponent if rate == 1 else np.logaddexp(np.log1p(-rate), np.log(rate) + exponent)
        return guess_all(ratios.sum(1), included)

    chance = (1 + privacy.advantage(s, rate, steps)) / 2
    refuted = [stats.binom.sf(right(1.0).right - 1, 2000, chance) < 0.05 for _ in range(40)]
    assert sum(refuted) <= 6
    assert 2.5 < epsilon_of_plan(right(1.0), plan, 0.95)[0] <= 4
    assert all(stats.binom.sf(right(0.5).right - 1, 2000, chance) < 1e-6 for _ in range(5))


def test_the_advantage_is_delta_at_epsilon_zero():
    """Full batch: total variation of two Gaussians; sampled: below it times the rate for one step, and near it."""
    assert privacy.advantage(2.0, 1.0, 4) == pytest.approx(2 * stats.norm.cdf(0.5) - 1)
    one = 0.1 * (2 * stats.norm.cdf(0.5) - 1)  # one step at rate 0.1: the mixture differs by 0.1 of it
    assert one <= privacy.advantage(1.0, 0.1, 1) < one + 0.01


# The contributions, on which the audit and per-instance losses rest


@pytest.mark.parametrize("name", [*NETWORKS, *LINEAR])
def test_contributions_add_up_to_the_sum(name):
    """Also one row at a time, through the sum itself; with AdaMix's projection: to what decode keeps of it."""
    model, task = problem(name)
    algorithm = build(name)
    engine = LinearGradients(model) if name in LINEAR else PerExampleGradients(model)
    public_stream = lambda purpose, step: stream("test", purpose, step)  # noqa: E731
    view = algorithms.View(model, engine, task.public, CLASSES, False, public_stream, same_task=True,
                           start=torch.zeros(engine.size))  # fmt: skip
    mechanism = algorithm.mechanism(view, 0)
    assert mechanism.contributions is not None
    rows = torch.randn(7, engine.size) * torch.logspace(-3, 3, 7)[:, None]
    found = mechanism.contributions(DenseGradients(rows.clone()))
    assert found.shape == (7, mechanism.size)
    assert found.double().norm(dim=1).max() <= mechanism.sensitivity
    kept = (lambda s: mechanism.decode(s) - mechanism.decode(0 * s)) if getattr(algorithm, "rank", None) else None
    for part in (rows, *rows.split(1)):
        total = mechanism.clipped_sum(DenseGradients(part.clone()))
        own = mechanism.contributions(DenseGradients(part.clone())).sum(0)
        if kept is not None:
            total, own = kept(total), kept(own)
        torch.testing.assert_close(own, total, rtol=1e-3, atol=1e-3)  # GEP's residuals have a slack of 5e-4
    if kept is not None:  # projected already
        torch.testing.assert_close(kept(found[0]), kept(mechanism.clipped_sum(DenseGradients(rows[:1].clone()))))
        assert found.norm(dim=1).min() < 0.999 * mechanism.sensitivity


# The audit of the loop itself


@pytest.mark.parametrize("name", [*NETWORKS, *LINEAR])
def test_no_false_alarm_and_a_bound_near_the_claim(name, tmp_path):
    """Every algorithm whose steps go through the loop: full batches, epsilon 4."""
    witness, plan = audited(tmp_path, name, steps=10)
    guesses, failed = verdict(witness, plan, build(name).sensitivity())
    assert not failed
    assert (0.8 if "gep" in name else 1.5) < epsilon_of_plan(guesses, plan, 0.95)[0] <= 4


@pytest.mark.parametrize("seed", range(4))
def test_no_false_alarm_with_poisson_samples(seed, tmp_path):
    witness, plan = audited(tmp_path, **POISSON, seed=seed, stop_at=20)
    guesses, failed = verdict(witness, plan, 1.0)
    assert not failed
    assert stands(guesses, plan, 0.95)
    assert not stands(guesses, plan, 0.95, 3 * plan.noise_multiplier)


def half_noise(monkeypatch):
    whole = pubsel.training.normal
    monkeypatch.setattr(pubsel.training, "normal", lambda *arguments: whole(*arguments) / 2)


def without_clipping(monkeypatch):
    monkeypatch.setattr(dp_sgd, "clip_factors", lambda norms, bound: torch.ones_like(norms))


def paid_once(monkeypatch):
    monkeypatch.setattr(gep.GEP, "sensitivity", lambda self: 1.0)


def twice_as_many(monkeypatch):
    sample = pubsel.training.poisson_sample
    monkeypatch.setattr(pubsel.training, "poisson_sample", lambda source, n, rate: sample(source, n, 2 * rate))


def fixed_batches(monkeypatch):
    """Every example once in each pass, in shuffled order, as loaders of batches do."""
    calls = []

    def shuffled(source, n, rate):
        each, at = round(1 / rate), len(calls)
        calls.append(n)
        order = torch.from_numpy(np.random.default_rng(at // each).permutation(n))
        return order.tensor_split(each)[at % each].sort().values

    monkeypatch.setattr(pubsel.training, "poisson_sample", shuffled)


def noise_again(monkeypatch):
    """A generator of noise that is seeded where the process starts; samples go on as they should."""
    source_of, fit_once, calls = pubsel.training.source_of, pubsel.training._resume, []

    def resumed(*arguments):
        calls.clear()
        return fit_once(*arguments)

    def source(key, purpose, step, secure):
        if purpose == "noise":
            calls.append(step)
            step = len(calls)
        return source_of(key, purpose, step, secure)

    monkeypatch.setattr(pubsel.training, "_resume", resumed)
    monkeypatch.setattr(pubsel.training, "source_of", source)


SAMPLES = {"batch sizes", "samples of one example"}
FAULTS = {
    "noise at half scale": (half_noise, {}, True, {"noise scale"}),
    "noise at half scale, sampled": (half_noise, POISSON, True, {"noise scale"}),
    "no clipping": (without_clipping, {"steps": 5}, True, {"clipping"}),
    "GEP paid once": (paid_once, {"name": "gep", "epsilon": 20.0}, False, {"clipping"}),
    "twice the sampling rate": (twice_as_many, POISSON, True, SAMPLES | {"sampling rate"}),
    "shuffled batches": (fixed_batches, POISSON, False, SAMPLES),
    "noise of the start again after a resume": (noise_again, {**POISSON, "stop_at": 20}, False, {"noise drawn anew"}),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_planted_fault_is_found(fault, tmp_path, monkeypatch):
    """By a lower bound above what is claimed (True), and by the checks of what was done."""
    plant, how, refuted, checks = FAULTS[fault]
    plant(monkeypatch)
    name = how.get("name", "dp_sgd")
    witness, plan = audited(tmp_path, **how)
    guesses, failed = verdict(witness, plan, build(name).sensitivity())
    assert failed == checks
    if refuted:
        assert not stands(guesses, plan, 1 - 1e-6)


# Its parts


def test_two_rows_of_the_same_noise_are_found():
    noise = np.random.default_rng(0).standard_normal((600, 300)).astype(np.float32)
    assert repeated_noise(noise) > 1e-3
    noise[590] = 0.7 * noise[3] + 0.7 * noise[4]
    assert repeated_noise(noise) < SURE


def test_samples_are_judged_by_their_own_distribution():
    random, smallest = np.random.default_rng(0), 1.0
    for _ in range(300):
        sampled = random.random((40, 80)) < 0.1
        smallest = min(smallest, *uneven_samples(sampled.sum(1), sampled.sum(0), 80, 0.1).values())
    assert 1e-6 < smallest < 0.05
    assert uneven_samples(np.full(40, 8), np.full(80, 4), 80, 0.1)["batch sizes"] < 1e-6
    assert uneven_samples(np.array([79, 80]), np.array([2]), 80, 1.0) == {"sampling rate": 0.0}


@pytest.mark.parametrize("labels", [(), (4,)])
def test_canaries_are_rows_of_the_private_data(labels):
    """Classes and several labels at once: real rows come out as they are, canaries as one huge entry each."""
    model = torch.nn.Linear(6, 4)
    private = Split(torch.randn(5, 6), torch.randint(2, (5, *labels)).to(torch.float32 if labels else torch.long))
    canaries = draw(20, 28, np.random.default_rng(0), torch.device("cpu"))
    engine = WithCanaries(LinearGradients(model), canaries)
    joined = canaries.join(private)
    assert len(joined.x) == 5 + canaries.included.sum()
    blocks = list(engine.blocks(joined.x, joined.y))
    rows = torch.cat([block.written_out(torch.ones(len(block), dtype=torch.bool)) for block in blocks])
    torch.testing.assert_close(rows[:5], LinearGradients(model).matrix(*private).written_out(torch.arange(5)))
    want = torch.zeros(len(joined.x) - 5, 28)
    want[range(len(want)), canaries.columns[canaries.included]] = HUGE
    assert torch.equal(rows[5:], want)
    assert len(set(canaries.columns.tolist())) == 20
    assert [len(block) for block in engine.blocks(private.x, private.y)] == [5]  # and without them as ever
    with pytest.raises(UsageError, match=r"audit.canaries=29.*28 trained parameters"):
        draw(29, 28, np.random.default_rng(0), torch.device("cpu"))


def test_mislabelled_examples_take_the_place_of_their_own():
    _, task = problem("pillar")
    task = task._replace(private=Split(torch.arange(N)[:, None].float(), torch.arange(N) % CLASSES))
    canaries, included, changed = mislabelled(task, 30, np.random.default_rng(0))
    assert (canaries.y != canaries.x[:, 0].long() % CLASSES).all()
    assert 5 < included.sum() < 25
    right = changed.private.y == changed.private.x[:, 0].long() % CLASSES
    assert right.sum() == N - 30
    wrong = set(changed.private.x[~right][:, 0].tolist())
    assert wrong == set(canaries.x[torch.from_numpy(included)][:, 0].tolist())
    assert len(changed.private.x) == N - 30 + included.sum()
    with pytest.raises(UsageError, match=r"audit.canaries=31 is more than half of the 60"):
        mislabelled(task, 31, np.random.default_rng(0))


# The command

AUDIT = ["audit", "+experiment=quickstart", "algorithm=dp_sgd", "training.steps=10", "threads=1", "audit.canaries=200"]


@pytest.fixture
def cli(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)

    def run(*words):
        code = main(list(words))
        said = capsys.readouterr()
        return code, said.out, said.err

    return run


def only(folder):
    (path,) = folder.glob("results/audits/*/result.json")
    return json.loads(path.read_text())


def test_the_command_prints_claimed_beside_measured_and_keeps_a_record(cli, tmp_path):
    code, out, err = cli(*AUDIT)
    assert code == 0, err
    record = only(tmp_path)
    said = f"claimed epsilon 4.00, measured at least {record['measured']:.2f} (95% confidence)"
    assert said in out
    assert 0 <= record["any_program"]["epsilon"] <= 4
    assert record["planned_kind"]["made"] == record["canaries"] == 200
    assert (record["refuted"], record["failed"]) == (False, [])
    assert "must not be released" in out
    assert sorted(path.name for path in tmp_path.glob("results/audits/*/*")) == ["lock", "result.json"]  # no weights
    code, again, err = cli(*AUDIT)
    assert (code, again) == (0, out)
    assert "audited before" in err


def test_the_command_says_what_fails(cli, tmp_path, monkeypatch):
    half_noise(monkeypatch)
    code, out, _ = cli(*AUDIT, "audit.canaries=1000")
    assert code == 0
    assert "THE TRAINING IS NOT WHAT IS ACCOUNTED FOR: noise scale" in out
    assert only(tmp_path)["failed"] == ["noise scale"]


def test_a_black_box_audit_needs_the_trained_model_alone(cli, tmp_path):
    code, out, err = cli(*AUDIT, "audit.kind=black_box")
    assert code == 0, err
    record = only(tmp_path)
    assert "planned_kind" not in record
    assert 0 <= record["measured"] <= 4
    assert "dp_sgd on digits, black_box" in out


def test_a_black_box_audit_finds_a_program_without_noise(cli, tmp_path, monkeypatch):
    """Where nothing hides the mislabelled examples, their losses do not either."""
    monkeypatch.setattr(pubsel.training, "normal", lambda source, n, device: torch.zeros(n, dtype=torch.float64))
    words = ["audit.kind=black_box", "audit.canaries=40", "audit.guesses=0.8", "pair.private_share=0.08", "epsilon=0.5",
             "training.steps=100", "training.batch_size=1000", "training.learning_rate=0.3", "training.momentum=0.9",
             "algorithm.clip_norm=10"]  # fmt: skip
    code, out, err = cli(*AUDIT, *words)
    assert code == 0, err
    assert only(tmp_path)["refuted"]
    assert "THE CLAIM IS REFUTED" in out


@pytest.mark.parametrize(
    ("words", "says"),
    [(["algorithm=non_private"], "no guarantee to audit"), (["epsilon=inf"], "no guarantee to audit"),
     (["audit.kind=black_box", "audit.canaries=900"], "audit.canaries=900 is more than half"),
     (["audit.confidence=1"], "audit.confidence=1"),
     (["algorithm=gep_digits", "pair.public=auto", "pair.candidates=[noise,digits]", "epsilon_select=0.1"],
      "pair.public=auto: the choice"), (["audit.kind=grey_box"], "audit.kind"),
     (["audit.canaries=5"], "audit.canaries=5")],
)  # fmt: skip
def test_what_cannot_be_audited_is_refused(cli, words, says):
    code, out, err = cli(*AUDIT, *words)
    assert (code, out) == (2, "")
    assert says in err.splitlines()[-1]
