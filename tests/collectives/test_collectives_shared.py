from __future__ import annotations

import asyncio
import os
import socket
import threading
import time
from collections.abc import Awaitable, Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import pytest
import torch

from gradstream.collectives.group import Group, slice_of
from gradstream.collectives.shm import barrier, operations
from gradstream.collectives.shm.barrier import finish
from gradstream.collectives.shm.group import SharedCore, SharedGroup
from gradstream.collectives.shm.native import COUNT, PATIENT, native
from gradstream.collectives.shm.operations import (
    BLOCK_ELEMS,
    BRIEF_BYTES,
    PAST_CACHE_BYTES,
    WeightedSum,
    plain_sum,
)
from gradstream.collectives.shm.rendezvous import (
    ARRIVED,
    ASLEEP,
    CORE,
    DTYPES,
    SLOT_BYTES,
    RendezvousMembers,
    available,
)
from gradstream.errors import ClosedError, ConfigError, DeadlineError, LentMemoryError, PeerLostError
from gradstream.memory import Span, Vector
from gradstream.runtime import RealRuntime

pytestmark = pytest.mark.skipif(not available(), reason="no sealed shared memory, or not x86-64")

SMALL = 1000
LARGE = SLOT_BYTES // 4 + 1000  # float32 elements; neither a multiple of 64 nor of the number of ranks

USERS_OF_MACHINE_CODE = (barrier, operations, operations)

Body = Callable[[SharedCore], Any]
Ranks = Callable[..., list[Any]]


@pytest.fixture
def ranks(request: pytest.FixtureRequest) -> Ranks:
    """Runs a body on each rank of a group, each in a thread; their results, or errors, by rank."""
    job = f"{os.getpid()}-{request.node.name}"
    counter = iter(range(1000))

    def run(size: int, body: Body, *, deadline_s: float = 30.0) -> list[Any]:
        names = [f"worker-{rank}" for rank in range(size)]
        epoch = next(counter)

        def one(rank: int) -> Any:
            try:
                with SharedCore(RendezvousMembers(job, names, rank, epoch), deadline_s=deadline_s) as core:
                    return body(core)
            except Exception as error:
                return error

        with ThreadPoolExecutor(size) as pool:
            return list(pool.map(one, range(size)))

    return run


