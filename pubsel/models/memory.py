"""Memory of a device: what is free, and what tensors take."""

import weakref
from collections.abc import Callable
from typing import Any

import psutil
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from pubsel.messages import UserError, gib


def free(device: torch.device) -> int:
    """Return the bytes that are free on a device."""
    return torch.cuda.mem_get_info(device)[0] if device.type == "cuda" else psutil.virtual_memory().available


def check_room(what: str, needed: int) -> None:
    """Raise UserError if this machine has not as many bytes free as `what` takes, which is known before it takes any:
    sizes may be from the file of somebody else."""
    if needed > (there := free(torch.device("cpu"))):
        raise UserError(f"{what}: takes {gib(needed)}, of which {gib(there)} are free: check its sizes")


def check_size(what: str, make: Callable[[], Any]) -> None:
    """Raise UserError, as `check_room` does, if all that `make` makes has no room; it is made without its numbers."""
    nowhere = torch.device("meta")
    with torch.random.fork_rng(devices=[]), nowhere, Held(nowhere) as held:
        make()
    check_room(what, held.peak)


class Held(TorchDispatchMode):
    """Context that counts the most bytes held at once by tensors that operations make on a device. What an operation
    allocates for itself, and arrays of numpy, are not counted."""

    def __init__(self, device: torch.device):
        super().__init__()  # type: ignore[no-untyped-call]
        self.device, self.now, self.peak = device, 0, 0
        self._known = weakref.WeakSet[Any]()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self._known |= {leaf.untyped_storage() for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)}
        result = func(*args, **(kwargs or {}))

        for leaf in tree_leaves(result):
            if isinstance(leaf, Tensor) and leaf.device.type == self.device.type:
                storage = leaf.untyped_storage()
                if storage not in self._known:
                    self._known.add(storage)
                    weakref.finalize(storage, self._add, -storage.nbytes())
                    self._add(storage.nbytes())
        return result

    def _add(self, size: int) -> None:
        self.now += size
        self.peak = max(self.peak, self.now)
