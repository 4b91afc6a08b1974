"""A request before anything is trained: the cell, its data and network, its guarantee, its random streams.

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
from threadpoolctl import threadpool_limits
from torch import nn

from pubsel import algorithms, data, distances, models, records
from pubsel.algorithms import Algorithm, Derives, Facts, Freezes, Informed, Solves
from pubsel.data import Split, Task, features
from pubsel.data.convert import Shape
from pubsel.data.memory import FOLDER
from pubsel.distances import Build
from pubsel.files import digest, npy_map
from pubsel.gradients.factored import OffsetLinear
from pubsel.gradients.matrix import set_precision
from pubsel.messages import UsageError, say
from pubsel.privacy import accountant, ledger
from pubsel.privacy.randomness import Secret, content, secret
from pubsel.privacy.sampling import Schedule, schedule
from pubsel.rules import Budget, Inputs
from pubsel.selection.choose import Choice, by_features
from pubsel.settings.identity import as_json, identity_of, short_name
from pubsel.settings.keys import Backbone, Convert, Device, Metric, Model, RankConfig, RunConfig, Select, Training

SIGNED = 0.25  # share of negative values, from which features of images are no activations


class Spending(NamedTuple):
    """A ledger entry: the unprocessed private examples, the epsilon and delta spent, the digest of all examples of the
    data set (`Task.original`), and the plan of the noise, if it is known."""

    private: Split
    epsilon: float
    delta: float
    original: str | None = None
    plan: accountant.Plan | None = None


class Streams(NamedTuple):
    """Source of the secret random numbers of one request.

    settings: those requested, as JSON. name: of the request, for the ledger. code: a digest of the program; place: all
    that changes no more than the rounding of a sum (device, processor, threads, processes, chunk). secure: sample and
    noise come from the operating system. results: the folder of the ledger; private: the data that it names; unit: the
    column of people, None for examples; cap: of what these data may spend."""

    settings: Mapping[str, Any]
    name: str
    code: str
    place: str
    secure: bool
    results: str
    private: str
    unit: str | None
    cap: ledger.Cap | None

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
        # the digest of the program covers the classes that this request uses
        used: tuple[type, ...] = (type(distances.build(settings.distance)),)
        if isinstance(settings, RunConfig):
            pair, chunk, secure = settings.pair, settings.training.chunk, settings.privacy.secure_noise
            used, private, unit = (*used, type(algorithms.build(settings.algorithm))), pair.private, pair.unit
        else:
            private, unit, chunk, secure = settings.private, None, None, settings.secure_noise

        # the place decides how sums are rounded, and so which noise may be repeated
        if repeated is None:
            processor = f"{records.processor()} ({torch.backends.cpu.get_cpu_capability()})"
            if device.type == "cuda":
                processor = torch.cuda.get_device_name(device)
            threads = f"{torch.get_num_threads()} threads"
            place = f"{device.type}, {processor}, {threads}, {processes} processes, chunk {chunk}"
            repeated = {"code": records.code(*used), "place": place}
        of_program = (repeated["code"], repeated["place"])
        cap = ledger.Cap.of(settings.budget)
        return cls(as_json(settings), name, *of_program, secure, settings.results, private, unit, cap)

    def secret(
        self,
        what: str,
        private: Iterable[torch.Tensor],
        public: Iterable[Split],
        weights: Mapping[str, torch.Tensor],
        plan: Mapping[str, Any],
        spending: Spending | None = None,
    ) -> Secret:
        """Return the secret streams of one release of the request (`randomness.secret`). private, public: as used;
        private also has how many examples each person has, if the unit is a person.
        spending: written into the ledger just before the first noise is drawn; None if nothing is released."""
        streams = secret(
            what,
            settings=self.settings,
            private=private,
            public=[tensor for split in public for tensor in split],
            weights=weights,
            plan=plan,
            streams=self.record(),
            secure=self.secure,
        )

        if spending is not None:
            streams.begin = partial(self._note, what, spending)
        return streams

    def choice(self, choice: Choice) -> Secret:
        """Return the secret streams of a private choice, which all that it depends on decides: no two share them."""
        weights = {} if by_features(choice.select) else tensors(choice.build(0))
        task, public = choice.task, choice.candidates.values()
        spending = Spending(task.private, choice.epsilon, 0.0, task.original)
        return self.secret("choice", units_of(task), public, weights, {"epsilon": choice.epsilon}, spending)

    def check(self, spending: Spending) -> None:
        """Raise UsageError if all that a request will release would exceed the budget of its data."""
        ledger.check_planned(self.results, self._entry("training", spending, ""))

    def _note(self, what: str, spending: Spending, key: str) -> None:
        ledger.note(self.results, content(*spending.private), self._entry(what, spending, key))

    def _entry(self, what: str, spending: Spending, key: str) -> ledger.Entry:
        if self.unit is not None:
            what += f"{ledger.PERSON} ({self.unit})"
        plan = spending.plan
        known = plan is not None and plan.steps > 0 and plan.accountant in accountant.GAUSSIAN
        noise = (plan.rate, plan.steps, plan.noise_multiplier) if plan is not None and known else ()
        drawn = None if self.secure else key
        costs = (spending.epsilon, spending.delta, drawn, spending.original, self.cap)
        return ledger.Entry(self.name, self.private, what, *costs, *noise)

    def record(self) -> dict[str, str]:
        """Return what of the noise does not follow from settings and data, for records."""
        return {"code": self.code, "place": self.place}


class Cell(NamedTuple):
    """One training, cut into the parts that rooms read. name: of the run; folder: of its record and what an unfinished
    one keeps; select, epsilon_select: of a private choice of public data; distance: the settings of one to measure."""

    name: str
    folder: Path
    device: torch.device
    streams: Streams
    inputs: Inputs
    model: Model
    seed: int
    algorithm: Algorithm
    budget: Budget
    training: Training
    select: Select
    epsilon_select: float | None
    distance: dict[str, Any] | None

    @classmethod
    def of(
        cls, settings: RunConfig, kind: str = "runs", processes: int = 1, repeated: Mapping[str, str] | None = None
    ) -> Self:
        """Return the cell of canonical settings, its folder below RESULTS/`kind`. UsageError if there is no such
        device."""
        use_threads(settings.threads)
        device, name = choose_device(settings.device), identity_of(settings)
        return cls(
            name=name,
            folder=Path(settings.results) / kind / name,
            device=device,
            streams=Streams.of(settings, name, device, processes, repeated),
            inputs=Inputs.of(settings),
            model=settings.model,
            seed=settings.seed,
            algorithm=algorithms.build(settings.algorithm),
            budget=Budget.of(settings),
            training=settings.training,
            select=settings.select,
            epsilon_select=settings.epsilon_select,
            distance=settings.distance,
        )

    @property
    def public_key(self) -> str:
        """Return what names the public random streams: the run; or, as the name of data in memory is a digest of them,
        the method and the seed alone."""
        in_memory = Path(self.inputs.pair.private).parent == FOLDER
        return f"{self.algorithm.name} {self.seed}" if in_memory else self.name

    def last_layer(self, task: Task) -> tuple[Self, Task]:
        """Return the cell and its task without features of stages before the last layer of a network: for what was to
        have public data, which bring those to one scale, and has none."""
        backbone = self.model.backbone
        if not task.stages or backbone is None:
            return self, task
        backbone = dataclasses.replace(backbone, stages=False)
        model, inputs = dataclasses.replace(self.model, backbone=backbone), self.inputs._replace(backbone=backbone)
        return self._replace(model=model, inputs=inputs), task.last_layer()

    def load_task(self) -> Task:
        """Return the data; with a backbone, its features in place of the images."""
        return load_task(self.inputs, self.device)

    def derived(self, task: Task) -> Self:
        """Return the cell with its algorithm for a task. UsageError for training on views of what is no image."""
        if self.training.augment is not None and task.private.x.dim() != 4:
            raise UsageError(
                f"training.augment: views are of images, and {self.inputs.pair.private} has none: leave "
                "training.augment and training.views out"
            )
        return self._replace(algorithm=derived(self.algorithm, self.budget, task))

    def guarantee(
        self, units: int, report: Callable[[str], None] = say
    ) -> tuple[Schedule, accountant.Plan | None, accountant.Plan | None]:
        """Plan steps and noise for private units (`guarantee`)."""
        return guarantee(self.budget, self.training, self.algorithm, units, report)

    def network(self, task: Task, seed: int | None = None) -> nn.Module:
        """Return the network for a task, on the cell's device; with its own seed, or another."""
        seed = self.seed if seed is None else seed
        return network(self.model, task, seed, self.inputs.data_root).to(self.device)


