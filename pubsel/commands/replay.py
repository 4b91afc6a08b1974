"""`pubsel run replay=PATH`: repeat a record in a temporary folder, and report whether its numbers came out the same.

Where sums are rounded as when the record was made, the weights have to be the same bit for bit, and numbers to
`ROUNDED`. On other hardware, or by a program that rounds sums otherwise, the weights are not compared, and numbers to
`ELSEWHERE`. Sentences, such as notes and what a guarantee does not cover, are never compared.
"""

import dataclasses
import json
import re
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from pubsel import records
from pubsel.cell import Streams, choose_device
from pubsel.messages import UsageError
from pubsel.release.run import run
from pubsel.rules import canonical
from pubsel.settings.identity import identity_of
from pubsel.settings.keys import RunConfig

# why numbers may differ
CIRCUMSTANCES = ["commit", "versions", "hardware", "device", "threads", "precision", "processes", "streams", "backbone"]
NO_FIGURES = (*CIRCUMSTANCES, "numbers", "seconds", "finished", "identity", "settings", "notes")
BITS = "weights"  # a digest, the only text that is compared
ROUNDED = 1e-6  # how far numbers may be apart, relative to those above 1
ELSEWHERE = 0.01  # the same, if sums are rounded otherwise


def repeat(name: str, requested: RunConfig) -> tuple[bool, str]:
    """Train a record's run again, on as many threads unless `requested`, its settings as `records.expanded` composes
    them, has another number. Return whether it came out the same, and the text that names what differs. UsageError if
    they would be another run today, since a default has changed."""
    # a run whose settings or noise cannot be had again is refused before it trains
    record, _ = records.find(name, Path(requested.results), ("runs",))
    if why := records.outdated(record):
        raise UsageError(f"replay={name}: {why}")
    settings = canonical(requested)
    if identity_of(settings) != (records.at(record, "tuning.run") or record["identity"]):
        raise UsageError(
            f"{record['identity']}: other settings now, which give {identity_of(settings)}: run its sweep again"
        )
    if settings.privacy.secure_noise and record.get("epsilon"):
        raise UsageError(
            f"replay={name}: its noise came from the operating system: no run can repeat it, and one more training "
            f"spends epsilon {float(record['epsilon']):.4g} once more"
        )

    threads = settings.threads or record.get("threads")
    place = (record.get("streams") or {}).get("place", "")
    if chunk := re.search(r"chunk (\d+)$", place):  # it changes how sums are rounded, and is in no settings
        settings = dataclasses.replace(settings, training=dataclasses.replace(settings.training, chunk=int(chunk[1])))

    with tempfile.TemporaryDirectory() as folder:
        ledger = Path(requested.results, "ledger").absolute()  # with other code or data it is another release
        ledger.mkdir(parents=True, exist_ok=True)
        Path(folder, "ledger").symlink_to(ledger)
        again = dataclasses.replace(settings, results=folder, threads=threads, replay=None)
        result = run(again, record.get("streams"))
    new = json.loads(json.dumps(result))  # a tuple is a list there

    # figures decide; circumstances may explain them
    here = Streams.of(again, "", choose_device(again.device), new["processes"]).place
    figures, around = changes(record, new, place == here and record.get("numbers") == records.NUMBERS)
    came_out = "the same, bit for bit"
    if new["weights"] != record["weights"]:
        came_out = f"the same to {ELSEWHERE:g}, where sums are rounded otherwise"
    lines = [f"{record['identity']}: {'not the same' if figures else came_out}"]
    same = [f"weights: {new['weights']}", f"utility: {new['utility']}"]
    lines += [f"  {line}" for line in figures or same]
    if figures and record["settings"].get("privacy", {}).get("secure_noise"):
        lines.append("Its noise came from the operating system: no run can repeat it.")
    if around:
        lines += ["Different now, which may be why:" if figures else "Though these are different now:"]
        lines += [f"  {line}" for line in around]

    return not figures, "\n".join(lines)


def changes(old: dict[str, Any], new: dict[str, Any], exact: bool) -> tuple[list[str], list[str]]:
    """Return what differs between two records of a run, as "key: this -> that": figures, and circumstances. A figure
    that an older record lacks is no difference. exact: whether sums are rounded as they were."""
    figures = [key for key in old if key not in NO_FIGURES]
    circumstances = [key for key in CIRCUMSTANCES if key in old]
    numbers = _different(old, new, figures, lambda key, a, b: _same_number(key, a, b, exact))
    return numbers, _different(old, new, circumstances, lambda _, a, b: bool(a == b))


def _different(
    old: dict[str, Any], new: dict[str, Any], keys: list[str], same: Callable[[str, Any, Any], bool]
) -> list[str]:
    lines = []
    for key in keys:
        a, b = old[key], new.get(key)
        if isinstance(a, dict) and isinstance(b, dict):
            inner = [name for name in a if name not in NO_FIGURES]
            lines += [f"{key}.{line}" for line in _different(a, b, inner, same)]
        elif not same(key, a, b):
            lines.append(f"{key}: {json.dumps(a)} -> {json.dumps(b)}")
    return lines


def _same_number(key: str, a: Any, b: Any, exact: bool) -> bool:
    """Return whether two values are the same as numbers, in lists too. Of texts only digests of weights count."""
    # digests of weights are compared bit for bit, if sums are rounded alike
    if isinstance(a, str) and isinstance(b, str):
        return key != BITS or not exact or a == b
    if isinstance(a, list) and isinstance(b, list):
        if any(isinstance(value, str) for value in a + b):
            return True
        return len(a) == len(b) and all(_same_number(key, *pair, exact) for pair in zip(a, b, strict=True))
    if isinstance(a, bool) or not (isinstance(a, int | float) and isinstance(b, int | float)):
        return bool(a == b)
    return a == b or abs(a - b) <= (ROUNDED if exact else ELSEWHERE) * max(1.0, abs(a))
