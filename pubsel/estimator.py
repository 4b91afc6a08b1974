"""From data that a program has to a model that may be given away: `pubsel.fit`, the `Release` that it returns, and
`pubsel.audit` of the same training."""

import json
import os
import re
import shutil
import tempfile
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pubsel import records
from pubsel.commands import fit as command
from pubsel.commands.predict import THRESHOLD, predicted
from pubsel.data.arrow import as_word
from pubsel.data.examples import folded
from pubsel.data.given import given
from pubsel.data.memory import (
    FOLDER,
    LABEL,
    NO_LABELS,
    PERSON,
    InMemory,
    are_images,
    examples_in,
    has_columns,
    holding,
    of_columns,
    strings_in,
    unwrapped,
)
from pubsel.data.tables import OUTCOMES, plain_name
from pubsel.data.texts import column_of_texts
from pubsel.messages import NO_HOME, RENAMED, UsageError, UserError, with_names
from pubsel.privacy import ledger
from pubsel.release.reopen import opened
from pubsel.settings.compose import composed, words_of
from pubsel.settings.datasets import dataset_names
from pubsel.settings.keys import AuditConfig, FitConfig, PredictConfig, Read
from pubsel.settings.schema import check

# keys of a record: figures without noise, and digests of the private data
NOT_RELEASED = ("utility", "utility_interval", "on_test", "selection", "notes", "test_examples", "seconds", "content")
# keys of the command that nobody sets here, and what does the same
REMEDIES = {"to": "save the release by .save(to)", "private": "give x", "dry": "use pubsel fit dry=true"}
IN_MEMORY = "x"  # what private data in memory are called, whose name is a digest of them, and decides `identity`


