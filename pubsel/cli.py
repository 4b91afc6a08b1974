"""`pubsel COMMAND ...`: one word, then Hydra's grammar. Imports no torch before the settings are known to be good.

Exit code 0: done; 1: a run failed; 2: the command or its settings are wrong.
"""

import argparse
import contextlib
import ctypes
import importlib
import io
import logging
import os
import re
import select
import signal
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn, TextIO, cast

from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

import pubsel
from pubsel.messages import NO_HOME, CellsFailed, UsageError, UserError, bars, limit, out_of_memory, stopped_by_signals
from pubsel.privacy import ledger
from pubsel.records import BrokenRecord, expanded
from pubsel.settings import CONF, compose, explain, fetching, named
from pubsel.settings.command_line import uninterpolated, written
from pubsel.settings.datasets import dataset_names
from pubsel.settings.keys import SCHEMAS, Attack, DataConfig, RunConfig
from pubsel.settings.methods import GROUPS
from pubsel.settings.schema import check, keys_of, lists, nearest
from pubsel.training import torchrun

HELP = f"""pubsel {pubsel.__version__}: private machine learning with public data.

  pubsel fit ./my_images public=[./a,./b] epsilon=1      from private images to a model that may be given away
  pubsel run +experiment=quickstart        train one cell with differential privacy; needs no download
  pubsel run +experiment=gep_cifar10 pair.public=svhn epsilon=4 seed=1 algorithm=dp_sgd device=cpu
  pubsel run -m +experiment=gep_cifar10 pair.public=cifar100,cifar10,svhn seed=0,1,2     a sweep
  pubsel tune +experiment=quickstart over="training.learning_rate=0.1,1" epsilon=2     the best of several settings
  pubsel predict NAME ./new_images         classes of new images, by the model of a finished run: answers.csv
  pubsel export NAME to=./model            the model as a folder that may be given away, with a card and a privacy page
  pubsel rank private=digits public=[digits,photo_patches,noise] model=digits_cnn distance.m=200      which is nearest?
  pubsel rank private=/path/to/images public=[/path/a,/path/b]                           the same, on your own folders
  pubsel attack loss run=NAME              membership inference on a finished run; also gsd_white_box, gsd_black_box
  pubsel audit +experiment=quickstart      claimed epsilon next to what attacks on a training measure
  pubsel table gsd_table2                  records next to the paper's numbers; all: every table that has a record
  pubsel make gsd_table2 dry=true          which cells of a table are there, and hours for the others
  pubsel figure pillar_k                   one figure as SVG and PDF; all: each that the records allow
  pubsel report                            tables, figures and the runs that they come from, as one HTML file
  pubsel runs state=unfinished             which runs there are; runs show NAME: its command, and why it failed
  pubsel runs budget DATA                  what all releases of private data spent, of which budget, and when
  pubsel run replay=NAME                   repeat a run, and report whether it comes out the same
  pubsel run like=NAME epsilon=4           the same settings as a run has, but for those that are given
  pubsel data list                         every named dataset: where it comes from, and whether it is present
  pubsel data prepare NAME                 download or convert one
  pubsel data check /path/to/images        what is read of your data: how many images, which size, how many classes
  pubsel models dinov2                     frozen networks by name, for features=NAME of pubsel fit
  pubsel pool pool=[./embeddings]          clusters of a large pool of public embeddings, shard by shard

Every setting can be given as key=value; `pubsel run --help` lists them, `--cfg job` shows what a command would use.
Tab completion for bash: eval "$(pubsel -sc install=bash)"
"""


def _run(settings: RunConfig) -> str:
    if settings.replay is None:
        from pubsel.release.run import run, show_run

        return show_run(run(settings))
    from pubsel.commands.replay import repeat

    same, text = repeat(settings.replay, settings)
    if same:
        return text
    print(text)
    raise UserError(f"replay={settings.replay}: it did not come out the same")


def _attack(settings: Any) -> str:
    from pubsel.commands.attack import NOT_PRIVATE, attack

    rows = attack(settings).to_string(index=False, float_format="%.4g")
    return f"{rows}\n\n{NOT_PRIVATE}"


def _work() -> list[str]:
    return sorted({*named("tables"), *named("work")})


def _make(settings: Any) -> str:
    from pubsel.papers import make

    return make.run(settings, _within)


