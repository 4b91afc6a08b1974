"""`pubsel COMMAND ...`: one word, then Hydra's grammar. Imports no torch before the settings are known to be good.

Exit code 0: done; 1: a run failed; 2: the command or its settings are wrong.
"""

import contextlib
import ctypes
import dataclasses
import io
import logging
import os
import re
import select
import signal
import sys
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, TextIO, cast

import hydra
from hydra._internal.utils import get_args_parser
from hydra.core.global_hydra import GlobalHydra
from hydra.core.hydra_config import HydraConfig
from hydra.errors import HydraException
from hydra.types import RunMode
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

import pubsel
from pubsel.messages import CellsFailed, UsageError, UserError, limit, out_of_memory, stopped_by_signals
from pubsel.privacy import ledger
from pubsel.records import BrokenRecord
from pubsel.settings import CONF, compose, explain, fetching, named
from pubsel.settings.datasets import dataset_names
from pubsel.settings.keys import (
    SCHEMAS,
    Attack,
    AttackConfig,
    AuditConfig,
    DataConfig,
    ExportConfig,
    FigureConfig,
    FitConfig,
    MakeConfig,
    PoolConfig,
    PredictConfig,
    RankConfig,
    ReportConfig,
    RunConfig,
    RunsConfig,
    TableConfig,
)
from pubsel.settings.methods import GROUPS
from pubsel.settings.schema import check
from pubsel.training import torchrun

HELP = f"""pubsel {pubsel.__version__}: private machine learning with public data.

  pubsel fit ./my_images public=[./a,./b] epsilon=1      from private images to a model that may be given away
  pubsel run +experiment=quickstart        train one cell with differential privacy; needs no download
  pubsel run +experiment=gep_cifar10 pair.public=svhn epsilon=4 seed=1 algorithm=dp_sgd device=cpu
  pubsel run -m +experiment=gep_cifar10 pair.public=cifar100,cifar10,svhn seed=0,1,2     a sweep
  pubsel predict NAME ./new_images         classes of new images, by the model of a finished run: answers.csv
  pubsel export NAME to=./model            the model as a folder that may be given away, with a card and a privacy page
  pubsel rank private=digits public=[digits,photo_patches,noise] model=digits_cnn distance.m=200      which is nearest?
  pubsel rank private=/path/to/images public=[/path/a,/path/b]                           the same, on your own folders
  pubsel attack loss run=NAME              membership inference on a finished run; also gsd_white_box, gsd_black_box
  pubsel audit +experiment=quickstart      claimed epsilon next to what attacks on a training measure
  pubsel table gsd_table2                  records next to the paper's numbers; all: every table that has a record
  pubsel make gsd_table2 dry=true          which cells of a table are there, and hours for the others
  pubsel figure pillar_k                   one figure as PNG, SVG and PDF; all: each that the records allow
  pubsel report                            tables, figures and the runs that they come from, as one HTML file
  pubsel runs state=unfinished             which runs there are; runs show NAME: its command, and why it failed
  pubsel run replay=NAME                   repeat a run, and report whether it comes out the same
  pubsel data list                         every named dataset: where it comes from, and whether it is present
  pubsel data prepare NAME                 download or convert one
  pubsel data check /path/to/images        what is read of your data: how many images, which size, how many classes
  pubsel pool pool=[./embeddings]          clusters of a large pool of public embeddings, shard by shard

Every setting can be given as key=value; `pubsel run --help` lists them, `--cfg job` shows what a command would use.
Tab completion for bash: eval "$(pubsel -sc install=bash)"
"""


def _run(values: DictConfig) -> None:
    settings = check(RunConfig, values)
    if settings.replay is not None:
        return _replay(settings.replay, values)
    from pubsel.release.run import run, show_run

    print(show_run(run(settings)))


def _replay(name: str, values: DictConfig) -> None:
    free = {f.name for f in dataclasses.fields(RunConfig) if f.metadata.get("neutral")}
    for word in HydraConfig.get().overrides.task:
        if (key := word.lstrip("+~").partition("=")[0]) not in free:
            raise UsageError(f"{word}: replay={name} has its own {key}; give no more than {', '.join(sorted(free))}")
    from pubsel.commands.replay import repeat

    same, text = repeat(name, values)
    print(text)
    if not same:
        raise UserError(f"replay={name}: it did not come out the same")


