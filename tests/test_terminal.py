"""What a person sees at a terminal while a long phase runs, and what a log or a pipe has in its place."""

import io
import itertools
import re
import sys

import pytest

import pubsel
from pubsel import messages
from pubsel.cli import main
from pubsel.commands import sweep
from pubsel.files import ProgressLine
from pubsel.messages import bars, logged
from tests.made import failed

COLOUR = re.compile(r"\x1b\[[\d;]*3\d[\d;]*m")
STYLE = re.compile(r"\x1b\[[\d;?]*[A-Za-z]")


class Terminal(io.StringIO):
    def isatty(self):
        return True

    def seen(self):
        return STYLE.sub("", self.getvalue())


@pytest.fixture
def seconds(monkeypatch):
    """Each look at the clock finds it 6 seconds on."""
    clock = itertools.count(step=6)
    monkeypatch.setattr(messages.time, "monotonic", lambda: float(next(clock)))
    for name, value in {"TERM": "xterm-256color", "COLUMNS": "120", "NO_COLOR": ""}.items():
        monkeypatch.setenv(name, value)
    for name in ("FORCE_COLOR", "TTY_COMPATIBLE", "TTY_INTERACTIVE"):
        monkeypatch.delenv(name, raising=False)


def at_terminal(monkeypatch):
    """Pretend that stderr is a terminal; pytest would replace what a fixture sets."""
    monkeypatch.setattr(sys, "stderr", Terminal())
    return sys.stderr


def phases(log):
    """A phase of 40 images within one of 4 steps, with a log."""
    with logged(log), bars:
        for step in range(1, 5):
            bars.show("training", step, 4)
            bars.line("training", f"  step {step} of 4", f"loss {4 - step}")
            line = ProgressLine("features of [private]", 40)
            for _ in range(4 if step == 2 else 0):
                line.add(10)
        messages.say("the end")


def test_lines_go_where_there_is_no_terminal(seconds, tmp_path, capsys):
    phases(tmp_path / "log.txt")
    shown = capsys.readouterr().err
    assert "\x1b" not in shown
    lines = shown.splitlines()
    assert [line for line in lines if "images" not in line] == [*(f"  step {n} of 4" for n in range(1, 5)), "the end"]
    assert sum(line.startswith("features of [private]: ") for line in lines) == 2
    assert [line[21:] for line in (tmp_path / "log.txt").read_text().splitlines()] == lines


def test_a_terminal_shows_a_bar_for_each_long_phase(seconds, tmp_path, monkeypatch):
    terminal = at_terminal(monkeypatch)
    phases(tmp_path / "log.txt")
    shown, log = terminal.seen(), (tmp_path / "log.txt").read_text()
    assert re.search(r"training\s+[━╺╸]+\s+2/4\s", shown)
    assert re.search(r"features of \[private\]\s+[━╺╸]+\s+30/40\s", shown)
    assert "loss 2" in shown  # next to the bar
    assert "step 2 of 4" not in shown
    assert shown.splitlines()[-1] == "the end"
    assert terminal.getvalue().count("\x1b[?25l") == terminal.getvalue().count("\x1b[?25h") == 1  # the cursor is back
    assert [f"step {n} of 4" in log for n in range(1, 5)] == [True] * 4
    assert "features of [private]: 30 of 40 images" in log
    assert bars.view is None
    assert sys.stderr is terminal


@pytest.mark.parametrize(("value", "colours"), [("", True), ("1", False)])
def test_no_color_is_obeyed(seconds, tmp_path, monkeypatch, value, colours):
    terminal = at_terminal(monkeypatch)
    monkeypatch.setenv("NO_COLOR", value)
    phases(tmp_path / "log.txt")
    assert bool(COLOUR.search(terminal.getvalue())) == colours
    assert "2/4" in terminal.seen()


def test_a_phase_that_fails_leaves_no_bar(seconds, monkeypatch):
    terminal = at_terminal(monkeypatch)

    def phase():
        with bars:
            for step in range(4):
                bars.show("training", step, 4)
                1 / (2 - step)

    with pytest.raises(ZeroDivisionError):
        phase()
    assert bars.view is None
    assert terminal.getvalue().endswith("\x1b[2K")  # the line of the bar is empty again