def _data(settings: DataConfig) -> str:
    from pubsel.commands import data

    match settings.action:
        case "list":
            return data.listing(settings.data_root)
        case "prepare":
            return data.prepare_data(settings.name, settings.data_root)
        case "check":
            return data.check_data(settings)
        case "forget":
            return data.forget_data(settings.name, settings.data_root)
    raise UsageError(f"action={settings.action}{nearest(settings.action, ON_DATA)}: {USAGE['data']}")


# A function of the settings that returns what to print; or its module, its name, and that of one of its result.
COMMANDS: dict[str, Callable[[Any], str] | str] = {
    "run": _run,
    "fit": "commands.fit run",
    "tune": "commands.tune run",
    "predict": "commands.predict run",
    "export": "commands.export run",
    "rank": "commands.rank rank show_rank",
    "attack": _attack,
    "audit": "commands.audit audit show_audit",
    "table": "papers.typeset run",
    "make": _make,
    "figure": "papers.draw run",
    "report": "papers.report run",
    "runs": "commands.list_runs run",
    "data": _data,
    "models": "commands.models run",
    "pool": "commands.pool run",
}
POSITIONAL = {
    "fit": ["private"],
    "tune": ["private"],
    "predict": ["run"],
    "export": ["run"],
    "attack": ["attack"],
    "table": ["table"],
    "make": ["name"],
    "figure": ["figure"],
    "runs": ["action", "name"],
    "data": ["action", "name"],
    "models": ["pattern"],
}  # keys that are given without their name
USAGE = {
    "fit": "pubsel fit FOLDER public=[A,B] epsilon=1: give the path of your images",
    "tune": 'pubsel tune FOLDER over="KEY=A,B": give the settings to choose from',
    "predict": "pubsel predict RUN IMAGES: name of a finished run (pubsel runs lists them), or its folder",
    "export": "pubsel export RUN to=FOLDER: name of a finished run (pubsel runs lists them), and a new folder",
    "data": "pubsel data takes `list`, `prepare NAME`, `check NAME`, or `forget PATH`",
}  # the message if a key that these commands cannot do without is missing
RESUMES = dict.fromkeys(("run", "fit", "tune", "make"), "; the same command resumes from the last checkpoint") | {
    "pool": "; the same command resumes after the last whole shard"
}
ON_DATA = ["list", "prepare", "check", "forget"]
ENDED_BY_PIPE = 141  # the exit code of a program that SIGPIPE ends


def main(argv: list[str] | None = None) -> int:
    """Run one command; return its exit code. argv: the words after `pubsel`."""
    words = list(sys.argv[1:] if argv is None else argv)
    if words[:1] in (["-sc"], ["--shell-completion"]):
        return _complete(words, os.environ.get("COMP_LINE", ""))
    if not words or words[0] in ("-h", "--help", "help"):
        print(HELP)
        return 0 if words else 2
    if words[0] in ("-V", "--version"):
        print(pubsel.__version__)
        return 0

    # torch reads its settings of memory when it is imported, which may be soon
    keep_memory()
    command, rest = words[0], words[1:]
    if command not in COMMANDS:
        near = nearest(command, COMMANDS)
        known = f"use {', '.join(COMMANDS)}; pubsel --help shows them"
        return _fail(UsageError(f"unknown command {command!r}{near}: {known}"))

    with stopped_by_signals():
        return _placed(command, rest)


def _placed(command: str, rest: list[str]) -> int:
    """Return the exit code of a command in this process, which may be one of several of torchrun."""
    rank, size = torchrun.place()
    if size == 1:
        return _command(command, rest)

    # The first runs the command, the others help it.
    if command != "run":
        return 2 if rank else _fail(UsageError(f"torchrun is for pubsel run alone: give pubsel {command} without it"))
    from pubsel.training import parallel

    try:
        return parallel.assist() if rank else parallel.lead(lambda: _command(command, rest))
    except UserError as error:
        return _fail(error)


def _command(command: str, rest: list[str]) -> int:
    """Return the exit code of a command whose words are `rest`."""
    debug = any(word in ("debug=true", "debug=True", "debug=1") for word in rest)
    try:
        return _started(command, rest)
    except KeyboardInterrupt as stop:
        print(f"interrupted{RESUMES.get(command, '')}", file=sys.stderr)
        return 128 + (stop.args[0] if stop.args else signal.SIGINT)
    except Exception as error:
        # standard output may be the pipe that was closed, as by `| head`
        if isinstance(error, BrokenPipeError):
            watched = select.poll()
            watched.register(sys.stdout.fileno(), 0)
            if any(event & select.POLLERR for _, event in watched.poll(0)):
                return ENDED_BY_PIPE
        if debug:
            traceback.print_exc()
        return _fail(error)


