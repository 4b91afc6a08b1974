"""`pubsel fit FOLDER public=[A,B] epsilon=E`: from private images to a model that may be given away.

It is one `pubsel run` and one `pubsel export`, with settings that nobody has to choose. One epsilon and delta cover all
that is released:

- the choice of the public data, or of none, has the share `choice` of epsilon (`pubsel.selection.coverage`);
- the weights have the rest, and delta (`pubsel.algorithms.whitened_head`);
- the measured quality has all of epsilon and delta, for it is of examples that are not trained on
  (`pubsel.release.measurement`).
"""

import math
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

from pubsel import records
from pubsel.algorithms import LABELS_REMEDY, check_labels
from pubsel.cell import choose_device
from pubsel.data import MOST_PUBLIC, Task, load, of_public_data, open_dataset, same_examples, same_names
from pubsel.data.embeddings import is_embeddings, open_embeddings
from pubsel.data.findings import NOTE
from pubsel.messages import UsageError, UserError, duration, gib, say
from pubsel.models.encoders import encoder_words
from pubsel.privacy import accountant, ledger
from pubsel.release import measurement, onnx, quality
from pubsel.release import run as training
from pubsel.release.bundle import made, write
from pubsel.rules import canonical
from pubsel.selection import coverage
from pubsel.settings import outputs
from pubsel.settings.compose import composed, words_of
from pubsel.settings.identity import as_json, identity_of
from pubsel.settings.keys import (
    Convert,
    ExportConfig,
    FitConfig,
    Format,
    Overlap,
    Pair,
    PublicLabels,
    RunConfig,
    read_of,
)
from pubsel.settings.schema import check
from pubsel.training.pooled import check_features

WIDE = 0.1  # half of an interval of the accuracy, above which it is said that it is wide
GREY, COLOUR, ROWS = "scattering", "resnet50_sl", "rows"  # names in conf/model
WEIGHTS = "model.safetensors"  # of a model that timm publishes
OF_EXPORT = ("results", "data_root", "download", "threads", "debug", "to", "format")  # keys of both commands
TIMED = 32  # images whose features are computed to tell how long all take


class Shares(NamedTuple):
    """Parts of epsilon: for the choice (None: there is nothing to choose) and for training. Their sum is not more than
    epsilon."""

    choice: float | None
    training: float


def run(settings: FitConfig) -> str:
    """Print the plan, then train, measure and export; return what to print. UserError or UsageError in the words of
    this command's keys."""
    with _own_words():
        # What can be known now is not to fail once the budget is spent.
        sets = [settings.private, *map(str, settings.public or settings.pool or [])]
        target = outputs.folder(settings.to, settings.results, sets)
        if settings.features is not None:
            encoder_words(settings.features, settings.checkpoint, settings.data_root)
        elif settings.checkpoint is not None:
            raise UsageError(f"checkpoint={settings.checkpoint}: give features=NAME too, the network that it is of")
        if settings.format == Format.onnx:
            onnx.check_installed()

        task = planned(settings)
        for units in filter(None, (task.units, task.held_out_units)):
            accountant.check_delta(settings.delta, units, permitted=False, key="delta")
        publics = _publics(settings, task)
        budget = divided(settings)
        features = settings.features or features_for(task, settings, budget)

        with composed("run", words(settings, features, budget)) as values:
            of_run = canonical(check(RunConfig, values))
            folder = run_folder(of_run)
            started = folder.exists()
            _check_same(settings, folder, task)
            if target.exists() and any(target.iterdir()) and not (folder / "result.json").exists():
                raise UsageError(f"to={settings.to}: it is there already: give a new folder, or delete it")
            lines = [*print_plan(settings, of_run, task, publics, budget, timed=not started)]
            if settings.dry:
                return "\n".join([*lines, "dry=true: nothing was trained, and nothing spent"])
            say("\n".join(lines))
            if settings.format == Format.onnx and features != ROWS and not (folder / "result.json").exists():
                onnx.check_exports(of_run.model, task, settings.data_root)
            record = training.run(check(RunConfig, values))

        common = {key: getattr(settings, key) for key in OF_EXPORT}
        files = made(ExportConfig(**common, run=folder.name, anyway=False))[0]
        write(target, files, settings.to, private=False)
    return result_text(settings, record, files, task)


def _check_same(settings: FitConfig, folder: Path, task: Task) -> None:
    """Raise UserError if a finished run, whose model would be exported, was trained on other private files, or with
    other bounds in a file."""
    if not (folder / "result.json").exists():
        return
    trained = records.read_record(folder / "result.json").get("content")
    if trained is not None and trained != task.content:
        bounds = f" or bounds={settings.bounds}" if isinstance(settings.bounds, str) else ""
        raise UserError(
            f"private={settings.private}{bounds}: its files are not those that {folder} was trained on: bring them "
            f"back, or delete {folder} to train on these, which spends epsilon once more"
        )


