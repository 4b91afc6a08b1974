"""What a run will take, before it takes it: memory by counting what is large. What training holds and how long it takes
is found by a rehearsal (rehearsal.py). No private example is read, only how many there are and what shape they have.
"""

import os
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple, Self

import psutil
import torch
from torch import nn

from pubsel.algorithms import Algorithm, View
from pubsel.data import Split, Task
from pubsel.gradients.matrix import Engine
from pubsel.messages import UserError, duration, gib, say
from pubsel.models.memory import free
from pubsel.privacy.randomness import stream
from pubsel.privacy.sampling import Schedule
from pubsel.settings.keys import SHARED_GPU
from pubsel.training.loop import by_unit, noisy_mean
from pubsel.training.rehearsal import Needs, random_like

MOST = 0.75  # of a GPU that cells share, for one of them
WAIT_SECONDS = 5


class Memory(NamedTuple):
    """Bytes that a run holds at once beside what is loaded already, by what holds them."""

    training: int  # gradients and bases
    distance: int  # its passes included
    passes: int  # of one chunk through the network
    prepared: int = 0  # features or outputs that training reads in place of the data
    preparing: int = 0  # while these are computed

    @property
    def peak(self) -> int:
        return max(self.prepared + max(self.training + self.passes, self.preparing), self.distance)


def memory(gradients: Engine, algorithm: Algorithm, view: View, task: Task, distance: int = 0) -> Memory:
    """Bytes for a run on `task`, from the sizes of what is held. distance: those of measuring it."""
    chunk = by_unit(None, task.people, gradients)[1].chunk(task.private.x)
    item = next(view.model.parameters()).element_size()
    rows = chunk if task.people is None else 2 * chunk  # of examples, and of people
    vectors = rows + 6  # float64 sum and noise, direction, momentum
    return Memory(
        training=(algorithm.numbers(view) + vectors * gradients.size) * item,
        distance=distance,
        passes=passes(view.model, task.private, chunk),
    )


def passes(model: nn.Module, private: Split, chunk: int) -> int:
    """Bytes of the outputs of all layers for a chunk of examples, and of the gradients at them; from one forward pass
    of two. private: read for its shape alone."""
    return 2 * _activations(model, private) * chunk


def refuse(needs: Memory, device: torch.device) -> None:
    """UserError, with the setting to change, where `needs` is more than the device has free."""
    available = free(device)
    if needs.peak <= available:
        return
    held = needs._asdict()
    remedy = {
        "training": "lower algorithm.k, if it has one, or training.chunk, or take a smaller model",
        "distance": "lower distance.m, or set distance=none",
        "passes": "lower training.chunk",
        "prepared": "set model.once=false, if it is true, or take fewer examples",
        "preparing": "take fewer public examples, or a network with fewer features",
    }[max(held, key=lambda part: held[part])]
    raise UserError(
        f"this run needs about {gib(needs.peak)} of memory and {gib(available)} are free on {device}: {remedy} "
        "(estimate=false starts it all the same)"
    )


def claim(needs: Memory, device: torch.device) -> None:
    """`refuse`, where this process has the device to itself. Among cells of a sweep that share a GPU: take the memory,
    and wait until the others leave enough. UserError where a cell has no room beside others: what those who wait hold
    already might then be lacking for ever."""
    if device.type != "cuda" or SHARED_GPU not in os.environ:
        return refuse(needs, device)
    if needs.peak > MOST * total(device):
        raise UserError(
            f"this run needs about {gib(needs.peak)} of the {gib(total(device))} of {device}: too much to share it; "
            "set hydra.launcher.per_gpu=1 (estimate=false starts it all the same)"
        )
    waits = False
    while not taken(needs.peak, device):
        if not waits:
            say(f"  waits for {gib(needs.peak)} of {device}, where {gib(free(device))} are free")
        waits = True
        time.sleep(WAIT_SECONDS)


def total(device: torch.device) -> int:
    """Bytes of a GPU."""
    return torch.cuda.mem_get_info(device)[1]


def taken(size: int, device: torch.device) -> bool:
    """Take so many bytes of a GPU for this process, for which torch keeps them; False where they are not free. Of two
    processes that want the same memory one has it."""
    try:
        torch.empty(size, dtype=torch.uint8, device=device)
    except torch.OutOfMemoryError:
        return False
    return True


