"""Utility of a trained model on the test set: accuracy or area under the ROC curve, as fractions in [0, 1]."""

import numpy as np
import torch
from sklearn.metrics import roc_auc_score
from torch import Tensor, nn

from pubsel.config import UserError
from pubsel.data import Split


@torch.no_grad()
def logits(model: nn.Module, x: Tensor, batch: int = 1000) -> Tensor:
    """Outputs of the model for x [n, ...] -> [n, classes], on the model's device, computed `batch` at a time."""
    device = next(model.parameters()).device
    return torch.cat([model(part.to(device)) for part in x.split(batch)])


def evaluate(model: nn.Module, test: Split, metric: str) -> float:
    """Accuracy, or AUC: macro mean of one class against the rest; for several labels at once, the mean over those
    that have both values. Raises UserError where the test set has no class to tell apart."""
    outputs = logits(model, test.x).double().cpu()
    if metric == "accuracy":
        return float((outputs.argmax(1) == test.y.cpu()).double().mean())
    return auc(outputs, test.y.cpu())


def auc(outputs: Tensor, y: Tensor) -> float:
    """Area under the ROC curve of outputs [n, classes] for y [n] or 0/1 [n, labels], by scikit-learn."""
    truth = y if y.dim() == 2 else torch.nn.functional.one_hot(y, outputs.shape[1])
    scores = outputs.sigmoid() if y.dim() == 2 else outputs.softmax(1)
    both = [c for c in range(truth.shape[1]) if 0 < truth[:, c].sum() < len(truth)]
    if not both:
        raise UserError("AUC needs test examples of at least two classes: check the test labels")
    return float(np.mean([roc_auc_score(truth[:, c].numpy(), scores[:, c].numpy()) for c in both]))
