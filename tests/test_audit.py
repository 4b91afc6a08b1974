"""The audit: its bounds against binomials and published values; and that it finds every fault planted in the loop."""

import contextlib
import dataclasses
import inspect
import math

import numpy as np
import pytest
import torch
from scipy import stats

import pubsel.commands.audit
import pubsel.privacy.lattice
import pubsel.training.loop
from pubsel.algorithms import added, dp_sgd, gep
from pubsel.attacks.canaries import COPIES, MAGNITUDES, WithCanaries, distinct, draw_canaries
from pubsel.attacks.one_run import (
    Guesses,
    epsilon_of_any,
    epsilon_of_curve,
    epsilon_of_plan,
    guess_all,
    guess_extremes,
    is_consistent,
    may_be_right,
    p_value,
    trade_off,
)
from pubsel.attacks.witness import SURE, Witness, repeated_noise, repeated_samples, uneven_samples
from pubsel.cell import Cell
from pubsel.commands.audit import Audited, watch
from pubsel.data import Split, Task
from pubsel.gradients.factored import LinearGradients
from pubsel.gradients.matrix import PerExampleGradients
from pubsel.models import small
from pubsel.privacy import accountant
from pubsel.privacy.randomness import Secret
from pubsel.privacy.sampling import Schedule
from pubsel.release.run import run
from pubsel.rules import canonical
from pubsel.training.loop import Job, fit
from tests.made import Scaled, build, checked, done, failed, interrupted, only_record, planted, training
from tests.synthetic import secret_named
from tests.test_people import npz

NETWORKS = {"dp_sgd": {}, "gep": {"k": 100}, "b_gep": {"k": 100}, "dp_md": {}, "dope_sgd": {}}
NETWORKS |= {"second_phase": {"head": "own"}}
SHORT = {"pretrain_epochs": 2}
PLAIN = "pillar jl dp_pca dp_fc dp_sgd_standardised dp_raft adadps ppgd fully_private whitened_head whitened_head_once"
LINEAR = {name: {} for name in PLAIN.split()} | dict.fromkeys(("ngd", "adamix_clipping"), SHORT)
LINEAR |= dict.fromkeys(("adamix", "adamix_projection"), SHORT | {"rank": 45})
CLASSES, N, M = 10, 60, 500
POISSON = {"epsilon": 8.0, "rate": 0.1, "steps": 60}


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


def audited(folder, name="dp_sgd", epsilon=4.0, rate=1.0, steps=20, seed=0, stop_at=None):
    """The witness of one training with canaries, killed after step `stop_at` and resumed; and what was planned."""
    model, task = problem(name)
    algorithm = build(name, **(NETWORKS | LINEAR)[name])
    plan = accountant.plan(epsilon, 1e-5, rate, steps, algorithm.sensitivity())
    inner = LinearGradients(model) if name in LINEAR else PerExampleGradients(model)
    engine = WithCanaries(inner, draw_canaries(M, inner.size, N, np.random.default_rng(seed)), task.private)
    private = engine.canaries.join(task.private)
    n = len(private.x)
    schedule = Schedule(n, rate, steps, max(1, round(rate * n)))
    witness = Witness(engine, schedule, plan.noise_multiplier)
    plain = {"momentum": 0.0, "milestones": [], "chunk": None}
    settings = training(**plain, learning_rate=1e-3, checkpoint_seconds=0 if stop_at else 1e9)
    sigma, task = plan.noise_multiplier, task._replace(private=private)
    job = Job(witness.watching(algorithm), schedule, sigma, settings, "name", folder / "checkpoint.pt")

    def stop(now):
        if now.step == stop_at:
            interrupted()

    for report in [stop, lambda now: None] if stop_at else [stop]:
        with contextlib.suppress(KeyboardInterrupt):
            fit(model, task, job, secret_named(f"key {seed}"), report, gradients=engine)
    return witness, plan


def failing(witness):
    """The checks that fail."""
    return {name for name, p in witness.checks().items() if p < SURE}


