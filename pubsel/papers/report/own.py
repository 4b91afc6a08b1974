"""Results on the user's private data: all data that is given by a path, not by a name.

Each private data set has one section of the page: what its releases spent together, what was ranked and trained with
it, and what to try next. Names and paths are the user's, and may contain anything: they are text for the template, and
are quoted in commands.
"""

import json
import os
import re
import shlex
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pubsel.messages import at_most
from pubsel.papers import typeset
from pubsel.papers.join import TableCell
from pubsel.papers.report.linked import Runs, Shown, shown
from pubsel.privacy import composition, ledger
from pubsel.privacy.ledger import Line, is_measurement
from pubsel.records import at, guarantee_kind
from pubsel.release import card
from pubsel.settings.command_line import command, written
from pubsel.settings.identity import is_path
from pubsel.settings.keys import public_sets

Record = dict[str, Any]

MOST_CLASSES = 20  # of a confusion matrix that is shown
MOST_MATRICES = 3  # of a section, the latest ones
GENERATED_SETS = ("./tumours.csv", "./topics.csv")  # that scripts/race_sets.py writes for the table `recipes`
RUN_HEADS = {
    "run": "Run",
    "measured_utility": "Measured privately",
    "test_utility": "On test images, not private",
    "epsilon": "ε",
    "public": "Public data",
    "algorithm": "Algorithm",
    "valid": "Guarantee",
    "noise": "Noise from",
    "model": "Model",
    "metric": "Metric",
}
DISTANCE_HEADS = {
    "public": "Public data",
    "distance": "Distance",
    "protected": "Guarantee",
    "kind": "Kind",
    "model": "Model",
    "times": "Networks",
}


@dataclass
class OwnData:
    """One private data set of the user: its names as they were given, and what there is of it. lines: of the ledger."""

    names: list[str] = field(default_factory=list)
    records: list[Record] = field(default_factory=list)
    ranks: list[Record] = field(default_factory=list)
    choices: list[Record] = field(default_factory=list)
    lines: list[Line] = field(default_factory=list)

    @property
    def title(self) -> str:
        """Return a short name."""
        return Path(self.names[0]).name or self.names[0]


def is_own(record: Record) -> bool:
    """Return whether the private data of a record are the user's own."""
    return is_path(record["private"]) and record["private"] not in GENERATED_SETS


def without(records: Iterable[Record]) -> list[Record]:
    """Return the records that are not of the user's own data."""
    return [record for record in records if not is_own(record)]


def split_own(
    records: Iterable[Record], ranks: Iterable[Record], choices: Iterable[Record], ledgers: Iterable[list[Line]]
) -> list[OwnData]:
    """Return the user's private data sets by name, each with what there is of it. Data that share a path, or a ledger
    in which their paths stand, are one set: too much is added up rather than too little."""
    groups: list[tuple[set[str], OwnData]] = []

    def of(names: Iterable[str]) -> OwnData:
        keys = {os.path.normpath(os.path.expanduser(name)) for name in names}
        joined = OwnData()
        for group in [group for group in groups if group[0] & keys]:
            groups.remove(group)
            keys |= group[0]
            for part in ("names", "records", "ranks", "choices", "lines"):
                getattr(joined, part).extend(getattr(group[1], part))
        groups.append((keys, joined))
        joined.names += [name for name in dict.fromkeys(names) if name not in joined.names]
        return joined

    for lines in ledgers:
        if paths := [line["private"] for line in lines if is_path(line["private"])]:
            of(paths).lines.extend(lines)
    for part, listed in (("records", records), ("ranks", ranks), ("choices", choices)):
        for record in filter(is_own, listed):
            getattr(of([record["private"]]), part).append(record)
    return sorted((group for _, group in groups), key=lambda group: (group.title, group.names))


def class_names_in(results: Path, records: Iterable[Record]) -> dict[str, list[str]]:
    """Return the names of the classes of runs on the user's data, by identity: those in model.json, if it is there."""
    names = {}
    for record in filter(is_own, records):
        try:
            facts = json.loads((results / "runs" / record["identity"] / "model.json").read_text(encoding="utf-8"))
            names[record["identity"]] = [str(name) for name in facts["classes"]]
        except (OSError, ValueError, KeyError, TypeError):
            continue
    return names


