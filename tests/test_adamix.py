"""AdaMix, its ablations and its baselines against their steps written out; what they may read; runs that go on."""

import math
from pathlib import Path

import numpy as np
import pytest
import torch
from scipy import stats
from sklearn.datasets import load_digits

import pubsel.training.loop
from pubsel.algorithms import Facts, View, adamix
from pubsel.algorithms.adamix import project, public_gradient, subspace_around, train_on_public
from pubsel.algorithms.dp_sgd import curvature
from pubsel.cell import guarantee
from pubsel.cli import main
from pubsel.data import Split, Task
from pubsel.gradients import factored
from pubsel.gradients.factored import LinearGradients
from pubsel.gradients.matrix import DenseGradients
from pubsel.messages import UsageError
from pubsel.privacy import accountant
from pubsel.privacy.randomness import stream
from pubsel.privacy.sampling import Schedule, schedule
from pubsel.rules import Budget, canonical
from pubsel.settings import CONF
from pubsel.settings.identity import identity_of
from pubsel.settings.keys import Training
from pubsel.training.loop import Job, fit, noisy_mean
from tests import made
from tests.made import build, only_record, write_npz
from tests.synthetic import secret_named

C, D, M, N = 3, 8, 15, 40
P = C * (D + 1)
FAMILY = ["adamix", "adamix_clipping", "adamix_projection", "adamix_theory", "ngd", "fully_private", "ppgd"]
by_config = pytest.mark.parametrize("name", FAMILY)


def examples(n, seed):
    draw = np.random.RandomState(seed)
    y = draw.randint(C, size=n)
    x = draw.standard_normal((n, D)) + 2 * np.eye(C, D)[y]
    x *= np.linspace(0.2, 1.5, n)[:, None]  # gradients of differing norms
    return Split(torch.from_numpy(x), torch.from_numpy(y))


PUBLIC, PRIVATE = examples(M, 1), examples(N, 2)


def linear(zero=False):
    torch.manual_seed(0)
    model = torch.nn.Linear(D, C).double().eval()
    if zero:
        for parameter in model.parameters():
            torch.nn.init.zeros_(parameter)
    return model


def random(purpose, step):
    return stream("name", f"public {purpose}", step)


def descended(w, steps, rate, decay=0.0, towards=0.0):
    """The weights after gradient descent on the public sum and on decay/2 ||w - towards||^2."""
    for _ in range(steps):
        w = w - rate * (rows_of(w, PUBLIC).sum(0) + decay * (w - towards))
    return w


def view(model=None, public=PUBLIC, **changes):
    model = model if model is not None else linear()
    return View(model, LinearGradients(model), public, C, False, random, N)._replace(**changes)


def weights(model):
    return torch.cat([p.detach().flatten() for p in model.parameters()]).numpy()


def rows_of(w, split):
    """Every example's gradient [n, p], written out."""
    x, y = split.x.numpy(), split.y.numpy()
    logits = x @ w[: C * D].reshape(C, D).T + w[C * D :]
    p = np.exp(logits - logits.max(1, keepdims=True))
    p /= p.sum(1, keepdims=True)
    r = p - np.eye(C)[y]
    return np.hstack([np.einsum("nc,nd->ncd", r, x).reshape(len(x), -1), r])


def clipped(rows, tau):
    return (rows * np.minimum(1, tau / np.linalg.norm(rows, axis=1))[:, None]).sum(0)


def projector(gradient, rank):
    """Onto the top `rank` left singular vectors of the public gradient [d, C]."""
    u = np.linalg.svd(gradient[: C * D].reshape(C, D).T)[0][:, :rank]
    return u @ u.T


def train(algorithm, folder, noise=0.0, public=PUBLIC, private=PRIVATE, stop=None, key="key", zero=True, **changes):
    """What `fit` ends with from zero weights, in full batches."""
    values = {"epochs": 1, "steps": 4, "batch_size": 1000, "learning_rate": 0.01, "momentum": 0.0}
    values |= {"milestones": [], "decay": 1.0, "chunk": None, "checkpoint_seconds": 0.0}
    training, model = made.training(**values | changes), linear(zero)
    task = Task(private, public, private, C, "accuracy", (), (), ())

    def report(now):
        if now.step == stop:
            raise KeyboardInterrupt

    plan = schedule(len(private.x), training)
    checkpoint = Path(folder) / "checkpoint.pt"
    fit(model, task, Job(algorithm, plan, noise, training, "name", checkpoint), secret_named(key), report)
    return weights(model)


# Steps


