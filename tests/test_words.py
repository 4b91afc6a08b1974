"""Words of a command line whose values have letters of any script: what is typed is what the settings are."""

import os
import re
import shlex
from pathlib import Path
from typing import Any

import pytest
from hydra._internal.core_plugins.basic_sweeper import BasicSweeper
from hydra.core.override_parser.overrides_parser import OverridesParser
from hypothesis import example, given, settings
from hypothesis import strategies as st

from pubsel.cli import _positional, main
from pubsel.messages import UsageError
from pubsel.settings import command_line as line
from pubsel.settings.compose import composed, renamed, words_of
from pubsel.settings.keys import SCHEMAS
from pubsel.settings.schema import texts
from tests.made import picture

QUICK = settings(max_examples=60, deadline=None, database=None, derandomize=True)
PARSER = OverridesParser.create()
SIGNS = "'\"\\${}[](),:= #&~!%*?|@+-./_0aö1é漢🩻\u0308"
LETTERS = st.characters(exclude_categories=["Cc", "Cs", "Zl", "Zp"]) | st.sampled_from(SIGNS)
NAMES = st.text(LETTERS, min_size=1, max_size=12)
# what a person types: letters that have no meaning in Hydra's grammar at their place
TYPED = NAMES.map(lambda name: "./" + re.sub(r"[\\$,]", "-", name))
ITEMS = TYPED.map(lambda name: re.sub(r"[\[\](){}'\"]", "-", name).rstrip(" "))

HARD = [
    "Röntgen",
    "Ro\u0308ntgen",
    "放射線",
    "🩻",
    "a b",
    "a (2024) [x]",
    "#1 & ~2",
    "2024_01",
    "it's",
    'q"',
    "a=b",
    "x]",
    "x[",
]


def read(word: str) -> Any:
    return PARSER.parse_override(word).value()


@QUICK
@given(NAMES)
@example("null")
@example("true")
@example("C:\\x\\")
def test_a_text_that_is_written_is_read_as_it_was(name: str) -> None:
    assert read(f"key={line.written([name, [name], 'b'])}") == [name, [name], "b"]
    assert line.unquoted(line.written(name)) == name
    for quote in "'\"":
        word = f"key={line.in_quotes(name, quote)}"
        assert read(word) == name
        assert line.override(word, text=True) == word

    # a sweep writes each value once more
    sweep = PARSER.parse_override(f"key={line.written(name)},{line.written(name + 'x')}")
    assert [read(cell[0]) for cell in BasicSweeper.split_arguments([sweep], None)[0]] == [name, f"{name}x"]


@QUICK
@given(TYPED, st.lists(ITEMS, min_size=2, max_size=3))
def test_a_path_that_is_typed_is_read_as_it_is(name: str, several: list[str]) -> None:
    word = line.override(f"private={name}", text=True)
    assert read(word) == name
    assert line.override(word, text=True) == word

    assert read(line.override(f"public=[{', '.join(several)}]", text=True)) == several
    assert read(line.override(f"public=[[{','.join(several)}],b]")) == [several, "b"]
    sweep = PARSER.parse_override(line.override(f"private={','.join(several)}"))
    assert [read(f"key={value}") for value in sweep.sweep_string_iterator()] == several


@QUICK
@given(st.text(st.sampled_from("\\${}[](),:= \t#&~aö1.é-_*/|%@?+'\""), min_size=1))
def test_what_needs_no_quotes_is_one_value_of_hydras(text: str) -> None:
    if text.strip(" \t") and line.UNQUOTED.fullmatch(text):
        assert line.override(f"key={text}") == f"key={text}"
        assert not isinstance(read(f"key={text}"), list | dict)
        assert not PARSER.parse_override(f"key={text}").is_sweep_override()


