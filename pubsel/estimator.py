"""From data that a program has to a model that may be given away: `pubsel.fit`, and the `Release` that it returns."""

import shutil
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pubsel import records
from pubsel.commands import fit as command
from pubsel.commands.predict import THRESHOLD, predicted
from pubsel.data.examples import folded
from pubsel.data.given import given
from pubsel.data.memory import LABEL, PERSON, Held, examples_in, holding
from pubsel.messages import QUIET, UsageError
from pubsel.privacy import ledger
from pubsel.release.reopen import opened
from pubsel.settings.compose import composed, words_of
from pubsel.settings.keys import FitConfig, PredictConfig
from pubsel.settings.schema import check

NOT_RELEASED = ("utility", "utility_interval", "on_test", "selection", "notes", "test_examples")  # keys of a record


class Release:
    """A model that may be given away, in a folder of its own that goes with this object unless it is saved.

    record: what was trained and with which guarantee (`records.RECORD`), without what is not released; privacy: the
    statement, epsilon, delta and unit; card: README.md of the folder; classes: the labels, in the order of the columns
    of `predict_proba`.
    """

    def __init__(self, folder: Path, record: dict[str, Any], labels: Sequence[Any], kept: Any = None):
        self.folder, self._kept = folder, kept  # a temporary folder goes with this object
        self.record = {key: value for key, value in record.items() if key not in NOT_RELEASED}
        self.privacy: dict[str, Any] = self.record["privacy"]
        with composed("predict", words_of({"run": folder})) as values:
            self._classifier = opened(check(PredictConfig, values))
        known = {folded(str(label)): label for label in labels}
        names = self._classifier.classes
        self.classes = np.array([known.get(folded(name), name) for name in names])

    @property
    def card(self) -> str:
        """Return the card of the model, in Markdown."""
        return (self.folder / "README.md").read_text(encoding="utf-8")

    def predict_proba(self, x: Any) -> NDArray[np.float64]:
        """Return the probability of each class, [n, classes], or of each label by itself. x: of the kind that the model
        was trained on, as for `fit`. UserError if it is of another one."""
        rows = x.toarray() if hasattr(x, "toarray") else x
        parts = predicted(self._classifier, given(rows, self._classifier.takes), skip=False)
        return np.concatenate([part.probabilities for part in parts])

    def predict(self, x: Any) -> NDArray[Any]:
        """Return the most probable class of each example, [n]; with several labels an example, 0 or 1 for each,
        [n, labels]."""
        probabilities = self.predict_proba(x)
        if self._classifier.multi_label:
            return (probabilities >= THRESHOLD).astype(np.int64)
        return self.classes[probabilities.argmax(1)]

    def save(self, to: str | Path) -> Path:
        """Copy the folder, which may be given away, and return where it is. UsageError if something is there."""
        target = Path(to).expanduser()
        if target.exists():
            raise UsageError(f"to={to}: it is there already: give a new folder, or delete it")
        return Path(shutil.copytree(self.folder, target))

    def __repr__(self) -> str:
        return str(self.privacy["statement"])


def fit(
    x: Any,
    y: Any = None,
    *,
    epsilon: float = 1.0,
    delta: float = 1e-5,
    public: Any = None,
    groups: Any = None,
    features: str | None = None,
    bounds: Sequence[float] | str | Path | None = None,
    scale: str = "auto",
    public_labels: str = "auto",
    held_out: float = 0.0,
    accept: Sequence[str] = (),
    results: str | Path = "results",
    verbose: bool = False,
    **settings: Any,
) -> Release:
    """Train a private linear classifier as `pubsel fit` does, on data in memory or at a path, and return its release.

    x, y, groups: as in `data.memory.examples_in`, all of which are trained on; or x: a path or a name, as of the
    command. public: other examples, (x, y) or x alone, a path or a name, or a list of these: one is chosen privately,
    or none. bounds: [least, most] of all numbers, or a JSON file with those of each column; scale: private (auto): a
    part of epsilon brings columns to one scale; none: numbers stay as they are, as those of an encoder may. results:
    the folder with the ledger of what was released; nothing else is written. Others as of the command. UsageError names
    an argument that is wrong, UserError what is wrong with the data.
    """
    at_path = isinstance(x, str | Path) and y is None
    sets = [] if public is None else public if isinstance(public, list) else [public]
    named = [isinstance(each, str | Path) for each in sets]
    others = [examples_in(*each) if isinstance(each, tuple) else examples_in(each, _no_labels(each))
              for each, name in zip(sets, named, strict=True) if not name]  # fmt: skip
    mine = None if at_path else examples_in(x, y, groups)

    kept = tempfile.TemporaryDirectory(prefix=records.SCRATCH)
    place, quiet = ledger.PLACE.set(Path(results).resolve()), QUIET.set(not verbose)
    try:
        with holding(mine, *others) as names:
            private = str(x) if at_path else names.pop(0)
            publics = [str(each) if name else names.pop(0) for each, name in zip(sets, named, strict=True)]
            values = {"private": private, "epsilon": epsilon, "delta": delta, "public": publics or None}
            values |= {"unit": None if groups is None else PERSON, "features": features, "held_out": held_out}
            values |= {"bounds": bounds if isinstance(bounds, str | Path | None) else list(bounds), "scale": scale}
            values |= {"public_labels": public_labels, "accept": list(accept) or None}
            values |= {"results": f"{kept.name}/results", "to": f"{kept.name}/release", **settings}
            with composed("fit", words_of(values)) as checked:
                command.run(check(FitConfig, checked))
    except BaseException:
        kept.cleanup()
        raise
    finally:
        ledger.PLACE.reset(place)
        QUIET.reset(quiet)

    (run,) = (Path(kept.name) / "results" / "runs").iterdir()
    record = records.read_record(run / "result.json")
    return Release(Path(kept.name) / "release", record, _labels_in(mine), kept)


def _no_labels(x: Any) -> NDArray[np.int64]:
    """Return one label for all of some public examples, whose own labels nobody gave."""
    return np.zeros(x.shape[0] if hasattr(x, "shape") else len(x), dtype=np.int64)


def _labels_in(held: Held | None) -> list[Any]:
    """Return the labels of examples as they were given."""
    if held is None or LABEL not in held.frame:
        return []
    return [*held.frame[LABEL].dropna().unique()]