def _fit(values: DictConfig) -> None:
    if OmegaConf.is_missing(values, "private"):
        raise UsageError("pubsel fit FOLDER public=[A,B] epsilon=1: give the path of your images")
    if isinstance(values.get("public"), str):
        values.public = [values.public]
    settings = check(FitConfig, values)
    from pubsel.commands import fit

    print(fit.run(settings))


def _predict(values: DictConfig) -> None:
    if OmegaConf.is_missing(values, "run"):
        raise UsageError("pubsel predict RUN IMAGES: name of a finished run (pubsel runs lists them), or its folder")
    settings = check(PredictConfig, values)
    from pubsel.commands import predict

    _print(predict.run(settings))


def _export(values: DictConfig) -> None:
    if OmegaConf.is_missing(values, "run") or OmegaConf.is_missing(values, "to"):
        raise UsageError(
            "pubsel export RUN to=FOLDER: name of a finished run (pubsel runs lists them), and a new folder"
        )
    settings = check(ExportConfig, values)
    from pubsel.commands import export

    print(export.run(settings))


def _rank(values: DictConfig) -> None:
    if isinstance(values.get("public"), str):
        values.public = [values.public]
    settings = check(RankConfig, values)
    from pubsel.commands.rank import rank, show_rank

    print(show_rank(rank(settings)))


def _attack(values: DictConfig) -> None:
    if isinstance(values.get("public"), str):
        values.public = [values.public]
    settings = check(AttackConfig, values)
    from pubsel.commands.attack import NOT_PRIVATE, attack

    print(attack(settings).to_string(index=False), NOT_PRIVATE, sep="\n\n")


def _audit(values: DictConfig) -> None:
    settings = check(AuditConfig, values)
    from pubsel.commands.audit import audit, show_audit

    print(show_audit(audit(settings)))


def _table(values: DictConfig) -> None:
    from pubsel.papers import typeset

    print(typeset.run(check(TableConfig, values)))


def _make(values: DictConfig) -> None:
    if OmegaConf.is_missing(values, "name"):
        raise UsageError(f"pubsel make NAME: one of {', '.join(sorted({*named('tables'), *named('work')}))}")
    settings = check(MakeConfig, values)
    from pubsel.papers import make

    print(make.run(settings, _within))


def _figure(values: DictConfig) -> None:
    for key in ("sets", "k"):
        if values.get(key) is not None and not OmegaConf.is_list(values[key]):
            values[key] = [values[key]]
    settings = check(FigureConfig, values)
    from pubsel.papers import draw

    print(draw.run(settings))


def _report(values: DictConfig) -> None:
    from pubsel.papers import report

    _print(report.run(check(ReportConfig, values)))


def _print(line: str) -> None:
    """Print a line, if there is one."""
    if line:
        print(line)


def _runs(values: DictConfig) -> None:
    from pubsel.commands import list_runs

    print(list_runs.run(check(RunsConfig, values)))


def _data(values: DictConfig) -> None:
    from pubsel.commands import data

    usage = "pubsel data takes `list`, `prepare NAME`, `check NAME`, or `forget PATH`"
    if OmegaConf.is_missing(values, "action"):
        raise UsageError(usage)
    settings = check(DataConfig, values)
    if settings.action == "list":
        print(data.listing(settings.data_root))
    elif settings.action == "prepare":
        print(data.prepare(settings.name, settings.data_root))
    elif settings.action == "check":
        print(data.check(settings.name, settings.data_root, settings.keep))
    elif settings.action == "forget":
        print(data.forget(settings.name, settings.data_root))
    else:
        raise UsageError(f"action={settings.action}: {usage}")


def _pool(values: DictConfig) -> None:
    if isinstance(values.get("pool"), str):
        values.pool = [values.pool]
    settings = check(PoolConfig, values)
    from pubsel.commands import pool

    print(pool.run(settings))


