"""`pubsel make NAME`: run what a table or figure still lacks, then write it.

The file of a table (conf/tables), or of other work (conf/work), lists under `runs` commands as they follow
`pubsel`, of these kinds:

    run WORDS, rank WORDS      a sweep, whose cells are run unless their records are there; several that follow each
                               other are one sweep, by Hydra's --multirun and the launcher that is given
    attack, audit, figure      with WORDS; each reads its record if there is one
    table NAME                 the last step of a table's file, added by itself
    make NAME                  the steps of another file
    more_seeds 1,2 WORDS       the cells that this table selects from the records so far, with these seeds, and WORDS
                               such as pair.seed=${seed}, too

A command with a key in braces is one command for each of the file's `parts`: {part} is the name of the part, the other
keys are what the file gives it; a part for which it gives null has no such command. NAME_PART makes one part. `common`
is put before the words of each run.
"""

import gc
import json
import math
import shlex
import statistics
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from operator import attrgetter
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

from hydra import compose
from hydra._internal.core_plugins.basic_sweeper import BasicSweeper
from hydra.core.global_hydra import GlobalHydra
from hydra.core.hydra_config import HydraConfig
from hydra.core.override_parser.overrides_parser import OverridesParser
from omegaconf import DictConfig

from pubsel import records as results
from pubsel.messages import UsageError, UserError, duration, say
from pubsel.papers import draw, intended, join
from pubsel.papers.join import Spec, Work
from pubsel.papers.measured import read_kind
from pubsel.settings import command_line, named
from pubsel.settings.compose import renamed
from pubsel.settings.copies import CellCopies, settings_part
from pubsel.settings.identity import as_json, default_of, run_name
from pubsel.settings.keys import SCHEMAS, MakeConfig, RankConfig, RunConfig
from pubsel.settings.schema import check, leaves, nearest, neutral

SWEPT = ("run", "rank")
# keys of a run on whose positive numbers, and on seed 0, no rule depends; each with a number that is in no file
PROBES = {"seed": 987_654_321, "epsilon": 0.24681357, "training.learning_rate": 0.013579246}
KINDS = (*SWEPT, "attack", "audit", "figure", "table", "make", "more_seeds")
Start = Callable[[str, list[str]], int]  # a command and its words; its exit code


class Step(NamedTuple):
    """One command of a file, of one part."""

    of: str  # the name of the file
    command: str  # of KINDS, but not make
    words: list[str]


class SweptCell(NamedTuple):
    """One cell of a sweep: its words, the name of its record, and its settings."""

    words: list[str]
    name: str
    settings: dict[str, Any]


# Which steps there are


def works() -> dict[str, tuple[Path, type[Work]]]:
    """Return the files that can be made, by name; a table before other work of the same name."""
    others = {name: (path, Work) for name, path in named("work").items()}
    return others | {name: (path, Spec) for name, path in named("tables").items()}


def work_of(name: str) -> tuple[str, Work, list[str]]:
    """Return the file that NAME or NAME_PART means: its name, its content, and which of its parts; UsageError if there
    is none, or it lists no commands."""
    known = works()
    # the longest name first: a file's name may begin with another's
    for stem in sorted(known, key=len, reverse=True):
        if name != stem and not name.startswith(f"{stem}_"):
            continue

        path, kind = known[stem]
        work: Work = join.read_work(kind, path, "gsd_table2.yaml")

        part = name.removeprefix(stem).removeprefix("_")
        if part and part not in work.parts:
            continue
        if not work.runs:
            raise UsageError(f"{name}: {path.name} lists no runs: pubsel table {stem} shows the records that there are")

        return stem, work, [part] if part else list(work.parts)
    raise UsageError(f"cannot make {name!r}{nearest(name, known)}: use one of {', '.join(sorted(known))}")


