"""Per-instance privacy loss: AdaMix's Proposition 14 written out, what bounds it, and whose training it is."""

import json
import math

import numpy as np
import pandas
import pytest
import torch
from scipy.optimize import brentq
from test_audit import CLASSES, LINEAR, task_of

import pubsel.privacy.lattice
from pubsel.algorithms import dp_sgd
from pubsel.algorithms.adamix import project, public_gradient, subspace_around
from pubsel.attacks.per_instance import LEVELS, Losses
from pubsel.cli import main
from pubsel.data import Split
from pubsel.gradients.factored import LinearGradients
from pubsel.privacy import accountant
from pubsel.privacy.randomness import stream
from pubsel.privacy.sampling import Schedule
from pubsel.training.loop import Job, fit, noisy_sum
from tests.made import build, training
from tests.synthetic import secret_named

D, N = 12, 40


def examples():
    """Features of differing norms: the first is zero, so is its gradient; the second is always clipped."""
    torch.manual_seed(0)
    x = torch.randn(N, D) * torch.logspace(-2, 0.3, N)[:, None]
    x[0], x[1] = 0, 1000 * torch.ones(D)
    return Split(x.double(), torch.randint(CLASSES, (N,)))


def followed(tmp_path, algorithm, rate=1.0, steps=6, epsilon=2.0, every=1, rate_of_learning=1e-3):
    """The losses of a training, its plan, and the weights before each step [steps, C, D]."""
    task = task_of(examples())
    model = torch.nn.Linear(D, CLASSES, bias=False).double()
    torch.nn.init.zeros_(model.weight)
    plan = accountant.plan(epsilon, 1e-5, rate, steps, 1.0)
    losses, weights = Losses(task.private.y, plan, every), []
    losses.private = task.private
    watched = losses.watching(algorithm)
    look = watched.mechanism

    def mechanism(view, step):
        weights.append(model.weight.detach().clone())
        return look(view, step)

    watched.mechanism = mechanism
    schedule = Schedule(N, rate, steps, max(1, round(rate * N)))
    settings = training(momentum=0.0, milestones=[], chunk=None, learning_rate=rate_of_learning)
    job = Job(watched, schedule, plan.noise_multiplier, settings, "name", tmp_path / "checkpoint.pt")
    fit(model, task, job, secret_named())
    return losses, plan, weights


def gradient(weight, x, y):
    """Of one example's cross-entropy, [C, D]."""
    p = torch.softmax(weight @ x, 0)
    p[y] -= 1
    return torch.outer(p, x)


@pytest.mark.parametrize("name", ["fully_private", "adamix_projection", "adamix"])
def test_proposition_14(name, tmp_path):
    """mu_i = sqrt(sum_t |U^T g_i(w_t)|^2 / (tau_t sigma)^2), g_i clipped to tau_t, U the subspace: written out."""
    changes = {"rank": 4} if name != "fully_private" else {}
    changes |= {"pretrain_epochs": 2} if name != "fully_private" else {"clip_norm": 0.5}
    algorithm = build(name, **(LINEAR[name] | changes | {"unit": False, "pretrain_rate": 1e-6}))
    losses, plan, weights = followed(tmp_path, algorithm)
    public = task_of(examples()).public
    mus = np.zeros(N)
    for step, w in enumerate(weights):
        model = torch.nn.Linear(D, CLASSES, bias=False).double()
        model.weight.data.copy_(w)
        norms: list = []
        whole = public_gradient(LinearGradients(model), public, norms).view(CLASSES, D)
        tau = algorithm.clip_norm or float(torch.cat(norms).quantile(algorithm.quantile))
        for i, (x, y) in enumerate(zip(*task_of(examples()).private, strict=True)):
            g = gradient(w, x, y)
            g = g * min(1.0, tau / max(float(g.norm()), 1e-30))
            if algorithm.rank is not None:
                g = project(g, *subspace_around(whole, 4, stream("name", "public directions", step)))
            mus[i] += float(g.norm() / (tau * plan.noise_multiplier)) ** 2
    mus = np.sqrt(mus)
    np.testing.assert_allclose(np.sqrt(losses.squares) / plan.noise_multiplier, mus, rtol=1e-4, atol=1e-12)
    noise = losses.noise_multiplier() / plan.noise_multiplier  # as measured, of 720 numbers
    assert abs(noise - 1) < 0.15
    mus /= noise
    loses = [mu > 0 and accountant.gaussian_delta(0, mu) > 1e-5 for mu in mus]
    solved = np.zeros(N)
    solved[loses] = [brentq(lambda e, mu=mu: accountant.gaussian_delta(e, mu) - 1e-5, 0, 10) for mu in mus[loses]]
    np.testing.assert_allclose(losses.epsilons(), solved, rtol=2e-4, atol=1e-6)


