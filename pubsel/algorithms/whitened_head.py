"""A linear classifier on whitened features, with nothing to set. pubsel's own method: no paper.

Public data fix a map of features (`whitened`): square roots, then the top k directions of the public covariance, each
scaled to about the same variance, then rows of one length. Full-batch gradient descent from zero weights follows
(`whitened_head`), or a single release of the class means (`whitened_head_once`).

Public labels of the same task weigh the examples of the map, so that rare classes count (`class_weights`); and
`whitened_head` then corrects a classifier that was trained on the public examples (`public_classifier`), in place of
starting from nothing. That one sees all features, without whitening, which pays only where there is noise; the
correction has as many directions as the budget allows. Labels may also be those that CLIP's text encoder gives public
examples by the names of the classes (`by_names`), which are public too.

Without public data, a noisy mean of the private rows counts as some more of the steps and is subtracted from them
(`centred`), where there are enough rows for its noise: rows then differ by what tells them apart.

Columns of a table are brought to one scale first (`pubsel.algorithms.columns`): by public data, or by a private
histogram that counts as some more of the steps. Their roots are not taken.

If the balanced accuracy is what counts (`pair.metric`), the model is one for classes that are equally frequent: shares
of classes are those of the public labels, and their logarithms are subtracted from the biases after training; or a
noisy count says them, examples of frequent classes weigh less in training, and less is subtracted (`finish`).

All features, unwhitened, have a share of each row (`rest_of`) where public examples are too few to span as many
directions as the budget allows, and where their covariance says little of which directions matter, since all vary
alike: then the budget decides, by whether it can tell class means apart in all of them.

The number of directions and steps, the learning rate and the clip norm follow from numbers that are public: how many
examples and classes there are, and the budget (`Facts`). results/study_head.md says how the constants were chosen,
and what was tried in vain.
"""

import copy
import math
import warnings
from dataclasses import dataclass, fields
from typing import Any, Self

import torch
from torch import Tensor

from pubsel.algorithms import (
    Facts,
    FirstRelease,
    Frozen,
    Mechanism,
    Random,
    Scaling,
    View,
    check_labels,
    class_shares,
    columns,
    roots,
)
from pubsel.algorithms.adamix import ABOUT_TEXT_MODEL, ABOUT_TEXT_WEIGHTS, weight_of
from pubsel.algorithms.dp_sgd import (
    NOISE,
    Clipping,
    noise_by_rate,
    noise_of_correction,
    rate_by_noise,
    residual_at_zero,
    steps_by_noise,
)
from pubsel.data import Split
from pubsel.gradients.matrix import clipped_rows
from pubsel.messages import UsageError
from pubsel.models.class_names import zero_shot
from pubsel.settings.keys import ABOUT_PUBLIC_LABELS, PublicLabels
from pubsel.settings.schema import setting

LENGTH = 1 / 0.3  # of each row of features; that of the bias, which is the constant feature, is 1
ROW = math.hypot(1, LENGTH)  # with the bias
LEAST = 1e-4  # of their mean variance, for features that are to vary alike
EXPONENT = -0.4  # of variances; whitening to equal variance would have -1/2
FACTOR, POWER = 1.6, 0.6  # of the number of directions
FEWEST, MOST = 5, 400  # directions
FLATTEST, FLAT = 0.95, 0.1  # most share of all features; a lower spread is not worth their columns
FEW = 4  # directions for each class, below which they may leave out what tells classes apart
STAGES = 0.7  # variance of all features of earlier stages of a network, of that of its last layer
NUMBERS = 2**22  # of private features at a time
LOOKED_AT = 2000  # public examples, of which the spread of directions is estimated
BALANCE = -0.5  # exponent of how often a class is, in the weight of its examples; -1: all classes weigh the same
PRIOR = 0.5  # variance of the public classifier's weights before it sees an example
CLIP = 0.7  # of the norm that gradients have at zero weights
FEWEST_STEPS, MOST_STEPS = 30, 300  # more than the fewest if the learning rate would not be stable
MOMENTUM = 0.9
CENTRE = 0.05  # of mu^2, for the mean of private rows if there are no public data
CENTRED_FROM = 6.0  # n mu over the root of the number of features, from which it is worth its price
FULL_BATCHES = {
    "epochs": 1.0,
    "batch_size": 10**9,
    "learning_rate": 1.0,
    "weight_decay": 0.0,
    "milestones": [],
    "decay": 1.0,
}


