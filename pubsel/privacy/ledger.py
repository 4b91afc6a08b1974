"""All releases of each private data set: RESULTS/ledger, which outlives the runs.

There is one file per private content, DIGEST.jsonl, with one line per release: a training, a first release, a choice of
public data, a DP-GSD. The line is written before the first noise of the release is drawn, so that a crash can only
count too much. A line is never changed, and a deleted run stays in. DIGEST is keyed by 32 random bytes in `key`: the
name of a file confirms its data to nobody who lacks `key`.

A release with noise from the operating system is new each time that it begins without a checkpoint. Seeded noise is
named by everything that decides it: the same noise on the same data is the same release, and is listed once.

The ledger omits computations without noise (training without a guarantee, distances other than DP-GSD, attacks). This
file imports no torch.
"""

import hashlib
import json
import secrets
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, NamedTuple

from pubsel.files import append, guard, locked, plain, unreadable, write_whole
from pubsel.messages import UserError, cannot_write
from pubsel.records import Rank, Share, Size, at, leave_out, parsed, read_record, readable

KEY_BYTES = 32
OS_NOISE = "operating system"
MEASUREMENT = "measurement"  # of held-out examples
UNLISTED = "in a record alone"  # the kind of a release, and the state of its line, if no ledger contains it
ROUNDING = 1e-6  # of a sum of epsilons
PLACE: ContextVar[Path | None] = ContextVar("PLACE", default=None)  # in place of the results folder of a release

Line = dict[str, Any]


class Entry(NamedTuple):
    """A planned release of private data. cell: the identity of its run; private: the data as the user names it; what:
    its kind, in a word. key: a digest of all that decides its seeded noise; None: noise of the operating system."""

    cell: str
    private: str
    what: str
    epsilon: float
    delta: float
    key: str | None


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


def note(results: Path | str, content: str, release: Entry) -> None:
    """Write a release of the private data with fingerprint `content` to the ledger, before its first noise is drawn.

    A release at epsilon 0 reads nothing, and is left out. UserError if the line cannot be written: then nothing may be
    drawn.
    """
    if not release.epsilon:
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
            line = {key: value for key, value in release._asdict().items() if key != "key"}
            noise = OS_NOISE if release.key is None else "seeded"
            _append(path, line | {"release": name, "noise": noise, "state": "begun"})


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


def read(path: Path, damaged: Callable[[str], object] | None = None) -> list[Line]:
    """Return the lines of a ledger. A last line that was cut short is left out: nothing was drawn after it. Any other
    damage raises UserError, or is left out and passed to `damaged` as a message."""

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
            line = parsed(text.decode(), _Line)
            lines.append(line | {"epsilon": float(line["epsilon"]), "delta": float(line["delta"])})
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
            if not isinstance(stated, dict) or not stated.get("epsilon"):
                continue

            name = record["identity"]
            listed = known.get(name, ([], []))[what == MEASUREMENT]
            excess = {
                part: max(0.0, stated.get(part) or 0.0) - sum(line[part] for line in listed)
                for part in ("epsilon", "delta")
            }
            if any(left > ROUNDING * stated[part] for part, left in excess.items() if stated.get(part)):
                unit = f", for a person ({stated['unit']})" if stated.get("unit") and what != MEASUREMENT else ""
                line = {"cell": name, "private": record["private"], "what": f"{what}{unit}"}
                line |= {part: max(0.0, left) for part, left in excess.items()}
                line |= {"release": f"{name} {key}", "noise": str(stated.get("noise_source"))}
                more.append(line | {"state": UNLISTED, "when": str(record.get("finished"))})
    return more


def ledgers(results: Path | str, records: Iterable[Mapping[str, Any]] = ()) -> list[list[Line]]:
    """Return the lines of all releases by private data set, with those that only `records` state. Ledgers that share a
    name for their data, such as features and images of one set, or a set and a part of it, count as one: that may count
    too much, never too little. A message names each ledger that cannot be read."""
    files = [read(path, leave_out) for path in sorted((Path(results) / "ledger").glob("*.jsonl"))]
    more = lacking([line for lines in files for line in lines], records)
    groups: list[tuple[set[str], list[Line]]] = []
    for lines in [*files, *([line] for line in more)]:
        names = {line["private"] for line in lines}

        # One file may connect several groups.
        for group in [group for group in groups if group[0] & names]:
            groups.remove(group)
            names, lines = names | group[0], group[1] + lines
        groups.append((names, lines))

    return [lines for _, lines in groups if lines]


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
        cost = cost_of(of_data)
        gone = sum(line["state"] == "deleted" for line in _latest(of_data).values())

        many = f"{cost.releases} release{'s' if cost.releases > 1 else ''}"
        many += f" ({gone} of deleted runs)" if gone else ""
        lost = dict.fromkeys(line["cell"] for line in of_data if line["state"] == UNLISTED)
        many += f" (by their records alone: {', '.join(lost)}; the ledger lacks them: restore it)" if lost else ""
        lines.append(f"{', '.join(names)}: {many}, epsilon {cost.epsilon:.4g}, delta {cost.delta:.4g}")
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
