"""`TorchGroup`: ranks that combine their vectors by `torch.distributed`.

torch moves the bytes (gloo in main memory, NCCL between GPUs, MPI where torch was built with it). Who is
in the group, where its ranks find each other and who was lost is the `Communicator`'s affair, since torch tells
that something broke, and not who. Each group has a store and connections of its own and is made for one
membership epoch: after a loss another one is made, and none is mended.

The order in which a sum is made is torch's: all ranks get the same bits, which differ from those of
another engine. gloo and NCCL sum in a ring: each of p ranks sends 2n(p-1)/p bytes of n.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence

import torch

from gradstream.collectives.communicator import Communicator
from gradstream.collectives.group import slice_of
from gradstream.collectives.torch_backend.engine import (
    Backend,
    Done,
    Engine,
    Hold,
    TorchStore,
    Verb,
    choose_backend,
    make_engine,
)
from gradstream.errors import ClosedError, ConfigError, GradstreamError, InternalError, PeerLostError
from gradstream.memory import Loan, Span, Vector
from gradstream.runtime.base import Runtime, Work, awaited_later
from gradstream.runtime.real import RealRuntime
from gradstream.transport.addresses import host_and_port, is_loopback
from gradstream.transport.base import Endpoint
from gradstream.transport.offers import CarrierOffer

__all__ = ["TorchGroup"]

VERDICT_S = 5.0
"""How long it is waited to be told who has broken an operation: that comes over another connection."""


class TorchGroup:
    """Implements `Group`. Made by `form`.

    A deadline bounds silence: a rank that gives signs of life may come late to an operation, by up to
    half an hour, where torch itself gives up.

    That all ranks call the same operations with spans of one length is not checked: gloo ends the process
    where a longer one arrives, and takes a shorter one.

    What an operation that failed or was cancelled was working on stays lent until torch has let go of it,
    which is at once where a peer has died, and may be much later where it is only silent.

    Attributes:
        backend: of torch's, which was asked for or chosen.
        hosts: on how many addresses its ranks listen.
    """

    shares_memory = False

    def __init__(self, communicator: Communicator, engine: Engine, backend: Backend, hosts: int) -> None:
        self.rank, self.size = communicator.rank, communicator.size
        self.names: Sequence[str] = communicator.names
        self.backend = backend
        self.hosts = hosts
        self._communicator = communicator
        self._runtime = communicator.runtime
        self._engine: Engine | None = engine
        self._turn = asyncio.Lock()  # operations start in the order in which they are asked for
        self._left: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        self._watches = [
            awaited_later(
                communicator.runtime.spawn(self._watch(rank), name=f"{self._me}/group: watches rank {rank}")
            )
            for rank in range(self.size)
            if rank != self.rank
        ]

    @classmethod
    async def form(
        cls,
        runtime: Runtime,
        endpoint: Endpoint,
        names: Sequence[str],
        rank: int,
        epoch: int,
        *,
        silence_s: float = 30.0,
        backend: str = "auto",
        device: torch.device | None = None,
    ) -> TorchGroup:
        """Makes the group, together with the other ranks, which call this too.

        Args:
            runtime: of this node; on real time.
            endpoint: knows the addresses of all nodes of the group. torch connects on the same interface.
            names: of the nodes, by rank.
            rank: of this one.
            epoch: membership epoch: each group has one of its own.
            silence_s: for the others to come, and later the longest silence of a rank.
            backend: "gloo", "nccl", "mpi", or "auto" by device and what torch has.
            device: of the vectors; None is main memory, and this rank's share of the GPUs for "nccl".

        Raises:
            ConfigError: torch has no such backend; time is virtual; or the endpoint is protected, and on
                another interface than loopback: torch's connections are not.
            DeadlineError, PeerLostError: naming a rank that did not come, or was lost on the way.
        """
        host = _host_for(runtime, endpoint)
        chosen = choose_backend(device, backend)
        communicator = Communicator(runtime, endpoint, names, rank, epoch=epoch, silence_s=silence_s)
        await communicator.meet()
        try:
            store = TorchStore(None, host, silence_s) if rank == 0 else None
            word = f"{host} {store.address if store is not None else ''}"
            places = [
                other.decode().split(" ") for other in await communicator.all_gather_bytes(word.encode())
            ]

            def make() -> Engine:
                at = store or TorchStore(places[0][1], host, silence_s)
                return make_engine(
                    chosen, at, rank, len(names), host=host, device=device, timeout_s=silence_s
                )

            engine = await communicator.guarded(_made(communicator, make))
        except BaseException:
            await communicator.close()
            raise
        return cls(communicator, engine, chosen, len({at for at, _ in places}))

    # ---- the protocol -------------------------------------------------------------------

    def allocate(self, elems: int, dtype: torch.dtype, name: str, *, lead_bytes: int = 0) -> Vector:
        """See `Group.allocate`: main memory; pinned where it goes to a GPU and back."""
        tensor = None if self._engine is None else self._engine.allocate(elems, dtype)
        if tensor is None:
            return self._runtime.memory.allocate(elems, dtype, name, lead_bytes=lead_bytes)
        return Vector(name, tensor)

    async def common(self, elems: int, dtype: torch.dtype, name: str) -> Vector:
        """See `Group.common`: each rank has its own."""
        return self.allocate(elems, dtype, name)

    async def allreduce(self, span: Span, *, weight: float = 1.0) -> Span:
        """See `Group.allreduce`: in place."""
        await self._run("allreduce", span, weight=weight)
        return span

    async def reduce_scatter(self, span: Span, *, weight: float = 1.0) -> Span:
        """See `Group.reduce_scatter`: in place. gloo's costs as much as its allreduce."""
        await self._run("reduce_scatter", span, weight=weight)
        start, stop = slice_of(len(span), self.rank, self.size)
        return Span(span.vector, span.start + start, span.start + stop)

    async def all_gather(self, span: Span) -> None:
        """See `Group.all_gather`."""
        await self._run("all_gather", span)

    async def broadcast(self, span: Span, *, root: int = 0) -> None:
        """See `Group.broadcast`."""
        if not 0 <= root < self.size:
            raise ConfigError(f"broadcast from rank {root} of a group of {self.size}")
        await self._run("broadcast", span, root=root)

    async def close(self) -> None:
        """See `Group.close`. Does not wait for an operation that hangs."""
        engine, self._engine = self._engine, None
        for watch in self._watches:
            watch.cancel()
        if engine is not None:
            engine.abort()
        del engine  # which ends its connections: others that wait for this rank are told by torch
        await self._communicator.close()

    # ---- operations ---------------------------------------------------------------------

    async def _run(self, verb: Verb, span: Span, *, weight: float = 1.0, root: int = 0) -> None:
        """One operation, in place. Whatever ends it early breaks the group."""
        if self._communicator.loss is not None:
            raise self._communicator.loss.error()
        loan = span.vector.borrow(span.start, span.stop, write=True, to=f"{self._me}: {verb}")
        lent = _Lent(span.vector, loan)
        try:
            await self._communicator.guarded(self._operate(verb, span, weight, root, lent))
        finally:
            if not lent.to_torch:
                lent.give_back()

    async def _operate(self, verb: Verb, span: Span, weight: float, root: int, lent: _Lent) -> None:
        async with self._turn:
            if weight != 1.0 and len(span):
                work = Work("reduce", elems=len(span))
                await self._runtime.compute(lambda _: span.tensor.mul_(weight), work=work, lane="exchange")
            if self._engine is None:
                raise ClosedError(f"{self._me} has left its group")
            if not len(span) or self.size == 1:
                return
            lent.to_torch = True
            over: asyncio.Future[None] = asyncio.get_running_loop().create_future()
            try:
                self._engine.start(verb, span.tensor, root, _on_loop(lent, over))
            except Exception as error:  # refused, or begun in part: the memory stays lent
                over.set_exception(error)
        try:
            await over
        except asyncio.CancelledError:
            if self._engine is not None:
                self._engine.abort()
            raise
        except Exception as error:  # torch's, which names nobody
            raise await self._verdict(verb, error) from error

    async def _verdict(self, verb: str, error: Exception) -> GradstreamError:
        """Who has broken an operation. A rank that is lost cancels this; one that has left is found here."""
        try:
            left = await self._runtime.within(VERDICT_S, asyncio.shield(self._left))
        except TimeoutError:
            return InternalError(
                f"{self._me}: torch.distributed failed in {verb}, though all ranks are there; do all call "
                f"the same operations with spans of one length and dtype? {error}"
            )
        return PeerLostError(left, "has left the group, while others went on in it")

    async def _watch(self, rank: int) -> None:
        """Notes that a rank has left."""
        try:
            await self._communicator.stream(rank).recv()
        except GradstreamError:
            pass
        if not self._left.done():
            self._left.set_result(self.names[rank])

    @property
    def _me(self) -> str:
        return self.names[self.rank]