def guessed(witness):
    """What was guessed of the canaries that are weighed, one of each direction."""
    apart = witness.engine.apart(witness.weighed.nonzero().flatten())
    return guess_all(witness.ratios[apart].numpy(), witness.engine.canaries.included[apart].numpy())


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
    assert epsilon_of_plan(Guesses(1000, 1000, 505), accountant.plan(1, 1e-5, 1.0, 10, 1.0), 0.95) == (0.0, math.inf)


def test_guesses_are_counted():
    scores, included = np.array([3.0, -1.0, 0.5, -2.0, 0.1]), np.array([True, False, False, True, True])
    assert guess_extremes(scores, included, 0.8) == (5, 4, 2)  # in: 3.0, 0.5; out: -2.0, -1.0
    assert guess_all(scores, included) == (5, 5, 3)


@pytest.mark.parametrize(("rate", "steps"), [(1.0, 30), (0.05, 60)])
def test_the_bounds_hold_as_often_as_they_say_and_are_close_to_the_truth(rate, steps):
    """Simulated steps, noise as planned: of 40 audits at 95 % few exceed the truth; with half the noise, all do."""
    plan = accountant.plan(4.0, 1e-5, rate, steps, 1.0)
    s, random = plan.noise_multiplier, np.random.default_rng(0)

    def right(scale):
        included = random.random(2000) < 0.5
        sums = random.normal(0, scale * s, (2000, steps))
        sums += included[:, None] * (random.random((2000, steps)) < rate)
        exponent = (sums - 0.5) / (scale * s) ** 2
        ratios = exponent if rate == 1 else np.logaddexp(np.log1p(-rate), np.log(rate) + exponent)
        return guess_all(ratios.sum(1), included)

    chance = (1 + accountant.advantage(s, rate, steps)) / 2
    refuted = [stats.binom.sf(right(1.0).right - 1, 2000, chance) < 0.05 for _ in range(40)]
    assert sum(refuted) <= 6
    assert 2.5 < epsilon_of_plan(right(1.0), plan, 0.95)[0] <= 4
    assert all(stats.binom.sf(right(0.5).right - 1, 2000, chance) < 1e-6 for _ in range(5))


def test_the_advantage_is_delta_at_epsilon_zero():
    """Full batch: total variation of two Gaussians; sampled: below it times the rate for one step, and near it."""
    assert accountant.advantage(2.0, 1.0, 4) == pytest.approx(2 * stats.norm.cdf(0.5) - 1)
    one = 0.1 * (2 * stats.norm.cdf(0.5) - 1)  # one step at rate 0.1: the mixture differs by 0.1 of it
    assert one <= accountant.advantage(1.0, 0.1, 1) < one + 0.01


def test_the_bound_of_a_curve_lies_between_that_of_any_program_and_the_truth():
    """Simulated canaries, full batches, as planned and with a third of the noise."""
    plan, random = accountant.plan(4.0, 1e-5, 1.0, 30, 1.0), np.random.default_rng(0)
    mu = math.sqrt(30) / plan.noise_multiplier
    above = 0
    for factor in [1.0] * 30 + [3.0] * 3:
        included = random.random(1000) < 0.5
        found = guess_extremes(random.standard_normal(1000) + factor * mu * included, included, 0.2)
        epsilon = epsilon_of_curve(found, plan, 0.95)
        assert 1.3 * epsilon_of_any(found, 1e-5, 0.95) < epsilon
        above += epsilon > 4 and factor == 1
        assert epsilon > 3 or factor == 1
    assert above <= 3
    assert epsilon_of_curve(Guesses(1000, 200, 104), plan, 0.95) == 0


def test_a_curve_allows_what_randomised_response_does():
    """Its chance of so many right guesses is the binomial tail, which the bound may not be below, nor far above."""
    q = math.exp(1.5) / (1 + math.exp(1.5))
    tail = float(stats.binom.sf(36, 40, q))

    def least(y):  # of epsilon 1.5 alone
        return max(y * math.exp(-1.5), 1 - (1 - y) * math.exp(1.5), 0)

    assert may_be_right(Guesses(40, 40, 37), tail, least)
    assert not may_be_right(Guesses(40, 40, 37), 5 * tail, least)


