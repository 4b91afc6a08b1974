"""One run on several processes, which torchrun starts: the first leads, the others help.

The leader does all that a process alone does, and has all files to itself: data, checkpoint, log, record. In each step
it also draws the sample and the noise, once. A helper receives its part of the private examples, and in each step the
weights and the sample; what it sends is the clipped sum over its part of the sample. The sum over all processes is the
sum that a single one would compute, up to its order. So a run may begin on some processes and resume on others, and
weights cannot drift apart.

The guarantee is that of one process: the sample is drawn once, over all examples; an example is in one process, where
it adds at most the sensitivity to the sum; noise of the declared scale is added to the whole sum once. All processes
use the leader's mechanism: each builds it from the same weights and public data, and what GPUs may compute with other
rounding (`Mechanism.shared`) is then replaced by the leader's.
"""

import copy
import signal
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from functools import partial
from typing import Any, NamedTuple, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from pubsel.algorithms import Algorithm, Mechanism, View
from pubsel.data import Split
from pubsel.gradients.matrix import Engine
from pubsel.messages import UsageError, UserError, log, say
from pubsel.training import torchrun
from pubsel.training.loop import ONE_PROCESS, OneProcess, clipped_sum, engine, flat, part_of, public_stream

PIECE = 2**26  # bytes of examples that are sent at once
T = TypeVar("T")


class _Left(Exception):
    """Raised in a helper if this training has failed, somewhere."""


def processes() -> OneProcess:
    """Return the processes that train together, as a context manager; a no-op for a single process."""
    return Leader() if torchrun.place()[1] > 1 else ONE_PROCESS


class Leader(OneProcess):
    """The leader's side of a training."""

    def __init__(self) -> None:
        self.size = torchrun.place()[1]
        self.waiting = False  # whether helpers wait for a step

    def own(self, private: Split) -> Split:
        return share(private, 0, self.size)

    def prepare(self, view: View, algorithm: Algorithm, name: str, chunk: int | None, private: Split) -> None:
        self.names, self.parameters = list(view.gradients.offsets), dict(view.model.named_parameters())
        device = next(view.model.parameters()).device
        shapes = [(values.shape, values.dtype) for values in private]
        job = Assignment(
            _placed(view, torch.device("cpu")),
            self.names,
            algorithm,
            name,
            chunk,
            device.type,
            torch.get_num_threads(),
            shapes,
        )

        # helpers hold their part of the examples for the whole training: only samples are sent later
        with _talking():
            _send(job)
            for rank in range(1, self.size):
                for values in share(private, rank, self.size):
                    for piece in _pieces(values):
                        dist.send(piece.contiguous(), rank)

        # all are ready, or all fail
        together(lambda: None)
        self.waiting = True
        say(f"  {self.size} processes, each with its part of the private examples")

    def begin(
        self, step: int, private: Split, chosen: Tensor | None, make: Callable[[], Mechanism]
    ) -> tuple[Mechanism, Split]:
        self.waiting = False
        with _talking():
            _send((step, chosen))
            dist.broadcast(flat([self.parameters[name] for name in self.names]), 0)
        return _begun(private, chosen, 0, self.size, make)

    def sum(self, mechanism: Mechanism, gradients: Engine, batch: Split) -> tuple[Tensor, Tensor]:
        total = _summed(mechanism, gradients, batch)
        self.waiting = True
        return total

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if self.waiting and (kind is None or issubclass(kind, Exception)):
            with _talking():
                _send(None)


class Assignment(NamedTuple):
    """The description of a training that a helper needs."""

    view: View  # without engine and random streams, on the CPU
    names: list[str]  # of the trained parameters, in the order of the columns of G
    algorithm: Algorithm
    name: str
    chunk: int | None
    device: str
    threads: int
    private: list[tuple[torch.Size, torch.dtype]]  # x and y of all private examples


STOPPED = tuple(128 + number for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP))  # exit codes


def lead(work: Callable[[], int]) -> int:
    """Run `work`, a whole command, on the first process, then end the others; return its exit code."""
    _start()
    code = work()
    if dist.is_initialized() and code not in STOPPED:  # by a signal, which reached all processes
        with _talking():
            _send(None)
        dist.destroy_process_group()
    return code


def assist() -> int:
    """Do what each other process does until the leader has ended; return the exit code."""
    _start()
    try:
        while (job := _received()) is not None:
            try:
                _assist(job)
            except _Left:
                continue
        dist.destroy_process_group()
    except KeyboardInterrupt:
        return 130
    return 0


def _assist(job: Assignment) -> None:
    """Help with one training."""
    # examples arrive once; what fails here must fail in every process
    rank, size = torchrun.place()
    parts = []
    for shape, dtype in job.private:
        values = torch.empty(len(range(rank, shape[0], size)), *shape[1:], dtype=dtype)
        with _talking():
            for piece in _pieces(values):
                dist.recv(piece, 0)
        parts.append(values)
    private = Split(*parts)
    view, private = together(lambda: _unpacked(job, private))
    weights = flat([view.model.get_parameter(name) for name in job.names])

    while True:
        with _talking():
            announced = _received()
            if announced is None:
                return
            dist.broadcast(weights, 0)

        # weights are the leader's in every step, so that they cannot drift apart
        with torch.no_grad():
            for name, columns in view.gradients.offsets.items():
                parameter = view.model.get_parameter(name)
                parameter.copy_(weights[columns].view_as(parameter))

        step, chosen = announced
        make = partial(job.algorithm.mechanism, view, step)
        mechanism, batch = _begun(private, chosen, rank, size, make)
        _summed(mechanism, view.gradients, batch)


# What leader and helpers have in common