@pytest.mark.parametrize("why", ["short", "dumb", "quiet"])
def test_no_bar(seconds, monkeypatch, why):
    """Of a phase that is over in 4 ms; on a terminal that cannot draw; within a program that shows results itself."""
    terminal = at_terminal(monkeypatch)
    if why == "short":
        clock = itertools.count()
        monkeypatch.setattr(messages.time, "monotonic", lambda: next(clock) / 1000)
    if why == "dumb":
        monkeypatch.setenv("TERM", "dumb")
    token = messages.RENAMED.set({} if why == "quiet" else None)
    with bars:
        for step in range(1, 5):
            bars.show("training", step, 4)
            bars.line("training", f"step {step}")
    messages.RENAMED.reset(token)
    assert terminal.getvalue() == ("" if why == "quiet" else "step 1\nstep 2\nstep 3\nstep 4\n")


def test_a_run_shows_its_training_as_a_bar(seconds, folder, capsys, monkeypatch):
    terminal = at_terminal(monkeypatch)
    words = "+experiment=quickstart training.epochs=1 training.batch_size=432 distance=none threads=1"
    assert main(["run", *words.split(), "download=false", "pair.m=200", "algorithm=dp_sgd"]) == 0
    shown = terminal.seen()
    assert re.search(r"training\s+[━╺╸]+\s+2/3\s", shown)
    assert "loss " in shown
    (log,) = folder.glob("results/runs/*/log.txt")
    (last,) = [line[21:] for line in log.read_text().splitlines() if "  loss " in line][-1:]
    assert last in shown.splitlines()


def test_the_end_of_a_sweep_is_a_table_of_all_cells(seconds, tmp_path, capsys, monkeypatch):
    """Results go to stdout, even if only stderr is a terminal."""
    terminal = at_terminal(monkeypatch)
    with sweep.Display(tmp_path, ["seed=0", "seed=1 [x]"], 0, 2) as view:
        assert "last line" in [column.header for column in view.table().columns]
        (tmp_path / "0000.json").write_text('{"state": "done", "seconds": 2.0, "text": "accuracy 90 %\\nepsilon 1"}')
        (tmp_path / "0001.json").write_text('{"state": "failed", "seconds": 1.0, "text": "no memory"}')
    assert capsys.readouterr().out == "accuracy 90 %\nepsilon 1\n"
    table = terminal.seen().rpartition("1 of 2 done, 0 running, 1 failed")[2]
    rows = [[cell.strip() for cell in line.split("│")[1:-1]] for line in table.splitlines() if "│" in line]
    assert rows == [["0", "2 s", "seed=0", "done: accuracy 90 %"], ["1", "1 s", "seed=1 [x]", "failed: no memory"]]


@pytest.mark.parametrize("word", ["-V", "--version"])
def test_the_version(word, capsys):
    assert main([word]) == 0
    assert capsys.readouterr().out == f"{pubsel.__version__}\n"


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ("rum", "unknown command 'rum' (did you mean run?)"),
        ("run experiment=quickstart", "experiment=NAME: write it with a + before it, +experiment=NAME"),
        ("run quickstart", "cannot read 'quickstart': write +experiment=quickstart"),
        ("run +experiment=quikstart", "Could not find 'experiment/quikstart' (did you mean quickstart?). Available"),
        ("run algorithm=dpsgd", "'algorithm/dpsgd' (did you mean dp_sgd?)"),
        ("run +experiment=quickstart pair.private=digit", "unknown dataset 'digit' (did you mean digits?)"),
        ("run +experiment=quickstart model.name=fmnist_cn", "model.name=fmnist_cn: unknown (did you mean fmnist_cnn?)"),
        ("run device=cudda", "(did you mean cuda?)"),
        ("run epsilonn=1", "unknown key epsilonn (did you mean epsilon?); pubsel run --help"),
        ("run -m epsilonn=1,2", "unknown key epsilonn (did you mean epsilon?); pubsel run --help"),
        ("report tables=all", "unknown key tables; pubsel report --help"),  # `table` is a key of other commands
        ("table gsd_tabel2", "unknown table 'gsd_tabel2' (did you mean gsd_table2?)"),
        ("make gsd_tabel2", "cannot make 'gsd_tabel2' (did you mean gsd_table2?)"),
        ("figure pilar_k", "unknown figure 'pilar_k' (did you mean pillar_k?)"),
        ("data prepar digits", "action=prepar (did you mean prepare?)"),
        ("data prepare digit", "unknown dataset 'digit' (did you mean digits?)"),
        ("runs shaw x", "action=shaw (did you mean show?)"),
        ("attack los", "(did you mean loss?)"),
        ("export digits-gep-epss2 to=model", "(did you mean digits-gep-eps2?)"),
    ],
)
def test_a_wrong_word_is_answered_with_the_nearest(cli, folder, words, expected):
    (folder / "results/runs/digits-gep-eps2").mkdir(parents=True)
    assert expected in failed(cli, *words.split(), code=1 if "export" in words else 2)
