"""Membership inference: can an attacker distinguish private examples from others of the same kind?

On GSD (Gu, Kamath, Wu, Appendix D.1, Tables 8 and 9): the attacker knows n of the m private examples, trains a
classifier on them and on n others, and classifies the remaining m - n and as many others. On trained models: the loss
alone (Sablayrolles et al. 2019, as in AdaMix, Figure 1, right). Carlini et al. 2022 report the true-positive rate at
low false-positive rates: an average hides the few examples that are certainly recognised.
"""

import math
import warnings
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from scipy.stats import binomtest
from sklearn.exceptions import ConvergenceWarning
from sklearn.metrics import roc_auc_score, roc_curve
from sklearn.neural_network import MLPClassifier
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler
from torch import Tensor, nn

from pubsel.data import Split
from pubsel.distances import gsd
from pubsel.distances.gsd import GSD
from pubsel.gradients.matrix import DenseGradients, PerExampleGradients, random_labels
from pubsel.gradients.per_example import losses_of
from pubsel.gradients.subspace import projection_metric, top_k
from pubsel.models.trained import head
from pubsel.privacy.randomness import stream
from pubsel.training.evaluation import auc_interval, logits

FALSE_POSITIVES = (0.001, 0.01)
SKETCH = 256  # features of a gradient for the classifier
DIGITS = (2, 3, 4, 6)  # to which a published distance may be rounded; GSD itself is good to six


def attack_figures(
    scores: NDArray[np.float64], member: NDArray[np.bool_], random: np.random.Generator
) -> dict[str, Any]:
    """Return the quality of scores [n], higher for members, as a test of member [n]: the AUC, its 95 % bootstrap
    interval over the examples, and the true-positive rate at each of FALSE_POSITIVES. With fewer others than 1 / rate,
    a rate allows no false positive."""
    # all thresholds are kept: low rates need them
    false, true, _ = roc_curve(member, scores, drop_intermediate=False)
    return {
        "auc": float(roc_auc_score(member, scores)),
        "auc_interval": list(auc_interval(member, scores, random)),
        "tpr": {f"{rate:g}": float(true[false <= rate].max()) for rate in FALSE_POSITIVES},
        "members": int(member.sum()),
        "others": int((~member).sum()),
    }


def success_rate(scores: NDArray[np.float64], member: NDArray[np.bool_]) -> dict[str, Any]:
    """Return the share of examples on the right side of 0.5, with its 95 % interval (Clopper and Pearson)."""
    test = binomtest(int(((scores > 0.5) == member).sum()), len(scores))
    interval = test.proportion_ci(0.95)
    return {"success": float(test.statistic), "success_interval": [float(interval.low), float(interval.high)]}


