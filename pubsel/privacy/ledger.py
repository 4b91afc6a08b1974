"""What has been drawn from each private data set: RESULTS/ledger, which outlives the runs.

One file for each private content, DIGEST.jsonl, and one line in it for each release: a training, a first release, a
choice of public data, a DP-GSD. The line is written before the first noise of the release is drawn, so that a crash can
only count too much. A line is never changed, and a deleted run stays in. DIGEST is keyed by 32 random bytes in `key`:
somebody who sees the name of a file, and not `key`, cannot confirm by it which data it is of.

A release with noise from the operating system is a new one each time that it begins without a checkpoint. Seeded noise
is named by all that decides it, and the same noise on the same data is the same release: it is listed once.

What is computed without noise (training without a guarantee, distances other than DP-GSD, attacks) is not in it. This
file imports no torch.
"""

import hashlib
import json
import secrets
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
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
UNLISTED = "in a record alone"  # what was drawn, and the state of its line, if no ledger has it
ROUNDING = 1e-6  # of a sum of epsilons

Line = dict[str, Any]


class Release(NamedTuple):
    """One release of private data, as it is planned. cell: the identity of its run; private: the data as it was given;
    what: a word for people. key: all that decides its seeded noise; None: noise of the operating system."""

    cell: str
    private: str
    what: str
    epsilon: float
    delta: float
    key: str | None


class Spent(NamedTuple):
    """What releases cost together."""

    epsilon: float
    delta: float
    releases: int


def spent(lines: Iterable[Line]) -> Spent:
    """Return the sum of the epsilons and of the deltas of all releases (basic composition); lines of one release count
    once. A run measures other examples than it trains on, so the larger of these two counts for it."""
    sides: dict[str, dict[bool, list[Line]]] = {}
    once = _latest(lines).values()
    for line in once:
        sides.setdefault(line["cell"], {}).setdefault(is_measurement(line), []).append(line)

    def total(key: str) -> float:
        return sum((max(sum(line[key] for line in side) for side in of.values()) for of in sides.values()), 0.0)

    return Spent(total("epsilon"), total("delta"), len(once))


def is_measurement(line: Line) -> bool:
    """Return whether a release is of held-out examples, of people (`cell.Streams`) or single ones."""
    return str(line["what"]).partition(",")[0] == MEASUREMENT


def _latest(lines: Iterable[Line]) -> dict[str, Line]:
    """Return the last line of each release."""
    return {line["release"]: line for line in lines}


def note(results: Path | str, content: str, release: Release) -> None:
    """Write down a release of the private data whose fingerprint is `content`, before its first noise is drawn.

    What costs epsilon 0 reads nothing, and is left out. UserError if the line cannot be written: then nothing may be
    drawn.
    """
    if not release.epsilon:
        return

    folder = Path(results) / "ledger"
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


def deleted(results: Path | str, cell: str, record: Mapping[str, Any] | None = None) -> None:
    """Write down that the releases of a run are deleted. They stay spent, and so does what the run has in its `record`
    alone. UserError if a ledger does not read."""
    folder = Path(results) / "ledger"
    known = [line for path in folder.glob("*.jsonl") for line in read(path) if line["cell"] == cell]
    more = lacking(known, [record] if record else [])
    if not known and not more:
        return

    with _held(folder):
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
    """Return the lines of a ledger. A last one that was cut short is left out: nothing was drawn after it. What else
    does not read raises UserError, or is left out if `damaged` is there to print it."""
    lines = []
    try:
        content = plain(path).read_bytes() if path.exists() else b""
        for text in content.rpartition(b"\n")[0].split(b"\n"):
            if text.strip():
                try:
                    lines.append(parsed(text.decode(), _Line))
                except ValueError:
                    why = f"{path} does not read, so what was spent is unknown: restore it, or move it away"
                    if damaged is None:
                        raise UserError(why) from None
                    damaged(why)
    except OSError as error:
        if damaged is None:
            raise unreadable(path, error, "check permissions") from None
        damaged(str(unreadable(path, error, "check permissions")))
    return [line | {"epsilon": float(line["epsilon"]), "delta": float(line["delta"])} for line in lines]