def class_weights(y: Tensor) -> Tensor:
    """Return weights [m], with sum 1, of public examples with classes y [m]: in proportion to the number of examples of
    the class to the power BALANCE. A rare class then shapes mean and directions more than its share says."""
    y = y.long()
    weights = y.bincount()[y].double() ** BALANCE
    return weights / weights.sum()


def standardised(public: Tensor, weights: Tensor | None = None, root: bool = True) -> tuple[Tensor, Tensor, Tensor]:
    """Return what `whitened` finds directions of, float64 [m, d], whose squares sum up to the variances of features;
    with the mean that was subtracted from their roots, and the scale that they were multiplied by, [d]."""
    x = roots(public.double()) if root else public.double()
    weights = x.new_full((len(x),), 1 / len(x)) if weights is None else weights
    mean = weights @ x
    deviations = (weights @ (x - mean).square()).sqrt()
    constant = (x == x[:1]).all(0)  # a constant feature says nothing, though its mean is rounded
    scale = torch.where(constant, math.inf, deviations) ** -0.5
    return (x - mean) * scale * weights.sqrt()[:, None], mean, scale


def whitened(public: Tensor, k: int, weights: Tensor | None = None, root: bool = True) -> Frozen:
    """Return the map x [n, d] -> [n, k] that public features [m, d] define.

    Of the `roots` of features, which are skewed after a ReLU, the public mean is subtracted, and each is divided by the
    square root of its public deviation. Direction j of the k with the largest variance v_j is scaled by (v_j + mean
    v)^EXPONENT: not quite whitening, with a ridge. Last, each row is brought to norm LENGTH. weights: of the examples,
    [m], with sum 1; None: all weigh the same. root: whether roots are taken. UsageError if the public features do not
    vary.
    """
    x, mean, scale = standardised(public, weights, root)
    m, d = x.shape

    # Of m examples fewer than features, the Gram matrix is the smaller one of the two with these eigenvalues.
    values, vectors = torch.linalg.eigh(x @ x.T if m < d else x.T @ x)
    values, vectors = values.flip(0)[:k], vectors.flip(1)[:, :k]
    if not values[0] > 0:
        raise UsageError("pair.public: its features are the same for all examples: take other public data")

    # A direction in which public data do not vary stays, as zero: how wide the rows are depends on k alone.
    vary = values > 1e-10 * values[0]
    values = values.clamp(min=0)
    if m < d:
        vectors = x.T @ vectors / torch.where(vary, values, math.inf).sqrt()

    ridge = x.square().sum() / d  # the mean of all d eigenvalues
    directions = scale[:, None] * vectors * (vary * (values + ridge) ** EXPONENT)  # [d, k]
    return Frozen(mean.float(), directions.float(), unit=True, root=root, length=LENGTH)


