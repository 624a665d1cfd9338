"""Finds a worker's device, and copies tensors between this device and main memory.

`Streams` copies synchronously, which works on every device of torch. `CudaStreams` queues a copy and returns: the
device copies beside its computations, and an event tells when a copy has ended.
"""

from __future__ import annotations

import platform
import re
import weakref
from collections import OrderedDict
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from typing import Any, Protocol, cast

import torch
from typing_extensions import override

from gradstream.errors import ConfigError

PIN_BYTES = 1 << 20
"""Smaller vectors are not pinned: it would not pay."""

MAX_PINNED = 8
"""The most vectors that stay pinned, more than the parameters and gradients that a worker uses in turn."""


def device_of(name: str, rank: int = 0) -> torch.device:
    """The device that a name means on this machine.

    Args:
        name: "cpu"; a device as torch names it ("cuda:1"); "cuda" for one of the GPUs, by rank; or "auto" for
            one of the machine's accelerators of any kind, by rank, or the CPU if there is none.
        rank: number of the worker. Worker r takes device r modulo their number. Workers of one machine have
            consecutive ranks, so they spread evenly.

    Raises:
        ConfigError: torch has no such device here.
    """
    if name == "cpu":
        return torch.device("cpu")
    count = torch.accelerator.device_count()
    found = torch.accelerator.current_accelerator() if count else None
    kind = "cpu" if found is None else found.type
    try:
        device = torch.device(kind if name == "auto" else name)
    except (RuntimeError, TypeError):
        device = torch.device("meta")
    index = cast(int | None, device.index)  # torch's type hints lack the None
    if device.type == "cpu" and index is None:
        return device
    if device.type != kind or (index or 0) >= count:
        there = ", ".join(["cpu", *(f"{kind}:{index}" for index in range(count))])
        raise ConfigError(
            f"device={name!r}: torch {torch.__version__} has {there} on this machine; expected one of these, or 'auto'"
            + (f", or {kind!r}, of which each worker takes one" if count else "")
        )
    return torch.device(kind, rank % count if index is None else index)


@contextmanager
def seeded(seed: int) -> Iterator[None]:
    """Random numbers of torch are drawn from this seed. At the end the caller's generators are as they were.

    Those of CUDA devices too. If nothing has used CUDA yet, they get the seed of the caller's generator on the CPU, as
    `torch.manual_seed` would have given it to them.
    """
    if not torch.accelerator.device_count():
        with torch.random.fork_rng(devices=[]):
            torch.default_generator.manual_seed(
                seed
            )  # torch.manual_seed looks for devices at each call: 0.5 ms
            yield
        return
    used: bool = torch.cuda.is_initialized()  # type: ignore[no-untyped-call]
    callers = torch.initial_seed()
    try:
        with torch.random.fork_rng(devices=range(torch.cuda.device_count()) if used else []):
            torch.manual_seed(seed)
            yield
    finally:
        if not used:
            torch.cuda.manual_seed_all(callers)


class Copied(Protocol):
    """Tells when a copy has ended. torch's events have these methods."""

    def query(self) -> bool:
        """Whether the copy has ended."""
        ...

    def synchronize(self) -> None:
        """Waits until the copy has ended."""
        ...


class _AtOnce:
    """A copy that has ended already."""

    def query(self) -> bool:
        return True

    def synchronize(self) -> None:
        pass


