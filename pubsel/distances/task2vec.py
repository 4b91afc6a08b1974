"""Task2Vec. Achille et al.: Task2Vec: Task Embedding for Meta-Learning, ICCV 2019, arXiv:1902.03545.

A task is embedded as the diagonal of the Fisher information of a probe network's weights, once a new head is fitted to
the task's labels (Section 2); two tasks are as far apart as the cosine distance of their embeddings, each coordinate
divided by the sum of both (Section 3.2, d_sym). GSD's Table 4 and Figure 4 compare with it.

The Fisher is the paper's definition, with labels drawn from the model's own distribution and the gradient of each
example squared on its own; the authors' code squares the mean gradient of 64. Their second estimate, by a variational
bound, is not offered.

It reads private images and labels, through gradients. It is NOT differentially private: it is computed without noise.
"""

import warnings
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor, nn

from pubsel.data import Split
from pubsel.distances import Between, Distance, Draw
from pubsel.distances.inputs import class_numbers, penultimate
from pubsel.gradients.matrix import PerExampleGradients
from pubsel.messages import UsageError
from pubsel.models.trained import head
from pubsel.privacy.randomness import stream


def embedding(model: nn.Module, x: Tensor, y: Tensor, rng: np.random.Generator) -> Tensor:
    """Return the embedding, float64 [filters], of the task with images x [n, c, h, w] and classes y [n] = 0,
    ..., C - 1, or 0/1 labels y [n, labels]: the Fisher information of each trained weight below the head of `model`,
    averaged over each filter.

    model: the probe, in eval mode; its head is not used. If nothing below it trains, or x are features [n, d]: the
    Fisher information of a shift of each of the head's d inputs, as if the probe ended in a bias. rng: the labels that
    are drawn. Memory is that of one block of per-example gradients.
    """
    z = penultimate(model, x)
    weight, bias = fit_head(z, y)
    logits = z @ weight.T + bias

    name = "" if x.dim() == 2 else head(model)
    trained = [n for n, p in model.named_parameters() if p.requires_grad and n.endswith("weight")]
    names = [n for n in trained if n != f"{name}.weight"]
    if x.dim() == 2 or not names:
        return fisher_of_shift(weight, logits, y.dim() == 2)

    # The probe gets the fitted head for as long as its gradients are taken.
    old = model.get_submodule(name)
    like = next(model.parameters())
    fitted = nn.Linear(z.shape[1], len(weight)).to(like).requires_grad_(False)
    fitted.load_state_dict({"weight": weight, "bias": bias})
    model.set_submodule(name, fitted)
    try:
        return fisher(PerExampleGradients(model, names=names), x, sample_labels(logits, y.dim() == 2, rng))
    finally:
        model.set_submodule(name, old)


