"""`pubsel tune over="KEY=A,B ..." epsilon=E`: the best of several settings, with one guarantee for all that was tried.

One program, which is (epsilon, delta)-private as a whole. Private units are on three sides, each by itself:

- Training units: a secret number of runs (`pubsel.privacy.repeated`) each draw one of the settings and train.
- One half of the held-out units chooses: each run counts on them, with noise, what its model gets right. A unit changes
  either the training or the counts, so each has the whole epsilon of a run. Only the best run is released.
- The other half measures the released model, with all of epsilon and delta (`pubsel.release.measurement`). Its counts
  are not those that chose, so no interval is about the luckiest of several.

Each run is a separate `pubsel run`, one after another or `jobs` at a time, in a folder that only the owner can read and
that is removed at the end. A run that gives no model has the lowest score: a command that stopped would say something
of the data.
"""

import itertools
import math
import re
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.errors import HydraException

from pubsel import records
from pubsel.algorithms import Solves
from pubsel.cell import Cell, Spending, units_of
from pubsel.data import Split, Task
from pubsel.files import write_whole
from pubsel.messages import RENAMED, UsageError, UserError, logged, out_of_memory, say
from pubsel.privacy import accountant, ledger, repeated
from pubsel.privacy.accountant import Plan
from pubsel.privacy.randomness import Secret, below
from pubsel.release import classifier, measurement, quality, reopen
from pubsel.release import run as training
from pubsel.rules import AUTO, canonical, check_measured, check_pair, has_paths, sets_of
from pubsel.settings import own_folders
from pubsel.settings.compose import composed, words_of
from pubsel.settings.identity import as_json, folder_name, identity_of, short_name
from pubsel.settings.keys import POOL, Accounting, RunConfig, Take, TuneConfig
from pubsel.settings.schema import check
from pubsel.training import workers
from pubsel.training.once import Prepared, released_once

WIDE = 0.1  # how far apart noise alone may set two scores, above which choosing hardly pays
RUNS = "tuning"  # the folder of the runs, below that of what is released
FAILED = "failed"  # a file in the folder of a run that gave no model
MAY_DIFFER = ("model", "algorithm", "training", "label")  # of the settings; and of the pair:
PUBLIC_PARTS = ("public", "m", "convert")
WORDS = re.compile(r"""(?:'[^']*'|"[^"]*"|\S)+""")  # of `over`: blanks part them, except between quotes
DECIDED = {  # keys of `run` that tune sets itself, and how
    "pair.validation": "held_out= sets it",
    "pair.reserved": "held_out= sets it",
    "privacy.secure_noise": "its noise is never seeded",
    "privacy.measure": "it always measures",
    "distance": "it measures none",
}
AGREEING = ("privacy.secure_noise=true", "privacy.measure=true", "distance=none")
CHOOSE = "choose among model, algorithm, training or public data"


class Candidate(NamedTuple):
    """One of the settings: its words, those of a `pubsel run` with all of epsilon, and that run with its data."""

    words: str
    settings: RunConfig
    cell: Cell
    task: Task

    def costs(self, epsilon: float, delta: float) -> list[Plan]:
        """Return the releases of training units by a run with this budget."""
        budget = self.cell.budget._replace(epsilon=epsilon, delta=delta)
        cell, units = self.cell._replace(budget=budget).derived(self.task), self.task.units
        _, spend, first = cell.guarantee(units, lambda _: None)
        if isinstance(cell.algorithm, Solves):
            # its loop, and what of its budget the plan of that loop does not list
            spend = cell.algorithm.account(units, epsilon, delta)
            rest = epsilon - spend.epsilon
            return [spend, accountant.pure(rest, 1.0, 1, "") if rest > 0 else accountant.NOTHING]
        assert spend is not None
        return [spend, *([first] if first and not cell.algorithm.first_steps else [])]


class Tuning(NamedTuple):
    """A planned command. cell: that of the first candidate, with the name, the folder and the streams of the whole;
    runs: the mean of their number; epsilon, delta: of each run."""

    candidates: list[Candidate]
    cell: Cell
    runs: float
    epsilon: float
    delta: float


class Scored(NamedTuple):
    """A run with its noisy score: its record, its folder, and what it was drawn from."""

    score: float
    record: dict[str, Any]
    folder: Path
    candidate: Candidate


