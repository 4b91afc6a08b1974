"""`pubsel run`: from settings to the record of one training.

It loads one cell, chooses its public data if that is requested, plans its privacy and measures its distance; then it
trains, evaluates and describes it.
"""

import contextlib
import math
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from pubsel import distances, records
from pubsel.algorithms import Derives, Informed, Solves, columns
from pubsel.cell import Cell, Spending, given_weights, load_task, map_split, weights_digest
from pubsel.data import Split, Task
from pubsel.distances.gsd import Subspaces
from pubsel.messages import UsageError, UserError, bars, log, logged, say, traced
from pubsel.models.trained import trained_parameters
from pubsel.privacy import accountant, ledger
from pubsel.privacy.randomness import stream
from pubsel.privacy.sampling import Schedule
from pubsel.release import classifier, measurement
from pubsel.rules import (
    AUTO,
    by_label,
    canonical,
    check_measured,
    check_pair,
    has_paths,
    sets_of,
    without_public,
)
from pubsel.selection import coverage
from pubsel.selection.choose import Choice, by_features
from pubsel.settings.identity import as_json, folder_name, is_path, short_name
from pubsel.settings.keys import POOL, Pair, RunConfig, public_sets
from pubsel.training import needs, parallel, torchrun
from pubsel.training.evaluation import check_classes, evaluate, hardly_answered, interval, logits, utility
from pubsel.training.loop import Job, Progress, fit, rate_of
from pubsel.training.once import BEGUN, Prepared, cover, planned_map, prepare, released_once, solve, training_secret
from pubsel.training.pooled import CHOSEN, MOST, from_pool, with_examples

UNFINISHED = tuple(f"{name}.pt" for name in "checkpoint histogram selection release solution measurement draws".split())
UNFINISHED += (BEGUN, CHOSEN)
DIVERGED = 2  # times the loss of answers by chance, above which a training has diverged
REPORT_SECONDS = 1  # between two lines of progress, at least: the epsilon in them takes a tenth of a second


def run(settings: RunConfig, repeated: Mapping[str, str] | None = None) -> dict[str, Any]:
    """Train one cell and return its record; a finished one is read, a half-finished one is resumed.

    repeated: the `streams` of a record that is repeated, in place of this program's and this machine's.
    Raise UsageError for settings that do not fit together, UserError for a run that fails.
    """
    # all that follows from the settings alone is refused before anything is read
    check_pair(settings)
    settings = canonical(settings)
    check_measured(settings)
    if settings.pair.unit is not None and torchrun.place()[1] > 1:
        raise UsageError(f"pair.unit={settings.pair.unit}: a person stays in one process: run without torchrun")
    if settings.training.augment is not None and torchrun.place()[1] > 1:
        raise UsageError("training.augment: views are made in one process: run without torchrun")
    cell = Cell.of(settings, processes=torchrun.place()[1], repeated=repeated)
    path = cell.folder / "log.txt"

    def make() -> dict[str, Any]:
        # before anything that may fail, so that the folder of a failed run tells its command
        request = {"identity": cell.name, "settings": cell.streams.settings, "device": str(cell.device)}
        records.write_record(cell.folder / "settings.json", request)
        with logged(path), failures_noted(cell.folder):
            record = train(cell)
            if not math.isfinite(record["utility"]):
                raise UserError(f"utility {record['utility']}: not a number: check the test set and the labels")
            return record

    # a finished run is read; of several processes that start it, one trains
    record, trained = records.recorded(cell.folder, make)
    if trained:
        with logged(path):
            log(f"finished: {record['metric']} {record['utility']:.4f}")
        remove_unfinished(cell.folder)
        return record

    with contextlib.suppress(OSError):
        remove_unfinished(cell.folder)  # of a process that was killed after the record
    say(f"{cell.name}: finished before{ledger.UNCHANGED if settings.budget is not None else ''}")
    if has_paths([settings.pair.private, *sets_of(settings.pair)]):
        again = ledger.again(cell.folder)
        say(f"  if its files have changed since, delete {cell.folder} to train again{again}")
    return record


