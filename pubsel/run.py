"""One request, from settings to a record: `run` trains a cell."""

import contextlib
import dataclasses
import hashlib
import math
import tempfile
import time
import traceback
from collections import OrderedDict
from collections.abc import Callable, Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np
import torch
from filelock import FileLock, Timeout
from torch import nn

import pubsel
from pubsel import (
    algorithms,
    config,
    data,
    distances,
    estimate,
    models,
    parallel,
    privacy,
    results,
    selection,
    torchrun,
    tracking,
)
from pubsel.algorithms import Freezes, Frozen, Solves
from pubsel.config import (
    Convert,
    Device,
    Distance,
    Labels,
    Parameters,
    RankConfig,
    RunConfig,
    Select,
    Take,
    UsageError,
    UserError,
)
from pubsel.data import Split, Task
from pubsel.evaluation import check_classes, evaluate, interval, logits, utility
from pubsel.models.split import Above, split
from pubsel.models.trained import trained_parameters
from pubsel.randomness import Source, content, stream
from pubsel.terminal import log, logged, say
from pubsel.training import (
    Progress,
    Schedule,
    engine,
    fit,
    noisy_sum,
    on_device,
    public_stream,
    save,
    schedule,
    source_of,
    view_of,
)  # fmt: skip

AUTO = "auto"  # pair.public: chosen from pair.candidates
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
    typed = {"_target_": settings.algorithm["_target_"]} | config.settings(algorithm)  # 1 and 1.0 are one setting
    return dataclasses.replace(settings, pair=pair, distance=distance, epsilon=epsilon, algorithm=typed, select=select)


def canonical_candidates(pair: config.Pair, epsilon: float | None) -> config.Pair:
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


def by_label(pair: config.Pair) -> dict[str, config.Pair]:
    """The candidates of pair.public=auto by the name that a record has of the chosen one, each as a pair with it."""
    return {
        "+".join(config.public_sets(public)): dataclasses.replace(pair, public=public, candidates=None)
        for public in pair.candidates or []
    }


def check_backbone(model: config.Model) -> None:
    """UsageError for a setting that features of a backbone leave without use."""
    keys = ("trained", "lora", "adapters", "once", "architecture", "pretrained", "checkpoint", "options", "mean", "std")
    unused = [key for key in keys if getattr(model, key)]
    if model.backbone is not None and unused:
        raise UsageError(f"model.{unused[0]}: with model.backbone a linear classifier on features trains")


def run(settings: RunConfig) -> dict[str, Any]:
    """Train one cell and return its record; a finished one is read, a half-finished one goes on.

    Raises UsageError for settings that do not fit together, UserError for a run that fails.
    """
    settings = canonical(settings)
    torch.set_num_threads(settings.threads or torch.get_num_threads())
    device = choose_device(settings.device)
    name = config.identity(settings)
    folder = Path(settings.results) / "runs" / name
    path = folder / "result.json"
    if not path.exists():
        with locked(folder):
            if not path.exists():  # nor has it come while this process waited
                clean(folder)
                asked = {"identity": name, "settings": config.settings(settings), "device": str(device)}
                results.write_record(folder / "settings.json", asked)
                with logged(folder / "log.txt"), _failures_noted(folder):
                    record = _train(settings, name, folder, device)
                    results.write_record(path, record)
                    log(f"finished: {record['metric']} {record['utility']:.4f}")
                (folder / "checkpoint.pt").unlink(missing_ok=True)
                return record
    with contextlib.suppress(OSError):
        (folder / "checkpoint.pt").unlink(missing_ok=True)  # of who was killed behind the record
    say(f"{name}: finished before")
    if has_paths([settings.pair.private, *sets_of(settings.pair)]):
        say(f"  if its files have changed since, delete {folder} to train again")
    return results.read_record(path)


def clean(folder: Path) -> None:
    """Remove what killed processes have left half-written. For who has the lock."""
    for path in [*folder.glob("*.part"), *folder.glob(".*.tmp")]:
        path.unlink(missing_ok=True)


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
            log(traceback.format_exc())
        log(f"{results.FAILED}{' '.join(str(error).split()) or type(error).__name__}")
        raise