class _Lent:
    """Memory in an operation, and whether it is torch that has to let go of it first."""

    def __init__(self, vector: Vector, loan: Loan) -> None:
        self._vector = vector
        self._loan = loan
        self.to_torch = False

    def give_back(self) -> None:
        self._vector.give_back(self._loan)


def _on_loop(lent: _Lent, over: asyncio.Future[None]) -> Done:
    """What torch's thread calls: on the loop, the memory comes back and the operation is over."""
    loop = asyncio.get_running_loop()

    def on_loop(error: BaseException | None, hold: Hold) -> None:
        hold.let_go()
        lent.give_back()
        if over.done():
            return
        if error is None:
            over.set_result(None)
        else:
            over.set_exception(error)

    def done(error: BaseException | None, hold: Hold) -> None:
        try:
            loop.call_soon_threadsafe(on_loop, error, hold)
        except RuntimeError:  # the loop is closed: nobody waits any more
            hold.let_be()

    return done


async def _made(communicator: Communicator, make: Callable[[], Engine]) -> Engine:
    """Makes the engine. A rank that is lost meanwhile is what the communicator will say."""
    try:
        return await communicator.runtime.beside(make, work=Work("form"))
    except GradstreamError:
        raise
    except Exception as error:
        await communicator.runtime.sleep(VERDICT_S)
        me = communicator.names[communicator.rank]
        text = f"{me}: torch.distributed could not connect the ranks, though all are there: {error}"
        raise InternalError(text) from error


def _host_for(runtime: Runtime, endpoint: Endpoint) -> str:
    """The interface that torch is to use: that of the endpoint."""
    if not isinstance(runtime, RealRuntime):
        raise ConfigError("torch.distributed knows no virtual time: simulate with another exchange")
    host, _ = host_and_port(next(iter(CarrierOffer.parse(endpoint.address).addresses.values())))
    if endpoint.protected and not is_loopback(host):
        raise ConfigError(
            f"torch.distributed would listen on {host}, and its connections are neither encrypted nor "
            "authenticated, as those of this run are: exchange without it, or start the run with --insecure "
            "on a network that you trust"
        )
    return host.strip("[]")
