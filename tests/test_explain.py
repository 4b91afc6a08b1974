"""What `--help` and the reference say of settings is what the settings are."""

import dataclasses
import re
from pathlib import Path
from typing import Any

import pytest
import yaml
from omegaconf import OmegaConf

from pubsel.cli import SCHEMAS, main
from pubsel.settings import explain
from pubsel.settings.compose import composed
from pubsel.settings.keys import Device
from pubsel.settings.schema import keys_of, setting


@pytest.mark.parametrize("command", SCHEMAS)
def test_every_setting_has_a_meaning_and_the_value_that_a_command_would_use(command: str) -> None:
    with composed(command, []) as config:
        values = OmegaConf.to_container(config)
    sections = explain.sections(SCHEMAS[command], values, methods=True)
    explained = {each.key: each for section in sections for each in section.settings}
    groups = {f.name for f in dataclasses.fields(SCHEMAS[command]) if dataclasses.is_dataclass(f.type)} | {"pair.read"}
    assert set(explained) >= {key for key in keys_of(SCHEMAS[command]) if key not in groups | {"algorithm"}}
    for key, shown in explained.items():
        assert shown.about, key
        value: Any = values
        for part in key.split("."):
            value = value.get(part) if isinstance(value, dict) else None
        if value is not None:
            assert shown.value == explain.type_text(value), key


def test_kinds_and_values_read_as_they_are_typed() -> None:
    @dataclasses.dataclass
    class Some:
        a: int | None = setting("", at_least=1, at_most=10**6)
        b: float = setting("", over=0, below=0.5, infinite=True)
        c: Device = setting("")
        d: list[float] | None = setting("")
        e: dict[str, Any] = setting("")
        f: Any = setting("")

    assert [explain.kind(f.type, f.metadata) for f in dataclasses.fields(Some)] == [
        "whole number, at least 1, at most 1,000,000, or null",
        "number, greater than 0, less than 0.5, inf is allowed",
        "auto, cpu or cuda",
        "list of numbers, or null",
        "mapping",
        "",
    ]
    values = (None, True, False, 0, 1, 1e-5, "a", ["a", None], {"a": 1}, Device.cpu)
    assert [explain.type_text(value) for value in values] == "null true false 0 1 1e-05 a [a,null] {a:1} cpu".split()


def test_help_lists_the_values_of_the_default_methods(capsys: pytest.CaptureFixture[str]) -> None:
    """Their classes are not imported for it."""
    assert main(["rank", "--help"]) == 0
    shown = capsys.readouterr().out.partition("\ndistance\n")[2]
    assert re.search(r"^  distance=NAME, one of\n(    .*\n)+\n  distance.name=gsd\n", shown, re.MULTILINE)


def test_help_of_an_option_explains_that_option_alone(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["run", "--help", "algorithm=gep_k500", "distance=otdd", "seed=3"]) == 0
    out = capsys.readouterr().out
    assert out.startswith("algorithm=gep_k500: GEP halves k for 28 x 28 images")
    assert re.search(r"algorithm\.k=500  \(whole number, at least 1\)\n +basis vectors in all", out)
    assert "distance.name=otdd" in out
    assert "training.epochs" not in out
    assert main(["run", "--help", "+experiment=gep_cifar10", "seed=3"]) == 0
    out = capsys.readouterr().out
    assert "seed=3 " in out
    assert "model.name=resnet20" in out
    assert "training.epochs" in out


def test_help_explains_a_method_of_the_users_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "conf" / "algorithm").mkdir(parents=True)
    settings = {"_target_": "by_hand.ByHand", "name": "by_hand", "factor": 2}
    (tmp_path / "conf" / "algorithm" / "by_hand.yaml").write_text(f"# A method by hand.\n{yaml.safe_dump(settings)}")
    (tmp_path / "by_hand.py").write_text(
        "import torch\nfrom dataclasses import dataclass\nfrom pubsel.algorithms.dp_sgd import DPSGD\n"
        "from pubsel.settings.schema import setting\n"
        "@dataclass\nclass ByHand(DPSGD):\n    factor: float = setting('what it multiplies by', over=1)\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    assert main(["run", "--config-dir", str(tmp_path / "conf"), "--help", "algorithm=by_hand"]) == 0
    out = capsys.readouterr().out
    assert "A method by hand." in out
    assert re.search(r"algorithm\.factor=2  \(number, greater than 1\)\n +what it multiplies by", out)
    assert "algorithm.clip_norm=???" in out
    assert "by_hand" in re.findall(r"\w+", out.partition("algorithm=NAME, one of")[2])