def _started(command: str, rest: list[str]) -> int:
    """Return the exit code of a command; raise its error."""
    options = _parser().parse_intermixed_args(rest)
    if options.multirun and command == "make":
        raise UsageError("pubsel make sweeps by itself: leave -m out")
    if options.multirun and command not in compose.BY_HYDRA:
        raise UsageError(f"pubsel {command} has nothing to sweep over: leave -m out")

    typed = compose.renamed(command, _positional(command, options.words))
    words = expanded(command, typed)
    if options.help:
        print(_help(command, words, options.config_dir, typed))
        return 0
    if not options.cfg and (options.multirun or command == "make"):
        return _sweep(command, words, options, typed)

    with compose.composed(command, words, options.config_dir) as values:
        if options.cfg:
            print(OmegaConf.to_yaml(values).rstrip())
        else:
            _do(command, values)
    return 0


class _Parser(argparse.ArgumentParser):
    """A parser whose errors are one line."""

    def error(self, message: str) -> NoReturn:
        raise UsageError(f"{message}; a setting is written key=value, without --")


def _parser() -> _Parser:
    """Return the parser of what is no setting. Words and options may come in any order."""
    parser = _Parser(add_help=False, allow_abbrev=False)
    parser.add_argument("words", nargs="*")
    parser.add_argument("-h", "--help", action="store_true")
    parser.add_argument("-c", "--cfg", choices=["job"])
    parser.add_argument("-m", "--multirun", action="store_true")
    parser.add_argument("-cd", "--config-dir")
    return parser


def _do(command: str, values: DictConfig) -> str:
    """Check the settings of a command, do its work, and print and return what it returns."""
    if any(OmegaConf.is_missing(values, key) for key in values):
        if command in USAGE:
            raise UsageError(USAGE[command])
        if command == "make":
            raise UsageError(f"pubsel make NAME: one of {', '.join(_work())}")

    # One value of several needs no brackets.
    for key in lists(SCHEMAS[command]):
        if values.get(key) is not None and not OmegaConf.is_list(values[key]):
            values[key] = [values[key]]
    result: Any = check(SCHEMAS[command], values)

    # only the module of this command is imported
    work = COMMANDS[command]
    if isinstance(work, str):
        place, *names = work.split()
        for name in names:
            result = getattr(importlib.import_module(f"pubsel.{place}"), name)(result)
    else:
        result = work(result)
    if result:
        print(result)
    return result or ""


def keep_memory() -> None:
    """Make torch take huge pages, and glibc keep freed memory: new pages for the tensors of a pass can cost more than
    the pass. To be called before torch is imported; does nothing if there is no glibc."""
    os.environ.setdefault("THP_MEM_ALLOC_ENABLE", "1")
    with contextlib.suppress(OSError, AttributeError):
        mallopt = ctypes.CDLL("libc.so.6").mallopt
        mallopt(-3, 2**26)  # M_MMAP_THRESHOLD: what is larger goes back at once
        mallopt(-1, 2**30)  # M_TRIM_THRESHOLD: so much may be kept


def _help(command: str, words: list[str], config_dir: str | None = None, typed: list[str] | None = None) -> str:
    """Return every setting of a command with the value that `words` give it; or of the options that those of them which
    were `typed` name."""
    folders = (*([Path(config_dir).resolve()] if config_dir else []), CONF)
    with compose.composed(command, words, config_dir) as composed:
        values = cast(dict[str, Any], OmegaConf.to_container(composed, resolve=True))

    plain = [word.lstrip("+").partition("=") for word in typed or words]
    chosen = {key: name for key, _, name in plain if (CONF / key).is_dir() and key in values}
    sections = explain.sections(SCHEMAS[command], values, folders, methods=not chosen.keys().isdisjoint(GROUPS))
    return explain.help_text(command, sections, chosen, folders)


