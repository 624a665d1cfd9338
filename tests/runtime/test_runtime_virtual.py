"""The runtime on virtual time: the clock jumps, the core is one, ends are named."""

from __future__ import annotations

import asyncio
import gc
from collections.abc import Coroutine
from typing import Any, TypeVar

import pytest
import torch

from gradstream._simulate import simulate
from gradstream.errors import LentMemoryError
from gradstream.memory import Vector
from gradstream.runtime import (
    Cost,
    DeadlockError,
    SimulationConfig,
    Trace,
    VirtualCluster,
    VirtualRuntime,
    Work,
)
from gradstream.runtime.base import ComputeProgress
from gradstream.testing.runs import least_squares

T = TypeVar("T")

WORLD = SimulationConfig(
    costs={"gradient": Cost(base_s=1.0), "apply": Cost(base_s=0.25, per_elem_s=0.5)}, backprop=0.5
)


def play(work: Any, seed: int = 0, config: SimulationConfig = WORLD) -> Any:
    """Runs work(runtime) on a node, and returns (its result, virtual seconds)."""
    cluster = VirtualCluster(seed, config)
    result = cluster.run(work(cluster.runtime("node")))
    return result, cluster.clock.now_ns / 1e9


# ---- time -------------------------------------------------------------------------------


def test_sleep_takes_virtual_time_only() -> None:
    async def work(runtime: VirtualRuntime) -> list[int]:
        times = []
        for seconds in (3600.0, 0.25, 0.0):
            await runtime.sleep(seconds)
            times.append(runtime.now())
        return times

    times, total_s = play(work)
    assert times == [3_600_000_000_000, 3_600_250_000_000, 3_600_250_000_000]
    assert total_s == 3600.25


def test_timers_fire_in_order_and_cancelled_ones_never() -> None:
    async def work(runtime: VirtualRuntime) -> list[str]:
        fired: list[str] = []
        runtime.call_later(3, lambda: fired.append("late"))
        timer = runtime.call_later(2, lambda: fired.append("cancelled"))
        runtime.call_later(1, lambda: fired.append("early"))
        timer.cancel()
        timer.cancel()
        await runtime.sleep(5)
        return fired

    assert play(work)[0] == ["early", "late"]


def test_simultaneous_timers_fire_in_an_order_of_the_seeds() -> None:
    async def work(runtime: VirtualRuntime) -> str:
        fired: list[str] = []
        for letter in "abcdef":
            runtime.call_later(1, lambda letter=letter: fired.append(letter))  # type: ignore[misc]
        await runtime.sleep(2)
        return "".join(fired)

    orders = [play(work, seed)[0] for seed in range(20)]
    assert orders == [play(work, seed)[0] for seed in range(20)]
    assert len(set(orders)) > 10


def test_random_depends_on_seed_node_and_purpose() -> None:
    def draw(seed: int, node: str, purpose: str) -> float:
        return VirtualCluster(seed).runtime(node).random(purpose).random()

    assert draw(1, "a", "x") == draw(1, "a", "x")
    assert len({draw(1, "a", "x"), draw(2, "a", "x"), draw(1, "b", "x"), draw(1, "a", "y")}) == 4


def test_deadlock_names_who_waits() -> None:
    async def forever() -> None:
        await asyncio.get_running_loop().create_future()

    async def work(runtime: VirtualRuntime) -> None:
        task = runtime.spawn(forever(), name="worker-3-fetch")
        await runtime.sleep(1.5)
        await task

    with pytest.raises(DeadlockError, match=r"at 1.500000 s.*worker-3-fetch"):
        play(work)


def test_what_work_raises_comes_out_and_leftovers_are_cancelled() -> None:
    ended: list[str] = []

    async def leftover(runtime: VirtualRuntime) -> None:
        try:
            await runtime.sleep(1e6)
        finally:
            ended.append("leftover")

    async def work(runtime: VirtualRuntime) -> None:
        runtime.spawn(leftover(runtime), name="leftover")
        await runtime.sleep(1)
        raise KeyError("mine")

    with pytest.raises(KeyError, match="mine"):
        play(work)
    assert ended == ["leftover"]


