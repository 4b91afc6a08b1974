"""Gradient Subspace Distance: Algorithm 1 written out, its algebra, pairing, and real images where they are."""

import numpy as np
import pytest
import torch
from scipy.linalg import subspace_angles

from pubsel.commands.rank import ordered
from pubsel.data import Split
from pubsel.distances import gsd
from pubsel.gradients.matrix import DenseGradients
from pubsel.messages import UsageError
from tests.made import network
from tests.synthetic import distance


def settings(**changes):
    return distance("gsd", **({"k": 5, "m": 60} | changes))


def test_gsd_is_algorithm_1():
    private, public = torch.randn(30, 80, dtype=torch.float64), torch.randn(30, 80, dtype=torch.float64)
    v1, v2 = (np.linalg.svd(g.numpy(), full_matrices=False)[2][:6].T for g in (private, public))
    want = np.sqrt(np.sum(np.sin(subspace_angles(v1, v2)) ** 2)) / np.sqrt(6)
    assert gsd.gsd(DenseGradients(private), DenseGradients(public), 6) == pytest.approx(want, rel=1e-9)


def test_gsd_of_equal_swapped_and_orthogonal_gradients():
    g = torch.randn(20, 50, dtype=torch.float64)
    h = torch.randn(20, 50, dtype=torch.float64)
    left, right = torch.zeros(20, 100, dtype=torch.float64), torch.zeros(20, 100, dtype=torch.float64)
    left[:, :50], right[:, 50:] = g, h
    assert gsd.gsd(DenseGradients(g.clone()), DenseGradients(g.clone()), 4) == pytest.approx(0, abs=1e-6)
    assert gsd.gsd(DenseGradients(left), DenseGradients(right), 4) == pytest.approx(1)
    a = gsd.gsd(DenseGradients(g.clone()), DenseGradients(h.clone()), 4)
    assert a == pytest.approx(gsd.gsd(DenseGradients(h), DenseGradients(g), 4))


def test_rows_of_any_length_count_alike_when_they_are_normalised(digits):
    """A head that is sure of itself leaves gradients of 1e-30, whose squares float32 cannot hold."""
    _, test, _ = digits

    class Scaled(gsd.PerExampleGradients):
        def blocks(self, *args, **kwargs):
            for block in super().blocks(*args, **kwargs):
                yield DenseGradients(block.rows * torch.logspace(0, -30, len(block))[:, None])

    plain, scaled = (
        gsd.gradients_of(engine(network(0)), settings(m=20), test.x[:20], test.y[:20]).rows.clone()
        for engine in (gsd.PerExampleGradients, Scaled)
    )
    torch.testing.assert_close(scaled, plain, rtol=1e-3, atol=1e-5)


def test_each_key_and_each_initialisation_has_a_private_batch_of_its_own(digits):
    train, test, _ = digits
    alone = settings().measure(network, train, {"a": test}, 10, "key")
    other = settings().measure(network, train, {"a": test}, 10, "another key")
    assert other["a"] != alone["a"]
    of_one_network = settings(labels="given").measure(lambda i: network(0), train, {"a": test}, 10, "key")
    assert len(set(of_one_network["a"])) == 3  # each initialisation has a private batch of its own


def test_settings_change_the_value(digits):
    train, test, _ = digits
    values = {
        str(changes): settings(initialisations=1, **changes).measure(network, train, {"a": test}, 10, "key")["a"][0]
        for changes in ({}, {"normalise_rows": False}, {"labels": "given"}, {"parameters": "all"}, {"k": 4})
    }
    assert len(set(values.values())) == 5
    assert all(0 < value < 1 for value in values.values())


def test_weights_leave_the_biases_out(digits):
    train, _, _ = digits
    x, y = train.x[:5], train.y[:5]
    weights, everything = settings(), settings(parameters="all")
    assert gsd.gradients_of(gsd.engine_of(network(0), everything), everything, x, y).rows.shape == (5, 650)
    gradients = gsd.gradients_of(gsd.engine_of(network(0), weights), weights, x, y)
    assert gradients.rows.shape == (5, 640)
    norms = gradients.row_norms()
    torch.testing.assert_close(norms, torch.ones(5, dtype=torch.float64), atol=1e-6, rtol=0)


def test_rows_of_any_size_become_unit_rows():
    rows = torch.randn(7, 500, generator=torch.Generator().manual_seed(0))
    scales = torch.tensor([0, 1e-38, 1e-30, 1e-18, 1e-9, 1, 1e15])
    found = gsd.unit_rows(DenseGradients(rows * scales[:, None]))
    want = rows.double() / rows.double().norm(dim=1, keepdim=True) * (scales > 0)[:, None]
    torch.testing.assert_close(found.rows.double()[[0, *range(2, 7)]], want[[0, *range(2, 7)]], rtol=1e-5, atol=1e-8)
    torch.testing.assert_close(found.rows.double()[1], want[1], rtol=0.05, atol=1e-3)  # most entries are subnormal
    assert found.row_norms().tolist() == pytest.approx([0, *[1] * 6], abs=1e-6)


@pytest.mark.parametrize("normalise_rows", [True, False])
def test_measure_is_the_distance_between_gradients_held_apart(digits, normalise_rows):
    """All sides of an initialisation share one memory of G; m = 50 is no whole number of passes."""
    train, test, noise = digits
    measured = settings(m=50, initialisations=2, normalise_rows=normalise_rows, labels="given")
    private = Split(train.x[:50], train.y[:50])
    found = measured.measure(network, private, {"test": test, "noise": noise}, 10, "key")
    for name, public in {"test": test, "noise": noise}.items():
        for i in range(2):
            sides = [
                gsd.gradients_of(gsd.engine_of(network(i), measured), measured, split.x[:50], split.y[:50])
                for split in (private, public)
            ]
            assert gsd.gsd(*sides, measured.k) == pytest.approx(found[name][i], abs=1e-6)


def test_more_dimensions_than_examples_are_named(digits):
    train, _, noise = digits
    with pytest.raises(UsageError, match=r"distance\.k=61 is more than distance\.m=60"):
        settings(k=61).measure(network, train, {"noise": noise}, 10, "key")


def test_gradients_that_do_not_span_k_dimensions_are_named(digits):
    train, test, _ = digits
    one = Split(test.x[:1].repeat(60, 1, 1, 1), test.y[:60])
    with pytest.raises(UsageError, match=r"distance\.k=20: on same, the gradients span \d+ dimensions"):
        settings(k=20).measure(network, train, {"same": one}, 10, "key")


def test_order_and_how_often_it_held():
    rows = ordered({"far": [0.9, 0.8, 0.4, 0.9], "near": [0.5, 0.6, 0.5, 0.5]})
    assert [(row["public"], row["holds"]) for row in rows] == [("near", 0.75), ("far", None)]
    assert rows[0]["mean"] == pytest.approx(0.525)
    assert rows[0]["std"] == pytest.approx(np.std([0.5, 0.6, 0.5, 0.5], ddof=1))