def steps_of(name: str, within: tuple[str, ...] = ()) -> list[Step]:
    """Return all steps of NAME or NAME_PART in order, those of other files that it makes first included.
    UserError for a step that cannot be."""
    stem, work, parts = work_of(name)
    if stem in within:
        raise UserError(f"runs of {stem}: it makes itself, by {' > '.join((*within, stem))}: take one of them out")

    steps: list[Step] = []
    for text in work.runs:
        command, _, words = text.partition(" ")
        if command not in KINDS:
            raise UserError(f"runs of {stem}: {command!r} is no command here: use {', '.join(KINDS)}")
        words = f"{work.common} {words}" if command == "run" else words

        each = "{" in words and command != "more_seeds"  # whose cells are those of all parts
        for part in parts if each and parts else [""]:
            values = {"part": part, **(work.parts.get(part) or {})}
            if each and any(value is None and f"{{{key}}}" in words for key, value in values.items()):
                continue
            try:
                written = words.format(**values) if each else words
            except (KeyError, ValueError, IndexError) as error:
                raise UserError(f"runs of {stem}: {words}: its parts give no {error}; a brace itself is {{{{") from None
            if command == "make":
                steps += steps_of(written.strip(), (*within, stem))
            else:
                several = shlex.split(written)
                steps.append(Step(stem, command, renamed(command, several) if command in SWEPT else several))

    return [*steps, Step(stem, "table", [stem])] if isinstance(work, Spec) else steps


# Which cells a sweep has


@dataclass
class Composer:
    """The cells of a command's sweeps, within a command of Hydra; composing each of thousands takes minutes."""

    command: str  # of SWEPT
    with_hydra: dict[tuple[str, ...], DictConfig] = field(default_factory=dict)  # by what is composed
    numbers: dict[str, float] = field(default_factory=dict)  # of words that were checked, of the keys of PROBES
    texts: dict[tuple[str, ...], str] = field(default_factory=dict)  # settings as JSON, by words with PROBES
    words: CellCopies = field(init=False)

    def __post_init__(self) -> None:
        self.words = CellCopies(
            lambda words: settings_part(SCHEMAS[self.command], self._with_hydra(tuple(words))),
            lambda key: GlobalHydra.instance().config_loader().get_group_options(key),
        )

    def cells(self, words: Sequence[str], public: str | None = None) -> list[list[str]]:
        """Return the words of each cell of a sweep, the sweep of an experiment included. public: in place of the single
        public sets that the sweep goes through."""
        parsed = [self.words.read(word) for word in words]
        # the words that are the same in all cells choose the experiment, which may have a sweep
        _, options = self.words.apart([word for word in parsed if not word.is_sweep_override()])
        params = self._with_hydra(options).hydra.sweeper.get("params") or {}
        swept = [*(self.words.read(f"{key}={value}") for key, value in params.items()), *parsed]
        last = [word for word in swept if word.key_or_group == "pair.public"][-1:]
        # combined public sets, such as [a,b], are what a table is about: they stay
        goes = list(last[0].sweep_string_iterator()) if last and last[0].is_sweep_override() else []
        if public is not None and goes and not any(value.startswith("[") for value in goes):
            swept.append(self.words.read(f"pair.public={public}"))
        (cells,) = BasicSweeper.split_arguments(swept, None)
        return [list(cell) for cell in cells]

    def composed(self, cell: Sequence[str]) -> DictConfig:
        """Return the values of a cell, in the types of the command's settings, until those of the next cell."""
        values = self.words.composed(cell)
        return compose(self.command, list(cell)) if values is None else values

    def _with_hydra(self, options: tuple[str, ...]) -> DictConfig:
        if options not in self.with_hydra:
            self.with_hydra[options] = compose(self.command, list(options), return_hydra_config=True)
        return self.with_hydra[options]

    def cell(self, words: list[str]) -> SweptCell:
        """Return a cell with the name that its record has, or will have."""
        if self.command == "run":
            settings = self._settings(words)
            return SweptCell(words, run_name(settings), settings)
        from pubsel.commands import rank

        ranked = rank.canonical_rank(check(RankConfig, self.composed(words)))
        return SweptCell(words, rank.identity(ranked), as_json(ranked))

    def _settings(self, words: list[str]) -> dict[str, Any]:
        """Return the settings of a run. Cells that differ in numbers of PROBES alone are checked once, and differ in
        the text of these numbers, wherever they are."""
        from pubsel.rules import canonical  # and with it torch

        # the last word of a key counts; epsilon 0 and a rate of 0 are others
        last = {self.words.read(word).key_or_group: word for word in words}
        values: dict[str, Any] = {key: self.words.read(last[key]).value() for key in PROBES if key in last}
        numbers = {key: value for key, value in values.items() if type(value) in (int, float)}
        free = {key: last[key] for key, value in numbers.items() if 0 < value < math.inf or (key, value) == ("seed", 0)}
        if not self.numbers.keys() >= set(free.values()):
            checked = check(RunConfig, self.composed(words))
            settled = {key: attrgetter(key)(checked) for key in free}
            self.numbers |= {word: settled[key] for key, word in free.items() if settled[key] == values[key]}
            return as_json(canonical(checked))

        probes = {word: f"{word.partition('=')[0]}={PROBES[key]}" for key, word in free.items()}
        probed = tuple(probes.get(last[self.words.read(word).key_or_group], word) for word in words)
        if probed not in self.texts:
            self.texts[probed] = json.dumps(as_json(canonical(check(RunConfig, self.composed(probed)))), default=str)
        text = self.texts[probed]
        for key, word in free.items():
            text = text.replace(str(PROBES[key]), str(self.numbers[word]))
        settings: dict[str, Any] = json.loads(text)
        # settings leave out a default, which a key that follows seed 0 has
        for key, value in [*leaves(settings)] if values.get("seed") == 0 else []:
            group, _, name = key.rpartition(".")
            if value == 0 == default_of(key):
                del results.at(settings, group)[name]
        return settings


