"""One record per run, written whole or not at all, and where its number comes from. This file imports no torch."""

import contextlib
import gzip
import importlib.metadata
import json
import math
import os
import platform
import re
import secrets
import shutil
import subprocess
import sys
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import MISSING, dataclass, field, fields
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from pubsel import __version__, files
from pubsel.files import PRIVATE_FOLDER, guard, plain, unreadable, write_whole
from pubsel.messages import UsageError, UserError, cannot_write, gib, say
from pubsel.settings.command_line import overrides, unquoted
from pubsel.settings.keys import SCHEMAS, RankConfig, RunConfig, is_weak
from pubsel.settings.schema import MOST, fits, literal, misfit, nearest, neutral, walk

if TYPE_CHECKING:
    import pandas

_HERE = Path(__file__).resolve().parent

# version of what decides the numbers of a record: after the point, of how sums are rounded; tests/golden/numbers.json
# says when it has to be raised
NUMBERS = 1.6
SINCE = {"whitened_head": 1.2, "whitened_head_once": 1.2}  # first version of an algorithm's method as it is
KINDS = ("runs", "ranks", "audits")  # folders of results whose folders have a record each
SCRATCH = "candidates-"  # how the name of a temporary folder begins, below that of a run
LARGEST = 2**26  # bytes of a record
NO_RECORD = "is no record"
FAILED = "failed: "  # how the last line of a failed run's log begins, after the time


# Each key of a record: what it means, and what its value may be. What has no default has to be there; of the values of
# keys that are not here nothing is used.

Count = Annotated[int, 0, 2**63 - 1]
Share = Annotated[float, 0, 1]
Size = Annotated[float, 0, MOST]
Number = Annotated[float, -MOST, MOST]


def key(about: str, default: Any = MISSING) -> Any:
    """Return a field of a record with its meaning, for the reference of the documentation. default: a type stands for
    an empty value of it."""
    usual = {"default_factory": default} if default in (dict, list) else {"default": default}
    return field(metadata={"about": about}, **usual)


@dataclass(kw_only=True)
class ReleaseRecord:
    """One release of several that a guarantee covers."""

    what: str
    epsilon: Size
    delta: Share
    rate: Share
    steps: Count
    noise_multiplier: Size
    accountant: str


@dataclass(kw_only=True)
class Guarantee:
    """`privacy` of a record."""

    valid: bool = key("whether the guarantee holds; false without noise, and with privacy.accounting=paper", False)
    weak: bool = key("true if delta is above 1/n; absent otherwise", False)
    statement: str = key("the guarantee in a sentence", "")
    epsilon: Size | None = key("epsilon of everything that was released", None)
    claimed_epsilon: Size | None = key("the requested epsilon", None)
    delta: Share | None = key("delta of everything that was released", None)
    adjacency: str = key("which two private data sets are neighbours", "")
    unit: str | None = key("pair.unit, if it is set: who is protected; absent otherwise", None)
    sampling: str = key("Poisson or full batch", "")
    sampling_rate: Share = key("probability that an example is in a batch", 0)
    steps: Count = key("number of steps", 0)
    noise_multiplier: Size = key("standard deviation of the noise, divided by the sensitivity", 0)
    sensitivity: Size = key("the largest change of the sum of a step by one additional example, in L2", 0)
    accountant: str = key("how epsilon was computed", "")
    noise_source: str = key("seeded or operating system", "")
    not_covered: list[str] = key("what the guarantee does not cover, in sentences", list)
    composition: str = key("basic, if several releases add up; absent otherwise", "")
    parts: list[ReleaseRecord] | None = key("these releases, each with its own values; absent otherwise", None)
    rate: Share = 0


@dataclass(kw_only=True)
class Quality:
    """`quality` of a record: what was measured with noise."""

    table: str
    counts: list[list[Number]] | list[list[list[Number]]]
    deviation: Size
    examples: Count
    units: Count = 0
    figures: dict[str, tuple[Number, Number, Number] | tuple[list[Number], list[Number], list[Number]]]
    hardly_answered: list[str] = field(default_factory=list)
    perhaps_unanswered: list[str] = field(default_factory=list)
    privacy: Guarantee


