"""Zero-shot weights: open_clip's text tower with random weights, since none can be had here."""

import sys

import pytest
import torch

from pubsel.messages import UsageError, UserError
from pubsel.models.class_names import text_weights

open_clip = pytest.importorskip("open_clip", reason="needs the extra clip")
SMALL = {
    "embed_dim": 8,
    "vision_cfg": {"image_size": 16, "layers": 1, "width": 16, "head_width": 8, "patch_size": 8},
    "text_cfg": {"context_length": 77, "vocab_size": 49408, "width": 16, "heads": 2, "layers": 1},
}


@pytest.fixture
def small(tmp_path):
    import json

    (tmp_path / "pubsel-small.json").write_text(json.dumps(SMALL))
    open_clip.add_model_config(tmp_path)
    return "pubsel-small"


def test_weights_are_scaled_unit_embeddings_in_the_order_of_the_names(small):
    torch.manual_seed(0)
    weights = text_weights(["daisy", "rose", "tulip"], small, None, 100.0)
    assert weights.shape == (3, 8)
    torch.testing.assert_close(weights.norm(dim=1), torch.full((3,), 100.0))
    torch.manual_seed(0)
    turned = text_weights(["tulip", "rose", "daisy"], small, None, 100.0)
    torch.testing.assert_close(turned.flip(0), weights)
    assert (weights[0] - weights[1]).norm() > 1e-3


def test_an_unknown_model_and_absent_weights_are_one_line(small, tmp_path):
    with pytest.raises(UsageError, match="text_model=nosuch"):
        text_weights(["daisy"], "nosuch", None, 1.0)
    with pytest.raises(UserError, match="text_weights="):
        text_weights(["daisy"], small, str(tmp_path / "absent.pt"), 1.0)


def test_without_open_clip_the_extra_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "open_clip", None)
    with pytest.raises(UserError, match=r"\.\[clip\]"):
        text_weights(["daisy"], "RN50", None, 1.0)
