"""How long a distance will take, and how much memory, before it is measured: seconds by timing small pieces of it,
memory by counting.

Public examples are read; random ones replace the private, of which only number, shape and classes are known. How many
steps a fit or a transport takes depends on the data, so that Task2Vec and OTDD may take somewhat more or less.
"""

import dataclasses
from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor, nn

from pubsel.data import Split
from pubsel.distances import Distance, frechet, mmd, otdd
from pubsel.distances.dp_gsd import Side
from pubsel.distances.gsd import GSD, Labelling, engine_of, gradients_of
from pubsel.distances.inputs import class_numbers, penultimate
from pubsel.distances.task2vec import Task2Vec, fisher, fit_head
from pubsel.distances.whitening import Whitening
from pubsel.gradients.matrix import DenseGradients, PerExampleGradients, random_labels
from pubsel.gradients.subspace import BUCKETS, MANY, davidson, is_large, top_eigenpairs
from pubsel.messages import UsageError
from pubsel.models.trained import head
from pubsel.privacy.randomness import stream
from pubsel.selection import Comparison
from pubsel.training.estimate import passes
from pubsel.training.rehearsal import foreseen, random_like

ROWS = 32  # of the smallest piece
RANK = 64  # of the large part of random gradients
TRANSPORT = 2.3  # power of m with which the time of OTDD grows


class Sides(NamedTuple):
    """Seconds of an initialisation."""

    private: float
    candidate: float


class Measurement(NamedTuple):
    """The distance to be measured, and on what. private: read for its shape alone."""

    distance: Distance
    model: nn.Module
    private: Split
    public: Split
    classes: int

    def images(self, rows: int) -> Tensor:
        """Return so many public examples, from the first on again if there are fewer."""
        return self.public.x[torch.arange(rows) % len(self.public.x)]

    def labels(self, rows: int) -> Tensor:
        """Return random labels of the private task."""
        return random_labels(stream("estimate", "labels"), rows, self.classes, self.private.y.dim() == 2)


def seconds(this: Measurement, candidates: int = 1) -> float:
    """Return the seconds of measuring the distance of so many candidates, all initialisations together; 0 for a
    distance that cannot use the examples, which the measurement itself will report, for `whitening`, which takes
    seconds, and for a distance that is not in this package."""
    sides_of = SIDES.get(type(this.distance))
    if sides_of is None:
        return 0.0
    try:
        sides = sides_of(this)
    except (UsageError, ValueError):  # too few examples, or classes
        return 0.0
    return this.distance.initialisations * (sides.private + candidates * sides.candidate)


def of_choice(distance: GSD, sketch: int, sets: Comparison, examples: float) -> float:
    """Return the seconds of a private choice among candidates, from so many private examples. Public examples stand for
    those: no private one is read."""
    name, public = next(iter(sets.candidates.items()))
    several = sets.private.y.dim() == 2

    def side(rows: int) -> Side:
        small = dataclasses.replace(distance, m=rows, labels=Labelling.random)
        return Side(small, sets.build(0), sets.classes, several, sketch, "estimate", 0)

    def of_private(rows: int) -> Callable[[], object]:
        part = public.x[torch.arange(rows) % len(public.x)]
        labels = random_labels(stream("estimate", "labels"), rows, sets.classes, several)
        network = side(rows)
        source = stream("estimate", "in place of secret labels")
        return lambda: list(network.private(Split(part, labels), torch.arange(rows), source))

    def of_candidate(rows: int) -> Callable[[], object]:
        network = side(rows)
        return lambda: network.public(name, public)

    least = max(ROWS, 2 * distance.k)
    private = foreseen(of_private, max(1, round(examples)), least=least)
    candidate = foreseen(of_candidate, distance.m, least=least)
    return distance.initialisations * (private + len(sets.candidates) * candidate)


def _of_gradients(this: Measurement) -> Sides:
    """Return the seconds of GSD: gradients of both sides, and their top subspaces."""
    distance = this.distance
    assert isinstance(distance, GSD)
    engine, device = engine_of(this.model, distance), next(this.model.parameters()).device

    def gradients(rows: int) -> Callable[[], object]:
        x, y = this.images(rows).to(device), this.labels(rows).to(device)
        return lambda: gradients_of(engine, distance, x, y)

    side = foreseen(gradients, distance.m, least=ROWS)
    side += _top_subspace(distance.m, engine.size, distance.k, device)
    return Sides(side, side)


