"""The quality of a trained model on held-out private examples, released with noise: `privacy.measure=true`.

Noisy counts are released (`release.quality`), of the examples of pair.validation, which were not trained on. An example
is in training or held out, never both, and so is a person with all examples (`pair.unit`); which of them is treated as
public. So the weights cover each training unit with the whole epsilon and delta, and the counts each held-out one: a
private example or person changes only one of the two, and what follows from the other (McSherry 2009, Privacy
Integrated Queries, Theorem 4: parallel composition). Nothing is taken from the budget of training.

In floating point, the logits of an example may differ in the last digits if other examples are computed next to it. If
its two largest logits, or a score and the edge of a bin, agree to such digits, another example can move it to another
count. The sensitivity does not bound that; the record says so (ROUNDED).
"""

from typing import Any

import torch
from torch import Tensor

from pubsel.cell import Cell, Spending, tensors
from pubsel.data import Task
from pubsel.privacy import accountant, ledger
from pubsel.privacy.people import weights_of
from pubsel.release import quality
from pubsel.release.quality import Estimate, Released, Steps
from pubsel.training.evaluation import logits
from pubsel.training.once import Prepared, released_once

ROUNDED = (
    "held-out examples whose class or score changes if logits are rounded differently (by some 1e-7 of them), as a "
    "processor may do next to other examples"
)


def table_of(outputs: Tensor, y: Tensor, metric: str, people: Tensor | None = None) -> Steps:
    """Return the counts to release, in steps of 1 / people.UNIT, from logits [n, C] and labels y [n] or [n, L]:
    histograms of scores where an AUC of two classes or of labels is the metric, otherwise the confusion matrix. NOT
    private.

    people: how many examples each person has, in a row; None: each example is a unit."""
    weights = torch.tensor(weights_of(people, len(y)), device=y.device)
    if y.dim() == 2:
        return quality.histograms(y, outputs.sigmoid(), weights)
    if metric == "auc" and outputs.shape[1] == 2:
        return quality.histograms(y[:, None], outputs.softmax(1)[:, 1:], weights)
    return quality.confusion(y, outputs.argmax(1), outputs.shape[1], weights)


def figures_of(released: Released) -> dict[str, Estimate]:
    """Return what follows from a noisy table, by name."""
    if released.counts.ndim == 3:
        return {"auc": quality.noisy_auc(released), "auc of each label": quality.aucs(released)}
    figures = {"accuracy": quality.accuracy(released), "balanced_accuracy": quality.noisy_balanced_accuracy(released)}
    if released.sizes is not None:  # the metric comes first
        figures = dict(reversed(figures.items()))
    return figures | {"recall of each class": quality.recalls(released)}


def quality_text(quality: dict[str, Any] | None) -> str:
    """Return the first figure of a record's measurement, in words; empty if there is none."""
    if quality is None:
        return ""
    name, (estimate, low, high) = next(iter(quality["figures"].items()))
    return f" Measured privately: {name} {100 * estimate:.1f} % [{100 * low:.1f}, {100 * high:.1f}]."


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
    spending = Spending(images, plan.epsilon, plan.delta)
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
    return {
        "table": "histograms" if counts.ndim == 3 else "confusion",
        **{name: value.tolist() for name, value in kept.items() if name != "n"},
        "examples": len(held.y),
        "units": n,
        "figures": {name: [part.tolist() for part in figure] for name, figure in figures_of(released).items()},
        "privacy": privacy | {"not_covered": [*privacy["not_covered"], ROUNDED]},
    }