def divided(settings: FitConfig) -> Shares:
    """Return how epsilon is divided."""
    if not (settings.public or settings.pool):
        return Shares(None, settings.epsilon)
    # the choice and the weights compose: their parts add up to epsilon
    choice = settings.choice * settings.epsilon
    rest = settings.epsilon - choice

    # What is stated is the sum as a processor adds it.
    while choice + rest > settings.epsilon:
        rest = math.nextafter(rest, 0)
    return Shares(choice, rest)


def words(settings: FitConfig, features: str, budget: Shares) -> list[str]:
    """Return the words of the `pubsel run` that does the work."""
    public = "auto" if settings.public else "pool" if settings.pool else None
    pair: dict[str, Any] = {"private": settings.private, "public": public, "m": None, "take": "test"}
    pair |= {"candidates": settings.public or None, "convert": "resize", "metric": settings.metric}
    pair |= {"validation": settings.held_out, "unit": settings.unit, "overlap": "leave"}
    rules = as_json(read_of(settings))
    pair |= {"read": rules} if rules else {}
    pair |= {"pool": settings.pool} if settings.pool else {}
    privacy = {"delta": settings.delta, "secure_noise": True, "measure": settings.held_out > 0}
    values: dict[str, Any] = {"label": "fit", "epsilon": budget.training, "epsilon_select": budget.choice}
    values |= {"pair": pair, "privacy": privacy, "select": {"by": "coverage"}}
    values |= {"algorithm": {"public_labels": settings.public_labels}}
    common = ("seed", "device", "threads", "data_root", "keep", "results", "download", "debug", "budget")
    values |= {key: getattr(settings, key) for key in common}
    model = encoder_words(features, settings.checkpoint, settings.data_root)
    return [*model, "algorithm=whitened_head", "distance=none", *words_of(values)]


def run_folder(of_run: RunConfig) -> Path:
    """Return the folder of a run."""
    return Path(of_run.results) / "runs" / identity_of(of_run)


def features_for(task: Task, settings: FitConfig, budget: Shares) -> str:
    """Return the name in conf/model for images: scattering is better on grey ones, and needs no weights. If this
    command was started before, what it took then: other features would be another release."""
    # a command that was stopped resumes with the features that it began with
    if len(task.shape) == 1:
        return ROWS
    if task.shape[0] == 1:
        return GREY
    for features in (COLOUR, GREY):
        with composed("run", words(settings, features, budget)) as values:
            if run_folder(canonical(check(RunConfig, values))).exists():
                return features
    with composed("run", [f"model={COLOUR}"]) as values:
        backbone = check(RunConfig, values).model.backbone
    assert backbone is not None
    if _at_hand(backbone.architecture, settings.download):
        return COLOUR
    say(f"  the weights of {COLOUR} are not at hand: features={GREY}, which needs none")
    return GREY


def _at_hand(architecture: str, download: bool) -> bool:
    """Return whether the published weights of a timm model are there, or can be fetched within seconds."""
    import timm
    from huggingface_hub import get_hf_file_metadata, hf_hub_url, try_to_load_from_cache

    # the cache first: no network is needed then
    published = timm.get_pretrained_cfg(architecture)
    if published is None or not published.hf_hub_id:
        return False
    if isinstance(try_to_load_from_cache(published.hf_hub_id, WEIGHTS), str):
        return True
    try:
        if download:
            get_hf_file_metadata(hf_hub_url(published.hf_hub_id, WEIGHTS), timeout=5)
        return download
    except Exception:  # whatever the network says
        return False


def planned(settings: FitConfig, public: str | None = None) -> Task:
    """Return the private images on the sides that they will have, before any is left out since it is public too, or
    with a public set."""
    pair = Pair(
        private=settings.private,
        public=public,
        m=None if public else 1,
        convert=Convert.resize,
        validation=settings.held_out,
        unit=settings.unit,
        overlap=Overlap.leave,
        metric=settings.metric,
        read=read_of(settings),
    )
    return load(pair, settings.data_root, settings.download, keep=settings.keep)


class Public(NamedTuple):
    """A public set, or a folder of embeddings: how many of its examples are used, or chosen from, and the names of its
    classes."""

    m: int
    classes: tuple[str, ...]
    sides: tuple[int, int, int] | None = None  # of the private units and test images, if the set takes some away


def _sides(task: Task) -> tuple[int, int, int]:
    """Return how many units train and are held out, and how many images are tested on."""
    return task.units, task.held_out_units, task.tested


