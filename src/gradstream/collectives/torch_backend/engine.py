"""Process groups of `torch.distributed`, each with a store and connections of its own.

`init_process_group` keeps one group for the whole process. One cannot make another beside that of a user, nor drop
it while an operation hangs in it. The classes beneath it allow both.

torch's own connections are neither encrypted nor authenticated. They are for loopback and for networks in which
all machines are trusted.
"""

from __future__ import annotations

import atexit
import itertools
import os
import socket
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from typing import Any, Literal

import torch
from typing_extensions import override

from gradstream.collectives.group import slice_of
from gradstream.errors import ConfigError

Backend = Literal["gloo", "nccl", "mpi"]
Verb = Literal["allreduce", "reduce_scatter", "all_gather", "broadcast"]

Done = Callable[[BaseException | None, "Hold"], None]
"""Called on any thread when the engine no longer uses a tensor, with the error of the operation if it has failed."""

WAIT_S = 1800.0
"""torch gives up on a peer after this time, as it does by default. The communicator notices a silent rank long
before; a rank that is only slow may be waited for."""


def choose_backend(device: torch.device | None, wanted: str = "auto") -> Backend:
    """Chooses the backend for vectors on a device.

    Args:
        device: the device; None is main memory.
        wanted: a backend, or "auto", which takes NCCL for CUDA if torch has it, and gloo otherwise.

    Raises:
        ConfigError: torch was built without the backend, or there is no such backend.
    """
    available: dict[str, bool] = {}
    if torch.distributed.is_available():
        available = {
            "gloo": torch.distributed.is_gloo_available(),
            "nccl": torch.distributed.is_nccl_available() and torch.cuda.is_available(),
            "mpi": torch.distributed.is_mpi_available(),
        }
    has = ", ".join(name for name, there in available.items() if there) or "none"
    if wanted == "auto":
        wanted = "nccl" if device is not None and device.type == "cuda" and available.get("nccl") else "gloo"
    if wanted not in ("gloo", "nccl", "mpi"):
        raise ConfigError(f"backend {wanted!r} of torch.distributed: expected auto, gloo, nccl or mpi")
    if not available.get(wanted):
        raise ConfigError(
            f"torch {torch.__version__} has no backend {wanted!r} here; it has {has}. Install a "
            "build of torch that has it, or exchange without torch.distributed"
        )
    return wanted  # type: ignore[return-value]  # one of the three, see above


class TorchStore:
    """torch's key-value store, through which ranks find each other. Rank 0 holds it, at a free port.

    Args:
        address: address of the store; None makes one here.
        host: interface on which a store made here listens.
        timeout_s: longest wait for a key that another rank has to set, in seconds.
    """

    def __init__(self, address: str | None, host: str, timeout_s: float) -> None:
        make: Any = torch.distributed.TCPStore  # type: ignore[attr-defined]  # torch's __all__ is shorter
        options: dict[str, Any] = {"timeout": timedelta(seconds=timeout_s), "wait_for_workers": False}
        if address is None:
            # It gets a socket, since it would listen on all interfaces by itself.
            family = socket.AF_INET6 if ":" in host else socket.AF_INET
            listener = socket.create_server((host, 0), family=family)
            port = listener.getsockname()[1]
            self.torch = make(
                host, port, None, True, master_listen_fd=listener.detach(), use_libuv=True, **options
            )
            self.address = f"{host}:{port}"
        else:
            at, _, text = address.rpartition(":")
            self.torch = make(at, int(text), None, False, use_libuv=True, **options)
            self.address = address


class Hold:
    """Keeps an engine alive while torch works for it. Release it on any thread but torch's.

    A process group without references waits for its threads, even on one of these threads, and for the end of
    an operation in progress. So only torch itself refers to this object during an operation, and the process can
    end.
    """

    __slots__ = ("_engine",)

    def __init__(self, engine: Engine) -> None:
        self._engine: Engine | None = engine

    def release(self) -> None:
        """Drops the engine; idempotent."""
        self._engine = None

    def keep(self) -> None:
        """Keeps the engine until the process ends, if there is no thread to release it on."""
        _kept.append(self)