class Release:
    """A model that may be given away. Its folder is temporary and is deleted with this object; `save` copies it. A
    copy, such as a pickled one, has a folder too, but not its run. The folder alone may be given away: `record` has the
    seed, the hardware and the time, and the path of data that are not in memory.

    record: what was trained and with which guarantee (`records.RECORD`), without what is not released; privacy: the
    statement, epsilon, delta and unit; card: README.md of the folder; classes: the labels, in the order of the columns
    of `predict_proba`.
    """

    def __init__(self, folder: Path, labels: Sequence[Any], kept: Any = None):
        self.folder, self._kept = folder, kept  # which deletes the folder once nothing refers to it
        record = records.read_record(self.run / "result.json")
        private, pair = str(record["private"]), record["settings"]["pair"]
        words = {private: IN_MEMORY} | {name: f"public[{i}]" for i, name in enumerate(pair.get("candidates") or [])}
        if Path(private).parent == FOLDER:
            del record["identity"]
        for name in (name for name in words if Path(name).parent == FOLDER):
            record = json.loads(json.dumps(record).replace(name, words[name]))
        self.record = {key: value for key, value in record.items() if key not in NOT_RELEASED}
        self.privacy: dict[str, Any] = self.record["privacy"]
        self._open()
        exact = {as_word(label) if isinstance(label, bytes) else str(label): label for label in labels}
        alike = Counter(map(folded, exact))
        known = {folded(text): label for text, label in exact.items() if alike[folded(text)] == 1} | exact
        names = self._classifier.classes
        self.classes = np.array([known.get(name, known.get(folded(name), name)) for name in names])

    def _open(self) -> None:
        with composed("predict", words_of({"run": self.folder})) as values:
            self._classifier = opened(check(PredictConfig, values))

    @property
    def run(self) -> Path:
        """Return the folder of the run that it is the model of. UserError if it is a copy."""
        runs = self.folder.parent / "results" / "runs"
        if not runs.exists():
            raise UserError("run: a copy of a release has none: take that which fit returned, or fit with format=onnx")
        (folder,) = runs.iterdir()
        return folder

    def __getstate__(self) -> dict[str, Any]:
        files = {path.name: path.read_bytes() for path in self.folder.iterdir()}
        return {**self.__dict__, "folder": files, "_kept": None, "_classifier": None}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._kept = tempfile.TemporaryDirectory(prefix=records.SCRATCH)
        self.folder = Path(self._kept.name) / "release"
        self.folder.mkdir()
        for name, content in state["folder"].items():
            (self.folder / name).write_bytes(content)
        self._open()

    @property
    def card(self) -> str:
        """Return the card of the model, in Markdown."""
        return (self.folder / "README.md").read_text(encoding="utf-8")

    def predict_proba(self, x: Any) -> NDArray[np.float64]:
        """Return the probability of each class, [n, classes], or of each label by itself. x: of the kind that the model
        was trained on, as for `fit`. UserError if it is of another one."""
        rows = of_columns(x, NO_LABELS)[0] if has_columns(x) else unwrapped(x)
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
    bounds: Sequence[float] | Mapping[str, Any] | str | Path | None = None,
    scale: str = "auto",
    public_labels: str = "auto",
    held_out: float = 0.0,
    accept: Sequence[str] = (),
    results: str | Path = "results",
    verbose: bool = False,
    **settings: Any,
) -> Release:
    """Train a private linear classifier as `pubsel fit` does, on data in memory or at a path, and return its release.

    x, y, groups: as in `data.memory.examples_in`, all of which are trained on, unless a column of a table says train or
    test; or x: a path or a name, as of the command. public: other examples, (x, y) or x alone, a path or a name, or a
    list of these: one is chosen privately, or none. bounds: [least, most] of all numbers, or those of columns, or their
    words, by name, also in a JSON file; scale: private (auto): a part of epsilon brings columns to one scale; none:
    numbers stay as they are, as those of an encoder may. results: the folder with the ledger of what was released; of
    data in memory nothing else is kept. Others as of the command. UsageError names an argument that is wrong, UserError
    what is wrong with the data.
    """
    _check(settings)
    kept = tempfile.TemporaryDirectory(prefix=records.SCRATCH)
    folder = Path(kept.name)
    values = {"epsilon": epsilon, "delta": delta, "public": public, "groups": groups, "features": features}
    values |= {"bounds": bounds, "scale": scale, "public_labels": public_labels, "held_out": held_out}
    values |= {"accept": list(accept) or None, "results": folder / "results", "to": folder / "release", **settings}
    try:
        with _requested(x, y, values, folder, Path(results), verbose) as (mine, checked):
            command.run(checked)
    except BaseException:
        kept.cleanup()
        raise

    usual = {} if mine is None else {plain_name(name): name for name in reversed(mine.frame.columns)}
    column = next((usual[name] for name in map(plain_name, (LABEL, *OUTCOMES)) if name in usual), None)
    labels = () if mine is None or column is None else mine.frame[column].dropna().unique()
    return Release(folder / "release", list(labels), kept)


def audit_fit(
    x: Any,
    y: Any = None,
    *,
    kind: str = "white_box",
    canaries: int = 1000,
    guesses: float = 0.2,
    confidence: float = 0.95,
    results: str | Path = "results",
    verbose: bool = False,
    **settings: Any,
) -> tuple[dict[str, Any], Path]:
    """Audit the training that `fit` would do with these arguments, as `pubsel audit` does; return its record, and its
    folder in `results`. kind, canaries, guesses, confidence: settings of the attack. What is trained is thrown away.
    UsageError if there is no guarantee to audit, or public data to choose."""
    from pubsel.commands import audit as attacked

    _check(settings)
    of_audit = {"kind": kind, "canaries": canaries, "guesses": guesses, "confidence": confidence}
    values = {"results": Path(results), "held_out": 0.0, **settings}
    with tempfile.TemporaryDirectory(prefix=records.SCRATCH) as folder:  # noqa: SIM117
        with _requested(x, y, values, Path(folder), Path(results), verbose) as (_, checked):
            if checked.public or checked.pool:
                raise UsageError("public: the choice is not audited, only training: leave it out")
            budget = command.divided(checked)
            features = checked.features or command.features_for(command.planned(checked), checked, budget)
            words = [*command.words(checked, features, budget), *words_of({"audit": of_audit})]
            with composed("audit", words) as whole:
                requested = check(AuditConfig, whole)
                record = attacked.audit(requested)
    return record, Path(requested.results) / "audits" / record["identity"]