@pytest.mark.parametrize("rate", [1.0, 0.2])
def test_between_nothing_and_the_worst_case(rate, tmp_path):
    """A zero gradient loses nothing, one that is always clipped the worst case under the noise that was added, none
    more; longer ones lose more."""
    algorithm = build("dp_sgd", clip_norm=1.0)
    losses, plan, _ = followed(tmp_path, algorithm, rate, steps=20)
    found = losses.epsilons()
    worst = accountant.spent(losses.noise_multiplier(), rate, 20, 1e-5)
    assert worst == pytest.approx(plan.epsilon, rel=0.1)
    assert found[0] == 0
    assert found[1] == pytest.approx(worst, rel=1e-3)
    assert found.max() <= worst * (1 + 1e-9)
    assert len(set(np.round(found, 6))) > 10
    order = np.argsort(losses.squares)
    assert (np.diff(found[order]) >= -1e-9 if rate == 1 else np.diff(found[order]) >= -0.05 * worst).all()


def test_sampled_losses_are_renyi_dp_of_the_norms(tmp_path):
    """Against opacus, for an example with norms at two levels."""
    from opacus.accountants.analysis import rdp

    losses, *_ = followed(tmp_path, build("dp_sgd"), 0.2, steps=2)
    losses.levels[:] = 0
    losses.levels[0, 50], losses.levels[0, 25], losses.levels[1, 100] = 30, 70, 2
    orders = accountant.FEW_ORDERS
    sigma = losses.noise_multiplier()
    levels = ((0.5, 30), (0.25, 70))
    curves = [rdp.compute_rdp(q=0.2, noise_multiplier=sigma / c, steps=t, orders=orders) for c, t in levels]
    want = rdp.get_privacy_spent(orders=orders, rdp=sum(curves), delta=1e-5)[0]
    most = accountant.spent(losses.noise_multiplier(), 0.2, 2, 1e-5)
    assert losses.epsilons()[0] == pytest.approx(min(float(want), most))


def test_norms_are_rounded_up(tmp_path):
    losses, _, _ = followed(tmp_path, build("dp_sgd"), 0.2, steps=3)
    assert (losses.levels.sum(1) == 3).all()
    assert not losses.levels[:, 101:].any()
    counted = losses.levels[:, :101] @ LEVELS[:101] ** 2
    assert (counted >= losses.squares - 1e-9).all()
    assert (counted <= losses.squares + 3 * 2 / 100).all()


def test_norms_may_be_held_for_some_steps(tmp_path):
    algorithm = build("dp_sgd", clip_norm=1.0)
    exact, _, _ = followed(tmp_path, algorithm, steps=6, rate_of_learning=1.0)
    (tmp_path / "checkpoint.pt").unlink()
    held, _, _ = followed(tmp_path, algorithm, steps=6, every=3, rate_of_learning=1.0)
    assert not np.allclose(exact.squares, held.squares)
    np.testing.assert_allclose(exact.squares, held.squares, atol=3)


@pytest.mark.attack
@pytest.mark.parametrize("rate", [1.0, 0.2])
def test_less_noise_is_more_loss(rate, tmp_path, monkeypatch):
    """Half the noise at every step, at one step alone, none at all: never less loss than under the planned noise."""
    whole, drawn = pubsel.privacy.lattice.normal, []
    algorithm = build("dp_sgd", clip_norm=1.0)

    def median(factor):
        drawn.clear()
        (tmp_path / "checkpoint.pt").unlink(missing_ok=True)

        def normal(*arguments):
            drawn.append(0)
            return factor(len(drawn)) * whole(*arguments)

        monkeypatch.setattr(pubsel.privacy.lattice, "normal", normal)
        losses, plan, _ = followed(tmp_path, algorithm, rate, steps=20)
        found = losses.epsilons()
        assert found[0] == 0  # what is never added is not lost, whatever the noise
        return float(np.median(found)), float(found[1]), losses.least_noise(), plan

    right, _, p, plan = median(lambda step: 1.0)
    assert p > 1e-6
    half, clipped_half, p, _ = median(lambda step: 0.5)
    assert half > 1.8 * right
    assert p < 1e-6
    assert 0.9 < clipped_half / accountant.spent(plan.noise_multiplier / 2, rate, 20, 1e-5) < 1.35
    once, *_, p, _ = median(lambda step: 1e-4 if step == 7 else 1.0)
    assert once > 10 * right
    assert p < 1e-6
    assert median(lambda step: 0.0)[:2] == (math.inf, math.inf)


