"""All releases of each private data set: RESULTS/ledger, which outlives the runs.

There is one file per private content, DIGEST.jsonl, with one line per release: a training, a first release, a choice of
public data, a DP-GSD. The line is written before the first noise of the release is drawn, so that a crash can only
count too much. A line is never changed, and a deleted run stays in. DIGEST is keyed by 32 random bytes in `key`: the
name of a file confirms its data to nobody who lacks `key`.

A release with noise from the operating system is new each time that it begins without a checkpoint. Seeded noise is
named by everything that decides it: the same noise on the same data is the same release, and is listed once.

`budgets` there has a line for each cap on what may be spent, by command: the last one of a data set holds. A release
that would exceed it is refused under the same lock, before its line and its noise. The sum that is compared is that of
epsilons, which is a privacy filter: it holds however earlier outputs decided later releases (Rogers et al. 2016,
arXiv:1605.08294). That of deltas is capped with budget=[EPSILON,DELTA].

The ledger omits computations without noise (training without a guarantee, distances other than DP-GSD, attacks). This
file imports no torch.
"""

import hashlib
import json
import math
import os
import secrets
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, NamedTuple

from pubsel.files import append, guard, locked, plain, unreadable, write_whole
from pubsel.messages import UsageError, UserError, at_least, at_most, cannot_write
from pubsel.records import Count, Rank, Share, Size, at, leave_out, parsed, read_record, readable
from pubsel.settings.identity import is_path

KEY_BYTES = 32
OS_NOISE = "operating system"
MEASUREMENT = "measurement"  # of held-out examples
UNLISTED = "in a record alone"  # the kind of a release, and the state of its line, if no ledger contains it
ROUNDING = 1e-6  # of a sum of epsilons
SUMMED = 1e-12  # rounding of a sum in another order
UNCHANGED = "; nothing is released, so budget=... sets none"
BUDGETS = "budgets"  # the file of the caps
PERSON = ", for a person"  # how the words of a release go on, if people are protected
OF_UNITS = "a release for an example says nothing of a person; one for a person counts twice for an example"
EXAMPLE = "example"  # the unit of all others
PLACE: ContextVar[Path | None] = ContextVar("PLACE", default=None)  # in place of the results folder of a release

Line = dict[str, Any]


class Entry(NamedTuple):
    """A planned release of private data. cell: the identity of its run; private: the data as the user names it; what:
    its kind, in a word. key: a digest of all that decides its seeded noise; None: noise of the operating system.
    original: a digest of all examples as they were decoded, in any order; cap: one to set for these data; rate, steps,
    noise_multiplier: of Gaussian noise, if it is known to be that."""

    cell: str
    private: str
    what: str
    epsilon: float
    delta: float
    key: str | None
    original: str | None = None
    cap: "Cap | None" = None
    rate: float | None = None
    steps: int | None = None
    noise_multiplier: float | None = None


class Cap(NamedTuple):
    """The most that all releases of one data set may spend. delta None: no cap on that."""

    epsilon: float
    delta: float | None = None

    @classmethod
    def of(cls, value: Any) -> "Cap | None":
        """Return the cap of a key budget=EPSILON or budget=[EPSILON,DELTA]; None: no key. UsageError for any other."""
        if value is None:
            return None
        try:
            cap = cls(*map(float, [value] if isinstance(value, float | int | str) else value))
        except (TypeError, ValueError):
            cap = cls(-1.0)
        if not (0 < cap.epsilon < math.inf and 0 <= (cap.delta or 0.0) < 1):
            raise UsageError(f"budget={value}: give the most epsilon, such as budget=4, or [EPSILON,DELTA]")
        return cap

    def __str__(self) -> str:
        return f"{self.epsilon:.4g}" if self.delta is None else f"[{self.epsilon:.4g},{self.delta:.4g}]"


class Spent(NamedTuple):
    """Total cost of several releases."""

    epsilon: float
    delta: float
    releases: int