def _check(settings: Mapping[str, Any]) -> None:
    """Raise UsageError for a key of the command that would take the place of what is set here."""
    for key, remedy in REMEDIES.items():
        if key in settings or (key == "to" and "output" in settings):
            raise UsageError(f"{key}: no argument in Python: {remedy}")


@contextmanager
def _requested(
    x: Any, y: Any, values: dict[str, Any], folder: Path, results: Path, verbose: bool
) -> Iterator[tuple[InMemory | None, FitConfig]]:
    """Yield what is in memory of x, and the settings of the command, for as long as this data is held. values: its
    other arguments; folder: for what they write."""
    public, groups, bounds = (values.pop(key, None) for key in ("public", "groups", "bounds"))
    at_path = isinstance(x, str | Path) and y is None
    mine = None if at_path else examples_in(x, values.get("label") if y is None else y, groups)
    if groups is not None and (mine is None or values.get("unit") is not None):
        where = f"{x} is a path or a name" if mine is None else f"unit={values['unit']} names people too"
        raise UsageError(f"groups: {where}: give unit=COLUMN alone, for whose each example is")
    sets = [] if public is None else public if isinstance(public, list) else [public]
    # a list of strings has names and paths of sets, or is a set of texts
    read = Read(text=values.get("text"), label=LABEL)
    if mine is not None and column_of_texts(list(mine.frame), read) and strings_in(sets):
        known = [name for name in sets if name in dataset_names() or os.path.exists(os.path.expanduser(name))]
        sets = sets if known else [(sets, NO_LABELS)]
    sets = [sets] if mine is not None and are_images(sets, mine.x is not None) else sets
    others = list[InMemory | None]()
    for i, each in enumerate(sets):
        x_and_y = each if isinstance(each, tuple) else (each, NO_LABELS)
        try:
            others.append(None if isinstance(each, str | Path) else examples_in(*x_and_y))
        except UsageError as error:
            raise UsageError(re.sub("^[xy]:", f"public[{i}]:", str(error))) from None

    if bounds is not None and not isinstance(bounds, str | Path):
        try:  # sets, and numbers of numpy
            text = json.dumps(bounds, default=lambda each: each.tolist() if hasattr(each, "tolist") else sorted(each))
        except TypeError:
            raise UsageError(f"bounds: {bounds}: give [least, most], or a list of words, by column") from None
        bounds = json.loads(text)
        if isinstance(bounds, dict):
            (folder / "bounds.json").write_text(text, encoding="utf-8")
            bounds = folder / "bounds.json"
    with holding(mine, *others) as names, _in_words(names, results, verbose):
        listed = [name or each for name, each in zip(names[1:], sets, strict=True)]
        unit = {} if groups is None else {"unit": PERSON}
        data = {"private": names[0] or x, "public": listed or None, "bounds": bounds, **unit}
        with composed("fit", words_of(data | values)) as composed_values:
            yield mine, check(FitConfig, composed_values)


@contextmanager
def _in_words(names: Sequence[str], results: Path, verbose: bool) -> Iterator[None]:
    """Write into the ledger in `results` inside, print warnings alone unless `verbose`, and call data in memory what
    the arguments of `fit` are called. names: of these data, and nothing for others."""
    words = {name: "x" if i == 0 else f"public[{i - 1}]" for i, name in enumerate(names) if name}
    words |= {Path(name).name: word for name, word in words.items()}
    quiet = RENAMED.set(None if verbose else words)
    try:
        with ledger.kept_in(results.resolve()):
            yield
    except UserError as error:
        error.args = (with_names(str(error), words), *error.args[1:])
        raise
    except RuntimeError as error:
        if "home directory" not in str(error):
            raise
        raise UserError(NO_HOME) from None
    finally:
        RENAMED.reset(quiet)
