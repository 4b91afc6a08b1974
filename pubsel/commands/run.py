"""One request, from settings to a record: `run` trains a cell."""

import contextlib
import dataclasses
import hashlib
import math
import shutil
import tempfile
import time
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from filelock import FileLock, Timeout
from hydra.core.hydra_config import HydraConfig
from torch import nn

from pubsel import algorithms, data, distances, models, records, selection
from pubsel.algorithms import Freezes, Frozen, Solves
from pubsel.data import Split, Task
from pubsel.distances import duration
from pubsel.messages import UsageError, UserError, log, logged, say, traced
from pubsel.models.split import Above, split
from pubsel.models.trained import trained_parameters
from pubsel.privacy import accountant, ledger
from pubsel.privacy.randomness import Secret, content, secret, stream
from pubsel.settings import CONF
from pubsel.settings.identity import as_json, folder_name, identity_of, is_path, short_name
from pubsel.settings.keys import (
    AuditConfig,
    Convert,
    Device,
    Distance,
    Labels,
    Model,
    Pair,
    Parameters,
    RankConfig,
    RunConfig,
    Select,
    Take,
    public_sets,
)
from pubsel.settings.methods import check_method
from pubsel.training import estimate, parallel, torchrun, tracking
from pubsel.training.evaluation import check_classes, evaluate, interval, logits, utility
from pubsel.training.loop import (  # fmt: skip
    Progress,
    Schedule,
    engine,
    fit,
    noisy_sum,
    on_device,
    public_stream,
    save,
    schedule,
    view_of,
)
from pubsel.training.rehearsal import Held, behind_frozen, freezing, random_like, rehearse, shaped

SCRATCH = "candidates-"  # how a folder for the moment begins, below that of a run
AUTO = "auto"  # pair.public: chosen from pair.candidates
UNFINISHED = ("checkpoint.pt", "selection.pt", "release.pt", "solution.pt")
ONCE = 64  # images at a time through layers that are run once
REPORT_SECONDS = 1  # between two lines of progress, at least: the epsilon in them takes a tenth of a second


def choose_device(device: Device) -> torch.device:
    """UsageError where CUDA is asked for and there is none."""
    if device == Device.cuda and not torch.cuda.is_available():
        raise UsageError("device=cuda: no CUDA device is available here; use device=cpu or device=auto")
    use = "cuda" if device != Device.cpu and torch.cuda.is_available() else "cpu"
    return torch.device(use)


def canonical(settings: RunConfig) -> RunConfig:
    """The same settings with those that this algorithm ignores set to one value, so that equal runs are one run."""
    if "_target_" not in settings.algorithm:
        raise UsageError("algorithm has no value: give algorithm=NAME, such as gep or dp_sgd")
    algorithm = algorithms.build(settings.algorithm)
    check_method(settings.algorithm, config_folders())
    pair, distance, epsilon = settings.pair, settings.distance, settings.epsilon
    if not algorithm.uses_public:
        pair = dataclasses.replace(
            pair, public=None, m=1, convert=Convert.resize, take=Take.test, shots=None, public_share=None
        )
        pair = dataclasses.replace(pair, candidates=None)
        distance = Distance("none", 1, 2, 1, True, Labels.random, Parameters.weights)
        settings = dataclasses.replace(settings, epsilon_select=None)
    elif pair.public is None:
        raise UsageError(f"algorithm={algorithm.name} needs public data: give pair.public=NAME")
    elif pair.take == Take.test and getattr(algorithm, "k", 0) > pair.m:
        k = settings.algorithm["k"]
        raise UsageError(f"algorithm.k={k} is more than the pair.m={pair.m} public examples: lower algorithm.k")
    check_backbone(settings.model)
    distance = distances.canonical(distance, selects=settings.epsilon_select is not None)
    if distance.name == "dp_gsd":
        raise UsageError("distance=dp_gsd: its epsilon would add to that of training: measure it by pubsel rank")
    pair = canonical_candidates(pair, settings.epsilon_select)
    select = settings.select if pair.candidates else Select()
    if not algorithm.private:
        epsilon = float("inf")
    elif algorithm.sensitivity() == 0:  # private examples are never read
        epsilon = 0.0
    typed = {"_target_": settings.algorithm["_target_"]} | as_json(algorithm)  # 1 and 1.0 are one setting
    return dataclasses.replace(settings, pair=pair, distance=distance, epsilon=epsilon, algorithm=typed, select=select)


