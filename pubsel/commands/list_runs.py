"""`pubsel runs`: what is in results/runs, in which state, and by which command it was made; its deletion; and what all
releases of private data spent, of which budget.

A run's folder contains settings.json (its settings), lock (held while a process works on it), log.txt (what it
printed), checkpoint.pt while it is not finished, and in the end model.pt and result.json. This file imports no torch.
"""

import contextlib
import json
import shutil
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pubsel import records
from pubsel.files import hold, plain
from pubsel.messages import UsageError, UserError, aligned, at_most, duration
from pubsel.privacy import ledger
from pubsel.records import at
from pubsel.settings import command_line
from pubsel.settings.identity import default_of, is_path
from pubsel.settings.keys import RunConfig, RunsConfig, public_sets
from pubsel.settings.methods import method_keys
from pubsel.settings.schema import keys_of, leaves, nearest

STATES = {
    "finished": "it has a record",
    "stale": "finished, but its numbers are of another version, or its weights or data files are gone",
    "running": "a process holds its lock",
    "failed": "it ended with an error",
    "unfinished": "it was stopped; the same command resumes it",
    "corrupt": "its record cannot be read",
}
COLUMNS = ("name", "state", "algorithm", "private", "public", "epsilon", "utility", "age")
KEYS = "name state identity algorithm private public model label seed epsilon utility metric device commit".split()
RECENT = 8  # lines of the log that are shown
BAR = 20  # characters of the longest bar


@dataclass
class Run:
    """One folder of results/runs."""

    folder: Path
    state: str  # one of STATES
    why: str = ""  # of a state that needs it
    record: dict[str, Any] = field(default_factory=dict)  # result.json, or else settings.json, or nothing
    age: float = 0.0  # seconds since anything was written

    @property
    def name(self) -> str:
        return self.folder.name

    def value(self, key: str) -> Any:
        """Return what the run has at a key of its record, or of its settings such as epsilon or training.epochs."""
        if key in ("name", "state"):
            return getattr(self, key)
        if key in self.record and key != "settings":
            return self.record[key]
        # short names are those of the table; a default is left out of a record
        settings = self.record.get("settings", {})
        names = {"private": "pair.private", "public": "pair.public", "algorithm": "algorithm.name"}
        key_of = names.get(key, f"{key}.name" if key == "model" else key)
        value = at(settings, key_of)
        if value is None and settings:
            value = default_of(key_of)
        return "+".join(value) if key == "public" and isinstance(value, list) else value


def run(settings: RunsConfig) -> str:
    """Do `pubsel runs [list|show NAME|delete NAME|budget DATA] [key=value ...]`; return what to print. UsageError for
    words that are none of these."""
    if settings.action == "budget":
        if settings.where:
            raise UsageError(f"{settings.where[0]}: pubsel runs budget takes a name of private data, or a part of it")
        return budget(settings)

    # a folder in which nothing was started is no run
    folder = Path(settings.results) / "runs"
    folders = [path for path in sorted(folder.glob("*/")) if path.name != "." and not empty(path)]
    entries = [look(path) for path in folders]
    if settings.name is not None:
        part, whole = meant(settings), settings.action == "delete"
        entries = [entry for entry in entries if (part == entry.name if whole else part in entry.name)]
    check_keys(settings.where, entries)
    entries = [entry for entry in entries if all(matches(entry, word) for word in settings.where)]

    match settings.action:
        case "list":
            every = settings.name is None and not settings.where
            return listing(entries, folder) + (spent_on_all(Path(settings.results)) if every else "")
        case "show":
            return show(only(entries, settings, folder))
        case "delete":
            if (settings.name is None and not settings.where) != settings.all:
                raise UsageError("pubsel runs delete: name a run, or say which: state=failed; or give all=true alone")
            return delete(entries, settings.yes)
    near = nearest(settings.action, ("list", "show", "delete", "budget"))
    raise UsageError(
        f"action={settings.action}{near}: pubsel runs takes list, show NAME, delete NAME or budget DATA, and key=value"
    )