def run(settings: TuneConfig) -> str:
    """Print the plan, then make the runs, choose, and measure; return what to print. UsageError for settings that do
    not fit together, UserError if no run gives a model."""
    return tuned(settings)[2]


def tuned(settings: TuneConfig) -> tuple[dict[str, Any], Path, str]:
    """Do the same, and return the record, which is empty if only the plan is wanted, its folder, and what to print."""
    private = {} if settings.private is None else {"pair.private": settings.private}
    words = records.expanded("run", [*settings.words, *words_of(private)])
    with composed("run", words, next(iter(own_folders()), None)) as values:
        check_pair(check(RunConfig, values))
        requested = _requested(settings, words)
        first = next(iter(requested.values()))
        runs = float(len(requested)) if settings.runs is None else settings.runs
        what = {"over": [as_json(canonical(read)) for read in requested.values()], "runs": runs}
        data = short_name(first.pair.private)
        name = folder_name(f"{data}-tuned-eps{settings.epsilon:g}-seed{first.seed}", what)
        folder = Path(first.results) / "runs" / name
        if settings.dry or not (folder / "result.json").exists():
            candidates = list(_with_data(requested))
            tuning = _planned(candidates, name, what, runs)
            plan = "\n".join(_plan(settings, tuning))
            if settings.dry:
                return {}, folder, f"{plan}\ndry=true: nothing was trained, and nothing spent"

        record, is_new = records.recorded(folder, lambda: _released(tuning, plan, settings))
        try:
            if (folder / RUNS).exists():
                shutil.rmtree(folder / RUNS)
        except OSError as error:
            say(f"warning: {folder / RUNS}: cannot be removed ({error.strerror}): delete it, no guarantee covers it")
        training.remove_unfinished(folder)
        if not is_new and has_paths([first.pair.private, *sets_of(first.pair)]):
            say(f"{name}: finished before; if its files have changed, delete {folder}{ledger.again(folder)}")
    chosen = f"  chosen, of {len(requested)}: {record['tuning']['chosen']}"
    give = f"  To give it away: pubsel export {name} to=FOLDER"
    return record, folder, f"{training.show_run(record)}\n{chosen}\n{give}"


# The plan


def grid(over: str) -> list[list[str]]:
    """Return the words of each of the settings, all combinations of the values of each key in Hydra's grammar.
    UsageError for other words, or if there is one setting alone."""
    keys = []
    for word in WORDS.findall(over):
        try:
            parsed = OverridesParser.create().parse_override(word)
        except HydraException:
            raise UsageError(f"over: cannot read {word!r}: write KEY=A,B") from None
        if parsed.is_sweep_override() and not parsed.is_discrete_sweep():
            raise UsageError(f"over: {word}: give its values, KEY=A,B")
        values = parsed.sweep_string_iterator() if parsed.is_sweep_override() else [parsed.get_value_element_as_str()]
        keys.append([f"{parsed.get_key_element()}={value}" for value in values])
    cells = [list(cell) for cell in itertools.product(*keys)]
    if len(cells) < 2:
        raise UsageError(f"over={over}: one setting, so there is nothing to choose: give KEY=A,B")
    return cells


def _requested(settings: TuneConfig, words: list[str]) -> dict[str, RunConfig]:
    """Return the settings of a run with all of epsilon, by the words of each candidate. UsageError if they differ in
    what decides the side of a private unit, or the guarantee."""
    # nothing that was requested is replaced without a word
    for word in settings.words:
        key = word.lstrip("+").partition("=")[0]
        if key in DECIDED and word.lstrip("+") not in AGREEING:
            raise UsageError(f"{word}: pubsel tune decides it ({DECIDED[key]}): leave it out")

    requested, seen = dict[str, RunConfig](), dict[str, str]()
    for cell in grid(settings.over):
        with composed("run", [*words, *cell], next(iter(own_folders()), None)) as values:
            read = check(RunConfig, values)
        pair = replace(read.pair, validation=settings.held_out, reserved=settings.held_out / 2)
        privacy = replace(read.privacy, secure_noise=True, measure=True)
        if pair.public in (AUTO, POOL):
            raise UsageError(f"pair.public={pair.public}: each run would choose again: give the public set")
        if privacy.accounting != Accounting.prv:
            raise UsageError(f"privacy.accounting={privacy.accounting.name}: no guarantee to compose: take prv")
        whole = replace(read, epsilon=settings.epsilon, pair=pair, privacy=privacy, distance=None)
        check_measured(canonical(whole))
        before = seen.setdefault(identity_of(canonical(whole)), " ".join(cell))
        if len(seen) == len(requested):
            raise UsageError(f"over: {before}, {' '.join(cell)}: the same run: {CHOOSE}")
        requested[" ".join(cell)] = whole

    # a unit that trains in one run and scores in another would be in both sides of the guarantee
    def fixed(read: RunConfig) -> dict[str, Any]:
        values = {key: value for key, value in as_json(read).items() if key not in MAY_DIFFER}
        of_public = () if read.pair.take == Take.train else PUBLIC_PARTS
        return values | {"pair": {key: value for key, value in values["pair"].items() if key not in of_public}}

    first, *others = requested.items()
    for cell_words, read in others:
        if fixed(read) != fixed(first[1]):
            raise UsageError(f"over: {first[0]}, {cell_words}: {CHOOSE}")
    return requested