@dataclass(kw_only=True)
class OnTest:
    """`on_test` of a record: what was measured on test examples without noise, next to the utility."""

    figures: dict[str, tuple[Share, Share, Share]]
    largest_class: Share
    hardly_answered: list[str]


@dataclass(kw_only=True)
class DistanceRecord:
    """`distance` of a record."""

    mean: Number
    std: Number | None = None
    values: list[Number] | None = None
    name: str = ""
    identity: str = ""
    settings: RunConfig | None = None


@dataclass(kw_only=True)
class PoolRecord:
    """`pool` of a record: how many examples of each set were chosen."""

    examples: dict[str, Count]


@dataclass(kw_only=True)
class TuningRecord:
    """`tuning` of a record: candidates and budget of the runs."""

    over: list[str]
    chosen: str
    run: str
    runs: Size
    epsilon: Size
    delta: Share


@dataclass(kw_only=True)
class StreamNames:
    """`streams` of a record."""

    code: str
    place: str


@dataclass(kw_only=True)
class RunRecord:
    """The record of a run: what result.json contains."""

    identity: str = key("the name of the run and of its folder: readable, with a digest of what can change the result")
    label: str = key("the name of the setting in tables")
    seed: Count = key("seed of weights, labels, sample and noise")
    private: str = key("the private data, by name or path")
    public: str | None = key("the public data, given or chosen; null if there is none; A+B if two sets were combined")
    model: str = key("name of the network")
    algorithm: str = key("name of the method")
    epsilon: Size | None = key("requested for training and private choice together; null without a guarantee")
    metric: str = key("how utility is measured: accuracy, balanced_accuracy or auc", "")
    utility: Share = key("utility on the test set, a fraction in [0, 1]")
    utility_interval: tuple[Share, Share] | None = key("its 95 % interval by bootstrap over test examples", None)
    on_test: OnTest | None = key(
        "of your own data, on test examples and not private: accuracy and balanced accuracy with their intervals, the "
        "share of the largest class, and the classes that are never or hardly ever answered; null otherwise",
        None,
    )
    test_examples: Count = key("number of test examples", 0)
    private_examples: Count = key("number of private examples", 0)
    private_units: Count = key("how many are protected: people if pair.unit is set, otherwise examples", 0)
    selection: dict[str, Share] = key(
        "the utility on the sets that select settings: test, validation (held-out private examples) or public", dict
    )
    weights: str = key("digest of the released weights", "")
    backbone: str | None = key("digest of the weights that features come from or training starts from, if any", None)
    content: str | None = key(
        "of your own data, the digest of all private examples, by which an export is refused if these have changed",
        None,
    )
    parameters: Count = key("number of trained parameters", 0)
    public_labels: str | None = key("of the private set, or of another; null without public data", None)
    distance: DistanceRecord | None = key(
        "the distance of the pair, not private: its name, the value for each initialisation, mean, std, m, "
        "what it read, seconds and settings; null with distance=none",
        None,
    )
    privacy: Guarantee | None = key("the guarantee in full", None)
    quality: Quality | None = key("what was measured with noise on held-out private examples, if anything was", None)
    pool: PoolRecord | None = key("what was chosen of a pool: examples of each set; absent without one", None)
    tuning: TuningRecord | None = key(
        "of pubsel tune: the words of the settings that were drawn from, those that were chosen, the name "
        "that its run would have by itself, the mean of the secret number of runs, and epsilon and delta of each; "
        "absent otherwise",
        None,
    )
    derived: dict[str, Any] | None = key("set by the method, as its learning rate; null if all is in settings", None)
    settings: RunConfig = key("every setting that can change the result; those with their default value are left out")
    seconds: Size | None = key("time of training", None)
    device: str = key("cpu or cuda", "")
    threads: Annotated[int, 1, 2**20] = key("CPU threads", 1)
    precision: str | None = key("of float32 products of private data on a GPU; null on a CPU (public data: tf32)", None)
    processes: Annotated[int, 1, 2**20] = key("processes that trained together", 1)
    streams: StreamNames | None = key("what else noise depends on: digest of the code, and the rounding", None)
    finished: str | None = key("when the run ended, in UTC", None)
    notes: list[str] = key("what was done to the data before training", list)
    numbers: Size = key(
        "version of what decides the numbers (streams, estimators, rules), after the point of how sums are rounded; "
        "absent before 1",
        0,
    )
    versions: dict[str, str | None] | None = key("versions of Python, pubsel and the numerical libraries", None)
    commit: str | None = key("commit of the code; null outside of a checkout", None)
    hardware: str = key("processor and number of cores", "")