_kept: list[Hold] = []
atexit.register(_kept.clear)  # before Python is torn down


class Engine(ABC):
    """One process group of torch.

    Args:
        group: torch's object.
        rank, size: rank of this process in it, and number of ranks.
    """

    def __init__(self, group: Any, rank: int, size: int) -> None:
        self._group = group
        self._rank = rank
        self._size = size

    @abstractmethod
    def start(self, verb: Verb, tensor: torch.Tensor, root: int, done: Done) -> None:
        """Starts an operation in place, and returns.

        Args:
            tensor: (elems,); the engine uses it until it calls `done`.
            root: root of a broadcast.
            done: called when the operation has ended.
        """

    def allocate(self, elems: int, dtype: torch.dtype) -> torch.Tensor | None:
        """Memory of zeros that suits the engine best; None if any memory does."""
        del elems, dtype
        return None

    def abort(self) -> None:  # noqa: B027  not every engine can
        """Ends operations in progress, if torch can."""

    def _works(self, verb: Verb, tensor: torch.Tensor, root: int) -> Sequence[Any]:
        """Torch's handles of the parts of an operation."""
        group, limit = self._group, timedelta(seconds=WAIT_S)
        c10d: Any = torch.distributed.distributed_c10d
        bounds = [slice_of(len(tensor), rank, self._size) for rank in range(self._size)]
        even = len({stop - start for start, stop in bounds}) == 1
        mine = tensor[slice(*bounds[self._rank])]
        if verb == "allreduce" or (verb == "reduce_scatter" and not (even and self._scatters)):
            sum_options = c10d.AllreduceOptions()
            sum_options.timeout = limit
            return [group.allreduce([tensor], sum_options)]
        if verb == "reduce_scatter":
            scatter_options = c10d.ReduceScatterOptions()
            scatter_options.timeout = limit
            return [group._reduce_scatter_base(mine, tensor, scatter_options)]
        if verb == "all_gather" and even:
            gather_options = c10d.AllgatherOptions()
            gather_options.timeout = limit
            return [group._allgather_base(tensor, mine, gather_options)]
        if verb == "all_gather":  # slices of different lengths: as many bytes in all, without a copy
            parts = [(rank, tensor[slice(*bounds[rank])]) for rank in range(self._size)]
        else:
            parts = [(root, tensor)]
        works = []
        for rank, part in parts:
            if len(part):
                options = c10d.BroadcastOptions()
                options.rootRank, options.timeout = rank, limit
                works.append(group.broadcast([part], options))
        return works

    _scatters = False
    """Whether its reduce-scatter sends less than an allreduce. gloo's is an allreduce of which it copies a part."""


class HostEngine(Engine):
    """gloo or MPI: threads of torch carry out everything, in main memory.

    An operation cannot be ended early. One that hangs on a silent peer keeps its tensor and the process group
    until torch gives up. The process may end meanwhile.
    """

    @override
    def start(self, verb: Verb, tensor: torch.Tensor, root: int, done: Done) -> None:
        works = self._works(verb, tensor, root)
        hold = Hold(self)
        if not works:
            done(None, hold)
            return
        left = itertools.count(len(works) - 1, -1)  # several threads count down, and `next` is atomic
        errors: list[BaseException] = []

        def one_is_over(future: Any) -> None:  # on a thread of torch: nothing but `hold` refers to self
            try:
                future.value()
            except Exception as error:
                errors.append(error)
            if next(left) == 0:
                done(errors[0] if errors else None, hold)

        for work in works:
            work.get_future().add_done_callback(one_is_over)