def show_run(record: dict[str, Any]) -> str:
    """Return its utility and its guarantee, in a line."""
    bounds = record.get("utility_interval")  # older records have none
    interval = f" [{100 * bounds[0]:.2f}, {100 * bounds[1]:.2f}]" if bounds else ""
    by_class = on_test_text(record, 2)
    return (
        f"{record['identity']}: {record['metric']} {100 * record['utility']:.2f} %{interval} "
        f"on {record['test_examples']} test examples{by_class or '.'}{' This is not private.' if by_class else ''}"
        f"{measurement.quality_text(record.get('quality'))} {record['privacy']['statement']}"
    )


def on_test_text(record: dict[str, Any], digits: int) -> str:
    """Return the figures of a record on test examples, to follow its utility in a sentence; empty if it has none. Not
    private."""
    tested = record.get("on_test")
    if tested is None:
        return ""
    others = {name: figure for name, figure in tested["figures"].items() if name != record["metric"]}
    figures = [
        f"{name.replace('_', ' ')} {measurement.with_interval(figure, digits)}" for name, figure in others.items()
    ]
    parts = [*figures, f"the largest class is {100 * tested['largest_class']:.{digits}f} % of them"]
    return f"; {'; '.join(parts)}.{measurement.answered_text(tested)}"


def remove_unfinished(folder: Path) -> None:
    """Remove what is kept only to resume a run: it contains digests of the private data."""
    for name in UNFINISHED:
        (folder / name).unlink(missing_ok=True)


@contextlib.contextmanager
def failures_noted(folder: Path) -> Iterator[None]:
    """Log why a run fails, in the last line of its log; if nothing was started, leave nothing but the lock."""
    try:
        yield
    except UsageError:
        if not any((folder / name).exists() for name in UNFINISHED):
            (folder / "settings.json").unlink(missing_ok=True)
            (folder / "log.txt").unlink(missing_ok=True)
        raise
    except (KeyboardInterrupt, SystemExit):
        log("interrupted")
        raise
    except Exception as error:
        if not isinstance(error, UserError):
            log(traced(error))
        log(f"{records.FAILED}{' '.join(str(error).split()) or type(error).__name__}")
        raise


class Before(NamedTuple):
    """Privacy plan of a cell: schedule, cost of training (None without a guarantee), the release before it, and all
    earlier releases with their costs."""

    plan: Schedule
    spend: accountant.Plan | None
    first: accountant.Plan | None
    parts: list[tuple[str, accountant.Plan]]

    @property
    def epsilon(self) -> float:
        """Return what is spent before the first step."""
        return sum(part.epsilon for _, part in self.parts)