def choose_device(device: Device) -> torch.device:
    """Return the device. Raise UsageError if CUDA is requested and there is none."""
    if device == Device.cuda and not torch.cuda.is_available():
        raise UsageError("device=cuda: no CUDA device is available here; use device=cpu or device=auto")
    use = "cuda" if device != Device.cpu and torch.cuda.is_available() else "cpu"
    if use == "cuda":  # torch convolves in tf32 unless told otherwise
        set_precision("ieee")
    return torch.device(use)


def derived(algorithm: Algorithm, budget: Budget, task: Task) -> Algorithm:
    """Return the algorithm with what follows from the task, if it has such settings. UsageError if it cannot learn
    the task."""
    if isinstance(algorithm, Solves) and task.private.y.dim() == 2:
        raise UsageError(
            f"algorithm={algorithm.name} learns one class of each example, not several labels: take another "
            "algorithm, such as whitened_head"
        )
    private, public = task.private, task.public
    if private.x.dim() != 2 and isinstance(algorithm, Informed | Freezes):
        raise UsageError(f"algorithm={algorithm.name} takes features: set model.backbone, such as model=scattering")
    if not isinstance(algorithm, Informed):
        return algorithm

    # facts that are public: sizes, classes, whose labels fit; of the noise its scale
    epsilon, several = budget.epsilon, private.y.dim() == 2
    mu = accountant.gaussian_mu(epsilon, budget.delta) if math.isfinite(epsilon) else math.inf
    m = 0 if public is None else len(public.x)
    n, d = task.units, private.x.shape[1]
    features = None if public is None else public.x
    balanced = task.metric == Metric.balanced_accuracy.name
    images = len(task.shape) != 1
    facts = Facts(n, d, m, task.classes, several, mu, task.same_task, task.raw, images, features, task.stages, balanced)
    signed = images and features is not None and float((features < 0).float().mean()) >= SIGNED
    return algorithm.derived(facts._replace(names=task.names, signed=signed))