def config_folders() -> list[Path]:
    """Where Hydra looks for options beside conf/: --config-dir."""
    if not HydraConfig.initialized():
        return []
    sources = HydraConfig.get().runtime.config_sources
    return [Path(source.path) for source in sources if source.schema == "file" and Path(source.path) != CONF]


def canonical_candidates(pair: Pair, epsilon: float | None) -> Pair:
    """The same pair with its candidates in one order. UsageError where pair.public=auto, pair.candidates and
    epsilon_select do not all stand together, or not at all."""
    auto = pair.public == AUTO
    if (auto, bool(pair.candidates), epsilon is not None) not in ((True,) * 3, (False,) * 3):
        raise UsageError(
            "pair.public=auto, pair.candidates=[A,B,...] and epsilon_select=... belong together: give all or none"
        )
    if not auto or pair.candidates is None:
        return pair
    if pair.take != Take.test:
        raise UsageError("pair.public=auto: candidates are other sets or test images: set pair.take=test")
    pairs = by_label(pair)
    if len(pairs) < len(pair.candidates):
        raise UsageError("pair.candidates=[...]: give each candidate once")
    return dataclasses.replace(pair, candidates=[pairs[name].public for name in sorted(pairs)])


def by_label(pair: Pair) -> dict[str, Pair]:
    """The candidates of pair.public=auto by the name that a record has of the chosen one, each as a pair with it."""
    return {
        "+".join(public_sets(public)): dataclasses.replace(pair, public=public, candidates=None)
        for public in pair.candidates or []
    }


def check_backbone(model: Model) -> None:
    """UsageError for a setting that features of a backbone leave without use."""
    keys = ("trained", "lora", "adapters", "once", "architecture", "pretrained", "checkpoint", "options", "mean", "std")
    unused = [key for key in keys if getattr(model, key)]
    if model.backbone is not None and unused:
        raise UsageError(f"model.{unused[0]}: with model.backbone a linear classifier on features trains")


def run(settings: RunConfig, streams: Mapping[str, str] | None = None) -> dict[str, Any]:
    """Train one cell and return its record; a finished one is read, a half-finished one is resumed.

    streams: of a record that is repeated, in place of this program's and this machine's (`secret_of`).
    Raises UsageError for settings that do not fit together, UserError for a run that fails.
    """
    settings = canonical(settings)
    torch.set_num_threads(settings.threads or torch.get_num_threads())
    device = choose_device(settings.device)
    name = identity_of(settings)
    folder = Path(settings.results) / "runs" / name
    path = folder / "result.json"
    if not path.exists():
        with locked(folder):
            if not path.exists():  # nor has it come while this process waited
                asked = {"identity": name, "settings": as_json(settings), "device": str(device)}
                records.write_record(folder / "settings.json", asked)
                with logged(folder / "log.txt"), _failures_noted(folder):
                    record = _train(settings, name, folder, device, streams)
                    if not math.isfinite(record["utility"]):
                        raise UserError(f"utility {record['utility']}: not a number: check the test set and the labels")
                    records.write_record(path, record)
                    log(f"finished: {record['metric']} {record['utility']:.4f}")
                forget(folder)
                return record
    with contextlib.suppress(OSError):
        forget(folder)  # of a process that was killed after the record
    say(f"{name}: finished before")
    if has_paths([settings.pair.private, *sets_of(settings.pair)]):
        say(f"  if its files have changed since, delete {folder} to train again{ledger.again(folder)}")
    return records.read_record(path)


def forget(folder: Path) -> None:
    """Remove what is kept only to resume a run: with it are digests of the private data."""
    for name in UNFINISHED:
        (folder / name).unlink(missing_ok=True)


def clean(folder: Path) -> None:
    """Remove what killed processes have left half-written, and their folders for the moment. For who has the lock."""
    for path in [*folder.glob("*.part"), *folder.glob(".*.tmp")]:
        path.unlink(missing_ok=True)
    for path in folder.glob(f"{SCRATCH}*"):
        shutil.rmtree(path, ignore_errors=True)


@contextlib.contextmanager
def _failures_noted(folder: Path) -> Iterator[None]:
    """The last line of the log of a run that fails says why; where nothing was started, nothing stays but the lock."""
    try:
        yield
    except UsageError:
        if not (folder / "checkpoint.pt").exists():
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