COMMANDS: dict[str, Callable[[DictConfig], None]] = {
    "run": _run, "fit": _fit, "predict": _predict, "export": _export, "rank": _rank, "attack": _attack, "audit": _audit,
    "table": _table, "make": _make, "figure": _figure, "report": _report, "runs": _runs, "data": _data,
    "pool": _pool,
}  # fmt: skip
POSITIONAL = {
    "fit": ["private"],
    "predict": ["run"],
    "export": ["run"],
    "attack": ["attack"],
    "table": ["table"],
    "make": ["name"],
    "figure": ["figure"],
    "runs": ["action", "name"],
    "data": ["action", "name"],
}  # keys that are given without their name
RESUMES = dict.fromkeys(("run", "fit", "make"), "; the same command resumes from the last checkpoint") | {
    "pool": "; the same command resumes after the last whole shard"
}
ENDED_BY_PIPE = 141  # the exit code of a program that SIGPIPE ends


def main(argv: list[str] | None = None) -> int:
    """Run one command; return its exit code. argv: the words after `pubsel`."""
    words = list(sys.argv[1:] if argv is None else argv)
    if words[:1] in (["-sc"], ["--shell-completion"]):
        return _complete(words, os.environ.get("COMP_LINE", ""))
    if not words or words[0] in ("-h", "--help", "help"):
        print(HELP)
        return 0 if words else 2
    if words[0] == "--version":
        print(pubsel.__version__)
        return 0

    # torch reads its settings of memory when it is imported, which may be soon
    keep_memory()
    command, rest = words[0], words[1:]
    if command not in COMMANDS:
        return _fail(UsageError(f"unknown command {command!r}: use {', '.join(COMMANDS)}; pubsel --help shows them"))

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
        words = _positional(command, list(rest))
        _check_options(words)
        if {"-h", "--help"} & set(rest):
            print(_help(command, rest))
            return 0
        return _dispatch(command, words)
    except KeyboardInterrupt as stop:
        print(f"interrupted{RESUMES.get(command, '')}", file=sys.stderr)
        return 128 + (stop.args[0] if stop.args else signal.SIGINT)
    except Exception as error:
        if isinstance(error, BrokenPipeError) and _pipe_is_closed():
            return ENDED_BY_PIPE
        if debug:
            traceback.print_exc()
        return _fail(error)


def keep_memory() -> None:
    """Make torch take huge pages, and glibc keep freed memory: new pages for the tensors of a pass can cost more than
    the pass. To be called before torch is imported; does nothing if there is no glibc."""
    os.environ.setdefault("THP_MEM_ALLOC_ENABLE", "1")
    with contextlib.suppress(OSError, AttributeError):
        mallopt = ctypes.CDLL("libc.so.6").mallopt
        mallopt(-3, 2**26)  # M_MMAP_THRESHOLD: what is larger goes back at once
        mallopt(-1, 2**30)  # M_TRIM_THRESHOLD: so much may be kept


def _apart(words: list[str]) -> tuple[list[str], list[str]]:
    """Return settings, and options of Hydra such as --config-dir DIR. Its parser accepts no settings on both sides of
    an option."""
    actions = get_args_parser()._actions
    with_value = {name for action in actions if action.nargs is None for name in action.option_strings}
    settings: list[str] = []
    options: list[str] = []
    for before, word in zip(["", *words], words, strict=False):
        (options if word.startswith("-") or before in with_value else settings).append(word)
    return settings, options


def _check_options(words: list[str]) -> None:
    """Raise UsageError for a word like --epsilon, about which Hydra's parser would print a page."""
    printed = io.StringIO()
    try:
        with contextlib.redirect_stderr(printed):
            get_args_parser().parse_args(words)
    except SystemExit:
        reason = printed.getvalue().strip().splitlines()[-1].partition("error: ")[2]
        raise UsageError(f"{reason}; a setting is written key=value, without --") from None


def _help(command: str, words: list[str]) -> str:
    """Return every setting of a command with the value that `words` give it; or of the options that they name."""
    without_help = [word for word in words if word not in ("-h", "--help")]
    given = get_args_parser().parse_args(_positional(command, without_help))
    user_folders = [Path(given.config_dir).resolve()] if given.config_dir else []
    folders = (*user_folders, CONF)

    # Hydra resolves the values, from the user's folder too
    overrides = [word for word in given.overrides if not word.lstrip("+~").startswith("hydra")]
    with hydra.initialize_config_dir(str(CONF), version_base="1.3"):
        search = [f"hydra.searchpath=[{','.join(f'file://{folder}' for folder in user_folders)}]"]
        overrides_too = [*overrides, *(search if user_folders else [])]
        values = OmegaConf.to_container(hydra.compose(command, overrides_too), resolve=True)

    sections = explain.sections(SCHEMAS[command], cast(dict[str, Any], values), folders)
    sections = [section._replace(settings=_added(section, cast(dict[str, Any], values))) for section in sections]
    groups = {section.name for section in sections if section.options}
    plain = [word.lstrip("+") for word in overrides]
    chosen = dict(word.split("=", 1) for word in plain if word.partition("=")[0] in groups)
    return explain.help_text(command, sections, chosen, folders)