# the meaning of each dotted key, of which the reference of the documentation is generated
RECORD = {
    key: f.metadata["about"]
    for key, f in walk(RunRecord)
    if "about" in f.metadata and key.rpartition(".")[0] in ("", "privacy")
}


@dataclass(kw_only=True)
class Rank:
    """The record of `pubsel rank`: measured distances, or a private choice."""

    identity: str
    private: str
    model: str
    settings: RankConfig
    privacy: str | Guarantee = ""
    values: dict[str, list[Number]] = field(default_factory=dict)
    chosen: str | None = None
    candidates: list[Any] = field(default_factory=list)
    seconds: Size | None = None
    seconds_private: Size | None = None
    seconds_candidate: Size | None = None
    numbers: Size = 0
    versions: dict[str, str | None] | None = None
    commit: str | None = None


@dataclass(kw_only=True)
class LossAttack:
    """The record of the loss attack on a run."""

    run: str
    auc: Share
    weights: str | None = None


@dataclass(kw_only=True)
class AttackedRow:
    """A row of the record of an attack on GSD."""

    attack: str
    private: str
    model: str
    gsd_values: str | None = None
    features: str
    private_examples: Count
    known_members: Count
    trials: Count
    members: Count
    others: Count = 0
    success: Share
    success_interval: tuple[Share, Share] | None = None
    auc: Share | None = None


@dataclass(kw_only=True)
class GsdAttack:
    """The record of an attack on GSD."""

    identity: str
    rows: list[AttackedRow]
    privacy: str


@dataclass(kw_only=True)
class AuditRecord:
    """The record of an audit."""

    identity: str
    kind: str = ""
    claimed: Size
    delta: Share = 0
    algorithm: str = ""
    private: str = ""


@dataclass(kw_only=True)
class Asked:
    """The settings.json of a run that may not have finished."""

    settings: RunConfig


@dataclass(kw_only=True)
class Named:
    """Any record."""

    identity: str


class BrokenRecord(UserError):
    """A record that cannot be read. cli.py adds to the message what it would spend to make it again."""

    def __init__(self, path: Path, why: str):
        super().__init__(f"{path} {why}: restore it, or delete it to run the cell again")
        self.folder = path.parent


def write_record(path: Path, record: dict[str, Any]) -> None:
    """Write `record` as JSON with sorted keys. `path` has either its old content or the whole record, never a part.

    UserError names the folder if it cannot be written to; nothing half-written is left there. Only its owner may read
    the file.
    """
    write_whole(path, _text(record), private=True)


def _text(record: dict[str, Any]) -> str:
    return json.dumps(record, indent=1, sort_keys=True) + "\n"


def read_record(path: Path, schema: type = RunRecord) -> dict[str, Any]:
    """Return the record at `path`. BrokenRecord names the file if it is corrupt or truncated, and the key that it lacks
    or whose value is not as `schema` says; UserError: it cannot be read."""
    try:
        if plain(path).is_dir():
            raise BrokenRecord(path, "is no file")
        if path.stat().st_size > LARGEST:
            raise BrokenRecord(path, f"is no record, it has more than {gib(LARGEST)}")
        return parsed(path.read_text(encoding="utf-8"), schema)
    except UnicodeDecodeError:
        raise BrokenRecord(path, "is no complete record") from None
    except OSError as error:
        raise unreadable(path, error, "bring it back, or fix its permissions") from None
    except ValueError as error:
        raise BrokenRecord(path, str(error)) from None