def test_a_killed_node_does_nothing_more() -> None:
    cluster = VirtualCluster(0, WORLD)
    done: list[str] = []

    async def life(runtime: VirtualRuntime) -> None:
        runtime.call_later(2, lambda: done.append(f"{runtime.node} timer"))
        await runtime.sleep(3)
        done.append(runtime.node)

    async def work() -> None:
        for node in ("dead", "alive"):
            runtime = cluster.runtime(node)
            runtime.spawn(life(runtime), name=node)
        await cluster.runtime("director").sleep(1)
        cluster.runtime("dead").kill()
        await cluster.runtime("director").sleep(9)

    cluster.run(work())
    assert done == ["alive timer", "alive"]


# ---- tasks ------------------------------------------------------------------------------


async def after(runtime: VirtualRuntime, seconds: float, value: T, log: list[Any] | None = None) -> T:
    try:
        await runtime.sleep(seconds)
    except asyncio.CancelledError:
        await runtime.sleep(0.5)  # cleaning up takes time
        if log is not None:
            log.append(value)
        raise
    if isinstance(value, Exception):
        raise value
    return value


def test_gather_keeps_the_order_given() -> None:
    async def work(runtime: VirtualRuntime) -> list[int]:
        return await runtime.gather(*(after(runtime, 5 - i, i) for i in range(5)))

    assert play(work) == ([0, 1, 2, 3, 4], 5.0)


def test_gather_cancels_and_awaits_the_rest_at_the_first_failure() -> None:
    log: list[Any] = []

    async def work(runtime: VirtualRuntime) -> float:
        works: list[Coroutine[Any, Any, Any]] = [
            after(runtime, 9, "slow", log),
            after(runtime, 1, KeyError("first")),
            after(runtime, 2, ValueError("second"), log),
        ]
        with pytest.raises(KeyError, match="first"):
            await runtime.gather(*works)
        return runtime.now() / 1e9

    ended_s, _ = play(work)
    assert ended_s == 1.5  # the clean-up was waited for
    assert log[0] == "slow"
    assert isinstance(log[1], ValueError)


def test_gather_of_nothing() -> None:
    async def work(runtime: VirtualRuntime) -> list[int]:
        return await runtime.gather()

    assert play(work)[0] == []


def test_within_gives_the_result_or_a_timeout_after_clean_up() -> None:
    log: list[Any] = []

    async def work(runtime: VirtualRuntime) -> float:
        assert await runtime.within(2, after(runtime, 1, "fast")) == "fast"
        with pytest.raises(TimeoutError):
            await runtime.within(2, after(runtime, 10, "slow", log))
        with pytest.raises(KeyError):
            await runtime.within(2, after(runtime, 1, KeyError()))
        return runtime.now() / 1e9

    assert play(work)[0] == 1 + 2.5 + 1
    assert log == ["slow"]


def test_within_lets_a_cancellation_from_outside_through() -> None:
    log: list[Any] = []

    async def work(runtime: VirtualRuntime) -> None:
        task = runtime.spawn(runtime.within(5, after(runtime, 10, "inner", log)), name="waiter")
        await runtime.sleep(1)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    play(work)
    assert log == ["inner"]


def test_progress_wakes_whoever_has_waited_for_enough() -> None:
    async def work(runtime: VirtualRuntime) -> list[tuple[int, float]]:
        progress, log = ComputeProgress(), []

        async def wait(value: int) -> None:
            await progress.reached(value)
            log.append((value, runtime.now() / 1e9))

        waiting = [runtime.spawn(wait(value), name=f"{value}") for value in (0, 7, 3, 10)]
        for second, value in enumerate((3, 2, 8), start=1):
            runtime.call_later(second, lambda value=value: progress.advance(value))  # type: ignore[misc]
        await runtime.sleep(4)
        assert progress.value == 8
        progress.fail(KeyError("broken"))
        with pytest.raises(KeyError, match="broken"):
            await waiting[3]
        with pytest.raises(KeyError, match="broken"):
            await progress.reached(9)
        await progress.reached(8)  # what was reached stays reached
        return log

    assert play(work)[0] == [(0, 0.0), (3, 1.0), (7, 3.0)]


# ---- compute ----------------------------------------------------------------------------


def vector(elems: int = 8) -> Vector:
    return Vector("parameters", torch.zeros(elems))


def test_compute_costs_what_the_world_says() -> None:
    async def work(runtime: VirtualRuntime) -> list[float]:
        times = []
        for kind, elems in (("gradient", 0), ("apply", 3), ("free", 9)):
            assert await runtime.compute(lambda _: "result", work=Work(kind, elems=elems)) == "result"
            times.append(runtime.now() / 1e9)
        assert runtime.compute_s == {"gradient": 1.0, "apply": 1.75, "free": 0.0}
        return times

    assert play(work)[0] == [1.0, 2.75, 2.75]