class locked:
    """Holds a folder for one process: a second one says so and waits until the first has finished or died. What is made
    in it is for its owner alone, whatever the umask."""

    def __init__(self, folder: Path):
        self.folder = folder
        self.lock = FileLock(folder / "lock", mode=records.PRIVATE_FILE)

    def __enter__(self) -> None:
        try:
            self.folder.mkdir(mode=records.PRIVATE_FOLDER, parents=True, exist_ok=True)
            try:
                self.lock.acquire(timeout=0)
            except Timeout:
                say(f"{self.folder.name}: another process works on it; waiting")
                self.lock.acquire()
        except OSError as error:
            raise UserError(f"cannot write to {self.folder}: {error.strerror}; set results=FOLDER") from None
        clean(self.folder)
        records.guard(self.folder)  # what an older version has left open

    def __exit__(self, *_: object) -> None:
        records.guard(self.folder)
        self.lock.release()


def _train(
    settings: RunConfig, name: str, folder: Path, device: torch.device, streams: Mapping[str, str] | None
) -> dict[str, Any]:
    origin = records.provenance()  # of the code that trains, before anyone edits it
    algorithm = algorithms.build(settings.algorithm)
    track = tracking.track(settings.tracking, folder)
    asked, before, total = settings, list[tuple[str, accountant.Plan]](), settings.epsilon
    if settings.pair.public == AUTO:
        say(f"{name}: chooses public data")
        settings, selected = with_chosen(settings, name, folder, device, streams)
        total += selected.epsilon
        before = [("selection of the public set", selected)] if selected.epsilon else []
    task = load_task(settings, device)
    say(f"{name}: on {device}")
    for note in task.notes:
        say(f"  {note}")
    check_classes(task.test.y, task.metric, "the test set")
    if task.validation is not None:
        check_classes(task.validation.y, task.metric, f"pair.validation={settings.pair.validation}")
    plan, spend, first = guarantee(settings, algorithm, len(task.private.x))
    before += [("before training", first)] if first else []
    spent_before = sum(part.epsilon for _, part in before)
    if settings.estimate:
        _estimate(settings, task, plan, spend is not None, folder, device)
    distance = pair_distance(settings, task, device)
    drawn_from = task.private
    model, frozen, trains, task = prepare(settings, algorithm, task, name, folder, first, device, streams)

    said, epsilons = time.monotonic(), dict[int, float]()  # by step

    def report(now: Progress) -> None:
        nonlocal said
        if now.step < now.steps and time.monotonic() < said + REPORT_SECONDS:
            return
        said = time.monotonic()
        left = now.seconds / now.step * (now.steps - now.step)
        used = ""
        if spend is not None:
            with contextlib.suppress(UsageError):  # a display must not end a run
                of_training = accountant.spent(
                    spend.noise_multiplier, plan.rate, plan.steps, spend.delta, now.step, about=spend.epsilon
                )
                epsilons[now.step] = min(of_training, spend.epsilon) + spent_before
                used = f"  epsilon {epsilons[now.step]:.3f}"
        say(f"  epoch {now.epoch:6.1f}  loss {now.loss:.4f}{used}  {now.seconds:.0f} s, about {left:.0f} s left")

    secret = training_secret(asked, task, whole(frozen, model), plan, spend, device, streams)
    if spend is not None or isinstance(algorithm, Solves):
        costs = (spend.epsilon, spend.delta) if spend is not None else (settings.epsilon, settings.privacy.delta)
        secret.begin = partial(about_to_draw, settings, drawn_from, name, "training", *costs)
    if isinstance(algorithm, Solves):
        weight, spend = solve(settings, algorithm, task, secret, folder)
        model.load_state_dict({"weight": weight}, strict=False)
        seconds = time.monotonic() - said
    else:
        with parallel.crew() as crew:
            seconds = fit(
                trains, task, algorithm, plan, spend.noise_multiplier if spend else 0.0, settings.training,
                name, secret, folder / "checkpoint.pt", report, crew=crew,
                keep=lambda points: track(points, epsilons),
            )  # fmt: skip
    made = whole(frozen, model)
    save(folder / "model.pt", made.state_dict())
    public_labels = "of the private set" if task.same_task else "of another set"
    outputs = logits(trains, task.test.x)
    found = utility(outputs, task.test.y, task.metric)
    return {
        "identity": name,
        "label": settings.label,
        "seed": settings.seed,
        "private": settings.pair.private,
        "public": "+".join(public_sets(settings.pair.public)) or None,
        "model": settings.model.name,
        "algorithm": algorithm.name,
        "epsilon": total if spend else None,
        "metric": task.metric,
        "utility": found,
        "utility_interval": interval(outputs, task.test.y, task.metric, stream(name, "bootstrap")),
        "test_examples": len(task.test.x),
        "private_examples": len(task.private.x),
        "selection": {"test": found} | other_utilities(trains, task),
        "weights": weights_digest(made),
        "parameters": trained_parameters(model),
        "public_labels": None if task.public is None else public_labels,
        "distance": distance,
        "privacy": accountant.statement(
            spend,
            algorithm.sensitivity(),
            settings.privacy.secure_noise,
            bool(distance),
            before,
            asked.pair.public == AUTO,
            examples=len(task.private.x),
        ),
        "settings": as_json(asked),
        "seconds": round(seconds, 1),
        "device": str(device),
        "threads": torch.get_num_threads(),
        "streams": streams_of(settings, device, streams),
        "processes": torchrun.place()[1],
        "finished": datetime.now(UTC).isoformat(timespec="seconds"),
        "notes": list(task.notes),
        **origin,
    }