def _with_data(requested: dict[str, RunConfig]) -> Iterator[Candidate]:
    """Yield each candidate with its data. UsageError for a delta that is too large for one of the three sides, and for
    a run that would stop once it has begun."""
    tasks = dict[str, Task]()
    for words, read in requested.items():
        cell = Cell.of(canonical(read))
        key = str((as_json(cell.inputs.pair), cell.inputs.backbone))
        if key not in tasks:
            tasks[key] = cell.load_task()
            training.check_sides(cell, tasks[key])
            units = (tasks[key].units, tasks[key].held_out_units, _to_measure(cell).held_out_units)
            for n in units:
                accountant.check_delta(cell.budget.delta, n, cell.budget.weak)
        candidate = Candidate(words, read, cell, tasks[key])
        training.check_ready(cell, candidate.task)
        yield candidate


def _to_measure(cell: Cell) -> Task:
    """Return the data with the other half of the held-out units, which choose nothing."""
    pair = cell.inputs.pair
    inputs = cell.inputs._replace(pair=replace(pair, validation=pair.reserved, reserved=0.0))
    return cell._replace(inputs=inputs).load_task()


def _planned(candidates: list[Candidate], name: str, what: dict[str, Any], runs: float) -> Tuning:
    """Return the runs with their budget, which is the same for all candidates."""
    first = candidates[0].cell
    budget = first.budget

    def costs(epsilon: float, delta: float) -> list[list[Plan]]:
        score = accountant.plan(epsilon, delta, 1.0, 1, 1.0)
        return [[score], *(candidate.costs(epsilon, delta) for candidate in candidates)]

    epsilon, delta = repeated.budget_of_run(budget.epsilon, budget.delta, runs, costs)
    folder, streams = first.folder.parent / name, first.streams._replace(settings=what, name=name)
    return Tuning(candidates, first._replace(name=name, folder=folder, streams=streams), runs, epsilon, delta)