@pytest.mark.parametrize(
    "word",
    """x=null|x=true|x=1e-3|x=1_000|x=0,1,2|x=range(0,10)|x=choice(a,b)|x=glob(*)|x=sort(3,1)|x=[a,b]|x=[a,[b,'c d']]|x=
    x={}|x={a:1,b:{c:[1,2]}}|x={drop_rate: 0.5}|x=${seed}|x=${oc.env:USER,me}|x='a,b'|x="it's"|x=a b|x=a: b|~x|~x=1
    x=C:\\\\dir|x=a\\,b|hydra/launcher=joblib|+experiment=quickstart|+hydra.launcher.additional_parameters.mail-type=END
    model@pair.a=resnet18|x=[./a|x=[./a,(b]|no setting|./Röntgen|./a/b=c|ö=1|x={a:1""".replace("\n    ", "|").split(
        "|"
    ),
)
def test_words_of_hydras_grammar_stay_as_they_are(word: str) -> None:
    assert line.override(word) == word


@pytest.mark.parametrize(
    ("typed", "value"),
    [
        ("[./Äpfel,./b c]", ["./Äpfel", "./b c"]),
        ("[./a (1),[./b[2],null]]", ["./a (1)", ["./b[2]", None]]),
        ("[./it's,./bob's]", ["./it's", "./bob's"]),
        ("{name: Röntgen,several: [ä,1]}", {"name": "Röntgen", "several": ["ä", 1]}),
        ("Scans(1)", "Scans(1)"),
        ("~/Bilder", "~/Bilder"),
        ("${oc.env:HOME}/Röntgen", "${oc.env:HOME}/Röntgen"),
        ("./${a", "./\\${a"),
    ],
)
def test_a_value_gets_quotes_where_the_grammar_needs_them(typed: str, value: Any) -> None:
    assert read(line.override(f"key={typed}")) == value


def test_functions_are_those_that_hydra_has() -> None:
    assert set(PARSER.functions.functions) == set(line.FUNCTIONS)


@pytest.mark.parametrize("text", ["1.10", "007", "1e5", "1_000", "true", "+1", ".5", "-inf"])
def test_a_text_that_looks_like_a_number_is_a_text(text: str) -> None:
    assert {"to", "private"} <= texts(SCHEMAS["fit"])
    assert {"pair.private", "pair.pool", "results"} <= texts(SCHEMAS["run"])
    assert not {"epsilon", "training.epochs", "pair.public", "algorithm"} & texts(SCHEMAS["run"])
    with composed("fit", [f"to={text}", "private=./a"]) as values:
        assert values.to == text
    with composed("run", [f"results={text}", "+experiment=quickstart"]) as values:
        assert values.results == text
    assert line.override(f"epsilon={text}") == f"epsilon={text}"


def test_a_path_keeps_its_commas_if_it_is_there(folder: Path) -> None:
    assert line.override("private=./Müller, A,x") == "private=./Müller, A,x".replace("./Müller", "'./Müller'")
    (folder / "Müller, A,x").mkdir()
    assert read(line.override("private=./Müller, A,x")) == "./Müller, A,x"
    with composed("fit", ["private=./no, ö"]) as values:  # nothing is swept here
        assert values.private == "./no, ö"


@pytest.mark.parametrize("word", ["to=a\nb", "to=\x1b[0m", "to=\u2028", os.fsdecode(b"to=R\xf6ntgen")])
def test_letters_that_no_record_could_hold_are_refused(word: str, capsys: pytest.CaptureFixture[str]) -> None:
    for command in ("fit", "run"):
        with pytest.raises(UsageError, match="not UTF-8, or has control characters: rename the file"):
            renamed(command, [word])
    assert main(["data", "check", f"./{word}"]) == 2
    assert capsys.readouterr().err.count("\n") == 1


# Each command

KEYS = {
    "run": ("pair.private", "pair.pool"),
    "audit": ("pair.private", "pair.pool"),
    "figure": ("pair.private", "sets"),
    "rank": ("private", "public"),
    "attack": ("private", "public"),
    "fit": ("private", "public"),
    "predict": ("run", "images"),
    "export": ("to", None),
    "table": ("results", None),
    "report": ("results", None),
    "make": ("results", None),
    "runs": ("results", None),
    "data": ("name", None),
    "models": ("pattern", None),
    "pool": ("data_root", "pool"),
}


