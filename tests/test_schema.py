"""Records that are not as they should be: one line names the file, and the others go on."""

import copy
import json
import random
from collections.abc import Iterator
from itertools import product
from pathlib import Path
from typing import Any

import pytest

from pubsel import records
from pubsel.cli import main
from pubsel.messages import UserError
from pubsel.papers import measured
from pubsel.settings import CONF
from tests.made import write_lines
from tests.synthetic import record, save

KEPT = CONF.parent / "results" / "records"
VALUES = (None, ["x"], [], "text", -1, float("nan"), 10**400, {}, True, ...)  # ...: the key is removed
COMMANDS = [
    words.split() for words in ("report", "runs", "table gsd_table2", "make gsd_table2 dry=true", "runs show changed")
]
QUICK = [words for words in COMMANDS if words[0] in ("runs", "table")]
OF_ONE = [
    words.split()
    for words in ("export changed to=out", "predict changed image.png", "run replay=changed", "attack loss run=changed")
]


def real() -> dict[str, Any]:
    """The record of a run that is kept with the code, with a measurement and on the user's own data."""
    made = records._read_lines(sorted(KEPT.glob("*.jsonl.gz"))[0])[0]
    part = {key: made["privacy"][key] for key in ("epsilon", "delta", "steps", "noise_multiplier", "accountant")}
    quality = {
        "table": "confusion",
        "counts": [[3.0, 1.0], [0.5, 4.0]],
        "deviation": 1.0,
        "examples": 9,
        "units": 9,
        "figures": {"accuracy": [0.8, 0.5, 0.9], "recall of each class": [[0.8, 0.9], [0.5, 0.6], [0.9, 1.0]]},
        "privacy": made["privacy"] | part | {"rate": 1.0},
    }
    return made | {"private": "./mine", "quality": quality}