def parsed(text: str, schema: type = RunRecord) -> dict[str, Any]:
    """Return a record from its JSON; ValueError says what is wrong with it. Every number is finite."""
    try:
        record = _DECODER.decode(text)
    except (ValueError, RecursionError) as error:
        raise ValueError(str(error) if str(error).startswith(NO_RECORD) else "is no complete record") from None
    if not isinstance(record, dict):
        raise ValueError(f"{NO_RECORD}, it lacks '{fields(schema)[0].name}'")

    # the schema covers types and required keys; what depends on several keys is checked here
    why = misfit(schema, record)
    if not why and schema in (RunRecord, Rank):
        named = (f"settings.{group}.{key}" for group in ("algorithm", "distance") for key in ("name", "_target_"))
        why = next((f"'{key}' is no text" for key in named if not isinstance(at(record, key) or "", str)), "")
    if not why and schema is RunRecord:
        why = _unnamed(record, "settings.pair.public", "settings.pair.candidates") or _unstated(record)
        why = why or _misshapen(record.get("quality"))
    elif not why and schema is Rank:
        rest = ("chosen", "candidates", "privacy.epsilon") if "chosen" in record else ("values",)
        why = _unnamed(record, "settings.public", "candidates") or _lacks(record, ("settings.seed", *rest))
    if why:
        raise ValueError(f"{NO_RECORD}, {why}")
    return record


def _unnamed(record: dict[str, Any], *keys: str) -> str:
    """Return which of the keys, if there, has no names of sets: a text, or a list in which a list is sets together."""
    for key in keys:
        names = at(record, key)
        if names is not None and not (NAMES(names) or (isinstance(names, list) and all(map(NAMES, names)))):
            return f"'{key}' may not be {json.dumps(names)[:40]}"
    return ""


def _lacks(record: dict[str, Any], needed: Iterable[str]) -> str:
    """Return a message about the first of these dotted keys that a record lacks; "" if it has all."""
    return next((f"it lacks '{key}'" for key in needed if at(record, key) is None), "")


def _finite(text: str) -> float:
    if not math.isfinite(value := float(text)):
        raise ValueError(f"{NO_RECORD}, a number in it is {text[:20]}")
    return value


NAMES = fits(str | list[str])
_DECODER = json.JSONDecoder(parse_constant=_finite, parse_float=_finite)


def _unstated(record: dict[str, Any]) -> str:
    """Return what the record of a run that was trained, and not made up for a test, lacks of its guarantee."""
    if "weights" not in record and os.sep not in record["private"]:
        return ""
    # a table or a card would show these as if they had been measured
    needed = ["metric", "test_examples", "private_examples"]
    needed += [f"settings.{group}" for group in ("pair", "model", "algorithm", "privacy", "training")]
    for name in ("privacy", *(["quality.privacy"] if record.get("quality") else [])):
        needed.append(f"{name}.statement")
        if (stated := at(record, name) or {}).get("epsilon") is not None:
            rate = "sampling_rate" if "sampling_rate" in stated and name == "privacy" else "rate"
            of_one = [] if stated.get("parts") else ["steps", "noise_multiplier", "accountant", rate]
            needed += [f"{name}.{key}" for key in ("delta", *of_one)]
    return _lacks(record, needed)


def _misshapen(quality: dict[str, Any] | None) -> str:
    """Return which part of a noisy confusion matrix is not of every class, in words."""
    if not quality or quality["table"] != "confusion":
        return ""
    counts, recalls = quality["counts"], quality["figures"].get("recall of each class") or ()
    if not all(len(row) == len(counts) and not any(isinstance(count, list) for count in row) for row in counts):
        return "'quality.counts' is not square"
    if len(recalls) != 3 or not all(isinstance(part, list) and len(part) == len(counts) for part in recalls):
        return "'quality.figures' has no recall of each class"
    return ""


def as_cell(value: Any) -> Any:
    """Return a value as a cell of a CSV file that no spreadsheet runs: an apostrophe stands before a text that begins
    like a formula (OWASP, CSV injection); numbers stay. A carriage return, which csv does not quote, is a line feed."""
    if not isinstance(value, str):
        return value
    runs = _FORMULA.match(value) and not _NUMBER.fullmatch(value)
    return ("'" * bool(runs) + value).replace("\r", "\n")


def as_csv(frame: "pandas.DataFrame", about: str = "") -> str:
    """Return CSV: floats with at most six digits, so that equal tables are equal bytes. about: lines of comment before
    the head, each after "# "."""
    comment = "".join(f"# {line}\n" for line in about.splitlines())
    frame = frame.rename(columns=as_cell).map(as_cell)
    text: str = frame.to_csv(index=False, float_format="%.6g", lineterminator="\n")
    return comment + text