def share(split: Split, rank: int, size: int) -> Split:
    """Return the examples of one process: each example has one process, whatever is sampled."""
    return Split(*(values[rank::size] for values in split))


def places_in_share(chosen: Tensor, rank: int, size: int) -> Tensor:
    """Return the places in the process's `share` of those examples with these indices that belong to it."""
    return chosen[chosen % size == rank] // size


def _begun(
    private: Split, chosen: Tensor | None, rank: int, size: int, make: Callable[[], Mechanism]
) -> tuple[Mechanism, Split]:
    """Return the mechanism of this step, the leader's, and the part of the sample that is in this process."""
    places = None if chosen is None else places_in_share(chosen, rank, size)
    mechanism, batch = together(lambda: (make(), part_of(private, places)))
    # what GPUs may round differently is replaced by the leader's: all clip to the same basis
    with _talking():
        for values in mechanism.shared:
            sent = values.contiguous()
            dist.broadcast(sent, 0)
            values.copy_(sent)
    return mechanism, batch


def _summed(mechanism: Mechanism, gradients: Engine, batch: Split) -> tuple[Tensor, Tensor]:
    """Return `clipped_sum` over the batches of all processes; only the leader's is whole."""
    both = torch.cat(together(lambda: clipped_sum(mechanism, gradients, batch)))
    with _talking():
        dist.reduce(both, 0)
    return both[:-2], both[-2:]


def together(work: Callable[[], T]) -> T:
    """Return the result of `work`, once it has succeeded in every process. If it fails in one, the leader raises its
    error, or else UserError with that of the first other process that failed, whose traceback goes into the log."""
    failure: Exception | None = None
    described: tuple[str, str] | None = None
    try:
        result = work()
    except Exception as error:
        failure, described = error, (str(error), "")

    # every process learns whether one of them failed
    rank, size = torchrun.place()
    with _talking():
        failed = torch.tensor(int(failure is not None))
        dist.all_reduce(failed)
        if not failed:
            return result
        reasons: list[Any] = [None] * size
        # an error in one line, and where it comes from
        if failure is not None and not isinstance(failure, UserError):
            first = f"{type(failure).__name__}: {str(failure).partition(chr(10))[0]}"
            described = first, "".join(traceback.format_exception(failure))
        dist.all_gather_object(reasons, described)

    if rank > 0:
        raise _Left
    if failure is not None:
        raise failure

    number = next(i for i, reason in enumerate(reasons) if reason)
    reason, trace = reasons[number]
    log(trace)
    raise UserError(f"process {number} of {size}: {reason}")


# Between processes: tensors on a CPU by gloo, those on GPUs by NCCL


def _start() -> None:
    """Wait for the other processes. Helpers wait as long as the leader takes to prepare, or to train on public data."""
    gpus = torch.cuda.device_count() if dist.is_nccl_available() else 0
    if torchrun.on_this_machine() < gpus:
        torch.cuda.set_device(torchrun.on_this_machine())
    try:
        dist.init_process_group("cpu:gloo,cuda:nccl" if gpus else "gloo", timeout=timedelta(days=30))
    except (RuntimeError, ValueError) as error:
        reason = str(error).partition("\n")[0]
        raise UserError(f"torchrun: the processes do not meet: {reason}") from None


@contextmanager
def _talking() -> Iterator[None]:
    """Raise UserError, from then on, if another process does not answer, most likely since it is dead."""
    if not dist.is_initialized():
        raise UserError("another process of torchrun has died: give the same command again")
    try:
        yield
    except RuntimeError as error:
        log(str(error))
        dist.destroy_process_group()
        reason = str(error).partition("\n")[0].partition(". ")[0]
        raise UserError(
            f"another process of torchrun has died, perhaps since memory ran out ({reason}): see its output; "
            "the same command resumes from the last checkpoint"
        ) from None


def _send(content: Assignment | tuple[int, Tensor | None] | None) -> None:
    """Send to the helpers a training; a step of it with its sample, indices of private examples or None for all; or
    None, the end of either."""
    dist.broadcast_object_list([content], 0)


def _received() -> Any:
    """Return what the leader has sent by `_send`."""
    contents: list[Any] = [None]
    with _talking():
        dist.broadcast_object_list(contents, 0)
    return contents[0]


def _pieces(values: Tensor) -> tuple[Tensor, ...]:
    """Return the rows of `values`, so many at a time that a copy of them is small."""
    row = values.element_size() * max(1, values[:1].numel())
    return values.split(max(1, PIECE // row)) if len(values) else ()


def _placed(view: View, device: torch.device) -> View:
    """Return a view with its tensors on a device, without what cannot be sent: the engine and random streams."""
    nothing: Any = None
    public = None if view.public is None else Split(*(values.to(device) for values in view.public))
    start = None if view.start is None else view.start.to(device)
    model = copy.deepcopy(view.model).to(device)
    return view._replace(model=model, public=public, start=start, gradients=nothing, random=nothing)


def _unpacked(job: Assignment, private: Split) -> tuple[View, Split]:
    """Return the view of a training in this process, and its private examples, on its device."""
    torch.set_num_threads(job.threads)
    number = torchrun.on_this_machine()
    if job.device == "cuda" and number >= torch.cuda.device_count():
        raise UsageError(
            f"torchrun --nproc-per-node: process {number} of this machine has no GPU, there are "
            f"{torch.cuda.device_count()}: start one for each, or give device=cpu"
        )

    device = torch.device("cuda", number) if job.device == "cuda" else torch.device("cpu")
    view = _placed(job.view, device)
    gradients = engine(view.model, job.chunk)
    assert list(gradients.offsets) == job.names  # else the columns of the sum would be others than the leader's
    view = view._replace(gradients=gradients, random=public_stream(job.name))
    return view, Split(*(values.to(device) for values in private))