def test_steps_of_the_paper():
    """AdaMix, Section 4: sigma 20."""
    assert accountant.most_steps(1, 1e-5, 20) == 28
    assert accountant.most_steps(3, 1e-5, 20) == 206
    for epsilon, steps in ((1, 28), (3, 206)):
        assert accountant.spent(20, 1.0, steps, 1e-5) <= epsilon < accountant.spent(20, 1.0, steps + 1, 1e-5)
    assert accountant.most_steps(1, 1e-5, 3.8) == 1
    with pytest.raises(UsageError, match=r"privacy\.noise_multiplier=1: one step already costs more than epsilon=1"):
        accountant.most_steps(1, 1e-5, 1)


@pytest.mark.parametrize("sigma", [5, 11.3, 20, 100])
@pytest.mark.parametrize("epsilon", [0.5, 1, 3, 8])
def test_as_many_steps_as_epsilon_allows_and_no_more(epsilon, sigma):
    budget = Budget(epsilon, 1e-5, noise_multiplier=sigma)
    training = Training(1, None, 1000, 0.1, 0.0, 0.0, [], 1.0, None, 60)
    if epsilon == 0.5 and sigma == 5:
        with pytest.raises(UsageError, match="one step already costs more"):
            guarantee(budget, training, build("adamix"), N)
        return
    plan, spend, first = guarantee(budget, training, build("adamix"), N)
    assert (plan.rate, first, spend.noise_multiplier, spend.steps) == (1, None, sigma, plan.steps)
    assert spend.epsilon <= epsilon < accountant.spent(sigma, 1.0, plan.steps + 1, 1e-5)
    mu = math.sqrt(plan.steps) / sigma
    assert accountant.gaussian_delta(spend.epsilon, mu) <= 1e-5 * (1 + 1e-9)


# One step, written out


@pytest.mark.parametrize("centre", ["zero", "start"])
@pytest.mark.parametrize("rank", [1, 2, None, D, 100])
@pytest.mark.parametrize("clip_norm", [None, 2.0])
def test_a_step_of_adamix(rank, clip_norm, centre):
    """Algorithm 2: threshold and subspace of public gradients, sums and not means, weight decay."""
    algorithm = build("adamix", rank=rank, clip_norm=clip_norm, weight_decay=0.3, centre=centre, quantile=0.8)
    model = linear()
    w = weights(model)
    start = np.linspace(-1, 1, P)
    mechanism = algorithm.mechanism(view(model, start=torch.from_numpy(start)), 5)
    mean, _ = noisy_mean(mechanism, LinearGradients(model), PRIVATE, 1.7, stream("key", "noise", 5), N)

    public = rows_of(w, PUBLIC)
    tau = clip_norm or np.quantile(np.linalg.norm(public, axis=1), 0.8)
    private = clipped(rows_of(w, PRIVATE), tau) + 1.7 * 1.001 * tau * stream("key", "noise", 5).standard_normal(P)
    if rank is not None and rank < D:
        kept = private[: C * D].reshape(C, D) @ projector(public.sum(0), rank)
        private = np.concatenate([kept.ravel(), private[C * D :]])  # the bias has no features to project
    decay = 0.3 * (w - start if centre == "start" else w)
    np.testing.assert_allclose(mechanism.decode(mean), private + public.sum(0) + decay, rtol=1e-4, atol=1e-4)
    assert 0 < (np.linalg.norm(rows_of(w, PRIVATE), axis=1) > tau).sum() < N  # some are clipped, some not


def test_the_sizes_of_batch_and_of_private_data_do_not_scale_the_direction():
    """The mean that the loop makes is a sum again."""
    algorithm, found = build("fully_private"), []
    for size in (N, 7):
        mechanism = algorithm.mechanism(view(batch_size=size, public=None), 0)
        mean, _ = noisy_mean(mechanism, LinearGradients(linear()), PRIVATE, 0.0, stream("key", "noise"), size)
        found.append(mechanism.decode(mean))
    torch.testing.assert_close(found[0], found[1])


def test_the_threshold_follows_the_public_gradients():
    """At other weights it is another; the private examples have no part in it: the mechanism is made without them."""
    sums = []
    for factor in (1.0, 10.0):
        model = linear()
        with torch.no_grad():
            model.weight *= factor
        mechanism = build("adamix", rank=None).mechanism(view(model), 0)
        tau = np.quantile(np.linalg.norm(rows_of(weights(model), PUBLIC), axis=1), 0.9)
        row = torch.full((1, P), 1e3, dtype=torch.float64)
        assert float(mechanism.clipped_sum(DenseGradients(row.clone())).norm()) == pytest.approx(1, rel=2e-5)
        small = torch.full((1, P), 1e-3, dtype=torch.float64)
        found = float(mechanism.clipped_sum(DenseGradients(small.clone())).norm())
        assert found == pytest.approx(1e-3 * math.sqrt(P) / tau, rel=2e-5)
        sums.append(found)
    assert sums[0] != pytest.approx(sums[1], rel=0.1)