def use_threads(threads: int | None) -> None:
    """Set how many CPU threads torch, numpy and scipy use; None: as many as torch uses already. The number decides how
    sums are rounded, so it has to be the same in all three."""
    import scipy.linalg  # noqa: F401  # scipy's BLAS is not numpy's, and can be limited only after it is loaded

    torch.set_num_threads(threads or torch.get_num_threads())
    threadpool_limits(torch.get_num_threads())


def load_task(inputs: Inputs, device: torch.device) -> Task:
    """Return the data of a run; with a backbone, its features in place of the images."""
    through = through_backbone(inputs.backbone, inputs.pair.convert, inputs.data_root, device)
    pixels = inputs.backbone is None
    return data.load(inputs.pair, inputs.data_root, inputs.download, through, inputs.keep, pixels)


def through_backbone(backbone: Backbone | None, convert: Convert, root: str, device: torch.device) -> data.Through:
    """Return what makes a named source into the one that is used: with a backbone, its features in place of the
    images. root: the folder with the data, where features are kept."""
    if backbone is None:
        return data.unchanged

    def through(name: str, source: data.Source, like: Shape | None) -> data.Source:
        return features.of_source(short_name(name), source, backbone, root, device, say, like, convert)

    return through


def guarantee(
    budget: Budget, training: Training, algorithm: Algorithm, n: int, report: Callable[[str], None] = say
) -> tuple[Schedule, accountant.Plan | None, accountant.Plan | None]:
    """Plan steps and noise for n private units, examples or people: the schedule, what training spends, and what a
    release before it spends; of one that counts as steps (`Algorithm.first_steps`), what both spend. report: takes
    lines about it. UsageError if no noise, or no step, keeps within the budget."""
    plan = schedule(n, training)
    if isinstance(algorithm, Derives):
        plan = plan._replace(steps=algorithm.steps)
    if algorithm.private and budget.epsilon != math.inf and algorithm.sensitivity() > 0:
        accountant.check_delta(budget.delta, n, budget.weak)
        if n > accountant.MOST_EXAMPLES:
            most = accountant.MOST_EXAMPLES
            raise UsageError(f"pair.private: {n} examples: the rounding of sums is bounded for {most}")

    # these have no step of the loop that spends anything
    if isinstance(algorithm, Solves):
        if not math.isfinite(budget.epsilon):
            raise UsageError(f"epsilon=inf: algorithm={algorithm.name} plans its noise by epsilon: give a number")
        cost = algorithm.account(n, budget.epsilon, budget.delta)
        noise = f"noise multiplier {cost.noise_multiplier:.4g}"
        report(f"  {cost.steps} steps, sampling rate {cost.rate:.4g}, {noise}")
        return plan._replace(steps=0), None, None
    if not algorithm.private or budget.epsilon == math.inf:
        return plan, None, None

    epsilon, delta, sigma = budget.epsilon, budget.delta, budget.noise_multiplier
    if algorithm.sensitivity() == 0:
        report("  no private example is read: epsilon 0")
        return plan._replace(steps=0), accountant.NOTHING, None

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
        steps = accountant.most_steps(epsilon, delta, sigma) - algorithm.first_steps
        if steps < 1:
            raise UsageError(f"privacy.noise_multiplier={sigma}: no step is left after the first release: raise it")
        plan = plan._replace(steps=steps)
    # or it is paid for as some more full-batch steps, whose mean has less noise than one of them
    steps = plan.steps + algorithm.first_steps
    spend = accountant.plan(epsilon, delta, plan.rate, steps, algorithm.sensitivity(), budget.accounting)
    if sigma is not None:
        spend = spend._replace(noise_multiplier=sigma, epsilon=accountant.spent(sigma, plan.rate, steps, delta))
    if algorithm.first_steps:
        assert plan.rate == 1
        first = spend._replace(noise_multiplier=spend.noise_multiplier / math.sqrt(algorithm.first_steps))

    report(
        f"  {steps} steps, sampling rate {plan.rate:.4g}, noise multiplier {spend.noise_multiplier:.4g}, "
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
        linear.register_buffer("class_weights", task.class_weights, persistent=False)
        return linear
    _, channels, height, width = task.private.x.shape
    return models.build(model, (channels, height, width), task.classes, task.mean, task.std, seed, data_root)


def networks(model: Model, task: Task, seed: int, data_root: str, device: torch.device) -> Build:
    """Return what makes the network of an initialisation, whose random weights are its own."""
    return lambda i: network(model, task, seed + i, data_root).to(device)


def given_weights(model: Model, task: Task, seed: int, data_root: str) -> str | None:
    """Return the digest of the weights that features come from, or that training starts from; None if all are drawn."""
    if task.weights or not (model.pretrained or model.checkpoint):
        return task.weights
    start = network(model, task, seed, data_root).start
    return start if isinstance(start, str) else None


def map_split(split: Split, path: Path) -> Split:
    """Return the split with its examples in a file, from which what is used is read."""
    np.save(path, split.x.numpy())
    return Split(torch.from_numpy(npy_map(path)), split.y)
