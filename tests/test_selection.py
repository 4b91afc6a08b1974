"""Private selection: its sensitivity and probabilities attacked with neighbouring data; records; training with it."""

import math
from fractions import Fraction
from pathlib import Path

import numpy as np
import pytest
import torch
from scipy import integrate, stats
from torch import nn

from pubsel import selection
from pubsel.data import Reader, Split, public_examples
from pubsel.messages import UsageError
from pubsel.privacy import accountant
from pubsel.privacy.randomness import SystemEntropy, below, stream
from pubsel.selection import Comparison
from pubsel.settings.keys import Convert, Select
from tests.made import done, failed, interrupted, network, only_record, secret
from tests.synthetic import distance

UNIT = selection.UNIT
ALL = Select(private_m=math.inf)  # private examples


def settings(**changes):
    return distance("gsd", **({"k": 5, "m": 60, "initialisations": 2} | changes))


@pytest.fixture(scope="module")
def digits(digits):
    """The private images, and candidates."""
    train, test, noise = digits
    patches, _ = public_examples("photo_patches", 100, train, Reader("nowhere"), Convert.resize)
    return train, {"digits": test, "noise": noise, "photo_patches": patches}


# Scores


def hurtful(candidates):
    """Energies as they are, and as they cannot be: of one candidate alone, of none, tied, out of range, not finite."""
    random = stream("test", "energies")
    rows = [np.linspace(0, 1, candidates), np.zeros(candidates), np.ones(candidates)]
    rows += [*np.eye(candidates), *(1 - np.eye(candidates))]
    rows += [random.random(candidates) for _ in range(10)]
    rows += [random.standard_normal(candidates) * scale for scale in (1e-300, 1e-9, 1e9, 1e300)]
    rows += [np.full(candidates, value) for value in (math.nan, math.inf, -math.inf)]
    rows += [np.where(np.arange(candidates) == 0, value, 0.5) for value in (math.nan, math.inf, -math.inf)]
    return torch.from_numpy(np.array(rows))


@pytest.mark.parametrize("candidates", [2, 3, 8])
@pytest.mark.parametrize("cap", [1e-6, 0.2, 1.0])
def test_one_example_adds_from_nothing_to_one_unit_to_each_score(candidates, cap):
    u = hurtful(candidates)
    each = selection.contributions(u, cap)
    assert each.dtype == torch.int64
    assert each.min() >= 0
    assert each.max() <= UNIT
    total = each.sum(0)
    for i in range(len(u)):
        rest = torch.cat([u[:i], u[i + 1 :]])
        assert torch.equal(total - selection.contributions(rest, cap).sum(0), each[i])
    assert (each.max(1).values - each.min(1).values).max() == UNIT  # the bound is reached
    assert selection.contributions(u[:0], cap).sum(0).tolist() == [0] * candidates


def test_differences_within_the_cap_count_in_full_and_equal_shares_count_alike():
    u = torch.tensor([[0.50, 0.52, 0.45], [0.3, 0.3, 0.3], [0.0, 0.0, 0.0], [0.9, 0.1, 0.5]])
    each = selection.contributions(u, 0.2).double() / UNIT
    torch.testing.assert_close(each[0], torch.tensor([0.5, 0.6, 0.25]).double(), rtol=0, atol=1e-6)
    assert each[1].tolist() == each[2].tolist() == [0.5] * 3
    assert each[3].tolist() == [1, 0, 0.5]
    two = selection.contributions(torch.tensor([[0.4, 0.6]]), 0.2)
    assert (two[0, 1] - two[0, 0]) == UNIT


def test_an_example_that_leaves_takes_its_own_contribution_and_no_other(digits):
    """Of the whole way from images to scores: bit for bit, also where it is black or white."""
    train, candidates = digits
    x = train.x[:270].clone()
    x[7], x[200] = 255, 0
    private, gsd = Split(x, train.y[:270]), settings(labels="given")
    candidates = {"digits": candidates["digits"], "again": Split(train.x[300:360], train.y[300:360])}
    every = torch.arange(270)

    def u(chosen):
        sets = Comparison(network, private, candidates, 10, "key", secret)
        return selection.energies(gsd, ALL.sketch, sets, chosen)

    whole = u(every)
    assert whole.shape == (270, 2)
    assert whole.min() >= 0
    assert whole.max() <= 1 + 1e-6
    assert whole.std() > 0.01
    for out in (0, 7, 200, 269):
        assert torch.equal(u(every[every != out]), whole[every != out])