# Sensitivity


@by_config
def test_public_examples_that_fit_perfectly_leave_a_threshold(name):
    """All public gradients zero: tau is tiny and not zero, and what is summed is bounded all the same."""
    model = linear(zero=True)
    with torch.no_grad():
        model.bias[0] = 1e4
    public = Split(PUBLIC.x, torch.zeros(M, dtype=torch.int64))
    mechanism = build(name, **({"rank": 5} if name == "adamix" else {})).mechanism(view(model, public=public), 0)
    for size in (1e-30, 1.0, 1e17, math.inf, math.nan):
        assert mechanism.clipped_sum(DenseGradients(torch.full((1, P), size, dtype=torch.float64))).norm() <= 1
    assert torch.isfinite(mechanism.decode(torch.ones(P, dtype=torch.float64))).all()


# The projection


def gradient(rank=C, seed=0):
    draw = np.random.RandomState(seed)
    return torch.from_numpy(draw.standard_normal((C, rank)) @ draw.standard_normal((rank, D)))


def matrix(g, rank, source):
    """The projection [d, d] as a matrix."""
    return project(torch.eye(D, dtype=torch.float64), *subspace_around(g, rank, source))


@pytest.mark.parametrize("rank", range(1, D))
@pytest.mark.parametrize("of", [C, 1])
def test_it_is_an_orthogonal_projection_of_its_rank_around_the_public_gradient(rank, of):
    g = gradient(of)
    found = matrix(g, rank, stream("test", "directions"))
    torch.testing.assert_close(found, found.T)
    torch.testing.assert_close(found @ found, found)
    assert float(found.trace()) == pytest.approx(rank)
    if rank >= of:
        torch.testing.assert_close(g @ found, g)  # the public gradient is kept whole
    else:
        torch.testing.assert_close(found, torch.from_numpy(projector(np.pad(g.numpy().ravel(), (0, C)), rank)))


def test_its_free_directions_are_fixed_by_run_and_step():
    algorithm = build("adamix", rank=6)

    def free(step, **changes):
        mechanism = algorithm.mechanism(view(**changes), step)
        private = torch.arange(P, dtype=torch.float64)
        return mechanism.decode(private)

    assert torch.equal(free(0), free(0))
    assert not torch.allclose(free(0), free(1))
    assert not torch.allclose(free(0), free(0, random=lambda purpose, step: stream("other", purpose, step)))