def cost_of(lines: Iterable[Line]) -> Spent:
    """Return the sum of the epsilons and of the deltas of all releases (basic composition); of each run the larger of
    its two sides counts."""
    # training and measurement read different examples, so only the larger of the two counts
    runs = sides(lines).values()

    def total(key: str) -> float:
        return sum((max(sum(line[key] for line in side) for side in run) for run in runs), 0.0)

    return Spent(total("epsilon"), total("delta"), sum(len(side) for run in runs for side in run))


def protected(line: Line) -> str:
    """Return who a release protects: EXAMPLE, or person (COLUMN)."""
    _, person, column = str(line["what"]).partition(PERSON)
    return f"person{column}" if person else EXAMPLE


def per_unit(lines: Iterable[Line]) -> dict[str, list[Line]]:
    """Return for each protected unit the lines that add up for it; of several kinds of units, an image comes first.

    A release that protects images says nothing of people. One that protects people, each with all their images, counts
    twice for an image: with that image as nothing, the person is exchanged for another, which is two steps between
    neighbours (Vadhan 2017, The Complexity of Differential Privacy, Lemma 2.2)."""
    units: dict[str, list[Line]] = {EXAMPLE: []}
    for line in lines:
        unit = protected(line)
        if unit != EXAMPLE:
            units.setdefault(unit, []).append(line)
            delta = min(1.0, line["delta"] * (1 + math.exp(min(line["epsilon"], 700.0))))
            line = line | {"epsilon": 2 * line["epsilon"], "delta": delta, "rate": None}
        units[EXAMPLE].append(line)

    # of people of one kind alone, that for an image is not shown
    if len(units) == 2 and all(protected(line) != EXAMPLE for line in units[EXAMPLE]):
        del units[EXAMPLE]
    return units if units.get(EXAMPLE, True) else {}


def sides(lines: Iterable[Line]) -> dict[str, tuple[list[Line], list[Line]]]:
    """Return the last line of each release by run, on two sides: a run measures other examples than it trains on."""
    runs: dict[str, tuple[list[Line], list[Line]]] = {}
    for line in _latest(lines).values():
        runs.setdefault(line["cell"], ([], []))[is_measurement(line)].append(line)
    return runs


def is_measurement(line: Line) -> bool:
    """Return whether a release is of held-out examples, or of held-out people (`cell.Streams`)."""
    return str(line["what"]).partition(",")[0] == MEASUREMENT


def _latest(lines: Iterable[Line]) -> dict[str, Line]:
    """Return the last line of each release."""
    return {line["release"]: line for line in lines}


def by_time(lines: Iterable[Line]) -> list[Line]:
    """Return each release once, as it is now, with the time when it began; the earliest first."""
    lines = list(lines)
    began = {line["release"]: line["when"] for line in reversed(lines)}
    return sorted(
        (line | {"when": began[name]} for name, line in _latest(lines).items()), key=lambda line: line["when"]
    )


@contextmanager
def kept_in(results: Path | None) -> Iterator[None]:
    """Write into the ledger in `results` inside, and read it, in place of that of a run's results folder. None: no
    change."""
    before = PLACE.set(results or PLACE.get())
    try:
        yield
    finally:
        PLACE.reset(before)


def note(results: Path | str, content: str, release: Entry) -> None:
    """Write a release of the private data with fingerprint `content` to the ledger, before its first noise is drawn.

    A release at epsilon 0 and delta 0 reads nothing, and is left out. UserError if the line cannot be written, or if
    the release would exceed the budget of the data: then nothing may be drawn.
    """
    if not release.epsilon and not release.delta:
        return

    # the line comes before the noise: a crash between the two counts too much, never too little
    folder = (PLACE.get() or Path(results)) / "ledger"
    with _held(folder):
        secret = _key(folder)
        path = folder / f"{_digest(secret, content)}.jsonl"

        # The same seeded noise on the same data is the same release; noise of the operating system never is.
        name = secrets.token_hex(16)
        if release.key is not None:
            name = _digest(secret, f"{content}\0{release.what}\0{release.key}")

        known = _latest(read(path)).get(name)
        if known is None or known["state"] != "begun":
            line = _line(secret, release) | {"release": name, "state": "begun"}
            _admit(folder, {path.stem} | _keys([line]), line, release.cap)
            _append(path, line)