@pytest.mark.parametrize("value", [math.nan, math.inf, 1e30, 1e-30, 0.0])
def test_an_example_of_any_content_counts_for_no_more_than_another(value):
    torch.manual_seed(0)
    x = torch.randn(80, 12)
    x[3], x[5, 2] = value, value
    candidates = {name: Split(torch.randn(60, 12), torch.zeros(60).long()) for name in "abc"}
    private = Split(x, torch.zeros(80).long())
    sets = Comparison(lambda i: nn.Linear(12, 3), private, candidates, 3, "key", secret)
    u = selection.energies(settings(k=2), ALL.sketch, sets, torch.arange(80))
    assert torch.isfinite(u).all()
    assert u.min() >= 0
    assert u.max() <= 1 + 1e-6
    if value in (math.nan, math.inf, 0.0):
        assert u[3].tolist() == [0, 0, 0]


# The choice


def test_whole_numbers_below_any_bound_are_uniform():
    for source in (stream("test", "below"), SystemEntropy()):
        assert {below(1, source) for _ in range(5)} == {0}
        counts = np.bincount([below(5, source) for _ in range(5000)], minlength=5)
        assert stats.chisquare(counts).pvalue > 1e-9
        large = [below(10**30, source) / 10**30 for _ in range(500)]
        assert stats.kstest(large, "uniform").pvalue > 1e-9


def noisy_max(q, epsilon, j):
    """Probability that q_j plus exponential noise of mean 1 / epsilon is the largest, by integration."""
    others = np.delete(q, j)

    def density(z):
        return epsilon * math.exp(-epsilon * z) * np.prod(-np.expm1(-epsilon * np.maximum(0, q[j] + z - others)))

    points = sorted({max(0.0, float(other - q[j])) for other in others})
    return integrate.quad(density, 0, points[-1] + 60 / epsilon, points=points, limit=500)[0]


def test_probabilities_are_those_of_the_draws_and_of_noisy_max():
    """The equivalence that the proof rests on, and the exact draws, against one closed form."""
    q, epsilon = [0.0, 1.5, 2.0, 2.0, -3.0], 0.7
    scores = [round(value * UNIT) for value in q]
    want = selection.probabilities(scores, epsilon)
    assert want.sum() == pytest.approx(1)
    np.testing.assert_allclose(want, [noisy_max(np.array(q), epsilon, j) for j in range(5)], atol=1e-7)
    source = stream("test", "choice")
    drawn = [selection.permute_and_flip(scores, Fraction(epsilon), source) for _ in range(6000)]
    assert stats.chisquare(np.bincount(drawn, minlength=5), 6000 * want).pvalue > 1e-4
    other = selection.probabilities(scores, 1.2 * epsilon)
    assert stats.chisquare(np.bincount(drawn, minlength=5), 6000 * other).pvalue < 1e-4


def worst_ratio(unit, epsilon=0.5):
    """The largest |log ratio| of probabilities over neighbours: an example adds 0 to `unit` steps to each score."""
    random, worst = stream("test", "neighbours"), 0.0
    for trial in range(400):
        candidates = int(random.integers(2, 8))
        scores = random.integers(-20 * UNIT, 20 * UNIT, size=candidates)
        if trial % 4 == 0:
            scores = scores[random.integers(candidates, size=candidates)]  # ties
        added = random.integers(2, size=candidates) * unit
        if trial % 2:
            added = random.integers(unit + 1, size=candidates)
        if trial % 5 == 0:
            added = (np.arange(candidates) == scores.argmin()) * unit
        before, after = (selection.probabilities(list(s), epsilon) for s in (scores, scores + added))
        worst = max(worst, float(np.abs(np.log(after) - np.log(before)).max()))
    return worst