def prepare(
    settings: RunConfig, algorithm: algorithms.Algorithm, task: Task, name: str, folder: Path,
    first: accountant.Plan | None, device: torch.device, streams: Mapping[str, str] | None = None,
) -> tuple[nn.Module, Frozen | None, nn.Module, Task]:  # fmt: skip
    """The network; what is frozen before it; what trains of it; and the task as that sees it."""

    def secret_of_first() -> Secret:
        plan = first._asdict() if first else {"noise_multiplier": 0.0, "epsilon": math.inf}
        public = [] if task.public is None else [task.public]
        made = secret_of("first release", settings, task.private, public, {}, plan, device, streams)
        if first is not None and not isinstance(settings, AuditConfig):  # an audit releases nothing
            made.begin = partial(about_to_draw, settings, task.private, name, "first release", *first[:2])
        return made

    frozen = freeze(settings, algorithm, task, name, secret_of_first, folder, first)
    if frozen is not None:
        task = task.each(lambda split: Split(torch.cat([frozen(x) for x in split.x.split(2**14)]), split.y))
    model = network(settings.model, task, settings.seed, settings.data_root).to(device)
    if not (settings.model.once and isinstance(model, models.Network)):
        return model, frozen, model, task
    free = min(estimate.free(device), estimate.free(torch.device("cpu")))
    trains, task = once(model, task, free)
    return model, frozen, trains, task


def load_task(settings: RunConfig, device: torch.device) -> Task:
    """The data of a run; with a backbone, its features in place of the images."""
    return data.load(settings.pair, settings.data_root, settings.download, through_backbone(settings, device))


def through_backbone(
    settings: RunConfig | RankConfig, device: torch.device
) -> Callable[[str, data.Source], data.Source]:
    """What makes a named source into the one that is used: with a backbone, its features in place of the images."""
    backbone = settings.model.backbone
    if backbone is None:
        return lambda _, source: source
    from pubsel.data import features  # and with it timm: a second

    return lambda name, source: features.of_source(short_name(name), source, backbone, settings.data_root, device, say)


def with_chosen(
    settings: RunConfig, name: str, folder: Path, device: torch.device, streams: Mapping[str, str] | None
) -> tuple[RunConfig, accountant.Plan]:
    """The settings with the candidate that is chosen privately for pair.public, and what the choice spends. It is made
    once, on the examples that will be trained on, and kept in the run's folder. No distance is measured: one would be
    without noise."""

    def of(pair: Pair) -> RunConfig:
        return dataclasses.replace(
            settings, pair=pair, distance=dataclasses.replace(settings.distance, name="none"), epsilon_select=None
        )

    epsilon = settings.epsilon_select or 0.0
    pairs = by_label(settings.pair)
    candidates: dict[str, Split] = {}
    with tempfile.TemporaryDirectory(prefix=SCRATCH, dir=folder) as kept:
        for label, pair in pairs.items():
            task = load_task(of(pair), device)
            assert task.public is not None
            candidates[label] = mapped(task.public, Path(kept) / f"{len(candidates)}.npy")

        def build(i: int) -> nn.Module:
            return network(settings.model, task, settings.seed + i, settings.data_root).to(device)

        secret = secret_of(
            "choice", settings, task.private, candidates.values(), tensors(build(0)), {"epsilon": epsilon}, device,
            streams,
        )  # fmt: skip
        secret.begin = partial(about_to_draw, settings, task.private, name, "choice", epsilon, 0.0)

        def release() -> dict[str, Any]:
            chosen, spend = selection.select(
                settings.distance, settings.select, epsilon, build, task.private, candidates, task.classes,
                f"selection {name}", secret, say,
            )  # fmt: skip
            return {"chosen": chosen, "spend": spend._asdict()}

        found = released_once(folder / "selection.pt", secret, release)
    say(f"  public data: {found['chosen']}, of {', '.join(pairs)}")
    return of(pairs[found["chosen"]]), accountant.Plan(**found["spend"])