def meant(settings: RunsConfig) -> str:
    """Return the name of a run, or if nothing is deleted, a part of it. UsageError if it is neither."""
    typed = settings.name or ""
    part = typed if settings.action == "delete" else typed.rstrip("/").split("/")[-1]
    if not records.is_name(part):
        raise UsageError(f"name={typed}: no name of a run; pubsel runs lists them")
    return part


def empty(folder: Path) -> bool:
    """Return whether nothing was started here: the folder contains nothing but a lock that nobody holds."""
    return not any(path.name != "lock" for path in folder.iterdir()) and not held(folder)


def held(folder: Path) -> bool:
    """Return whether a process works on a run. A run that starts in this very moment prints that it waits, and goes
    on."""
    if not (folder / "lock").exists():
        return False
    try:
        lock = hold(folder / "lock")
    except OSError:  # read-only: nobody can hold it
        return False
    if lock is not None:
        lock.release()
    return lock is None


def look(folder: Path) -> Run:
    """Return what a run's folder says of it."""
    try:
        settings = records.read_record(folder / "settings.json", records.Asked)
    except UserError:
        settings = {}  # of an older version, or killed before it was written

    age = max(0.0, time.time() - max(path.stat().st_mtime for path in (folder, *folder.iterdir())))
    if (folder / "result.json").exists():
        try:
            record = records.read_record(folder / "result.json")
        except UserError as error:
            return Run(folder, "corrupt", str(error), settings, age)
        why = stale(folder, record)
        return Run(folder, "stale" if why else "finished", why, record, age)

    # no record yet: the lock and the end of the log, without its time, tell why
    running = held(folder)
    ending = (log_lines(folder) or [""])[-1].partition("  ")[2].strip()
    if running:
        return Run(folder, "running", ending, settings, age)
    if ending.startswith(records.FAILED):
        return Run(folder, "failed", ending.removeprefix(records.FAILED), settings, age)
    why = "from a checkpoint" if (folder / "checkpoint.pt").exists() else ""
    return Run(folder, "unfinished", why, settings, age)


def stale(folder: Path, record: dict[str, Any]) -> str:
    """Return why a record is not what the command would give today; empty if it is."""
    # a record is stale if its data, its weights or the program are other ones by now
    pair = record["settings"].get("pair", {})
    data = [name for name in (pair.get("private"), *public_sets(pair.get("public"))) if name]
    gone = [name for name in data if is_path(name) and not Path(name).expanduser().exists()]
    if not (folder / "model.pt").exists():
        gone.append("model.pt")
    other = records.outdated(record)
    return "; ".join([other] * bool(other) + [f"{name} is gone" for name in gone])


def log_lines(folder: Path) -> list[str]:
    """Return the lines of a run's log."""
    try:
        return plain(folder / "log.txt").read_text(encoding="utf-8", errors="replace").splitlines()
    except (OSError, UserError):
        return []


def check_keys(where: list[str], entries: list[Run]) -> None:
    """Raise UsageError for a key that no record and no settings have, with the nearest that exists: otherwise the
    answer would be that there is no such run."""
    known = {*keys_of(RunConfig), *method_keys(), *KEYS}
    for entry in entries:
        known |= {*entry.record, *(key for key, _ in leaves(entry.record.get("settings", {})))}
    for word in where:
        key = word.partition("=")[0]
        if "=" in word and key not in known:
            raise UsageError(f"unknown key {key}{nearest(key, known)}; pubsel runs takes those of a record")


def matches(entry: Run, word: str) -> bool:
    """Return whether a run has one of the values in key=value,value. state=finished holds for stale runs too.
    UsageError for a word that is not so."""
    # a value may be one of several, and is compared as a number if it is one
    key, equals, values = word.partition("=")
    if not equals:
        raise UsageError(f"{word}: write key=value, such as algorithm=gep")
    if key == "state" and any(value not in STATES for value in values.split(",")):
        raise UsageError(f"{word}: a state is one of {', '.join(STATES)}")
    have = entry.value(key)
    typed = values.split(",")
    stale_too = key == "state" and have == "stale" and "finished" in typed
    return stale_too or any(same(have, value) for value in typed)


