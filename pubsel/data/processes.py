"""Public images that random processes draw, without a photograph. Baradad, Wulff, Wang, Isola, Torralba: Learning to
See by Looking at Noise, NeurIPS 2021, arXiv:2106.05963; as public data of private training: Tang, Panda, Sehwag,
Mittal: Differentially Private Image Classification by Learning Priors from Random Processes, NeurIPS 2023,
arXiv:2306.06076.

Each image follows from its number alone. It has no label: all are of one class."""

import numpy as np

from pubsel.data.splits import SEED, Parts, from_arrays

TRAIN, TEST = 8000, 2000  # images
SIDE = 32
SMALLEST, LARGEST = 2.0, SIDE / 2  # radius of a leaf, in pixels
LEAVES = 256  # that fall at once, most of them outside of the image
SIDES = 3, 4, 1000  # of a leaf: the last is a disc
EXPONENTS = 0.5, 3.5  # of a spectrum, at least and at most
CONTRAST = 48.0  # deviation of the values around a mean colour, of 0 to 255


def drawn(kind: str) -> Parts:
    """Return 8,000 + 2,000 images of 32x32 RGB by the process of this name."""
    draw = {"dead_leaves": dead_leaves, "spectrum": spectrum}[kind]
    images = np.stack([draw(np.random.RandomState(SEED + number)) for number in range(TRAIN + TEST)])
    labels = np.zeros(len(images), dtype=np.int64)
    return Parts(from_arrays(images[:TRAIN], labels[:TRAIN]), from_arrays(images[TRAIN:], labels[TRAIN:]))


def radii_at(quantiles: np.ndarray) -> np.ndarray:
    """Return radii by their quantiles: a density in proportion to r^-3, from SMALLEST to LARGEST."""
    return (SMALLEST**-2 * (1 - quantiles) + LARGEST**-2 * quantiles) ** -0.5


def dead_leaves(random: np.random.RandomState) -> np.ndarray:
    """Return an image [SIDE, SIDE, 3] of leaves that cover each other. Lee, Mumford, Huang: Occlusion Models for
    Natural Images, IJCV 2001.

    Leaves are discs, squares and triangles of random direction and colour, at random places of the image and of a
    border as wide as the largest radius. The leaf on top comes first, and each one colours the pixels that none before
    it covers, until all are covered: what is seen is then exactly as if leaves had fallen for ever.
    """
    image = np.empty((SIDE * SIDE, 3), dtype=np.uint8)
    bare = np.arange(SIDE * SIDE)  # pixels that no leaf covers
    while len(bare):
        places = random.uniform(-LARGEST, SIDE + LARGEST, (2, LEAVES))
        turns, radii = random.uniform(0, 2 * np.pi, LEAVES), radii_at(random.uniform(size=LEAVES))
        sides = np.take(SIDES, random.randint(len(SIDES), size=LEAVES))
        colours = random.randint(0, 256, (LEAVES, 3), dtype=np.uint8)

        # the circle around a leaf first: few reach the image, and few pixels are in one
        near = np.flatnonzero(np.hypot(*(places - places.clip(0, SIDE))) <= radii)
        down, right = np.arange(SIDE)[:, None] + 0.5 - places[:, None, near]  # [SIDE, leaves]
        row, column = np.divmod(bare, SIDE)
        pixel, leaf = np.nonzero((right**2)[column] <= (radii[near] ** 2 - down**2)[row])
        down, right, leaf = down[row[pixel], leaf], right[column[pixel], leaf], near[leaf]
        half = np.pi / sides[leaf]
        angle = (np.arctan2(down, right) + turns[leaf]) % (2 * half) - half
        inside = np.hypot(down, right) * np.cos(angle) <= radii[leaf] * np.cos(half)

        # pixels are in order, and of each the first leaf comes first
        covered, first = np.unique(pixel[inside], return_index=True)
        image[bare[covered]] = colours[leaf[inside][first]]
        bare = np.delete(bare, covered)
    return image.reshape(SIDE, SIDE, 3)


def spectrum(random: np.random.RandomState) -> np.ndarray:
    """Return an image [SIDE, SIDE, 3] of three fields of random phases, whose amplitudes fall with frequency (u, v) as
    1 / (|u|^a + |v|^b) with random a and b, mixed to random colours."""
    a, b = random.uniform(*EXPONENTS, size=2)
    frequencies = np.abs(np.fft.fftfreq(SIDE, 1 / SIDE))  # 0 to SIDE / 2
    falling = frequencies[:, None] ** a + frequencies**b
    falling[0, 0] = np.inf  # the mean colour is drawn apart

    fields = np.fft.ifft2(np.fft.fft2(random.standard_normal((3, SIDE, SIDE))) / falling).real
    fields /= fields.std((1, 2), keepdims=True)
    mixing = random.standard_normal((3, 3))
    mixing /= np.linalg.norm(mixing, axis=1, keepdims=True)
    values = CONTRAST * np.einsum("ck,kij->ijc", mixing, fields) + random.uniform(64, 192, 3)
    return np.clip(values, 0, 255).astype(np.uint8)