class locked:
    """Holds a folder for one process: a second one says so and waits until the first has finished or died."""

    def __init__(self, folder: Path):
        self.folder = folder
        self.lock = FileLock(folder / "lock")

    def __enter__(self) -> None:
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            try:
                self.lock.acquire(timeout=0)
            except Timeout:
                say(f"{self.folder.name}: another process works on it; waiting")
                self.lock.acquire()
        except OSError as error:
            raise UserError(f"cannot write to {self.folder}: {error.strerror}; set results=FOLDER") from None

    def __exit__(self, *_: object) -> None:
        self.lock.release()


def _train(settings: RunConfig, name: str, folder: Path, device: torch.device) -> dict[str, Any]:
    origin = results.provenance()  # of the code that trains, before anyone edits it
    algorithm = algorithms.build(settings.algorithm)
    track = tracking.track(settings.tracking, folder)
    asked, before, total = settings, list[tuple[str, privacy.Plan]](), settings.epsilon
    if settings.pair.public == AUTO:
        say(f"{name}: chooses public data")
        settings, selected = with_chosen(settings, name, folder, device)
        total += selected.epsilon
        before = [("selection of the public set", selected)] if selected.epsilon else []
    task = load_task(settings, device)
    say(f"{name}: on {device}")
    for note in task.notes:
        say(f"  {note}")
    check_classes(task.test.y, task.metric, "the test set")
    if task.validation is not None:
        check_classes(task.validation.y, task.metric, f"pair.validation={settings.pair.validation}")
    key = noise_key(name if settings is asked else f"{name}\0{settings.pair.public}", task.private, device)
    plan, spend, first = guarantee(settings, algorithm, len(task.private.x))
    before += [("before training", first)] if first else []
    spent_before = sum(part.epsilon for _, part in before)
    distance = pair_distance(settings, task, device)
    model, frozen, trains, task = prepare(settings, algorithm, task, name, key, folder, first, device)
    if settings.estimate and plan.steps:
        _estimate(settings, trains, task, algorithm, plan, folder, device)

    said = time.monotonic()

    def report(now: Progress) -> None:
        nonlocal said
        if now.step < now.steps and time.monotonic() < said + REPORT_SECONDS:
            return track(now, None)
        said = time.monotonic()
        left = now.seconds / now.step * (now.steps - now.step)
        used, so_far = "", None
        if spend is not None:
            with contextlib.suppress(UsageError):  # a display must not end a run
                of_training = privacy.spent(
                    spend.noise_multiplier, plan.rate, plan.steps, spend.delta, now.step, about=spend.epsilon
                )
                so_far = min(of_training, spend.epsilon) + spent_before
                used = f"  epsilon {so_far:.3f}"
        say(f"  epoch {now.epoch:6.1f}  loss {now.loss:.4f}{used}  {now.seconds:.0f} s, about {left:.0f} s left")
        track(now, so_far)

    if isinstance(algorithm, Solves):
        weight, spend = solve(settings, algorithm, task, key, folder)
        model.load_state_dict({"weight": weight}, strict=False)
        seconds = time.monotonic() - said
    else:
        with parallel.crew() as crew:
            seconds = fit(
                trains, task, algorithm, plan, spend.noise_multiplier if spend else 0.0, settings.training,
                name, key, settings.privacy.secure_noise, folder / "checkpoint.pt", report, crew=crew,
            )  # fmt: skip
    whole = nn.Sequential(OrderedDict(frozen=frozen, linear=model)) if frozen is not None else model
    save(folder / "model.pt", whole.state_dict())
    public_labels = "of the private set" if task.same_task else "of another set"
    outputs = logits(trains, task.test.x)
    found = utility(outputs, task.test.y, task.metric)
    return {
        "identity": name,
        "label": settings.label,
        "seed": settings.seed,
        "private": settings.pair.private,
        "public": "+".join(config.public_sets(settings.pair.public)) or None,
        "model": settings.model.name,
        "algorithm": algorithm.name,
        "epsilon": total if spend else None,
        "metric": task.metric,
        "utility": found,
        "utility_interval": interval(outputs, task.test.y, task.metric, stream(name, "bootstrap")),
        "test_examples": len(task.test.x),
        "private_examples": len(task.private.x),
        "selection": {"test": found} | other_utilities(trains, task),
        "weights": weights_digest(whole),
        "parameters": trained_parameters(model),
        "public_labels": None if task.public is None else public_labels,
        "distance": distance,
        "privacy": privacy.statement(
            spend,
            algorithm.sensitivity(),
            settings.privacy.secure_noise,
            bool(distance),
            before,
            asked.pair.public == AUTO,
        ),
        "settings": config.settings(asked),
        "seconds": round(seconds, 1),
        "device": str(device),
        "threads": torch.get_num_threads(),
        "processes": torchrun.place()[1],
        "finished": datetime.now(UTC).isoformat(timespec="seconds"),
        "notes": list(task.notes),
        **origin,
    }