def check_planned(results: Path | str, release: Entry) -> None:
    """Raise UsageError if a command that releases this in all would exceed the budget of its private data. What its run
    has begun is part of it: it may be resumed. A budget of its key is kept."""
    folder = (PLACE.get() or Path(results)) / "ledger"
    if release.cap is None and not (folder / BUDGETS).exists():
        return

    with _held(folder):
        line = _line(_key(folder), release) | {"release": "planned", "state": "planned"}
        lines = _of(_parts(folder, stating(folder.parent), None), _keys([line]))[1]
        begun = [
            other for other in _latest(lines).values() if (other["cell"], other["state"]) == (line["cell"], "begun")
        ]
        spent = cost_of(begun)
        line["epsilon"] = max(0.0, line["epsilon"] - spent.epsilon)
        line["delta"] = max(0.0, line["delta"] - spent.delta)
        _admit(folder, _keys([line]), line, release.cap)


def _line(secret: bytes, release: Entry) -> Line:
    left_out = {"key", "cap", "original"}
    line = {key: value for key, value in release._asdict().items() if value is not None and key not in left_out}
    line |= _recognised_by(secret, release.private, release.original)
    return line | {"noise": OS_NOISE if release.key is None else "seeded"}


def _recognised_by(secret: bytes, private: str, original: str | None) -> Line:
    """Return keyed digests of a path, as it is from the folder of this command and of where its links lead now, and of
    all examples, which a line has next to the name of its data."""
    known: Line = {}
    if is_path(private):
        path = os.path.abspath(os.path.expanduser(private))
        known["paths"] = sorted({_digest(secret, f"path\0{each}") for each in (path, os.path.realpath(path))})
    if original is not None:
        known["data"] = _digest(secret, f"original\0{original}")
    return known


def _admit(folder: Path, keys: set[str], line: Line, cap: Cap | None) -> None:
    """Set a cap for the data with these keys, if one is given, and raise UsageError if a line would exceed the cap that
    holds."""
    if cap is None and not (folder / BUDGETS).exists():
        return
    every, lines = _of(_parts(folder, stating(folder.parent), None), keys)
    holds = _cap(folder, every)
    if cap is not None and cap != holds:
        # no path that nobody has typed: the digests of paths are among the keys
        names = sorted(key for key in keys if not is_path(key))
        _append(folder / BUDGETS, {"private": line["private"], "keys": names, **cap._asdict()})
        holds = cap
    if holds is None:
        return

    # For each unit by itself. What adds nothing is no new release, even if a lower cap was set since.
    before = {unit: cost_of(of_unit) for unit, of_unit in per_unit(lines).items()}
    for unit, of_unit in per_unit([*lines, line]).items():
        was, now = before.get(unit, Spent(0.0, 0.0, 0)), cost_of(of_unit)
        for part, most in holds._asdict().items():
            spent, total = getattr(was, part), getattr(now, part)
            if most is not None and total > most * (1 + ROUNDING) and total > spent * (1 + SUMMED):
                need = holds._replace(**{part: float(at_most(total))})
                raise UsageError(
                    f"budget: {line['private']} has spent {part} {at_most(spent)} of {most:.4g} for one {unit}; this "
                    f"would add {at_most(total - spent)}, and {at_least(most - spent)} is left: lower it, or set "
                    f"budget={need} (pubsel runs budget lists the releases); nothing of it was drawn"
                )