def places(values: Any, above: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """The keys of a record, on all levels; of a list the first value."""
    inner = values.items() if isinstance(values, dict) else [(0, values[0])] if isinstance(values, list | tuple) else ()
    for key, value in list(inner):
        yield (*above, key)
        if value:
            yield from places(value, (*above, key)) if isinstance(value, dict | list) else ()


def changed(made: dict[str, Any], place: tuple[Any, ...], value: Any) -> dict[str, Any]:
    made = copy.deepcopy(made)
    *above, last = place
    inner = made
    for key in above:
        inner = inner[key]
    if value is ...:
        del inner[last]
    else:
        inner[last] = value
    return made


def each() -> list[tuple[str, dict[str, Any]]]:
    made = real()
    return [(f"{place}={value}", changed(made, place, value)) for place in places(made) for value in VALUES]


@pytest.fixture
def others(folder: Path) -> Path:
    """A results folder with two records that are as they should be, and room for a third."""
    save(Path("results"), record(0), record(1))
    return Path("results/runs/changed/result.json")


def typed(words: list[str], capsys: pytest.CaptureFixture[str]) -> tuple[int, str]:
    """The exit code and the lines on stderr; a fault of the program is none of the user's."""
    records.leave_out.cache_clear()
    code, err = main(words), capsys.readouterr().err
    assert code in (0, 1, 2), err
    assert "debug=true shows where" not in err, (words, err)
    assert "Traceback" not in err, (words, err)
    return code, err


@pytest.mark.attack
@pytest.mark.parametrize("number", [1, pytest.param(60, marks=pytest.mark.slow)])
def test_a_changed_record_is_read_or_named_and_nothing_else_stops(others: Path, capsys, number: int) -> None:
    """A wrong type stopped `report`, `runs` and `export`, and no line named the file."""
    for what, made in random.Random(number).sample(each(), number):
        records.write_record(others, made)
        try:
            records.read_record(others)
            named = ""
        except UserError as error:
            named = str(error)
        for words in COMMANDS if number == 1 else QUICK:
            code, err = typed(words, capsys)
            assert code == 0 or not named, (what, words, err)
            assert not named or words[0] in ("runs", "make") or str(others) in err, (what, words)
        for words in OF_ONE:
            assert typed(words, capsys)[0], what


WRONG = {
    "utility": (None, "0.5", float("nan"), float("inf"), -0.1, 1.5, [0.5], ...),
    "seed": ("x", -1, 1.5, None, ...),
    "epsilon": ("2", -1.0, float("nan"), ...),
    "settings": ([], None, {"pair": 1}, {"seed": "x"}, {"pair": {"public": 3}}, ...),
    "privacy": ("text", {"valid": "yes"}, {"valid": True, "epsilon": -1}, {"valid": True, "parts": [1]}),
    "utility_interval": ([0.1], [0.1, "x"], [float("nan"), 0.2]),
    "distance": ({"values": ["x"], "mean": 1.0}, {"values": [0.1]}, "text"),
    "notes": ("text", [1]),
    "finished": (5,),
    "other": (float("nan"), float("-inf")),
}


@pytest.mark.parametrize("key", WRONG)
def test_a_value_of_another_type_is_named_with_its_key(others: Path, capsys, key: str) -> None:
    for value in WRONG[key]:
        records.write_record(others, changed(record(2) | {key: 0}, (key,), value))
        with pytest.raises(UserError, match=rf"{others} is no record, .*delete it to run") as caught:
            records.read_record(others)
        assert key in str(caught.value) or "a number in it is" in str(caught.value)
        records.leave_out.cache_clear()
        assert [one["seed"] for one in records.read_records(Path("results"))] == [0, 1]
        assert capsys.readouterr().err == f"left out: {caught.value}\n"


@pytest.mark.parametrize(
    ("place", "value", "why"),
    [
        (("settings",), {}, "it lacks 'settings.pair'"),
        (("settings", "privacy"), ..., "it lacks 'settings.privacy'"),
        (("quality", "counts"), [], "'quality.figures' has no recall of each class"),
        (("quality", "counts", 0), [3.0], "'quality.counts' is not square"),
        (("quality", "counts"), [[[1.0], [2.0]], [[1.0], [2.0]]], "'quality.counts' is not square"),
        (("quality", "figures"), {}, "'quality.figures' has no recall of each class"),
        (("quality", "figures", "recall of each class", 0), [0.5], "'quality.figures' has no recall of each class"),
    ],
)
def test_a_part_that_does_not_fit_the_others_is_named(place: tuple[Any, ...], value: Any, why: str) -> None:
    """The report and the command of a run raised KeyError or ValueError."""
    records.parsed(records._text(real()))
    with pytest.raises(ValueError, match=f"is no record, {why}"):
        records.parsed(records._text(changed(real(), place, value)))


@pytest.mark.parametrize(
    ("content", "why"),
    [
        ("[" * 100_000, "is no complete record"),
        ("1" * 5000, "is no complete record"),
        ("[]", "is no record"),
        ('{"a": 1e999}', "a number in it is 1e999"),
        (" " * (2**26 + 1), "more than 64 MiB"),
        ("\udcff\udcfe{", "is no complete record"),  # as bytes that are no UTF-8 are written
        (None, "is no file"),
    ],
)
def test_what_is_no_record_is_named(others: Path, content: str | None, why: str) -> None:
    others.parent.mkdir()
    if content is None:
        others.mkdir()
    else:
        others.write_text(content, errors="surrogateescape")
    with pytest.raises(UserError, match=rf"{others} .*{why}"):
        records.read_record(others)
    assert len(records.read_records(Path("results"))) == 2


def test_a_line_of_the_kept_records_that_is_none_is_left_out(tmp_path: Path, capsys) -> None:
    path = tmp_path / "records" / "some.jsonl.gz"
    write_lines(path, [record(0), record(1) | {"utility": "x"}, record(2)])
    assert [one["seed"] for one in records.read_records(tmp_path)] == [0, 2]
    assert f"left out: {path}, line 2, is no record, 'utility' may not be \"x\": restore it" in capsys.readouterr().err


@pytest.mark.parametrize("kind", ["ranks", "attacks"])
def test_a_rank_or_an_attack_that_is_none_is_left_out(tmp_path: Path, capsys, kind: str) -> None:
    source = sorted((KEPT / kind).glob("*.json"))[0]
    file, made = tmp_path / kind / source.stem / "result.json", json.loads(source.read_text())
    keys = ("settings", "values", "model") if kind == "ranks" else ("rows", "privacy")
    for key, value in product(("identity", *keys), (None, [1], float("nan"))):
        records.write_record(file, made | {key: value})
        records.leave_out.cache_clear()
        assert measured.read_kind(tmp_path, kind, records.Rank if kind == "ranks" else records.GsdAttack) == []
        assert str(file) in capsys.readouterr().err, (key, value)


def test_a_figure_that_is_not_finite_is_a_failed_run(tmp_path: Path) -> None:
    made = record() | {"selection": {"test": float("nan")}}
    with pytest.raises(UserError, match="what came out is no record, a number in it is NaN: check the data"):
        records.recorded(tmp_path / "cell", lambda: made)
    assert not (tmp_path / "cell" / "result.json").exists()