def test_many_features_leave_a_projection_that_is_as_exact():
    """2000 of 2048 dimensions, in float32 as in a run: the shape of the paper."""
    torch.manual_seed(0)
    g = torch.randn(20, 512)
    basis, inside = subspace_around(g, 500, stream("test", "directions"))
    assert (basis.shape, inside) == ((512, 12), False)
    torch.testing.assert_close(basis.T @ basis, torch.eye(12), atol=1e-5, rtol=0)
    torch.testing.assert_close(project(g, basis, inside), g, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("rank", [3, 6])
def test_noise_that_is_projected_is_noise_on_the_projected_gradient(rank):
    """sigma tau per coordinate within the subspace, nothing outside it; the same test finds 2 % more or less."""
    v = view()
    mechanism = build("adamix", rank=rank, public_gradient=False, weight_decay=0, clip_norm=0.5).mechanism(v, 0)
    empty, decoded = Split(PRIVATE.x[:0], PRIVATE.y[:0]), []
    for i in range(6000):
        mean, _ = noisy_mean(mechanism, v.gradients, empty, 3.0, stream("test", "noise", i), N)
        decoded.append(mechanism.decode(mean))
    rows = torch.stack(decoded)[:, : C * D].reshape(-1, D) / (3.0 * 0.5)
    kept = public_gradient(v.gradients, PUBLIC)[: C * D].view(C, D)
    onto = project(torch.eye(D, dtype=torch.float64), *subspace_around(kept, rank, random("directions", 0)))
    torch.testing.assert_close(rows @ onto, rows)
    torch.testing.assert_close(rows.T @ rows / len(rows), onto, atol=0.05, rtol=0)
    free = len(rows) * rank
    for scale in (1.0, 1.02, 0.98):
        total = float((scale * rows).square().sum())
        p = 2 * min(stats.chi2.cdf(total, free), stats.chi2.sf(total, free))
        assert (p > 1e-6) == (scale == 1.0)


# Before and after the private steps


def test_pretraining_is_gradient_descent_on_the_public_sum():
    model = linear(zero=True)
    build("adamix", pretrain_epochs=3, pretrain_rate=0.02).pretrain(view(model))
    w = descended(np.zeros(P), 3, 0.02)
    np.testing.assert_allclose(weights(model), w, rtol=1e-9, atol=1e-12)
    model = linear()
    build("fully_private").pretrain(view(model, public=None))
    assert np.array_equal(weights(model), weights(linear()))


def test_only_public_decays_to_zero():
    model = linear(zero=True)
    algorithm = build("only_public", pretrain_epochs=3, pretrain_rate=0.02, weight_decay=0.7)
    algorithm.pretrain(view(model))
    w = descended(np.zeros(P), 3, 0.02, decay=0.7)
    np.testing.assert_allclose(weights(model), w, rtol=1e-9, atol=1e-12)
    assert algorithm.sensitivity() == 0
    with pytest.raises(NotImplementedError):
        algorithm.mechanism(view(model), 0)


@pytest.mark.parametrize("radius", [1e3, None])
def test_one_pass_of_stochastic_gradient_descent(radius):
    """Algorithm 3, public phase: rate 2 / (c (t + 1)), one example at a time, in random order, within the ball."""
    from pubsel.algorithms import adamix

    model, ball = linear(zero=True), radius or 0.5
    if radius is None:
        adamix.one_pass(view(model), PUBLIC, 0.4, ball)
    else:
        build("adamix_theory", one_pass=0.4).pretrain(view(model))
    order, w, seen = random("order", 0).permutation(M), np.zeros(P), 0.0
    for t, i in enumerate(order, start=1):
        w = w - 2 / (0.4 * (t + 1)) * rows_of(w, Split(PUBLIC.x[i : i + 1], PUBLIC.y[i : i + 1]))[0]
        seen = max(seen, np.linalg.norm(w))
        w *= min(1, ball / np.linalg.norm(w))
    np.testing.assert_allclose(weights(model), w, rtol=1e-9, atol=1e-12)
    assert sorted(order) == list(range(M)) != order.tolist()
    assert (seen > ball) == (radius is None)


def test_ppgd(tmp_path):
    """Clip norm of the mean public gradient, then public training that is pulled back to the private result."""
    algorithm = build("ppgd", clip_factor=2.0, finish_epochs=4, finish_rate=0.03, reuse=0.5)
    found = train(algorithm, tmp_path, noise=0.9, steps=2)
    w = np.zeros(P)
    for step in range(2):
        tau = 2.0 * np.linalg.norm(rows_of(w, PUBLIC).mean(0))
        noise = 0.9 * 1.001 * tau * secret_named()("noise", step).standard_normal(P)
        w = w - 0.01 * (clipped(rows_of(w, PRIVATE), tau) + noise)
    w = descended(w, 4, 0.03, decay=0.5, towards=w)
    np.testing.assert_allclose(found, w, rtol=1e-4, atol=1e-5)


def test_public_training_that_diverges_is_one_line():
    with pytest.raises(pubsel.training.loop.UserError, match=r"diverged: lower algorithm\.pretrain_rate"):
        train_on_public(view(linear(zero=True)), PUBLIC, 3, 1e308)


# Rates that are null


def zeros(d, classes):
    model = torch.nn.Linear(d, classes)
    for parameter in model.parameters():
        torch.nn.init.zeros_(parameter)
    return model


def descents(rate, m, classes, x, y):
    """The accuracy, on the rows from the 1,000th on, of training on the first m in `only_public`."""
    model = zeros(x.shape[1], classes)
    public = Split(x[:m], y[:m])
    build("only_public", pretrain_rate=rate).pretrain(view(model, public=public, classes=classes))
    return float((model(x[1000:]).argmax(1) == y[1000:]).double().mean())


def after_relu(classes, seed):
    """3,000 rows of norm 1 without negative numbers, of classes that overlap."""
    draw = np.random.RandomState(seed)
    means, y = 0.15 * draw.standard_normal((classes, 100)), draw.randint(classes, size=3000)
    x = torch.from_numpy(np.maximum(means[y] + draw.standard_normal((3000, 100)), 0)).float()
    return torch.nn.functional.normalize(x, dim=1), torch.from_numpy(y)


def unit_digits():
    x, y = load_digits(return_X_y=True)
    order = np.random.RandomState(0).permutation(len(x))
    return torch.nn.functional.normalize(torch.from_numpy(x[order]).float(), dim=1), torch.from_numpy(y[order])


@pytest.mark.parametrize(("classes", "seed"), [(2, 0), (3, 1)])
def test_more_public_labels_never_hurt_as_they_do_at_a_fixed_rate(classes, seed):
    x, y = after_relu(classes, seed)
    few, some, many = (descents(None, m, classes, x, y) for m in (50, 500, 1000))
    assert few + 0.05 < some < many
    assert descents(0.01, 1000, classes, x, y) < descents(0.01, 500, classes, x, y) - 0.02


def test_more_public_digits_never_hurt():
    few, some, many = (descents(None, m, 10, *unit_digits()) for m in (50, 500, 1000))
    assert 0.8 < few < some - 0.1
    assert some < many + 0.005  # of 797 digits, 4
    assert many > 0.95


@pytest.mark.parametrize("decay", [0.0, 0.7])
def test_accelerated_training_on_public_data(decay):
    """Nesterov's method on the public sum, at the inverse of its largest curvature, written out."""
    model = linear(zero=True)
    train_on_public(view(model), PUBLIC, 4, None, decay)
    w, ahead = np.zeros(P), np.zeros(P)
    for t in range(4):
        last, w = w, ahead - (rows_of(ahead, PUBLIC).sum(0) + decay * ahead) / (M + decay)
        ahead = w + t / (t + 3) * (w - last)
    np.testing.assert_allclose(weights(model), w, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("bad", [None, math.nan, 1e30])
def test_norms_of_public_features_are_computed_once(bad, monkeypatch):
    """With a broken row, which counts as zero, at each step."""
    torch.manual_seed(0)
    x, y, calls = torch.nn.functional.normalize(torch.randn(150, D), dim=1), torch.randint(C, (150,)), []
    first = int(bad is not None)
    x[:first] = bad or 0
    model, alone = torch.nn.Linear(D, C), torch.nn.Linear(D, C)
    alone.load_state_dict(model.state_dict())
    train_on_public(view(alone), Split(x[first:], y[first:]), 30, 0.01)
    computed = factored.squared_norms
    monkeypatch.setattr(factored, "squared_norms", lambda rows: calls.append(1) or computed(rows))
    train_on_public(view(model), Split(x, y), 30, 0.01)
    np.testing.assert_allclose(weights(model), weights(alone), rtol=1e-5, atol=1e-6)
    assert len(calls) == (1 if bad is None else 31)

    # memory grows with the rows of a block, and does not with those of all public examples
    monkeypatch.setattr(adamix, "BLOCK", 100)
    monkeypatch.setattr(LinearGradients, "squares", None)
    train_on_public(view(model), Split(x, y), 1, 0.01)


@pytest.mark.parametrize("several", [False, True])
def test_no_row_of_norm_one_has_a_larger_curvature(several):
    """The largest eigenvalue of the Hessian of its loss: the bound is reached at zero weights, with two classes or
    with any labels, and nowhere exceeded."""
    torch.manual_seed(0)
    loss = torch.nn.functional.binary_cross_entropy_with_logits if several else torch.nn.functional.cross_entropy
    for classes, scale in ((2, 0), (2, 1), (5, 0), (5, 3), (5, 30)):
        x = torch.cat([torch.nn.functional.normalize(torch.randn(6), dim=0), torch.ones(1)]).double()
        y = torch.ones(classes).double() if several else torch.tensor(1)
        w = scale * torch.randn(classes, 7).double()
        hessian = torch.autograd.functional.hessian(lambda v, x=x, y=y: loss(v @ x, y), w).view(7 * classes, -1)
        largest, bound = float(torch.linalg.eigvalsh(hessian)[-1]), curvature(classes, several)
        assert largest <= bound * (1 + 1e-9)
        if scale == 0 and (several or classes == 2):
            assert largest == pytest.approx(bound)


@pytest.mark.parametrize("epsilon", [0.3, 1.0, 3.0])
def test_private_training_ends_no_lower_than_its_public_start(epsilon, tmp_path):
    """20 times 1,100 private digits after 200 public ones. At the paper's rates and noise, epsilon 0.3 ends far below
    its start."""
    x, y = unit_digits()
    public, test = Split(x[:200], y[:200]), Split(x[1300:], y[1300:])
    private = Split(x[200:1300].repeat(20, 1), y[200:1300].repeat(20))

    def ends(steps, noise, rate, momentum, **changes):
        algorithm = build("adamix", rank=None, **changes).derived(Facts(22_000, 64, 200, 10))
        how = made.training(steps=steps, batch_size=10**6, learning_rate=rate, momentum=momentum, milestones=[])
        job = Job(algorithm, schedule(22_000, how), noise, how, "name", tmp_path / f"{rate}.pt")
        task, reached = Task(private, public, test, 10, "accuracy", (), (), ()), []
        for trained in (algorithm.pretrain, lambda v: fit(v.model, task, job, secret_named())):
            model = zeros(64, 10)
            trained(view(model, public=public, classes=10))
            reached.append(float((model(test.x).argmax(1) == test.y).double().mean()))
        return reached

    mu = accountant.gaussian_mu(epsilon, 1e-5)
    start, end = ends(30, math.sqrt(30) / mu, None, 0.9)
    assert start > 0.9
    assert end > start - 2 * math.sqrt(start * (1 - start) / len(test.x))
    if epsilon < 1:
        start, end = ends(int((20 * mu) ** 2), 20.0, 0.001, 0.0, pretrain_rate=0.01)
        assert end < start - 0.1


@pytest.mark.parametrize(("name", "changes"), [("adamix", {"rank": 5}), ("ngd", {}), ("fully_private", {})])
def test_the_private_rate_follows_from_the_noise(name, changes):
    """So that a logit of a row of norm sqrt 2 has noise of the planned deviation after all steps, or no larger than is
    stable for the sum of private and public gradients."""
    m = 0 if name == "fully_private" else M
    algorithm = build(name, **changes).derived(Facts(N, D, m, C))
    bound = math.sqrt(2 * (1 - 1 / C)) if name == "adamix" else 1.0
    n_mu = N * math.sqrt(100) / 50
    deviation = 0.6 / math.sqrt(1 + m * (5 if name == "adamix" else D) * C / n_mu**2) if m else 1.2
    rate = algorithm.learning_rate(50.0, 100, N, 0.9)
    assert rate * 50 * bound * math.sqrt(2 * 100) / 0.1 == pytest.approx(deviation)
    stable = 2 * 1.9 / (1.1 * (N + m) + 0.01)
    for noise in (0.0, 1e-9):
        assert algorithm.learning_rate(noise, 100, N, 0.9) == pytest.approx(stable)


def test_the_rate_grows_as_the_clip_norm_falls_as_far_as_is_stable():
    model = linear()
    norms = np.linalg.norm(rows_of(weights(model), PUBLIC), axis=1)
    mean = torch.linspace(-1, 1, P, dtype=torch.float64)
    zero, stable = math.sqrt(2 * (1 - 1 / C)), 2 / (1.1 * (N + M))
    small, large = zero / norms.min(), zero / norms.max()
    assert small > 1.1 > 1 > large
    for quantile, rate, factor in (
        (1e-4, 1e-9, small),
        (1e-4, stable / 1.1, 1.1),
        (1e-4, 2 * stable, 1.0),
        (1.0, 1e-9, large),
        (1.0, 2 * stable, large),
    ):
        algorithm = build("adamix", rank=None, weight_decay=0.0, quantile=quantile).derived(Facts(N, D, M, C))
        plain = algorithm.mechanism(view(model), 0).decode(mean)
        stretched = algorithm.mechanism(view(model, rate=rate), 0).decode(mean)
        torch.testing.assert_close(stretched, factor * plain, rtol=1e-2, atol=1e-9)
    fixed = build("ngd", weight_decay=0.0).derived(Facts(N, D, M, C))
    for v in (view(model), view(model, rate=1e-9)):
        torch.testing.assert_close(fixed.mechanism(v, 0).decode(mean), mean * N + public_gradient(v.gradients, PUBLIC))


OF_PAPER = {
    "adamix": "82fc97d726",
    "adamix_clip": "f58da8e865",
    "adamix_clipping": "2ccfe41af5",
    "adamix_projection": "3a9210baaa",
    "ngd": "f360461b66",
    "fully_private": "d67a5b0fa9",
    "paragon": "accac976b2",
    "only_public": "8cc67ee77e",
    "ppgd": "4772b11cbc",
}


@pytest.mark.parametrize("name", OF_PAPER)
def test_the_experiments_of_the_paper_have_its_rates(name):
    """They are the cells that they were before a rate could be null."""
    settings = canonical(made.checked("run", "+experiment=adamix_mit67", f"algorithm={name}"))
    rates = [settings.algorithm[key] for key in ("pretrain_rate", "finish_rate") if key in settings.algorithm]
    assert rates == [5e-5 if name == "adamix_clip" else 0.01]
    assert settings.training.learning_rate == 0.001
    assert identity_of(settings).endswith(f"-{OF_PAPER[name]}")


def test_a_null_rate_is_for_rows_of_norm_one():
    for name, key in (("adamix", "pretrain_rate"), ("only_public", "pretrain_rate"), ("ppgd", "finish_rate")):
        algorithm = build(name, unit=False, **({"rank": 5} if name == "adamix" else {}))
        with pytest.raises(UsageError, match=rf"algorithm\.{key}=null is for rows of norm 1"):
            algorithm.frozen(PUBLIC, D, random)
        build(name, unit=False, **({"rank": 5} if name == "adamix" else {}), **{key: 0.1}).frozen(PUBLIC, D, random)


def test_a_record_names_the_rates(folder, capsys):
    images("tiny.npz", 1)
    words = "run model=pixels distance=none threads=1 download=false pair.take=train pair.m=20 pair.private=tiny.npz "
    words += "pair.public=tiny.npz training=head training.steps=5"
    for name, keys in {
        "adamix_clipping": {"pretrain_rate": 1 / 20, "learning_rate": None},
        "ppgd": {"finish_rate": 1 / (20 + 0.1)},
        "only_public": {"pretrain_rate": 1 / 20},
    }.items():
        rate = [] if "learning_rate" in keys else ["training.learning_rate=0.1"]
        assert main([*words.split(), f"algorithm={name}", f"results={name}", *rate]) == 0, capsys.readouterr().err
        derived = only_record(name)["derived"]
        assert derived.keys() == keys.keys()
        assert all(derived[key] == pytest.approx(value) for key, value in keys.items() if value)
        said = capsys.readouterr().err
        assert all(f"{key} {value:.4g}" in said for key, value in derived.items())


# The loop


@pytest.mark.parametrize("average", [True, False, "ema"])
@pytest.mark.parametrize("decay", [None, 0.8])
def test_averaged_iterate_and_inverse_decay(tmp_path, monkeypatch, average, decay):
    """Theorem 3: rate 2 / (lambda (t + 1)) at step t from 1; 2 / (T (T + 1)) sum_t t w_t of the weights before it. The
    moving average of De et al. is of the weights after it, and begins with those at the start."""
    assert pubsel.training.loop.MOST_KEPT == 0.9999
    monkeypatch.setattr(pubsel.training.loop, "MOST_KEPT", 0.3)  # which it reaches within these steps
    algorithm = build("fully_private", clip_norm=0.7)
    found = train(algorithm, tmp_path, noise=0.5, average=average, inverse_decay=decay, steps=5, zero=False)
    w, total = weights(linear(zero=False)), np.zeros(P)
    moving = w
    for t in range(1, 6):
        total += t * w
        noise = 0.5 * 1.001 * 0.7 * secret_named()("noise", t - 1).standard_normal(P)
        rate = 0.01 if decay is None else 2 / (decay * (t + 1))
        w = w - rate * (clipped(rows_of(w, PRIVATE), 0.7) + noise + 0.01 * w)
        moving = moving + (1 - min(0.3, t / (t + 9))) * (w - moving)
    want = {True: total * 2 / (5 * 6), False: w, "ema": moving}[average]
    np.testing.assert_allclose(found, want, rtol=1e-4, atol=5e-5)


def test_a_whole_run_of_the_version_of_the_theorems(tmp_path):
    """Pass over public data, then both gradients, weights pulled back to where private training began."""
    algorithm = build("adamix_theory", one_pass=0.4, clip_norm=50.0, weight_decay=2.0)
    found = train(algorithm, tmp_path, noise=0.1, average=True, inverse_decay=2.0, steps=3)
    model = linear(zero=True)
    algorithm.pretrain(view(model))
    start = w = weights(model)
    total = np.zeros(P)
    for t in range(1, 4):
        total += t * w
        noise = 0.1 * 1.001 * 50 * secret_named()("noise", t - 1).standard_normal(P)
        both = rows_of(w, PRIVATE).sum(0) + rows_of(w, PUBLIC).sum(0)
        w = w - 2 / (2.0 * (t + 1)) * (both + noise + 2.0 * (w - start))
    np.testing.assert_allclose(found, total * 2 / 12, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    ("name", "changes"),
    [
        ("adamix", {"rank": 5, "pretrain_epochs": 3, "centre": "start"}),
        ("adamix_theory", {}),
        ("ppgd", {"finish_epochs": 3}),
        ("fully_private", {}),
    ],
)
@pytest.mark.parametrize("stop", [1, 3, 6])
def test_a_run_stopped_in_the_middle_ends_bit_for_bit_alike(tmp_path, name, changes, stop):
    """Average, rate, start and public draws included; stopped at a step, or after the last one."""
    algorithm = build(name, **changes)
    public = PUBLIC if algorithm.uses_public else None
    average = "ema" if name == "adamix" else True
    how = {"noise": 1.0, "steps": 6, "average": average, "inverse_decay": 50.0, "public": public}
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    whole.mkdir()
    parts.mkdir()
    want = train(algorithm, whole, **how)
    with pytest.raises(KeyboardInterrupt):
        train(algorithm, parts, stop=stop, **how)
    assert torch.load(parts / "checkpoint.pt")["step"] == stop
    assert np.array_equal(train(algorithm, parts, **how), want)


# What is read


def test_what_uses_public_data_and_what_does_not():
    uses = {path.stem: build(path.stem).uses_public for path in (CONF / "algorithm").glob("*.yaml")}
    assert len(uses) > 20
    for name in ("dp_sgd", "dp_sgd_clip1", "fully_private", "jl", "non_private", "paragon"):
        assert not uses[name], name
    for name in (*FAMILY[:-2], "ppgd", "only_public", "pillar", "dp_pca", "adadps", "gep", "b_gep"):
        assert uses[name], name
    alone = {"pretrain_epochs": 3, "one_pass": 1.0, "public_gradient": True, "clip_norm": None, "rank": 4}
    for key, value in alone.items():
        assert build("fully_private", **{key: value}).uses_public


@by_config
def test_the_public_parts_need_public_labels_of_the_task(name):
    algorithm, other = build(name), Split(PUBLIC.x, PUBLIC.y + 1)
    several = Split(PUBLIC.x, torch.eye(C)[PUBLIC.y])
    for public, says in ((None, "needs public data"), (other, "needs public labels"), (several, "public labels")):
        if algorithm.uses_public:
            with pytest.raises(UsageError, match=rf"algorithm={name} {'needs ' if 'needs' not in says else ''}{says}"):
                algorithm.mechanism(view(public=public), 0)
        else:
            algorithm.mechanism(view(public=public), 0)


def test_labels_of_a_multi_label_task_must_be_as_many():
    rows = view(public=Split(PUBLIC.x, torch.zeros(M, 2)), multi_label=True)
    with pytest.raises(UsageError, match="needs public labels"):
        rows.labelled("adamix")
    assert rows._replace(classes=2).labelled("adamix") is rows.public


def test_only_public_reads_no_private_example(tmp_path, monkeypatch):
    """Poison in their place, and every door to them locked."""
    algorithm, poison = build("only_public", pretrain_epochs=5), Split(torch.full((N, D), math.nan), PRIVATE.y - 9)
    want = linear(zero=True)
    algorithm.pretrain(view(want))
    for door in ("noisy_mean", "poisson_sample"):
        monkeypatch.setattr(pubsel.training.loop, door, lambda *_: pytest.fail("a private example is read"))
    model, training = linear(zero=True), Training(3, None, 10, 0.1, 0.0, 0.0, [], 1.0, None, 60, average=True)
    plan, spend, first = guarantee(Budget(0.0, 1e-5), training, algorithm, N)
    assert (plan.steps, spend, first) == (0, accountant.NOTHING, None)
    task = Task(poison, PUBLIC, poison, C, "accuracy", (), (), ())
    job = Job(algorithm, Schedule(N, 0.25, 0, 10), 0.0, training, "name", tmp_path / "checkpoint.pt")
    fit(model, task, job, secret_named())
    assert np.array_equal(weights(model), weights(want))
    said = accountant.statement(spend, algorithm.sensitivity(), False, False, examples=100)
    assert (said["epsilon"], said["delta"], said["valid"], said["sensitivity"]) == (0, 0, True, 0)


def images(path, seed, public_seed=0):
    """Images of three classes; those that are drawn as public ones are the same for every seed."""
    draw = np.random.RandomState(public_seed)
    labels = draw.randint(3, size=60)
    pixels = draw.randint(0, 60, (60, 6, 6)) + 150 * (np.arange(6)[:, None] // 2 == labels[:, None, None])
    private = np.random.RandomState(0).permutation(60)[20:]  # the draw of pair.m=20
    other = np.random.RandomState(seed)
    pixels[private] = other.randint(0, 256, (40, 6, 6))
    changed = labels.copy()
    changed[private] = np.where(np.arange(40) < 3, np.arange(40), other.randint(3, size=40))
    pixels = pixels.astype(np.uint8)
    write_npz(path, (pixels, changed), (255 - pixels[:9], labels[:9]))


def test_the_weights_of_only_public_are_the_same_whatever_the_private_examples(folder, capsys):
    words = (
        "run model=pixels distance=none threads=1 download=false pair.take=train pair.m=20 pair.private=tiny.npz "
        "pair.public=other.npz training=adamix"
    ).split()
    digests = {"only_public": set(), "ngd": set()}
    images("other.npz", 3)
    for seed in (1, 2):
        images("tiny.npz", seed)
        for name, found in digests.items():
            extra = ["algorithm.pretrain_epochs=20", f"results={name}{seed}"]
            assert main([*words, f"algorithm={name}", *extra]) == 0, capsys.readouterr().err
            record = only_record(f"{name}{seed}")
            found.add(record["weights"])
            assert record["privacy"]["epsilon"] == (0 if name == "only_public" else pytest.approx(2, rel=1e-2))
    assert {name: len(found) for name, found in digests.items()} == {"only_public": 1, "ngd": 2}