def mark_deleted(results: Path | str, cell: str, record: Mapping[str, Any] | None = None) -> None:
    """Mark the releases of a run as deleted. They stay spent, as do those that only its `record` states. UserError if
    a ledger cannot be read."""
    folder = Path(results) / "ledger"
    known = [line for path in folder.glob("*.jsonl") for line in read(path) if line["cell"] == cell]
    more = lacking(known, [record] if record else [])
    if not known and not more:
        return

    with _held(folder):
        # Without its record nothing else would show these releases.
        for line in more:
            _append(folder / f"{_digest(_key(folder), line['private'])}.jsonl", line | {"state": "begun"})
        for path in folder.glob("*.jsonl"):
            lines = [line for line in read(path) if line["cell"] == cell]
            for line in _latest(lines).values():
                if line["state"] != "deleted":
                    _append(path, line | {"state": "deleted"})


@dataclass(kw_only=True)
class _Line:
    """A line of a ledger."""

    cell: str
    private: str
    what: str
    epsilon: Size
    delta: Share
    release: str
    noise: str
    state: str
    when: str
    data: str | None = None
    rate: Share | None = None
    steps: Count | None = None
    noise_multiplier: Size | None = None
    paths: list[str] | None = None


@dataclass(kw_only=True)
class _Budget:
    """A line of BUDGETS."""

    private: str
    keys: list[str]
    epsilon: Size
    delta: Share | None = None
    when: str


def read(path: Path, damaged: Callable[[str], object] | None = None, schema: type = _Line) -> list[Line]:
    """Return the lines of a ledger, or of another file of lines. A last line that was cut short is left out: nothing
    was drawn after it. Any other damage raises UserError, or is left out and passed to `damaged` as a message."""

    def fail(error: UserError) -> None:
        if damaged is None:
            raise error from None
        damaged(str(error))

    lines, content = [], b""
    try:
        content = plain(path).read_bytes() if path.exists() else b""
    except OSError as error:
        fail(unreadable(path, error, "check permissions"))

    for text in filter(bytes.strip, content.rpartition(b"\n")[0].split(b"\n")):
        try:
            line = parsed(text.decode(), schema)
            lines.append(line | {key: float(line[key]) for key in ("epsilon", "delta") if line[key] is not None})
        except ValueError:
            fail(UserError(f"{path} does not read, so what was spent is unknown: restore it, or move it away"))
    return lines


def stating(results: Path | str) -> list[dict[str, Any]]:
    """Return the records in a results folder that state a release of private data."""
    runs = sorted((Path(results) / "runs").glob("*/result.json"))
    ranks = sorted((Path(results) / "ranks").glob("*/result.json"))
    return [*readable(runs), *readable(ranks, Rank)]


def lacking(lines: Iterable[Line], records: Iterable[Mapping[str, Any]]) -> list[Line]:
    """Return the privacy that records state beyond the lines of a ledger, as lines of the same kind: of runs whose
    lines were lost or changed."""
    known = sides(lines)
    more = []
    for record in records:
        for what, key in ((UNLISTED, "privacy"), (MEASUREMENT, "quality.privacy")):
            stated = at(record, key)
            if not isinstance(stated, dict) or not (stated.get("epsilon") or stated.get("delta")):
                continue

            name = record["identity"]
            listed = known.get(name, ([], []))[what == MEASUREMENT]
            excess = {
                part: max(0.0, stated.get(part) or 0.0) - sum(line[part] for line in listed)
                for part in ("epsilon", "delta")
            }
            if any(left > ROUNDING * stated[part] for part, left in excess.items() if stated.get(part)):
                unit = f", for a person ({stated['unit']})" if stated.get("unit") else ""
                line = {"cell": name, "private": record["private"], "what": f"{what}{unit}"}
                line |= {part: max(0.0, left) for part, left in excess.items()}
                line |= {"release": f"{name} {key}", "noise": str(stated.get("noise_source"))}
                more.append(line | {"state": UNLISTED, "when": str(record.get("finished"))})
    return more