def same(have: Any, typed: str) -> bool:
    """Return whether a value is what was typed: 2 is 2.0, null is none."""
    if typed == "null" or have is None:
        return typed in ("null", "none") and have is None
    try:
        return float(have) == float(typed)
    except (TypeError, ValueError):
        return (have if isinstance(have, str) else json.dumps(have)) == typed


def only(entries: list[Run], settings: RunsConfig, folder: Path) -> Run:
    """Return the single run that is meant; UsageError if there is none, or several are."""
    if settings.name is None:
        raise UsageError("pubsel runs show NAME: a name, or a part of it that no other run has")

    # a whole name counts, even if it is part of others
    exact = [entry for entry in entries if entry.name == settings.name.rstrip("/").split("/")[-1]]
    if len(entries) != 1 and len(exact) != 1:
        names = ", ".join(entry.name for entry in entries[:5])
        what = f"{len(entries)} runs, such as {names}: give more of it" if entries else f"no run in {folder}"
        raise UsageError(f"{settings.name}: {what}; pubsel runs lists them")
    return exact[0] if exact else entries[0]


def listing(entries: list[Run], folder: Path) -> str:
    """Return a line for each run, and how many there are in each state."""
    if not entries:
        return f"no such run in {folder}"
    lines = aligned([COLUMNS, *(_row(entry) for entry in entries)])
    # how many there are in each state, and why some are not well
    counts = {state: sum(entry.state == state for entry in entries) for state in STATES}
    numbers = ", ".join(f"{n} {state}" for state, n in counts.items() if n)
    lines += ["", f"{len(entries)} runs: {numbers}"]
    needy = [entry for entry in entries if entry.state in ("failed", "corrupt")]
    lines += [f"  {entry.name}: {entry.why}" for entry in needy]
    return "\n".join(lines)


def spent_on_all(results: Path) -> str:
    """Return what was drawn from each private data set by all runs that there ever were; "" if nothing is known."""
    lines = ledger.overview(results)
    if not lines:
        return ""
    head = f"drawn in all from the private data, deleted runs included ({results / 'ledger'}; basic composition).\n"
    head += "A ledger is of one content in one results folder: nearly equal data, and other folders, are not added up:"
    return "\n".join(["", "", head, *(f"  {line}" for line in lines)])


def budget(settings: RunsConfig) -> str:
    """Return for each private data set what its releases spent, together and over time, and what is left."""
    results, part = Path(settings.results), settings.name or ""
    texts = [_budget_of(lines, cap, results) for lines, cap in ledger.with_caps(results) if part in _names(lines)]
    return "\n\n".join(texts) or f"no release{f' of {part}' * bool(part)} is in {results / 'ledger'}"


def _names(lines: list[ledger.Line]) -> str:
    return ", ".join(dict.fromkeys(line["private"] for line in lines))


def _budget_of(lines: list[ledger.Line], cap: ledger.Cap | None, results: Path) -> str:
    from pubsel.privacy.composition import sums_text  # and with it scipy: half a second

    units = ledger.per_unit(lines)
    text = [_names(lines), *(f"for one {unit}: {sums_text(of_unit)}" for unit, of_unit in units.items())]
    text += [ledger.OF_UNITS] if len(units) > 1 else []
    text.append(ledger.left_text(lines, cap) or "no budget: budget=EPSILON of the next command sets one")

    # over time, as it counts for the first unit; of a run the larger of its two sides
    each, total, rows = dict[str, list[ledger.Line]](), 0.0, list[tuple[Any, ...]]()
    for counted in ledger.by_time(next(iter(units.values()))):
        of_run = each.setdefault(counted["cell"], [])
        total -= ledger.cost_of(of_run).epsilon
        of_run.append(counted)
        total += ledger.cost_of(of_run).epsilon
        rows.append((counted["when"][:16].replace("T", " "), counted["what"], counted, total))
    most = max(total, cap.epsilon if cap else 0.0)

    table: list[tuple[str, ...]] = [("when (UTC)", "what", "epsilon", "delta", "sum", "", "run")]
    for when, what, counted, now in rows:
        costs = (at_most(counted["epsilon"]), at_most(counted["delta"]), at_most(now))
        gone = {"deleted": ", deleted", ledger.UNLISTED: ", in its record alone"}.get(counted["state"], "")
        bar = ("#" * round(BAR * now / most)).ljust(BAR, ".")
        table.append((when, what, *costs, bar, f"{counted['cell']}{gone}"))
    return "\n  ".join([*text, *aligned(table)])


