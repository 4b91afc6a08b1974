"""The layout of the package, read from its source: rooms, imports one way, short functions."""

import ast
import subprocess
import sys
from functools import cache
from itertools import combinations
from pathlib import Path

import pytest

import pubsel

PACKAGE = Path(pubsel.__file__).parent
# each may import from those before it, as CONTRIBUTING says
ROOMS = [
    "messages", "files", "settings", "records", "gradients", "privacy", "models", "data", "algorithms", "distances",
    "selection", "cell", "training", "release", "attacks", "commands", "papers", "cli",
]  # fmt: skip
MOST_LINES, MOST_PARAMETERS = 60, 8


@cache
def sources():
    return {path.relative_to(PACKAGE): ast.parse(path.read_text()) for path in sorted(PACKAGE.rglob("*.py"))}


def functions():
    for path, tree in sources().items():
        for node in ast.walk(tree):
            if isinstance(node, ast.FunctionDef):
                yield f"{path}:{node.name}", node


def imported(tree):
    """The rooms that a file imports from, whole files at the top included."""
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.module == "pubsel":
            yield from (alias.name for alias in node.names if alias.name != "__version__")
        elif isinstance(node, ast.ImportFrom) and (node.module or "").startswith("pubsel."):
            yield node.module.split(".")[1]
        elif isinstance(node, ast.Import):
            yield from (alias.name.split(".")[1] for alias in node.names if alias.name.startswith("pubsel."))


def test_each_name_in_the_package_is_a_room():
    names = {path.stem for path in PACKAGE.iterdir() if not path.name.startswith(("_", ".", "py.typed"))}
    assert names - {"conf", "paper"} == set(ROOMS)
    assert len(ROOMS) <= 18


@pytest.mark.parametrize("path", [str(path) for path in sources()])
def test_imports_run_one_way(path):
    room = Path(path).parts[0].removesuffix(".py")
    if room in ("__init__", "__main__"):
        return
    before = ROOMS[: ROOMS.index(room) + 1]
    assert set(imported(sources()[Path(path)])) <= set(before), f"{path} may import from {', '.join(before)} only"


def test_contributing_states_the_order_that_is_tested():
    text = " ".join((PACKAGE.parent / "CONTRIBUTING.md").read_text().split())
    assert ", ".join(ROOMS) in text


def test_no_two_modules_differ_by_a_letter():
    """`run` and `runs` side by side were taken for each other."""
    stems = sorted({path.stem for path in PACKAGE.rglob("*.py")} - {"__init__", "__main__"})
    near = [(a, b) for a, b in combinations(stems, 2) if b in (a + b[-1:], b[:1] + a)]
    assert near == []


def test_what_a_test_writes_outside_of_its_folder_is_seen(written_elsewhere, tmp_path):
    """By the fixture that then fails it; nothing is changed here."""
    for path in (Path(__file__), tmp_path / "own"):
        path.open("a").close()
    with pytest.raises(FileNotFoundError):
        (PACKAGE / "absent").unlink()
    assert written_elsewhere == {__file__, str(PACKAGE / "absent")}
    written_elsewhere.clear()


def test_only_the_commands_of_the_papers_import_papers():
    """A handler in cli.py, or tab completion of the command figure."""
    handlers = ("_table", "_make", "_figure", "_report", "_complete")
    for path, tree in sources().items():
        for node in tree.body if path.parts[0] != "papers" else []:
            name = getattr(node, "name", "")
            assert "papers" not in imported(node) or (str(path) == "cli.py" and name in handlers), (path, name)


def test_functions_are_short():
    long = {name: node.end_lineno - node.lineno + 1 for name, node in functions()}
    assert {name: lines for name, lines in long.items() if lines > MOST_LINES} == {}


def test_functions_take_few_parameters():
    def parameters(node):
        every = [*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs]
        return len([one for one in every if one.arg not in ("self", "cls")])

    assert {name: parameters(node) for name, node in functions() if parameters(node) > MOST_PARAMETERS} == {}


def test_rank_imports_nothing_that_trains():
    code = "import sys, pubsel.commands.rank; print([m for m in sys.modules if m.startswith('pubsel.training')])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_files_alone_writes_whole_locks_and_syncs():
    """Elsewhere a part would be left, a wait would be silent, or a name would be that of another process."""
    words = ("os.replace", "os.rename", "os.fsync", "FileLock", "flock", '.part"', "{os.getpid()}", "images, about")
    sources = {path.name: path.read_text() for path in PACKAGE.rglob("*.py") if path.name != "files.py"}
    assert [(name, word) for name, text in sources.items() for word in words if word in text] == []
