"""Membership inference, from settings to records and a table: on GSD, and on the networks of finished runs."""

import dataclasses
import time
from pathlib import Path
from typing import Any

import numpy as np
import pandas
import torch
from numpy.typing import NDArray
from torch import nn

from pubsel import data, distances
from pubsel import records as results
from pubsel.attacks import membership
from pubsel.attacks.membership import DIGITS, attack_figures, classifier_scores, member_scores, pick_rate, success_rate
from pubsel.cell import Cell, choose_device, networks, use_threads
from pubsel.data import Split, Task
from pubsel.distances.gsd import GSD, Labelling
from pubsel.messages import UsageError, UserError, say
from pubsel.privacy import ledger
from pubsel.privacy.randomness import stream
from pubsel.release.reopen import check_files, whole_of
from pubsel.rules import as_chosen, has_paths, refuse_unit
from pubsel.settings.identity import as_json, folder_name, identity_of, is_path, short_name
from pubsel.settings.keys import POOL, Attack, AttackConfig, RunConfig, public_sets
from pubsel.settings.methods import typed
from pubsel.settings.schema import check, literal
from pubsel.training.pooled import as_recorded

NOT_PRIVATE = "An attack reads private data without noise: this record is not differentially private."
OF_RUN = ("private", "public", "model", "algorithm", "epsilon", "label", "seed", "metric", "utility", "weights")
OF_ROW = """
attack features gsd_values known_members private_examples trials members others success success_interval auc
auc_interval
""".split()


def attack(settings: AttackConfig) -> pandas.DataFrame:
    """Attack, write the records RESULTS/attacks/NAME/result.json, and return them as rows of a table: of the loss
    attack it is written to RESULTS/tables too; of one on GSD `pubsel table` writes it, from all its records."""
    use_threads(settings.threads)
    device = choose_device(settings.device)
    folder = Path(settings.results)
    if settings.attack == Attack.loss:
        frame = pandas.DataFrame([loss_row(record) for record in attack_runs(settings, folder, device)])
        results.write_table(frame, folder / "tables" / "loss_attack.csv")
        return frame
    return pandas.DataFrame(attack_gsd(settings, folder, device), columns=OF_ROW).dropna(axis=1, how="all")


# Trained models


def attack_runs(settings: AttackConfig, folder: Path, device: torch.device) -> list[dict[str, Any]]:
    """Return a record for each finished run that `settings.run` names. Of several, those that cannot be attacked are
    printed and left out; raise UserError if none can, or UsageError for a name that is none of a run."""
    if settings.run is None:
        raise UsageError("attack=loss needs run=NAME, a finished run below RESULTS/runs; or a pattern, or all")

    pattern = "*" if settings.run == "all" else settings.run
    if not results.is_name(pattern):
        raise UsageError(f"run={settings.run}: give the name of a folder below {folder / 'runs'}, without a path")
    paths = sorted(path.parent for path in (folder / "runs").glob(f"{pattern}/result.json"))
    if not paths:
        raise UserError(f"run={settings.run}: no finished run of this name in {folder / 'runs'}: pubsel run makes them")

    if len(paths) == 1:
        return [attack_run(settings, paths[0], folder, device)]

    # one folder that does not fit its record is no reason to give up the others
    records, failures = [], []
    for path in paths:
        try:
            records.append(attack_run(settings, path, folder, device))
        except UserError as error:
            failures.append(error)
            say(f"left out: {error}")

    if not records:
        raise failures[0]
    return records


def attack_run(settings: AttackConfig, run: Path, folder: Path, device: torch.device) -> dict[str, Any]:
    """Return the record of the loss attack on one finished run; an earlier record is read if the weights are still
    those."""
    trained = results.read_record(run / "result.json")
    name = f"loss-{run.name}"

    def make() -> dict[str, Any]:
        refuse_unit(settings_of(trained, settings).pair, "the attack is")
        model, task = reopened(trained, run, settings, device)
        scores = [member_scores(model, split) for split in (task.private, task.test)]
        member = np.repeat([True, False], [len(part) for part in scores])
        return {
            "attack": "loss",
            "run": run.name,
            **{key: trained.get(key) for key in OF_RUN},
            **attack_figures(np.concatenate(scores), member, stream(name, "bootstrap")),
            "privacy": NOT_PRIVATE,
        }

    def of_these(record: dict[str, Any]) -> bool:
        return bool(record["weights"] == trained["weights"])

    record, is_new = results.recorded(folder / "attacks" / name, make, results.LossAttack, of_these)
    if is_new:
        say(f"{run.name}: AUC {record['auc']:.3f}")
    return record