def seeded(
    table: str,
    seeds: list[int],
    records: list[dict[str, Any]],
    composer: Composer,
    free: list[str],
    words: Sequence[str] = (),
) -> list[SweptCell]:
    """Return the cells that a table selects from the records of runs, with each of `seeds` and with `words`. free:
    words that change no result. UserError for a record that the settings of today would not give."""
    cells = []
    for cell in join.table_cells(table, intended.with_own_label(table, records)):
        have = {record["seed"]: record for record in cell.records}
        for seed in seeds:
            if seed in have and not words:
                cells.append(SweptCell([], have[seed]["identity"], have[seed]["settings"]))
                continue

            settings = cell["settings"] | {"seed": seed}
            overrides = command_line.overrides(settings)
            again = composer.cell([*overrides, *free])
            if again.settings != settings:
                raise UserError(f"{cell['identity']}: other settings now, which give {again.name}: run its sweep again")
            cells.append(composer.cell([*overrides, *words, *free]) if words else again)

    return cells


# What is there, and how long the rest takes


@dataclass
class KnownRuns:
    """The records of runs in a folder of results; the names of these and of ranks; and for records of one kind, whose
    seconds grow alike, the number of private examples and the seconds for a unit of work."""

    runs: list[dict[str, Any]]
    names: set[str] = field(default_factory=set)
    rates: dict[str, list[tuple[int, float]]] = field(default_factory=dict)

    @classmethod
    def read(cls, folder: Path) -> "KnownRuns":
        """Return what RESULTS/runs and ranks contain, and the records kept with the code in RESULTS/records."""
        kept = cls(results.read_records(folder))
        for record in [*kept.runs, *read_kind(folder, "ranks")]:
            kept.names.add(record["identity"])
            settings, n = record["settings"], record.get("private_examples") or 1
            if "seconds" in record:
                rate = max(record["seconds"], 0.05) / work_in(settings, n)  # as recorded, rounded to 0.1
                kept.rates.setdefault(kind_of(settings), []).append((n, rate))
        return kept

    def expected(self, settings: dict[str, Any]) -> float | None:
        """Return the seconds that a cell will take, in proportion to those of the records of its kind (the median);
        None if there is none."""
        rates = self.rates.get(kind_of(settings), [])
        work = {n: work_in(settings, n) for n in {n for n, _ in rates}}
        return statistics.median(rate * work[n] for n, rate in rates) if rates else None


