"""A pretended CUDA device in the memory of the CPU: numbers are real, and a tag on each storage says where it would be.

`with pretended() as log:` makes torch believe in one GPU. As on a real one, an operation raises if it meets tensors of
both devices (numbers without dimensions and indices on the CPU are fine), and so do `.numpy()` of a CUDA tensor and a
generator of the wrong device. `log` counts what makes a GPU slow: times that the host waits, copies between host and
device, which it waits for unless they come from pinned memory and are non_blocking; operations on the device, and of
products how many multiplications they are, in which type and precision. It cannot see what a kernel refuses, what TF32
rounds off, nondeterminism, or other processes.
"""

import collections
import contextlib
import os
import sys
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from torch._C import DisableTorchFunction
from torch._C._functorch import get_unwrapped, is_functorch_wrapped_tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_leaves

CPU, GPU = torch.device("cpu"), torch.device("cuda", 0)
WATCHED = ("/pubsel/", "/scripts/", "/tests/")  # whose lines are named in messages and counts

# Operations by the name of their ATen function


def names(text: str) -> frozenset[str]:
    return frozenset(text.split())


WAITS = names("""
    _local_scalar_dense nonzero equal _unique2 unique_dim masked_select linalg_eigh _linalg_eigh _linalg_svd linalg_svd
    bincount is_nonzero repeat_interleave allclose
""")
ALL_ON_ONE_DEVICE = names("""
    mm addmm bmm cat stack index_add_ gather scatter index_select mv addmv dot addmm_ baddbmm _foreach_copy_
""")  # numbers without dimensions included
PRODUCTS = names("mm bmm addmm addmm_ baddbmm convolution convolution_backward")
INDEXING = names("index index_put_ index_put _unsafe_index _index_put_impl_")
FACTORIES = names("""
    zeros ones empty full arange randn rand randint randperm tensor as_tensor eye linspace triu_indices tril_indices
    scalar_tensor normal
""")


class Log:
    """What was counted, by line of the program; how many operations met a tensor of the device; multiplications by
    line, type and precision; the numbers of all results, and the most of one in float64."""

    def __init__(self) -> None:
        self.reset()

    def reset(self) -> None:
        self.waits, self.copies, self.bytes = (collections.Counter[str]() for _ in range(3))
        self.operations = self.float64 = self.numbers = 0
        self.products = collections.Counter[tuple[str, torch.dtype, str]]()

    def wait(self, why: str) -> None:
        self.waits[f"{line(3)} {why}"] += 1

    def product(self, name: str, args: Any) -> None:
        """Count a product of matrices, or a convolution, whose multiplications are not counted."""
        convolves = name.startswith("convolution")
        backend = torch.backends.cudnn.conv if convolves else torch.backends.cuda.matmul
        count = 1 if convolves else args[-2].numel() * args[-1].shape[-1]
        self.products[line(3), args[-1].dtype if not convolves else args[0].dtype, backend.fp32_precision] += count

    def copy(self, direction: str, tensor: Tensor, non_blocking: bool = False) -> None:
        where = f"{direction} {line(3)}"
        self.copies[where] += 1
        self.bytes[where] += tensor.numel() * tensor.element_size()
        if not (non_blocking and direction == "to the device" and tensor in PINNED):
            self.wait(f"copy {direction}")


LOG = Log()


class Tags:
    """Storages that have a tag, for as long as they live."""

    def __init__(self) -> None:
        self.known: dict[int, StorageWeakRef] = {}

    def __contains__(self, tensor: Tensor) -> bool:
        with DisableTorchFunction():
            reference = self.known.get(address(tensor))  # type: ignore[arg-type]
            return reference is not None and not reference.expired()

    def set(self, tensor: Tensor, tagged: bool) -> None:
        with DisableTorchFunction():
            key = address(tensor)
            if key is None:
                return
            if not tagged:
                self.known.pop(key, None)
                return
            if len(self.known) > 20_000:
                self.known = {key: reference for key, reference in self.known.items() if not reference.expired()}
            self.known[key] = StorageWeakRef(unwrapped(tensor).untyped_storage())


ON_GPU = Tags()
PINNED = Tags()  # memory of the host from which a GPU copies by itself
FREE = Tags()  # made within torch from options that it took of another tensor: on either device