def _added(section: explain.Section, values: dict[str, Any]) -> list[explain.Setting]:
    """Return the settings of a section, with a + before those of a method that its option leaves to the default of its
    class: Hydra takes them only so."""
    given = values.get(section.name) if section.name in GROUPS else None
    if given is None:
        return section.settings
    names = {setting: setting.key.partition(".")[2] for setting in section.settings}
    return [s if name in given else s._replace(key=f"+{s.key}") for s, name in names.items()]


def _positional(command: str, words: list[str]) -> list[str]:
    """Return `table NAME`, `data list|prepare NAME|check NAME|forget PATH`, `runs KEY=VALUE`, `make NAME KEY=VALUE` and
    `predict NAME IMAGES` as overrides."""
    words, options = _apart(compose.renamed(command, words))
    for i, key in enumerate(POSITIONAL.get(command, [])[: len(words)]):
        if _is_setting(words[i]):
            break
        needs_no_quotes = re.fullmatch(r"[\w./~+*-]*", words[i])
        words[i] = f"{key}={words[i]}" if needs_no_quotes else compose.quoted(key, words[i])

    if command == "runs":  # other keys belong to records, and Hydra does not know them
        runs_keys = tuple(f"{f.name}=" for f in dataclasses.fields(RunsConfig))
        keyed = [word for word in words if "=" in word]
        asked = [word for word in keyed if not word.startswith((*runs_keys, "hydra", "+", "~"))]
        words = [word for word in words if word not in asked] + _listed("where", asked)

    if command == "predict":  # every word that is no setting is an image, or a folder of them
        asked = [word for word in words if not _is_setting(word)]
        quoted = ["'" + word.replace("${", "\\${").replace("'", "\\'") + "'" for word in asked]
        words = [word for word in words if _is_setting(word)]
        words += [f"images=[{','.join(quoted)}]"] if quoted else []

    if command == "make":  # other keys belong to its steps
        if {"-m", "--multirun"} & set(options):
            raise UsageError("pubsel make sweeps by itself: leave -m out")
        make_keys = tuple(f"{f.name}=" for f in dataclasses.fields(MakeConfig))
        asked = [word for word in words if not word.startswith((*make_keys, "hydra"))]
        words = [word if not word.startswith("public=") else compose.quoted(*word.split("=", 1)) for word in words]
        words = [word for word in words if word not in asked] + _listed("words", asked)

    return options + words


def _is_setting(word: str) -> bool:
    """Return whether a word is key=value, and no path with a = in it."""
    return re.match(r"[\w.+~/@]*=", word.partition(os.sep)[0]) is not None


def _listed(key: str, words: list[str]) -> list[str]:
    """Return the override key=[...] of words that Hydra is to read as they are; nothing for no words."""
    quoted = ["'" + word.replace("\\", "\\\\").replace("'", "\\'") + "'" for word in words]
    return [f"{key}=[{','.join(quoted)}]"] if quoted else []


def _dispatch(command: str, words: list[str]) -> int:
    failures: list[str] = []
    raised: list[Exception] = []

    def task(values: DictConfig) -> str | None:
        try:
            allowed = bool(values.get("download", True))
            with fetching(allowed), contextlib.nullcontext() if allowed else offline():
                COMMANDS[command](values)
        except Exception as error:
            if HydraConfig.get().mode != RunMode.MULTIRUN:
                raised.append(error)  # raised again outside Hydra, which would print more than one line
                return None
            # a cell of a sweep that fails does not stop the others
            why = _message(error)[0]
            failures.append(f"{' '.join(HydraConfig.get().overrides.task)}: {why}")
            print(f"pubsel: failed: {failures[-1]}", file=sys.stderr)
            if values.get("debug"):
                traceback.print_exc()
            return why
        return None

    # errors are raised here instead of being printed by Hydra
    os.environ["HYDRA_FULL_ERROR"] = "1"
    logging.getLogger("hydra").addHandler(logging.NullHandler())
    sys.argv = ["pubsel", *words]
    from hydra_plugins import pubsel_launchers

    pubsel_launchers.register()
    try:
        hydra.main(config_path=str(CONF), config_name=command, version_base="1.3")(task)()
    except SystemExit as done:  # after --help or --cfg
        return int(done.code or 0)
    except CellsFailed as several:
        failures = several.cells
    except (HydraException, OmegaConfBaseException, OSError, UserError):
        raise
    except Exception as error:  # Hydra's, about an override: `task` keeps those of the command
        raise UsageError(f"{error}; pubsel {command} --help lists the keys") from error

    if raised:
        raise raised[0]
    if failures:
        print(f"pubsel: {len(failures)} cells failed:", *failures, sep="\n  ", file=sys.stderr)
    return 1 if failures else 0


