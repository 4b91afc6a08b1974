"""The quality of a trained model on held-out private examples, released with noise: `privacy.measure=true`.

Noisy counts are released (`release.quality`), of the examples of pair.validation, which were not trained on. An example
is in training or held out, never both, and so is a person with all examples (`pair.unit`); which of them is treated as
public. So the weights cover each training unit with the whole epsilon and delta, and the counts each held-out one: a
private example or person changes only one of the two, and what follows from the other (McSherry 2009, Privacy
Integrated Queries, Theorem 4: parallel composition). Nothing is taken from the budget of training.

In floating point, the logits of an example may differ in the last digits if other examples are computed next to it. If
its two largest logits, or a score and the edge of a bin, agree to such digits, another example can move it to another
count. The sensitivity does not bound that; the record says so (`accountant.ROUNDED`).
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from pubsel.cell import Cell, Spending, tensors
from pubsel.data import Task
from pubsel.privacy import accountant, ledger
from pubsel.privacy.people import weights_of
from pubsel.release import quality
from pubsel.release.classifier import labels_of
from pubsel.release.quality import Answered, Estimate, Released, Steps
from pubsel.settings.identity import is_path
from pubsel.training.evaluation import logits
from pubsel.training.once import Prepared, released_once

LARGEST = "share of the largest class"
WHOLE = ("auc", "accuracy", "balanced_accuracy")  # figures of a sentence, in its order
NAMED = 5  # classes in a sentence


def table_of(outputs: Tensor, y: Tensor, metric: str, people: Tensor | None = None) -> Steps:
    """Return the counts to release, in steps of 1 / people.UNIT, from logits [n, C] and labels y [n] or [n, L]:
    histograms of scores where an AUC of two classes or of labels is the metric, otherwise the confusion matrix. NOT
    private.

    people: how many examples each person has, which are consecutive; None: each example is a unit."""
    weights = torch.tensor(weights_of(people, len(y)), device=y.device)
    if y.dim() == 2:
        return quality.histograms(y, outputs.sigmoid(), weights)
    if metric == "auc" and outputs.shape[1] == 2:
        return quality.histograms(y[:, None], outputs.softmax(1)[:, 1:], weights)
    return quality.confusion(y, outputs.argmax(1), outputs.shape[1], weights)


def figures_of(released: Released) -> dict[str, Estimate]:
    """Return what follows from a noisy table, by name. Which figures these are depends on the kind of the table alone,
    never on a count."""
    figures, matrix = dict[str, Estimate](), matrix_of(released)
    if released.counts.ndim == 3:
        figures = {"auc": quality.noisy_auc(released), "auc of each label": quality.aucs(released)}
    if matrix is None:
        return figures

    # an accuracy says little without the largest class, and nothing of a rare one
    both = {"accuracy": quality.accuracy(matrix), "balanced_accuracy": quality.noisy_balanced_accuracy(matrix)}
    if matrix.sizes is not None:  # the metric comes first
        both = dict(reversed(both.items()))
    figures |= both | {LARGEST: quality.largest_class(matrix)}
    return figures | {"recall of each class": quality.recalls(matrix)}


def matrix_of(released: Released) -> Released | None:
    """Return the noisy confusion matrix that was released, or that follows from the histograms of two classes; None for
    several labels."""
    if released.counts.ndim == 2:
        return released
    return quality.at_half(released) if len(released.counts) == 1 else None


def answered_of(released: Released, labels: Sequence[str]) -> dict[str, list[str]]:
    """Return the names of the classes of each kind of `quality.Answered`, by its fields; empty for several labels.
    labels: the names of all classes, which are public."""
    matrix = matrix_of(released)
    if matrix is None:
        return {}
    kinds = quality.answered(matrix)._asdict()
    return {kind: [labels[i] for i in which.nonzero()[0]] for kind, which in kinds.items()}


def quality_text(quality: dict[str, Any] | None) -> str:
    """Return what a record's measurement says of the whole, in words: its figures, and which classes are hardly
    answered; empty if there is none. All of it was released."""
    if quality is None:
        return ""
    figures = quality["figures"]
    whole = [f"{name.replace('_', ' ')} {with_interval(figures[name])}" for name in WHOLE if name in figures]
    largest = f"; the largest class is {with_interval(figures[LARGEST])} of all" if LARGEST in figures else ""
    return f" Measured privately: {', '.join(whole)}{largest}.{answered_text(quality)}"


def answered_text(names: dict[str, Any]) -> str:
    """Return a sentence on each kind of class (`quality.Answered`) of which there are some, each after a space."""
    hardly, perhaps = (names.get(kind) or [] for kind in Answered._fields)
    text = f" Never or hardly ever answered: {in_a_sentence(hardly)}." if hardly else ""
    return text + (
        f" Noise hides whether these classes are ever answered: {in_a_sentence(perhaps)}." if perhaps else ""
    )


def in_a_sentence(names: Sequence[str], most: int = NAMED) -> str:
    """Return names separated by commas, with the number of those beyond `most`."""
    return ", ".join(names[:most]) + (f" and {len(names) - most} more" if len(names) > most else "")


def with_interval(figure: Sequence[float], digits: int = 1) -> str:
    """Return an estimate and the ends of its interval in percent."""
    estimate, low, high = (f"{100 * value:.{digits}f}" for value in figure)
    return f"{estimate} % [{low}, {high}]"


def measure(cell: Cell, prepared: Prepared, task: Task, epsilon: float, delta: float) -> dict[str, Any]:
    """Return what the record says of the measurement: the noisy table, its figures with 95 % intervals, and the
    guarantee. It is drawn once.

    task: as it was loaded: the ledger knows held-out examples by what they were then. epsilon, delta: what all releases
    of training examples spent together, so that one statement holds for both.
    """
    held = prepared.task.validation
    images, people = task.validation, task.held_out_people
    assert held is not None
    assert images is not None
    n, unit = task.held_out_units, cell.inputs.pair.unit
    counts = table_of(logits(prepared.trains, held.x), held.y, task.metric, people)

    # The noise follows from what decides the counts: the examples, whose they are, and the trained weights.
    sensitivity = quality.sensitivity(counts)
    plan = accountant.plan(epsilon, delta, 1.0, 1, sensitivity)
    spending = Spending(images, plan.epsilon, plan.delta, task.original, plan)
    decides = [*held, *([] if people is None else [people])]
    secret = cell.streams.secret(ledger.MEASUREMENT, decides, [], tensors(prepared.whole), plan._asdict(), spending)

    def draw() -> dict[str, Any]:
        drawn = quality.release(counts, n, plan, secret, balanced=task.metric == "balanced_accuracy")
        return {name: torch.tensor(value) for name, value in drawn._asdict().items() if value is not None}

    # drawn once, before anything follows from it
    kept = released_once(cell.folder / "measurement.pt", secret, draw)
    released = Released(**{name: value.numpy() for name, value in kept.items()})

    what = "The measured quality is, for the held-out examples,"
    if unit:
        what = f"The measured quality is, for a held-out person with all their examples (those with one {unit}),"
    privacy = accountant.measurement_statement(what, plan, cell.budget.secure_noise, n, sensitivity, "held-out", unit)
    by_content = is_path(cell.inputs.pair.private) and len(task.shape) == 3  # copies of an image are one unit
    privacy["adjacency"] = accountant.neighbours(unit, "held-out", by_content)
    return {
        "table": "histograms" if counts.ndim == 3 else "confusion",
        **{name: value.tolist() for name, value in kept.items() if name != "n"},
        "examples": len(held.y),
        "units": n,
        **answered_of(released, labels_of(task)),
        "figures": {name: [part.tolist() for part in figure] for name, figure in figures_of(released).items()},
        "privacy": privacy | {"not_covered": [*privacy["not_covered"], accountant.ROUNDED]},
    }