def prepare(
    settings: RunConfig, algorithm: algorithms.Algorithm, task: Task, name: str, key: str, folder: Path,
    first: privacy.Plan | None, device: torch.device,
) -> tuple[nn.Module, Frozen | None, nn.Module, Task]:  # fmt: skip
    """The network; what is frozen before it; what trains of it; and the task as that sees it."""
    frozen = freeze(settings, algorithm, task, name, key, folder, first)
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

    return lambda name, source: features.of_source(
        config.short(name), source, backbone, settings.data_root, device, say
    )


def with_chosen(settings: RunConfig, name: str, folder: Path, device: torch.device) -> tuple[RunConfig, privacy.Plan]:
    """The settings with the candidate that is chosen privately for pair.public, and what the choice spends. It is made
    once, on the examples that will be trained on, and kept in the run's folder. No distance is measured: one would be
    without noise."""

    def of(pair: config.Pair) -> RunConfig:
        return dataclasses.replace(
            settings, pair=pair, distance=dataclasses.replace(settings.distance, name="none"), epsilon_select=None
        )

    def release() -> dict[str, Any]:
        candidates: dict[str, Split] = {}
        with tempfile.TemporaryDirectory(prefix="candidates-", dir=folder) as kept:
            for label, pair in pairs.items():
                task = load_task(of(pair), device)
                assert task.public is not None
                candidates[label] = mapped(task.public, Path(kept) / f"{len(candidates)}.npy")
            chosen, spend = selection.select(
                settings.distance, settings.select, epsilon,
                lambda i: network(settings.model, task, settings.seed + i, settings.data_root).to(device),
                task.private, candidates, task.classes, f"selection {name}",
                sources(name, task.private, candidates, device, settings.privacy.secure_noise), say,
            )  # fmt: skip
        return {"chosen": chosen, "spend": spend._asdict()}

    epsilon = settings.epsilon_select or 0.0
    pairs = by_label(settings.pair)
    found = released_once(folder / "selection.pt", release)
    say(f"  public data: {found['chosen']}, of {', '.join(pairs)}")
    return of(pairs[found["chosen"]]), privacy.Plan(**found["spend"])


def sources(
    name: str, private: Split, candidates: dict[str, Split], device: torch.device, secure: bool
) -> Callable[[str, int], Source]:
    """Where what must stay secret in the release `name` comes from: the operating system, or what its settings, private
    examples and candidates name."""
    key = noise_key(f"{name}\0{content(*(split.x for split in candidates.values()))}", private, device)
    return lambda purpose, step: source_of(key, purpose, step, secure)


def mapped(split: Split, path: Path) -> Split:
    """The split with its examples in a file, from which what is used is read."""
    np.save(path, split.x.numpy())
    return Split(torch.from_numpy(np.load(path, mmap_mode="c")), split.y)


