"""What `--help` and the reference say of settings is what the settings are."""

import dataclasses
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml
from hydra import compose, initialize_config_dir
from hydra.utils import get_class
from omegaconf import OmegaConf

from pubsel.cli import SCHEMAS, main
from pubsel.settings import CONF, explain
from pubsel.settings.keys import Device
from pubsel.settings.schema import keys_of, setting

ALGORITHMS = sorted(path.stem for path in (CONF / "algorithm").glob("*.yaml"))


def composed(command: str, *words: str) -> dict[str, Any]:
    with initialize_config_dir(str(CONF), version_base="1.3"):
        return OmegaConf.to_container(compose(command, list(words)))  # type: ignore[return-value]


def sections(command: str, *words: str) -> list[explain.Section]:
    return explain.sections(SCHEMAS[command], composed(command, *words))


@pytest.mark.parametrize("command", SCHEMAS)
def test_every_setting_has_a_meaning_and_the_value_that_a_command_would_use(command: str) -> None:
    values = composed(command)
    explained = {told.key: told for section in sections(command) for told in section.settings}
    groups = {f.name for f in dataclasses.fields(SCHEMAS[command]) if dataclasses.is_dataclass(f.type)}
    assert set(explained) >= {key for key in keys_of(SCHEMAS[command]) if key not in groups | {"algorithm"}}
    for key, told in explained.items():
        assert told.about, key
        value: Any = values
        for part in key.split("."):
            value = value.get(part) if isinstance(value, dict) else None
        if value is not None:
            assert told.value == explain.typed(value), key


@pytest.mark.parametrize("name", ALGORITHMS)
def test_the_settings_of_a_method_are_read_from_its_source_as_they_are(name: str) -> None:
    target = composed("run", f"algorithm={name}")["algorithm"]["_target_"]
    told, real = explain.method_settings(target), get_class(target)
    assert told is not None
    assert told.__doc__ == real.__doc__
    for here, there in zip(dataclasses.fields(told), dataclasses.fields(real), strict=True):
        assert (here.name, dict(here.metadata)) == (there.name, dict(there.metadata))
        assert explain.kind(here.type, here.metadata) == explain.kind(there.type, there.metadata) != ""
        assert str(here.default) == str(there.default)


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
    assert [explain.typed(value) for value in values] == [
        "null", "true", "false", "0", "1", "1e-05", "a", "[a,null]", "{a:1}", "cpu"
    ]  # fmt: skip


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


def test_help_of_a_wrong_option_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["run", "--help", "algorithm=nope"]) == 2
    said = capsys.readouterr()
    assert (said.out, said.err.count("\n")) == ("", 1)
    assert "dp_sgd" in said.err


def test_help_explains_a_method_of_the_users_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "conf" / "algorithm").mkdir(parents=True)
    settings = {"_target_": "by_hand.ByHand", "name": "by_hand", "factor": 2}
    (tmp_path / "conf" / "algorithm" / "by_hand.yaml").write_text(f"# A method by hand.\n{yaml.safe_dump(settings)}")
    (tmp_path / "by_hand.py").write_text(
        "import torch\nfrom dataclasses import dataclass\nfrom pubsel.algorithms.dp_sgd import DPSGD\n"
        "from pubsel.settings.schema import setting\nraise RuntimeError('help imports no method')\n"
        "@dataclass\nclass ByHand(DPSGD):\n    factor: float = setting('what it multiplies by', over=1)\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    assert main(["run", "--config-dir", str(tmp_path / "conf"), "--help", "algorithm=by_hand"]) == 0
    out = capsys.readouterr().out
    assert "A method by hand." in out
    assert re.search(r"algorithm\.factor=2  \(number, greater than 1\)\n +what it multiplies by", out)
    assert "algorithm.clip_norm=???" in out
    assert "by_hand" in re.findall(r"\w+", out.partition("algorithm=NAME, one of")[2])


def test_help_imports_nothing_that_computes() -> None:
    code = (
        "import sys\nfrom pubsel.cli import main\n"
        "for words in ('run --help', 'rank --help', 'run --help algorithm=gep distance=otdd'):\n"
        "    assert main(words.split()) == 0\n"
        "heavy = {'torch', 'numpy', 'pandas', 'scipy', 'matplotlib', 'joblib'} & set(sys.modules)\n"
        "assert not heavy, heavy\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