def stating(results: Path | str) -> list[dict[str, Any]]:
    """Return the records in a results folder of what was drawn from private data there."""
    runs = sorted((Path(results) / "runs").glob("*/result.json"))
    ranks = sorted((Path(results) / "ranks").glob("*/result.json"))
    return [*readable(runs), *readable(ranks, Rank)]


def lacking(lines: Iterable[Line], records: Iterable[Mapping[str, Any]]) -> list[Line]:
    """Return what records say was spent beyond the lines of a ledger, as lines of the same kind: of a run from before
    the ledger, or one whose lines were lost or changed."""
    known: dict[tuple[str, bool], list[Line]] = {}
    for line in _latest(lines).values():
        known.setdefault((line["cell"], is_measurement(line)), []).append(line)

    more = []
    for record in records:
        for what, key in ((UNLISTED, "privacy"), (MEASUREMENT, "quality.privacy")):
            stated = at(record, key)
            if not isinstance(stated, dict) or not stated.get("epsilon"):
                continue
            there = known.get((record["identity"], what == MEASUREMENT), [])
            spends = {
                part: max(0.0, stated.get(part) or 0.0) - sum(line[part] for line in there)
                for part in ("epsilon", "delta")
            }  # fmt: skip
            if any(left > ROUNDING * stated[part] for part, left in spends.items() if stated.get(part)):
                unit = f", for a person ({stated['unit']})" if stated.get("unit") and what != MEASUREMENT else ""
                more.append({
                    "cell": record["identity"], "private": record["private"], "what": f"{what}{unit}",
                    **{part: max(0.0, left) for part, left in spends.items()},
                    "release": f"{record['identity']} {key}", "noise": str(stated.get("noise_source")),
                    "state": UNLISTED, "when": str(record.get("finished")),
                })  # fmt: skip
    return more


def ledgers(results: Path | str, records: Iterable[Mapping[str, Any]] = ()) -> list[list[Line]]:
    """Return the lines of all releases by private data set, and what `records` spent that they lack. Ledgers that share
    a name for their data, such as features and images of one set, or a set and a part of it, count as one: too much is
    counted rather than too little. A line names a ledger that does not read."""
    files = [read(path, leave_out) for path in sorted((Path(results) / "ledger").glob("*.jsonl"))]
    more = lacking([line for lines in files for line in lines], records)
    groups: list[tuple[set[str], list[Line]]] = []
    for lines in [*files, *([line] for line in more)]:
        names = {line["private"] for line in lines}

        # A file may join several groups that had nothing in common before.
        for group in [group for group in groups if group[0] & names]:
            groups.remove(group)
            names, lines = names | group[0], group[1] + lines
        groups.append((names, lines))

    return [lines for _, lines in groups if lines]


def of_cell(results: Path | str, cell: str) -> list[Line]:
    """Return the releases of one run, with those from before it was resumed or made again."""
    releases = [line for lines in ledgers(results) for line in lines if line["cell"] == cell]
    return sorted(releases, key=lambda line: str(line["when"]))


def again(folder: Path, what: str = "that") -> str:
    """Return what it spends to delete the folder of a run and make it again, for the end of a message that suggests it;
    "" if nothing is known to be spent. The last release of each kind counts."""
    releases = of_cell(folder.parent.parent, folder.name)
    with suppress(UserError):
        releases += lacking(releases, [read_record(folder / "result.json")])
    latest = list({line["what"]: line for line in releases}.values())

    epsilon = spent(latest).epsilon
    if not epsilon:
        return ""

    seeded = all(line["noise"] != OS_NOISE for line in latest)
    unless = ", unless data, settings and code are what they were" if seeded else ""
    return f"; {what} spends epsilon {epsilon:.4g} once more{unless}"


def summary(results: Path | str) -> list[str]:
    """Return a line for each private data set: its name, and what all its releases spend together, those too that are
    in no ledger, but in the record of their run."""
    lines = []
    for of_data in ledgers(results, stating(results)):
        names = dict.fromkeys(line["private"] for line in of_data)
        cost = spent(of_data)
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
    """Write after everything else in the file, to last before this returns."""
    line = line | {"when": datetime.now(UTC).isoformat(timespec="seconds")}
    append(path, json.dumps(line, sort_keys=True).encode() + b"\n")