def _top_subspace(m: int, p: int, k: int, device: torch.device) -> float:
    """Return the seconds of `top_k` for G [m, p]. All but the eigenvectors of the Gram matrix, m^3, grow with p; those
    of Davidson's method grow with m, since it reads G a few times; those of the Gram matrix with m^2."""
    source = torch.Generator(device).manual_seed(0)
    large = is_large(torch.zeros(1, device=device).expand(m, p), k)
    part = 4 if p >= 4 * BUCKETS * m else 1  # of the columns

    def random(rows: int) -> Tensor:  # some directions are large, as in gradients
        left, right = (torch.randn(n, RANK, generator=source, device=device) for n in (rows, p // part))
        noise = torch.rand(rows, p // part, generator=source, device=device)
        return noise.addmm_(left * torch.logspace(1, 0, RANK, device=device), right.T)

    def approximate(rows: int) -> Callable[[], object]:
        return partial(davidson, random(rows), k, 0.0)

    def products(rows: int) -> Callable[[], object]:
        g = DenseGradients(random(rows))
        return lambda: torch.linalg.qr(g.combine(g.gram()[:, :k]).double())

    def eigenvectors(rows: int) -> Callable[[], object]:
        x = torch.randn(rows, rows, generator=source, device=device, dtype=torch.float64)
        return partial(top_eigenpairs, x @ x.T, min(k, rows))

    if large:
        return part * foreseen(approximate, m, least=max(MANY, 30 * k))
    of_products = part * foreseen(products, m, power=2, least=ROWS)
    return of_products + foreseen(eigenvectors, m, power=3, least=ROWS)


def _of_features(this: Measurement) -> Sides:
    """Return the seconds of the Fréchet distance and MMD: features of both sides, and the distance of random ones. If
    their number and width are made smaller by the same factor, it takes less time by its cube."""
    m, d = this.distance.m, penultimate(this.model, this.images(1)).shape[1]

    def between(rows: int) -> Callable[[], object]:
        x, y = torch.randn(2, rows, -(-d * rows // m), dtype=torch.float64)
        if isinstance(this.distance, mmd.MMD):
            return lambda: mmd.mmd(x, y, mmd.median_distance(x))
        return lambda: frechet.frechet(frechet.gaussian(x), frechet.gaussian(y))

    side = foreseen(lambda rows: partial(penultimate, this.model, this.images(rows)), m, least=ROWS)
    return Sides(side, side + foreseen(between, m, power=3, least=ROWS))


def _of_heads(this: Measurement) -> Sides:
    """Return the seconds of Task2Vec: features, heads that are fitted to them, as many as there are classes, and the
    gradients below them."""
    y = this.public.y[: this.distance.m]
    y = y if y.dim() == 2 else class_numbers("the public data", y, "task2vec")

    device, several = next(this.model.parameters()).device, y.dim() == 2

    def heads(rows: int) -> Callable[[], object]:
        z, labels = penultimate(this.model, this.images(rows)), y[torch.arange(rows) % len(y)]
        return partial(fit_head, z, labels if several else torch.unique(labels, return_inverse=True)[1])

    def features(rows: int) -> Callable[[], object]:
        return partial(penultimate, this.model, this.images(rows))

    fit = foreseen(heads, this.distance.m, least=8 * ROWS)
    side = foreseen(features, this.distance.m, least=ROWS)

    # the gradients of all that is trained below the head
    weights = [name for name, weight in this.model.named_parameters() if weight.requires_grad]
    trained = [name for name in weights if name.endswith("weight")]
    below = [name for name in trained if name != f"{head(this.model)}.weight"]
    names = [] if this.private.x.dim() == 2 else below
    if names:
        engine = PerExampleGradients(this.model, names=names)

        def gradients(rows: int) -> Callable[[], object]:
            return partial(fisher, engine, this.images(rows).to(device), this.labels(rows).to(device))

        side += foreseen(gradients, this.distance.m, least=ROWS)

    classes = y.shape[1] if several else int(y.max()) + 1
    return Sides(side + fit * this.classes / classes, side + fit)


def _of_transport(this: Measurement) -> Sides:
    """Return the seconds of OTDD, from random examples to public ones: what each pair of classes takes, however few
    examples it has, and what grows with m^TRANSPORT, from two parts of the examples."""
    distance = this.distance
    assert isinstance(distance, otdd.OTDD)

    def between(rows: int) -> Callable[[], object]:
        sides = random_like(this.private, rows, this.classes), Split(this.images(rows), this.public.y[:rows])
        a, b = (otdd.labelled(x, class_numbers("the public data", y, "otdd")) for x, y in sides)
        return partial(otdd.otdd, a, b, distance.exact)

    m = distance.m
    if m < 16 * ROWS:
        return Sides(0.0, foreseen(between, m, least=m))

    # two sizes tell the constant part from the part that grows
    few, more = (foreseen(between, rows, least=rows) for rows in (m // 8, m // 4))
    grown = [(rows / m) ** TRANSPORT for rows in (m // 8, m // 4)]
    return Sides(0.0, more + max(0.0, more - few) / (grown[1] - grown[0]) * (1 - grown[1]))


SIDES: dict[type[Distance], Callable[[Measurement], Sides]] = {
    GSD: _of_gradients,
    Task2Vec: _of_heads,
    otdd.OTDD: _of_transport,
    frechet.Frechet: _of_features,
    mmd.MMD: _of_features,
}


def held(this: Measurement) -> int:
    """Return the bytes held at once: those of a pass, of examples or features, and of matrices [m, m] and [p, k]. What
    POT, LAPACK and scikit-learn hold apart from tensors was measured. A distance that is not in this package counts as
    one of features."""
    distance, m = this.distance, this.distance.m
    engine = engine_of(this.model, distance) if isinstance(distance, GSD) else PerExampleGradients(this.model)
    chunk = engine.chunk(this.private.x)
    around = passes(this.model, this.private, chunk)

    if isinstance(distance, GSD):  # G and two bases, float32 and float64; the Gram matrix
        return 4 * (m + 4 * distance.k) * engine.size + 24 * m**2 + around
    if isinstance(distance, otdd.OTDD):
        return 8 * m * this.private.x[0].numel() + 52 * m**2 + around

    # distances of features [m, d]
    d = penultimate(this.model, this.images(1)).shape[1]
    if isinstance(distance, Whitening):  # private rows with their map and parts, float64; their moments
        rows = distance.private_examples(len(this.private.x))
        return 32 * rows * (d + 1) + 16 * min(rows, d + 1) ** 2 + 16 * m * d + around
    if isinstance(distance, frechet.Frechet):
        return 40 * m * d + 16 * min(m, d) ** 2 + around
    if isinstance(distance, Task2Vec):
        return 32 * m * d + 4 * chunk * engine.size + around
    return 16 * m * d + 40 * m**2 + around