def train(cell: Cell) -> dict[str, Any]:
    """Train a cell, and return its record without provenance."""
    parts: list[tuple[str, accountant.Plan]] = []
    requested = cell.inputs.pair.public

    # the public data, which may be chosen privately
    if cell.inputs.pair.public == AUTO:
        say(f"{cell.name}: chooses public data")
        cell, selected = with_chosen(cell)
        parts += [("selection of the public set", selected)] if selected.epsilon else []
    task = _loaded(cell)
    pool = None
    if cell.inputs.pair.public == POOL:
        # the chosen examples, if any, will have the shape of private ones; random ones vary in the most directions
        shape = (cell.inputs.pair.m or MOST, *task.private.x.shape[1:])
        random = torch.randn(shape, generator=torch.Generator().manual_seed(0))
        none = [] if cell.algorithm.needs_public else [task._replace(public=None)]
        for outcome in (with_examples(task, random), *none):
            check_ready(cell, outcome)
        _check_spending(cell, task)
        cell, task, pool, selected = from_pool(cell, task)
        parts += [("selection of the public examples", selected)]
    if requested is not None and task.public is None:
        cell, task = cell.last_layer(task)
    cell = cell.derived(task)

    # what it will cost: in privacy, and in memory
    plan, spend, first = cell.guarantee(task.units)
    parts += [("before training", first)] if first and not cell.algorithm.first_steps else []
    _check_spending(cell, task)
    before = Before(plan, spend, first, parts)
    needs.check_memory(cell, task, plan, unmeasured(cell, task))

    # settings that follow from the task and the budget, for the record
    follows = cell.algorithm.values(plan.steps) if isinstance(cell.algorithm, Informed) else {}
    if cell.training.learning_rate is None:
        sigma = spend.noise_multiplier if spend else 0.0
        follows["learning_rate"] = rate_of(cell.training, cell.algorithm, plan, sigma)
    if follows:
        say("  " + ", ".join(f"{key} {value:.4g}" for key, value in follows.items()))

    # at the distance's networks, before training: it depends on nothing that is trained
    distance, start = pair_distance(cell, task), given_weights(cell.model, task, cell.seed, cell.inputs.data_root)

    # releases before the loop, and what of the network does not train
    prepared = prepare(cell, task, first)
    spend, seconds = _fitted(cell, prepared, before, task.private)

    classifier.keep_model(cell.folder, cell.model, prepared.whole, task)
    before = before._replace(spend=spend)
    record = _figures(cell, prepared) | _described(cell, prepared.task, before, distance, start)
    if cell.budget.measure and task.validation is not None:
        # Gaussian noise has a delta, also where training has none
        epsilon, delta = record["privacy"]["epsilon"], record["privacy"]["delta"] or cell.budget.delta
        record["quality"] = measurement.measure(cell, prepared, task, epsilon, delta)
    record |= {"pool": pool} if pool else {}
    return record | {"derived": follows or None, "seconds": round(seconds, 1)}


def check_ready(cell: Cell, task: Task) -> None:
    """Raise UserError for what would stop the training of a cell on `task` once something is spent."""
    cell = cell.derived(task)
    plan, _, first = cell.guarantee(task.units, report=lambda _: None)
    needs.refuse_memory(needs.of_training(cell, task, plan), cell.device)
    # the map takes seconds, and examples that are drawn; an algorithm that derives its settings sets none that does
    # not fit
    if not isinstance(cell.algorithm, Derives) and cell.inputs.pair.public != POOL:
        planned_map(cell, task, first)


def _check_spending(cell: Cell, task: Task) -> None:
    """Raise UsageError if delta exceeds 1/n for the training or the held-out units, or if the run as a whole would
    exceed the budget of its data."""
    budget, algorithm = cell.budget, cell.algorithm
    if not algorithm.private or budget.epsilon == math.inf or algorithm.sensitivity() == 0:
        return
    accountant.check_delta(budget.delta, task.units, budget.weak)
    if budget.measure and task.validation is not None:
        accountant.check_delta(budget.delta, task.held_out_units, budget.weak)
    epsilon = budget.epsilon + (cell.epsilon_select or 0.0)
    cell.streams.check(Spending(task.private, epsilon, budget.delta, task.original))


def _loaded(cell: Cell) -> Task:
    """Return the cell's data. UsageError if a set that it is evaluated on lacks a class."""
    task = cell.load_task()
    say(f"{cell.name}: on {cell.device}")
    for note in task.notes:
        say(f"  {note}")
    check_sides(cell, task)
    return task


def check_sides(cell: Cell, task: Task) -> None:
    """Raise UserError if a set that the cell is evaluated on has a single class, and its metric needs two; held-out
    examples that noisy counts protect decide nothing."""
    check_classes(task.test.y, task.metric, "the test set")
    if task.validation is not None and not cell.budget.measure:
        check_classes(task.validation.y, task.metric, f"pair.validation={cell.inputs.pair.validation}")