def kind_of(settings: dict[str, Any]) -> str:
    """Return what cells have in common whose seconds grow with their work alone: the algorithm (of a rank: the
    distance), the model, and the private data with all that decides how many of them there are."""
    pair = settings.get("pair") or {"private": settings.get("private")}
    method = settings.get("algorithm") or settings.get("distance") or {}
    data = {key: value for key, value in pair.items() if key not in ("public", "seed")}
    return json.dumps([method.get("name"), results.at(settings, "model.name"), data], sort_keys=True)


def work_in(settings: dict[str, Any], n: int) -> float:
    """Return the examples in all steps on n private examples (of a rank: in all its measurements), times the k of the
    algorithm or distance, if it has one."""
    method = settings.get("algorithm") or settings.get("distance") or {}
    k = float(method.get("k") or 1)
    if "training" in settings:
        from pubsel.privacy.sampling import schedule  # and with it torch

        plan = schedule(n, SimpleNamespace(**{"steps": None} | settings["training"]))  # type: ignore[arg-type]
        return k * plan.steps * plan.batch_size
    return k * len(settings.get("public") or [0]) * (method.get("m") or 1) * (method.get("initialisations") or 1)


def summary_line(name: str, cells: list[SweptCell], kept: KnownRuns) -> str:
    """Return how many cells are there, and what the others will take, one after the other."""
    missing = [cell for cell in cells if cell.name not in kept.names]
    if not missing:
        return f"{name}: all of {len(cells)} cells are there" if cells else f"{name}: no cells to run"
    took = [kept.expected(cell.settings) for cell in missing]
    known = [seconds for seconds in took if seconds is not None]
    hours = f"about {duration(sum(known))}, by the records of the same kind" if known else "hours unknown"
    hours += f", and {len(took) - len(known)} of unknown length" if 0 < len(known) < len(took) else ""
    present = len(cells) - len(missing)
    return f"{name}: {present} of {len(cells)} cells are there; the other {len(missing)}: {hours}"


# The command


def run(settings: MakeConfig, start: Start) -> str:
    """Do what is missing of `settings.name`, or with `dry` only list it; return the text for the screen. start: starts
    another command. UserError if one of them fails; the same command resumes there."""
    folder, steps = Path(settings.results), steps_of(settings.name)
    plan = Steps(settings, folder)
    if settings.dry:
        # little of it is garbage in cycles, and looking for that among thousands of records takes a sixth of the time
        gc.disable()
        try:
            return plan.listing(settings.name, steps)
        finally:
            gc.enable()

    # the cells of sweeps that follow each other are one sweep, so that a launcher is busy to the end
    for (command, seeds), together in groupby(steps, key=lambda step: (swept_by(step), step.command == "more_seeds")):
        if not command:
            for step in together:
                _succeed(settings.name, start(step.command, plan.words(step)))
            continue

        kept = KnownRuns.read(folder)
        cells = plan.cells(list(together), kept.runs)
        say(summary_line(f"{settings.name}, {'more seeds' if seeds else command}", cells, kept))
        missing = [cell for cell in cells if cell.name not in kept.names]

        if missing:
            with tempfile.TemporaryDirectory() as here:
                file = Path(here) / "cells"
                file.write_text("".join(f"{shlex.join(cell.words)}\n" for cell in missing), encoding="utf-8")
                of_cells = f"hydra.sweeper.cells={command_line.written(str(file))}"
                words = ["-m", *plan.options, *plan.hydra, *plan.free, of_cells]
                _succeed(settings.name, start(command, words))

    return f"{settings.name}: made"