def _positional(command: str, words: list[str]) -> list[str]:
    """Return `table NAME`, `data list|prepare NAME|check NAME|forget PATH`, `runs KEY=VALUE`, `make NAME KEY=VALUE`,
    `tune FOLDER KEY=VALUE` and `predict NAME IMAGES` as overrides."""
    # a command names its first words by their places; a key=value ends them
    words = list(words)
    for i, key in enumerate(POSITIONAL.get(command, [])[: len(words)]):
        if _is_setting(words[i]):
            break
        words[i] = _override(key, words[i])

    if command == "predict":  # every word that is no setting is an image, or a folder of them
        images = [word for word in words if not _is_setting(word)]
        words = [word for word in words if word not in images] + ([_override("images", images)] if images else [])

    # Other keys belong to records, to the steps of `make`, or to the runs of `tune`.
    if command in ("runs", "make", "tune"):
        key, keys = ("where", ("+", "~")) if command == "runs" else ("words", ())
        known = (*(f"{name}=" for name in keys_of(SCHEMAS[command])), "hydra", *keys)
        others = [word for word in words if not word.startswith(known) and ("=" in word or command == "make")]
        words = [word for word in words if word not in others] + ([_override(key, others)] if others else [])
    if command in ("make", "tune"):
        words = [_override(*word.split("=", 1)) if word.startswith(("public=", "over=")) else word for word in words]
    return words


def _override(key: str, value: str | list[str]) -> str:
    """Return the override of a key by texts that are taken literally, whatever characters they have."""
    literal = uninterpolated(value) if isinstance(value, str) else [uninterpolated(text) for text in value]
    return f"{key}={written(literal)}"


def _is_setting(word: str) -> bool:
    """Return whether a word is key=value, and no path with a = in it."""
    return re.match(r"[\w.+~/@]*=", word.partition(os.sep)[0], re.ASCII) is not None


def _sweep(command: str, words: list[str], options: argparse.Namespace, typed: list[str]) -> int:
    """Return the exit code of a sweep, or of `make`, which Hydra starts. typed: those of the words that were typed."""
    from hydra.core.hydra_config import HydraConfig
    from hydra.errors import HydraException

    from pubsel.commands import sweep

    sweep.finished.clear()
    failures: list[str] = []
    raised: list[Exception] = []
    of_record = {word.partition("=")[0] for word in words if word not in typed}  # Hydra may change the values

    def task(values: DictConfig) -> str | None:
        try:
            with fetching(bool(values.get("download", True))), bars:
                sweep.finished.append((Path(values.results), _do(command, values)))
        except Exception as error:
            if not options.multirun:
                raised.append(error)  # raised again outside Hydra, which would print more than one line
                return None
            # a cell of a sweep that fails does not stop the others
            why = _message(error)[0]
            cell = [word for word in HydraConfig.get().overrides.task if word.partition("=")[0] not in of_record]
            failures.append(f"{' '.join(cell)}: {why}")
            print(f"pubsel: failed: {failures[-1]}", file=sys.stderr)
            if values.get("debug"):
                traceback.print_exc()
            return why
        return None

    folder = [f"--config-dir={options.config_dir}"] if options.config_dir else []
    try:
        _hydra(command, [*folder, *(["--multirun"] if options.multirun else []), *words], task)
    except CellsFailed as several:
        failures = several.cells
    except (OSError, UserError):
        raise
    except (HydraException, OmegaConfBaseException) as error:
        raise UsageError(compose.explained(error, command)) from error
    except Exception as error:  # Hydra's, about an override: `task` keeps those of the command
        raise UsageError(f"{error}; pubsel {command} --help lists the keys") from error

    if raised:
        raise raised[0]
    if options.multirun and command == "run":
        for sentence in sweep.best_finished():
            print(sentence, file=sys.stderr)
    if failures:
        print(f"pubsel: {len(failures)} cells failed:", *failures, sep="\n  ", file=sys.stderr)
    return 1 if failures else 0


def _hydra(command: str, words: list[str], task: Callable[[DictConfig], Any]) -> None:
    """Have Hydra read a command line and call `task`. Its errors are raised, and not printed."""
    import hydra

    from hydra_plugins import pubsel_launchers

    os.environ["HYDRA_FULL_ERROR"] = "1"
    logging.getLogger("hydra").addHandler(logging.NullHandler())
    sys.argv = ["pubsel", *words]
    pubsel_launchers.register()
    hydra.main(config_path=str(CONF), config_name=command, version_base="1.3")(task)()


def _within(command: str, words: list[str]) -> int:
    """Return the exit code of a command that another one starts: Hydra has one of each at a time."""
    with compose.another():
        return _started(command, words)


def _fail(error: Exception) -> int:
    """Print one line to stderr, and return the exit code."""
    text, code = _message(error)
    print(f"pubsel: {' '.join(text.splitlines())}", file=sys.stderr)
    return code


