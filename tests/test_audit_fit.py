"""`pubsel fit` audited as one program: the bounds against what is known, and every fault planted in it."""

import json
import math
import os
import sys
from fractions import Fraction
from pathlib import Path

import numpy as np
import pytest
import torch
from scipy import stats

from pubsel.algorithms import dp_sgd
from pubsel.cli import main
from pubsel.privacy import accountant
from pubsel.privacy.people import UNIT, weights_of
from pubsel.release import measurement, quality
from pubsel.selection import coverage
from pubsel.training import loop
from tests.made import planted, write_npz

sys.path.insert(0, str(Path(__file__).parent.parent / "scripts"))
import attacked_fit as whole
from attacked_fit import Claim, Scored, fitted

N, CLASSES = 60, 10
EPSILON, DELTA, CHOICE = 4.0, 1e-3, 0.5
REHEARSED = 1.0  # noise multiplier of the steps on random numbers by which the command tells the time
SURELY = 0.9999  # a right program is accused once in ten thousand audits, a wrong one found less often than not


@pytest.fixture
def known_entropy(monkeypatch):
    """What an attack finds is a matter of chance: here it is the same each time."""
    monkeypatch.setattr(os, "urandom", np.random.default_rng(0).bytes)


def attacked(folder, images, choice, runs):
    """The program, and what the adversary makes of so many runs; the target has so many images."""
    program = fitted(folder, N, EPSILON, DELTA, choice)
    data = whole.worst_case(N, CLASSES, images)
    return program, whole.scored(list(whole.runs(program, data, runs, np.random.default_rng(0))))


def bounds(program, scored, confidence):
    """What an audit says of each part."""
    return {part: whole.lower_bounds(scored[part], claim, confidence) for part, claim in program.claims().items()}


# The bounds


@pytest.mark.parametrize("positives", [1e-4, 0.02, 0.3, 0.9, 1.0])
def test_the_curve_of_one_mechanism_alone_is_the_known_one(positives):
    normal = stats.norm.cdf(stats.norm.isf(positives) - 1.3)
    assert whole.least_negatives(0.0, 1.3, positives) == pytest.approx(normal, abs=1e-9)
    response = max(0, 1 - math.exp(0.7) * positives, math.exp(-0.7) * (1 - positives))
    assert whole.least_negatives(0.7, 0.0, positives) == pytest.approx(response)
    assert whole.least_negatives(0.7, 1e-5, positives) == pytest.approx(response, abs=1e-3)
    assert whole.least_negatives(0.0, 0.0, positives) == pytest.approx(1 - positives)


def test_the_curve_of_both_is_that_of_a_likelihood_ratio_test():
    """Drawn: the response, the normal number, and the test at a rate of false positives."""
    random, count, pure, mu = np.random.default_rng(0), 200_000, 0.8, 0.6
    ratios = []
    for sign in (-1, 1):
        right = random.random(count) < 1 / (1 + math.exp(-pure))
        response = sign * pure * np.where(right, 1, -1)
        ratios.append(response + mu * random.standard_normal(count) + sign * mu**2 / 2)
    for positives in (0.05, 0.3, 0.7):
        threshold = np.quantile(ratios[0], 1 - positives)
        assert whole.least_negatives(pure, mu, positives) == pytest.approx((ratios[1] < threshold).mean(), abs=0.006)


