"""What a request names, before anything is trained: the cell, its data and network, its guarantee, its random streams.

Rank, audit and attack need the same of their requests as a training does, and import nothing that trains.
"""

import dataclasses
import math
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, Self

import numpy as np
import torch
from hydra.core.hydra_config import HydraConfig
from omegaconf import MISSING
from threadpoolctl import threadpool_limits
from torch import nn

from pubsel import algorithms, data, distances, models, records
from pubsel.algorithms import Algorithm, Derives, Facts, Solves
from pubsel.algorithms.dp_sgd import FixedClipping
from pubsel.data import Split, Task
from pubsel.data.convert import Shape
from pubsel.distances import Releases
from pubsel.files import digest, npy_map
from pubsel.gradients.factored import OffsetLinear
from pubsel.gradients.matrix import set_precision
from pubsel.messages import UsageError, say
from pubsel.privacy import accountant, ledger
from pubsel.privacy.randomness import Secret, content, secret
from pubsel.privacy.sampling import Schedule, schedule
from pubsel.selection.choose import Choice, by_features, check_choice, compared
from pubsel.selection.coverage import FEWEST
from pubsel.settings.identity import as_json, identity_of, is_path, short_name
from pubsel.settings.keys import (
    POOL,
    Convert,
    Device,
    Model,
    Optimizer,
    Overlap,
    Pair,
    RankConfig,
    RunConfig,
    Select,
    Take,
    Training,
    public_sets,
)
from pubsel.settings.methods import typed

AUTO = "auto"  # pair.public: chosen from pair.candidates


class Noted(NamedTuple):
    """A ledger entry: the unprocessed private examples, and the epsilon and delta spent."""

    private: Split
    epsilon: float
    delta: float


class Streams(NamedTuple):
    """Source of the secret random numbers of one request.

    settings: as they were asked for. name: of the request, for the ledger. code: a digest of the program; place: all
    that changes no more than the rounding of a sum (device, processor, threads, processes, chunk)."""

    settings: RunConfig | RankConfig
    name: str
    code: str
    place: str

    @classmethod
    def of(
        cls,
        settings: RunConfig | RankConfig,
        name: str,
        device: torch.device,
        processes: int = 1,
        repeated: Mapping[str, str] | None = None,
    ) -> Self:
        """Return the streams of a request here and now; of a record that is `repeated`, those of its program and
        machine."""
        if repeated is not None:
            return cls(settings, name, repeated["code"], repeated["place"])
        used: tuple[type, ...] = (type(distances.build(settings.distance)),)
        chunk = None
        if isinstance(settings, RunConfig):
            used, chunk = (*used, type(algorithms.build(settings.algorithm))), settings.training.chunk
        processor = f"{records.processor()} ({torch.backends.cpu.get_cpu_capability()})"
        if device.type == "cuda":
            processor = torch.cuda.get_device_name(device)
        place = f"{device.type}, {processor}, {torch.get_num_threads()} threads, {processes} processes, chunk {chunk}"
        return cls(settings, name, records.code(*used), place)

    @property
    def secure(self) -> bool:
        """Return whether sample and noise come from the operating system."""
        if isinstance(self.settings, RunConfig):
            return self.settings.privacy.secure_noise
        return self.settings.secure_noise

    def secret(
        self,
        what: str,
        private: Iterable[torch.Tensor],
        public: Iterable[Split],
        weights: Mapping[str, torch.Tensor],
        plan: Mapping[str, Any],
        noted: Noted | None = None,
    ) -> Secret:
        """Return the secret streams of one release of the request (`randomness.secret`). private, public: as used;
        private also has how many examples each person has, if the unit is a person.
        noted: written into the ledger just before the first noise is drawn; None if nothing is released."""
        streams = secret(
            what,
            settings=as_json(self.settings),
            private=private,
            public=[tensor for split in public for tensor in split],
            weights=weights,
            plan=plan,
            streams=self.record(),
            secure=self.secure,
        )

        if noted is not None:
            streams.begin = partial(self._note, what, noted)
        return streams

    def choice(self, choice: Choice) -> Secret:
        """Return the secret streams of a private choice, which all that it depends on decides: no two share them."""
        weights = {} if by_features(choice.select) else tensors(choice.build(0))
        noted, public = Noted(choice.task.private, choice.epsilon, 0.0), choice.candidates.values()
        return self.secret("choice", units_of(choice.task), public, weights, {"epsilon": choice.epsilon}, noted)

    def _note(self, what: str, noted: Noted, key: str) -> None:
        settings = self.settings
        given = settings.private if isinstance(settings, RankConfig) else settings.pair.private
        if isinstance(settings, RunConfig) and settings.pair.unit is not None:
            what += f", for a person ({settings.pair.unit})"
        release = ledger.Entry(self.name, given, what, noted.epsilon, noted.delta, None if self.secure else key)
        ledger.note(settings.results, content(*noted.private), release)

    def record(self) -> dict[str, str]:
        """Return what of the noise does not follow from settings and data, for records."""
        return {"code": self.code, "place": self.place}


