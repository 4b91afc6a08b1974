"""Random views of images: mirrored, and shifted by a few pixels.

A view is a function of its image and of numbers that were drawn for it, and of no other image in the batch. With
`training.views`, an example's gradient is the mean over several views, clipped once (De, Berrada, Hayes, Smith, Balle:
Unlocking High-Accuracy Differentially Private Image Classification through Scale, 2022, arXiv:2204.13650).

Why this costs no privacy: the views of a step follow from a key of the secret streams, which is drawn for the step
whatever the data are, and from public numbers: the place of the unit among all private units, whose number is public,
and the number of the view within the unit. Given the key, the row of a unit depends on its examples alone, and has norm
at most 1 once it is clipped, as without views. So under the same key, neighbours differ in one clipped row; the
guarantee holds for each key, and therefore for a random one. If views were drawn one after another for the batch, one
more example in it would change the views of all that follow.
"""

from collections.abc import Collection
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from pubsel.files import sent
from pubsel.privacy.randomness import Source, by_place
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
    mirrored, *shifts = sent(torch.from_numpy(uniform), x.device).T

    # the row and the column that each pixel of the view is read from
    places = []
    for side, shift in zip(x.shape[2:], shifts, strict=True):
        most = side // FARTHEST if Augment.crop in kinds else 0
        moved = torch.arange(side, device=x.device) + ((2 * most + 1) * shift[:, None]).long() - most  # [n, side]
        places.append(side - 1 - (side - 1 - moved.abs()).abs())
    rows, columns = places
    if Augment.flip in kinds:
        columns = torch.where(mirrored[:, None] < 0.5, x.shape[3] - 1 - columns, columns)

    pixels = (rows[:, :, None] * x.shape[3] + columns[:, None]).flatten(1)  # [n, height * width]
    return x.flatten(2).gather(2, pixels[:, None].expand(-1, x.shape[1], -1)).view_as(x)


class Views(NamedTuple):
    """The views of the examples of one step: `number` of each example, of these `kinds`. key: of this step, KEY bytes;
    units: int64 [n], the place of each unit of the batch among all private units."""

    number: int
    kinds: Collection[Augment]
    key: bytes
    units: Tensor

    def of(self, x: Tensor, owners: Tensor, numbers: Tensor) -> Tensor:
        """Return a view of each image of x [m, ...]. owners: int64 [m], the unit of the batch that it is of; numbers:
        int64 [m], those of the views within their unit."""
        places = torch.stack([self.units[owners], numbers], 1).numpy()
        return placed(x, self.kinds, by_place(self.key, places)[:, :NUMBERS])