class CudaEngine(Engine):
    """NCCL: sums up vectors on the device, and copies those in main memory there and back.

    Args:
        group, rank, size: see `Engine`.
        device: the device of this rank, which no other rank uses.
    """

    _scatters = True

    def __init__(self, group: Any, rank: int, size: int, device: torch.device) -> None:
        super().__init__(group, rank, size)
        self._device = device
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._staged = torch.empty(0, device=device)
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="nccl")

    def start(self, verb: Verb, tensor: torch.Tensor, root: int, done: Done) -> None:
        """See `Engine.start`. It waits in a thread, since NCCL only reports that an operation has begun."""
        hold = Hold(self)

        def run() -> None:
            try:
                self._run(verb, tensor, root)
            except Exception as error:
                done(error, hold)
            else:
                done(None, hold)

        self._thread.submit(run)

    def _run(self, verb: Verb, tensor: torch.Tensor, root: int) -> None:
        with torch.cuda.device(self._device), torch.cuda.stream(self._stream):
            self._stream.wait_stream(torch.cuda.default_stream(self._device))  # which has filled the tensor
            there = tensor if tensor.is_cuda else self._stage(tensor)
            for work in self._works(verb, there, root):
                work.wait()  # of the stream
            if there is not tensor:
                tensor.copy_(there, non_blocking=True)
            self._stream.synchronize()

    def _stage(self, tensor: torch.Tensor) -> torch.Tensor:
        if self._staged.dtype != tensor.dtype or len(self._staged) < len(tensor):
            self._staged = torch.empty(len(tensor), dtype=tensor.dtype, device=self._device)
        return self._staged[: len(tensor)].copy_(tensor, non_blocking=True)

    def allocate(self, elems: int, dtype: torch.dtype) -> torch.Tensor | None:
        """Pinned memory, which the device reads and writes without a copy in between."""
        return torch.zeros(elems, dtype=dtype, pin_memory=True)

    @override
    def abort(self) -> None:
        self._group.abort()
        self._thread.shutdown(wait=False, cancel_futures=True)


def make_engine(
    backend: Backend,
    store: TorchStore,
    rank: int,
    size: int,
    *,
    host: str,
    device: torch.device | None,
    timeout_s: float,
) -> Engine:
    """Makes the process group; blocks until all ranks have connected.

    Args:
        backend: torch's backend.
        store: a store of this group alone.
        rank, size: rank of this process, and number of ranks.
        host: address of the interface that gloo uses.
        device: device that NCCL uses; None gives the GPUs to ranks in turn.
        timeout_s: longest wait for the others, in seconds.

    Raises:
        RuntimeError: as torch raises it; names no rank.
        ConfigError: this process has another rank under MPI.
    """
    dist: Any = torch.distributed
    timeout = timedelta(seconds=timeout_s)
    if backend == "mpi":
        group = dist.ProcessGroupMPI.create(list(range(size)))
        if group is None or (group.rank(), group.size()) != (rank, size):
            raise ConfigError(
                f"rank {rank} of {size}: MPI has other ranks; start all workers by one mpirun, rank by rank"
            )
        return HostEngine(group, rank, size)
    if backend == "nccl":
        # Its watchdog would end the process when a peer is lost. The communicator reports a loss, and we abort.
        os.environ.setdefault("TORCH_NCCL_ASYNC_ERROR_HANDLING", "0")
        options = dist.ProcessGroupNCCL.Options()
        options._timeout = timedelta(seconds=WAIT_S)
        device = device or torch.device("cuda", rank % torch.cuda.device_count())
        with torch.cuda.device(device):
            group = dist.ProcessGroupNCCL(store.torch, rank, size, options)
        return CudaEngine(group, rank, size, device)
    options = dist.ProcessGroupGloo._Options()
    options._devices = [dist.ProcessGroupGloo.create_device(hostname=host)]
    options._timeout = timeout
    return HostEngine(dist.ProcessGroupGloo(store.torch, rank, size, options), rank, size)