def _row(entry: Run) -> tuple[str, ...]:
    values = [entry.value(key) for key in ("algorithm", "private", "public")]
    epsilon, utility = entry.value("epsilon"), entry.record.get("utility")
    return (
        entry.name,
        entry.state,
        *("-" if value is None else str(value) for value in values),
        "-" if epsilon is None else f"{float(epsilon):g}",
        "-" if utility is None else f"{100 * utility:.2f} %",
        duration(entry.age),
    )


def show(entry: Run) -> str:
    """Return a run's state, figures, guarantee, files, and the command that makes or resumes it."""
    why = f": {entry.why}" if entry.why else ""
    lines = [entry.name, f"  state: {entry.state}, {STATES[entry.state]}{why}"]
    if "utility" in entry.record:
        low, high = entry.record.get("utility_interval") or (None, None)
        interval = f" [{100 * low:.2f}, {100 * high:.2f}]" if low is not None and high is not None else ""
        lines.append(f"  {entry.record.get('metric', 'utility')}: {100 * entry.record['utility']:.2f} %{interval}")
        lines.append(f"  privacy: {at(entry.record, 'privacy.statement')}")

    # what is in the folder, and the command that makes it again
    files = sorted(path for path in entry.folder.iterdir() if path.name != "lock")
    sizes = [f"{path.name} ({path.stat().st_size:,} bytes)" for path in files]
    lines.append("  files: " + ", ".join(sizes))
    if entry.record.get("settings"):
        results = str(entry.folder.parent.parent)
        changes = {} if results == "results" else {"results": results}
        command = command_line.command({**entry.record, "identity": entry.name}, changes)
        command = "that of pubsel tune, as it was typed" if "tuning" in entry.record else command
        lines += ["  command:", f"    {command}"]

    if recent := log_lines(entry.folder)[-RECENT:]:
        lines += ["  end of its log:", *(f"    {line}" for line in recent)]
    return "\n".join(lines)


def delete(entries: list[Run], yes: bool) -> str:
    """Delete runs, after the user was shown what it spends to run them again and has typed the word; never one that a
    process works on. UsageError if nobody can type it."""
    if not entries:
        return "no such run: nothing is deleted"

    for entry in entries:
        print(f"{entry.name}  {entry.state}{ledger.again(entry.folder, 'to run it again')}", file=sys.stderr)
    if not yes:
        if not sys.stdin.isatty():
            raise UsageError("pubsel runs delete: nothing is deleted without yes=true")
        if input(f"Type delete to delete these {len(entries)} runs: ") != "delete":
            return "nothing is deleted"

    kept = [entry.name for entry in entries if not deleted(entry.folder)]
    text = f"{len(entries) - len(kept)} runs deleted"
    return text + (f"; kept, since a process works on them: {', '.join(kept)}" if kept else "")


def deleted(folder: Path) -> bool:
    """Delete all that a run has written, the record first, so that no part is taken for the whole. Return False if
    another process holds its lock. The lock stays: a process that waits for it must not hold another file than the
    next. UserError if the folder cannot be deleted."""
    record = None
    try:
        lock = hold(folder / "lock")
    except OSError as error:
        raise UserError(f"cannot delete {folder}: {error.strerror}; check permissions") from None
    if lock is None:
        return False

    try:
        with contextlib.suppress(UserError):
            record = records.read_record(folder / "result.json")
        ledger.mark_deleted(folder.parent.parent, folder.name, record)  # before what it is known by is gone
        (folder / "result.json").unlink(missing_ok=True)
        for path in (path for path in folder.iterdir() if path.name != "lock"):
            shutil.rmtree(path) if path.is_dir() else path.unlink()
    except OSError as error:
        raise UserError(f"cannot delete {folder}: {error.strerror}; check permissions") from None
    finally:
        lock.release()
    return True