def test_the_bounds_hold_as_often_as_they_say_and_are_near_the_truth():
    """Of 50 audits at 95 % of simulated releases; with a third of the noise, each finds it."""
    random, mu = np.random.default_rng(0), accountant.gaussian_mu(1.0, DELTA)
    claim = Claim(1.0, mu, DELTA)

    def simulated(scale, runs=1000):
        included = random.random(runs) < 0.5
        right = random.random(runs) < 1 / (1 + math.exp(-scale * claim.pure))
        response = np.where(right == included, 1, -1) * scale * claim.pure
        shifted = random.standard_normal(runs) + scale * mu * included
        return whole.lower_bounds(Scored(response + scale * mu * shifted, included, runs // 2), claim, 0.95)

    honest = [simulated(1) for _ in range(50)]
    assert sum(one.measured > one.claimed for one in honest) <= 6  # two bounds
    assert np.median([one.planned_curve for one in honest]) > 0.6 * claim.at(1)
    assert all(simulated(3).measured > claim.at(1) for _ in range(5))


def test_rates_of_no_error_say_as_much_as_so_many_runs_can():
    scores = np.repeat([0.0, 1.0], 500)
    included = scores > 0
    mixed = np.random.default_rng(0).permutation(1000)
    result = whole.lower_bounds(Scored(scores[mixed], included[mixed], 500), Claim(1.0, 0.0, 0.0), 0.95)
    assert (result.positives, result.negatives, result.runs) == (0, 0, 500)
    zero = 1 - 0.025 ** (1 / 250)  # the upper limit of a rate that 250 trials never showed
    assert result.any_program == pytest.approx(math.log((1 - zero) / zero), rel=0.02)

    coins = np.random.default_rng(1).random(1000) < 0.5
    assert whole.lower_bounds(Scored(scores, coins, 500), Claim(1.0, 0.5, DELTA), 0.999).measured == 0


# What is attacked


@pytest.mark.parametrize("images", [1, 3])
def test_the_target_breaks_a_tie(images):
    """Without it the near set has the score of none; with it one more, which is the sensitivity."""
    data = whole.worst_case(N, CLASSES, images)
    places = coverage.regions(data.candidates["near"].x, "near")

    def score(private):
        weights = weights_of(data.people, len(private.x))
        return coverage.score(places, coverage.counts(places, private.x, weights), N)

    before, after = score(whole.with_nothing(data.private, images, 0)), score(data.private)
    assert before == int(coverage.LEAST * N * UNIT)
    assert after - before == images * (UNIT // images)
    other = coverage.regions(data.candidates["far"].x, "far")
    assert not any(coverage.counts(other, data.private.x, [1] * len(data.private.x)))
    assert (data.private.y == CLASSES - 1).sum() == images


def test_the_audited_program_is_what_the_command_runs(tmp_path, folder, monkeypatch):
    """The same choice, training and measurement, by their budgets, on data of the same size; one after another."""
    draw = np.random.RandomState(0)
    for name, n in (("private", 400), ("a", 60), ("b", 60)):
        parts = ((draw.randint(0, 256, (n, 8, 8), dtype=np.uint8), np.arange(n) % CLASSES) for _ in range(2))
        write_npz(f"{name}.npz", *parts)

    calls = []

    def noted(module, name, of):
        whole_function = getattr(module, name)

        def spied(*arguments, **named):
            calls.append((name, *of(*arguments)))
            return whole_function(*arguments, **named)

        monkeypatch.setattr(module, name, spied)

    def of_choice(epsilon, private, people, sets, with_none, secret, *_):
        return epsilon, len(private), people, len(sets), with_none, secret.secure

    def of_step(mechanism, gradients, batch, sigma, source, size, *_):
        return type(gradients).__name__, mechanism.sensitivity, len(batch.x), sigma, size, type(source).__name__

    noted(coverage, "select", of_choice)
    noted(loop, "noisy_mean", of_step)
    noted(quality, "release", lambda counts, n, plan, source: (counts.shape, n, plan, source.secure))

    words = ["private=private.npz", "public=[a.npz,b.npz]", f"epsilon={EPSILON}", f"delta={DELTA}", f"choice={CHOICE}"]
    assert main(["fit", *words, "threads=1", "download=false"]) == 0
    of_command, calls[:] = [call for call in calls if (call[0], call[4]) != ("noisy_mean", REHEARSED)], []
    record = json.loads(next(Path("results").glob("runs/*/result.json")).read_text())

    # The audit's own data has as many examples, all of which are held out but the first n.
    n = record["private_examples"]
    assert n + record["quality"]["examples"] == 400
    images, labels = torch.randn(400, whole.FEATURES), torch.arange(400) % CLASSES
    split = [whole.Split(images[part], labels[part]) for part in (slice(n), slice(n, None))]
    candidates = {"near": split[1], "far": split[1]}
    program = fitted(tmp_path, n, EPSILON, DELTA, CHOICE)
    program.release(whole.Data(*split, candidates, CLASSES, 1, None, None))
    assert of_command == calls
    assert [name for name, *_ in calls] == ["select", *["noisy_mean"] * 30, "release"]
    claim = program.claims()["all"]
    assert claim.at(1) == pytest.approx(record["privacy"]["epsilon"], abs=1e-6)
    assert record["privacy"]["epsilon"] <= EPSILON + 1e-9
    assert accountant.ROUNDED in record["privacy"]["not_covered"]
    assert claim.mu == pytest.approx(math.sqrt(30) / calls[1][4], rel=1e-6)


# The audit


@pytest.mark.attack
def test_training_without_noise_is_found_in_few_runs(tmp_path, monkeypatch, known_entropy):
    monkeypatch.setattr(loop, "deviation", lambda noise_multiplier, sensitivity: 1e-6)
    results = bounds(*attacked(tmp_path, 1, CHOICE, 120), 0.99)
    assert results["weights"].measured > results["weights"].claimed
    assert not any(results[part].measured > results[part].claimed for part in ("choice", "table"))


@pytest.mark.attack
@pytest.mark.slow
@pytest.mark.parametrize(
    ("images", "choice"),
    [(1, CHOICE), *(pytest.param(*how, marks=pytest.mark.long) for how in ((3, CHOICE), (1, None)))],
)
def test_the_right_program_is_not_accused(images, choice, tmp_path, known_entropy):
    """And something is seen of it."""
    program, scored = attacked(tmp_path, images, choice, 800)
    surely = bounds(program, scored, SURELY)
    assert all(result.measured <= result.claimed for result in surely.values()), surely
    assert bounds(program, scored, 0.9)["all"].measured > 1


def of_images(_):
    return lambda people, examples: [UNIT] * examples


def a_third(deviation):
    return lambda *given: deviation(*given) / 3


def at_twice_epsilon(flip):
    return lambda scores, epsilon, source: flip(scores, Fraction(2) * epsilon, source)


def at_three_times(factors):
    return lambda norms, bound: factors(norms, 3 * bound)


# fault -> how it is planted, the part that it is found in; images of the target, the share of the choice, runs
FAULTS = {
    "coins at twice epsilon": (planted(coverage, "permute_and_flip", at_twice_epsilon), "choice", 1, CHOICE, 1000),
    "each image of a person counts": (planted(coverage, "weights_of", of_images), "choice", 3, CHOICE, 500),
    "a third of the noise in training": (planted(loop, "deviation", a_third), "weights", 1, CHOICE, 400),
    "clipped at three times": (planted(dp_sgd, "clip_factors", at_three_times), "weights", 1, None, 1600),
    "a third of the noise on the table": (planted(quality, "deviation", a_third), "table", 1, CHOICE, 300),
    "each image of a person is measured": (planted(measurement, "weights_of", of_images), "table", 3, None, 300),
}
MANY = 1000  # runs: minutes


@pytest.mark.attack
@pytest.mark.slow
@pytest.mark.parametrize(
    "fault",
    [pytest.param(fault, marks=pytest.mark.long if runs >= MANY else ()) for fault, (*_, runs) in FAULTS.items()],
)
def test_a_fault_is_found(fault, tmp_path, monkeypatch, known_entropy):
    """By a lower bound above the claim."""
    plant, part, images, choice, runs = FAULTS[fault]
    plant(monkeypatch)
    results = bounds(*attacked(tmp_path, images, choice, runs), 0.95)
    assert results[part].measured > results[part].claimed, results