def _fitted(cell: Cell, prepared: Prepared, before: Before, given: Split) -> tuple[accountant.Plan | None, float]:
    """Train what is prepared; return what it spent, and in how many seconds. given: the private examples as they were
    loaded, by which the ledger knows them."""
    plan, spend = before.plan, before.spend
    secret = training_secret(cell, prepared.task, prepared.whole, plan, spend, given)
    if cell.algorithm.first_steps:  # one plan with the release before
        cover(secret, secret.begin, cell.folder / BEGUN)

    # a closed form has no steps
    if isinstance(cell.algorithm, Solves):
        began = time.monotonic()
        weight, spend = solve(cell, prepared.task, secret)
        prepared.model.load_state_dict({"weight": weight}, strict=False)
        return spend, time.monotonic() - began

    # the loop, alone or shared by the processes of torchrun
    noise_multiplier = spend.noise_multiplier if spend else 0.0
    checkpoint = cell.folder / "checkpoint.pt"
    job = Job(cell.algorithm, plan, noise_multiplier, cell.training, cell.public_key, checkpoint)
    with parallel.processes() as processes:
        report = _shown(before, prepared.task)
        return spend, fit(prepared.trains, prepared.task, job, secret, report, processes=processes)


def _shown(before: Before, task: Task) -> Callable[[Progress], None]:
    """Return what prints a line of progress, at most one a second, and at the end whether training diverged: its loss
    is finite, and far above that of chance."""
    chance = math.log(2 if task.private.y.dim() == 2 else task.classes)
    plan, spend, last = before.plan, before.spend, time.monotonic()

    def report(now: Progress) -> None:
        nonlocal last
        if now.step < now.steps and time.monotonic() < last + REPORT_SECONDS:
            return

        last = time.monotonic()
        left = now.seconds / now.step * (now.steps - now.step)

        used = ""
        if spend is not None:
            with contextlib.suppress(UsageError):  # a display must not end a run
                done = now.step + spend.steps - plan.steps  # with a release before that counts as steps
                of_training = accountant.spent(
                    spend.noise_multiplier, plan.rate, spend.steps, spend.delta, done, about=spend.epsilon
                )
                used = f"  epsilon {min(of_training, spend.epsilon) + before.epsilon:.3f}"

        note = f"loss {now.loss:.4f}{used}"
        line = f"  epoch {now.epoch:6.1f}  {note}  {now.seconds:.0f} s, about {left:.0f} s left"
        bars.line("training", line, note)
        if now.step == now.steps and now.loss > DIVERGED * chance:
            say(
                f"  warning: the training diverged: its loss {now.loss:.3g} is more than {DIVERGED} times that of "
                f"chance, {chance:.3g}: lower training.learning_rate"
            )

    return report


def _figures(cell: Cell, prepared: Prepared) -> dict[str, Any]:
    """Return what the trained model reaches, for the record."""
    # test examples are read without noise: no guarantee covers these figures
    task = prepared.task
    outputs = logits(prepared.trains, task.test.x)
    reached = utility(outputs, task.test.y, task.metric)

    return {
        "metric": task.metric,
        "utility": reached,
        "utility_interval": interval(outputs, task.test.y, task.metric, stream(cell.name, "bootstrap")),
        "on_test": on_test(cell, outputs, task),
        "test_examples": task.tested,
        "private_examples": len(task.private.x),
        "private_units": task.units,
        "selection": {"test": reached} | other_utilities(prepared.trains, task),
        "weights": weights_digest(prepared.whole),
        "parameters": trained_parameters(prepared.model),
    }


def on_test(cell: Cell, outputs: Tensor, task: Task) -> dict[str, Any] | None:
    """Return what the outputs on a user's own test examples reach, class by class, for the record; None for other data,
    and if an example has several labels. An accuracy by itself hides that a rare class is never answered."""
    y = task.test.y.cpu()
    if not is_path(cell.inputs.pair.private) or y.dim() != 1:
        return None
    # a single class has no balanced accuracy
    metrics = ["accuracy", *(["balanced_accuracy"] if len(y.unique()) > 1 else [])]
    labels = classifier.labels_of(task)
    return {
        "figures": {
            metric: [utility(outputs, y, metric), *interval(outputs, y, metric, stream(cell.name, "bootstrap"))]
            for metric in metrics
        },
        "largest_class": int(y.bincount().max()) / len(y),
        "hardly_answered": [labels[label] for label in hardly_answered(outputs, y)],
    }