def about_to_draw(
    settings: RunConfig | RankConfig, private: Split, cell: str, what: str, epsilon: float, delta: float, key: str
) -> None:
    """Write a release of the private examples into the ledger (`ledger.note`), just before its first noise is drawn."""
    if isinstance(settings, RankConfig):
        given, secure = settings.private, settings.secure_noise
    else:
        given, secure = settings.pair.private, settings.privacy.secure_noise
    release = ledger.Release(cell, given, what, epsilon, delta, None if secure else key)
    ledger.note(settings.results, content(*private), release)


def mapped(split: Split, path: Path) -> Split:
    """The split with its examples in a file, from which what is used is read."""
    np.save(path, split.x.numpy())
    return Split(torch.from_numpy(np.load(path, mmap_mode="c")), split.y)


def guarantee(
    settings: RunConfig, algorithm: algorithms.Algorithm, n: int
) -> tuple[Schedule, accountant.Plan | None, accountant.Plan | None]:
    """Steps and noise for n private examples: the schedule, what training spends, and what a release before it does."""
    plan = schedule(n, settings.training)
    if algorithm.private and settings.epsilon != math.inf and algorithm.sensitivity() > 0:
        accountant.check_delta(settings.privacy.delta, n, settings.privacy.weak)
    if isinstance(algorithm, Solves):
        if math.isfinite(settings.epsilon):
            noise_multiplier = algorithm.account(n, settings.epsilon, settings.privacy.delta).noise_multiplier
            say(f"  {algorithm.all_steps} steps, sampling rate {1 / n:.4g}, noise multiplier {noise_multiplier:.4g}")
        return plan._replace(steps=0), None, None
    if not algorithm.private or settings.epsilon == math.inf:
        return plan, None, None
    epsilon, delta, sigma = settings.epsilon, settings.privacy.delta, settings.privacy.noise_multiplier
    if algorithm.sensitivity() == 0:
        say("  no private example is read: epsilon 0")
        return plan._replace(steps=0), accountant.NOTHING, None
    if n > accountant.MOST_EXAMPLES:
        raise UsageError(f"pair.private: {n} examples: the rounding of sums is bounded for {accountant.MOST_EXAMPLES}")
    share = getattr(algorithm, "first_share", 0.0)
    first = accountant.plan(share * epsilon, share * delta, 1.0, 1, 1.0) if share else None
    if first is not None:
        say(f"  first release: noise multiplier {first.noise_multiplier:.4g}, epsilon {first.epsilon:.4g}")
        epsilon, delta = (1 - share) * epsilon, (1 - share) * delta
    if sigma is not None:
        if plan.rate < 1:
            raise UsageError(f"privacy.noise_multiplier={sigma}: for full batches: set training.batch_size to {n}")
        plan = plan._replace(steps=accountant.most_steps(epsilon, delta, sigma))
    accounting = settings.privacy.accounting
    spend = accountant.plan(epsilon, delta, plan.rate, plan.steps, algorithm.sensitivity(), accounting)
    if sigma is not None:
        spend = spend._replace(noise_multiplier=sigma, epsilon=accountant.spent(sigma, plan.rate, plan.steps, delta))
    say(
        f"  {plan.steps} steps, sampling rate {plan.rate:.4g}, noise multiplier {spend.noise_multiplier:.4g}, "
        f"sensitivity {algorithm.sensitivity():.4g}: epsilon {spend.epsilon:.4g} at delta {delta:g}"
    )
    return plan, spend, first


def once(network: models.Network, task: Task, free: int) -> tuple[Above, Task]:
    """What trains of a network, and the task with the outputs of the frozen layers below it, [n, d], in place of its
    images. UserError where they would take more than `free` bytes."""
    below, above = split(network, task.private.x)
    splits = [part for part in (task.private, task.public, task.test, task.validation) if part is not None]
    n, d = sum(len(part.x) for part in splits), sum(shape.numel() for shape in above.shapes)
    if 4 * n * d > free:
        raise UserError(
            f"model.once=true: outputs of the frozen layers take {estimate.gib(4 * n * d)}: set it to false"
        )
    say(f"  frozen layers: {d} outputs for each of {n} images, computed once")
    device = network.mean.device
    return above, task.each(
        lambda part: Split(torch.cat([below(x.to(device)).cpu() for x in part.x.split(ONCE)]), part.y)
    )