def at(values: Any, key: str) -> Any:
    for part in key.split("."):
        values = values[part]
    return values


@pytest.mark.parametrize("command", KEYS)
def test_each_command_reads_paths_of_any_letters(command: str) -> None:
    key, several = KEYS[command]

    @settings(QUICK, max_examples=3)
    @given(TYPED, st.lists(ITEMS, min_size=1, max_size=2))
    def check(name: str, names: list[str]) -> None:
        words = [f"{key}={name}", *([f"{several}=[{','.join(names)}]"] if several else [])]
        by_python = words_of({key: Path(name), **({several: names} if several else {})})
        for typed in (words, by_python):
            with composed(command, typed) as values:
                assert at(values, key) == (name if typed is words else str(Path(name)))
                assert not several or list(at(values, several)) == names

    check()


@pytest.mark.parametrize("command", ["rank", "fit"])  # by Hydra, and by OmegaConf alone
@pytest.mark.parametrize("name", ["./${a}", "./${oc.env:HOME}/x", "./\\${a}", "./$a"])
def test_a_path_that_is_passed_on_is_no_interpolation(command: str, name: str) -> None:
    with composed(command, words_of({"private": name, "public": [name]})) as values:
        assert (values.private, list(values.public)) == (name, [name])


@QUICK
@given(st.sampled_from(["fit", "data", "predict"]), NAMES)
def test_a_path_without_its_key_is_read_whatever_it_has(command: str, name: str) -> None:
    before = {"data": ["check"], "predict": ["a_run"]}.get(command, [])
    key = {"fit": "private", "data": "name", "predict": "images"}[command]
    with composed(command, _positional(command, [*before, f"./{name}"])) as values:
        assert values[key] == ([f"./{name}"] if command == "predict" else f"./{name}")


@settings(QUICK, max_examples=3)
@given(TYPED, st.lists(ITEMS, min_size=1, max_size=2))
def test_the_settings_of_a_record_compose_to_themselves(name: str, names: list[str]) -> None:
    record = {"private": name, "public": [names, *names], "distance": {"name": "gsd", "about": name}}
    with composed("rank", line.overrides(record)) as values:
        assert (values.private, values.public, values.distance.about) == (name, [names, *names], name)

    # the shell's quotes are around those of Hydra
    shown = {"identity": "a", "settings": {"private": name}}
    words = shlex.split(line.command(shown, {"private": name, "public": names}))
    assert [read(word) for word in words[2:]] == ["a", name, names]


@pytest.mark.parametrize("name", HARD)
def test_own_images_are_read_from_a_folder_of_any_name(
    name: str, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for i in range(10):
        picture(folder / name / "ab"[i % 2] / f"{i}.png", 20 * i)
    for word in (f"./{name}", f"name=./{name}", f"{folder / name}"):
        assert main(["data", "check", word, "keep=false"]) == 0, capsys.readouterr().err


def test_a_model_is_planned_from_a_folder_of_any_name(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The settings of `run` that fit composes have the paths too."""
    for i in range(100):
        picture(folder / "Röntgen (2024)" / "ab"[i % 2] / f"{i}.png", 2 * i)
    assert main(["fit", "./Röntgen (2024)", "dry=true", "download=false", "features=pixels"]) == 0
    assert "nothing was trained" in capsys.readouterr().out


def test_the_message_about_a_bracket_that_does_not_close_is_a_word_that_works(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for typed, meant in (
        ("public=[./x]x,./y]", ["./x]x", "./y"]),
        ("public=[./x[x,./y]", ["./x[x", "./y"]),
        ("public=[./ä", "[./ä"),
    ):
        assert main(["rank", "private=digits", typed]) == 2
        err = capsys.readouterr().err
        assert repr(typed) in err
        (word,) = shlex.split(err.partition("both kinds of quotes, ")[2].partition("; for several")[0])
        assert read(word) == meant
    assert main(["rank", "private=./ä,./b", "public=noise"]) == 2
    err = capsys.readouterr().err
    assert """'private="./ä,./b"'; for several, private=[A,B], or --multirun""" in err