def reopened(
    record: dict[str, Any], folder: Path, settings: AttackConfig, device: torch.device
) -> tuple[nn.Module, Task]:
    """Return the trained network of a finished run, and its task. UserError if weights, data or settings are not those
    of the record any more."""
    check_files(folder)
    model, facts = whole_of(folder, record)

    # the data: as the run read it
    cell = Cell.of(settings_of(record, settings))
    pair = as_chosen(cell.inputs.pair, record["public"])
    cell = cell._replace(inputs=cell.inputs._replace(pair=pair), device=device)
    task = cell.load_task()
    if pair.public == POOL:
        task = as_recorded(cell, task, record)
    # a choice or a pool that ended in none left the last layer alone (`Cell.last_layer`)
    if task.stages and not facts["model"]["backbone"]["stages"]:
        task = task.last_layer()
    if len(task.private.x) != record["private_examples"]:
        raise UserError(
            f"{folder.name}: trained on {record['private_examples']} private examples, {pair.private} has "
            f"{len(task.private.x)} now: bring back its data, or delete {folder} and train it again"
            f"{ledger.again(folder)}"
        )
    return model.to(device).eval(), task


def settings_of(record: dict[str, Any], here: AttackConfig) -> RunConfig:
    """Return the settings in a run's record, with what cannot change a result (`neutral` keys) as it is here.
    UserError if they describe another run by now."""
    # keys that cannot change a result are those of this machine
    values = dict(literal(record["settings"], record["identity"]))
    values["training"] = values["training"] | {"chunk": None, "checkpoint_seconds": 0.0}
    values["replay"] = None
    values |= {key: getattr(here, key) for key in ("device", "threads", "data_root", "results", "download", "debug")}
    values |= {"keep": getattr(here, "keep", True)}

    # epsilon may be 0 in a record, which the check of a user's settings rejects
    settings = check(RunConfig, values | {"epsilon": 1.0})
    settings = dataclasses.replace(settings, epsilon=float(values["epsilon"]))
    if identity_of(settings) != (results.at(record, "tuning.run") or record["identity"]):
        raise UserError(f"{record['identity']}: made by a version of pubsel with other settings: train it again")
    return settings


def loss_row(record: dict[str, Any]) -> dict[str, Any]:
    """Return a record as a row of the table."""
    row = {key: record[key] for key in OF_RUN if key != "weights"}
    row["utility"] = 100 * row["utility"]
    if is_path(row["private"]) and row["label"] == "paper":  # the default: no paper is about the user's data
        row["label"] = "own"
    low, high = record["auc_interval"]
    row |= {"auc": record["auc"], "auc_low": low, "auc_high": high}
    row |= {f"tpr_at_fpr_{rate}": share for rate, share in record["tpr"].items()}
    return row | {key: record[key] for key in ("members", "others", "run")}


# GSD


def attack_gsd(settings: AttackConfig, folder: Path, device: torch.device) -> list[dict[str, Any]]:
    """Return the rows of Table 8 or 9, measured or read from the record of the same settings. UsageError if
    m examples are too few."""
    # some members must be left to ask about, and each target needs a member to replace
    m = attacked_distance(settings).m
    if any(known >= m for known in settings.known):
        raise UsageError(f"known={settings.known}: must be below distance.m={m}, so that some are left to ask about")
    if settings.targets > m:
        raise UsageError(f"targets={settings.targets} is more than distance.m={m}: lower it")

    settings = dataclasses.replace(
        settings, distance=typed("distance", attacked_distance(settings), settings.distance or {})
    )
    what = {key: value for key, value in as_json(settings).items() if key != "run"}
    kind = settings.attack.name
    name = folder_name(f"{kind}-{short_name(settings.private)}-{settings.model.name}", what)
    candidates = [part for public in settings.public for part in public_sets(public)]
    by_path = has_paths([settings.private, *candidates])

    def make() -> dict[str, Any]:
        began = time.monotonic()
        rows = gsd_rows(settings, name, device)
        seconds = round(time.monotonic() - began, 1)
        return {"settings": what, "rows": rows, "privacy": NOT_PRIVATE, "seconds": seconds}

    # what is read from a path may have changed since
    record, is_new = results.recorded(folder / "attacks" / name, make, results.GsdAttack, lambda record: not by_path)
    if not is_new:
        say(f"{name}: attacked before")
    return list(record["rows"])