def section(private: OwnData, place: int, runs: Runs, classes: dict[str, list[str]], results: str) -> dict[str, Any]:
    """Return what the template takes of one private data set. place: from 1 on, for the names of links; results: the
    folder, for commands."""
    # what runs and choices spent by their records that the ledger lacks
    apart = [line for line in private.lines if line["state"] == ledger.UNLISTED]
    many, lacked = len({line["cell"] for line in apart}), ledger.cost_of(apart)
    unlisted = {"many": many, "epsilon": at_most(lacked.epsilon), "delta": at_most(lacked.delta)} if apart else None

    name = f"own-{place}"
    latest = sorted(private.records, key=lambda record: str(record.get("finished")), reverse=True)
    measured = [record for record in latest if record.get("quality")]
    once = {line["release"]: line for line in private.lines}
    return {
        "name": name,
        "title": private.title,
        "paths": private.names,
        "spent": _spent(private),
        "best": composition.best_of([record | {"private": private.title} for record in latest], [private.lines]),
        "unlisted": unlisted,
        # a release is in the ledger once for each file of it; a run that still has a record is a link
        "releases": sorted(once.values(), key=lambda line: str(line["when"]), reverse=True),
        "links": {record["identity"]: f"{name}/{i}" for i, record in enumerate(latest, 1)},
        "runs": _runs(latest, name, runs),
        "metrics": sorted({str(record.get("metric", "accuracy")).replace("_", " ") for record in latest}),
        "distances": _distances(private, name, runs),
        "choices": [choice | {"command": command(choice)} for choice in private.choices],
        "measured": [_measured(record, classes.get(record["identity"])) for record in measured[:MOST_MATRICES]],
        "more": max(0, len(measured) - MOST_MATRICES),
        "next": _next(private, latest, results),
    }


# The guarantee


def _spent(private: OwnData) -> dict[str, Any] | None:
    """Return what all releases spent together, in digits that are rounded up; None if none is known."""
    if not private.lines:
        return None
    # the sum of the ledger holds whatever the releases were
    units = []
    for unit, lines in ledger.per_unit(private.lines).items():
        total, less = ledger.cost_of(lines), composition.tighter(lines)
        values: dict[str, Any] = {"epsilon": at_most(total.epsilon), "delta": at_most(total.delta), "tighter": None}
        values["unit"] = unit if unit == ledger.EXAMPLE else f"{unit} with all their examples"
        values["releases"] = total.releases
        if less is not None:
            same = less.delta == total.delta
            values["tighter"] = {"epsilon": at_most(less.epsilon), "delta": at_most(less.delta), "same": same}
        units.append(values)
    return units[0] | {
        "units": units,
        "measured": any(map(is_measurement, private.lines)),
        "seeded": any(line["noise"] != ledger.OS_NOISE for line in private.lines),
    }


# What was computed


def _runs(latest: list[Record], name: str, runs: Runs) -> Shown | None:
    """Return a table of the runs, the last first."""
    # measured privately first; what was measured on test images is not private
    rows, keys = [], []
    for i, record in enumerate(latest, 1):
        cell, privacy = TableCell((record,), {}), record.get("privacy") or {}
        measured = (at(record, "quality.figures") or {}).get(record.get("metric"))
        private = privacy.get("epsilon") is not None
        chosen = ", chosen privately" if at(record, "settings.pair.public") in ("auto", "pool") else ""
        rows.append(
            {
                "run": _text(record["identity"]),
                "measured_utility": _figure(measured),
                "test_utility": _figure([record["utility"], *(record.get("utility_interval") or ())]),
                "metric": _text(str(record.get("metric", "accuracy")).replace("_", " ")),
                "epsilon": (float(privacy["epsilon"]), f"{privacy['epsilon']:.4g}", "") if private else (None, "∞", ""),
                "valid": _text(guarantee_kind(record)),
                "noise": _text(privacy.get("noise_source") if privacy.get("epsilon") else None),
                "algorithm": _text(record["algorithm"]),
                "model": _text(record["model"]),
                "public": _text(f"{record['public'] or 'none'}{chosen}"),
            }
        )
        keys.append(runs.add(f"{name}/{i}", [cell]))
    several = len({row["metric"] for row in rows}) > 1  # a single one stands above the table
    return _table({key: head for key, head in RUN_HEADS.items() if several or key != "metric"}, rows, keys)


