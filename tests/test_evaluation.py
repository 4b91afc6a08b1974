"""Accuracy and AUC against values computed by hand."""

import pytest
import torch

from pubsel.config import UserError
from pubsel.data import Split
from pubsel.evaluation import auc, evaluate


class Given(torch.nn.Module):
    """Gives its input as logits."""

    def __init__(self):
        super().__init__()
        self.p = torch.nn.Parameter(torch.zeros(1))

    def forward(self, x):
        return x


def test_accuracy():
    logits = torch.tensor([[2.0, 1.0], [0.0, 1.0], [3.0, 0.0], [0.0, 5.0]])
    assert evaluate(Given(), Split(logits, torch.tensor([0, 1, 1, 1])), "accuracy") == 0.75


def test_auc_is_the_share_of_pairs_in_order():
    logits = torch.tensor([[0.0, 1.0], [0.0, 2.0], [0.0, 3.0], [0.0, 4.0]])
    assert auc(logits, torch.tensor([0, 1, 0, 1])) == 0.75  # 3 of 4 pairs, for either class


def test_multi_label_auc_leaves_out_labels_of_one_value():
    outputs = torch.tensor([[1.0, 0.0, 9.0], [2.0, 1.0, 9.0], [3.0, 2.0, 9.0]])
    y = torch.tensor([[0.0, 1, 1], [0, 0, 1], [1, 0, 1]])
    assert auc(outputs, y) == 0.5  # the first label 1, the second 0, the third has one value only


def test_one_class_has_no_auc():
    with pytest.raises(UserError, match="at least two classes"):
        auc(torch.zeros(3, 2), torch.zeros(3, dtype=torch.long))