def guarantee(
    settings: RunConfig, algorithm: algorithms.Algorithm, n: int
) -> tuple[Schedule, privacy.Plan | None, privacy.Plan | None]:
    """Steps and noise for n private examples: the schedule, what training spends, and what a release before it does."""
    plan = schedule(n, settings.training)
    if isinstance(algorithm, Solves):
        return plan._replace(steps=0), None, None
    if not algorithm.private or settings.epsilon == math.inf:
        return plan, None, None
    epsilon, delta, sigma = settings.epsilon, settings.privacy.delta, settings.privacy.noise_multiplier
    if algorithm.sensitivity() == 0:
        say("  no private example is read: epsilon 0")
        return plan._replace(steps=0), privacy.NOTHING, None
    if delta * n > 1:
        say(f"  privacy.delta={delta:g} is more than 1/{n}: weak; use a smaller one")
    share = getattr(algorithm, "first_share", 0.0)
    first = privacy.plan(share * epsilon, share * delta, 1.0, 1, 1.0) if share else None
    if first is not None:
        say(f"  first release: noise multiplier {first.noise_multiplier:.4g}, epsilon {first.epsilon:.4g}")
        epsilon, delta = (1 - share) * epsilon, (1 - share) * delta
    if sigma is not None:
        if plan.rate < 1:
            raise UsageError(f"privacy.noise_multiplier={sigma}: for full batches: set training.batch_size to {n}")
        plan = plan._replace(steps=privacy.most_steps(epsilon, delta, sigma))
    accounting = settings.privacy.accounting
    spend = privacy.plan(epsilon, delta, plan.rate, plan.steps, algorithm.sensitivity(), accounting)
    if sigma is not None:
        spend = spend._replace(noise_multiplier=sigma, epsilon=privacy.spent(sigma, plan.rate, plan.steps, delta))
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
    settings: RunConfig, algorithm: algorithms.Algorithm, task: Task, name: str, key: str, folder: Path,
    first: privacy.Plan | None,
) -> Frozen | None:  # fmt: skip
    """What stands before the linear classifier; where it is released from private features, it is released once, and
    kept in the run's folder for a run that goes on."""
    if not isinstance(algorithm, Freezes):
        return None
    if task.private.x.dim() != 2:
        raise UsageError(f"algorithm={algorithm.name} takes features: set model.backbone, such as model=mobilenetv2")
    made = algorithm.frozen(task.public, task.private.x.shape[1], public_stream(name))
    if isinstance(made, Frozen):
        return made
    if first is None and settings.epsilon != math.inf:
        raise UsageError(f"algorithm.share: {algorithm.name} releases from private data: give it a share over 0")
    source = source_of(key, "release", 0, settings.privacy.secure_noise)

    def release() -> dict[str, Any]:
        frozen = noisy_sum(made, task.private.x, first.noise_multiplier if first else 0.0, source)
        return {"shift": frozen.shift, "projection": frozen.projection}

    return Frozen(**released_once(folder / "release.pt", release))


def solve(
    settings: RunConfig, algorithm: Solves, task: Task, key: str, folder: Path
) -> tuple[torch.Tensor, privacy.Plan]:
    """Weights [C, d] of an algorithm with a loop of its own, drawn once, and what they cost."""
    source = source_of(key, "solve", 0, settings.privacy.secure_noise)

    def release() -> dict[str, Any]:
        weight, spend = algorithm.solve(task.private, settings.epsilon, settings.privacy.delta, source)
        return {"weight": weight, "spend": spend._asdict()}

    found = released_once(folder / "solution.pt", release)
    return found["weight"], privacy.Plan(**found["spend"])


