"""DP-FC: its noisy second moments, what they cost, and what they do for descent."""

import math
from pathlib import Path

import numpy as np
import pytest
import torch
from scipy import stats
from sklearn.linear_model import LogisticRegression
from torch import nn

import pubsel.release.run
from pubsel.algorithms import Facts, View, dp_fc
from pubsel.cell import derived
from pubsel.cli import main
from pubsel.gradients.factored import LinearGradients
from pubsel.gradients.subspace import triangle
from pubsel.privacy import accountant, ledger
from pubsel.privacy.randomness import stream
from pubsel.release import card
from pubsel.training.loop import noisy_sum
from tests.made import build, hurtful, interrupted, only_record, secret
from tests.test_pillar import BUDGET, TINY, cell_of, features, folder, problem  # noqa: F401


def made(n=200, d=12, mu=0.5, **changes):
    return build("dp_fc", **changes).derived(Facts(n, d, classes=3, mu=mu))


# The release


@pytest.mark.attack
@pytest.mark.parametrize("d", [3, 12, 600])
def test_one_row_moves_the_second_moments_by_at_most_their_sensitivity(d):
    release, reached = made(d=d).frozen(None, d, secret), 0.0
    others = torch.cat([features(30, d, seed=2), hurtful(d)[:6]])
    without = release.clipped_sum(others)
    assert without.shape == (release.size,) == (d * (d + 1) // 2,)
    for row in torch.cat([hurtful(d), features(20, d, seed=3)]).split(1):
        alone = release.clipped_sum(row)
        assert alone.isfinite().all()
        assert alone.norm() <= release.sensitivity
        assert (release.clipped_sum(torch.cat([others, row])) - without).norm() <= release.sensitivity
        reached = max(reached, float(alone.norm()))
    assert reached > 0.999 * release.sensitivity == 0.999


def test_without_noise_they_are_the_second_moments_of_rows_of_norm_one():
    x = features(50)
    frozen = noisy_sum(made(n=50, ridge=3).frozen(None, 12, secret), x, 0.0, stream("test", "release"))
    rows = x.double() / x.double().norm(dim=1, keepdim=True)
    want = 50 * torch.linalg.inv(rows.T @ rows + 3 * torch.eye(12))
    torch.testing.assert_close(frozen.preconditioner.double(), want, rtol=1e-3, atol=1e-3)
    torch.testing.assert_close(frozen(x).double(), rows, rtol=1e-5, atol=1e-6)
    assert "preconditioner" not in frozen.state_dict()  # it is no part of the model


def test_negative_eigenvalues_count_as_zero():
    noisy = triangle(torch.diag(torch.tensor([4.0, -3.0, 1.0], dtype=torch.float64)))
    frozen = made(n=10, d=3, ridge=1).frozen(None, 3, secret).decode(noisy)
    torch.testing.assert_close(frozen.preconditioner, torch.diag(torch.tensor([2.0, 10.0, 5.0])))


def test_the_ridge_is_the_norm_of_the_noise():
    """Of a symmetric matrix of it, measured; near what the authors' code sets for 768 features at epsilon 8."""
    d, noise = 300, stream("test", "noise").standard_normal(300 * 301 // 2)
    algorithm = made(d=d, mu=0.5, steps=10, ridge=None)
    multiplier = math.sqrt(11) / 0.5
    release = algorithm.frozen(None, d, secret)
    from_noise = release.decode(torch.from_numpy(noise) * multiplier).preconditioner / 200
    largest = 1 / torch.linalg.eigvalsh(from_noise.double()).min() - algorithm.lambda_
    assert float(largest) == pytest.approx(algorithm.lambda_, rel=0.05)
    theirs = Facts(50_000, 768, mu=accountant.gaussian_mu(8.0, 1e-5))
    assert build("dp_fc", ridge=None).derived(theirs).lambda_ == pytest.approx(78, rel=0.01)


# Budget


def test_the_release_and_the_steps_are_one_plan():
    """Eleven Gaussian releases of full batches with one noise multiplier, which spend mu exactly."""
    task = problem(features(200), features(40))
    algorithm = derived(build("dp_fc"), BUDGET, task)
    plan, spend, first = cell_of(algorithm).guarantee(200)
    assert (plan.rate, plan.steps, spend.steps, algorithm.first_steps) == (1, 10, 11, 1)
    assert first.noise_multiplier == spend.noise_multiplier
    assert math.sqrt(11) / spend.noise_multiplier == pytest.approx(accountant.gaussian_mu(2.0, 1e-5), rel=1e-6)
    assert algorithm.facts.mu == pytest.approx(math.sqrt(11) / spend.noise_multiplier, rel=1e-6)
    assert 1.99 < spend.epsilon <= 2
    page = card._first({"derived": algorithm.values(plan.steps)}, "training")
    assert page == " (1 of them for noisy second moments of the features)"


# Descent


def hard(n=600, d=10):
    """Two classes that overlap, in features of norm 1 whose directions differ by four orders in variance."""
    draw = np.random.RandomState(0)
    x = draw.standard_normal((n, d)) * np.logspace(0, -2, d)
    x /= np.linalg.norm(x, axis=1, keepdims=True)
    y = (x @ np.logspace(0, 1.5, d) + 0.7 * draw.standard_normal(n) > 0).astype(int)
    return torch.from_numpy(x).float(), torch.from_numpy(y)


def losses(algorithm, x, y, preconditioner, rate=1.0, steps=10):
    """The loss after each step of descent without noise."""
    model = nn.Linear(x.shape[1], 2)
    for parameter in model.parameters():
        nn.init.zeros_(parameter)
    view = View(model, LinearGradients(model), None, 2, False, secret, preconditioner=preconditioner)
    mech, reached = algorithm.mechanism(view, 0), []
    for _ in range(steps):
        total = mech.clipped_sum(view.gradients.matrix(x, y)) / len(x)
        w = nn.utils.parameters_to_vector(model.parameters()) - rate * mech.decode(total.float())
        nn.utils.vector_to_parameters(w, model.parameters())
        reached.append(nn.functional.cross_entropy(model(x), y).item())
    assert not model.bias.any()
    return np.array(reached)


def test_without_noise_it_reaches_the_optimum_long_before_plain_descent(monkeypatch):
    """Plain descent at the largest rate that is sure to be stable. Nothing is clipped, so that the optimum is that of
    the loss."""
    monkeypatch.setattr(dp_fc, "residual_at_zero", lambda *_: 2.0)
    x, y = hard()
    best = LogisticRegression(C=1e6, fit_intercept=False, max_iter=10_000, tol=1e-10).fit(x.double(), y)
    optimum = -np.log(best.predict_proba(x.double())[np.arange(len(y)), y]).mean()
    algorithm = build("dp_fc", ridge=None).derived(Facts(len(x), x.shape[1], mu=math.inf))
    frozen = noisy_sum(algorithm.frozen(None, x.shape[1], secret), x, 0.0, stream("test", "release"))
    found = losses(algorithm, x, y, frozen.preconditioner)
    largest = float(torch.linalg.eigvalsh(x.T @ x / len(x))[-1])
    plain = losses(algorithm, x, y, None, rate=1 / largest, steps=100)
    assert (np.diff(found) < 1e-6).all()  # the bound of the curvature holds
    assert found[-1] - optimum < 0.2 * (plain[-1] - optimum)
    assert found[-1] - optimum < 0.05 * (math.log(2) - optimum)


def test_labels_have_the_curvature_of_their_mean_loss():
    model = nn.Linear(4, 5)
    views = [View(model, LinearGradients(model), None, 5, several, secret) for several in (False, True)]
    mean = torch.ones(25)
    classes, labels = (build("dp_fc").mechanism(view, 0).decode(mean)[:20] for view in views)
    torch.testing.assert_close(classes, torch.full((20,), 2 * math.sqrt(0.8)))
    torch.testing.assert_close(labels, torch.full((20,), 4 * 5 / (2 * math.sqrt(5))))


# From the command line to the record


def test_a_run_that_is_killed_after_its_release_descends_with_the_same(folder, capsys, monkeypatch):  # noqa: F811
    words = ["run", "algorithm=dp_fc", *TINY, "privacy.secure_noise=true"]
    fit = pubsel.release.run.fit
    monkeypatch.setattr(pubsel.release.run, "fit", interrupted)
    assert main(words) == 130
    (path,) = Path("results").glob("runs/*/release.pt")
    released = torch.load(path, weights_only=True)["drawn"]["preconditioner"]
    seen = []
    monkeypatch.setattr(pubsel.release.run, "fit", lambda *what, **how: seen.append(what[1]) or fit(*what, **how))
    assert main(words) == 0, capsys.readouterr().err
    assert torch.equal(seen[0].preconditioner, released)
    assert set(torch.load(path.with_name("model.pt"), weights_only=True)) == {"linear.weight", "linear.bias"}
    record = only_record()
    assert record["privacy"]["steps"] == 11
    assert record["derived"]["steps"] == 10


@pytest.mark.attack
@pytest.mark.parametrize(("secure", "releases"), [("true", 2), ("false", 1)])
def test_noise_that_is_drawn_anew_is_in_the_ledger(folder, capsys, monkeypatch, secure, releases):  # noqa: F811
    """The line of the first release covers the first training only, not one whose checkpoint somebody deleted; seeded
    noise would be the same."""
    words = ["run", "algorithm=dp_fc", *TINY, f"privacy.secure_noise={secure}"]
    keep = pubsel.release.run.classifier.keep_model
    monkeypatch.setattr(pubsel.release.run.classifier, "keep_model", interrupted)
    assert main(words) == 130
    (checkpoint,) = Path("results").glob("runs/*/checkpoint.pt")
    assert main(words) == 130  # resumed
    (lines,) = ledger.ledgers("results")
    assert len({line["release"] for line in lines}) == 1
    checkpoint.unlink()
    monkeypatch.setattr(pubsel.release.run.classifier, "keep_model", keep)
    assert main(words) == 0, capsys.readouterr().err
    (lines,) = ledger.ledgers("results")
    assert len({line["release"] for line in lines}) == releases
    assert not list(checkpoint.parent.glob("*.begun"))


def test_noise_of_the_release_has_the_scale_of_a_step(folder, capsys, monkeypatch):  # noqa: F811
    """Of the difference between what is decoded and the exact sum."""
    drawn, frozen = [], dp_fc.DPFC.frozen

    def watched(self, public, d, random):
        release, exact = frozen(self, public, d, random), []

        def decode(noisy):
            drawn.append(noisy - sum(exact))
            return release.decode(noisy)

        sums = lambda x: exact.append(release.clipped_sum(x)) or exact[-1]  # noqa: E731
        return release._replace(clipped_sum=sums, decode=decode)

    monkeypatch.setattr(dp_fc.DPFC, "frozen", watched)
    assert main(["run", "algorithm=dp_fc", *TINY]) == 0, capsys.readouterr().err
    scale = only_record()["privacy"]["noise_multiplier"] * (1 + accountant.ROUNDING)
    (noise,) = drawn
    total = float((noise / scale).square().sum())
    assert 1e-6 < stats.chi2.cdf(total, len(noise)) < 1 - 1e-6