class Cell(NamedTuple):
    """One training as it was asked for. name: of the run; folder: of its record and what an unfinished one keeps."""

    settings: RunConfig
    algorithm: Algorithm
    name: str
    folder: Path
    device: torch.device
    streams: Streams

    @classmethod
    def of(
        cls, settings: RunConfig, kind: str = "runs", processes: int = 1, repeated: Mapping[str, str] | None = None
    ) -> Self:
        """Return the cell of canonical settings, its folder below RESULTS/`kind`. UsageError if there is no such
        device."""
        use_threads(settings.threads)
        device, name = choose_device(settings.device), identity_of(settings)
        streams = Streams.of(settings, name, device, processes, repeated)
        folder = Path(settings.results) / kind / name
        return cls(settings, algorithms.build(settings.algorithm), name, folder, device, streams)

    def load_task(self) -> Task:
        """Return the data; with a backbone, its features in place of the images."""
        return load_task(self.settings, self.device)

    def derived(self, task: Task) -> Self:
        """Return the cell with its algorithm for a task."""
        return self._replace(algorithm=derived(self.algorithm, self.settings, task))

    def network(self, task: Task, seed: int | None = None) -> nn.Module:
        """Return the network for a task, on the cell's device; with its own seed, or another."""
        seed = self.settings.seed if seed is None else seed
        return network(self.settings.model, task, seed, self.settings.data_root).to(self.device)


def check_pair(settings: RunConfig) -> None:
    """Raise UsageError if private data were given alone: the public ones would be those of another pair."""
    if not HydraConfig.initialized():
        return
    given = {word.lstrip("+~").partition("=")[0]: word for word in HydraConfig.get().overrides.task}
    if "pair.private" not in given or given.keys() & {"pair", "pair.public", "experiment", "like", "replay"}:
        return
    if settings.algorithm.get("_target_") and algorithms.build(settings.algorithm).uses_public:
        raise UsageError(
            f"{given['pair.private']}: give its public data too, pair.public=NAME or a path (`pubsel rank` finds the "
            "nearest), or an algorithm without, such as algorithm=dp_sgd; and model=NAME, unless fmnist_cnn fits"
        )


def choose_device(device: Device) -> torch.device:
    """Return the device. Raise UsageError if CUDA is requested and there is none."""
    if device == Device.cuda and not torch.cuda.is_available():
        raise UsageError("device=cuda: no CUDA device is available here; use device=cpu or device=auto")
    use = "cuda" if device != Device.cpu and torch.cuda.is_available() else "cpu"
    if use == "cuda":  # torch convolves in tf32 unless told otherwise
        set_precision("ieee")
    return torch.device(use)


