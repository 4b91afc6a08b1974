import numpy as np
import pytest

from pubsel.messages import UsageError
from pubsel.papers.theory.separability import separability
from pubsel.privacy.randomness import stream


def cross(along, across):
    """Classes at -along and +along on the first axis, each with points at -across and +across on the second; in 4-d."""
    x = np.array([[side * along, other * across, 0, 0] for side in (-1, 1) for other in (-1, 1)])
    return x, np.array([0, 0, 1, 1])


def test_a_separator_in_the_top_component_gives_0_and_one_across_it_gives_1():
    assert separability(*cross(0.8, 0.6), [0, 1, 2, 4]) == pytest.approx([1, 0, 0, 0], abs=1e-12)
    assert separability(*cross(0.6, 0.8), [0, 1, 2, 4]) == pytest.approx([1, 1, 0, 0], abs=1e-12)


def test_a_separator_between_two_components():
    """A first class lies along u, the second along v; the separator of unit vectors is (u - v) / |u - v|."""
    angle = 2 * np.pi / 3
    x = np.array([[1, 0], [np.cos(angle), np.sin(angle)]])
    assert separability(x, [1, 0], [1, 2]) == pytest.approx([0, 0], abs=1e-6)  # u - v has the largest second moment
    x = np.array([[1, 0], [1, 0], [1, 0], [0, 1]])  # top component: u; separator at 45 degrees
    assert separability(x, [1, 1, 1, 0], [1, 2]) == pytest.approx([1 - np.sqrt(0.5), 0], abs=1e-3)


def test_it_falls_with_k_to_0_and_ignores_scale_labels_and_rotation():
    draw = stream("separability", "data")
    x, y = draw.standard_normal((60, 12)) * np.logspace(0, -1, 12), draw.random(60) < 0.5
    x[:, 5] += y
    ks = list(range(13))
    xi = separability(x, y, ks)
    assert (np.diff(xi) <= 1e-12).all()
    assert xi[0] == 1
    assert xi[-1] == pytest.approx(0, abs=1e-12)
    rotation, _ = np.linalg.qr(draw.standard_normal((12, 12)))
    scale = draw.random(60)[:, None] + 0.1
    assert separability(scale * x @ rotation, np.where(y, "cat", "dog"), ks) == pytest.approx(xi, abs=0.01)


def test_the_second_moment_is_not_centred():
    """Centred, the mean direction would vanish from the components; here it is the first."""
    draw = stream("separability", "mean")
    x = np.eye(3)[0] + draw.standard_normal((200, 3)) * [0.0, 0.3, 0.01]
    y = np.arange(200) % 2
    x[:, 2] += 0.1 * (2 * y - 1)
    assert separability(x, y, [1])[0] > 0.9
    assert separability(x, y, [2])[0] > 0.5
    assert separability(x, y, [3])[0] == pytest.approx(0, abs=1e-12)


@pytest.mark.parametrize(
    ("y", "ks"), [([0, 0, 0, 0], [1]), ([0, 1, 2, 2], [1]), ([0, 0, 1, 1], [5]), ([0, 0, 1, 1], [-1])]
)
def test_what_it_refuses(y, ks):
    with pytest.raises(UsageError, match="two classes, and each k from 0 to 4"):
        separability(cross(0.8, 0.6)[0], y, ks)