def ledgers(results: Path | str, records: Iterable[Mapping[str, Any]] = ()) -> list[list[Line]]:
    """Return the lines of all releases by private data set, with those that only `records` state. Ledgers that share a
    name for their data, such as features and images of one set, or a set and a part of it, count as one: that may count
    too much, never too little. A message names each ledger that cannot be read."""
    groups = _joined(_parts(Path(results) / "ledger", records, leave_out))
    return [lines for _, lines in groups if lines]


def with_caps(results: Path | str) -> list[tuple[list[Line], Cap | None]]:
    """Return what `ledgers` does of all releases, with those that only records state, each with the cap that holds."""
    folder = Path(results) / "ledger"
    groups = _joined(_parts(folder, stating(results), leave_out))
    return [(lines, _cap(folder, keys)) for keys, lines in groups if lines]


def of_data(results: Path | str, private: str, original: str | None = None) -> tuple[list[Line], Cap | None]:
    """Return the lines of the data set of this name, or with these examples (as of `Entry`), and the cap that holds for
    it."""
    folder = (PLACE.get() or Path(results)) / "ledger"
    line: Line = {"private": private}
    line |= _recognised_by(_key(folder), private, original) if (folder / "key").exists() else {}
    keys, lines = _of(_parts(folder, stating(folder.parent), leave_out), _keys([line]))
    return lines, _cap(folder, keys)


def left_for(results: Path | str, private: str, original: str | None, cap: Cap | None = None) -> str:
    """Return what is left of the budget of a data set, as of `of_data`; "" if it has none. cap: one to be set."""
    lines, holds = of_data(results, private, original)
    return left_text(lines, cap or holds)


def left_text(lines: Iterable[Line], cap: Cap | None) -> str:
    """Return what is left of a cap after some lines; "" if there is none."""
    if cap is None:
        return ""
    costs = {unit: cost_of(of_unit) for unit, of_unit in per_unit(lines).items()} or {EXAMPLE: Spent(0.0, 0.0, 0)}
    return f"budget {cap}: " + "; ".join(
        f"epsilon {at_most(cost.epsilon)} is spent for one {unit}, {at_least(cap.epsilon - cost.epsilon)} is left"
        + ("" if cap.delta is None else f", and delta {at_least(cap.delta - cost.delta)}")
        for unit, cost in costs.items()
    )


Part = tuple[set[str], list[Line]]  # lines, and what their data are recognised by


def _parts(folder: Path, records: Iterable[Mapping[str, Any]], damaged: Callable[[str], object] | None) -> list[Part]:
    """Return the lines of each file of a ledger, and each that only a record states."""
    files = [(path.stem, read(path, damaged)) for path in sorted(folder.glob("*.jsonl"))]
    more = lacking([line for _, lines in files for line in lines], records)
    return [*(({stem} | _keys(lines), lines) for stem, lines in files), *((_keys([line]), [line]) for line in more)]


def _keys(lines: Iterable[Line]) -> set[str]:
    """Return the names of the data of some lines, paths in one spelling and where their links lead, when each line was
    written and now, and the digests of all their examples."""
    keys = set[str]()
    for line in lines:
        keys |= {*(line.get("paths") or ())}  # digests
        name = line["private"]
        path = os.path.abspath(os.path.expanduser(name))
        keys |= {path, os.path.realpath(path)} if is_path(name) else {name}
        keys |= {line["data"]} if line.get("data") else set()
    return keys


def _joined(parts: Iterable[Part]) -> list[Part]:
    """Return the lines of each data set: parts that share a key are of one."""
    groups: list[Part] = []
    for keys, lines in parts:
        # one part may connect several groups
        for group in [group for group in groups if group[0] & keys]:
            groups.remove(group)
            keys, lines = keys | group[0], group[1] + lines
        groups.append((keys, lines))
    return groups