def write_table(frame: "pandas.DataFrame", path: Path, about: str = "") -> None:
    """Write `as_csv`, whole or not at all."""
    write_whole(path, as_csv(frame, about))


_FORMULA = re.compile(r"\s*[=+@\uff1d\uff0b\uff0d\uff20-]|[\t\r\n]")
_NUMBER = re.compile(r"[+-]?\d+(\.\d+)?([eE][+-]?\d+)?")


def is_name(text: str) -> bool:
    """Return whether a text may be the name of a record: it is no path, and does not mean this folder or another."""
    return os.sep not in text and bool(text.strip(". "))


def find(name: str, results: Path, kinds: Sequence[str] = KINDS) -> tuple[dict[str, Any], Path]:
    """Return the record that is meant, and its folder: a file, a folder with one, or a name in `results`, where it may
    also be one of the records that are kept with the code. UserError if there is none, UsageError for an empty name."""
    if not name.strip():
        raise UsageError("the name of a run is empty; pubsel runs lists them")
    path = Path(name).expanduser()
    in_results = [results / kind / name / "result.json" for kind in kinds if is_name(name)]
    for file in (path, path / "result.json", *in_results):
        if file.is_file():
            of_run = kinds == ("runs",) or file.parent.parent.name == "runs"
            return read_record(file, RunRecord if of_run else Named), file.parent

    # The records that are kept with the code come last: reading all of them takes a while.
    for record in read_records(results):
        if record["identity"] == path.name:
            return record, results / "records"

    folders = [folder for kind in kinds for folder in (results / kind).glob("*/")]
    folders += [file.parent for file in path.parent.glob("*/config.json")]  # such as what fit has written
    near = nearest(path.name, [folder.name for folder in folders])
    raise UserError(f"{name}: no such file, and no record of this name in {results}{near}; pubsel runs lists them")


def expanded(command: str, words: Sequence[str]) -> list[str]:
    """Return the words of a command, and before them those of a record's settings if like=NAME or replay=NAME is among
    them. The record may be that of a run which has not finished. UserError if there is none; UsageError if it is of
    another command, or for a word that the settings of the record leave no room for."""
    passed = {(parts := word.lstrip("+~").partition("="))[0]: parts[2] for word in words}
    kind = next((key for key in ("replay", "like") if unquoted(passed.get(key, "null")) != "null"), None)
    if kind is None or not issubclass(SCHEMAS[command], RunConfig | RankConfig):
        return list(words)

    # a replay repeats a run: only keys that cannot change its result may differ
    name, results = unquoted(passed[kind]), Path(unquoted(passed.get("results", "results"))).expanduser()
    free = neutral(SCHEMAS[command])
    for key, value in passed.items():
        if kind == "replay" and (key not in free or key == "like"):
            raise UsageError(f"{key}={value}: replay={name} has its own {key}; give no more than {', '.join(free)}")
        if key == "experiment":
            raise UsageError(f"+experiment={value}: like={name} has settings of its own: give one of the two")

    # a run that was stopped has settings and no result yet
    folder = results / "runs" / name
    started = command != "rank" and is_name(name) and (folder / "settings.json").is_file()
    if started and not (folder / "result.json").exists():
        record = read_record(folder / "settings.json", Asked)
    else:
        record, _ = find(name, results)
    settings = record.get("settings")
    if not isinstance(settings, dict) or ("pair" in settings) == (command == "rank"):
        raise UsageError(f"{kind}={name}: it is no record of pubsel {command}: name another one")
    known = {f.name for f in fields(SCHEMAS[command])}
    settings = {key: value for key, value in literal(settings, name).items() if key in known}
    return [*overrides(settings, tuple(passed)), *words]


def recorded(
    folder: Path,
    make: Callable[[], dict[str, Any]],
    schema: type = RunRecord,
    usable: Callable[[dict[str, Any]], bool] = lambda record: True,
) -> tuple[dict[str, Any], bool]:
    """Return the record of a request, and whether it was made now: a record that is in `folder` and `usable` is read;
    otherwise `make` makes it, and it is written whole.

    One process at a time makes it; the others wait, then read it. The record gets the folder's name as its `identity`,
    and says which code made it, asked before `make` runs. UserError if the folder cannot be written to, or if its
    record is not as `schema` says, that which was made included.
    """
    # A finished record is read without the lock: the folder may be read-only.
    path = folder / "result.json"
    if path.exists() and usable(record := read_record(path, schema)):
        return record, False

    with lock_folder(folder):
        if path.exists() and usable(record := read_record(path, schema)):  # it came while this process waited
            return record, False

        origin = provenance()  # of the code that runs, before anyone edits it
        record = {"identity": folder.name, **make(), **origin}
        try:
            parsed(_text(record), schema)
        except ValueError as error:
            raise UserError(f"{folder.name}: what came out {error}: check the data and the settings") from None
        write_record(path, record)

    return record, True