def public_classifier(x: Tensor, y: Tensor, classes: int) -> tuple[Tensor, Tensor]:
    """Return weights [C, d] and biases [C] of a logistic regression on public rows x [m, d] with classes y [m], or of
    one regression per label with 0/1 labels y [m, C], on the rows whose label is known (not NaN).

    The weights are the maximum a posteriori estimate under a Gaussian prior of variance PRIOR. One row of zeros, the
    public mean, is added for each class, so that a class without public examples is unlikely, not impossible.
    """
    from sklearn.linear_model import LogisticRegression  # half a second, only if it is used

    def fitted(x: Tensor, y: Tensor, values: int) -> list[Tensor]:
        rows = torch.cat([x, x.new_zeros(values, x.shape[1])]).double().cpu()
        labels = torch.cat([y.long().cpu(), torch.arange(values)])
        model = LogisticRegression(C=PRIOR, max_iter=1000)
        with warnings.catch_warnings():  # that there are many classes, or that it could be fitted better
            warnings.simplefilter("ignore", UserWarning)
            model.fit(rows.numpy(), labels.numpy())
        return [torch.from_numpy(part).float() for part in (model.coef_, model.intercept_)]

    if y.dim() == 2:
        known = ~y.isnan()
        parts = (fitted(x[here], labels[here], 2) for labels, here in zip(y.T, known.T, strict=True))
        weights, biases = zip(*parts, strict=True)
        return torch.cat(weights), torch.cat(biases)
    weight, bias = fitted(x, y, classes)
    if classes == 2:  # the logit of the second class over the first
        return torch.cat([-weight / 2, weight / 2]), torch.cat([-bias / 2, bias / 2])
    return weight, bias


def directions_of(facts: Facts) -> int:
    """Return how many directions n examples of C classes can tell apart: k = 1.6 (n mu / sqrt C)^0.6, at least 5, at
    most 400 and the number of features. L labels count as L + 1 classes."""
    classes = facts.classes + facts.multi_label
    wanted = min(FACTOR * (facts.n * facts.mu / math.sqrt(classes)) ** POWER, MOST)
    return int(min(max(FEWEST, wanted), facts.d))