def test_neighbours_choose_alike_within_epsilon_and_no_better_bound_holds():
    assert 0.499 < worst_ratio(UNIT) <= 0.5 + 1e-9
    assert worst_ratio(round(1.05 * UNIT)) > 0.5 + 1e-3  # an example that counted for more would be found


@pytest.mark.parametrize("n", [1, 2**20])
def test_the_steps_by_which_others_may_be_rounded_are_paid_for(n):
    """With each of n others one step off, an example moves a score by 1 + n / UNIT."""
    epsilon = float(selection.exponent(accountant.pure(0.5, 1.0, 1, ""), n))
    assert 0.499 * 0.5 / epsilon < worst_ratio(UNIT + n, epsilon) <= 0.5 * (1 + 1e-9)


@pytest.mark.parametrize("epsilon", [1e-9, 0.1, 1.0, 30.0, 900.0])
@pytest.mark.parametrize("rate", [1.0, 0.3, 1e-4])
def test_sampling_is_accounted_for_both_ways(epsilon, rate):
    """With P and P' an epsilon' apart, the mixture of both and P are at most epsilon apart, and one way exactly so."""
    inner = 1 / accountant.pure(epsilon, rate, 1, "").noise_multiplier
    assert inner >= epsilon * (1 - 1e-9)
    if rate == 1:
        assert inner == pytest.approx(epsilon)
    if inner < 700:
        more = math.log1p(rate * math.expm1(inner))
        less = -math.log1p(rate * math.expm1(-inner))
        assert less <= more <= epsilon * (1 + 1e-15)
        assert more >= epsilon * (1 - 1e-6)


def test_steps_share_the_budget():
    plan = accountant.pure(1.0, 1.0, 4, "")
    assert 1 / plan.noise_multiplier == pytest.approx(0.25)
    assert 4 / plan.noise_multiplier <= 1


# What is told of its accuracy


@pytest.mark.parametrize(("candidates", "epsilon", "n"), [(2, 0.1, 500), (7, 0.5, 2000), (100, 1.0, 300)])
def test_a_candidate_better_by_the_margin_is_chosen_with_95_percent(candidates, epsilon, n):
    margin = selection.margin(candidates, 0.2, n, epsilon)
    scores = [0] * candidates
    scores[-1] = round(n * margin / 0.2 * UNIT)
    assert selection.probabilities(scores, epsilon)[-1] >= selection.SURE - 1e-6
    assert selection.probabilities(scores, 0.5 * epsilon)[-1] < selection.SURE


def test_a_margin_that_cannot_be_told_says_how_many_examples_it_takes(digits):
    train, candidates = digits
    few = Split(train.x[:100], train.y[:100])
    sets = Comparison(network, few, candidates, 10, "key", secret)
    with pytest.raises(UsageError, match=r"select\.margin=0\.01 at epsilon_select=0\.1 .* takes 600 private examples"):
        selection.select(settings(), Select(margin=0.01, private_m=math.inf), 0.1, sets)
    plan = accountant.pure(0.1, 1.0, 1, "")
    selection.check_margin(Select(margin=0.01), 0.1, plan, 3, 600)
    with pytest.raises(UsageError, match="takes 600 private examples, and there are 599"):
        selection.check_margin(Select(margin=0.01), 0.1, plan, 3, 599)
    sampled = accountant.pure(0.1, 0.01, 1, "")
    with pytest.raises(UsageError, match=r"set select\.private_m, to inf"):
        selection.check_margin(Select(margin=0.01), 0.1, sampled, 3, 1000)


# The whole


def test_the_nearest_set_is_chosen_with_enough_budget_and_any_with_little(digits):
    train, candidates = digits

    def choose(epsilon, step):
        def source(purpose, i):
            return stream("test", purpose, 100 * step + i)

        sets = Comparison(network, train, candidates, 10, "key", source)
        return selection.select(settings(initialisations=1), Select(private_m=300), epsilon, sets)[0]

    assert {choose(20.0, i) for i in range(4)} == {"digits"}
    assert len({choose(1e-6, i) for i in range(12)}) == 3