def canonical(settings: RunConfig) -> RunConfig:
    """Return the settings with those that this algorithm ignores set to one value, so that equal runs are one run."""
    if "_target_" not in settings.algorithm:
        raise UsageError("algorithm has no value: give algorithm=NAME, such as gep or dp_sgd")
    algorithm = algorithms.build(settings.algorithm)
    pair, distance, epsilon = settings.pair, distances.build(settings.distance), settings.epsilon
    typed_algorithm = typed("algorithm", algorithm, settings.algorithm)

    # what the method sets itself is one value, whatever was given
    if isinstance(algorithm, Derives):
        own: dict[str, Any] = {f.name: f.default for f in dataclasses.fields(Training) if f.default != MISSING}
        training = dataclasses.replace(settings.training, **(own | dict(algorithm.training)))
        settings = dataclasses.replace(settings, training=training)

    # without public data, nothing that describes it changes the run; nor does a seed of which nothing is drawn
    if not algorithm.uses_public or (pair.public is None and not algorithm.needs_public):
        pair = without_public(pair)
        distance = None
        settings = dataclasses.replace(settings, epsilon_select=None)
    elif pair.public is None:
        raise UsageError(f"algorithm={algorithm.name} needs public data: give pair.public=NAME")
    elif pair.take == Take.test and pair.m is not None and (k := algorithm.directions or 0) > pair.m:
        raise UsageError(f"algorithm.k={k} is more than the pair.m={pair.m} public examples: lower algorithm.k")
    if not (pair.take == Take.train or pair.validation or pair.private_share < 1):
        pair = dataclasses.replace(pair, seed=0)
    check_backbone(settings.model)

    check_rate(settings.training, algorithm, settings.model)
    select = compared(settings.select, settings.model)
    check_unit(pair, algorithm, select)

    # the record of a run has one guarantee: what a distance would spend is not in it
    if isinstance(distance, Releases):
        raise UsageError(
            f"distance={distance.name}: its epsilon would add to that of training: measure it by pubsel rank"
        )
    pair = canonical_pool(pair, settings.epsilon_select, settings.model)
    if settings.epsilon_select is not None and pair.public != POOL:
        check_choice(select, settings.model, distance)
    pair = canonical_candidates(pair, settings.epsilon_select)
    select = select if pair.candidates else Select()

    if not algorithm.private:
        epsilon = float("inf")
    elif algorithm.sensitivity() == 0:  # private examples are never read
        epsilon = 0.0

    typed_distance = None if distance is None else typed("distance", distance, settings.distance or {})
    return dataclasses.replace(
        settings, pair=pair, distance=typed_distance, epsilon=epsilon, algorithm=typed_algorithm, select=select
    )


def without_public(pair: Pair) -> Pair:
    """Return the pair with no public data, and one value for all that describes them."""
    nothing: dict[str, Any] = dict.fromkeys(("public", "shots", "public_share", "candidates", "pool", "pool_m"))
    return dataclasses.replace(pair, m=1, convert=Convert.resize, take=Take.test, **nothing)


def check_unit(pair: Pair, algorithm: Algorithm, select: Select) -> None:
    """Raise UsageError if the private unit is a person, and something reads private examples one by one."""
    if pair.unit is None:
        return
    if isinstance(algorithm, Solves):
        raise UsageError(
            f"pair.unit={pair.unit}: algorithm={algorithm.name} protects single examples only: take another algorithm, "
            "such as whitened_head"
        )
    if pair.public == AUTO and not by_features(select):
        raise UsageError(
            f"pair.unit={pair.unit}: pair.public=auto chooses under a guarantee for one example: give the public set, "
            "or select.by=coverage, with model.backbone"
        )


def refuse_unit(pair: Pair, what: str) -> None:
    """Raise UsageError if the private unit is a person, for `what` is of single examples."""
    if pair.unit is not None:
        raise UsageError(f"pair.unit={pair.unit}: {what} of single examples, and not of people: leave pair.unit out")


def check_rate(training: Training, algorithm: Algorithm, model: Model) -> None:
    """Raise UsageError if the learning rate is to follow from the noise where nothing is known of it."""
    if training.learning_rate is not None:
        return
    linear = model.backbone is not None or model.name == "logistic"
    plain = training.optimizer == Optimizer.sgd and training.inverse_decay is None
    if not (linear and plain and isinstance(algorithm, FixedClipping) and algorithm.unit):
        raise UsageError(
            "training.learning_rate=null is for a linear classifier on rows of norm 1, by plain SGD: take "
            "algorithm=dp_sgd_clip1, pillar, jl or dp_pca on features, or give a number"
        )


def derived(algorithm: Algorithm, settings: RunConfig, task: Task) -> Algorithm:
    """Return the algorithm with what follows from the task, if it has such settings."""
    if not isinstance(algorithm, Derives):
        return algorithm
    private, public = task.private, task.public
    if private.x.dim() != 2:
        raise UsageError(f"algorithm={algorithm.name} takes features: set model.backbone, such as model=scattering")

    epsilon, several = settings.epsilon, private.y.dim() == 2
    mu = accountant.gaussian_mu(epsilon, settings.privacy.delta) if math.isfinite(epsilon) else math.inf
    m = 0 if public is None else len(public.x)
    n, d = task.units, private.x.shape[1]
    known = task.same_task, task.same_classes, task.same_names
    return algorithm.derived(Facts(n, d, m, task.classes, several, mu, *known))