@contextlib.contextmanager
def offline() -> Iterator[None]:
    """Have no library ask the network for weights or data inside; what was fetched before is found where it is kept.
    An OSError takes the place of each question."""

    def hub() -> Any:
        return sys.modules.get("huggingface_hub.constants")

    kept = os.environ.get("HF_HUB_OFFLINE"), hub() and hub().HF_HUB_OFFLINE
    os.environ["HF_HUB_OFFLINE"] = "1"
    if hub():
        hub().HF_HUB_OFFLINE = True
    if not _offline:
        sys.addaudithook(_refuse)  # which nothing takes away again
    _offline.append(True)
    try:
        yield
    finally:
        _offline.append(False)
        del os.environ["HF_HUB_OFFLINE"]
        if kept[0] is not None:
            os.environ["HF_HUB_OFFLINE"] = kept[0]
        if hub():
            hub().HF_HUB_OFFLINE = bool(kept[1])


_offline: list[bool] = []  # the last one counts


def _refuse(event: str, arguments: tuple[Any, ...]) -> None:
    """Raise OSError if urllib is about to fetch something while nothing is to be fetched."""
    if event == "urllib.Request" and _offline[-1] and not str(arguments[0]).startswith("file:"):
        raise OSError("download=false")


def _within(command: str, words: list[str]) -> int:
    """Return the exit code of a command that another one starts: Hydra has one of each at a time."""
    state, settings = GlobalHydra.instance(), HydraConfig.instance()
    hydra_before, settings_before = state.hydra, settings.cfg
    state.clear()
    try:
        return _dispatch(command, _positional(command, words))
    finally:
        state.hydra, settings.cfg = hydra_before, settings_before


def _fail(error: Exception) -> int:
    """Print one line to stderr, and return the exit code."""
    text, code = _message(error)
    print(f"pubsel: {' '.join(text.splitlines())}", file=sys.stderr)
    return code


def _message(error: Exception) -> tuple[str, int]:
    if isinstance(error, BrokenRecord):
        return f"{error}{ledger.again(error.folder)}", error.exit_code
    if isinstance(error, UserError):
        return str(error), error.exit_code
    if isinstance(error, HydraException | OmegaConfBaseException):
        return compose.explained(error), 2

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
        return _dispatch("run", words)

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
            choices = sorted({*named("tables"), *named("work")})
        case ["figure"]:
            from pubsel.papers import draw

            choices = draw.names()
        case ["data"]:
            choices = ["list", "prepare", "check", "forget"]
        case ["runs"]:
            choices = ["list", "show", "delete"]
        case ["runs", "show" | "delete"] | ["predict" | "export"]:
            choices = sorted(path.name for path in Path("results/runs").glob("*/"))
        case ["data", "prepare" | "check"]:
            choices = dataset_names()
        case [command, *given] if command in COMMANDS:
            os.environ["COMP_LINE"] = " ".join(["pubsel", *_positional(command, given), begun])
            with contextlib.suppress(Exception, SystemExit), contextlib.redirect_stderr(io.StringIO()):
                _dispatch(command, words)

    print(*(choice for choice in choices if choice.startswith(begun)))
    return 0


def _pipe_is_closed() -> bool:
    """Return whether the pipe that standard output goes to is closed, as by `| head`."""
    watched = select.poll()
    watched.register(sys.stdout.fileno(), 0)
    return any(event & select.POLLERR for _, event in watched.poll(0))


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