def freeze(
    settings: RunConfig, algorithm: algorithms.Algorithm, task: Task, name: str, secret: Callable[[], Secret],
    folder: Path, first: accountant.Plan | None,
) -> Frozen | None:  # fmt: skip
    """The map before the linear classifier. If it is released from private features, it is released once, with the
    noise of `secret`, and kept in the run's folder until the run has finished."""
    if not isinstance(algorithm, Freezes):
        return None
    if task.private.x.dim() != 2:
        raise UsageError(f"algorithm={algorithm.name} takes features: set model.backbone, such as model=mobilenetv2")
    made = algorithm.frozen(task.public, task.private.x.shape[1], public_stream(name))
    if isinstance(made, Frozen):
        return made
    if first is None and settings.epsilon != math.inf:
        raise UsageError(f"algorithm.share: {algorithm.name} releases from private data: give it a share over 0")
    streams, noise_multiplier = secret(), first.noise_multiplier if first else 0.0

    def release() -> dict[str, Any]:
        frozen = noisy_sum(made, task.private.x, noise_multiplier, streams("release"))
        return {"shift": frozen.shift, "projection": frozen.projection}

    return Frozen(**released_once(folder / "release.pt", streams, release))


def solve(
    settings: RunConfig, algorithm: Solves, task: Task, secret: Secret, folder: Path
) -> tuple[torch.Tensor, accountant.Plan]:
    """Weights [C, d] of an algorithm with a loop of its own, drawn once, and what they cost."""

    def release() -> dict[str, Any]:
        weight, spend = algorithm.solve(task.private, settings.epsilon, settings.privacy.delta, secret("solve"))
        return {"weight": weight, "spend": spend._asdict()}

    found = released_once(folder / "solution.pt", secret, release)
    return found["weight"], accountant.Plan(**found["spend"])