def test_what_is_sampled_is_what_is_accounted(digits, monkeypatch):
    train, candidates = digits
    seen = []

    def spy(source, n, rate):
        seen.append((n, rate))
        return torch.arange(0)  # an empty sample is a sample

    monkeypatch.setattr(selection, "poisson_sample", spy)
    sets = Comparison(network, train, candidates, 10, "key", secret)
    chosen, plan = selection.select(settings(), Select(private_m=50), 1.0, sets)
    assert seen == [(len(train.x), plan.rate)] == [(len(train.x), 50 / len(train.x))]
    assert chosen in candidates
    assert (plan.epsilon, plan.delta) == (1.0, 0.0)
    _, plan = selection.select(settings(), Select(), 1.0, sets)
    assert seen[1] == (len(train.x), plan.rate) == (len(train.x), 60 / len(train.x))  # distance.m


def test_one_candidate_alone_is_taken_without_reading_anything(digits):
    sets = Comparison(network, Split(None, None), {"a": digits[0]}, 10, "key", secret)
    chosen, plan = selection.select(settings(), ALL, 0.1, sets)
    assert (chosen, plan.epsilon, plan.delta) == ("a", 0, 0)


def test_identical_candidates_are_told_and_equally_likely(digits, monkeypatch):
    train, candidates = digits
    said, scores = [], []
    twice = {"digits": candidates["digits"], "copy": candidates["digits"], "noise": candidates["noise"]}
    monkeypatch.setattr(selection, "permute_and_flip", lambda found, *_: scores.append(found) or 0)
    sets = Comparison(network, train, twice, 10, "key", secret)
    selection.select(settings(), Select(private_m=100), 1.0, sets, said.append)
    assert "  copy and digits hold the same images: either is as likely as the other" in said
    copy, own, noise = scores[0]
    assert copy == own != noise


def test_a_candidate_whose_gradients_are_zero_is_named():
    x, candidates = torch.randn(80, 12), {"a": torch.randn(60, 12), "dark": torch.zeros(60, 12)}
    splits = {name: Split(images, torch.zeros(60).long()) for name, images in candidates.items()}
    sets = Comparison(lambda i: nn.Linear(12, 3), Split(x, torch.zeros(80).long()), splits, 3, "key", secret)
    with pytest.raises(UsageError, match=r"^dark: all its gradients are zero: leave it out"):
        selection.select(settings(k=2), Select(), 1.0, sets)


# On the command line

RANK = ["rank", "private=digits", "model=digits_cnn", "distance.m=100", "distance.initialisations=1", "download=false"]
CANDIDATES = "public=[digits,photo_patches,noise]"
RUN = """run +experiment=quickstart training.steps=2 training.batch_size=1297 download=false
    pair.public=auto pair.candidates=[photo_patches,noise] epsilon_select=0.5 epsilon=2 distance.m=100
    distance.initialisations=1""".split()


def test_rank_releases_the_choice_alone_and_once(cli, monkeypatch):
    out, err = done(cli, *RANK, CANDIDATES, "epsilon_select=0.1", "secure_noise=true")
    record = only_record(kind="ranks")
    assert record["chosen"] in out
    assert not {"values", "order", "raw"} & set(record)
    assert record["candidates"] == ["digits", "noise", "photo_patches"]
    said = record["privacy"]
    assert (said["valid"], said["epsilon"], said["delta"]) == (True, 0.1, 0.0)
    assert said["statement"] in out
    assert said["adjacency"].startswith("one training example is there, or counts as nothing; the number")
    assert any("number of private examples" in line for line in said["not_covered"])
    assert not any("knows the seed" in line for line in said["not_covered"])
    initialisations = [line for line in err.splitlines() if "initialisation" in line]
    assert len(initialisations) == 3
    assert all(line.split(": ")[1] in record["candidates"] for line in initialisations)  # no value behind the name
    monkeypatch.setattr(selection, "select", None)
    turned = CANDIDATES.replace("digits,photo_patches", "photo_patches,digits")
    assert cli(*RANK, turned, "epsilon_select=0.1", "secure_noise=true")[:2] == (0, out)