def unwrapped(tensor: Tensor) -> Tensor:
    """The tensor within those of vmap and grad."""
    while is_functorch_wrapped_tensor(tensor):
        tensor = get_unwrapped(tensor)
    return tensor


def address(tensor: Tensor) -> int | None:
    """Of its storage; None if it has none."""
    try:
        return unwrapped(tensor).untyped_storage()._cdata
    except Exception:
        return None


def mark(tensor: Tensor, gpu: bool, free: bool = False) -> None:
    """Say where a new tensor lies."""
    ON_GPU.set(tensor, gpu)
    FREE.set(tensor, free and not gpu)


def line(depth: int = 2) -> str:
    """The innermost line of the program or of a test that led here."""
    frame = sys._getframe(depth)
    while frame is not None:
        name = frame.f_code.co_filename
        if any(part in name for part in WATCHED) and name != __file__:
            return f"{name.rpartition('/pubsel/')[2]}:{frame.f_lineno}"
        frame = frame.f_back  # type: ignore[assignment]
    return "?"


class Dispatch(TorchDispatchMode):
    """Sees every operation below autograd: what it meets, whether it starts a kernel, where its results lie."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        with DisableTorchFunction():
            name = func.__name__.split(".")[0]
            tensors = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
            on_gpu = [tensor in ON_GPU for tensor in tensors]
            if any(on_gpu):
                self.check(name, args, tensors, on_gpu)
                if name in WAITS:
                    LOG.wait(name)
                LOG.operations += 1

            before = {address(tensor) for tensor in tensors}
            free = all(tensor in FREE for tensor in tensors)
            result = func(*args, **kwargs)
            if any(on_gpu) and name in PRODUCTS:
                LOG.product(name, args)
            for leaf in tree_leaves(result) if name != "set_" else ():
                if isinstance(leaf, Tensor) and address(leaf) not in before:
                    mark(leaf, any(on_gpu), free)
                    if any(on_gpu):
                        LOG.numbers += leaf.numel()
                        LOG.float64 = max(LOG.float64, leaf.numel() if leaf.dtype == torch.float64 else 0)
            return result

    def check(self, name: str, args: Any, tensors: list[Tensor], on_gpu: list[bool]) -> None:
        """RuntimeError if a GPU would raise one."""
        if name in ("copy_", "_copy_from"):
            if on_gpu[0] != on_gpu[1]:
                non_blocking = len(args) > 2 and args[2]
                LOG.copy("to the device" if on_gpu[0] else "to the host", tensors[1], non_blocking)
        elif name in INDEXING:
            self.check_index(name, args, on_gpu[0])
        elif not all(on_gpu):
            strict = name in ALL_ON_ONE_DEVICE
            pairs = zip(tensors, on_gpu, strict=True)
            wrong = [t for t, gpu in pairs if not gpu and (t.dim() > 0 or strict) and t not in FREE]
            if wrong:
                raise RuntimeError(
                    f"Expected all tensors to be on the same device: {name} meets one of the CPU, "
                    f"{tuple(wrong[0].shape)} ({line(3)})"
                )

    def check_index(self, name: str, args: Any, gpu: bool) -> None:
        if not gpu:
            raise RuntimeError(f"{name}: indices or values of the GPU for a tensor of the CPU ({line(4)})")
        for index in args[1] or ():
            if isinstance(index, Tensor):
                if index not in ON_GPU:
                    LOG.copy("to the device", index)
                if index.dtype in (torch.bool, torch.uint8):
                    LOG.wait("index by a mask")
        if name.startswith("index_put") and args[2].dim() and args[2] not in ON_GPU:
            raise RuntimeError(f"{name}: values of the CPU for a tensor of the GPU ({line(4)})")


class Functions(TorchFunctionMode):
    """Sees what the program calls: where it asks for a device, or moves something to one."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        answer = self.property_of(func, args)
        if answer is not None:
            return answer
        name = getattr(func, "__name__", "")
        if name in ("numpy", "__array__") and args[0] in ON_GPU:
            raise TypeError(f"can't convert cuda:0 device type tensor to numpy ({line()})")
        if name in ("share_memory_", "pin_memory") and args[0] in ON_GPU:
            raise RuntimeError(f"{name} of a CUDA tensor ({line()})")
        if name == "tolist" and args[0] in ON_GPU:
            LOG.wait("tolist")
        if func is Tensor.register_hook:  # autograd calls it without this mode
            return func(args[0], partial(self.within, args[1]))
        if func is Tensor.pin_memory:
            pinned = args[0].clone()
            PINNED.set(pinned, True)
            return pinned
        if func in (Tensor.cpu, Tensor.cuda, Tensor.to):
            return moved(func, *args, **kwargs)
        return self.made(func, name, args, kwargs)

    def within(self, hook: Callable[[Tensor], Tensor | None], gradient: Tensor) -> Tensor | None:
        """Call a hook of autograd, which sees the device as the program does."""
        with self:
            return hook(gradient)

    def property_of(self, func: Any, args: Any) -> Any:
        """The answer of the pretended device to a question about a tensor's device; None for all else."""
        if func == Tensor.device.__get__:
            return GPU if args[0] in ON_GPU else None
        if func == Tensor.is_cuda.__get__:
            return args[0] in ON_GPU
        if func == Tensor.is_cpu.__get__:
            return args[0] not in ON_GPU
        if func is Tensor.get_device:
            return 0 if args[0] in ON_GPU else -1
        return None

    def made(self, func: Any, name: str, args: Any, kwargs: dict[str, Any]) -> Any:
        """A call that may make a tensor on a device."""
        if kwargs.get("device") is None:
            result = func(*args, **kwargs)
            if name in FACTORIES and isinstance(result, Tensor):
                mark(result, False)
            return result
        device = torch.device(kwargs["device"])
        gpu, kwargs["device"] = device.type == "cuda", CPU
        generator = kwargs.get("generator")
        if generator is not None and getattr(generator, "gpu", False) != gpu:
            raise RuntimeError(f"Expected a '{device.type}' device type for generator ({line(3)})")
        result = func(*args, **kwargs)
        if gpu and name in ("tensor", "as_tensor") and line(3) != "?":
            LOG.copy("to the device", result)
        with DisableTorchFunction():
            leaves = [leaf for leaf in tree_leaves(result) if isinstance(leaf, Tensor)]
        for leaf in leaves:
            mark(leaf, gpu)
        return result