def _plan(settings: TuneConfig, tuning: Tuning) -> Iterator[str]:
    """Yield the lines of the plan: what each run gets, what one run would get, and whether choosing can pay."""
    candidates, runs, budget = tuning.candidates, tuning.runs, tuning.cell.budget
    task, held = candidates[0].task, candidates[0].task.held_out_units
    yield f"plan for {tuning.cell.inputs.pair.private}: the best of {len(candidates)} settings"
    yield f"  {task.units:,} units for training, {held:,} to choose, about as many to measure"
    chance = 100 * repeated.chance_to_try(runs, len(candidates))
    yield (
        f"  {runs:g} runs on average, drawn: with 5 % chance {repeated.most_runs(runs)} or more; each takes one of the "
        f"settings at random, and the best one is tried with {chance:.0f} % chance"
    )

    # the noise of a step, with the budget of a run and with all of it
    each, whole = (
        [candidate.costs(*of)[0].noise_multiplier for candidate in candidates]
        for of in ((tuning.epsilon, tuning.delta), (budget.epsilon, budget.delta))
    )
    times = max(noise / least if least else 1.0 for noise, least in zip(each, whole, strict=True))
    yield (
        f"  each run has epsilon {tuning.epsilon:.4g} of {budget.epsilon:g}, delta {tuning.delta:.3g} of "
        f"{budget.delta:g}: {times:.2f} times the noise of one run that has all of it without tuning, as with "
        f"{100 / times:.0f} % of the training examples"
    )
    yield "  pubsel fit, or algorithm=whitened_head, has nothing to set: it has all of epsilon, and needs no tuning"

    apart = 0.0
    if task.metric == "accuracy" and task.private.y.dim() == 1:
        noise = accountant.plan(tuning.epsilon, tuning.delta, 1.0, 1, math.sqrt(2)).noise_multiplier
        deviation = accountant.deviation(noise, math.sqrt(2)) * math.sqrt(1 - 1 / task.classes)
        apart = min(1.0, quality.DEVIATIONS * math.sqrt(2) * deviation / held)
        yield f"  noise alone sets two scores up to {100 * apart:.1f} points apart"
    if apart > WIDE or 2 * tuning.epsilon < budget.epsilon:
        yield (
            "  warning: tuning can hardly pay here: a known setting with all of epsilon, or pubsel fit, is likely to "
            "be better; or raise epsilon or held_out, or lower runs"
        )
    read = candidates[0].settings
    if rest := ledger.left_for(read.results, read.pair.private, task.original, ledger.Cap.of(read.budget)):
        yield f"  {rest}"
    yield f"  released: one model, its setting, and a noisy table of counts, with epsilon {budget.epsilon:g} for all"


# The release


def _released(tuning: Tuning, plan: str, settings: TuneConfig) -> dict[str, Any]:
    """Make the runs, and return the record of the best, without provenance. UserError if none gives a model. plan: its
    lines."""
    cell, task = tuning.cell, tuning.candidates[0].task
    request = {
        "tuning": {},
        "identity": cell.name,
        "settings": as_json(tuning.candidates[0].settings),
        "device": str(cell.device),
    }
    with logged(cell.folder / "log.txt"), training.failures_noted(cell.folder):
        records.write_record(cell.folder / "settings.json", request)
        say(plan)
        budget = cell.budget
        decides = {"runs": tuning.runs, "epsilon": budget.epsilon, "delta": budget.delta, "each": tuning.epsilon}
        public = [] if task.public is None else [task.public]
        spending = Spending(task.private, budget.epsilon, budget.delta, task.original)
        secret = cell.streams.secret(RUNS, units_of(task), public, {}, decides, spending)
        drawn = released_once(cell.folder / "draws.pt", secret, lambda: {"candidates": draw(tuning, secret)})

        if settings.jobs > 1:
            _make_side_by_side(tuning, drawn["candidates"], settings)
        best = _best(tuning, drawn["candidates"])
        if best is None:
            raise UserError(f"{cell.name}: no run gave a model: lower the learning rates; its epsilon is spent")
        return _described(tuning, best)


def draw(tuning: Tuning, secret: Secret) -> list[int]:
    """Return the place of the candidate of each run. Their number is as secret as the noise."""
    source = secret("runs")
    return [below(len(tuning.candidates), source) for _ in range(repeated.number(tuning.runs, source))]


def _best(tuning: Tuning, drawn: list[int]) -> Scored | None:
    """Return the run with the largest score; None if none gives a model."""
    best = None
    for number, place in enumerate(drawn):
        scored = _score(tuning, number, tuning.candidates[place])
        if scored is not None and (best is None or scored.score > best.score):
            best = scored
    return best


def _make_side_by_side(tuning: Tuning, drawn: list[int], settings: TuneConfig) -> None:
    """Make the runs in processes, `jobs` at a time. What one of them loses is made again one after another, where what
    stops a run is an error of the command."""
    parent, options = tuning.cell.folder / RUNS, next(iter(own_folders()), None)
    parent.mkdir(parents=True, exist_ok=True)
    calls = []
    for number, drawn_place in enumerate(drawn):
        place = parent / str(number)
        if not (place / FAILED).exists():
            calls.append((_run_in_worker, options, _of_run(tuning, tuning.candidates[drawn_place], place), place))
    first = tuning.candidates[0].settings
    places, start = workers.places_for(parent, len(calls), settings.jobs, first.device.name, first.threads)
    workers.run_parallel(calls, places, start, lambda *_: None)


