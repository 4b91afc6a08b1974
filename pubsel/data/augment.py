"""Random views of images: mirrored, and shifted by a few pixels.

A view is a function of its image and of numbers that were drawn for it, and of no other image in the batch.
"""

from collections.abc import Collection

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from pubsel.files import sent
from pubsel.privacy.randomness import Source
from pubsel.settings.keys import Augment

NUMBERS = 3  # that decide a view: whether it is mirrored, and how far it is shifted down and to the right
FARTHEST = 8  # a shift is at most the side over this: 4 pixels of 32


def augmented(x: Tensor, kinds: Collection[Augment], rng: Source) -> Tensor:
    """Return a random view of each image of x [n, channels, height, width], of any type: `placed` by numbers of
    `rng`."""
    return placed(x, kinds, rng.random(NUMBERS * len(x)).reshape(-1, NUMBERS))


def placed(x: Tensor, kinds: Collection[Augment], uniform: NDArray[np.float64]) -> Tensor:
    """Return the view of each image of x [n, channels, height, width] that numbers in [0, 1) decide, [n, NUMBERS].

    flip: mirrored left to right with probability 1/2. crop: shifted, uniformly, by up to an eighth of the height and of
    the width; what comes in is the image reflected at its edge.
    """
    mirrored, *shifts = torch.from_numpy(uniform).T

    # the row and the column that each pixel of the view is read from
    places = []
    for side, shift in zip(x.shape[2:], shifts, strict=True):
        most = side // FARTHEST if Augment.crop in kinds else 0
        moved = torch.arange(side) + ((2 * most + 1) * shift[:, None]).long() - most  # [n, side]
        places.append(side - 1 - (side - 1 - moved.abs()).abs())
    rows, columns = places
    if Augment.flip in kinds:
        columns = torch.where(mirrored[:, None] < 0.5, x.shape[3] - 1 - columns, columns)

    pixels = (rows[:, :, None] * x.shape[3] + columns[:, None]).flatten(1)  # [n, height * width]
    return x.flatten(2).gather(2, sent(pixels, x.device)[:, None].expand(-1, x.shape[1], -1)).view_as(x)
