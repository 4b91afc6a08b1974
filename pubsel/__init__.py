"""pubsel: choose and use public data for differentially private machine learning.

Each function does what the command next to it does, and takes its settings: words of the command line, or keywords,
with a mapping for dotted keys. A Record is what a command leaves in results.

    pubsel.fit(x, y, epsilon=1).predict(new)                            # pubsel fit, on arrays and tables in memory
    pubsel.rank("my_images", ["digits", "photo_patches"])               # pubsel rank
    pubsel.train("+experiment=quickstart", epsilon=4)                   # pubsel run
    pubsel.train("algorithm=dp_sgd", training={"steps": 100})
    pubsel.tune({"training.epochs": [5, 20]}, private="my_images")      # pubsel tune
    pubsel.load("results/runs/NAME")                                    # pubsel runs show
    pubsel.load("results/runs/NAME").predict("new_images")              # pubsel predict; also for an exported folder
    pubsel.open_dataset("my_images")                                    # pubsel data check
    pubsel.export("results/runs/NAME", "model", format="onnx")          # pubsel export; also for what fit returns
    pubsel.audit(x, y, epsilon=1)                                       # pubsel audit, of the training of fit
    pubsel.table("gsd_table2")                                          # pubsel table, as a pandas table
"""

from __future__ import annotations

import os
import sys

# With `python -m pubsel`, Python looks for every module in the current folder first, which may be one from others.
if sys.argv[:1] == ["-m"] and sys.path[0] == os.getcwd() != os.path.dirname(os.path.dirname(os.path.abspath(__file__))):
    del sys.path[0]

import json
from collections.abc import Mapping, Sequence
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING, Any

__version__ = "0.2.0"

from pubsel import records
from pubsel.settings.schema import leaves

if TYPE_CHECKING:
    import pandas

    from pubsel.commands.predict import Predictions
    from pubsel.data.opened import Source
    from pubsel.estimator import Release

__all__ = ["Record", "audit", "export", "fit", "load", "open_dataset", "rank", "table", "train", "tune"]


class Record(dict[str, Any]):
    """The result of a command: the keys of its result.json (`records.RECORD` says what they are), as a dictionary. It
    prints as the command does; in a notebook it also shows its keys.

    folder: the folder that contains it, with the model of a run in model.pt and model.json. Of a folder that `pubsel
    export` made, it has the keys of config.json.
    """

    def __init__(self, values: Mapping[str, Any], folder: Path, text: str):
        super().__init__(values)
        self.folder, self.text = folder, text

    def __repr__(self) -> str:
        return self.text

    def _repr_html_(self) -> str:
        values = {key: text if isinstance(text, str) else json.dumps(text) for key, text in leaves(self)}
        rows = "".join(
            f'<tr title="{escape(records.RECORD.get(key, ""))}"><th>{escape(key)}</th><td>{escape(value)}</td></tr>'
            for key, value in values.items()
        )
        title = f"<summary>{escape(str(self.folder))}</summary>"
        return f"<pre>{escape(self.text)}</pre><details>{title}<table>{rows}</table></details>"

    def predict(self, images: Any, *words: str, **settings: Any) -> Predictions:
        """Classify images with the model of this run, as `pubsel predict` does: `answers` has the name of a class for
        each, `probabilities` the probability of each class, [n, classes].

        images: paths (an image, a folder, a CSV, an npz), PIL images, uint8 arrays [n, h, w] or [n, h, w, 3], uint8
        tensors [n, c, h, w], or a list of these, of any size and colour. settings: those of the command, such as
        device="cpu" or skip=True. UserError says which image cannot be read, or why there is no model.
        """
        from pubsel.commands.predict import predict
        from pubsel.settings.compose import composed, words_of
        from pubsel.settings.keys import PredictConfig
        from pubsel.settings.schema import check

        with composed("predict", [*words, *words_of({"run": self.folder, **settings})]) as values:
            return predict(check(PredictConfig, values), images)


def train(*words: str, config_dir: str | Path | None = None, **settings: Any) -> Record:
    """Train one cell as `pubsel run` does, and return its record: a finished one is read, a stopped one resumed.

    words: of the command line, "+experiment=quickstart"; settings: epsilon=4, pair={"private": "my_images"};
    config_dir: a folder with options of your own. UsageError names a setting that is wrong; UserError says why a run
    failed.
    """
    from pubsel.release.run import run, show_run
    from pubsel.settings.compose import composed, words_of
    from pubsel.settings.keys import RunConfig
    from pubsel.settings.schema import check

    every_word = records.expanded("run", [*words, *words_of(settings)])
    with composed("run", every_word, config_dir) as values:
        checked = check(RunConfig, values)
        record = run(checked)
    return Record(record, Path(checked.results) / "runs" / record["identity"], show_run(record))


def tune(
    over: str | Mapping[str, Sequence[Any]], *words: str, config_dir: str | Path | None = None, **settings: Any
) -> Record:
    """Train with several settings, choose the best of them privately, and release only that one, as `pubsel tune` does;
    return its record, which is empty with dry=True.

    over: the settings to choose from, {"training.learning_rate": [0.1, 1]}, or a text as on the command line; epsilon:
    that of all runs, the choice and the measurement together; runs, held_out and jobs: as for the command; words and
    all other settings: as for `train`.
    """
    from pubsel.commands.tune import tuned
    from pubsel.settings.command_line import written
    from pubsel.settings.compose import composed, words_of
    from pubsel.settings.keys import TuneConfig
    from pubsel.settings.schema import check, keys_of

    of_tune = {key: settings.pop(key) for key in keys_of(TuneConfig) if key in settings}
    if not isinstance(over, str):
        over = " ".join(f"{key}={','.join(written(value) for value in values)}" for key, values in over.items())
    of_tune |= {"over": over, "words": [*words, *words_of(settings)]}
    with composed("tune", words_of(of_tune), config_dir) as values:
        return Record(*tuned(check(TuneConfig, values)))