@contextlib.contextmanager
def lock_folder(folder: Path) -> Iterator[None]:
    """Hold a folder for one process: a second one prints a line and waits until the first has finished or died. Only
    their owner may read the files that are created in it, whatever the umask."""
    with contextlib.ExitStack() as stack:
        try:
            folder.mkdir(mode=PRIVATE_FOLDER, parents=True, exist_ok=True)
            stack.enter_context(files.locked(folder / "lock", folder.name))
        except OSError as error:
            raise cannot_write(f"to {folder}", error) from None

        clean(folder)
        guard(folder)  # an older version left files readable by everyone
        try:
            yield
        finally:
            guard(folder)


def clean(folder: Path) -> None:
    """Remove half-written files and temporary folders of killed processes. Only for the process that has the lock."""
    for path in files.left_in(folder):
        path.unlink(missing_ok=True)
    for path in folder.glob(f"{SCRATCH}*"):
        shutil.rmtree(path, ignore_errors=True)


def read_records(results: Path) -> list[dict[str, Any]]:
    """Read every results/runs/*/result.json, and of results/records (kept with the code) those of other cells:
    *.json, and *.jsonl.gz with one record per line. Sorted by identity. One that is none is left out, with a line."""
    runs = Path(results) / "runs"
    records = [*readable(sorted(runs.glob("*/result.json")))]

    with_code = Path(results) / "records"
    kept = [*readable(sorted(with_code.glob("*.json")))]
    for path in sorted(with_code.glob("*.jsonl.gz")):
        kept += _read_lines(path)

    # A run of this machine takes the place of the record that is kept with the code.
    names = {record["identity"] for record in records}
    records += [record for record in kept if record["identity"] not in names]
    return sorted(records, key=lambda record: record["identity"])


def readable(paths: Iterable[Path], schema: type = RunRecord) -> Iterator[dict[str, Any]]:
    """Yield the records at some paths; a message names each file that is not a record, once per process."""
    for path in paths:
        try:
            yield read_record(path, schema)
        except UserError as error:
            leave_out(str(error))


@cache
def leave_out(why: str) -> None:
    """Print that a file is left out, once per process."""
    say(f"left out: {why}")


def _read_lines(path: Path) -> list[dict[str, Any]]:
    """Return the records of a file with one record per line; lines that are not records are left out."""
    records = []
    try:
        with gzip.open(plain(path), "rt", encoding="utf-8") as lines:
            for number, line in enumerate(lines, 1):
                try:
                    records.append(parsed(line))
                except ValueError as error:
                    leave_out(f"{path}, line {number}, {error}: restore it")
    except (OSError, ValueError, EOFError, zlib.error) as error:
        leave_out(str(unreadable(path, error, "restore it")))
    return records


def at(values: Any, key: str) -> Any:
    """Return the value at a dotted key; None if there is none."""
    for part in key.split("."):
        values = values.get(part) if isinstance(values, dict) else None
    return values


def provenance() -> dict[str, Any]:
    """Return where a number comes from: `numbers` (NUMBERS), `versions` (None: not installed), `commit` (None outside a
    checkout) and `hardware`.

    No host name, no user name and no path.
    """
    hardware = f"{processor()}, {os.cpu_count()} cores"
    return {"numbers": NUMBERS, "versions": {**_versions()}, "commit": _commit(_HERE.parent), "hardware": hardware}