def test_dp_gsd_on_the_command_line(cli):
    words = [*RANK, CANDIDATES, "distance=dp_gsd", "distance.m=100", "distance.initialisations=2", "distance.sketch=64"]
    out, err = done(cli, *words)
    record = only_record(kind="ranks")
    assert out.startswith("DP-GSD to digits")
    assert "(1, 1e-05)-differentially private" in out
    assert record["privacy"]["steps"] == 2
    assert all(f"{value:.3g}" not in err for values in record["values"].values() for value in values)
    assert cli(*words)[1] == out


def test_run_selects_trains_and_reports_one_guarantee(cli, monkeypatch):
    """A run that is killed after its selection goes on with what was chosen."""
    with monkeypatch.context() as patch:
        patch.setattr("pubsel.release.run.fit", interrupted)
        assert cli(*RUN, "privacy.secure_noise=true")[0] == 130
    (kept,) = Path("results").glob("runs/*/selection.pt")
    chosen = torch.load(kept)["drawn"]["chosen"]
    with monkeypatch.context() as patch:
        patch.setattr(selection, "select", None)
        out, _ = done(cli, *RUN, "privacy.secure_noise=true")
    record = only_record()
    said = record["privacy"]
    assert record["public"] == chosen in ("noise", "photo_patches")
    assert (record["settings"]["pair"]["public"], record["distance"], record["epsilon"]) == ("auto", None, 2.5)
    assert not list(Path("results").glob("distances/*"))
    assert [part["what"] for part in said["parts"]] == ["selection of the public set", "training"]
    assert [part["epsilon"] for part in said["parts"]] == [0.5, pytest.approx(2, rel=1e-3)]
    assert said["epsilon"] == pytest.approx(sum(part["epsilon"] for part in said["parts"]))
    assert said["delta"] == pytest.approx(1e-5)
    assert "choice of the public set and the trained weights are (2.5, 1e-05)" in said["statement"]
    assert said["statement"] in out


def test_run_with_one_candidate_spends_nothing_on_it(cli):
    _, err = done(cli, *RUN, "pair.candidates=[noise]")
    assert "only candidate" in err
    record = only_record()
    assert (record["public"], record["epsilon"]) == ("noise", 2)
    assert cli("attack", "loss", "run=all")[0] == 0  # on the test images that the choice left
    assert record["privacy"]["epsilon"] == pytest.approx(2, rel=1e-3)


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ([*RANK, CANDIDATES, "epsilon_select=0"], "epsilon_select=0.0: must be greater than 0"),
        ([*RANK, CANDIDATES, "epsilon_select=inf"], "epsilon_select=inf: must be a finite number"),
        ([*RANK, CANDIDATES, "epsilon_select=1", "distance=frechet"], "give distance=gsd, not frechet"),
        ([*RANK, CANDIDATES, "epsilon_select=1", "distance.epsilon=1"], "the given distance has no such setting"),
        ([*RANK, CANDIDATES, "epsilon_select=0.001", "select.margin=0.01"], "private examples, and there are 1297"),
        ([*RANK, CANDIDATES, "epsilon_select=1", "select.cap=0"], "select.cap=0.0: must be greater than 0"),
        ([*RANK, CANDIDATES, "distance=dp_gsd", "distance.epsilon=null"], "give distance.epsilon"),
        ([*RUN, "epsilon_select=null"], "belong together"),
        ([*RUN, "pair.candidates=null"], "belong together"),
        ([*RUN, "pair.candidates=[]"], "belong together"),
        ([*RUN, "pair.public=noise"], "belong together"),
        ([*RUN, "pair.candidates=[noise,noise]"], "give each candidate once"),
        ([*RUN, "pair.candidates=[noise,null]"], "a candidate is a name or path"),
        ([*RUN, "pair.take=train"], "set pair.take=test"),
        ([*RUN, "distance=dp_gsd"], "measure it by pubsel rank"),
        ([*RUN[:-2], "distance=none"], "give distance=gsd, not none"),
    ],
)
def test_a_mistake_is_answered_in_one_line(cli, words, expected):
    err = failed(cli, *words)
    assert expected in err.splitlines()[-1]