def _described(
    cell: Cell, task: Task, before: Before, distance: dict[str, Any] | None, start: str | None
) -> dict[str, Any]:
    """Return what a trained cell was, for the record. Its settings are those that were given, whatever was chosen.
    start: `given_weights`."""
    requested, pair, spend = cell.streams.settings, cell.inputs.pair, before.spend

    # the statement covers the choice of the public data too
    public = requested["pair"].get("public")
    chosen = {AUTO: "the public set", POOL: "the public examples"}.get(str(public))
    by_histogram = " (by a noisy histogram)" if public == POOL else ""
    selected = sum(part.epsilon for what, part in before.parts if what == f"selection of {chosen}")
    public_labels = "of the private set" if task.same_task else "of another set"
    privacy = accountant.statement(
        spend,
        cell.algorithm.sensitivity(),
        cell.budget.secure_noise,
        bool(distance),
        before.parts,
        chosen and chosen + by_histogram,
        examples=task.units,
        unit=pair.unit,
    )
    if "adjacency" in privacy:
        privacy["adjacency"] = accountant.neighbours(pair.unit, distinct=is_path(pair.private) and len(task.shape) == 3)
    none_too = not cell.algorithm.needs_public and (public == POOL or (chosen and by_features(cell.select)))
    some = {"backbone": start, "content": task.content, "none_too": none_too}
    # features, directions and choices are computed of several examples at once
    in_company = cell.inputs.backbone is not None or public == POOL or (chosen and by_features(cell.select))
    if in_company and "not_covered" in privacy:
        privacy["not_covered"].append(accountant.ROUNDED)

    return {
        "label": requested["label"],
        "seed": cell.seed,
        "private": pair.private,
        "public": "+".join(public_sets(pair.public)) or None,
        "model": cell.model.name,
        "algorithm": cell.algorithm.name,
        "epsilon": cell.budget.epsilon + selected if spend else None,
        "public_labels": None if task.public is None else public_labels,
        "distance": distance,
        "privacy": privacy,
        "settings": requested,
        "device": str(cell.device),
        "threads": torch.get_num_threads(),
        "precision": "ieee" if cell.device.type == "cuda" else None,
        "streams": cell.streams.record(),
        "processes": torchrun.place()[1],
        "finished": datetime.now(UTC).isoformat(timespec="seconds"),
        "notes": list(task.notes),
    } | {key: value for key, value in some.items() if value}


def with_chosen(cell: Cell) -> tuple[Cell, accountant.Plan]:
    """Return the cell with the candidate that is chosen privately for pair.public, and what the choice spends.

    The choice is drawn once and kept in the run's folder. With pair.overlap=leave, it is on the private examples that
    the last candidate leaves, which may be some more or fewer than are trained on. No distance is measured: it would be
    without noise."""
    inputs = cell.inputs
    pairs = by_label(inputs.pair)
    # on disk, so that memory does not grow with the number of candidates
    candidates: dict[str, Split] = {}
    with tempfile.TemporaryDirectory(prefix=records.SCRATCH, dir=cell.folder) as kept:
        for label, pair in pairs.items():
            task = load_task(inputs._replace(pair=pair), cell.device)
            assert task.public is not None
            check_sides(cell, task)  # one may take away the only example of a class
            check_ready(cell, task)
            candidates[label] = map_split(task.public, Path(kept) / f"{len(candidates)}.npy")

        _check_spending(cell, task)
        with_none = by_features(cell.select) and not cell.algorithm.needs_public
        if with_none:
            check_ready(cell, task._replace(public=None))
        pairs |= {coverage.NONE: without_public(inputs.pair)} if with_none else {}
        choice = Choice(
            select=cell.select,
            distance=distances.build(cell.distance),
            epsilon=cell.epsilon_select or 0.0,
            task=task,
            candidates=candidates,
            with_none=with_none,
            build=lambda i: cell.network(task, cell.seed + i),
            key=f"selection {cell.name}",
        )
        secret = cell.streams.choice(choice)

        def release() -> dict[str, Any]:
            name, spend = choice.draw(secret)
            return {"chosen": name, "spend": spend._asdict()}

        drawn = released_once(cell.folder / "selection.pt", secret, release)

    # only the name leaves: no score, and no distance
    say(f"  public data: {drawn['chosen']}, of {', '.join(pairs)}")
    chosen = inputs._replace(pair=pairs[drawn["chosen"]])
    return cell._replace(inputs=chosen, distance=None), accountant.Plan(**drawn["spend"])


