"""Utility of a trained model on the test set: accuracy, balanced accuracy or area under the ROC curve, as fractions in
[0, 1], and how far chance in the choice of the test examples can move it."""

from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from pubsel.data import Split
from pubsel.files import in_parts
from pubsel.gradients.matrix import CPU_PIXELS
from pubsel.messages import UserError

RESAMPLES = 1000
HARDLY = 0.1  # of how often a class occurs: one that is answered less often is hardly ever answered
BLOCK = 100  # resamples at once, so that their counts stay in the cache


class Problem(NamedTuple):
    """A class or label against the rest. known: the places of the k examples whose label is known, [k]."""

    known: NDArray[np.int64]
    truth: NDArray[np.bool_]  # [k]
    scores: NDArray[np.float64]  # [k]


@torch.no_grad()
def logits(model: nn.Module, x: Tensor) -> Tensor:
    """Return the model's outputs for x [n, ...] -> [n, classes], on its device, computed up to 1,000 at a time."""
    device = next(model.parameters()).device
    return torch.cat([model(part.to(device)) for part in in_parts(x, at_once(x, device))])


def at_once(x: Tensor, device: torch.device) -> int:
    """Return how many examples of x [n, ...] pass through a network together; deep networks hold many times as many
    numbers."""
    entries = 2**25 if device.type == "cuda" else CPU_PIXELS
    return max(8, min(1000, entries // max(1, x[:1].numel())))


def evaluate(model: nn.Module, test: Split, metric: str) -> float:
    """Return the `utility` of a model on test examples."""
    return utility(logits(model, test.x), test.y, metric)


def utility(outputs: Tensor, y: Tensor, metric: str) -> float:
    """Return the accuracy, balanced accuracy or AUC of outputs [n, classes] for y [n] or, AUC only, 0/1 [n, labels].
    AUC: macro mean of each class against the rest; for several labels at once, the mean over those that have both
    values, each over the examples whose label is known (not NaN). Raise UserError if the test set has no class to tell
    apart, or an output is not finite: its largest would be chosen all the same."""
    # an argmax of nan is a class, and would look like a result
    if not outputs.isfinite().all():
        raise UserError("outputs of the trained network are not finite: lower training.learning_rate, or a clip norm")
    outputs, y = outputs.double().cpu(), y.cpu()
    if metric == "accuracy":
        return float(_correct(outputs, y).mean())
    return balanced_accuracy(outputs, y) if metric == "balanced_accuracy" else auc(outputs, y)


def interval(outputs: Tensor, y: Tensor, metric: str, random: np.random.Generator) -> tuple[float, float]:
    """Return the 95 % interval of `utility` by the percentile bootstrap over test examples: 2.5 and 97.5 % of 1,000
    resamples.

    It covers the sampling of the test examples: other examples of the same kind, the same trained model. It does NOT
    cover training (weights, batches, noise: for these train several seeds), the choice of settings, or other data than
    those of the test set. Like the utility itself it is computed on test examples without noise: if these are private,
    no guarantee covers it. A resample in which a label has a single value, or a class no example, leaves that label or
    class out, as `utility` does; a resample in which all labels do is left out itself.
    """
    outputs, y = outputs.double().cpu(), y.cpu()
    n = len(y)
    if metric == "accuracy":  # the number of correct ones in a resample is binomial
        values = random.binomial(n, float(_correct(outputs, y).mean()), RESAMPLES) / n
    elif metric == "balanced_accuracy":  # the counts of classes, right and wrong, in a resample are multinomial
        right, examples = _per_class(outputs, y)
        shares = np.concatenate([right, examples - right]) / n  # [2 classes]
        drawn_right, drawn_wrong = np.hsplit(random.multinomial(n, shares, RESAMPLES), 2)  # [resamples, classes]
        with np.errstate(invalid="ignore"):
            values = np.nanmean(drawn_right / (drawn_right + drawn_wrong), axis=1)
    else:
        # an AUC has no such shortcut: examples are drawn
        values = _resampled_auc(one_against_rest(outputs, y), n, random)
    return _middle(values)


def auc_interval(
    truth: NDArray[np.bool_], scores: NDArray[np.float64], random: np.random.Generator
) -> tuple[float, float]:
    """Return the same interval of the AUC of scores [n] for truth [n]."""
    return _middle(_resampled_auc([Problem(np.arange(len(truth)), truth, scores)], len(truth), random))


def _resampled_auc(problems: list[Problem], n: int, random: np.random.Generator) -> NDArray[np.float64]:
    """Return the mean AUC over the problems, [RESAMPLES], of resamples of the n examples."""
    blocks = []
    for _ in range(RESAMPLES // BLOCK):
        drawn = [np.bincount(random.integers(n, size=n), minlength=n) for _ in range(BLOCK)]
        counts = np.stack(drawn).astype(np.uint8)  # no example is drawn 256 times
        each = [weighted_auc(truth, scores, counts[:, known]) for known, truth, scores in problems]
        values = np.stack(each)  # [labels, resamples]
        with np.errstate(invalid="ignore"):
            blocks.append(np.nansum(values, axis=0) / np.isfinite(values).sum(axis=0))
    return np.concatenate(blocks)


def _middle(values: NDArray[np.float64]) -> tuple[float, float]:
    low, high = np.nanpercentile(values, [2.5, 97.5])
    return float(low), float(high)


def balanced_accuracy(outputs: Tensor, y: Tensor) -> float:
    """Return the mean of the recalls of the classes that y [n] has, for outputs [n, classes]: scikit-learn's
    balanced_accuracy_score. UserError if y has a single class."""
    check_classes(y, "balanced_accuracy", "the test set")
    right, examples = _per_class(outputs, y)
    return float(np.mean(right / examples))


def hardly_answered(outputs: Tensor, y: Tensor) -> list[int]:
    """Return the classes that outputs [n, classes] never or hardly ever answer: less than HARDLY as often as y [n] has
    them."""
    answers = outputs.argmax(1).cpu().bincount(minlength=outputs.shape[1])
    sizes = y.cpu().bincount(minlength=outputs.shape[1])
    return [int(label) for label in (answers < HARDLY * sizes).nonzero()]


def _per_class(outputs: Tensor, y: Tensor) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Return, for each class that y [n] has, how many of its examples outputs [n, classes] classify correctly, and how
    many examples it has."""
    right, examples = np.bincount(y, weights=_correct(outputs, y)), np.bincount(y).astype(np.float64)
    return right[examples > 0].astype(np.float64), examples[examples > 0]


def auc(outputs: Tensor, y: Tensor) -> float:
    """Return the area under the ROC curve of outputs [n, classes] for y [n] or 0/1 [n, labels], by scikit-learn."""
    check_classes(y, "auc", "the test set")
    from sklearn.metrics import roc_auc_score  # takes half a second, so only if an AUC is needed

    problems = one_against_rest(outputs, y)
    return float(np.mean([roc_auc_score(truth, scores) for _, truth, scores in problems]))


def weighted_auc(
    truth: NDArray[np.bool_], scores: NDArray[np.float64], counts: NDArray[np.uint8]
) -> NDArray[np.float64]:
    """Return the AUC, [resamples], of scores [n] for truth [n], example i counted counts[:, i] times (counts
    [resamples, n]): the share of pairs of a positive and a negative example that are in order, ties half. NaN if one
    side is empty.

    One sort for all resamples: the negatives below a positive are a cumulative sum of counts.
    """
    # resamples differ in counts alone, so one order of the scores serves all
    order = np.argsort(scores)
    truth, scores, counts = truth[order], scores[order], counts[:, order]
    ends = [np.searchsorted(scores, scores[truth], side) for side in ("left", "right")]  # of each positive's ties
    negatives = np.zeros((len(counts), len(scores) + 1), np.int32)  # [resamples, n + 1], among the lowest i
    np.cumsum(counts * ~truth, axis=1, dtype=np.int32, out=negatives[:, 1:])
    positives = counts[:, truth].astype(np.float64)  # [resamples, positives]
    in_order = np.einsum("bi,bi->b", positives, negatives[:, ends[0]] + negatives[:, ends[1]]) / 2
    with np.errstate(invalid="ignore"):
        return in_order / (positives.sum(1) * negatives[:, -1])


def one_against_rest(outputs: Tensor, y: Tensor) -> list[Problem]:
    """Return the problem of each class of y [n], or label of y [n, labels], that has both values, with scores by
    outputs [n, classes]."""
    truth = y if y.dim() == 2 else torch.nn.functional.one_hot(y, outputs.shape[1])
    scores = outputs.sigmoid() if y.dim() == 2 else outputs.softmax(1)
    problems = []
    for values, column in zip(truth.T, scores.T, strict=True):
        known = (~values.isnan()).nonzero()[:, 0]
        if (values == 0).any() and (values == 1).any():
            problems.append(Problem(known.numpy(), values[known].bool().numpy(), column[known].numpy()))
    return problems


def check_classes(y: Tensor, metric: str, what: str) -> None:
    """Raise UserError, naming `what`, if y [n] or 0/1 [n, labels] has no two classes for the metric to tell apart."""
    several = ((y == 0).any(0) & (y == 1).any(0)).any() if y.dim() == 2 else (y != y[:1]).any()
    if metric != "accuracy" and not several:
        name = "AUC" if metric == "auc" else "balanced accuracy"
        raise UserError(
            f"{name} needs examples of at least two classes, {what} has one: check its labels and their split"
        )


def _correct(outputs: Tensor, y: Tensor) -> Tensor:
    return (outputs.argmax(1) == y).double()