def _run_in_worker(options: Path | None, settings: RunConfig, place: Path) -> None:
    """Make a run in the process of a worker, which does not know whether weights may be fetched. options: the user's
    folder of them."""
    with composed("run", words_of({"download": settings.download}), options):
        _run_or_fail(settings, place)


def _of_run(tuning: Tuning, candidate: Candidate, place: Path) -> RunConfig:
    """Return the settings of a run, with its part of the budget."""
    privacy = replace(candidate.settings.privacy, delta=tuning.delta)
    return replace(candidate.settings, epsilon=tuning.epsilon, privacy=privacy, results=str(place))


def _score(tuning: Tuning, number: int, candidate: Candidate) -> Scored | None:
    """Make a run if it is not there, and return it with its noisy score; None if it gives no model, which is not tried
    again."""
    place = tuning.cell.folder / RUNS / str(number)
    record = None if (place / FAILED).exists() else _run_or_fail(_of_run(tuning, candidate, place), place)
    if record is None:
        return None
    figures = record["quality"]["figures"]
    score = figures.get(record["metric"]) or figures["accuracy"]
    return Scored(score[0], record, place / "runs" / record["identity"], candidate)


def _run_or_fail(settings: RunConfig, place: Path) -> dict[str, Any] | None:
    """Return the record of a run that is made in `place`; None if it gives no model."""
    try:
        place.mkdir(parents=True, exist_ok=True)
        with _quiet(place):  # the whole has one line in the ledger, its runs have none
            return training.run(settings)
    except Exception as error:
        # a wrong setting, a full disk and a lack of memory end the command, which can be resumed; all else may follow
        # from private data, and is an outcome like any other
        of_place = isinstance(error, UsageError | records.BrokenRecord | OSError) or out_of_memory(error)
        of_place = of_place or isinstance(error.__context__, OSError)
        if of_place or not isinstance(error, UserError | ValueError | ArithmeticError | RuntimeError):
            raise
        write_whole(place / FAILED, "", private=True)
        return None


@contextmanager
def _quiet(place: Path | None = None) -> Iterator[None]:
    """Print warnings alone inside. place: for the lines that are written into a ledger inside."""
    quiet = RENAMED.set({})
    try:
        with ledger.kept_in(place):
            yield
    finally:
        RENAMED.reset(quiet)


def _described(tuning: Tuning, best: Scored) -> dict[str, Any]:
    """Return the record of the whole from that of the best run, whose model is copied and measured."""
    cell, budget, record, folder, candidate = tuning.cell, tuning.cell.budget, *best[1:]
    whole, facts = reopen.whole_of(folder, record)
    for name in (classifier.WEIGHTS, classifier.FACTS):
        write_whole(cell.folder / name, (folder / name).read_bytes(), private=True)

    # other held-out units than those that chose
    task = _to_measure(candidate.cell)
    if task.columns and not facts["frozen"]:  # what is missing is zero, as in training
        task = task.each(lambda split: Split(split.x.nan_to_num(0.0), split.y))
    whole = whole.to(cell.device).eval()
    measured = candidate.cell._replace(name=cell.name, folder=cell.folder, streams=cell.streams)
    counted = measurement.measure(measured, Prepared(whole, None, whole, task), task, budget.epsilon, budget.delta)

    of_run, unit = record["privacy"], cell.inputs.pair.unit
    rate, steps, noise = (of_run[key] for key in ("sampling_rate", "steps", "noise_multiplier"))
    plan = Plan(budget.epsilon, budget.delta, rate, steps, noise, repeated.ACCOUNTANT, True, budget.epsilon)
    privacy = accountant.statement(
        plan, of_run["sensitivity"], True, False, (), "the settings", examples=record["private_units"], unit=unit
    )
    privacy["adjacency"] = of_run["adjacency"]
    privacy["not_covered"] = [
        "the choice of the settings that were candidates, and the utility on test and validation data, with its "
        "interval",
        repeated.HIDDEN,
        *privacy["not_covered"][1:],
    ]
    chosen = {"over": [each.words for each in tuning.candidates], "chosen": candidate.words, "runs": tuning.runs}
    chosen |= {"epsilon": tuning.epsilon, "delta": tuning.delta, "run": record["identity"]}
    return (
        record
        | {"identity": cell.name, "epsilon": budget.epsilon, "privacy": privacy, "quality": counted}
        | {"tuning": chosen}
    )