def _publics(settings: FitConfig, task: Task) -> dict[str, Public]:
    """Return each public set by its name. task: the private images without any."""
    many, key = dict[str, Public](), "pool" if settings.pool else "public"
    labelled = settings.public_labels == PublicLabels.given
    if settings.pool:
        check_features(task)
    if settings.pool and labelled:
        raise UsageError("public_labels=given: examples of a pool have labels of other tasks: leave it out")
    for name in settings.public or settings.pool or []:
        if not isinstance(name, str):
            raise UsageError(f"public=[{name}]: give each set by itself")
        if is_embeddings(name):
            if key == "public":
                raise UsageError(f"public=[{name}]: a folder of embeddings: give it as pool=[{name}]")
            many[name] = Public(open_embeddings(name).n, ())
            continue
        if same_examples(settings.private, name, settings.data_root):
            raise UsageError(f"{key}=[{name}]: this is the private data: take another set")
        rules = of_public_data(read_of(settings), name)
        source = open_dataset(
            name, settings.data_root, settings.download, None, settings.keep, rules, task.columns, labelled=False
        )
        m = len(source.train.y) + len(source.test.y)
        if key == "public":
            m = min(MOST_PUBLIC, m)
            if m < coverage.FEWEST:
                raise UsageError(f"public=[{name}]: {m} {source.kind} are too few: give {coverage.FEWEST} or more")
        # images that are public too leave, if this set is chosen
        paired = planned(settings, name) if key == "public" else task
        if labelled and paired.public is not None:
            what, several = f"public=[{name}]: public_labels=given", task.private.y.dim() == 2
            check_labels(paired.public.y, task.classes, several, paired.same_classes, what)
        sides = _sides(paired)
        many[name] = Public(m, source.names, sides if sides != _sides(task) else None)
    return many


def print_plan(
    settings: FitConfig, of_run: RunConfig, task: Task, publics: dict[str, Public], budget: Shares, *, timed: bool
) -> Iterator[str]:
    """Yield the lines of the plan. timed: with the time that features take."""
    n, held, test = task.units, task.held_out_units, task.tested
    kind = "texts" if task.text else "images" if len(task.shape) == 3 else "rows"
    form = task.form if of_run.model.name == ROWS or kind != "texts" else "by an encoder"
    units = kind if task.people is None else "people"
    yield f"plan for {settings.private}"
    yield f"  {kind}: {form}, {task.classes} classes"
    for finding in task.findings:
        if finding.name in ("label_column", "columns") and finding.severity == NOTE:
            yield f"  {finding.text}"
    of_people = task.people is not None
    images = len(task.private.y) + (0 if task.validation is None else len(task.validation.y))
    whose = f"of the {n + held:,} people with {images:,} {kind} " if of_people else ""
    tested = (
        f"{test:,}{f' {kind}' * of_people} for testing (test results are not released)" if test else "none for testing"
    )
    yield f"  {whose}{n:,} for training, {held:,} to measure, {tested}"
    listed = ", ".join(f"{name} ({public.m:,} {kind})" for name, public in publics.items())
    chosen = ": examples of them, or none, chosen privately" if settings.pool else ", or none: chosen privately"
    yield f"  public data: {listed + chosen if publics else 'none'}"
    for name, public in publics.items():
        if public.sides:
            train, measure, left = public.sides
            yield f"  if {name} is chosen: {train:,} for training, {measure:,} to measure, {left:,} for testing"
    yield from _labels(settings, task, publics)
    yield f"  model: a linear classifier on {of_run.model.name} (whitened_head, which has nothing to set)"

    parts = [f"{budget.choice:.4g} for the choice"] if budget.choice else []
    parts += [f"{budget.training:.4g} for the weights"]
    yield f"  epsilon {settings.epsilon:g}, delta {settings.delta:g}: {', '.join(parts)}"
    if rest := ledger.left_for(settings.results, settings.private, task.original, ledger.Cap.of(settings.budget)):
        yield f"  {rest}"
    if held:
        yield f"  the measured quality has epsilon {settings.epsilon:g} too: it is of other {units} than the weights"
    what = "how many examples of each set were chosen" if settings.pool else "the name of the public data"
    yield f"  released, in {settings.to}: the weights{f', {what}' if publics else ''}" + (
        ", a noisy table of counts" if held else ""
    )
    yield from _doubts(settings, task)
    if timed and kind == "images":
        yield _time(
            settings, of_run, task, sum(public.m for name, public in publics.items() if not is_embeddings(name))
        )


def _labels(settings: FitConfig, task: Task, publics: dict[str, Public]) -> Iterator[str]:
    """Yield which public labels are used."""
    if publics and settings.public_labels == PublicLabels.names:
        classes = ", ".join(task.names)
        yield f"  public labels: by CLIP, from the names of your classes, which costs no privacy: {classes}"
    alike = [name for name, public in publics.items() if same_names(public.classes, task.names)]
    if settings.public and settings.public_labels == PublicLabels.given:
        classes = ", ".join(task.names or map(str, range(task.classes)))
        yield f"  public labels: used, as those of your classes in this order: {classes}"
    elif settings.public and settings.public_labels == PublicLabels.auto and alike:
        yield (
            f"  public labels: not used; classes of the same names: {', '.join(alike)}; if they mean the same, set "
            "public_labels=given"
        )