def canonical_candidates(pair: Pair, epsilon: float | None) -> Pair:
    """Return the same pair with its candidates in one order. UsageError where pair.public=auto, pair.candidates and
    epsilon_select do not all stand together, or not at all."""
    auto = pair.public == AUTO
    chooses = epsilon is not None and pair.public != POOL
    if (auto, bool(pair.candidates), chooses) not in ((True,) * 3, (False,) * 3):
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


def canonical_pool(pair: Pair, epsilon: float | None, model: Model) -> Pair:
    """Return the same pair with what describes a pool. UsageError if one of pair.public=pool, pair.pool and
    epsilon_select is given without the others, or if a pool cannot be chosen from with these settings."""
    from_pool = pair.public == POOL
    if from_pool != bool(pair.pool) or (from_pool and epsilon is None):
        raise UsageError("pair.public=pool, pair.pool=[A,B,...] and epsilon_select=... belong together: give all")
    if not from_pool:
        return dataclasses.replace(pair, pool_m=None)
    if pair.take != Take.test:
        raise UsageError("pair.public=pool: its examples are of other sets or test images: set pair.take=test")
    if pair.overlap == Overlap.drop:
        raise UsageError("pair.overlap=drop: what is in the pool would depend on private images: take leave")
    if pair.m is not None and pair.m < FEWEST:
        raise UsageError(f"pair.m={pair.m}: too few to see whether they are of the private kind: give {FEWEST} or more")
    if model.backbone is None:
        raise UsageError("pair.public=pool: compares features: set model.backbone, such as model=scattering")
    return pair


def by_label(pair: Pair) -> dict[str, Pair]:
    """Return the candidates of pair.public=auto by the name that a record has of the chosen one, each as a pair with
    it."""
    return {
        "+".join(public_sets(public)): dataclasses.replace(pair, public=public, candidates=None)
        for public in pair.candidates or []
    }


def as_chosen(pair: Pair, public: str | None) -> Pair:
    """Return the pair of a finished run with the public set that was chosen; public: what its record says of it."""
    if public is None:
        return without_public(pair)
    return by_label(pair)[public] if pair.public == AUTO else pair


def check_backbone(model: Model) -> None:
    """Raise UsageError for a setting that features of a backbone leave without use."""
    keys = ("trained", "lora", "adapters", "once", "architecture", "pretrained", "checkpoint", "options", "mean", "std")
    unused = [key for key in keys if getattr(model, key)]
    if model.backbone is not None and unused:
        raise UsageError(f"model.{unused[0]}: with model.backbone a linear classifier on features trains")


def use_threads(threads: int | None) -> None:
    """Set how many CPU threads torch, numpy and scipy use; None: as many as torch uses already. The number decides how
    sums are rounded, so it has to be the same in all three."""
    import scipy.linalg  # noqa: F401  # scipy's BLAS is not numpy's, and can be limited only after it is loaded

    torch.set_num_threads(threads or torch.get_num_threads())
    threadpool_limits(torch.get_num_threads())


def load_task(settings: RunConfig, device: torch.device) -> Task:
    """Return the data of a run; with a backbone, its features in place of the images."""
    through = through_backbone(settings, device)
    return data.load(settings.pair, settings.data_root, settings.download, through, settings.keep)


def through_backbone(settings: RunConfig | RankConfig, device: torch.device) -> data.Through:
    """Return what makes a named source into the one that is used: with a backbone, its features in place of the
    images."""
    backbone = settings.model.backbone
    if backbone is None:
        return data.unchanged
    from pubsel.data import features  # and with it timm: a second

    convert = settings.convert if isinstance(settings, RankConfig) else settings.pair.convert

    def through(name: str, source: data.Source, like: Shape | None) -> data.Source:
        root = settings.data_root
        return features.of_source(short_name(name), source, backbone, root, device, say, like, convert)

    return through