def fit_head(z: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    """Return the weight [C, d] and bias [C] of logistic regression on features z [n, d], standardised, with classes y
    [n] or 0/1 labels [n, C], each label by itself. A standard normal prior on the weights (scikit-learn's C = 1) keeps
    it finite if classes are separable."""
    # the prior is on weights, so features of any scale have to be alike to it
    shift, scale = z.mean(0), z.std(0)
    scale = torch.where(scale > 1e-12 * scale.max(), scale, 1)
    x = ((z - shift) / scale).numpy()

    if y.dim() == 1:
        w, b = _logistic(x, y.numpy())
    else:
        fits = [_logistic(x, column.numpy()) for column in y.T]
        w, b = (np.concatenate(part) for part in zip(*fits, strict=True))

    # The head of standardised features, as one of the features themselves.
    weight = torch.from_numpy(w) / scale
    return weight, torch.from_numpy(b) - weight @ shift


def _logistic(x: np.ndarray, y: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return the weight and bias for classes y [n], with a row for each class; for 0/1 float labels one row."""
    from sklearn.exceptions import ConvergenceWarning  # half a second, for who measures this distance alone
    from sklearn.linear_model import LogisticRegression

    multi_label = y.dtype.kind == "f"
    if multi_label and y.min() == y.max():  # as often as it would be by Laplace's rule of succession
        odds = (y.sum() + 1) / (len(y) - y.sum() + 1)
        return np.zeros((1, x.shape[1])), np.log([odds])

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ConvergenceWarning)
        regression = LogisticRegression(max_iter=300).fit(x, y)
    w, b = regression.coef_, regression.intercept_
    if len(w) == 1 and not multi_label:  # two classes: logits 0 and w x + b
        w, b = np.concatenate([0 * w, w]), np.concatenate([0 * b, b])
    return w, b


def sample_labels(logits: Tensor, multi_label: bool, rng: np.random.Generator) -> Tensor:
    """Return labels from the model's own distribution: classes [n], or float32 [n, labels] of 0/1, of logits [n, C]."""
    u = torch.from_numpy(rng.random((len(logits), logits.shape[1] if multi_label else 1)))
    if multi_label:
        return (u < logits.sigmoid()).float()
    return (logits.softmax(1).cumsum(1) < u).sum(1).clamp(max=logits.shape[1] - 1)


def fisher(engine: PerExampleGradients, x: Tensor, y: Tensor) -> Tensor:
    """Return the mean of the squared per-example gradients of the log-likelihood at x [n, ...], y [n, ...], and of
    these over each filter, the weights that share an output: float64 [filters]."""
    device = next(engine.model.parameters()).device
    # in float64, since squares of small gradients vanish in float32
    total = torch.zeros(engine.size, dtype=torch.float64, device=device)
    for block in engine.blocks(x.to(device), y.to(device)):
        total += block.squared_sum()

    labels = y.shape[1] if y.dim() == 2 else 1  # whose mean the loss is
    per_weight = total * labels**2 / len(x)
    shapes = {name: engine.model.get_parameter(name).shape for name in engine.offsets}
    filters = [per_weight[s].view(shapes[name][0], -1).mean(1) for name, s in engine.offsets.items()]
    return torch.cat(filters).cpu()


def fisher_of_shift(weight: Tensor, logits: Tensor, multi_label: bool) -> Tensor:
    """Return the Fisher information [d] of a shift of the inputs of a head with `weight` [C, d], in closed form: the
    mean over `logits` [n, C] of the variance of W_cj over classes c; for several labels at once, of sum_c p_c (1 - p_c)
    W_cj^2."""
    if multi_label:
        p = logits.sigmoid()
        return (p * (1 - p)).mean(0) @ weight.square()
    p = logits.softmax(1)
    return (p.mean(0) @ weight.square() - (p @ weight).square().mean(0)).clamp(min=0)


def task2vec(a: Tensor, b: Tensor) -> float:
    """Return the cosine distance of a / (a + b) and b / (a + b), for embeddings [filters] that are at least 0: in
    [0, 1], 0 for proportional ones. Coordinates that are 0 in both are left out. ValueError if an embedding is all 0.
    """
    if not a.any() or not b.any():
        raise ValueError("all gradients are zero")
    total = a + b
    a, b = (torch.where(total > 0, side / total, 0.0) for side in (a, b))
    return max(0.0, 1 - float(nn.functional.cosine_similarity(a, b, dim=0)))


@dataclass
class Task2Vec(Distance):
    """Settings of Task2Vec.

    Each side has its own labels, and a head of as many classes as there are among its m examples. UsageError if a side
    has no labels.
    """

    title = "Task2Vec"
    reads = "images and labels, through gradients"

    def to_private(self, draw: Draw) -> Between:
        model = draw.model()

        def side(name: str, split: Split) -> Tensor:
            numbers = class_numbers(name, split.y, "task2vec")
            labels = split.y if split.y.dim() == 2 else numbers
            vector = embedding(model, split.x, labels, stream(draw.key, "task2vec", draw.i))
            if not vector.any():
                raise UsageError(f"distance=task2vec: on {name}, all gradients are zero: leave it out")
            return vector

        private = side("the private data", draw.private)
        return lambda name, public: task2vec(private, side(name, public))