@pytest.mark.parametrize("rate", [1.0, 0.1])
def test_the_trade_off_curve_is_that_of_the_accountant(rate):
    plan = accountant.plan(2.0, 1e-5, rate, 20, 1.0)
    least = trade_off(plan, plan.noise_multiplier)
    for y in (1e-4, 0.01, 0.3, 0.9, 1.0):
        assert 0 <= least(y) <= y
        for epsilon in (0.0, 1.0, 2.0):
            (delta,) = accountant.deltas(plan.noise_multiplier, rate, 20, (epsilon,))
            assert y <= math.exp(epsilon) * least(y) + delta + 1e-3
    assert accountant.deltas(plan.noise_multiplier, rate, 20, (2.0,))[0] <= 1.2e-5


# The audit of the loop itself


@pytest.mark.parametrize("name", [*NETWORKS, *LINEAR])
def test_no_false_alarm_and_a_bound_near_the_claim(name, tmp_path):
    """Every algorithm whose steps go through the loop: full batches, epsilon 4."""
    witness, plan = audited(tmp_path, name, steps=10)
    guesses = guessed(witness)
    assert not failing(witness)
    assert 0.9 < witness.worst <= 1.0001  # canaries do add as much as may be
    assert (0.8 if "gep" in name else 1.5) < epsilon_of_plan(guesses, plan, 0.95)[0] <= 4


@pytest.mark.parametrize("seed", range(2))
def test_no_false_alarm_with_poisson_samples(seed, tmp_path):
    witness, plan = audited(tmp_path, **POISSON, seed=seed, stop_at=20)
    guesses = guessed(witness)
    assert not failing(witness)
    assert is_consistent(guesses, plan, 0.99)
    assert not is_consistent(guesses, plan, 0.95, 3 * plan.noise_multiplier)


def noise_times(factor):
    return planted(pubsel.privacy.lattice, "normal", lambda normal: lambda *given: factor * normal(*given))


def clipped_late(times):
    return planted(dp_sgd, "clip_factors", lambda factors: lambda norms, bound: factors(norms, times * bound))


def sampled(other):
    """Another sample than that of `poisson_sample`, which is given too."""
    instead = lambda whole: lambda source, n, rate: other(whole, source, n, rate)  # noqa: E731
    return planted(pubsel.training.loop, "poisson_sample", instead)


twice_as_many = sampled(lambda whole, source, n, rate: whole(source, n, 2 * rate))
same_batch = sampled(lambda whole, source, n, rate: whole(np.random.default_rng(0), n, rate))
paid_once = planted(gep.GEP, "sensitivity", lambda _: lambda self: 1.0)


