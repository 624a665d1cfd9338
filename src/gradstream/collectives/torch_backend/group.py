"""`TorchGroup`: ranks that combine their vectors by `torch.distributed`.

torch moves the bytes (gloo in main memory, NCCL between GPUs, MPI if torch was built with it). The `Communicator`
says which ranks are in the group, where they find each other, and which one was lost, since torch reports a failure
without a name. Each group has a store and connections of its own, and is made for one membership epoch. After a
loss another one is made; none is repaired.

torch chooses the order of additions: all ranks get the same bits, which differ from those of another engine. gloo
and NCCL sum in a ring: each of p ranks sends 2n(p-1)/p bytes of n.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import torch
from typing_extensions import override

from gradstream.collectives.communicator import Communicator, CommunicatorGroup
from gradstream.collectives.group import GroupMembers, own_slice
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
from gradstream.transport.base import Endpoint
from gradstream.transport.offers import CarrierOffer, host_and_port, is_loopback

BLAME_S = 5.0
"""Longest wait for the name of the rank that has broken an operation, which comes over another connection."""


class TorchGroup(CommunicatorGroup):
    """A `Group` whose operations torch carries out. Made by `form`.

    The deadline bounds silence: a rank that gives heartbeats may come late to an operation, by up to half
    an hour, when torch itself gives up.

    Nothing checks that all ranks call the same operations with spans of one length: gloo ends the process if a
    longer span arrives, and accepts a shorter one.

    The span of an operation that failed or was cancelled stays lent until torch no longer uses it: at once if a
    peer has died, perhaps much later if it is only silent.

    Attributes:
        backend: the backend of torch that was asked for or chosen.
        hosts: number of addresses on which its ranks listen.
    """

    def __init__(self, communicator: Communicator, engine: Engine, backend: Backend, hosts: int) -> None:
        super().__init__(communicator)
        self.backend = backend
        self.hosts = hosts
        self._engine: Engine | None = engine
        self._lock = asyncio.Lock()  # operations start in the order of their calls
        self._left: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        self._watchers = [
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
        members: GroupMembers,
        *,
        backend: str = "auto",
        device: torch.device | None = None,
    ) -> TorchGroup:
        """Makes the group. All ranks call this at about the same time.

        Args:
            runtime: runtime of this node, on real time.
            endpoint: an endpoint that knows the addresses of all nodes. torch uses its interface.
            members: the ranks, and which of them this node is. Each group has an epoch of its own.
            backend: "gloo", "nccl", "mpi", or "auto", which chooses by device and by what torch has.
            device: device of the vectors; None is main memory, or this rank's share of the GPUs for "nccl".

        Raises:
            ConfigError: torch has no such backend; time is virtual; or the endpoint is protected and on
                another interface than loopback, since torch's connections are not protected.
            DeadlineError, PeerLostError: names a rank that did not come, or was lost meanwhile.
        """
        host = _host_for(runtime, endpoint)
        chosen = choose_backend(device, backend)
        communicator = Communicator(runtime, endpoint, members)
        rank, silence_s = members.rank, members.silence_s
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
                    chosen, at, rank, communicator.size, host=host, device=device, timeout_s=silence_s
                )

            engine = await communicator.guarded(_made(communicator, make))
        except BaseException:
            await communicator.close()
            raise
        return cls(communicator, engine, chosen, len({at for at, _ in places}))

    # ---- the protocol -------------------------------------------------------------------

    def allocate(self, elems: int, dtype: torch.dtype, name: str, *, lead_bytes: int = 0) -> Vector:
        """See `Group.allocate`: main memory, pinned if it goes to a GPU and back."""
        tensor = None if self._engine is None else self._engine.allocate(elems, dtype)
        if tensor is None:
            return self._runtime.memory.allocate(elems, dtype, name, lead_bytes=lead_bytes)
        return Vector(name, tensor)

    async def allreduce(self, span: Span, *, weight: float = 1.0) -> Span:
        """See `Group.allreduce`: in place."""
        await self._run("allreduce", span, weight=weight)
        return span

    async def reduce_scatter(self, span: Span, *, weight: float = 1.0) -> Span:
        """See `Group.reduce_scatter`: in place. gloo's costs as much as its allreduce."""
        await self._run("reduce_scatter", span, weight=weight)
        return own_slice(span, self.rank, self.size)

    @override
    async def all_gather(self, span: Span) -> None:
        await self._run("all_gather", span)

    @override
    async def broadcast(self, span: Span, *, root: int = 0) -> None:
        if not 0 <= root < self.size:
            raise ConfigError(f"broadcast(root={root}): expected a rank from 0 to {self.size - 1}")
        await self._run("broadcast", span, root=root)

    async def close(self) -> None:
        """See `Group.close`. Does not wait for an operation that hangs."""
        engine, self._engine = self._engine, None
        for watch in self._watchers:
            watch.cancel()
        if engine is not None:
            engine.abort()
        del engine  # ends its connections, by which torch tells ranks that wait for this one
        await super().close()

    # ---- operations ---------------------------------------------------------------------

    async def _run(self, verb: Verb, span: Span, *, weight: float = 1.0, root: int = 0) -> None:
        """Carries out one operation in place. Anything that ends it early breaks the group."""
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
        async with self._lock:
            if weight != 1.0 and len(span):
                work = Work("reduce", elems=len(span))
                await self._runtime.compute(lambda _: span.tensor.mul_(weight), work=work, lane="exchange")
            if self._engine is None:
                raise ClosedError(
                    f"{self._me} has left its group, which carries out no more operations: form another"
                )
            if not len(span) or self.size == 1:
                return
            lent.to_torch = True
            over: asyncio.Future[None] = asyncio.get_running_loop().create_future()
            try:
                self._engine.start(verb, span.tensor, root, _on_loop(lent, over))
            except Exception as error:  # refused, or begun in part, so that the memory stays lent
                over.set_exception(error)
        try:
            await over
        except asyncio.CancelledError:
            if self._engine is not None:
                self._engine.abort()
            raise
        except Exception as error:  # an error of torch, which names no rank
            raise await self._blame(verb, error) from error

    async def _blame(self, verb: str, error: Exception) -> GradstreamError:
        """The error that names the rank that has left. The loss of a rank cancels the operation instead."""
        try:
            left = await self._runtime.within(BLAME_S, asyncio.shield(self._left))
        except TimeoutError:
            return InternalError(
                f"{self._me}: torch.distributed failed in {verb}, though all ranks are there; do all call "
                f"the same operations with spans of one length and dtype? {error}"
            )
        return PeerLostError(left, "has left the group, while others went on in it")

    async def _watch(self, rank: int) -> None:
        """Records that a rank has left."""
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
    """The loan of an operation's memory, and whether torch uses that memory."""

    def __init__(self, vector: Vector, loan: Loan) -> None:
        self._vector = vector
        self._loan = loan
        self.to_torch = False

    def give_back(self) -> None:
        self._vector.give_back(self._loan)