def _doubts(settings: FitConfig, task: Task) -> Iterator[str]:
    """Yield what a statistician would say before the budget is spent."""
    # the variance of the noise is that of `quality.accuracy`
    held = task.held_out_units
    if held and task.private.y.dim() == 1 and task.metric == "accuracy":
        plan = accountant.plan(settings.epsilon, settings.delta, 1.0, 1, math.sqrt(2))
        noise = accountant.deviation(plan.noise_multiplier, math.sqrt(2)) * math.sqrt(1 - 1 / task.classes)
        half = quality.DEVIATIONS * math.sqrt(noise**2 + held / 4) / held
        if half > WIDE:
            points = 100 * min(half, 1)
            yield f"  warning: the measured accuracy will be uncertain by up to {points:.0f} points either way"


def _time(settings: FitConfig, of_run: RunConfig, task: Task, public: int) -> str:
    """Return how long the features take, by those of a few images, and their memory."""
    from pubsel.data.features import of_images

    # the first pass warms up, the second is timed
    backbone = of_run.model.backbone
    assert backbone is not None
    embed, _ = of_images(backbone, task.shape, settings.data_root, choose_device(settings.device))
    few = task.private.x[:TIMED]
    embed(few)

    began = time.monotonic()
    d = embed(few).shape[1]
    n = len(task.private.y) + task.tested + public + (0 if task.validation is None else len(task.validation.y))
    seconds = (time.monotonic() - began) / len(few) * n
    return f"  features: {d:,} of each of {n:,} images, {gib(4 * n * d)}, about {duration(seconds)} if none is kept"


def result_text(settings: FitConfig, record: dict[str, Any], files: dict[str, bytes], task: Task) -> str:
    """Return the result in words."""
    chosen, bounds = record["public"], record["utility_interval"]
    kind, new = ("images", "./new_images") if len(task.shape) == 3 else ("rows", "new_table.csv")
    kind = "texts" if task.text else kind
    interval = f" [{100 * bounds[0]:.1f}, {100 * bounds[1]:.1f}]" if bounds else ""
    lines = [f"{settings.to}: {', '.join(files)}"]
    if settings.pool:
        drawn = ", ".join(f"{count:,} of {name}" for name, count in record["pool"]["examples"].items() if count)
        none = f"none: too few pool {kind} resemble yours to be detected above the noise"
        lines += [f"  public examples, chosen privately: {drawn or none}"]
    if settings.public:
        none = f"none: your {kind} do not resemble those of a public set detectably above the noise"
        lines += [f"  public data, chosen privately: {chosen or none}"]
    if record.get("quality"):
        lines += [f" {measurement.quality_text(record['quality'])} This is in the folder."]
    if record["test_examples"]:
        lines += [
            f"  On {record['test_examples']} test {kind}: {record['metric'].replace('_', ' ')} "
            f"{100 * record['utility']:.1f} %{interval}{training.on_test_text(record, 1) or '.'} "
            "This is not private, and not in the folder."
        ]
    hardly = [about.get("hardly_answered") for about in (record.get("quality"), record.get("on_test")) if about]
    if record["metric"] == "accuracy" and any(hardly):
        lines += ["  To train for rare classes too, which is another release: metric=balanced_accuracy"]
    lines += [
        f"  {record['privacy']['statement']}",
        f"  Use it: pubsel predict {settings.to} {new}",
    ]
    return "\n".join(lines)


KEYS = {LABELS_REMEDY: "give other public data, or leave public_labels out", "pair.read.": ""}
KEYS |= {f"pair.{key}": key for key in ("private", "public", "pool", "unit", "metric")}
KEYS |= {"pair.validation": "held_out", "privacy.measure=true": "held_out"}
KEYS |= {"model.backbone.architecture": "features", "model.backbone.checkpoint": "checkpoint"}
KEYS |= {"algorithm.public_labels": "public_labels", "give algorithm.class_names=[A,B,...]": "give names as labels"}
KEYS |= {f"{before} model=": f"{before} features=" for before in (";", "take")}
KEYS |= {", or set privacy.weak=true, and the guarantee is called weak": ""}


@contextmanager
def _own_words() -> Iterator[None]:
    """Name the keys in errors as this command has them."""
    try:
        yield
    except UserError as error:
        text = str(error)
        for key, ours in KEYS.items():
            text = text.replace(key, ours)
        error.args = (text, *error.args[1:])
        raise