def _of(parts: Iterable[Part], keys: set[str]) -> Part:
    """Return the data set that has one of these keys."""
    return next(group for group in _joined([*parts, (keys, [])]) if group[0] >= keys)


def _cap(folder: Path, keys: set[str]) -> Cap | None:
    """Return the cap of a data set: the last that was set for a part of it."""
    caps = [line for line in read(folder / BUDGETS, schema=_Budget) if keys.intersection(line["keys"])]
    return Cap(caps[-1]["epsilon"], caps[-1].get("delta")) if caps else None


def of_cell(results: Path | str, cell: str) -> list[Line]:
    """Return the releases of one run by time, including those before it was resumed or repeated."""
    releases = [line for lines in ledgers(results) for line in lines if line["cell"] == cell]
    return sorted(releases, key=lambda line: str(line["when"]))


def again(folder: Path, what: str = "that") -> str:
    """Return the cost of deleting the folder of a run and repeating it, for the end of a message that suggests it; ""
    if no cost is known. The last release of each kind counts."""
    releases = of_cell(folder.parent.parent, folder.name)
    with suppress(UserError):
        releases += lacking(releases, [read_record(folder / "result.json")])
    latest = list({line["what"]: line for line in releases}.values())
    epsilon = cost_of(latest).epsilon
    if not epsilon:
        return ""

    seeded = all(line["noise"] != OS_NOISE for line in latest)
    unless = ", unless data, settings and code are what they were" if seeded else ""
    return f"; {what} spends epsilon {epsilon:.4g} once more{unless}"


def overview(results: Path | str) -> list[str]:
    """Return a line for each private data set: its name, and the total cost of its releases, including those that only
    the record of their run states."""
    lines = []
    for of_data in ledgers(results, stating(results)):
        names = dict.fromkeys(line["private"] for line in of_data)
        costs = {unit: cost_of(of_unit) for unit, of_unit in per_unit(of_data).items()}
        gone = sum(line["state"] == "deleted" for line in _latest(of_data).values())

        number = len(_latest(of_data))
        many = f"{number} release{'s' if number > 1 else ''}"
        many += f" ({gone} of deleted runs)" if gone else ""
        lost = dict.fromkeys(line["cell"] for line in of_data if line["state"] == UNLISTED)
        many += f" (by their records alone: {', '.join(lost)}; the ledger lacks them: restore it)" if lost else ""
        sums = [
            f"{f'for one {unit} ' if unit != EXAMPLE or len(costs) > 1 else ''}epsilon {cost.epsilon:.4g}, "
            f"delta {cost.delta:.4g}"
            for unit, cost in costs.items()
        ]
        lines.append(f"{', '.join(names)}: {many}, {'; '.join(sums)}")
    return lines


@contextmanager
def _held(folder: Path) -> Iterator[None]:
    """Hold the ledger for one process at a time."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        guard(folder)
        with locked(folder / "lock", "ledger"):
            yield
    except OSError as error:
        why = cannot_write(f"to {folder}", error)
        raise UserError(f"{why}; nothing is drawn without it") from None


def _key(folder: Path) -> bytes:
    path = folder / "key"
    if not path.exists():
        write_whole(path, secrets.token_bytes(KEY_BYTES), private=True)
    key = plain(path).read_bytes()
    if len(key) != KEY_BYTES:
        raise UserError(f"{path} is damaged: restore it, or delete it and count the files next to it as other data")
    return key


def _digest(key: bytes, text: str) -> str:
    return hashlib.blake2b(text.encode(), key=key, digest_size=16).hexdigest()


def _append(path: Path, line: Line) -> None:
    """Append a line to a ledger, durably."""
    line = line | {"when": datetime.now(UTC).isoformat(timespec="seconds")}
    append(path, json.dumps(line, sort_keys=True).encode() + b"\n")