def _distances(private: OwnData, name: str, runs: Runs) -> Shown | None:
    """Return a table of the distances of `pubsel rank`, and of those that runs measured, the nearest
    first. A private one (DP-GSD) has a line in the ledger."""
    released = {line["cell"] for line in private.lines}
    rows = []
    for record in [*private.ranks, *(record for record in private.records if record.get("distance"))]:
        cell = TableCell((record,), {})
        mean, std = cell.distance()
        assert mean is not None
        kind = at(record, "settings.distance.name") or at(record, "distance.name")
        of_rank = record["utility"] is None
        protected = of_rank and record["identity"].removesuffix(f" {record['public']}") in released
        row = {
            "public": _text(record["public"]),
            "distance": (mean, f"{mean:.3f}", f"± {std:.3f}" if std is not None else ""),
            "protected": _text("a private release" if protected else "not private"),
            "kind": _text(kind),
            "model": _text(record["model"]),
            "times": (len(cell.distances()), str(len(cell.distances())), ""),
        }
        rows.append((row, cell))

    rows.sort(key=lambda entry: [entry[0][key][0] or "" for key in ("kind", "model", "distance")])
    keys = [runs.add(f"{name}/distance/{i}", [cell]) for i, (_, cell) in enumerate(rows, 1)]
    return _table(DISTANCE_HEADS, [row for row, _ in rows], keys)


Entry = tuple[Any, str, str]  # what it is sorted by, and as it is shown: the value and its uncertainty


def _text(value: str | None) -> Entry:
    return value, value or typeset.MISSING, ""


def _figure(values: Sequence[float] | None) -> Entry:
    """Return a fraction in percent, with its interval if there is one."""
    if not values:
        return None, typeset.MISSING, ""
    estimate, *interval = (100 * value for value in values)
    return estimate, f"{estimate:.1f}", "[{:.1f}, {:.1f}]".format(*interval) if interval else ""


def _table(heads: dict[str, str], rows: list[dict[str, Entry]], keys: Sequence[str]) -> Shown | None:
    """Return rows for the template, without columns that have nothing; None if there is no row."""
    columns, values = list[typeset.Column](), dict[str, list[Any]]()
    for key, head in heads.items():
        entries = [row[key] for row in rows]
        # a column without a value says nothing
        if any(text != typeset.MISSING for _, text, _ in entries):
            values[key] = [value for value, _, _ in entries]
            numeric = not any(isinstance(value, str) for value in values[key])
            columns.append(typeset.Column(key, head, [entry[1:] for entry in entries], numeric))
    return shown(columns, values, list(keys), []) if rows else None


# What was measured


def _measured(record: Record, names: list[str] | None) -> dict[str, Any]:
    """Return the measured figures of a run, and its noisy confusion matrix with a name for each class. names: None if
    they are not known."""
    quality = record["quality"]
    whole = {key: values for key, values in quality["figures"].items() if not isinstance(values[0], list)}
    figures = [(key.replace("_", " "), _percent(values)) for key, values in whole.items()]
    values = {
        "run": record["identity"],
        "figures": figures,
        "hardly": quality.get("hardly_answered"),
        "perhaps": quality.get("perhaps_unanswered"),
        "examples": quality["examples"],
        "people": quality["units"] if quality["privacy"].get("unit") else None,
        "deviation": f"{quality['deviation']:.3g}",
        "statement": quality["privacy"]["statement"],
        "rows": [],
        "names": [],
        "many": 0,
    }
    if quality["table"] != "confusion":
        return values

    # More classes than can be read have their figures alone.
    counts = quality["counts"]
    if len(counts) > MOST_CLASSES:
        return values | {"many": len(counts)}
    names = names if names and len(names) == len(counts) else list(map(str, range(len(counts))))
    recalls = list(zip(*quality["figures"]["recall of each class"], strict=True))
    largest = max(1.0, *(abs(count) for row in counts for count in row))
    rows = [
        {
            "name": name,
            "cells": [(f"{round(count)}".replace("-", "−"), round(100 * max(0.0, count) / largest)) for count in row],
            "recall": _percent(recall),
        }
        for name, row, recall in zip(names, counts, recalls, strict=True)
    ]
    return values | {"names": names, "rows": rows}


