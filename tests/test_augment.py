"""Views of images: what they show, and what they follow from."""

import numpy as np
import pytest
import torch

from pubsel.data.augment import NUMBERS, augmented, placed
from pubsel.privacy.randomness import SystemEntropy, stream
from pubsel.settings.keys import Augment

FLIP, CROP = Augment.flip, Augment.crop


def images(n, shape=(3, 16, 24), dtype=torch.uint8):
    return torch.from_numpy(stream("test", "images").integers(256, size=(n, *shape))).to(dtype)


def by_hand(image, mirrored, down, right):
    """A view of one image, by numpy's reflected padding."""
    image = image[:, :, ::-1] if mirrored else image
    height, width = image.shape[1:]
    padded = np.pad(image, ((0, 0), (height // 8,) * 2, (width // 8,) * 2), mode="reflect")
    return padded[:, down : down + height, right : right + width]


@pytest.mark.parametrize("kinds", [[FLIP], [CROP], [FLIP, CROP], []])
@pytest.mark.parametrize("dtype", [torch.uint8, torch.float32])
def test_a_view_is_the_image_mirrored_and_shifted_with_reflected_edges(kinds, dtype):
    x, uniform = images(60, dtype=dtype), stream("test", "views").random((60, NUMBERS))
    if FLIP not in kinds:
        uniform[:, 0] = 0.9
    if CROP not in kinds:
        uniform[:, 1:] = 0.5
    views = placed(x, kinds, uniform)
    assert (views.dtype, views.shape) == (x.dtype, x.shape)
    mirrored, down, right = uniform[:, 0] < 0.5, (5 * uniform[:, 1]).astype(int), (7 * uniform[:, 2]).astype(int)
    for i, image in enumerate(x.numpy()):
        assert np.array_equal(views[i], by_hand(image, mirrored[i], down[i], right[i]))


def test_half_of_the_images_are_mirrored_and_all_shifts_occur_as_often():
    """Of 32 pixels up to 4 each way, 81 in all; of 7, none."""
    x = torch.arange(32 * 32, dtype=torch.float32).view(1, 1, 32, 32).expand(20000, -1, -1, -1)
    for rng in (stream("test", "views"), SystemEntropy()):
        views = augmented(x, [FLIP, CROP], rng)
        centre, beside = views[:, 0, 16, 16], views[:, 0, 16, 17]
        assert abs(float((beside < centre).float().mean()) - 0.5) < 0.02
        counts = augmented(x, [CROP], rng)[:, 0, 16, 16].unique(return_counts=True)[1]
        assert len(counts) == 81
        assert 150 < counts.min() <= counts.max() < 350
    small = images(50, (1, 7, 7))
    assert torch.equal(augmented(small, [CROP], stream("test", "views")), small)


def test_a_view_follows_from_its_image_and_its_numbers_alone():
    x, uniform = images(9), stream("test", "views").random((9, NUMBERS))
    views = placed(x, [FLIP, CROP], uniform)
    alone = torch.cat([placed(x[i : i + 1], [FLIP, CROP], uniform[i : i + 1]) for i in range(9)])
    assert torch.equal(alone, views)
    assert placed(x[:0], [FLIP, CROP], uniform[:0]).shape == (0, 3, 16, 24)