def fixed_batches(monkeypatch):
    """Every example once in each pass, in shuffled order, as loaders of batches do."""
    calls = []

    def shuffled(whole, source, n, rate):
        each, at = round(1 / rate), len(calls)
        calls.append(n)
        order = torch.from_numpy(np.random.default_rng(at // each).permutation(n))
        return order.tensor_split(each)[at % each].sort().values

    sampled(shuffled)(monkeypatch)


def noise_again(monkeypatch):
    """A generator of noise that is seeded where the process starts; samples go on as they should."""
    checkpoint = pubsel.training.loop._Checkpoint
    draw, resume, calls = Secret.__call__, checkpoint.resume, []

    def resumed(*arguments):
        calls.clear()
        return resume(*arguments)

    def source(self, purpose, step=0):
        if purpose == "noise":
            calls.append(step)
            step = len(calls)
        return draw(self, purpose, step)

    monkeypatch.setattr(checkpoint, "resume", resumed)
    monkeypatch.setattr(Secret, "__call__", source)


SAMPLES = {"batch sizes", "samples of one example"}
FAULTS = {
    "noise at half scale": (noise_times(0.5), {}, True, {"noise scale"}),
    "noise at half scale, sampled": (noise_times(0.5), POISSON, True, {"noise scale"}),
    "a little less noise": (noise_times(0.95), {}, False, {"noise scale"}),
    "clipping a little late": (clipped_late(1.05), {"steps": 5}, False, {"sensitivity"}),
    "no clipping": (clipped_late(1e9), {"steps": 5}, True, {"sensitivity"}),
    "twice the sampling rate": (twice_as_many, POISSON, True, SAMPLES | {"sampling rate"}),
    "shuffled batches": (fixed_batches, POISSON, False, SAMPLES),
    "noise of the start again after a resume": (noise_again, {**POISSON, "stop_at": 20}, False, {"noise drawn anew"}),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_planted_fault_is_found(fault, tmp_path, monkeypatch):
    """By a lower bound above what is claimed (True), and by the checks of what was done."""
    plant, how, refuted, checks = FAULTS[fault]
    plant(monkeypatch)
    witness, plan = audited(tmp_path, **how)
    assert failing(witness) == checks
    if refuted:
        assert not is_consistent(guessed(witness), plan, 1 - 1e-4)


# Small wrong programs, on scikit-learn's digits


def same_noise(monkeypatch):
    drawn = {}

    def once(whole):
        return lambda source, n, device: drawn.setdefault(n, whole(source, n, device)).clone()

    planted(pubsel.privacy.lattice, "normal", once)(monkeypatch)


def by_mean_norm(norms, bound):
    """One factor for the whole batch, after the mean of its norms: row by row it is as it should be."""
    return torch.full_like(norms, min(1.0, bound / max(float(norms.mean()), 1e-30)), dtype=torch.float64)


clip_by_mean_norm = planted(dp_sgd, "clip_factors", lambda _: by_mean_norm)


def summing(monkeypatch, clipped_sum):
    """DP-SGD with this sum of the gradients and the bound in place of its own."""
    made = dp_sgd.DPSGD.mechanism

    def mechanism(self, view, step):
        return made(self, view, step)._replace(
            clipped_sum=lambda rows, total=None: added(clipped_sum(rows, self.clip_norm), total)
        )

    monkeypatch.setattr(dp_sgd.DPSGD, "mechanism", mechanism)


def clip_each_coordinate(monkeypatch):
    def clipped_sum(gradients, bound):
        return rows_of(gradients).clamp(-bound, bound).sum(0) / bound

    summing(monkeypatch, clipped_sum)


def clip_micro_batches(monkeypatch):
    """The mean of 16 rows is clipped, not each of them."""

    def clipped_sum(gradients, bound):
        means = torch.stack([part.mean(0) for part in rows_of(gradients).split(16)])
        return (means * (bound / means.norm(dim=1).clamp(min=bound))[:, None]).sum(0) / bound

    summing(monkeypatch, clipped_sum)


def rows_of(gradients):
    return gradients.written_out(torch.ones(len(gradients), dtype=torch.bool))


def divide_by_batch(monkeypatch):
    """The mean is over those that were sampled."""
    whole = pubsel.training.loop.noisy_mean

    def noisy_mean(*arguments, **named):
        call = inspect.signature(whole).bind(*arguments, **named)
        call.arguments["batch_size"] = max(1, len(call.arguments["batch"].x))
        return whole(*call.args, **call.kwargs)

    monkeypatch.setattr(pubsel.training.loop, "noisy_mean", noisy_mean)


def divide_in_decode(monkeypatch):
    """The same, in the algorithm: it counts the rows that it sums up."""
    made = dp_sgd.DPSGD.mechanism

    def mechanism(self, view, step):
        inner, rows = made(self, view, step), []

        def clipped_sum(gradients, total=None):
            rows.append(len(gradients))
            return inner.clipped_sum(gradients, total)

        return inner._replace(
            clipped_sum=clipped_sum, decode=lambda mean: inner.decode(mean) * view.batch_size / max(1, sum(rows))
        )

    monkeypatch.setattr(dp_sgd.DPSGD, "mechanism", mechanism)


def of_one_size(whole, source, n, rate):
    return torch.from_numpy(np.sort(np.argsort(source.random(n))[: round(n * rate)]))


def unclipped_residual(gradients, basis, w, clip_residual, error, *_):
    ones = torch.ones(len(w), dtype=torch.float64)
    return (gradients.combine(ones) - basis.expand(w.double().T @ ones)) / clip_residual


# what is wrong -> (how it is planted, the algorithm, the checks one of which must fail)
PLANTED = {
    "noise drawn once": (same_noise, "dp_sgd", {"noise drawn anew"}),
    "clip by the batch's mean norm": (clip_by_mean_norm, "dp_sgd", {"sensitivity"}),
    "clip of each coordinate": (clip_each_coordinate, "dp_sgd", {"sensitivity"}),
    "clip of the micro-batch mean": (clip_micro_batches, "dp_sgd", {"sensitivity"}),
    "denominator of the data": (divide_by_batch, "dp_sgd", {"denominator"}),
    "denominator of the data, in decode": (divide_in_decode, "dp_sgd", {"decoding"}),
    "samples of one size": (sampled(of_one_size), "dp_sgd", {"batch sizes"}),
    "the same batch again": (same_batch, "dp_sgd", {"samples drawn anew", "samples of one example"}),
    "residual not clipped": (planted(gep, "residual_sum", lambda _: unclipped_residual), "gep_digits", {"sensitivity"}),
    "GEP with sensitivity 1": (paid_once, "gep_digits", {"sensitivity"}),
}
PIXELS = ["model=pixels", "training.learning_rate=0.01"]
RIGHT = {
    "dp_sgd": [],
    "gep_digits": [],
    "b_gep": ["algorithm.k=100"],
    "dp_md": [],
    "dope_sgd": [],
    "adadps": PIXELS,
    "pillar": PIXELS,
    "dp_fc": PIXELS,
    "whitened_head": PIXELS,
    "whitened_head_once": PIXELS,
    "adamix": [*PIXELS, "algorithm.rank=50", "algorithm.pretrain_epochs=5", "training.batch_size=10000"],
    "dp_sgd_clip1": [*PIXELS, "training.batch_size=10000"],
}


def settings_on_digits(algorithm, seed=0, words=(), steps=20):
    """Of a short training with 400 canaries."""
    short = ["pair=digits_digits", "distance=none", "model=digits_cnn", "training=digits", f"training.steps={steps}"]
    which = [f"algorithm={algorithm}", f"seed={seed}", "audit.canaries=400", *words]
    return canonical(checked("audit", *short, *which))


def cell_on_digits(folder, algorithm, seed=0, words=(), steps=20):
    chosen = settings_on_digits(algorithm, seed, words, steps)
    cell = Cell.of(chosen)._replace(name=f"cell {seed}", folder=folder)
    return Audited(cell, chosen.audit, cell.load_task(), folder)


def witness_on_digits(folder, algorithm, seed=0, words=(), steps=20):
    """What `pubsel audit` sees of it, and its plan."""
    return watch(cell_on_digits(folder, algorithm, seed, words, steps), np.random.default_rng(seed))[:2]


@pytest.mark.attack
def test_no_audit_shares_noise_with_a_run_or_with_its_own_control(tmp_path, monkeypatch):
    """The noise of the run of the same name, of two audits with other coins, and of their controls: five releases."""
    whole, drawn = pubsel.privacy.lattice.normal, []

    def normal(*arguments):
        drawn.append(whole(*arguments))
        return drawn[-1].clone()

    monkeypatch.setattr(pubsel.privacy.lattice, "normal", normal)
    words = ["model=pixels", "audit.canaries=20"]
    audited = cell_on_digits(tmp_path, "dp_sgd_clip1", words=words, steps=1)
    for seed in (0, 1):
        watch(audited.at(f"{seed}"), np.random.default_rng(seed))
        watch(audited.at(f"{seed} weaker"), np.random.default_rng(seed), weaker=True)
    run(dataclasses.replace(settings_on_digits("dp_sgd_clip1", words=words, steps=1), results=str(tmp_path)))
    noise = torch.stack(drawn)
    assert noise.shape == (5, 650)
    assert (torch.corrcoef(noise) - torch.eye(5)).abs().max() < 0.25


@pytest.mark.attack
def test_the_positive_control_has_the_learning_rate_of_the_run(tmp_path, monkeypatch):
    """With a third of the noise, though the noise decides the rate of the run."""
    jobs = []

    def noted(model, task, job, *others):
        jobs.append(job)
        return fit(model, task, job, *others)

    monkeypatch.setattr(pubsel.commands.audit, "fit", noted)
    words = ["model=pixels", "algorithm.rank=null", "training.learning_rate=null", "training.batch_size=10000"]
    audited = cell_on_digits(tmp_path, "adamix", words=[*words, "audit.canaries=20"], steps=2)
    audited = audited._replace(cell=audited.cell.derived(audited.task))
    for weaker in (False, True):
        watch(audited.at(f"{weaker}"), np.random.default_rng(0), weaker)
    noise_multiplier = jobs[0].noise_multiplier
    rate = audited.cell.algorithm.learning_rate(noise_multiplier, 2, 1297, audited.cell.training.momentum)
    assert jobs[1].noise_multiplier == pytest.approx(noise_multiplier / 3)
    assert [job.rate_by_noise for job in jobs] == pytest.approx([rate, rate])


@pytest.mark.attack
@pytest.mark.parametrize("program", PLANTED)
def test_a_wrong_program_is_found(program, tmp_path, monkeypatch):
    plant, algorithm, checks = PLANTED[program]
    plant(monkeypatch)
    assert failing(witness_on_digits(tmp_path, algorithm, steps=10)[0]) & checks


@pytest.mark.attack
@pytest.mark.slow
@pytest.mark.long
@pytest.mark.parametrize("program", PLANTED)
def test_a_wrong_program_is_found_in_ten_audits_of_ten(program, tmp_path, monkeypatch):
    plant, algorithm, checks = PLANTED[program]
    for seed in range(10):
        (tmp_path / f"{seed}").mkdir()
        with monkeypatch.context() as again:  # what a fault keeps, it keeps for one training
            plant(again)
            witness, _ = witness_on_digits(tmp_path / f"{seed}", algorithm, seed)
        assert failing(witness) & checks, seed


@pytest.mark.slow
@pytest.mark.long
@pytest.mark.parametrize("algorithm", RIGHT)
def test_no_false_alarm_on_digits(algorithm, tmp_path):
    """Five audits of each of eight right programs."""
    for seed in range(5):
        (tmp_path / f"{seed}").mkdir()
        witness, plan = witness_on_digits(tmp_path / f"{seed}", algorithm, seed, RIGHT[algorithm])
        assert not failing(witness), seed
        assert is_consistent(guessed(witness), plan, 1 - SURE), seed


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
@pytest.mark.parametrize("bias", [False, True])
def test_canaries_are_rows_of_the_private_data(labels, bias):
    """Classes and several labels at once: real rows come out as they are, in their order; canaries among them."""
    model = torch.nn.Linear(6, 4, bias=bias)
    private = Split(torch.randn(50, 6), torch.randint(2, (50, *labels)).to(torch.float32 if labels else torch.long))
    if labels:  # the first is known of nobody
        private.y[:, 0], private.y[::3, 1] = torch.nan, torch.nan
    canaries = draw_canaries(40, 24 + 4 * bias, 50, np.random.default_rng(0))
    engine = WithCanaries(LinearGradients(model), canaries, private)
    engine.scales[:] = torch.tensor([3.0, 2.0])
    joined = canaries.join(private)
    n = 50 + int(canaries.included.sum())
    assert len(joined.x) == engine.n == n
    chosen = torch.arange(5, n)  # a batch
    (block,) = engine.blocks(joined.x[chosen], joined.y[chosen])
    assert torch.equal(torch.cat([engine.next_rows(7), engine.next_rows(n)]), chosen)
    rows, whose = block.written_out(torch.ones(len(block), dtype=torch.bool)), engine.whose[chosen]
    real = canaries.others(n)
    want = LinearGradients(model).matrix(*private).written_out(torch.arange(50))
    torch.testing.assert_close(rows[whose < 0], want[real >= 5])
    assert set(whose[whose >= 0].tolist()) <= set(canaries.included.nonzero().flatten().tolist())
    assert 0 < (whose[:-1] < 0).logical_and(whose[1:] >= 0).sum() > 5  # mixed
    norms = (canaries.magnitudes * torch.tensor([3.0, 2.0]).repeat(20))[whose[whose >= 0]]
    norms *= (1 + 1 / 64) ** 0.5 if bias else 1
    torch.testing.assert_close(rows[whose >= 0].double().norm(dim=1), norms.double(), rtol=1e-5, atol=0)
    single = whose[whose >= 0] % 2 == 1
    assert ((rows[whose >= 0][single] != 0).sum(1) == 1 + bias).all()
    assert ((rows[whose >= 0][~single] != 0).sum(1) == rows.shape[1]).all()
    assert set(MAGNITUDES) == set(canaries.magnitudes[::2].tolist()) == set(canaries.magnitudes[1::2].tolist())
    (public,) = engine.blocks(private.x, private.y)  # labels that are none of its own: by the engine before
    torch.testing.assert_close(public.written_out(torch.arange(50)), want)


@pytest.mark.parametrize("name", ["linear", "network"])
def test_canaries_of_one_direction_are_one_trial(name):
    """A small model has fewer directions than canaries; the same noise hides all that have the same one."""
    private = Split(torch.randn(20, 6), torch.zeros(20, dtype=torch.long))
    model = torch.nn.Linear(6, 4, bias=False)
    inner = LinearGradients(model) if name == "linear" else PerExampleGradients(torch.nn.Sequential(model))
    engine = WithCanaries(inner, draw_canaries(300, 24, 20, np.random.default_rng(0)), private)
    apart, every = engine.apart(torch.arange(300)), torch.arange(300)
    assert len(apart) == (36 if name == "linear" else 24)
    of_all = torch.cat([rows.written_out(torch.ones(len(rows), dtype=torch.bool)) for _, rows in engine.rows(every)])
    unit = torch.nn.functional.normalize(of_all.double(), dim=1)
    cosines = unit[apart] @ unit.T
    assert float((cosines[:, apart] - torch.eye(len(apart))).max()) < 0.99
    assert float(cosines.max(0).values.min()) == pytest.approx(1, abs=1e-6)  # none is left out without one like it
    assert torch.equal(engine.apart(torch.arange(24)), torch.arange(24))


def test_repeated_samples_are_found():
    random = np.random.default_rng(0)
    samples = random.random((30, 500)) < 0.1
    assert repeated_samples(samples, 0.1) > 1e-3
    samples[20] = samples[3]
    assert repeated_samples(samples, 0.1) < SURE
    assert repeated_samples(np.ones((3, 50), bool), 1.0) == 1


@pytest.mark.parametrize("people", [None, [1, 9] * (N // 10)], ids=["examples", "people"])
@pytest.mark.parametrize("labels", [(), (3,)])
def test_examples_of_noise_stand_behind_the_private_ones(labels, people):
    """A canary person has copies of one example."""
    _, task = problem("dp_sgd")
    y = torch.randint(2, (N, *labels)).float() if labels else torch.zeros(N).long()
    task = task._replace(private=task.private._replace(y=y), people=people and torch.tensor(people))
    canaries, included, changed = distinct(task, 40, np.random.default_rng(0))
    assert set(canaries.x.unique().tolist()) == {0, 255}
    assert canaries.y.dtype == task.private.y.dtype
    assert canaries.y.shape == (40, *labels)
    assert len(canaries.y.unique()) == (2 if labels else CLASSES)
    assert 10 < included.sum() < 30
    coins, copies = torch.from_numpy(included), COPIES if people else 1
    assert not people or changed.people.tolist() == people + [COPIES] * int(coins.sum())
    for name in ("x", "y"):
        given, own, now = (getattr(split, name) for split in (task.private, canaries, changed.private))
        assert torch.equal(now, torch.cat([given, own[coins].repeat_interleave(copies, 0)]))


# The command

AUDIT = """
audit +experiment=quickstart algorithm=dp_sgd training.steps=10 audit.canaries=200 threads=1
training.batch_size=10000
""".split()
LINEAR_MODEL = "model=pixels"  # with full batches: quick to train and to account for


def test_the_command_prints_claimed_beside_measured_and_keeps_a_record(cli, tmp_path):
    out, err = done(cli, *AUDIT, LINEAR_MODEL)
    record = only_record(tmp_path / "results", "audits")
    said = f"claimed epsilon 4.00, measured at least {record['measured']:.2f} (95% confidence)"
    assert said in out
    assert 0 <= record["any_program"]["epsilon"] <= 4
    assert record["planned_kind"]["made"] == record["canaries"] == 152  # of 200: those that are as large as any can be
    assert record["control"]["found"]
    assert not record["too_weak"]
    assert "with a third of the noise: found (" in out
    assert (record["refuted"], record["failed"]) == (False, [])
    assert "must not be released" in out
    assert sorted(path.name for path in tmp_path.glob("results/audits/*/*")) == ["lock", "result.json"]  # no weights
    code, again, err = cli(*AUDIT, LINEAR_MODEL)
    assert (code, again) == (0, out)
    assert "audited before" in err


def test_the_command_says_what_fails(cli, tmp_path, monkeypatch):
    noise_times(0.5)(monkeypatch)
    out, _ = done(cli, *AUDIT, LINEAR_MODEL)
    assert "THE TRAINING IS NOT WHAT IS ACCOUNTED FOR: noise scale" in out
    assert only_record(tmp_path / "results", "audits")["failed"] == ["noise scale"]


BLACK = """
audit.kind=black_box audit.canaries=400 pair.private_share=0.1 epsilon=1 training.steps=60
algorithm.clip_norm=1 training.milestones=[]
""".split()


@pytest.mark.attack
def test_a_black_box_audit_says_that_it_is_too_weak(cli, tmp_path):
    """It sees the trained model alone, in which a third of the noise hides the canaries as well."""
    out, _ = done(cli, *AUDIT, "audit.kind=black_box")
    record = only_record(tmp_path / "results", "audits")
    assert "planned_kind" not in record
    assert 0 <= record["measured"] <= 4
    assert "dp_sgd on digits, black_box" in out
    control = {"noise": 1 / 3, "found": False, "refuted": False, "failed": []}
    assert record["control"] == control | {"measured": record["control"]["measured"]}
    assert record["too_weak"]
    assert "with a third of the noise: NOT found" in out
    assert "THIS AUDIT IS TOO WEAK TO SAY ANYTHING" in out
    assert "more canaries" in out


@pytest.mark.attack
def test_a_black_box_audit_finds_a_program_without_noise(cli, tmp_path, monkeypatch):
    """Of a claim of 1; then nothing is said of the audit's strength."""
    noise_times(0)(monkeypatch)
    out, _ = done(cli, *AUDIT, *BLACK)
    assert only_record(tmp_path / "results", "audits")["refuted"]
    assert "THE CLAIM IS REFUTED" in out
    assert "TOO WEAK" not in out


PEOPLE = """
audit pair.private=people.npz pair.public=null pair.unit=patient model=pixels epsilon=1
algorithm=dp_sgd_clip1 training=adamix privacy.delta=1e-3 distance=none download=false
threads=1 audit.kind=black_box audit.canaries=150 audit.guesses=0.5
""".split()


@pytest.mark.attack
@pytest.mark.parametrize("by_person", [True, False])
def test_canary_people_show_whether_a_person_is_protected(by_person, cli, tmp_path, monkeypatch):
    """And a program that protects their examples one by one is found."""
    npz(tmp_path / "people.npz", train=12, test=12, side=40)
    if not by_person:
        monkeypatch.setattr(pubsel.training.loop, "by_unit", lambda chosen, people, gradients, *_: (chosen, gradients))
    out, _ = done(cli, *PEOPLE)
    record = only_record(tmp_path / "results", "audits")
    assert "dp_sgd on people.npz, black_box, people: claimed epsilon 1.00" in out
    assert record["refuted"] is not by_person
    assert ("THE CLAIM IS REFUTED" in out) is not by_person


AUTO = "algorithm=gep_digits pair.public=auto pair.candidates=[noise,digits] epsilon_select=0.1"


@pytest.mark.parametrize(
    ("words", "says"),
    [
        ("algorithm=non_private", "no guarantee to audit"),
        ("epsilon=inf", "no guarantee to audit"),
        ("audit.confidence=1", "audit.confidence=1"),
        (AUTO, "pair.public=auto: the choice"),
        ("audit.kind=grey_box", "audit.kind"),
        ("audit.canaries=5", "audit.canaries=5"),
    ],
)
def test_what_cannot_be_audited_is_refused(cli, words, says):
    err = failed(cli, *AUDIT, *words.split())
    assert says in err.splitlines()[-1]