@pytest.fixture(params=["machine code", "plain"])
def code(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """With and without machine code."""
    if request.param == "plain":
        for module in USERS_OF_MACHINE_CODE:
            monkeypatch.setattr(module, "native", lambda: None)
    elif native() is None:
        pytest.skip("no llvmlite here (extra `fast`), or a processor without FMA")


def part(rank: int, elems: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Whole numbers, so that their sum is exact in any order."""
    return (torch.arange(elems) % 97 + 1000 * (rank + 1)).to(dtype)


def total(size: int, elems: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.stack([part(rank, elems, dtype) for rank in range(size)]).sum(0).to(dtype)


def own_and_foreign(core: SharedCore, elems: int, dtype: torch.dtype = torch.float32) -> Iterator[Span]:
    """Spans of both kinds, which hold this rank's part and do not begin at the vector's beginning."""
    foreign = Vector("foreign", torch.zeros(elems + 7, dtype=dtype))
    for vector in (core.allocate(elems + 7, dtype, "own"), foreign):
        span = vector[5 : 5 + elems]
        span.tensor.copy_(part(core.rank, elems, dtype))
        yield span


# ---- what the operations give ---------------------------------------------------------------------


@pytest.mark.usefixtures("code")
@pytest.mark.parametrize("size", [1, 2, 3, 5])
def test_every_rank_gets_the_sum_of_all(ranks: Ranks, size: int) -> None:
    lengths = (0, 1, size - 1, size + 1, 64, 65, SMALL, LARGE)

    def body(core: SharedCore) -> None:
        for elems in lengths:
            for span in own_and_foreign(core, elems):
                result = finish(core.allreduce(span))
                assert torch.equal(result.tensor, total(size, elems)), (elems, span.vector.name)

    assert ranks(size, body) == [None] * size


@pytest.mark.usefixtures("code")
@pytest.mark.parametrize("size", [1, 2, 3, 5])
def test_the_parts_of_an_allreduce_do_what_they_say(ranks: Ranks, size: int) -> None:
    def body(core: SharedCore) -> None:
        for elems in (0, 1, size + 1, 65, SMALL, LARGE):
            start, stop = slice_of(elems, core.rank, size)
            for span in own_and_foreign(core, elems):
                mine = finish(core.reduce_scatter(span))
                assert (mine.vector, mine.start - span.start) == (span.vector, start)
                assert torch.equal(mine.tensor, total(size, elems)[start:stop])
                finish(core.all_gather(span))
                assert torch.equal(span.tensor, total(size, elems))
            for span in own_and_foreign(core, elems):
                finish(core.broadcast(span, root=size - 1))
                assert torch.equal(span.tensor, part(size - 1, elems))

    assert ranks(size, body) == [None] * size


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_dtypes(ranks: Ranks, dtype: torch.dtype) -> None:
    def body(core: SharedCore) -> None:
        for elems in (SMALL, 3 * SLOT_BYTES // dtype.itemsize):
            vector = core.allocate(elems, dtype, "ones")
            vector.tensor.fill_(core.rank + 1)
            assert finish(core.allreduce(vector.all)).tensor.eq(6).all()

    assert ranks(3, body) == [None] * 3


def weighted(elems: int, rank: int) -> tuple[torch.Tensor, float]:
    generator = torch.Generator().manual_seed(rank)
    return torch.randn(elems, generator=generator), (1.0, 0.3, 7.0, 1 / 3)[rank]


def in_the_order_of_ranks(elems: int, size: int) -> torch.Tensor:
    """The sum that a shard of a parameter server makes of the workers' pushes."""
    first, weight = weighted(elems, 0)
    result = torch.mul(first, weight)
    for rank in range(1, size):
        vector, weight = weighted(elems, rank)
        result.add_(vector, alpha=weight)
    return result


@pytest.mark.usefixtures("code")
@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("elems", [SMALL, LARGE, 5 * BLOCK_ELEMS + 100])
def test_a_weighted_sum_has_the_bits_of_a_sum_in_the_order_of_ranks(
    ranks: Ranks, size: int, elems: int
) -> None:
    def body(core: SharedCore) -> tuple[bool, bool]:
        values, weight = weighted(elems, core.rank)
        vector = core.allocate(elems, torch.float32, "gradient")
        vector.tensor.copy_(values)
        whole = finish(core.allreduce(vector.all, weight=weight)).tensor.clone()
        vector.tensor.copy_(values)
        mine = finish(core.reduce_scatter(vector.all, weight=weight))
        expected = in_the_order_of_ranks(elems, size)
        return torch.equal(whole, expected), torch.equal(mine.tensor, expected[mine.start : mine.stop])

    assert ranks(size, body) == [(True, True)] * size


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_machine_code_has_the_bits_of_torch(dtype: torch.dtype) -> None:
    if native() is None:
        pytest.skip("no llvmlite here (extra `fast`), or a processor without FMA")
    scratch = torch.empty(BLOCK_ELEMS, dtype=dtype)
    for elems in (0, 1, 15, 16, 17, 63, 64, 65, 1000, PAST_CACHE_BYTES // 4 + 77):
        for size in (1, 2, 3, 5) if elems <= 1000 else (2, 3):
            parts = [
                torch.randn(elems, dtype=dtype, generator=torch.Generator().manual_seed(r))
                for r in range(size)
            ]
            weights = [1.0, 0.3, 1.0, 1 / 3, -7.0][:size]
            found, expected = (torch.full_like(parts[0], torch.nan) for _ in range(2))
            WeightedSum(parts, found, scratch)(weights)
            plain_sum(parts, weights, expected, scratch)
            assert torch.equal(found, expected), (elems, size)
            WeightedSum(parts, parts[-1], scratch)(weights)
            assert torch.equal(parts[-1], expected), "in place"


def test_the_bits_of_another_order_would_be_noticed() -> None:
    values, weights = zip(*(weighted(LARGE, rank) for rank in (0, 2, 1)), strict=True)
    out, scratch = torch.empty(LARGE), torch.empty(BLOCK_ELEMS)
    WeightedSum(values, out, scratch)(weights)
    assert not torch.equal(out, in_the_order_of_ranks(LARGE, 3))


def test_sums_of_other_buckets_stay_to_be_read(ranks: Ranks) -> None:
    def body(core: SharedCore) -> bool:
        vector = core.allocate(3 * LARGE, torch.float32, "gradient")
        vector.tensor.copy_(part(core.rank, 3 * LARGE))
        buckets = [vector[at : at + LARGE] for at in range(0, 3 * LARGE, LARGE)]
        sums = [finish(core.allreduce(bucket)) for bucket in buckets]
        finish(core.barrier())
        return torch.equal(torch.cat([each.tensor for each in sums]), total(3, 3 * LARGE))

    assert ranks(3, body) == [True] * 3


def test_each_rank_updates_its_slice_of_parameters_that_all_share(ranks: Ranks) -> None:
    def body(core: SharedCore) -> list[float]:
        gradient = core.allocate(LARGE, torch.float32, "gradient")
        parameters = core.common(LARGE, torch.float32, "parameters")
        other = core.common(8, torch.float64, "other")
        if core.rank == 1:
            parameters.tensor.fill_(100.0)
        finish(core.broadcast(parameters.all, root=1))
        for _ in range(3):
            gradient.tensor.fill_(core.rank + 1)
            mine = finish(core.reduce_scatter(gradient.all))
            parameters[mine.start : mine.stop].tensor.sub_(mine.tensor)
            finish(core.all_gather(parameters.all))
        other.tensor[core.rank] = core.rank
        finish(core.barrier())
        return [*set(parameters.tensor.tolist()), *other.tensor[:3].tolist()]

    assert ranks(3, body) == [[82.0, 0.0, 1.0, 2.0]] * 3


@pytest.mark.parametrize("verb", ["reduce_scatter", "all_gather", "broadcast"])
def test_who_is_done_may_write_its_own_part_again_at_once(ranks: Ranks, verb: str) -> None:
    """Rank 1 is slow to read: no rank goes on before it has read its part."""

    def body(core: SharedCore) -> bool:
        vector = core.allocate(LARGE, torch.float32, "v")
        vector.tensor.copy_(part(0 if verb != "reduce_scatter" else core.rank, LARGE))
        if core.rank == 1:
            find = core._operations.vectors.elements

            def slowly(call: Any) -> torch.Tensor:
                time.sleep(0.1)
                return find(call)

            core._operations.vectors.elements = slowly  # type: ignore[method-assign]
        finish(getattr(core, verb)(vector.all))
        mine = slice(*slice_of(LARGE, core.rank, 2)) if verb == "reduce_scatter" else slice(None)
        found = vector.tensor[mine].clone()
        vector.tensor.fill_(-1.0)
        finish(core.barrier())
        expected = total(2, LARGE)[mine] if verb == "reduce_scatter" else part(0, LARGE)
        return torch.equal(found, expected)

    assert ranks(2, body) == [True, True]


def test_any_number_of_vectors_before_the_first_operation(ranks: Ranks) -> None:
    def body(core: SharedCore) -> float:
        for at in range(400):  # more than fit into a socket that nobody reads
            vector = core.allocate(64, torch.float32, f"bucket {at}")
        common = core.common(64, torch.float32, "parameters")
        vector.tensor.fill_(core.rank + 1)
        finish(core.broadcast(common.all))
        foreign = Vector("foreign", torch.ones(LARGE))
        finish(core.allreduce(foreign.all))
        return float(finish(core.allreduce(vector.all)).tensor[0])

    assert ranks(3, body) == [6.0] * 3


# ---- what goes wrong ------------------------------------------------------------------------------


def test_ranks_that_do_different_things_are_all_told_so(ranks: Ranks) -> None:
    def lengths(core: SharedCore) -> None:
        finish(core.allreduce(core.allocate(SMALL + core.rank // 2, torch.float32, "gradient").all))

    def operations(core: SharedCore) -> None:
        span = core.allocate(LARGE, torch.float32, "gradient").all
        finish(core.broadcast(span)) if core.rank else finish(core.allreduce(span))

    for body in (lengths, operations):
        errors = ranks(3, body)
        assert {type(error) for error in errors} == {ConfigError}
        assert len({str(error) for error in errors}) == 1
    assert "worker-0 is in allreduce of 66" not in str(errors[0])
    assert f"worker-0 is in allreduce of {LARGE} elements" in str(errors[0])
    assert f"worker-2 is in broadcast of {LARGE} elements" in str(errors[0])


def test_common_vectors_that_differ_are_refused(ranks: Ranks) -> None:
    def body(core: SharedCore) -> None:
        core.common(SMALL + core.rank, torch.float32, "parameters")
        finish(core.barrier())

    lost, refused = ranks(2, body)
    assert isinstance(lost, PeerLostError) and lost.peer == "worker-1"
    assert isinstance(refused, ConfigError) and "1001" in str(refused)


def test_a_rank_that_leaves_is_named_by_all_also_by_who_comes_late(ranks: Ranks) -> None:
    told = threading.Event()

    def body(core: SharedCore) -> Any:
        span = core.allocate(LARGE, torch.float32, "gradient").all
        finish(core.allreduce(span))
        if core.rank == 2:
            return "left"
        if core.rank == 1:
            assert told.wait(30)  # rank 0 has failed, and perhaps has closed its group by now
        with pytest.raises(PeerLostError) as caught:
            finish(core.allreduce(span))
        told.set()
        with pytest.raises(PeerLostError) as again:
            finish(core.barrier())
        assert again.value is caught.value
        return caught.value.peer

    assert ranks(3, body) == ["worker-2", "worker-2", "left"]


def test_a_silent_rank_is_named_and_waiting_for_it_costs_nothing(ranks: Ranks) -> None:
    told = threading.Barrier(3)

    def body(core: SharedCore) -> Any:
        span = core.allocate(LARGE, torch.float32, "gradient").all
        finish(core.allreduce(span))
        if core.rank == 2:
            told.wait(30)
            return "was silent"
        begun_s = time.thread_time()
        with pytest.raises(DeadlineError) as caught:
            finish(core.allreduce(span))
        used_s = time.thread_time() - begun_s
        told.wait(30)
        return caught.value.peer, used_s < 0.05 * 3.0

    assert ranks(3, body, deadline_s=3.0) == [("worker-2", True), ("worker-2", True), "was silent"]


def test_a_rank_that_beats_is_not_silent(ranks: Ranks) -> None:
    def body(core: SharedCore) -> Any:
        finish(core.barrier())
        if core.rank == 0:
            for _ in range(8):
                threading.Event().wait(0.3)  # of which a rank has no sign but its beats
                core.beat()
        finish(core.barrier())
        return "met"

    assert ranks(2, body, deadline_s=2.0) == ["met"] * 2  # 2.4 s in all; a busy machine may delay a beat


def test_close_while_it_waits(ranks: Ranks) -> None:
    def body(core: SharedCore) -> Any:
        finish(core.barrier())
        if core.rank == 0:
            threading.Timer(0.05, core.close).start()
        finish(
            core.allreduce(core.allocate(LARGE, torch.float32, "gradient").all)
        ) if core.rank != 1 else told.wait(30)

    told = threading.Event()

    def first_two(core: SharedCore) -> Any:
        try:
            return body(core)
        finally:
            if core.rank == 2:
                told.set()

    closed, _, lost = ranks(3, first_two)
    assert isinstance(closed, ClosedError)
    assert isinstance(lost, PeerLostError) and lost.peer == "worker-0"


def test_an_error_in_an_operation_breaks_the_group_at_all_ranks(
    ranks: Ranks, monkeypatch: pytest.MonkeyPatch
) -> None:
    add = WeightedSum.__call__

    def failing(self: WeightedSum, weights: Any) -> None:
        if threading.current_thread().name == "rank 1":
            raise MemoryError
        add(self, weights)

    monkeypatch.setattr(WeightedSum, "__call__", failing)

    def body(core: SharedCore) -> None:
        threading.current_thread().name = f"rank {core.rank}"
        finish(core.allreduce(core.allocate(LARGE, torch.float32, "gradient").all))

    errors = ranks(3, body)
    assert isinstance(errors[1], MemoryError)
    for error in (errors[0], errors[2]):
        assert isinstance(error, PeerLostError) and error.peer == "worker-1"


def test_integers_have_weight_one(ranks: Ranks) -> None:
    def body(core: SharedCore) -> None:
        finish(core.allreduce(core.allocate(8, torch.int64, "counts").all, weight=0.5))

    assert [type(error) for error in ranks(2, body)] == [ConfigError] * 2


# ---- meeting --------------------------------------------------------------------------------------


def test_a_rank_that_does_not_come_is_named() -> None:
    members = RendezvousMembers(f"{os.getpid()}-alone", ["worker-0", "worker-1", "worker-2"], 1)
    with pytest.raises(DeadlineError, match=r"worker-0.*worker-1.*missing: worker-0"):
        SharedCore(members, deadline_s=0.05).join()


def test_ranks_that_mean_others_are_told_so() -> None:
    job = f"{os.getpid()}-others"

    def one(members: RendezvousMembers) -> Exception | None:
        with pytest.raises((ConfigError, PeerLostError)) as caught:
            SharedCore(members, deadline_s=30).join()
        return caught.value

    groups = [
        RendezvousMembers(job, ["worker-0", "worker-1"], 0),
        RendezvousMembers(job, ["worker-0", "worker-9"], 1),
    ]
    with ThreadPoolExecutor(2) as pool:
        errors = list(pool.map(one, groups))
    assert any("worker-9" in str(error) for error in errors)


def test_strangers_are_shown_the_door() -> None:
    members = RendezvousMembers(f"{os.getpid()}-strangers", ["worker-0", "worker-1"], 0)

    def second() -> None:
        for message in (b"", b"hello?", b'{"job": "another"}', b"[1]"):
            while True:
                stranger = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
                try:
                    stranger.connect(members.address(0))
                    break
                except ConnectionRefusedError:
                    stranger.close()
            if message:
                stranger.send(message)
            else:
                stranger.close()
            strangers.append(stranger)
        with SharedCore(replace(members, rank=1), deadline_s=30) as core:
            finish(core.barrier())

    strangers: list[socket.socket] = []
    with ThreadPoolExecutor(1) as pool:
        other = pool.submit(second)
        with SharedCore(members, deadline_s=30) as core:
            finish(core.barrier())
            other.result()
    for stranger in strangers:
        stranger.close()


def test_a_meeting_can_be_closed() -> None:
    core = SharedCore(RendezvousMembers(f"{os.getpid()}-closed", ["worker-0", "worker-1"], 0), deadline_s=30)
    threading.Timer(0.05, core.close).start()
    with pytest.raises(ClosedError):
        core.join()
    with pytest.raises(ClosedError):
        finish(core.barrier())


# ---- beside a loop --------------------------------------------------------------------------------


def groups(
    size: int, body: Callable[[SharedGroup], Awaitable[Any]], name: str, *, deadline_s: float = 30.0
) -> list[Any]:
    """Runs a body on each rank of a group, all on one event loop; results or errors by rank."""

    async def one(rank: int) -> Any:
        runtime = RealRuntime(f"worker-{rank}")
        members = RendezvousMembers(f"{os.getpid()}-{name}", [f"worker-{r}" for r in range(size)], rank)
        group = await SharedGroup.join(runtime, members, deadline_s=deadline_s)
        try:
            return await body(group)
        except Exception as error:
            return error
        finally:
            await group.close()
            runtime.close()

    async def all_of_them() -> list[Any]:
        return list(await asyncio.gather(*(one(rank) for rank in range(size))))

    return asyncio.run(all_of_them())


def test_a_group_beside_a_loop() -> None:
    async def body(group: SharedGroup) -> None:
        shared: Group = group
        parameters = await group.common(LARGE, torch.float32, "parameters")
        for elems in (SMALL, LARGE):
            span = shared.allocate(elems, torch.float32, "gradient").all
            span.tensor.copy_(part(group.rank, elems))
            assert torch.equal((await shared.allreduce(span)).tensor, total(3, elems))
            span.tensor.copy_(part(group.rank, elems))
            mine = await shared.reduce_scatter(span, weight=2.0)
            assert torch.equal(mine.tensor, 2 * total(3, elems)[mine.start : mine.stop])
            await shared.all_gather(span)
            assert torch.equal(span.tensor, 2 * total(3, elems))
            await shared.broadcast(span, root=2)
        await shared.all_gather(parameters.all)
        await group.barrier()

    assert groups(3, body, "beside") == [None] * 3


def test_a_sum_that_is_still_read_is_not_overwritten() -> None:
    async def body(group: SharedGroup) -> None:
        vector = group.allocate(2 * LARGE, torch.float32, "gradient")
        first = await group.allreduce(vector[:LARGE])
        with first.borrowed(write=False, to="update"):
            await group.allreduce(vector[LARGE:])
            with pytest.raises(LentMemoryError, match=r"summed up.*update"):
                await group.allreduce(vector[:LARGE])
        await group.barrier()

    assert groups(2, body, "lent") == [None] * 2


def test_cancelling_an_operation_breaks_the_group_and_waits_for_nobody() -> None:
    async def body(group: SharedGroup) -> Any:
        vector = group.allocate(LARGE, torch.float32, "gradient")
        if group.rank == 0:
            task = asyncio.ensure_future(group.allreduce(vector.all))
            await asyncio.sleep(0)  # it has begun
            assert vector.lent
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            cancelled.set()
        else:
            await cancelled.wait()
        await group.allreduce(vector.all)

    cancelled = asyncio.Event()
    mine, others = groups(2, body, "cancel")
    assert isinstance(mine, ClosedError)
    assert isinstance(others, PeerLostError) and others.peer == "worker-0"


# ---- without a thread, where nobody has to wait ----------------------------------------------------


def handed_over(group: SharedGroup) -> list[Any]:
    """The operations that a group gives to its thread from now on."""
    given: list[Any] = []
    submit = group._thread.submit

    def noted(operation: Any) -> Any:
        given.append(operation)
        return submit(operation)

    group._thread.submit = noted  # type: ignore[method-assign, assignment]
    return given


BRIEF = BRIEF_BYTES // 4  # float32 elements


@pytest.mark.usefixtures("code")
@pytest.mark.parametrize("elems", [SMALL, LARGE, BRIEF])
def test_who_comes_last_needs_no_thread_and_all_get_the_same_bits(elems: int) -> None:
    """This holds for a small vector; for others it waits for their sums. An early rank lets its loop run."""
    size = 3
    coming = asyncio.Event()

    async def body(group: SharedGroup) -> Any:
        given = handed_over(group)
        values, weight = weighted(elems, group.rank)
        span = group.allocate(elems, torch.float32, "gradient").all
        span.tensor.copy_(values)
        if group.rank == size - 1:
            await coming.wait()
        elif group.rank == 0:
            asyncio.get_running_loop().call_later(0.1, coming.set)  # the loop goes on while it waits
        total = (await group.allreduce(span, weight=weight)).tensor.clone()
        return torch.equal(total, in_the_order_of_ranks(elems, size)), len(given)

    found = groups(size, body, f"last-{elems}-{id(coming)}")
    assert [right for right, _ in found] == [True] * size
    early, last = [count for _, count in found[:-1]], found[-1][1]
    assert early == [1] * (size - 1)  # each went to sleep, on its thread
    assert last == 0 or elems > SMALL


@pytest.mark.parametrize("verb", ["allreduce", "reduce_scatter", "all_gather", "broadcast", "barrier"])
def test_alone_nothing_brief_goes_to_the_thread(verb: str) -> None:
    async def body(group: SharedGroup) -> list[int]:
        given, counts = handed_over(group), []
        for elems in (SMALL, BRIEF, BRIEF + 1):
            span = group.allocate(elems, torch.float32, "gradient").all
            await (group.barrier() if verb == "barrier" else getattr(group, verb)(span))
            counts.append(len(given))
        common = await group.common(BRIEF + 1, torch.float32, "parameters")
        del given[:]
        await group.all_gather(common.all)
        return [*counts, len(given)]

    assert groups(1, body, f"alone-{verb}") == [[0, 0, int(verb != "barrier"), 0]]


def test_what_is_asked_for_meanwhile_keeps_its_turn() -> None:
    """A short operation does not overtake one that waits on the thread."""
    late = asyncio.Event()

    async def body(group: SharedGroup) -> list[float]:
        large = group.allocate(BRIEF + 1, torch.float32, "large").all
        small = group.allocate(SMALL, torch.float32, "small").all
        large.tensor.fill_(group.rank + 1.0)
        small.tensor.fill_(10.0 * (group.rank + 1))
        if group.rank:
            await late.wait()
        both = asyncio.gather(group.allreduce(large), group.allreduce(small))
        if not group.rank:
            asyncio.get_running_loop().call_later(0.05, late.set)
        return [float(total.tensor.sum() / len(total)) for total in await both]

    assert groups(2, body, "turns") == [[3.0, 30.0]] * 2


@pytest.mark.usefixtures("code")
@pytest.mark.parametrize("elems", [SMALL, LARGE])
def test_a_silent_rank_is_named_to_a_loop_too(elems: int) -> None:
    async def body(group: SharedGroup) -> Any:
        span = group.allocate(elems, torch.float32, "gradient").all
        await group.allreduce(span)
        if group.rank == 1:
            assert group._timer is not None
            group._timer.cancel()  # it beats no more
            await done.wait()
            return "was silent"
        try:
            await group.allreduce(span)
        finally:
            done.set()

    done = asyncio.Event()
    silent, told = groups(2, body, f"silent-{elems}-{id(done)}", deadline_s=0.5)
    assert isinstance(silent, DeadlineError) and silent.peer == "worker-1"
    assert told == "was silent"


def test_operations_that_never_wait_leave_the_loop_to_others() -> None:
    async def body(group: SharedGroup) -> int:
        turns = 0

        async def other() -> None:
            nonlocal turns
            while True:
                turns += 1
                await asyncio.sleep(0)

        task = asyncio.ensure_future(other())
        span = group.allocate(BRIEF, torch.float32, "gradient").all
        for _ in range(1000):
            await group.allreduce(span)
        task.cancel()
        return turns

    (turns,) = groups(1, body, "turns of others")
    assert turns > 10


def test_an_operation_that_is_given_up_breaks_the_group(ranks: Ranks) -> None:
    def body(core: SharedCore) -> None:
        if core.rank == 0:
            steps = core.barrier()
            next(steps)  # rank 1 is waiting for `told`
            steps.close()
            told.set()
        else:
            assert told.wait(30)
            finish(core.barrier())  # to which rank 0 had come
        finish(core.barrier())

    told = threading.Event()
    closed, lost = ranks(2, body)
    assert isinstance(closed, ClosedError) and isinstance(lost, PeerLostError)


@pytest.mark.usefixtures("code")
def test_patience_lasts_until_it_was_in_vain(ranks: Ranks) -> None:
    """A rank looks longer after a sleep of another one, until it has slept for long itself."""

    def body(core: SharedCore) -> Any:
        found = []
        for _ in range(2):
            finish(core.barrier())
            if core.rank:
                words, next_one = core._peers[0].words, core._operations.state.words[COUNT] + 1
                while not (words[ARRIVED] == next_one and words[ASLEEP]):
                    threading.Event().wait(0.001)
                threading.Event().wait(2 * barrier.SHORT_S)
            finish(core.barrier())
            found.append(core._operations.state.words[PATIENT])
        return found

    assert ranks(2, body) == [[0, 0], [1, 1]]


def test_ranks_on_one_core_spread(ranks: Ranks, monkeypatch: pytest.MonkeyPatch) -> None:
    moved: list[object] = []
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 1})
    monkeypatch.setattr(os, "sched_setaffinity", lambda _, cores: moved.append(set(cores)))

    def body(core: SharedCore) -> None:
        finish(core.barrier())
        if core.rank == 0:
            blocks, meeting_point = core._operations.blocks, core._operations.barrier
            for block, number in zip(blocks, (0, 0, 1), strict=True):
                block.words[CORE] = number
            meeting_point._spread()  # two are here and one is there: no better the other way round
            blocks[2].words[CORE] = 0
            meeting_point._spread_at = 0.0
            meeting_point._spread()
            meeting_point._spread()  # just moved
        finish(core.barrier())

    assert ranks(3, body) == [None] * 3
    assert moved[:2] == [{1}, {0, 1}]