class Streams:
    """Copies tensors between main memory and a device. Each call returns when its copy is complete.

    The class works for every device of torch; `CudaStreams` makes the copies asynchronously.

    Args:
        device: the device, with its index ("cuda:0").

    Attributes:
        device: the device.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device

    def current(self) -> AbstractContextManager[object]:
        """A context in which "cuda" without an index means this device, on this thread."""
        return nullcontext()

    def pin(self, host: torch.Tensor) -> None:
        """Pins this memory where the device can use pinned memory, which makes copies faster."""

    def pinned_like(self, tensor: torch.Tensor) -> torch.Tensor:
        """An empty tensor in main memory, pinned where possible, of the shape and dtype of `tensor`."""
        return torch.empty_like(tensor, device="cpu")

    def moved(self, tensor: torch.Tensor) -> torch.Tensor:
        """Copies `tensor` to the device, for computations that are queued after this call.

        Do not write `tensor` until these computations have ended: the copy may still read it.
        """
        return tensor.to(self.device)

    def to_host(self, source: torch.Tensor, view: torch.Tensor) -> Copied:
        """Copies `source` into main memory, after the computations that are queued already.

        Args:
            source: tensor on the device. Do not write it before the copy has ended.
            view: tensor of the same shape in main memory. Its contents are undefined before the copy has ended.

        Returns:
            An object that tells when the copy has ended.
        """
        view.copy_(source)
        return _AtOnce()


class CudaStreams(Streams):
    """Copies tensors between main memory and a CUDA device, asynchronously and beside the computations.

    Args:
        device: the device, with its index.
    """

    def __init__(self, device: torch.device) -> None:
        super().__init__(device)
        self._out = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._pinned: OrderedDict[int, torch.Tensor] = OrderedDict()  # holding a tensor keeps its memory
        weakref.finalize(self, _unpin_all, self._pinned).atexit = False

    @override
    def current(self) -> AbstractContextManager[object]:
        context: AbstractContextManager[object] = torch.cuda.device(self.device)
        return context

    def pin(self, host: torch.Tensor) -> None:
        """See `Streams.pin`. Pins the memory in place, without a copy on the CPU."""
        memory = host.untyped_storage()
        at, size_bytes = memory.data_ptr(), memory.nbytes()
        if at in self._pinned:
            self._pinned.move_to_end(at)
        elif size_bytes >= PIN_BYTES and _PINS_OUTLIVE_FORKS and not host.is_pinned():
            portable = 1  # for all threads' contexts
            if int(_cudart().cudaHostRegister(at, size_bytes, portable)) != 0:
                with suppress(RuntimeError):  # or torch would raise this error at its next kernel
                    torch.zeros(1, device=self.device)
                return
            self._pinned[at] = host
            if len(self._pinned) > MAX_PINNED:
                _unpin(*self._pinned.popitem(last=False))

    @override
    def pinned_like(self, tensor: torch.Tensor) -> torch.Tensor:
        return torch.empty_like(tensor, device="cpu", pin_memory=True)

    @override
    def moved(self, tensor: torch.Tensor) -> torch.Tensor:
        plain = tensor.device.type == "cpu" and tensor.layout is torch.strided
        if plain and not tensor.is_pinned():
            tensor = tensor.pin_memory()
        return tensor.to(self.device, non_blocking=True)

    @override
    def to_host(self, source: torch.Tensor, view: torch.Tensor) -> Copied:
        if not source.is_cuda:
            return super().to_host(source, view)
        self._out.wait_stream(torch.cuda.current_stream(self.device))
        source.record_stream(self._out)  # keeps its memory until the copy has ended
        with torch.cuda.stream(self._out):
            view.copy_(source, non_blocking=True)
        copied = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]
        copied.record(self._out)
        return copied


def streams_of(device: torch.device) -> Streams:
    """The object that copies to and from a device."""
    return CudaStreams(device) if device.type == "cuda" else Streams(device)


def _outlive_forks(release: str) -> bool:
    """Whether memory that is pinned in place stays so in a process that forks (for a data loader).

    From Linux 5.10 on, fork copies pinned pages for the child. Before that, the parent could be left with
    pages other than those that the device uses.
    """
    version = re.match(r"(\d+)\.(\d+)", release)
    return version is not None and (int(version[1]), int(version[2])) >= (5, 10)


_PINS_OUTLIVE_FORKS = _outlive_forks(platform.release())


def _cudart() -> Any:
    return torch.cuda.cudart()  # type: ignore[no-untyped-call]


def _unpin(at: int, host: torch.Tensor) -> None:
    _cudart().cudaHostUnregister(at)
    del host  # frees the memory after it is unregistered


def _unpin_all(pinned: OrderedDict[int, torch.Tensor]) -> None:
    while pinned:
        _unpin(*pinned.popitem())