def _percent(values: Iterable[float]) -> str:
    """Return an estimate and its interval in percent."""
    estimate, low, high = (100 * value for value in values)
    return f"{estimate:.1f} % [{low:.1f}, {high:.1f}]"


# What to try next


def _next(private: OwnData, latest: list[Record], results: str) -> list[tuple[str, str]]:
    """Return what fits what is there: a sentence and a command each, the most useful first."""
    # first what is missing for a model that may be given away, then how to use one
    where = [] if results == "results" else [f"results={written(results)}"]
    trained = [record for record in latest if at(record, "privacy.epsilon")]
    safe = [record for record in trained if not card.against(record)]
    compared = private.ranks or private.choices
    steps = []
    if not trained or (compared and not any(record["public"] for record in trained)):
        steps.append(_fit(private, where))

    # The last run is the one that the user works with; what it lacks is made by one run.
    if trained:
        changes, reasons = _lacking(trained, bool(safe))
        cost = at_most(float(trained[0]["privacy"]["epsilon"]))
        text = f"Train with {', and '.join(reasons)}. It spends epsilon {cost} once more."
        steps += [(text, shlex.join([*shlex.split(command(trained[0], changes)), *where]))] if changes else []

    if safe:
        text, words = "Use the last model on new images.", ["predict", safe[0]["identity"], "./new_images"]
        if safe[0]["label"] != "fit":
            text = "Make a folder of the last model that may be given away, if there is none yet."
            words = ["export", safe[0]["identity"], "to=release"]
        steps.append((text, shlex.join(["pubsel", *words, *where])))
    return steps


def _lacking(trained: list[Record], safe: bool) -> tuple[dict[str, Any], list[str]]:
    """Return the settings that the last run needs for a model that may be given away and measured, and why. safe:
    whether there is a model already that may be given away."""
    changes: dict[str, Any] = {}
    reasons = []
    if not safe:
        changes["privacy.secure_noise"] = True
        reasons.append("noise from the operating system, without which no model may be given away")
        if at(trained[0], "privacy.valid") is not True:
            changes["privacy.accounting"] = "prv"
            reasons.append("an accounting that is sound")

    pair = trained[0]["settings"].get("pair") or {}
    measurable = trained[0]["label"] != "fit"
    if measurable and not any(record.get("quality") for record in trained):
        changes |= {"privacy.measure": True, "privacy.secure_noise": True}
        changes["pair.validation"] = pair.get("validation") or 0.1
        reasons.append("a private measurement, whose figures may be published")
    return changes, reasons


def _fit(private: OwnData, where: list[str]) -> tuple[str, str]:
    """Return `pubsel fit` with the public data that was ranked or chosen from."""
    ranked = [at(record, "settings.public") or [] for record in [*private.choices, *private.ranks]]
    publics = sorted({str(name) for sets in ranked for candidate in sets for name in public_sets(candidate)})

    # A path that is not plain has to be quoted for Hydra too.
    path = private.names[-1]
    words = [path if re.fullmatch(r"[\w./~+-]+", path) else f"private={written(path)}"]
    words += [f"public={written(publics)}"] if publics else []
    text = "Train a model, measure it, and make a folder of it that may be given away: epsilon 1 in all."
    return text, shlex.join(["pubsel", "fit", *words, "epsilon=1", *where])