def guarantee(
    settings: RunConfig, algorithm: algorithms.Algorithm, n: int, report: Callable[[str], None] = say
) -> tuple[Schedule, accountant.Plan | None, accountant.Plan | None]:
    """Plan steps and noise for n private units, examples or people: the schedule, what training spends, and what a
    release before it spends. report: takes lines about it."""
    plan = schedule(n, settings.training)
    if isinstance(algorithm, Derives):
        plan = plan._replace(steps=algorithm.steps)
    if algorithm.private and settings.epsilon != math.inf and algorithm.sensitivity() > 0:
        accountant.check_delta(settings.privacy.delta, n, settings.privacy.weak)

    # these have no step of the loop that spends anything
    if isinstance(algorithm, Solves):
        if math.isfinite(settings.epsilon):
            cost = algorithm.account(n, settings.epsilon, settings.privacy.delta)
            noise = f"noise multiplier {cost.noise_multiplier:.4g}"
            report(f"  {cost.steps} steps, sampling rate {cost.rate:.4g}, {noise}")
        return plan._replace(steps=0), None, None
    if not algorithm.private or settings.epsilon == math.inf:
        return plan, None, None

    epsilon, delta, sigma = settings.epsilon, settings.privacy.delta, settings.privacy.noise_multiplier
    if algorithm.sensitivity() == 0:
        report("  no private example is read: epsilon 0")
        return plan._replace(steps=0), accountant.NOTHING, None
    if n > accountant.MOST_EXAMPLES:
        raise UsageError(f"pair.private: {n} examples: the rounding of sums is bounded for {accountant.MOST_EXAMPLES}")

    # a release before training takes its share, and training the rest
    share = algorithm.first_share
    first = accountant.plan(share * epsilon, share * delta, 1.0, 1, 1.0) if share else None
    if first is not None:
        report(f"  first release: noise multiplier {first.noise_multiplier:.4g}, epsilon {first.epsilon:.4g}")
        epsilon, delta = (1 - share) * epsilon, (1 - share) * delta

    # if the noise is given, the steps follow from it
    if sigma is not None:
        if plan.rate < 1:
            raise UsageError(f"privacy.noise_multiplier={sigma}: for full batches: set training.batch_size to {n}")
        plan = plan._replace(steps=accountant.most_steps(epsilon, delta, sigma))
    accounting = settings.privacy.accounting
    spend = accountant.plan(epsilon, delta, plan.rate, plan.steps, algorithm.sensitivity(), accounting)
    if sigma is not None:
        spend = spend._replace(noise_multiplier=sigma, epsilon=accountant.spent(sigma, plan.rate, plan.steps, delta))

    report(
        f"  {plan.steps} steps, sampling rate {plan.rate:.4g}, noise multiplier {spend.noise_multiplier:.4g}, "
        f"sensitivity {algorithm.sensitivity():.4g}: epsilon {spend.epsilon:.4g} at delta {delta:g}"
    )
    return plan, spend, first


def tensors(model: nn.Module) -> dict[str, torch.Tensor]:
    """Return all numbers of a network by name, those that its file leaves out included."""
    return dict(model.named_parameters()) | dict(model.named_buffers())


def units_of(task: Task) -> list[torch.Tensor]:
    """Return all of the private data that decides a release: examples, and whose they are."""
    return [*task.private, *([] if task.people is None else [task.people])]


def weights_digest(model: nn.Module) -> str:
    """Return a fingerprint of all weights, bit for bit: two runs that print the same one ended alike."""
    return digest((tensor.cpu().contiguous().numpy().tobytes() for tensor in model.state_dict().values()), size=8)


def network(model: Model, task: Task, seed: int, data_root: str = ".") -> nn.Module:
    """Return the model for a task's images and classes; for features a linear classifier that starts at zero."""
    if task.private.x.dim() == 2:
        kind = OffsetLinear if task.offsets else nn.Linear
        linear = kind(task.private.x.shape[1] - task.offsets, task.classes, bias=model.bias)
        for parameter in linear.parameters():
            nn.init.zeros_(parameter)
        return linear
    _, channels, height, width = task.private.x.shape
    return models.build(model, (channels, height, width), task.classes, task.mean, task.std, seed, data_root)


def given_weights(settings: RunConfig | RankConfig, task: Task) -> str | None:
    """Return the digest of the weights that features come from, or that training starts from; None if all are drawn."""
    model = settings.model
    if task.weights or not (model.pretrained or model.checkpoint):
        return task.weights
    start = network(model, task, settings.seed, settings.data_root).start
    return start if isinstance(start, str) else None


def sets_of(pair: Pair) -> list[str]:
    """Return the public datasets that a pair names."""
    if pair.public == POOL:
        return pair.pool or []
    publics = [pair.public] if pair.public != AUTO else pair.candidates or []
    return [name for public in publics for name in public_sets(public)]


def has_paths(names: list[str]) -> bool:
    """Return whether any dataset is a path, so that its content may change."""
    return any(is_path(name) for name in names)


def map_split(split: Split, path: Path) -> Split:
    """Return the split with its examples in a file, from which what is used is read."""
    np.save(path, split.x.numpy())
    return Split(torch.from_numpy(npy_map(path)), split.y)