def centred(d: int, n: int, mu: float, level: float) -> FirstRelease:
    """Return the noisy sum of `roots` of private features [n, d], less `level` times the mean of their row, in rows of
    norm 1, with the map of rows less their mean, of norm LENGTH, that is made of it.

    Sensitivity 1: a row adds a vector of norm at most 1, or nothing, if it is not finite. mu: that the noise has, 1
    over its deviation. Known to be d / (n mu)^2 of the squared norm of the mean, the noise shrinks it to what is
    expected of it.
    """
    plain = Frozen(unit=True, root=True, level=level)

    def clipped_sum(x: Tensor) -> Tensor:
        total = torch.zeros(d, dtype=torch.float64)
        for part in x.split(max(1, NUMBERS // d)):
            total += clipped_rows(plain(part), 1.0).sum(0)
        return total

    def decode(noisy: Tensor) -> Frozen:
        mean, noise = noisy / n, d / (n * mu) ** 2
        signal = max(float(mean.square().sum()) - noise, 0.0)
        middle = mean * (signal / (signal + noise) if signal else 0.0)
        return Frozen(unit=True, root=True, level=level, length=LENGTH).less(middle.float())

    return FirstRelease(clipped_sum, decode, 1.0, d)


def spread_of(public: Tensor, root: bool = True) -> float:
    """Return the number of directions that rows like the public ones [m, d] vary in: (sum v)^2 / sum v^2 of the
    variances v of all directions (the participation ratio), at most d; 0 of less than two rows, or equal ones.

    Of few rows, the squares of variances come out too large. So their sum is that of the squared products of pairs of
    different rows, whose mean does not depend on how many there are.
    """
    x = standardised(public[:: -(-len(public) // LOOKED_AT)], root=root)[0].float()
    m, d = x.shape
    total = x.square().sum()
    if m < 2 or not total > 0:
        return 0.0
    products = (x @ x.T if m < d else x.T @ x).square().sum() - x.square().sum(1).square().sum()
    return min(d, float(total.square() / (products * m / (m - 1)).clamp(min=1e-30)))


def rest_of(facts: Facts, spread: float, k: int) -> float:
    """Return the share of a row's squared length for all features, next to k directions: `spread` / d, or 1 - k / (4 C)
    if the k are that few for C classes, as far as a budget can tell classes apart in directions that public data do not
    choose.

    In one of `spread` directions of equal variance, class means differ by about 1 / sqrt(spread), and have noise of
    deviation C / (n mu). The share s grows from 0, where the squared ratio is 1, to all of it where it is 10; and on to
    1 - (1 - s)^2, or 1 - k / `spread` if that is more, where it is 100: the budget then tells classes apart in more
    directions than the k. If `spread` / d is below FLAT, it is 0: public data then say enough of which directions
    matter.
    """
    if not facts.d or spread / facts.d < FLAT:
        return 0.0
    classes = facts.classes + facts.multi_label
    ratio = (facts.n * facts.mu / classes) ** 2 / spread
    share, grown = max(spread / facts.d, 1 - k / (FEW * classes)), math.log10(max(ratio, 1.0))
    largest = max(1 - (1 - share) ** 2, 1 - k / spread)
    return min(FLATTEST, share * min(1.0, grown) + (largest - share) * min(max(grown - 1, 0.0), 1.0))


@dataclass
class WhitenedHead(Clipping):
    """Settings of gradient descent on whitened features: it chooses its own steps, batches, learning rate and clip
    norm."""

    k: int | None = setting(
        "directions that are kept; null: as many as n, epsilon and the number of classes allow", at_least=1
    )
    public_labels: PublicLabels = setting(ABOUT_PUBLIC_LABELS)
    class_names: list[str] | None = setting(
        "public_labels=names: names of the classes, in order; null: those that the private data has", default=None
    )
    text_model: str = setting(ABOUT_TEXT_MODEL, default="RN50")
    text_weights: str | None = setting(ABOUT_TEXT_WEIGHTS, default="openai")

    needs_public = False
    takes_stages = True
    clip = CLIP
    corrects = True  # a public classifier, if there are public labels
    spreads = True  # over all features, if public examples are too few
    rest = 0.0  # the share of a row's squared length that all features have; `derived` sets it
    facts = Facts()  # of no task; `derived` has those of one
    # classes of public examples by CLIP, [m] or none; `derived` sets them
    named_classes = torch.zeros(0, dtype=torch.long)

    def __post_init__(self) -> None:
        changed = {f.name for f in fields(self) if getattr(self, f.name) != f.default}
        unused = sorted(changed & {"class_names", "text_model", "text_weights"})
        if unused and self.public_labels != PublicLabels.names:
            raise UsageError(f"algorithm.{unused[0]}: is for algorithm.public_labels=names: set it, or remove this key")

    @property
    def reads_names(self) -> bool:
        return self.public_labels == PublicLabels.names

    @property
    def directions(self) -> int | None:
        return self.k

    @property
    def training(self) -> dict[str, Any]:
        """Return full batches; the learning rate multiplies that of the budget. A task may need more steps
        (`steps`)."""
        return FULL_BATCHES | {"steps": FEWEST_STEPS, "momentum": MOMENTUM}

    def sensitivity(self) -> float:
        """Return 1. A row is the gradient of one example at weights that are released: it is clipped to a bound that
        depends on the number of classes alone, and divided by it, so that one row more or less adds or removes one
        vector of norm at most 1. That a loss is multiplied by a weight of its class, which is released before, comes
        before the clipping. The map of features is of public data; a row that is not finite counts as zero."""
        return 1.0

    @property
    def labelled(self) -> bool:
        """Return whether public labels are used."""
        same = self.public_labels == PublicLabels.auto and self.facts.same_task
        return self.facts.m > 0 and (same or self.public_labels == PublicLabels.given or len(self.named_classes) > 0)

    @property
    def offsets(self) -> int:
        """Return the number of logits of a public classifier among the features."""
        return self.facts.classes if self.labelled and self.corrects else 0

    def derived(self, facts: Facts) -> Self:
        """Return the algorithm for a task: k directions, at most the m - 1 that m public examples less their mean span.
        If more are wanted, k over that number is the share of a row's squared length that they have at most, and all
        features, less their public mean, have the rest; or the share that their spread says (`rest_of`). UsageError for
        k without public data."""
        algorithm = copy.copy(self)
        algorithm.facts = facts
        if facts.m == 0 and self.k is not None:
            raise UsageError(f"algorithm.k={self.k}: directions are of public data: give pair.public=NAME, or k=null")
        if facts.m > 0:
            wanted, spanned = self.k or directions_of(facts), max(1, facts.m - 1)
            algorithm.k = self.k or min(wanted, spanned)
            algorithm.rest = max(0.0, 1 - spanned / wanted) if self.spreads else 0.0
            if self.spreads and facts.public is not None:
                scaling = algorithm.scaling(facts.public)
                spread = spread_of(Frozen().scaled(scaling)(facts.public), root=facts.raw is None)
                algorithm.rest = max(algorithm.rest, rest_of(facts, spread, algorithm.k))
        if self.reads_names and facts.public is not None:
            algorithm.named_classes = self.by_names(facts, facts.public)
        return algorithm

    def by_names(self, facts: Facts, public: Tensor) -> Tensor:
        """Return the class of each public example [m, d] by CLIP, [m]: the name with the largest cosine similarity to
        its embedding, the features of the last layer. UsageError if classes have no names, or it is another CLIP."""
        key = f"algorithm.public_labels={self.public_labels.name}"
        if facts.multi_label:
            raise UsageError(f"{key}: gives an example one class, and private ones have several labels: take none")
        d, names = facts.d - facts.stages, self.class_names or facts.names
        return (public[:, :d] @ zero_shot(facts.classes, d, names, self.text_model, self.text_weights, 1.0).T).argmax(1)

    def check(self, view: View) -> None:
        if self.labelled and view.public is not None and not len(self.named_classes):
            what = f"algorithm.public_labels={self.public_labels.name}"
            check_labels(view.public.y, view.classes, view.multi_label, view.same_classes, what)

    def values(self, steps: int) -> dict[str, Any]:
        """Return what follows from the task, for the record."""
        rate = self.rate(self.facts.n, steps)
        values = {"k": self.k or self.facts.d, "steps": steps, "learning_rate": rate, "clip_norm": self.bound}
        values["public_labels"] = self.labelled
        values |= {"rest": self.rest} if self.rest else {}
        values |= {"balanced": True} if self.facts.balanced else {}
        first = "histogram" if self.scales else "mean" if self.centres else "counts"
        return values | ({f"steps_of_{first}": self.first_steps} if self.released else {})

    @property
    def scales(self) -> bool:
        """Return whether a private histogram brings columns to one scale: there are some without one, no public data,
        and enough rows for the noise."""
        facts, raw = self.facts, self.facts.raw or 0
        worth = facts.n * facts.mu * math.sqrt(columns.SHARE) >= columns.FEWEST * math.sqrt(raw)
        return raw > 0 and facts.m == 0 and worth

    @property
    def centres(self) -> bool:
        """Return whether a private mean is subtracted from rows: there are no public data, rows are no table's, and
        there are enough for the noise."""
        facts = self.facts
        worth = facts.n * facts.mu >= CENTRED_FROM * math.sqrt(facts.d)
        return facts.m == 0 and facts.raw is None and worth

    @property
    def counts(self) -> float:
        """Return the share of mu^2 for numbers of examples of the classes: there are no public labels to count, and
        rare classes count as much as others."""
        return class_shares.SHARE if self.facts.balanced and not self.labelled and self.corrects else 0.0

    @property
    def released(self) -> float:
        """Return the share of mu^2 of what is released before the steps."""
        return self.counts + (columns.SHARE if self.scales else CENTRE if self.centres else 0.0)

    @property
    def mu(self) -> float:
        """Return the mu that is left for the steps."""
        return self.facts.mu * math.sqrt(1 - self.released)

    @property
    def first_steps(self) -> int:
        return max(1, round(self.steps * self.released / (1 - self.released))) if self.released else 0

    @property
    def bound(self) -> float:
        """Return the clip norm of the task."""
        return self.clip_norm(self.facts.classes, self.facts.multi_label)

    def clip_norm(self, classes: int, multi_label: bool) -> float:
        """Return the clip norm, a share of the norm of an example's gradient at zero weights."""
        return self.clip * ROW * residual_at_zero(classes, multi_label)

    @property
    def curvature(self) -> float:
        """Return the largest curvature of the loss: of the largest second moment of a row, that of the bias, or of a
        direction with four times its share of the length. If not all is whitened, a direction may have half of the
        length."""
        facts = self.facts
        largest = ROW**2 / 2
        if facts.m > 0 and self.k and not self.rest:
            largest = max(1.0, 4 * LENGTH**2 / self.k)
        return largest / (4 * facts.classes if facts.multi_label else 2)

    @property
    def steps(self) -> int:
        """Return the number of steps of a task: more than the fewest if their learning rate, which the noise would
        allow, is not stable (`steps_by_noise`)."""
        wanted = steps_by_noise(ROW, self.bound, self.mu, self.facts.n, MOMENTUM, self.curvature, self.deviation)
        return math.ceil(min(max(FEWEST_STEPS, wanted), MOST_STEPS))

    def rate(self, n: int, steps: int) -> float:
        """Return the learning rate for the mean gradient of n examples (`rate_by_noise`)."""
        noise_multiplier = math.sqrt(steps) / self.mu
        return rate_by_noise(ROW, self.bound, noise_multiplier, steps, n, MOMENTUM, self.curvature, self.deviation)

    @property
    def deviation(self) -> float:
        """Return the deviation of the noise in a logit after all steps. Labels by names may be wrong, however many
        there are, so their correction has as much as a start from nothing."""
        if not self.offsets or len(self.named_classes):
            return NOISE
        n, _, m, classes = self.facts[:4]
        return noise_of_correction(n * self.facts.mu, m, self.k or 1, classes)

    def numbers(self, view: View) -> int:
        return 0

    def frozen(self, public: Split | None, d: int, random: Random) -> Frozen | FirstRelease:
        """Return the map of features, or what is released before the steps and decoded to it (`mapped`); with a count
        of the classes if these are to weigh alike (`class_shares.counted`)."""
        mu = self.facts.mu * math.sqrt(self.first_steps / (self.steps + self.first_steps))
        if not self.counts:
            return self.mapped(public, d, mu)
        share = self.counts / self.released
        before = self.mapped(public, d, mu * math.sqrt(1 - share))
        return class_shares.counted(before, self.facts.classes, mu, share, BALANCE)

    def mapped(self, public: Split | None, d: int, mu: float) -> Frozen | FirstRelease:
        """Return the whitening that public features define; without public data, `roots` less the mean of their row, in
        rows of one length, less their private mean (`centred`); of rows that are no images, less all of the mean of the
        row but as much as one feature has. Of a table, columns in their scale come first, which a histogram of private
        rows gives if there are no public ones. mu: of what is released for it. UsageError for more directions than
        there are features."""
        facts, weights = self.facts, None
        table, raw = facts.raw is not None, facts.raw or 0
        if public is None:
            if self.scales:
                return columns.released(raw, d, facts.n, mu, LENGTH)
            as_it_is = torch.zeros(0), torch.zeros(0), torch.tensor(math.inf)
            scaling = columns.widened(as_it_is, d) if table else None
            # of anyone's features, unlike those of images, the mean of a row may be what tells classes apart
            level = False if table else True if facts.images else 1 - 1 / math.sqrt(d)
            if self.centres:
                return centred(d, facts.n, mu, level)
            return Frozen(unit=True, root=not table, level=level, length=LENGTH).scaled(scaling)
        if self.k is None or self.k > d:
            raise UsageError(f"algorithm.k={self.k} is more than the {d} features: lower algorithm.k")
        if len(self.named_classes):
            public = Split(public.x, self.named_classes)
        if self.labelled:
            weights = None if facts.multi_label else class_weights(public.y)
        scaling = self.scaling(public.x)
        x = Frozen().scaled(scaling)(public.x)
        frozen = whitened(x, self.k, weights, root=not table)

        frozen.rest = self.rest
        if self.offsets:
            whole = Frozen(frozen.shift, unit=True, root=not table, length=LENGTH)
            frozen.weight, frozen.bias = public_classifier(whole(x), public.y, facts.classes)
        return frozen.scaled(scaling)

    def scaling(self, public: Tensor) -> Scaling | None:
        """Return the scaling of features by public ones [m, d]: of the columns of a table; of features of a network's
        earlier stages, whose roots then vary STAGES times as much as those of its last layer; or of features of images
        that take both signs, such as wavelet scattering, whose orders differ in scale and not in what they say, so that
        all their roots vary alike. None if there is none: how much an activation varies says something of its weight.
        """
        facts = self.facts
        if facts.raw is not None:
            return columns.by_public(public, facts.raw)
        if not facts.stages and not facts.signed:
            return None

        variances, scale = roots(public).double().var(0, correction=0), torch.ones(public.shape[1])
        if facts.stages:
            last = public.shape[1] - facts.stages
            ratio = variances[last:].sum() / (STAGES * variances[:last].sum()).clamp(min=1e-30)
            scale[last:] = ratio.clamp(min=1e-30)
        else:  # the root of a feature is divided by the root of its scale
            scale = (variances / variances.mean().clamp(min=1e-30)).clamp(min=LEAST).float()
        return torch.zeros_like(scale), scale, torch.tensor(math.inf)

    def width(self, d: int) -> int:
        return super().width(d) + (d if self.rest else 0) + self.offsets

    def mechanism(self, view: View, step: int) -> Mechanism:
        """Return DP-SGD's mechanism, whose mean is multiplied by the learning rate."""
        plain = self.clipped(view, self.clip_norm(view.classes, view.multi_label))
        rate = self.rate(view.batch_size, view.steps)
        return plain._replace(decode=lambda mean: rate * plain.decode(mean))

    def finish(self, view: View) -> None:
        """Divide the weights by sqrt(1 + pi s^2 / 8), s the deviation of the noise in a logit, which is known: on
        average over the noise, sigmoid(a + s z) is about sigmoid of that (MacKay 1992, The Evidence Framework Applied
        to Classification Networks). No order of classes changes. A correction of a public classifier, which has no
        noise, stays.

        If the balanced accuracy counts, first subtract the logarithms of the shares of classes from the biases, as far
        as the weights of examples have not done so: in all, logits are then of classes that are equally frequent (Menon
        et al. 2021, Long-tail Learning via Logit Adjustment, arXiv:2007.07314)."""
        if not self.corrects:  # the discriminant of a single release knows noise and shares
            return

        # before the division, which then changes no order of these logits either
        bias = dict(view.model.named_parameters()).get("bias")
        if self.facts.balanced and bias is not None:
            if self.labelled:
                y = self.named_classes if len(self.named_classes) else view.labelled(self.name).y
                counts = y.long().bincount(minlength=view.classes).double()
                left = class_shares.shares_of(counts + 1, 0.0).log()
            else:  # weights are shares^BALANCE
                left = (1 + BALANCE) / BALANCE * view.model.get_buffer("class_weights").double().log()
            bias.detach().sub_(left.to(bias))

        if not self.offsets:
            steps, n = view.steps, view.batch_size
            noise = noise_by_rate(ROW, self.bound, math.sqrt(steps) / self.mu, steps, n, MOMENTUM)
            spread = noise * self.rate(n, steps)
            for parameter in view.model.parameters():
                parameter.detach().div_(math.sqrt(1 + math.pi * spread**2 / 8))


@dataclass
class WhitenedHeadStart(WhitenedHead):
    """Settings of what `whitened_head` starts from if public labels are used: its classifier of public examples."""

    needs_public = True
    spreads = False

    def sensitivity(self) -> float:
        """Return 0: no private example is read."""
        return 0.0

    def derived(self, facts: Facts) -> Self:
        algorithm = super().derived(facts._replace(mu=1.0))
        if not algorithm.labelled:
            raise UsageError(
                f"algorithm={self.name} is a classifier of public examples: give public data with labels of the "
                "private task, and algorithm.public_labels=given if they are of another set, or names with CLIP"
            )
        return algorithm

    def values(self, steps: int) -> dict[str, Any]:
        return {"public_labels": self.labelled}


@dataclass
class WhitenedHeadOnce(WhitenedHead):
    """Settings of the release of class means of whitened features in a single step."""

    needs_public = True  # means of features that no public mean was subtracted from would be biased
    corrects, spreads = False, False
    clip = 1.0  # at zero weights all rows have one norm: none is clipped

    @property
    def training(self) -> dict[str, Any]:
        """Return one step, whose result is the weights."""
        return FULL_BATCHES | {"steps": self.steps, "momentum": 0.0}

    @property
    def steps(self) -> int:
        return 1

    def values(self, steps: int) -> dict[str, Any]:
        return {"k": self.k, "clip_norm": self.bound, "public_labels": self.labelled}

    def mechanism(self, view: View, step: int) -> Mechanism:
        """Return DP-SGD's mechanism at zero weights, decoded to a discriminant.

        There the gradient of an example with class y is (1/C - e_y) x^T: the noisy sum is of all class sums, each less
        a C-th of the sum of all, and so is that of the bias, of all counts. No row is clipped."""
        bound = self.clip_norm(view.classes, view.multi_label)
        plain = self.clipped(view, bound)
        noise = bound / (self.facts.mu * view.batch_size)  # deviation of the noise on the mean gradient
        weight = weight_of(view)

        def decode(mean: Tensor) -> Tensor:
            gradient = plain.decode(mean)
            c, k = weight.shape
            means, counts = -gradient[: c * k].view(c, k), -gradient[c * k :]
            parts = discriminant(means, counts, noise, view.multi_label, self.facts.balanced)
            return -torch.cat([part.flatten() for part in parts])

        return plain._replace(decode=decode)


def discriminant(
    sums: Tensor, counts: Tensor, noise: float, multi_label: bool, balanced: bool = False
) -> tuple[Tensor, Tensor]:
    """Return weights [C, k] and biases, [C] or none as `counts`, of the linear discriminant of classes that vary alike
    in all directions, from noisy sums.

    sums: [C, k], over n, of the rows of each class, less 1/C of the sum over all; or, for L labels, half the sum of the
    rows with the label less that of the others, over L: a label that is not known counts as half with it. counts: [C],
    the same of ones; or none. noise: deviation of each number. The sum over all rows counts as zero, since the public
    mean was subtracted from each; that the public mean weighs classes leaves little of it. balanced: of classes that
    are equally frequent where it is used.
    """
    c, k = sums.shape
    counted = len(counts) > 0
    if multi_label:
        sums, counts, noise = c * sums, c * counts if counted else sums.new_zeros(c), c * noise
        shares = (0.5 + counts).clamp(1e-3, 1 - 1e-3)
    else:
        # What is the same for all classes is noise: the sums over classes are zero.
        sums, noise = sums - sums.mean(0), noise * math.sqrt(1 - 1 / c)
        counts = counts - counts.mean() if counted else sums.new_zeros(c)
        shares = (1 / c + counts).clamp(min=0.1 / c)
        shares = shares / shares.sum()

    # A mean is shrunk by the prior whose variance is that of the sums beyond their noise.
    signal = max(float(sums.square().mean()) - noise**2, 1e-3 * noise**2, 1e-30)
    prior = signal / shares.square().mean()
    means = sums / shares[:, None] * (prior / (prior + (noise / shares).square()))[:, None]
    squares = means.square().sum(1)

    # The variance in a direction: of a row's squared norm what the means leave.
    left = max(LENGTH**2 - float((shares * squares).sum()), 0.1 * LENGTH**2)
    variance = left / k
    if multi_label:  # the mean of the rows without the label is -shares / (1 - shares) of that with it
        others = shares / (1 - shares)
        weights, biases = means / (1 - shares)[:, None], others.log() - squares * (1 - others.square()) / (2 * variance)
    else:
        weights, biases = means, (0.0 if balanced else shares.log()) - squares / (2 * variance)
    return weights / variance, biases if counted else counts[:0]
