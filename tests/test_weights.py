"""Files that are given for weights and hold a program."""

import os
import pickle
from pathlib import Path

import pytest
import torch

from pubsel import models
from pubsel.data.features import load_backbone
from pubsel.messages import UserError
from pubsel.models.weights import tensors_alone
from pubsel.settings.keys import Backbone
from pubsel.settings.schema import check
from tests.synthetic import secret_named

NETWORK = "test_resnet.r160_in1k"
CPU = torch.device("cpu")


class Payload:
    """What makes a file when it is unpickled."""

    def __init__(self, file: Path):
        self.file = file

    def __reduce__(self):
        return os.mknod, (str(self.file),)


@pytest.fixture
def evil(tmp_path):
    """A weight file with a payload, and the file that it would make."""
    made = tmp_path / "made"
    torch.save({"state_dict": {"weight": torch.zeros(2)}, "more": Payload(made)}, tmp_path / "evil.pth")
    return tmp_path / "evil.pth", made


@pytest.fixture
def trusting(monkeypatch):
    """timm as it is before 1.0.26, which unpickles everything unless told otherwise."""
    from timm.models import _helpers

    for function in (_helpers.load_state_dict, _helpers.load_checkpoint):
        before = function.__defaults__
        monkeypatch.setattr(function, "__defaults__", tuple(False if value is True else value for value in before))


def test_the_payload_is_one(evil):
    path, made = evil
    torch.load(path, weights_only=False)
    assert made.exists()


@pytest.mark.attack
@pytest.mark.parametrize("options", [False, True], ids=["checkpoint", "options"])
@pytest.mark.parametrize("of_backbone", [True, False], ids=["backbone", "model"])
@pytest.mark.usefixtures("trusting")
def test_a_weight_file_runs_no_code(evil, tmp_path, of_backbone, options):
    path, made = evil
    given = {"options": {"checkpoint_path": str(path)}} if options else {"checkpoint": str(path)}
    asked = {"architecture": NETWORK, "pretrained": False, "input_size": None, "checkpoint": None, **given}

    def network():
        if of_backbone:
            return load_backbone(check(Backbone, asked), "", CPU)
        of_model = check(models.Model, asked | {"name": "timm", "norm": "freeze"})
        return models.build(of_model, (3, 32, 32), 2, (0.5,) * 3, (0.5,) * 3, 0, str(tmp_path))

    with pytest.raises(UserError) as refused:
        network()
    assert not made.exists()
    assert "\n" not in str(refused.value)
    assert ("checkpoint_path" if options else "evil.pth") in str(refused.value)


@pytest.mark.attack
def test_weights_of_a_text_tower_run_no_code(evil, tmp_path):
    open_clip = pytest.importorskip("open_clip", reason="needs the extra clip")
    import json

    from test_text import SMALL

    from pubsel.models.class_names import text_weights

    (tmp_path / "pubsel-small.json").write_text(json.dumps(SMALL))
    open_clip.add_model_config(tmp_path)
    path, made = evil
    with pytest.raises(UserError, match=r"text_weights=.*evil\.pth"):
        text_weights(["daisy"], "pubsel-small", str(path), 1.0)
    assert not made.exists()


@pytest.mark.attack
def test_kept_files_of_a_run_run_no_code(evil):
    """A checkpoint, a first release and a finished model, which another process may have put there."""
    from pubsel.training.once import released_once

    path, made = evil
    with pytest.raises(UserError, match=r"evil\.pth cannot be read"):
        released_once(path, secret_named(), dict)
    assert not made.exists()


def test_whoever_calls_torch_load_takes_tensors_alone(evil, monkeypatch):
    path, made = evil
    for before in ({}, {"TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD": "1"}):
        for key, value in before.items():
            monkeypatch.setenv(key, value)
        with tensors_alone(), pytest.raises(pickle.UnpicklingError):
            torch.load(path, weights_only=False)
        assert not made.exists()
        assert {key: os.environ.get(key) for key in before} == before
        assert "TORCH_FORCE_WEIGHTS_ONLY_LOAD" not in os.environ
