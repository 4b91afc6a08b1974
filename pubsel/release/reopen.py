"""A trained model found again: of a run in results, of a copy of its files, or of a folder that was exported."""

import os
from pathlib import Path
from typing import Any

from torch import nn

from pubsel import records
from pubsel.cell import choose_device, use_threads
from pubsel.messages import UsageError, UserError
from pubsel.privacy import ledger
from pubsel.release.classifier import EXPORTED, FACTS, WEIGHTS, Classifier, read, rebuilt
from pubsel.settings.keys import PredictConfig

LEFT = (WEIGHTS, FACTS, "result.json", "settings.json", EXPORTED[1])  # of a run, a copy of its model, or an export


def folder_of(run: str, results: Path) -> Path:
    """Return the folder with the model that is meant: a folder, a file in it, or a name in results, or a pattern that
    one of these names fits. UserError, or UsageError for a pattern, says why there is none."""
    path = Path(run).expanduser()
    if "*" in run and os.sep not in run and not path.exists():
        names = sorted(place.name for place in (results / "runs").glob(run))
        if len(names) != 1:
            raise UsageError(f"run={run}: {len(names)} runs in {results / 'runs'} fit it: give the name of one")
        run, path = names[0], results / "runs" / names[0]
    places = [path.parent if path.is_file() else path] if run.strip() else []
    places += [results / "runs" / run] if records.is_name(run) else []
    folder = next((place for place in places if any((place / name).exists() for name in LEFT)), None)
    if folder is None:
        _, kept = records.find(run, results, ("runs",))
        raise UserError(
            f"{run}: its record is kept in {kept} without weights: pubsel runs show {run} tells how to train it"
        )

    if (folder / EXPORTED[1]).exists() and not (folder / FACTS).exists():
        if not (folder / EXPORTED[0]).exists():
            raise UserError(f"{folder / EXPORTED[0]}: no such file, the weights of the model: bring it back")
        return folder

    if (folder / "settings.json").exists() and not (folder / "result.json").exists():
        raise UserError(f"{run}: not finished, so it has no model yet: give its command again to resume it")
    check_files(folder)
    return folder


def check_files(folder: Path) -> None:
    """Raise UserError if a folder lacks one of the two files of a trained model."""
    for name, what in ((WEIGHTS, "the weights of the model"), (FACTS, "which says what the weights are of")):
        if not (folder / name).exists():
            again = f"delete {folder} and train it again{ledger.again(folder)} (pubsel runs show {folder.name})"
            raise UserError(f"{folder / name}: no such file, {what}: bring it back, or {again}")


def opened(settings: PredictConfig) -> Classifier:
    """Return the classifier of `settings.run`: of a run in results by its name, or of a folder with its files, or
    that `pubsel export` made. UserError says what is missing."""
    use_threads(settings.threads)
    device = choose_device(settings.device)
    folder = folder_of(settings.run, Path(settings.results))
    return read(folder, settings.data_root, device, settings.checkpoint)


def whole_of(folder: Path, record: dict[str, Any]) -> tuple[nn.Module, dict[str, Any]]:
    """Return the whole model of a finished run, on the CPU, and the facts about it (`classifier.facts_of`). UserError
    if it is not that of its record."""
    whole, facts = rebuilt(folder)
    if facts["weights"] != record["weights"]:
        raise UserError(f"{folder}: result.json states the guarantee of other weights: restore both from the same run")
    return whole, facts