def moved(func: Any, tensor: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    """Tensor.to, .cpu and .cuda: a copy if the device is another one."""
    if func in (Tensor.cpu, Tensor.cuda):
        args, kwargs = (CPU if func is Tensor.cpu else GPU,), {}
    device, dtype = kwargs.pop("device", None), kwargs.pop("dtype", None)
    other, non_blocking = kwargs.pop("other", None), kwargs.pop("non_blocking", False)
    for argument in (*args, other):
        if isinstance(argument, Tensor):
            device, dtype = GPU if argument in ON_GPU else CPU, argument.dtype
        elif isinstance(argument, torch.device | str | int) and not isinstance(argument, bool):
            device = argument
        elif isinstance(argument, torch.dtype):
            dtype = argument
    options = {key: value for key, value in kwargs.items() if key == "memory_format" and value is not None}
    options |= {"dtype": dtype} if dtype is not None else {}

    on_gpu = tensor in ON_GPU
    if device is None or (torch.device(device).type == "cuda") == on_gpu:
        copied = {"copy": True} if kwargs.get("copy") else {}
        return Tensor.to(tensor, **options, **copied) if options or copied else tensor
    result = Tensor.to(tensor, **({"dtype": tensor.dtype} | options), copy=True)
    LOG.copy("to the host" if on_gpu else "to the device", tensor, non_blocking)
    mark(result, not on_gpu)
    return result


class Generator(torch._C.Generator):
    """A torch.Generator that knows for which device it is."""

    def __new__(cls, device: Any = "cpu") -> "Generator":
        return super().__new__(cls, "cpu")  # type: ignore[call-arg]

    def __init__(self, device: Any = "cpu"):
        self.gpu = torch.device(device).type == "cuda"

    @property
    def device(self) -> torch.device:  # type: ignore[override]
        return GPU if self.gpu else CPU


# Files: the tags of what is saved are saved next to it

_save, _load, _from_numpy = torch.save, torch.load, torch.from_numpy
_deepcopy, _module_to = Tensor.__deepcopy__, torch.nn.Module.to


def paths(value: Any, at: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """Where in lists and mappings the tensors of the GPU are."""
    if isinstance(value, Tensor):
        return [at] if value in ON_GPU else []
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list | tuple) else ()
    return [path for key, inner in items for path in paths(inner, (*at, key))]


def save(value: Any, file: Any, *args: Any, **kwargs: Any) -> None:
    on_gpu = paths(value)
    with _disable_current_modes(), DisableTorchFunction():
        _save({"on the GPU": on_gpu, "value": value}, file, *args, **kwargs)


def load(file: Any, map_location: Any = None, **kwargs: Any) -> Any:
    """RuntimeError if tensors of a GPU are read where there is none, without map_location."""
    with _disable_current_modes(), DisableTorchFunction():
        saved = _load(file, map_location=None, **kwargs)
    if not (isinstance(saved, dict) and "on the GPU" in saved):
        return saved
    if map_location is None and saved["on the GPU"] and not torch.cuda.is_available():
        raise RuntimeError("Attempting to deserialize object on a CUDA device but torch.cuda.is_available() is False")
    if map_location is None or torch.device(map_location).type == "cuda":
        for path in saved["on the GPU"] if map_location is None else all_paths(saved["value"]):
            value = saved["value"]
            for key in path:
                value = value[key]
            mark(value, True)
    return saved["value"]


def all_paths(value: Any, at: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """Where in lists and mappings tensors are."""
    if isinstance(value, Tensor):
        return [at]
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list | tuple) else ()
    return [path for key, inner in items for path in all_paths(inner, (*at, key))]


def from_numpy(array: Any) -> Tensor:
    tensor = _from_numpy(array)
    mark(tensor, False)
    return tensor


def deepcopy(self: Tensor, memo: dict[int, Any]) -> Tensor:
    if id(self) in memo:
        return memo[id(self)]
    on_gpu = self in ON_GPU
    copied = _deepcopy(self, memo)
    mark(copied, on_gpu)
    return copied


def module_to(self: torch.nn.Module, *args: Any, **kwargs: Any) -> torch.nn.Module:
    if args and isinstance(args[0], Tensor):
        args = (args[0].device, args[0].dtype, *args[1:])
    return _module_to(self, *args, **kwargs)


class Stream:
    """Of CUDA: everything is done at once."""

    def __getattr__(self, name: str) -> Callable[..., None]:
        return lambda *_, **__: None


CUDA: dict[str, Any] = {
    "is_available": lambda: True,
    "is_initialized": lambda: True,
    "device_count": lambda: 1,
    "current_device": lambda: 0,
    "set_device": lambda device: None,
    "synchronize": lambda device=None: LOG.wait("synchronize"),
    "mem_get_info": lambda device=None: (100 * 2**30, 140 * 2**30),
    "is_current_stream_capturing": lambda: False,
    "empty_cache": lambda: None,
    "manual_seed_all": lambda seed: None,
    "current_stream": lambda device=None: Stream(),
    "_lazy_init": lambda: None,
    "get_device_name": lambda device=None: "pretended",
}


@contextlib.contextmanager
def pretended(available: bool = True) -> Iterator[Log]:
    """One GPU, for as long as this is open; available=False: it was there when files were written, and is gone."""
    LOG.reset()
    with contextlib.ExitStack() as stack:
        for name, value in CUDA.items():
            if available or name not in ("is_available", "is_initialized"):
                stack.enter_context(mock.patch.object(torch.cuda, name, value))
        for name, value in (("save", save), ("load", load), ("from_numpy", from_numpy), ("Generator", Generator)):
            stack.enter_context(mock.patch.object(torch, name, value))
        stack.enter_context(mock.patch.object(torch.nn.Module, "to", module_to))
        stack.enter_context(mock.patch.object(Tensor, "__deepcopy__", deepcopy))
        stack.enter_context(mock.patch.object(torch.accelerator, "current_accelerator", return_value=None))
        stack.enter_context(mock.patch.dict(os.environ, {"CUDA_VISIBLE_DEVICES": "0"}))
        stack.enter_context(Dispatch())
        stack.enter_context(Functions())
        yield LOG
