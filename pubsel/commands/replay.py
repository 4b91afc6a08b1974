"""`pubsel run replay=PATH`: repeat a record in a temporary folder, and report whether it came out the same."""

import dataclasses
import json
import tempfile
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf

from pubsel import records
from pubsel.cell import canonical
from pubsel.commands import run
from pubsel.messages import UsageError
from pubsel.settings.identity import identity_of
from pubsel.settings.keys import RunConfig
from pubsel.settings.methods import GROUPS
from pubsel.settings.schema import check

# why figures may differ
CIRCUMSTANCES = ("commit", "versions", "hardware", "device", "threads", "precision", "processes", "streams")
NO_FIGURES = (*CIRCUMSTANCES, "seconds", "finished", "identity", "settings", "notes")


def settings_of(record: dict[str, Any], base: DictConfig) -> RunConfig:
    """Return the settings of a record's run, with what cannot change a result (device, data_root, ...) as in `base`.

    UsageError if those settings would be another run today, since a default has changed.
    """
    values = OmegaConf.to_container(base)

    assert isinstance(values, dict)
    for key, value in record["settings"].items():
        if key == "epsilon" and value == 0:  # no private example is read, whatever epsilon is given
            continue
        whole = key in GROUPS or not isinstance(value, dict)
        values[key] = value if whole else values[key] | value

    again = canonical(check(RunConfig, OmegaConf.create(values)))
    if identity_of(again) != record["identity"]:
        raise UsageError(
            f"{record['identity']}: other settings now, which give {identity_of(again)}: run its sweep again"
        )
    return again


def repeat(name: str, base: DictConfig) -> tuple[bool, str]:
    """Train a record's run again, on as many threads unless `base` sets another number. Return whether it came out the
    same, and the text that names what differs."""
    record, _ = records.find(name, Path(base.results), ("runs",))
    settings = settings_of(record, base)
    if settings.privacy.secure_noise and record.get("epsilon"):
        raise UsageError(
            f"replay={name}: its noise came from the operating system: no run can repeat it, and one more training "
            f"spends epsilon {float(record['epsilon']):.4g} once more"
        )

    threads = settings.threads or record.get("threads")

    with tempfile.TemporaryDirectory() as folder:
        ledger = Path(base.results, "ledger").absolute()  # with other code or data it is another release
        ledger.mkdir(parents=True, exist_ok=True)
        Path(folder, "ledger").symlink_to(ledger)
        asked = dataclasses.replace(settings, results=folder, threads=threads, replay=None)
        result = run.run(asked, record.get("streams"))
    again = json.loads(json.dumps(result))  # a tuple is a list there

    # figures decide; circumstances may explain them
    figures, around = differences(record, again)
    lines = [f"{record['identity']}: {'not the same' if figures else 'the same, bit for bit'}"]
    same = [f"weights: {again['weights']}", f"utility: {again['utility']}"]
    lines += [f"  {line}" for line in figures or same]
    if figures and record["settings"].get("privacy", {}).get("secure_noise"):
        lines.append("Its noise came from the operating system: no run can repeat it.")
    if around:
        lines += ["Different now, which may be why:" if figures else "Though these are different now:"]
        lines += [f"  {line}" for line in around]

    return not figures, "\n".join(lines)


def differences(old: dict[str, Any], new: dict[str, Any]) -> tuple[list[str], list[str]]:
    """Return what differs between two records of a run, as "key: this -> that": figures, and circumstances. A figure
    that an older record lacks is no difference."""
    figures = [key for key in old if key not in NO_FIGURES]
    circumstances = [key for key in CIRCUMSTANCES if key in old]
    return _different(old, new, figures), _different(old, new, circumstances)


def _different(old: dict[str, Any], new: dict[str, Any], keys: list[str]) -> list[str]:
    lines = []
    for key in keys:
        a, b = old[key], new.get(key)
        if isinstance(a, dict) and isinstance(b, dict):
            inner = [name for name in a if name not in NO_FIGURES]
            lines += [f"{key}.{line}" for line in _different(a, b, inner)]
        elif a != b:
            lines.append(f"{key}: {json.dumps(a)} -> {json.dumps(b)}")
    return lines
