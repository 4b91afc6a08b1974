"""AdaDPS: its conditioner and a step written out, attacks on its sensitivity, and the labels that it needs."""

import numpy as np
import pytest
import torch

from pubsel.algorithms import View
from pubsel.algorithms.dp_sgd import clipped_sum
from pubsel.data import Split
from pubsel.gradients.factored import LinearGradients
from pubsel.gradients.matrix import DenseGradients, PerExampleGradients
from pubsel.messages import UsageError
from pubsel.privacy.randomness import stream
from pubsel.training.loop import noisy_mean
from tests.made import build, hurtful

C, D, M = 4, 9, 30
P = C * (D + 1)


def split(n, seed):
    draw = np.random.RandomState(seed)
    x = draw.standard_normal((n, D)) * np.logspace(-2, 1, D)  # features of differing scales: what it is for
    return Split(torch.from_numpy(x), torch.from_numpy(draw.randint(C, size=n)))


PUBLIC, PRIVATE = split(M, 1), split(20, 2)


def view(dtype=torch.float64, public=PUBLIC):
    torch.manual_seed(0)
    model = torch.nn.Linear(D, C).to(dtype).eval()
    return View(model, LinearGradients(model), public, C, False, lambda *_: stream("test", "none"), len(PRIVATE.x))


def rows_of(v, data):
    return PerExampleGradients(v.model).matrix(data.x, data.y).rows.numpy()


@pytest.mark.parametrize("damping", [1e-7, 1e-3, 10.0])
@pytest.mark.parametrize("bound", [0.01, 1.0, 100.0])
def test_a_step(damping, bound):
    """Each private gradient over (root mean square of the public ones + damping), clipped, summed, noised, averaged."""
    v = view()
    mechanism = build("adadps", damping=damping, clip_norm=bound).mechanism(v, 0)
    mean, _ = noisy_mean(mechanism, v.gradients, PRIVATE, 1.5, stream("key", "noise"), 20)
    scale = 1 / (np.sqrt((rows_of(v, PUBLIC) ** 2).mean(0)) + damping)
    rows = rows_of(v, PRIVATE) * scale
    total = (rows * np.minimum(1, bound / np.linalg.norm(rows, axis=1))[:, None]).sum(0)
    total += 1.5 * 1.001 * bound * stream("key", "noise").standard_normal(P)
    np.testing.assert_allclose(mechanism.decode(mean), total / 20, rtol=1e-4, atol=1e-4 * bound)
    assert mechanism.size == P


def test_private_data_have_no_part_in_the_conditioner():
    """It is made of a view that has none; and noise is added after it, in the conditioned coordinates."""
    v = view()
    scale = 1 / (np.sqrt((rows_of(v, PUBLIC) ** 2).mean(0)) + 1e-3)
    assert scale.max() / scale.min() > 50
    mechanism = build("adadps").mechanism(v, 0)
    noise = torch.ones(P, dtype=torch.float64)
    torch.testing.assert_close(mechanism.decode(noise), noise)  # not scaled again
    again = build("adadps").mechanism(v, 7)  # no draw: the same at every step of the same weights
    rows = torch.randn(5, P, dtype=torch.float64)
    assert torch.equal(mechanism.clipped_sum(DenseGradients(rows)), again.clipped_sum(DenseGradients(rows)))


def test_the_conditioner_is_made_in_blocks(monkeypatch):
    from pubsel.gradients import factored

    row, found = torch.randn(1, P, dtype=torch.float64), []
    for block in (2**16, 7):
        monkeypatch.setattr(factored, "BLOCK", block)
        found.append(build("adadps").mechanism(view(), 0).clipped_sum(DenseGradients(row.clone())))
    torch.testing.assert_close(found[0], found[1], rtol=1e-12, atol=1e-12)


# Sensitivity


def scales(p):
    torch.manual_seed(2)
    ordered = torch.logspace(-6, 12, p)
    mixed = ordered[torch.randperm(p)]
    return {"ordered": ordered, "mixed": mixed, "one": torch.ones(p), "huge": torch.full((p,), 1e12)}


@pytest.mark.parametrize("bound", [1e-12, 0.01, 1.0, 100.0])
@pytest.mark.parametrize("scale", ["ordered", "mixed", "one", "huge"])
def test_one_row_moves_the_sum_by_at_most_one(bound, scale):
    p = 700
    by = scales(p)[scale]
    others = torch.randn(12, p)
    without, reached = clipped_sum(DenseGradients(others.clone()), bound, by).double(), 0.0
    for row in hurtful(p).split(1):
        alone = clipped_sum(DenseGradients(row.clone()), bound, by).double()
        assert torch.isfinite(alone).all()
        assert alone.norm() <= 1
        moved = clipped_sum(DenseGradients(torch.cat([others, row])), bound, by).double() - without
        assert moved.norm() <= 1 + 1e-5 * float(without.norm())
        reached = max(reached, float(alone.norm()))
    assert reached > 0.999


def test_clipping_before_the_conditioner_would_be_found():
    """The attack above fails a mechanism that clips the gradient and scales it afterwards, or clips too little."""
    row, by = DenseGradients(torch.ones(1, 700)), scales(700)["mixed"]
    assert (row.rows[0] / row.row_norms()[0] * by).norm() > 1
    assert (1.001 * clipped_sum(row, 1.0, by)).norm() > 1


@pytest.mark.parametrize("damping", [0, 1e-13, -1])
def test_a_damping_that_could_divide_by_zero_is_refused(damping):
    with pytest.raises(UsageError, match=r"algorithm\.damping"):
        build("adadps", damping=damping)


def test_public_gradients_of_zero_leave_a_finite_step():
    v = view(torch.float32, Split(torch.zeros(5, D), torch.randint(C, (5,))))
    mechanism = build("adadps", damping=1e-12).mechanism(v, 0)
    for row in hurtful(P).split(1):
        assert mechanism.clipped_sum(DenseGradients(row.clone())).norm() <= 1


# Labels


@pytest.mark.parametrize(
    ("public", "says"),
    [
        (None, "needs public data: give pair.public=NAME"),
        (Split(PUBLIC.x, PUBLIC.y + 1), "needs public labels of the private task.*pair.take=train"),
        (Split(PUBLIC.x, torch.eye(C)[PUBLIC.y]), "needs public labels of the private task"),
    ],
    ids=["none", "other classes", "several at once"],
)
def test_it_needs_public_labels_of_the_task(public, says):
    with pytest.raises(UsageError, match=f"algorithm=adadps {says}"):
        build("adadps").mechanism(view(public=public), 0)