def classifier_scores(
    members: NDArray[np.float32], others: NDArray[np.float32], known: int, seed: int
) -> tuple[NDArray[np.float64], NDArray[np.bool_]]:
    """Return scores in [0, 1] and truth, [2 (m - known)] each, of the members and others, [m, d] each, after the first
    `known` of either. A network with a hidden layer of 64 is trained on those `known`, with standardised features, for
    30 epochs of Adam in batches of 32. Its L2 penalty of 1 finds weak and strong leaks alike."""
    # half of what the attacker knows are members, as is half of what it is asked about
    network = MLPClassifier((64,), alpha=1.0, batch_size=32, max_iter=30, random_state=seed)
    classifier = make_pipeline(StandardScaler(), network)
    with warnings.catch_warnings(action="ignore", category=ConvergenceWarning):  # 30 epochs are meant
        classifier.fit(np.concatenate([members[:known], others[:known]]), np.repeat([True, False], known))
    unknown = np.concatenate([members[known:], others[known:]])
    return classifier.predict_proba(unknown)[:, 1], np.repeat([True, False], len(unknown) // 2)


def member_scores(model: nn.Module, split: Split) -> NDArray[np.float64]:
    """Return minus the loss of each example [n]: training examples are expected to have a smaller one."""
    return -losses_of(logits(model, split.x).double().cpu(), split.y).numpy()


# GSD


Features = dict[tuple[str, str | None], NDArray[np.float32]]  # kind, with or without GSD: [2m, d], members first


class WhiteBoxView(NamedTuple):
    """All that a white-box attacker of one batch of private examples sees; rows: the m members, then the m others."""

    gradients: Tensor  # [2m, SKETCH + 2] on the first network
    activations: Tensor  # [2m, h + classes + 1] on it
    values: Tensor  # [2m, s] for each of s public sets and networks: the example's distance, less the released GSD
    replaced: NDArray[np.float64]  # [targets, 2, s'] from `known_but_one`, on the first network

    def features(self) -> Features:
        """Return the features of each row of Table 8."""
        tables: Features = {}
        for kind, table in (("gradients", self.gradients), ("hidden_activations", self.activations)):
            tables[kind, "without"] = table.numpy()
            tables[kind, "with"] = torch.cat([table, self.values], 1).numpy()
        return tables


def white_box(
    distance: GSD,
    build: Callable[[int], nn.Module],
    members: Split,
    others: Split,
    candidates: dict[str, Split],
    classes: int,
    targets: int,
    key: str,
) -> WhiteBoxView:
    """Compute GSD of m members to each candidate on `distance.initialisations` networks, and return the view of an
    attacker who has the networks, the public batches and subspaces, and the released values.

    The network was never trained: its answer to an example does not depend on its use. The released values are the same
    for all examples, so each is subtracted from the example's distance, which teaches a classifier a constant only. It
    is right in half of all cases, up to chance (a standard error of 1.1 points with 2,000 examples, 2.5 with 400), as
    it must be in the paper. `known_but_one` does use the values.
    """
    both = Split(torch.cat([members.x, others.x]), torch.cat([members.y, others.y]))
    values = []
    for i in range(distance.initialisations):
        model = build(i)
        engine = gsd.engine_of(model, distance)
        labels = random_labels(stream(key, "labels", i), len(members.x), classes, members.y.dim() == 2)

        # Both sides as in Algorithm 1.
        first = {name: Split(split.x[: distance.m], split.y[: distance.m]) for name, split in candidates.items()}
        bases = [gsd.basis_of(name, split, labels, distance, engine, classes) for name, split in first.items()]
        private = gsd.basis_of("the private data", members, labels, distance, engine, classes)

        # A value that is the same for all examples says nothing by itself: each row gets its difference from it.
        metrics = [projection_metric(private, basis) for basis in bases]
        released = torch.tensor(metrics) / math.sqrt(distance.k)
        rows, distances = gradients(engine, both, bases, stream(key, "sketch", i))
        values.append(distances - released)

        if i == 0:
            on_first = rows, last_layers(model, both)
            instead = Split(others.x[:targets], others.y[:targets])
            replaced = known_but_one(distance, engine, members, instead, labels, bases)

    return WhiteBoxView(*on_first, torch.cat(values, 1), replaced)


def black_box(model: nn.Module, members: Split, others: Split) -> Features:
    """Return the features of Table 9: the images themselves, as in the paper; and the logits and loss of the model with
    the label, [2m, 2 classes + 1], as in the adversarial-robustness-toolbox (Nicolae et al. 2018)."""
    both = Split(torch.cat([members.x, others.x]), torch.cat([members.y, others.y]))
    outputs = logits(model, both.x).cpu()
    several = both.y.dim() == 2
    label = both.y.nan_to_num(0.5) if several else nn.functional.one_hot(both.y, outputs.shape[1]).float()
    responses = torch.cat([outputs, losses_of(outputs, both.y)[:, None], label], 1)
    images = both.x.flatten(1) / 255
    return {("images", None): images.numpy(), ("outputs", None): responses.numpy()}


def gradients(
    engine: PerExampleGradients, split: Split, bases: list[Tensor], random: np.random.Generator
) -> tuple[Tensor, Tensor]:
    """Return two tensors about each example's gradient g, taken with its true label: a random linear map
    [n, SKETCH] of g with its norm and the loss, and its distance [n, s] to each of s public subspaces V [p, k],
    sqrt(1 - |V^T g|^2 / |g|^2), which is GSD of one example."""
    # a random map keeps norms and angles, and fits into memory
    device = next(engine.model.parameters()).device
    drawn = random.standard_normal((engine.size, SKETCH), np.float32) / math.sqrt(SKETCH)
    sketch = torch.from_numpy(drawn).to(device)

    rows, distances = [], []
    for block in engine.blocks(split.x.to(device), split.y.to(device)):
        assert block.losses is not None
        norms = block.row_norms().clamp(min=1e-30)[:, None]  # [b, 1]
        projections = [(block.rows @ basis.to(block.dtype)).double() for basis in bases]  # [b, k]
        inside = [projection.square().sum(1, keepdim=True) for projection in projections]

        outside = (1 - torch.cat(inside, 1) / norms.square()).clamp(min=0)  # rounding may make it negative
        distances.append(outside.sqrt().float().cpu())
        row = torch.cat([block.rows @ sketch, norms.to(block.dtype), block.losses[:, None]], 1)
        rows.append(row.cpu())

    return torch.cat(rows), torch.cat(distances)


@torch.no_grad()
def last_layers(model: nn.Module, split: Split) -> Tensor:
    """Return for each example the inputs [n, h] of the last linear layer, the logits [n, classes], and the loss."""
    inputs_of_last: list[Tensor] = []
    hook = model.get_submodule(head(model)).register_forward_hook(
        lambda _, inputs, __: inputs_of_last.append(inputs[0].flatten(1).cpu())
    )
    try:
        outputs = logits(model, split.x).cpu()
    finally:
        hook.remove()
    return torch.cat([torch.cat(inputs_of_last), outputs, losses_of(outputs, split.y)[:, None]], 1)


def known_but_one(
    distance: GSD, engine: PerExampleGradients, members: Split, others: Split, labels: Tensor, bases: list[Tensor]
) -> NDArray[np.float64]:
    """Return GSD to each public subspace [p, k], as released and with other i in the place of member i: [others, 2, s].
    labels [m] are random, and stay with the places.

    Not in the paper: the attacker of differential privacy, who knows everything but one example. GSD has no noise, so
    the member reproduces the released values, and another example does not.
    """
    device = next(engine.model.parameters()).device
    n = len(others.x)
    instead = gsd.gradients_of(engine, distance, others.x.to(device), labels[:n].to(device)).rows.clone()  # [n, p]
    rows = gsd.gradients_of(engine, distance, members.x.to(device), labels.to(device)).rows  # [m, p]

    def values() -> NDArray[np.float64]:
        private = top_k(DenseGradients(rows), distance.k)
        return np.array([projection_metric(private, basis) for basis in bases]) / math.sqrt(distance.k)

    released = values()
    pairs = []
    for i in range(n):
        member = rows[i].clone()
        rows[i] = instead[i]
        pairs.append(np.stack([released, values()]))
        rows[i] = member  # the next replacement starts from the released data again

    return np.stack(pairs)


def pick_rate(values: NDArray[np.float64], digits: int) -> float:
    """Return the success rate of an attacker with values [n, 2, s] of the member and of the other, and the released
    ones rounded to `digits`: 1 if the rounded values differ, 1/2 otherwise."""
    rounded = values.round(digits)
    return float(np.where((rounded[:, 0] != rounded[:, 1]).any(1), 1.0, 0.5).mean())