def pair_distance(cell: Cell, task: Task) -> dict[str, Any] | None:
    """Return the distance of a run's pair, measured once and kept under results/distances for all its seeds and
    algorithms."""
    distance = distances.build(cell.distance)
    candidate = task.public
    if distance is None or candidate is None:
        return None

    folder, what = distance_folder(cell)
    public, inputs = short_name(cell.inputs.pair.public), cell.inputs

    def make() -> dict[str, Any]:
        began = time.monotonic()

        values = distance.measure(
            lambda i: cell.network(task, i),
            *columns.in_one_scale(task.private, {public: candidate}, task.raw),
            task.classes,
            key="distance",
            report=lambda i, _, value, __: say(f"  {distance.title}, initialisation {i}: {value:.4g}"),
        )[public]

        record = {
            "name": distance.name,
            "values": values,
            **distances.summary(values),
            "m": distance.m,
            "seconds": round(time.monotonic() - began, 1),
            "settings": what,
            **distance.statement(),
        }

        if isinstance(distance, Subspaces):
            record |= {"k": distance.k, "raw": distances.raw(values, distance.k)}
        return record

    # a user's files may have changed since they were measured
    changeable = has_own_files(inputs.pair)
    return records.recorded(folder, make, records.DistanceRecord, lambda record: not changeable)[0]


def distance_folder(cell: Cell) -> tuple[Path, dict[str, Any]]:
    """Return the folder of the distance of a run's pair, and the settings that it depends on."""
    pair, model = cell.inputs.pair, cell.model
    what = {"distance": cell.distance, "pair": as_json(pair), "model": as_json(model)}
    name = folder_name(f"{short_name(pair.private)}-{short_name(pair.public)}-{model.name}", what)
    return Path(cell.streams.results) / "distances" / name, what


def has_own_files(pair: Pair) -> bool:
    """Return whether a set of the pair comes from the user's files, whose content may have changed."""
    return has_paths([pair.private, *public_sets(pair.public)])


def unmeasured(cell: Cell, task: Task) -> distances.Distance | None:
    """Return the distance that `pair_distance` will measure, if any; that of a user's files is measured again."""
    distance = distances.build(cell.distance)
    if distance is None or task.public is None:
        return None
    kept = (distance_folder(cell)[0] / "result.json").exists()
    return None if kept and not has_own_files(cell.inputs.pair) else distance


def other_utilities(model: nn.Module, task: Task) -> dict[str, float]:
    """Return what settings may be selected by apart from the test set: the utility on held-out private examples, and on
    public ones whose labels belong to the task."""
    utilities = {}
    # a run that ended for one held-out example would tell of it more than noisy counts do
    if task.validation is not None:
        with contextlib.suppress(UserError):  # outputs that are not finite, or a single class
            utilities["validation"] = evaluate(model, task.validation, task.metric)

    public = task.public
    if (
        public is not None
        and public.y.dim() == task.private.y.dim()
        and (public.y.dim() == 2 or int(public.y.max()) < task.classes)
        and task.same_classes
    ):
        with contextlib.suppress(UserError):  # a single class has no AUC
            utilities["public"] = evaluate(model, public, task.metric)

    return utilities