def released_once(path: Path, release: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    """What `release` draws from private data, kept at `path`: a run that goes on draws no second time, even where the
    noise is the operating system's."""
    if not path.exists():
        save(path, release())
    try:
        return dict(torch.load(path, weights_only=True))
    except Exception as error:
        reason = str(error).partition("\n")[0]
        raise UserError(f"{path} cannot be read ({reason}): delete {path.parent} to start this run again") from None


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


def _estimate(
    settings: RunConfig, model: nn.Module, task: Task, algorithm: algorithms.Algorithm, plan: Schedule, folder: Path,
    device: torch.device,
) -> None:  # fmt: skip
    """Say what the run will take; UserError where it does not fit. A run that goes on knows already."""
    gradients = engine(model, settings.training.chunk)
    view = view_of(model, gradients, on_device(task, device), "estimate", plan)
    needs = estimate.memory(gradients, algorithm, view, task, settings.distance)
    estimate.claim(needs, device)
    said = f"  about {estimate.gib(needs.peak)} of memory beside the data"
    if settings.profile or not (folder / "checkpoint.pt").exists():
        trace = folder / "trace.json" if settings.profile else None
        each = plan._replace(batch_size=-(-plan.batch_size // torchrun.place()[1]))  # of a process
        seconds = estimate.step_seconds(gradients, algorithm, view, task.private, each, trace)
        said += f", {seconds:.2g} s a step: {duration(seconds * plan.steps)} of training"
        if trace is not None:
            say((folder / "costliest.txt").read_text())
    say(said)


def duration(seconds: float) -> str:
    """Seconds for people."""
    if seconds < 120:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} minutes" if seconds < 7200 else f"{seconds / 3600:.1f} hours"


def noise_key(name: str, private: Split, device: torch.device) -> str:
    """What the noise of a run depends on: settings and seed (`name`), private examples, pubsel's version, device kind.

    Two runs that differ in any of these never share noise, which would cancel between their weights: a user's folder
    whose content changed keeps its name. The key is written nowhere, since it is computed from private examples.
    """
    return f"{name}\0{pubsel.__version__}\0{device.type}\0{content(*private)}"


def weights_digest(model: nn.Module) -> str:
    """A fingerprint of all weights, bit for bit: two runs that print the same one ended alike."""
    digest = hashlib.blake2b(digest_size=8)
    for tensor in model.state_dict().values():
        digest.update(tensor.cpu().contiguous().numpy().tobytes())
    return digest.hexdigest()


def network(model: config.Model, task: Task, seed: int, data_root: str = ".") -> nn.Module:
    """The model for a task's images and classes; for features a linear classifier that starts at zero."""
    if task.private.x.dim() == 2:
        linear = nn.Linear(task.private.x.shape[1], task.classes, bias=model.bias)
        for parameter in linear.parameters():
            nn.init.zeros_(parameter)
        return linear
    _, channels, height, width = task.private.x.shape
    return models.build(model, (channels, height, width), task.classes, task.mean, task.std, seed, data_root)


def sets_of(pair: config.Pair) -> list[str]:
    """The public datasets that a pair names."""
    publics = [pair.public] if pair.public != AUTO else pair.candidates or []
    return [name for public in publics for name in config.public_sets(public)]


def pair_distance(settings: RunConfig, task: Task, device: torch.device) -> dict[str, Any] | None:
    """The distance of a run's pair, measured once and kept under results/distances for all its seeds and algorithms."""
    if settings.distance.name == "none" or task.public is None:
        return None
    what = (
        config.settings(settings.distance) | config.settings(settings.pair) | {"model": config.settings(settings.model)}
    )
    public = config.short(settings.pair.public)
    name = f"{config.short(settings.pair.private)}-{public}-{settings.model.name}-{config.digest(what)}"
    folder = Path(settings.results) / "distances" / name
    with locked(folder):
        path = folder / "result.json"
        if path.exists() and not has_paths([settings.pair.private, *config.public_sets(settings.pair.public)]):
            return results.read_record(path, ("values", "mean"))
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
            "identity": name,
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
        results.write_record(path, record)
    return record


def raw(values: list[float], k: int) -> list[float]:
    """The projection metric of Algorithm 1 itself: GSD as reported is it divided by sqrt(k)."""
    return [value * math.sqrt(k) for value in values]


def summary(values: list[float]) -> dict[str, float | None]:
    """Mean and sample standard deviation (none for a single value)."""
    return {"mean": float(np.mean(values)), "std": float(np.std(values, ddof=1)) if len(values) > 1 else None}


def has_paths(names: list[str]) -> bool:
    """Whether a dataset is the user's own files, whose content may change under the same name."""
    return any(config.is_path(name) for name in names)