def fit(x: Any, y: Any = None, **settings: Any) -> Release:
    """Train a model that may be given away, as `pubsel fit` does, on data in memory or at a path. Its arguments are
    those of `pubsel.estimator.fit`: epsilon, delta, public, groups, bounds, scale, ..."""
    from pubsel.estimator import fit as of_data

    return of_data(x, y, **settings)


def export(
    run: str | Path | Record | Release,
    to: str | Path,
    *,
    format: str = "safetensors",
    anyway: bool = False,
    hub: str | None = None,
    results: str | Path = "results",
    **settings: Any,
) -> Record:
    """Make a folder that may be given away as `pubsel export` does, and return the facts in its config.json.

    run: what `fit`, `train` or `load` returned, or the name of a run in `results`, or its folder. format: onnx adds
    model.onnx; anyway: also a run that no guarantee covers; hub: OWNER/NAME on Hugging Face. UserError says why a run
    may not or cannot be given away.
    """
    from pubsel.commands.export import run as write
    from pubsel.settings.compose import composed, words_of
    from pubsel.settings.keys import ExportConfig
    from pubsel.settings.schema import check

    place = run if isinstance(run, str | Path) else run.folder if isinstance(run, Record) else run.run
    values = {"run": place, "to": to, "format": format, "anyway": anyway, "hub": hub, "results": results, **settings}
    with composed("export", words_of(values)) as words:
        text = write(check(ExportConfig, words))
    record = load(to)
    record.text = text
    return record


def audit(x: Any, y: Any = None, **settings: Any) -> Record:
    """Audit the training that `fit` does of the same arguments, as `pubsel audit` does, and return the record, which is
    kept in `results`. Its further arguments are those of `pubsel.estimator.audit_fit`: kind, canaries, confidence, ...;
    `pubsel audit` audits any other training."""
    from pubsel.commands.audit import show_audit
    from pubsel.estimator import audit_fit

    record, folder = audit_fit(x, y, **settings)
    return Record(record, folder, show_audit(record if isinstance(x, str | Path) else record | {"private": "x"}))


def table(name: str, results: str | Path = "results") -> pandas.DataFrame:
    """Return the rows of a table as `pubsel table` shows them, from the records in `results`, next to the paper's
    figures. Nothing is written. UsageError if there is no such table."""
    from pubsel.papers.typeset import shown_rows

    return shown_rows(name, Path(results))


def rank(
    private: str | Path,
    public: str | Path | Sequence[Any],
    *words: str,
    config_dir: str | Path | None = None,
    **settings: Any,
) -> Record:
    """Order public sets by their distance to private data as `pubsel rank` does, and return the record of it; with
    epsilon_select=..., choose one of them privately.

    private: a name or a path; public: several of them, each of which may be a list that is joined. Others as for
    `train`.
    """
    from pubsel.commands.rank import rank, show_rank
    from pubsel.settings.compose import composed, words_of
    from pubsel.settings.keys import RankConfig
    from pubsel.settings.schema import check

    several = [public] if isinstance(public, str | Path) else list(public)
    named = words_of({"private": private, "public": several, **settings})
    with composed("rank", records.expanded("rank", [*words, *named]), config_dir) as values:
        checked = check(RankConfig, values)
        record = rank(checked)
    return Record(record, Path(checked.results) / "ranks" / record["identity"], show_rank(record))


def load(name: str | Path, results: str | Path = "results") -> Record:
    """Read the record of a run, a rank or an audit: by the name of its folder in `results`, its folder, or its file; or
    config.json of a folder that `pubsel export` made. UserError if there is none, or if it does not read."""
    exported = Path(name).expanduser()
    if (exported / "config.json").is_file() and not (exported / "result.json").exists():
        from pubsel.release.classifier import read_facts

        facts = read_facts(exported / "config.json")
        return Record(facts, exported, str(records.at(facts, "privacy.statement")))
    record, folder = records.find(str(name), Path(results))
    return Record(record, folder, _text(record))


def _text(record: dict[str, Any]) -> str:
    """Return a record as its command shows it."""
    if "order" in record or "chosen" in record:
        from pubsel.commands.rank import show_rank

        return show_rank(record)
    if "claimed" in record:
        from pubsel.commands.audit import show_audit

        return show_audit(record)
    from pubsel.release.run import show_run

    return show_run(record)


def open_dataset(name: str | Path, data_root: str | Path = "data", download: bool = False, keep: bool = True) -> Source:
    """Open a named dataset or a path (a folder of images, a CSV file, an npz file) as a run would: its training and
    test split with images [n, c, h, w] in bytes, and what there is to say of them. UserError says what is missing, or
    which file does not read. keep: whether many images of your own are kept decoded in data_root, for the next time."""
    from pubsel import data

    return data.open_dataset(str(name), str(data_root), download, keep=keep)