def _message(error: Exception) -> tuple[str, int]:
    # what the user can mend comes first, what Hydra and the system say next, the unexpected last
    if isinstance(error, BrokenRecord):
        return f"{error}{ledger.again(error.folder)}", error.exit_code
    if isinstance(error, UserError):
        return str(error), error.exit_code
    if isinstance(error, OmegaConfBaseException) or type(error).__module__.startswith("hydra."):
        return compose.explained(error, "run"), 2

    if isinstance(error, RuntimeError) and "home directory" in str(error):
        return NO_HOME, 1
    if out_of_memory(error):
        return "out of memory: lower training.chunk, algorithm.k or pair.m", 1

    if type(error).__name__ == "UncompletedJobError":  # of submitit, at a time limit
        return f"{str(error).rstrip('.')}: raise hydra.launcher.max_num_timeout or timeout_min", 1
    file = getattr(error, "filename", None) or "a file or standard output"
    if met := limit(error):
        return f"{file}: {met}", 1
    if isinstance(error, OSError) and error.strerror:
        return f"{file}: {error.strerror}; check permissions", 1

    first = str(error).splitlines()[0] if str(error) else ""
    return f"{type(error).__name__}: {first}; debug=true shows where", 1


def _complete(words: list[str], line: str) -> int:
    """Run Hydra's tab completion, one word further right: it answers `pubsel ...` with the config of the command.

    line: the command line so far. `-sc install=SHELL` prints the script for the shell, `-sc query=SHELL` the choices.
    """
    if len(words) < 2 or not words[1].startswith("query="):
        _hydra("run", words, print)
        return 0

    # the word at the cursor is not complete
    before, begun = line.split()[1:], ""
    if before and not line.endswith(" "):
        begun = before.pop()

    choices: list[str] = []
    match before:
        case []:
            choices = list(COMMANDS)
        case ["attack"]:
            choices = [attack.name for attack in Attack]
        case ["table"]:
            choices = ["all", *named("tables"), *(name for name in named("work") if name.startswith("gsd_table"))]
        case ["make"]:
            choices = _work()
        case ["figure"]:
            from pubsel.papers import draw

            choices = draw.figure_names()
        case ["data"]:
            choices = ON_DATA
        case ["runs"]:
            choices = ["list", "show", "delete", "budget"]
        case ["runs", "show" | "delete"] | ["predict" | "export"]:
            choices = sorted(path.name for path in Path("results/runs").glob("*/"))
        case ["data", "prepare" | "check"]:
            choices = dataset_names()
        case [command, *_] if command in COMMANDS and command not in compose.BY_HYDRA:
            choices = [f"{key}=" for key in keys_of(SCHEMAS[command])]
        case [command, *given] if command in COMMANDS:
            os.environ["COMP_LINE"] = " ".join(["pubsel", *_positional(command, given), begun])
            with contextlib.suppress(Exception, SystemExit), contextlib.redirect_stderr(io.StringIO()):
                _hydra(command, words, print)

    print(*(choice for choice in choices if choice.startswith(begun)))
    return 0


def entry() -> Any:
    """Run the console script; a closed pipe, as in `| head`, ends it silently."""
    _open_streams()
    try:
        code = main()
        sys.stdout.flush()
    except BrokenPipeError:
        code = ENDED_BY_PIPE
    except OSError as error:  # of standard output, such as a full disk
        code = _fail(error)

    # Python flushes once more when it ends.
    try:
        sys.stdout.flush()
    except OSError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    sys.exit(code)


def _open_streams() -> None:
    """Open the standard streams that the caller has closed: a file of ours would get their number, and what a library
    prints. A standard error that takes nothing stops no work."""
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        try:
            os.fstat(number)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # the lowest number that is free
        if getattr(sys, name) is None:
            setattr(sys, name, os.fdopen(number, "r" if name == "stdin" else "w", closefd=False))
    sys.stderr = cast(TextIO, Patient(sys.stderr))


class Patient:
    """A stream that drops what cannot be written to it, since its disk is full or nobody reads it."""

    def __init__(self, stream: TextIO):
        self.stream = stream

    def __getattr__(self, name: str) -> Any:
        return getattr(self.stream, name)

    def write(self, text: str) -> int:
        """Write text, and return its length, whether or not it could be written."""
        with contextlib.suppress(OSError):
            self.stream.write(text)
            self.stream.flush()
        return len(text)

    def flush(self) -> None:
        """Write what waits, if that is possible."""
        with contextlib.suppress(OSError):
            self.stream.flush()
