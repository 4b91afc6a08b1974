"""The layout of the package, read from its source: rooms, imports one way, short functions."""

import ast
import re
import subprocess
import sys
from collections import Counter
from functools import cache
from itertools import combinations
from pathlib import Path

import pytest

import pubsel

PACKAGE = Path(pubsel.__file__).parent
# each may import from those before it, as CONTRIBUTING says
ROOMS = """
messages files settings records gradients privacy models data algorithms distances
selection rules cell training release attacks commands estimator sklearn papers cli
""".split()
MOST_LINES, MOST_PARAMETERS = 60, 8
FEW_LINES = 5  # of a private helper: called once, it goes inline

# opening words of docstrings of functions; and some of those that no class may have
VERBS = """
Add Answer Append Apply Ask Attack Audit Bring Build Call Change Check Choose Classify Close Compare Compose Compute
Convert Copy Count Create Decide Delete Describe Divide Do Download Draw Drop Evaluate Explain Export Extract Fail
Fetch Fill Find Fit Follow Format Generate Give Group Guess Have Help Hold Ignore Join Judge Keep Leave Let Limit
List Load Log Look Lower Make Map Mark Match Measure Merge Move Name Open Order Parse Pass Plan Plot Predict Prepare
Print Project Put Raise Rank Read Rebuild Record Refuse Reject Release Remove Rename Reopen Repeat Replace Report
Restore Resume Retry Return Run Sample Save Scale Score Select Send Set Show Skip Sort Split Standardise Start State
Stop Store Sum Take Tell Test Train Translate Try Turn Unpack Update Use Verify Wait Warn Weigh Wrap Write Yield
""".split()
NO_NOUNS = """
Composes Filters Follows How It Makes Of Shows That Those What When Where Whether Which While Who Whose
""".split()
# public names of several modules: of commands, of formats, of methods of one kind
SHARED_NAMES = "build clipped_sum draw drawn fit listing read read_table run select write".split()
# what does not pass yet
LATER = """
_private_side _torchvision_scale _factors _near
""".split()


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
    assert len(ROOMS) <= 21


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
    """A handler in cli.py, tab completion of the command figure, or the function of the same name."""
    handlers = ("_table", "_make", "_figure", "_report", "_complete")
    for path, tree in sources().items():
        for node in tree.body if path.parts[0] != "papers" else []:
            name = getattr(node, "name", "")
            allowed = {"cli.py": handlers, "__init__.py": ("table",)}.get(str(path), ())
            assert "papers" not in imported(node) or name in allowed, (path, name)


def test_functions_are_short():
    long = {name: node.end_lineno - node.lineno + 1 for name, node in functions()}
    assert {name: lines for name, lines in long.items() if lines > MOST_LINES} == {}


def test_functions_take_few_parameters():
    def parameters(node):
        every = [*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs]
        return len([one for one in every if one.arg not in ("self", "cls")])

    many = {name: parameters(node) for name, node in functions() if parameters(node) > MOST_PARAMETERS}
    assert many.keys() == {"estimator.py:fit"}  # a program's keys of a command


def test_no_command_imports_another():
    """What two commands need is in a room below."""
    commands = {path.stem: tree for path, tree in sources().items() if path.parts[0] == "commands"}
    assert [name for name, tree in commands.items() if "commands" in imported(tree)] == []


@pytest.mark.parametrize(("commands", "room"), [("rank", "training"), ("fit, export, predict", "attacks")])
def test_a_command_loads_no_room_that_it_has_no_use_for(commands, room):
    """Nothing that trains to rank, and no attack to give a model away."""
    code = f"import sys; from pubsel.commands import {commands}; print(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert [name for name in done.stdout.split() if name.startswith(f"pubsel.{room}")] == []


def test_files_alone_writes_whole_locks_and_syncs():
    """Elsewhere a part would be left, a wait would be silent, or a name would be that of another process."""
    words = ("os.replace", "os.rename", "os.fsync", "FileLock", "flock", '.part"', "{os.getpid()}", "images, about")
    sources = {path.name: path.read_text() for path in PACKAGE.rglob("*.py") if path.name != "files.py"}
    assert [(name, word) for name, text in sources.items() for word in words if word in text] == []


def documented():
    """Yield the file, the node and the first word of the docstring of each function and class."""
    for path, tree in sources().items():
        for node in ast.walk(tree):
            if isinstance(node, (ast.FunctionDef, ast.ClassDef)) and (text := ast.get_docstring(node)):
                yield str(path), node, text.split()[0].rstrip(",.:;")


def test_docstrings_of_functions_open_with_a_verb_and_those_of_classes_with_a_noun():
    wrong = {
        path: f"{node.name}: {word}"
        for path, node, word in documented()
        if (word in NO_NOUNS or word in VERBS if isinstance(node, ast.ClassDef) else word not in VERBS)
    }
    assert wrong == {}


def test_no_two_modules_give_one_public_name_to_two_things():
    where = {}
    for path, tree in sources().items():
        for node in tree.body:
            if isinstance(node, (ast.FunctionDef, ast.ClassDef)) and not node.name.startswith("_"):
                where.setdefault(node.name, []).append(str(path))
    twice = {name: paths for name, paths in where.items() if len(set(paths) - {"__init__.py"}) > 1}
    assert {name: paths for name, paths in twice.items() if name not in SHARED_NAMES} == {}


def test_the_formatter_lays_out_every_line():
    folders = [PACKAGE, Path(__file__).parent, PACKAGE.parent / "scripts"]
    files = [path for folder in folders for path in folder.rglob("*.py")]
    assert [path for path in files if "fmt: " + "skip" in path.read_text()] == []


def test_short_helpers_that_are_called_once_are_inline():
    short = []
    for tree in sources().values():
        nodes = list(ast.walk(tree))
        called = Counter(node.id for node in nodes if isinstance(node, ast.Name))
        called.update(node.attr for node in nodes if isinstance(node, ast.Attribute))
        calls = {
            getattr(node.func, "id", getattr(node.func, "attr", "")) for node in nodes if isinstance(node, ast.Call)
        }

        for node in nodes:
            if not isinstance(node, ast.FunctionDef) or node.decorator_list or not re.match("_[^_]", node.name):
                continue
            body = node.body[bool(ast.get_docstring(node)) :] or node.body
            if body[-1].end_lineno - body[0].lineno < FEW_LINES and called[node.name] == 1 and node.name in calls:
                short.append(node.name)

    assert sorted(short) == sorted(LATER)  # a name that is inline by now leaves the list