class Grown:
    """While it is entered: bytes that this process comes to hold more than before, at most. Unlike what tensors take
    this includes code that is loaded, what operations hold for themselves, and memory that is not given back."""

    def __enter__(self) -> Self:
        self.bytes, self._over, self._process = 0, threading.Event(), psutil.Process()
        self._before = self._process.memory_info().rss
        self._thread = threading.Thread(target=self._watch, daemon=True)
        self._thread.start()
        return self

    def _watch(self) -> None:
        while not self._over.wait(0.003):
            self.bytes = max(self.bytes, self._process.memory_info().rss - self._before)

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join()


def splits(task: Task) -> list[Split]:
    """All examples of a task."""
    return [split for split in (task.private, task.public, task.test, task.validation) if split is not None]


def prepared(needs: Memory, task: Task, width: int, passes: int = 0, releases: bool = False) -> Memory:
    """With `width` float32 numbers in place of each example, which a pass makes that holds so many bytes; the largest
    split is there twice, in parts and put together. For features also what their principal components are found by, as
    it was measured: the public ones twice in float64 and five matrices [d, d]; or, if a private matrix `releases` them,
    eight, and 2^14 private ones."""
    sizes = [4 * width * len(split.x) for split in splits(task)]
    preparing = max(sizes) + passes
    if task.private.x.dim() == 2 and task.public is not None:
        m, d = task.public.x.shape
        components = (
            d * max(16 * m, 64 * d + 20 * min(len(task.private.x), 2**14)) if releases else d * (16 * m + 40 * d)
        )
        preparing = max(preparing, components if width < d else 0)
    return needs._replace(prepared=sum(sizes), preparing=preparing)


def told(size: int, needs: Needs, steps: int, before: Mapping[str, float]) -> str:
    """What the person at the terminal is told: bytes, seconds of the steps, and of the rest if it takes long beside
    these. before: what else is done before training, and its seconds."""
    training = needs.step * steps
    line = f"  about {gib(size)} of memory beside the data"
    if steps:
        line += f", {needs.step:.2g} s a step: {duration(training)} of training"

    # what takes long beside the steps
    others = {**before, "training on public data": needs.public, "evaluation": needs.evaluation}
    for what, seconds in others.items():
        if seconds >= 1 and seconds > training / 20:
            line += f", {duration(seconds)} of {what}"
    return line


def profile_step(
    gradients: Engine, algorithm: Algorithm, view: View, private: Split, plan: Schedule, trace: Path
) -> None:
    """Write a step on random images in place of the private batch to the file `trace`, in the format of Chrome, by
    torch's profiler; and its five costliest parts to costliest.txt next to it. private: read for its shape alone."""
    device, source = next(view.model.parameters()).device, stream("estimate", "noise")

    def step() -> None:
        mechanism = algorithm.mechanism(view, 0)
        rows = min(max(mechanism.rows, gradients.chunk(private.x)), plan.batch_size)
        batch = Split(*(values.to(device) for values in random_like(private, rows, view.classes)))
        noisy_mean(mechanism, gradients, batch, 1.0, source, rows)

    step()  # a first one is slower
    with torch.profiler.profile() as profiler:
        step()
    profiler.export_chrome_trace(str(trace))
    by = "self_cuda_time_total" if device.type == "cuda" else "self_cpu_time_total"
    table = profiler.key_averages().table(sort_by=by, row_limit=5, max_name_column_width=40)
    trace.with_name("costliest.txt").write_text(table)


def _activations(model: nn.Module, private: Split) -> int:
    """Bytes for one image of all layers' outputs from the first trained layer on, and of the largest two below it."""
    held: list[int] = []
    below: list[int] = [0, 0]
    layers = [module for module in model.modules() if not list(module.children())]

    def count(module: nn.Module, inputs: object, output: object) -> None:
        if isinstance(output, torch.Tensor):
            trains = held or any(p.requires_grad for p in module.parameters())
            (held if trains else below).append(output.numel() * output.element_size())

    hooks = [layer.register_forward_hook(count) for layer in layers]
    try:
        with torch.no_grad():
            device = next(model.parameters()).device
            model(torch.zeros(2, *private.x.shape[1:], dtype=private.x.dtype, device=device))
    finally:
        for hook in hooks:
            hook.remove()
    return (sum(held) + sum(sorted(below)[-2:])) // 2