def released_once(path: Path, secret: Secret, release: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    """What `release` draws from private data, kept at `path`: a run that is resumed draws no second time, even if the
    noise is the operating system's. UserError if what is kept was drawn for another release than that of `secret`."""
    if not path.exists():
        save(path, {"release": secret.state_dict(), "drawn": release()})
    try:
        kept = torch.load(path, weights_only=True)
        belongs, drawn = kept["release"], dict(kept["drawn"])
    except Exception as error:
        reason = str(error).partition("\n")[0]
        raise UserError(
            f"{path} cannot be read ({reason}): delete {path.parent} to start this run again{ledger.again(path.parent)}"
        ) from None
    secret.resumed(belongs, 0, path, lambda plan: f"epsilon {plan['epsilon']:.3g}")
    return drawn


def other_utilities(model: nn.Module, task: Task) -> dict[str, float]:
    """What settings may be selected by beside the test set: held-out private examples, and public ones whose labels are
    of the task."""
    found = {}
    if task.validation is not None:
        found["validation"] = evaluate(model, task.validation, task.metric)
    public = task.public
    if (
        public is not None
        and public.y.dim() == task.private.y.dim()
        and (public.y.dim() == 2 or int(public.y.max()) < task.classes)
        and task.same_classes
    ):
        with contextlib.suppress(UserError):  # one class only has no AUC
            found["public"] = evaluate(model, public, task.metric)
    return found


def _estimate(settings: RunConfig, task: Task, plan: Schedule, noise: bool, folder: Path, device: torch.device) -> None:
    """Say what the run will take; UserError if it does not fit, before anything is computed that takes memory. A run
    that goes on knows how long it takes."""
    algorithm = algorithms.build(settings.algorithm)  # its own, with no trace of what is tried here
    if isinstance(algorithm, Freezes) and task.private.x.dim() != 2:
        return
    with estimate.Grown() as grown:
        model, seen, passes, below = stand_in(settings, algorithm, task, device)
        gradients = engine(model, settings.training.chunk)
        view = view_of(model, gradients, on_device(seen, device), "estimate", plan)
        measurement = unmeasured(settings, task, device)
        needs = estimate.memory(gradients, algorithm, view, seen, duration.held(measurement) if measurement else 0)
        if seen is not task:
            releases = getattr(algorithm, "first_share", 0) > 0
            needs = estimate.prepared(needs, task, seen.private.x.shape[1], passes, releases)
        if isinstance(algorithm, Solves):
            needs = needs._replace(training=algorithm.held(len(task.private.x)))
        estimate.claim(needs, device)
        each = plan._replace(batch_size=-(-plan.batch_size // torchrun.place()[1]))  # of a process
        if settings.profile and plan.steps:
            estimate.profile_step(gradients, algorithm, view, seen.private, each, folder / "trace.json")
            say((folder / "costliest.txt").read_text())
        if (folder / "checkpoint.pt").exists():
            return say(f"  about {estimate.gib(needs.peak)} of memory beside the data")
        secure = settings.privacy.secure_noise
        before = {
            "the distance": duration.seconds(measurement) if measurement else 0.0,
            "PCA": freezing(algorithm, task),
            "frozen layers": below,
        }
        needed = rehearse(model, seen, algorithm, each, settings.training, noise, secure)
    needs = needs._replace(training=max(0, needed.held - needs.passes))
    estimate.refuse(needs, device)
    steps = algorithm.all_steps if isinstance(algorithm, Solves) else plan.steps
    say(estimate.told(max(needs.peak, grown.bytes if device.type == "cpu" else 0), needed, steps, before))


def stand_in(
    settings: RunConfig, algorithm: algorithms.Algorithm, task: Task, device: torch.device
) -> tuple[nn.Module, Task, int, float]:
    """A network like the one that will train, and the task as that will see it, with shapes in place of examples that
    are computed later; the bytes that passes hold which compute them, and the seconds that these take."""
    frozen = behind_frozen(algorithm, task)
    model = network(settings.model, frozen, settings.seed, settings.data_root).to(device)
    if frozen is not task:
        return model, frozen, 0, 0.0
    if not (settings.model.once and isinstance(model, models.Network)):
        return model, task, 0, 0.0
    below, above = split(model, task.private.x)
    few = random_like(task.private, min(ONCE, len(task.private.x)), task.classes).x.to(device)
    with Held(device) as counted:
        below(few)
    began = time.monotonic()
    d = below(few).shape[1]
    seconds = (time.monotonic() - began) / len(few) * sum(len(part.x) for part in estimate.splits(task))
    seen = task.each(lambda part: shaped(part, (d,)))
    if seen.public is not None:
        seen = seen._replace(public=random_like(seen.public, len(seen.public.x), 1)._replace(y=seen.public.y))
    return above, seen, counted.peak, seconds


def secret_of(
    what: str,
    settings: RunConfig | RankConfig,
    private: Split,
    public: Iterable[Split],
    weights: Mapping[str, torch.Tensor],
    plan: Mapping[str, Any],
    device: torch.device,
    streams: Mapping[str, str] | None = None,
) -> Secret:
    """The secret streams of one release of a run or a choice (`randomness.secret`). private, public: as they are used.
    streams: of a record that is repeated, in place of those of this program and this machine."""
    told = streams_of(settings, device, streams)
    return secret(
        what,
        settings=as_json(settings),
        private=private,
        public=[tensor for split in public for tensor in split],
        weights=weights,
        code=told["code"],
        plan=plan,
        place=told["place"],
        secure=settings.privacy.secure_noise if isinstance(settings, RunConfig) else settings.secure_noise,
    )


def training_secret(
    settings: RunConfig, task: Task, model: nn.Module, schedule: Schedule, spend: accountant.Plan | None,
    device: torch.device, streams: Mapping[str, str] | None = None, what: str = "training",
) -> Secret:  # fmt: skip
    """The secret streams of the training of `model`, all that is released of it, at its start; `task` as it trains.
    what: another word for a training that is not the run's own."""
    costs = {"noise_multiplier": 0.0, "epsilon": math.inf, "delta": 0.0}
    if spend is not None:
        costs = {key: getattr(spend, key) for key in costs}
    public = [] if task.public is None else [task.public]
    return secret_of(what, settings, task.private, public, tensors(model), schedule._asdict() | costs, device, streams)


def streams_of(
    settings: RunConfig | RankConfig, device: torch.device, streams: Mapping[str, str] | None = None
) -> dict[str, str]:
    """What of the noise does not follow from settings and data: `code`, a digest of the program, and `place`, all that
    changes no more than the rounding of a sum."""
    if streams is not None:
        return {"code": streams["code"], "place": streams["place"]}
    used: tuple[type, ...] = ()
    chunk = None
    if isinstance(settings, RunConfig):
        used, chunk = (type(algorithms.build(settings.algorithm)),), settings.training.chunk
    processor = f"{records.processor()} ({torch.backends.cpu.get_cpu_capability()})"
    if device.type == "cuda":
        processor = torch.cuda.get_device_name(device)
    processes = torchrun.place()[1]
    place = f"{device.type}, {processor}, {torch.get_num_threads()} threads, {processes} processes, chunk {chunk}"
    return {"code": records.code(*used), "place": place}


def whole(frozen: Frozen | None, model: nn.Module) -> nn.Module:
    """The model that is released: what is frozen before the linear classifier, and this; or the network."""
    return model if frozen is None else nn.Sequential(OrderedDict(frozen=frozen, linear=model))


def tensors(model: nn.Module) -> dict[str, torch.Tensor]:
    """All numbers of a network by name, those that its file leaves out included."""
    return dict(model.named_parameters()) | dict(model.named_buffers())


def weights_digest(model: nn.Module) -> str:
    """A fingerprint of all weights, bit for bit: two runs that print the same one ended alike."""
    digest = hashlib.blake2b(digest_size=8)
    for tensor in model.state_dict().values():
        digest.update(tensor.cpu().contiguous().numpy().tobytes())
    return digest.hexdigest()


def network(model: Model, task: Task, seed: int, data_root: str = ".") -> nn.Module:
    """The model for a task's images and classes; for features a linear classifier that starts at zero."""
    if task.private.x.dim() == 2:
        linear = nn.Linear(task.private.x.shape[1], task.classes, bias=model.bias)
        for parameter in linear.parameters():
            nn.init.zeros_(parameter)
        return linear
    _, channels, height, width = task.private.x.shape
    return models.build(model, (channels, height, width), task.classes, task.mean, task.std, seed, data_root)


def sets_of(pair: Pair) -> list[str]:
    """The public datasets that a pair names."""
    publics = [pair.public] if pair.public != AUTO else pair.candidates or []
    return [name for public in publics for name in public_sets(public)]


def unmeasured(settings: RunConfig, task: Task, device: torch.device) -> duration.Measurement | None:
    """What `pair_distance` will measure, if anything."""
    if settings.distance.name == "none" or task.public is None or is_measured(settings):
        return None
    model = network(settings.model, task, 0, settings.data_root).to(device)
    return duration.Measurement(settings.distance, model, task.private, task.public, task.classes)


def distance_folder(settings: RunConfig) -> tuple[Path, dict[str, Any]]:
    """Where the distance of a run's pair is kept, and the settings that it is of."""
    what = as_json(settings.distance) | as_json(settings.pair) | {"model": as_json(settings.model)}
    public = short_name(settings.pair.public)
    name = folder_name(f"{short_name(settings.pair.private)}-{public}-{settings.model.name}", what)
    return Path(settings.results) / "distances" / name, what


def is_measured(settings: RunConfig) -> bool:
    """Whether the distance is kept; that of a user's own files, which may have changed, is measured again."""
    named = not has_paths([settings.pair.private, *public_sets(settings.pair.public)])
    return named and (distance_folder(settings)[0] / "result.json").exists()


def pair_distance(settings: RunConfig, task: Task, device: torch.device) -> dict[str, Any] | None:
    """The distance of a run's pair, measured once and kept under results/distances for all its seeds and algorithms."""
    if settings.distance.name == "none" or task.public is None:
        return None
    folder, what = distance_folder(settings)
    public = short_name(settings.pair.public)
    with locked(folder):
        path = folder / "result.json"
        if is_measured(settings):
            return records.read_record(path, ("values", "mean"))
        method, began = distances.METHODS[settings.distance.name], time.monotonic()
        values = method.measure(
            settings.distance,
            lambda i: network(settings.model, task, i, settings.data_root).to(device),
            task.private,
            {public: task.public},
            task.classes,
            key="distance",
            report=lambda i, _, value, __: say(f"  {method.title}, initialisation {i}: {value:.4g}"),
        )[public]
        record = {
            "identity": folder.name,
            "name": settings.distance.name,
            "values": values,
            **summary(values),
            "m": settings.distance.m,
            "seconds": round(time.monotonic() - began, 1),
            "settings": what,
            **distances.statement(settings.distance),
        }
        if settings.distance.name == "gsd":
            record |= {"k": settings.distance.k, "raw": raw(values, settings.distance.k)}
        records.write_record(path, record)
    return record


def raw(values: list[float], k: int) -> list[float]:
    """The projection metric of Algorithm 1 itself: GSD as reported is it divided by sqrt(k)."""
    return [value * math.sqrt(k) for value in values]


def summary(values: list[float]) -> dict[str, float | None]:
    """Mean and sample standard deviation (none for a single value)."""
    return {"mean": float(np.mean(values)), "std": float(np.std(values, ddof=1)) if len(values) > 1 else None}


def has_paths(names: list[str]) -> bool:
    """Whether a dataset is the user's own files, whose content may change under the same name."""
    return any(is_path(name) for name in names)