@cache
def _versions() -> dict[str, str | None]:
    versions: dict[str, str | None] = {"python": platform.python_version(), "pubsel": __version__}
    for package in ("torch", "numpy", "scipy", "scikit-learn", "opacus", "prv-accountant"):
        try:
            versions[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            versions[package] = None
    return versions


def guarantee_kind(record: dict[str, Any]) -> str:
    """Return what a record's guarantee may be called: valid, weak (valid, with a delta above 1/n) or none."""
    statement = record.get("privacy") or {}
    if statement.get("valid") is not True:
        return "none"

    # records that are older than the word "weak" lack it, so it is derived as well
    n = record.get("private_units") or record.get("private_examples")
    weak = n is not None and is_weak(statement.get("delta") or 0.0, n)
    return "weak" if statement.get("weak") or weak else "valid"


def outdated(record: Mapping[str, Any]) -> str:
    """Return why a record's numbers cannot be had from this program, and the remedy; "" if they can."""
    version = record.get("numbers", 0)
    if int(version) == int(NUMBERS) and version >= SINCE.get(str(record.get("algorithm")), 0):
        return ""
    of = [f"pubsel {(record.get('versions') or {}).get('pubsel') or 'of unknown version'}"]
    of += [f"commit {record['commit'][:10]}"] if record.get("commit") else []
    return (
        f"made by version {version} of what decides numbers, this is version {NUMBERS}: install {', '.join(of)}, or "
        "run it anew"
    )


def code(*used: type) -> str:
    """Return a digest of the program: every source file of the package, the versions of what computes and draws
    numbers, and, of classes from elsewhere (a user's own algorithm), their files and what else is loaded from the same
    folder or package.

    Two programs that differ in a line never share noise. A class whose file cannot be read has no digest that would
    repeat.
    """
    parts: list[str | bytes] = [_package()]
    classes = {base for cls in used for base in cls.__mro__}

    for cls in sorted(classes, key=lambda base: base.__qualname__):
        top = cls.__module__.partition(".")[0]
        if cls is object or top in ("builtins", "typing", _HERE.name):
            continue
        # a class without a file, as of a notebook, never has the noise of another one
        sources = _sources(cls.__module__) or secrets.token_bytes(16)
        parts += [cls.__qualname__, sources]

    return files.digest(parts)


@cache
def _package() -> str:
    """Return a digest of the package as it was when this process first asked, before anyone edits it."""
    sources = (f"{path.relative_to(_HERE)}\0".encode() + path.read_bytes() for path in sorted(_HERE.rglob("*.py")))

    # What computes and draws numbers decides the noise too.
    versions = (f"{package} {importlib.metadata.version(package)}" for package in ("torch", "numpy"))
    return files.digest((*sources, *versions))


def _sources(module: str) -> bytes:
    """Return a digest of a loaded module's file, and of those of the same folder or package; empty if it has no
    file."""
    # a module may be loaded by another thread while this one looks
    paths = {name: getattr(loaded, "__file__", None) or "" for name, loaded in list(sys.modules.items())}
    if not paths.get(module):
        return b""

    # A user's class may call functions of modules next to its own.
    package = module.partition(".")[0]
    folder = Path(paths[module]).parent
    near = {file for name, file in paths.items() if name.partition(".")[0] == package or Path(file).parent == folder}

    return bytes.fromhex(files.digest(Path(file).read_bytes() for file in sorted(near) if file.endswith(".py")))


def _commit(checkout: Path) -> str | None:
    """Return HEAD of `checkout`, with "-dirty" if pubsel/ or conf/ differ from it; None if it is not the top of a
    checkout."""
    if not (checkout / ".git").exists():
        return None  # installed somewhere below another project's checkout
    status = ["git", "--no-optional-locks", "-C", str(checkout), "status", "--porcelain=v2", "--branch"]
    try:
        done = subprocess.run([*status, "--", "pubsel", "conf"], capture_output=True, text=True, check=True, timeout=30)
    except (OSError, subprocess.SubprocessError):
        return None
    # the first lines are about the branch
    lines = done.stdout.splitlines()
    head = next((line.split()[2] for line in lines if line.startswith("# branch.oid ")), "(initial)")
    dirty = any(not line.startswith("#") for line in lines)
    return None if head == "(initial)" else f"{head}-dirty" if dirty else head


def processor() -> str:
    """Return the name of the processor."""
    try:
        name = re.search(r"^model name\s*:\s*(.+)$", Path("/proc/cpuinfo").read_text(), re.MULTILINE)
    except OSError:
        name = None
    return name[1].strip() if name else platform.processor() or platform.machine()