def swept_by(step: Step) -> str:
    """Return the command that runs the cells of a step; "" if it has none."""
    return "run" if step.command == "more_seeds" else step.command if step.command in SWEPT else ""


def _succeed(name: str, code: int) -> None:
    if code:
        raise UserError(f"{name}: stopped, since a step failed; pubsel make {name} runs only what is missing")


class Steps:
    """The expansion of the steps of one `pubsel make`, with the words of its command line."""

    def __init__(self, settings: MakeConfig, folder: Path):
        self.settings, self.folder = settings, folder
        self.composers = {command: Composer(command) for command in SWEPT}
        self.results = f"results={command_line.written(settings.results)}"

        # what changes no result goes to the sweep too, which asks for a device and a folder before it has a cell
        without_result = {name for schema in (RunConfig, RankConfig) for name in neutral(schema)}
        self.typed = [command_line.override(word) for word in settings.words]
        parsed = OverridesParser.create().parse_overrides(self.typed)
        fixed = [word for word in parsed if not word.is_sweep_override()]
        free = [word for word in fixed if word.key_or_group in without_result]
        self.free = [*(str(word.input_line) for word in free), self.results]

        # steps are commands of their own, with the same --config-dir; sweeps also with the same launcher
        hydra = HydraConfig.get()
        sources = [source for source in hydra.runtime.config_sources if source.provider == "command-line"]
        self.options = [f"--config-dir={source.path}" for source in sources]
        self.hydra = [word for word in hydra.overrides.hydra if not word.startswith("hydra.mode=")]

    def cells(self, steps: list[Step], records: list[dict[str, Any]]) -> list[SweptCell]:
        """Return the cells of steps that are swept by one command, each once. records: those of runs."""
        by_name: dict[str, SweptCell] = {}
        for step in steps:
            composer = self.composers[swept_by(step)]
            if step.command == "more_seeds":
                seeds = [int(seed) for seed in step.words[0].split(",")]
                cells = seeded(step.of, seeds, records, composer, self.free, step.words[1:])
            else:
                words = [*step.words, *self.typed, self.results]
                cells = [composer.cell(cell) for cell in composer.cells(words, self.settings.public)]
            by_name |= {cell.name: by_name.get(cell.name, cell) for cell in cells}
        return list(by_name.values())

    def words(self, step: Step) -> list[str]:
        """Return the words of a step that is no sweep. A table, and a figure of records, needs nothing but the
        folder."""
        drawn = step.command == "figure" and step.words[0] not in draw.MEASURED
        of_records = step.command == "table" or drawn
        common = [self.results] if of_records else [*self.typed, self.results]
        public = self.settings.public
        sets = f"sets=[{public.removeprefix('[').removesuffix(']')}]" if public else ""
        words = [sets if sets and word.startswith("sets=") else word for word in step.words]
        return [*words, *common, *self.options]

    def listing(self, name: str, steps: list[Step]) -> str:
        """Return a line for each cell and each other step, and the summary."""
        kept, every = KnownRuns.read(self.folder), dict[str, SweptCell]()
        lines = [work_of(name)[1].title, ""]
        for step in steps:
            if not swept_by(step):
                lines.append(f"then     pubsel {shlex.join([step.command, *self.words(step)])}")
                continue

            for cell in self.cells([step], kept.runs):
                if cell.name not in every:
                    every[cell.name] = cell
                    seconds = kept.expected(cell.settings)
                    took = "unknown" if seconds is None else duration(seconds)
                    there = cell.name in kept.names
                    lines.append(f"there    {cell.name}" if there else f"missing  {cell.name}  ({took})")

        return "\n".join([*lines, summary_line(name, list(every.values()), kept)])