def test_one_core_computes_one_thing_after_the_other() -> None:
    async def work(runtime: VirtualRuntime) -> list[tuple[int, float]]:
        ended: list[tuple[int, float]] = []

        async def one(index: int) -> None:
            await runtime.compute(lambda _: None, work=Work("gradient"))
            ended.append((index, runtime.now() / 1e9))

        await runtime.gather(*(one(index) for index in range(3)))
        return ended

    assert play(work)[0] == [(0, 1.0), (1, 2.0), (2, 3.0)]


def test_two_nodes_compute_at_once() -> None:
    cluster = VirtualCluster(0, SimulationConfig(costs=WORLD.costs, speeds={"slow": 0.5}))

    async def work() -> None:
        nodes = [cluster.runtime("fast"), cluster.runtime("slow")]
        await nodes[0].gather(*(n.compute(lambda _: None, work=Work("gradient")) for n in nodes))

    cluster.run(work())
    assert cluster.clock.now_ns == 2_000_000_000


def test_memory_is_lent_for_the_charged_interval() -> None:
    async def work(runtime: VirtualRuntime) -> None:
        parameters = vector()
        computing = runtime.spawn(
            runtime.compute(lambda _: None, work=Work("gradient"), reads=[parameters.all]), name="compute"
        )
        await runtime.sleep(0.999)
        parameters.give_back(parameters.borrow(0, 8, write=False, to="reader"))
        with pytest.raises(LentMemoryError, match=r"read at .* by node/gradient"):
            parameters.borrow(7, 8, write=True, to="fetch")
        await computing
        parameters.borrow(0, 8, write=True, to="fetch")

    play(work)


def test_memory_that_waits_for_the_core_is_lent_already() -> None:
    async def work(runtime: VirtualRuntime) -> None:
        parameters = vector()
        first = runtime.spawn(runtime.compute(lambda _: None, work=Work("gradient")), name="first")
        second = runtime.spawn(
            runtime.compute(lambda _: None, work=Work("gradient"), reads=[parameters.all]), name="second"
        )
        await runtime.sleep(0.5)
        with pytest.raises(LentMemoryError):
            parameters.borrow(0, 1, write=True, to="fetch")
        await runtime.gather(first, second)

    play(work)


def test_compute_refuses_lent_memory_before_it_runs() -> None:
    async def work(runtime: VirtualRuntime) -> None:
        parameters = vector()
        parameters.borrow(0, 4, write=True, to="fetch")
        with pytest.raises(LentMemoryError, match=r"being written at .* by fetch"):
            await runtime.compute(
                lambda _: pytest.fail("it ran"), work=Work("gradient"), reads=[parameters.all]
            )
        assert runtime.now() == 0

    play(work)


def test_cancelling_takes_effect_when_the_arithmetic_is_done() -> None:
    async def work(runtime: VirtualRuntime) -> float:
        parameters = vector()
        task = runtime.spawn(
            runtime.compute(lambda _: None, work=Work("gradient"), writes=[parameters.all]), name="compute"
        )
        for _ in range(3):
            await runtime.sleep(0.25)
            task.cancel()
        with pytest.raises(LentMemoryError):
            parameters.borrow(0, 1, write=False, to="reader")
        with pytest.raises(asyncio.CancelledError):
            await task
        assert not parameters.lent
        return runtime.now() / 1e9

    assert play(work)[0] == 1.0


def test_cancelled_while_it_queues_it_never_runs() -> None:
    async def work(runtime: VirtualRuntime) -> float:
        parameters = vector()
        first = runtime.spawn(runtime.compute(lambda _: None, work=Work("gradient")), name="first")
        second = runtime.spawn(
            runtime.compute(lambda _: pytest.fail("it ran"), work=Work("gradient"), writes=[parameters.all]),
            name="second",
        )
        await runtime.sleep(0.5)
        second.cancel()
        with pytest.raises(asyncio.CancelledError):
            await second
        assert not parameters.lent
        assert runtime.now() == 500_000_000
        await first
        return runtime.now() / 1e9

    assert play(work)[0] == 1.0