def attacked_distance(settings: AttackConfig) -> GSD:
    """Return the settings of GSD; UsageError for another distance."""
    distance = distances.build(settings.distance)
    if not isinstance(distance, GSD) or distance.labels != Labelling.random:
        raise UsageError("the attack is on distance=gsd with distance.labels=random")
    return distance


Answers = dict[tuple[str, str | None, int], list[tuple[NDArray[Any], NDArray[Any]]]]  # see `gsd_rows`


def gsd_rows(settings: AttackConfig, name: str, device: torch.device) -> list[dict[str, Any]]:
    """Return a row for each kind of features and number of known members, the trials together."""
    distance = attacked_distance(settings)
    m = distance.m
    task, candidates = _attacked_data(settings, m)

    # by kind of features, with or without GSD, and members known: (scores, member) of each trial
    answers: Answers = {}
    replaced = []
    for trial in range(settings.trials):
        # members and others, drawn alike; networks that no other trial has
        key = f"{name} {trial}"
        drawn = torch.from_numpy(stream(key, "members").permutation(len(task.private.x))[: 2 * m])
        members, others = (Split(task.private.x[part], task.private.y[part]) for part in drawn.split(m))
        first = settings.seed + trial * distance.initialisations
        build = networks(settings.model, task, first, settings.data_root, device)
        if settings.attack == Attack.gsd_black_box:
            features = membership.black_box(build(0), members, others)
        else:
            sets = build, members, others, candidates, task.classes
            seen = membership.white_box(distance, *sets, settings.targets, key)
            features = seen.features()
            replaced.append(seen.replaced)

        for (kind, values), rows in features.items():
            for known in settings.known:
                answer = classifier_scores(rows[:m], rows[m:], known, settings.seed + trial)
                answers.setdefault((kind, values, known), []).append(answer)
        say(f"  trial {trial + 1} of {settings.trials}")

    rows_of_all = _scored(settings, name, answers)
    # how often the attacker is right who knows all of m members but one
    for digits in DIGITS if replaced else ():
        row = {"attack": "known_but_one", "features": f"{digits} digits", "gsd_values": "with", "known_members": m - 1}
        pairs = np.concatenate(replaced)
        rows_of_all.append(row | {"success": pick_rate(pairs, digits), "members": len(pairs)})
    shown_too = {"private": settings.private, "model": settings.model.name, "private_examples": m}
    return [row | shown_too | {"trials": settings.trials} for row in rows_of_all]


def _attacked_data(settings: AttackConfig, m: int) -> tuple[Task, dict[str, Split]]:
    """Return the task whose private examples are members and others, and m examples of each public set."""
    # as many others as members, drawn from the same images
    source = data.open_dataset(settings.private, settings.data_root, settings.download, keep=settings.keep)
    if 2 * m > len(source.train.x):
        raise UsageError(
            f"distance.m={m}: the attack needs as many other images, {settings.private} has {len(source.train.x)} "
            "training images in all: lower distance.m"
        )
    classes = max(2, source.classes)  # as in `open_candidates`
    task = Task(source.train, None, source.test, classes, *source[3:6], source.notes)

    read = data.Reader(settings.data_root, settings.download, keep=settings.keep, columns=source.columns)
    candidates = {}
    for public in settings.public if settings.attack == Attack.gsd_white_box else []:
        candidates["+".join(public_sets(public))], _ = data.public_examples(
            public, m, source.train, read, settings.convert, settings.private
        )
    return task, candidates


def _scored(settings: AttackConfig, name: str, answers: Answers) -> list[dict[str, Any]]:
    """Return a row of success and figures for each entry of `answers`."""
    rows = []
    for (kind, values, known), trials in answers.items():
        scores, member = (np.concatenate(part) for part in zip(*trials, strict=True))
        row = {"attack": settings.attack.name.removeprefix("gsd_"), "features": kind, "gsd_values": values}
        row |= {"known_members": known} | success_rate(scores, member)
        rows.append(row | attack_figures(scores, member, stream(name, f"{kind} {values} {known}")))
    return rows