def test_a_little_less_noise_at_every_step_is_measured_over_all():
    """At no step is it certain: 81 of 100 squares."""
    plan = accountant.plan(2.0, 1e-5, 1.0, 20, 1.0)
    losses = Losses(torch.zeros(3), plan, 1)
    losses.noise = [(81.0, 100)] * 20
    assert losses.noise_multiplier() == pytest.approx(0.9 * plan.noise_multiplier)


@pytest.mark.attack
def test_what_is_not_clipped_loses_more_than_is_claimed(tmp_path, monkeypatch):
    monkeypatch.setattr(dp_sgd, "clip_factors", lambda norms, bound: torch.ones_like(norms))
    losses, plan, _ = followed(tmp_path, build("dp_sgd", clip_norm=1.0), 0.2, steps=6)
    assert losses.epsilons()[1] > 10 * plan.epsilon


@pytest.mark.attack
@pytest.mark.parametrize("rate", [1.0, 0.2])
def test_the_first_release_counts(rate):
    """dp_pca: |x|^2 / R^2 over the noise of the PCA, written out, composed with the steps."""
    torch.manual_seed(1)
    x, public = torch.randn(30, 8), torch.randn(50, 8)
    x[0] = 1000
    algorithm = build("dp_pca", k=4)
    first, plan = accountant.plan(1.0, 1e-6, 1.0, 1, 1.0), accountant.plan(1.0, 1e-6, rate, 10, 1.0)
    losses = Losses(torch.zeros(30), plan, 1, first)
    made = losses.watching(algorithm).frozen(Split(public, torch.zeros(50)), 8, lambda purpose, step: None)
    noisy_sum(made, x, first.noise_multiplier, np.random.default_rng(0), rows=7)
    standard = (x - public.mean(0)) / public.std(0, correction=0)
    bound = ((public - public.mean(0)) / public.std(0, correction=0)).norm(dim=1).median()
    want = (standard.norm(dim=1) / bound).clamp(max=1) ** 2
    noise = math.sqrt(losses.noise[0][0] / losses.noise[0][1])
    assert abs(noise - 1) < 0.4  # 36 numbers
    np.testing.assert_allclose(losses.first_mus * first.noise_multiplier * noise, want, rtol=1e-3)
    # the rest as if nothing were added later: the first release alone, at the delta of both
    alone = losses.epsilons()
    exact = accountant.gaussian_epsilon(losses.first_mus[0], 2e-6)
    assert exact * 0.99 < alone[0] < 1.3 * exact  # Renyi DP reads high
    losses.squares[:], losses.levels[:, 100] = 10, 10
    losses.noise.append((100.0, 100))
    both = losses.epsilons()
    assert (both > alone).all()
    assert both[0] <= 2.2 / noise
    assert both[0] > 1.2


def test_the_command_follows_the_run_itself(tmp_path, folder, capsys):
    """The weights that the losses belong to are those of `pubsel run`, bit for bit; the CSV has a row an example."""
    words = "+experiment=quickstart algorithm=dp_sgd distance=none model=pixels training.steps=20 threads=1".split()
    assert main(["run", *words]) == 0
    assert main(["audit", *words, "audit.kind=per_instance"]) == 0
    out = capsys.readouterr().out
    (run,) = tmp_path.glob("results/runs/*/result.json")
    (audit,) = tmp_path.glob("results/audits/*/result.json")
    trained, record = json.loads(run.read_text()), json.loads(audit.read_text())
    assert (record["run"], record["weights"]) == (trained["identity"], trained["weights"])
    frame = pandas.read_csv(audit.with_name("per_instance.csv"))
    assert len(frame) == trained["private_examples"]
    assert 0 <= frame["epsilon"].min() < frame["epsilon"].max() <= 1.02 * record["claimed"] == 1.02 * 4
    assert abs(record["noise"] - 1) < 0.02
    assert record["control"]["found"]
    assert "with a third of the noise: found (noise scale)" in out
    assert math.isclose(record["losses"]["median"], frame["epsilon"].median(), rel_tol=1e-2)
    assert "do not publish them" in out