def test_what_arithmetic_raises_comes_out_and_memory_is_back() -> None:
    async def work(runtime: VirtualRuntime) -> None:
        parameters = vector()

        def fail(_: object) -> None:
            raise KeyError("user")

        with pytest.raises(KeyError, match="user"):
            await runtime.compute(fail, work=Work("gradient"), writes=[parameters.all])
        assert not parameters.lent
        await runtime.compute(lambda _: None, work=Work("gradient"))  # the core is free

    play(work)


@pytest.mark.parametrize("shape_only", [False, True])
def test_progress_comes_at_the_modelled_offsets_and_frees_memory(shape_only: bool) -> None:
    """backprop = 1/2: the first element at half of the duration, the rest linearly to the end."""
    config = SimulationConfig(costs={"gradient": Cost(base_s=1.0)}, backprop=0.5, shape_only=shape_only)

    async def work(runtime: VirtualRuntime) -> list[tuple[int, float]]:
        gradient = runtime.memory.allocate(8, torch.float32, "gradient")
        log: list[tuple[int, float]] = []

        def arithmetic(report: Any) -> str:
            for elems in (2, 4, 8):
                report(elems)
            return "loss"

        def progressed(elems: int) -> None:
            gradient.give_back(gradient.borrow(0, elems, write=False, to="push"))
            if elems < 8:
                with pytest.raises(LentMemoryError):
                    gradient.borrow(elems, elems + 1, write=False, to="push")
            log.append((elems, round(runtime.now() / 1e9, 6)))

        result = await runtime.compute(
            arithmetic, work=Work("gradient"), writes=[gradient.all], milestones=(2, 4, 8),
            on_progress=progressed, shape_only="none",
        )  # fmt: skip
        assert result == ("none" if shape_only else "loss")
        return log

    assert play(work, config=config)[0] == [(2, 0.625), (4, 0.75), (8, 1.0)]


def test_traces_are_gone_through_per_kind() -> None:
    config = SimulationConfig(
        costs={kind: Cost(base_s=1.0, jitter=Trace((1.0, 2.0))) for kind in ("gradient", "apply")}
    )

    async def work(runtime: VirtualRuntime) -> list[float]:
        times = []
        for kind in ("gradient", "apply", "gradient", "gradient"):
            begun = runtime.now()
            await runtime.compute(lambda _: None, work=Work(kind))
            times.append((runtime.now() - begun) / 1e9)
        return times

    assert play(work, config=config)[0] == [1.0, 1.0, 2.0, 1.0]


@pytest.mark.parametrize("at", [3, 40, 200])
def test_ctrl_c_in_a_task_is_raised_and_not_logged_as_well(
    at: int, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """It comes in the `at`-th task; nobody complains later that its exception was never retrieved."""
    model, data = least_squares(40, 8)
    count = 0
    spawn = VirtualRuntime.spawn

    def spawned(self: VirtualRuntime, work: Any, *, name: str) -> Any:
        nonlocal count
        count += 1

        async def interrupted() -> None:
            work.close()
            raise KeyboardInterrupt

        return spawn(self, interrupted() if count == at else work, name=name)

    monkeypatch.setattr(VirtualRuntime, "spawn", spawned)
    with pytest.raises(KeyboardInterrupt):
        simulate(model, data, strategy="downpour", workers=2, batch_size=4, epochs=8)
    gc.collect()
    assert caplog.records == []


@pytest.mark.parametrize(("with_clock", "fires_s", "own_s"), [(False, 1.5, 1.5), (True, 2.0, 1.0)])
def test_a_node_that_stands_still_does_nothing_until_it_goes_on(
    with_clock: bool, fires_s: float, own_s: float
) -> None:
    """Its timers are late; where its clock stood still too, they are due later. Frames keep their order."""
    cluster = VirtualCluster()
    node, clock, read = cluster.runtime("node"), cluster.clock, list[int]()

    async def main() -> None:
        clock.call_at(500_000_000, node.suspension.begin)
        for number, at_ns in enumerate((600_000_000, 700_000_000, 1_500_500_000)):
            clock.call_at(at_ns, lambda number=number: cluster.hand("node", lambda: read.append(number)))  # type: ignore[misc]
        clock.call_at(1_500_000_000, lambda: node.suspension.end(with_clock=with_clock))
        await node.sleep(1.0)
        assert (clock.now_ns / 1e9, node.now() / 1e9) == (fires_s, own_s)
        await node.sleep(0.1)
        assert read == [0, 1, 2]
        assert node.stalls.total_ns == (0 if with_clock else 1_000_000_000)
        assert node.suspension.num_held >= 2

    cluster.run(main())