def _on_loop(lent: _Lent, over: asyncio.Future[None]) -> Done:
    """Makes the callback for torch's thread. It gives the memory back and ends the operation, on the event loop."""
    loop = asyncio.get_running_loop()

    def on_loop(error: BaseException | None, hold: Hold) -> None:
        hold.release()
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
        except RuntimeError:  # the loop is closed, and no task waits any more
            hold.keep()

    return done


async def _made(communicator: Communicator, make: Callable[[], Engine]) -> Engine:
    """Makes the engine. After an error it waits for the communicator to name a lost rank."""
    try:
        return await communicator.runtime.beside(make, work=Work("form"))
    except GradstreamError:
        raise
    except Exception as error:
        await communicator.runtime.sleep(BLAME_S)
        me = communicator.names[communicator.rank]
        text = f"{me}: torch.distributed could not connect the ranks, though all are there: {error}"
        raise InternalError(text) from error


def _host_for(runtime: Runtime, endpoint: Endpoint) -> str:
    """The interface that torch is to use: the endpoint's."""
    if not isinstance(runtime, RealRuntime):
        raise ConfigError(
            'torch.distributed cannot be simulated, since it knows no virtual time: set exchange="auto"'
        )
    host, _ = host_and_port(next(iter(CarrierOffer.parse(endpoint.address).addresses.values())))
    if endpoint.protected and not is_loopback(host):
        raise ConfigError(
            f"torch.distributed would listen on {host}, and its connections are neither encrypted nor "
            "authenticated, as those of this run are: exchange without it, or start the run with --insecure "
            "on a network that you trust"
        )
    return host.strip("[]")
