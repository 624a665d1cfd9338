"""The runtime on real time: one arithmetic thread, memory lent while it works, files that stay whole."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from gradstream.errors import LentMemoryError
from gradstream.memory import Vector
from gradstream.runtime import RealRuntime, Work
from gradstream.runtime.real import queued_s


@pytest.fixture
def runtime() -> Iterator[RealRuntime]:
    made = RealRuntime("node", seed=4)
    yield made
    made.close()


class Gate:
    """Arithmetic that says when it has begun, and goes on when it is let."""

    def __init__(self) -> None:
        self.begun, self.open = threading.Event(), threading.Event()
        self.thread = ""

    def __call__(self, report: Any) -> str:
        self.thread = threading.current_thread().name
        report(2)
        self.begun.set()
        assert self.open.wait(30)
        report(8)
        return "done"

    async def entered(self) -> None:
        """Returns once the arithmetic runs; the loop goes on meanwhile."""
        await asyncio.get_running_loop().run_in_executor(None, self.begun.wait, 30)


def test_compute_runs_off_the_loop_and_lends_its_memory(runtime: RealRuntime) -> None:
    async def work() -> None:
        gate, gradient, reported = Gate(), Vector("gradient", torch.zeros(8)), []
        told = asyncio.Event()

        def progressed(elems: int) -> None:
            reported.append(elems)
            told.set()

        task = runtime.spawn(
            runtime.compute(gate, work=Work("gradient"), writes=[gradient.all], on_progress=progressed),
            name="compute",
        )
        await gate.entered()
        await told.wait()
        assert reported == [2]
        gradient.give_back(gradient.borrow(0, 2, write=False, to="push"))  # final, and given back
        with pytest.raises(LentMemoryError, match="by node/gradient"):
            gradient.borrow(2, 3, write=False, to="push")
        gate.open.set()
        assert await task == "done"
        assert gate.thread.startswith("node-compute")
        assert reported == [2, 8]
        assert not gradient.lent
        assert set(runtime.compute_s) == {"gradient"}

    asyncio.run(work())


def test_cancelling_takes_effect_when_the_arithmetic_is_done(runtime: RealRuntime) -> None:
    async def work() -> None:
        gate, gradient = Gate(), Vector("gradient", torch.zeros(8))
        task = runtime.spawn(
            runtime.compute(gate, work=Work("gradient"), writes=[gradient.all]), name="compute"
        )
        await gate.entered()
        for _ in range(3):
            task.cancel()
            await runtime.sleep(0)
        assert not task.done()
        with pytest.raises(LentMemoryError):
            gradient.borrow(0, 1, write=False, to="push")
        gate.open.set()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert not gradient.lent

    asyncio.run(work())


def test_computations_run_in_the_order_asked_for(runtime: RealRuntime) -> None:
    async def work() -> list[int]:
        ran: list[int] = []

        def one(index: int) -> Callable[[object], None]:
            return lambda _: ran.append(index)

        await runtime.gather(*(runtime.compute(one(index), work=Work("copy")) for index in range(20)))
        return ran

    assert asyncio.run(work()) == list(range(20))


def test_brief_work_runs_on_the_loop_but_never_beside_the_arithmetic_thread(runtime: RealRuntime) -> None:
    async def work() -> None:
        def name(_: object) -> str:
            return threading.current_thread().name

        brief, gate = Work("apply", brief=True), Gate()
        assert await runtime.compute(name, work=brief) == threading.current_thread().name
        long = runtime.spawn(runtime.compute(gate, work=Work("gradient")), name="long")
        await gate.entered()
        queued = runtime.spawn(runtime.compute(name, work=brief), name="brief")
        await runtime.sleep(0)
        assert not queued.done()
        gate.open.set()
        assert (await queued).startswith("node-compute")
        await long

    asyncio.run(work())


def test_what_arithmetic_raises_comes_out(runtime: RealRuntime) -> None:
    async def work() -> None:
        gradient = Vector("gradient", torch.zeros(8))

        def fail(_: object) -> None:
            raise KeyError("user")

        with pytest.raises(KeyError, match="user"):
            await runtime.compute(fail, work=Work("gradient"), writes=[gradient.all])
        assert not gradient.lent

    asyncio.run(work())


def test_within_and_gather_are_those_of_virtual_time(runtime: RealRuntime) -> None:
    async def forever(ended: list[str]) -> None:
        try:
            await asyncio.get_running_loop().create_future()
        finally:
            ended.append("cancelled")

    async def fail() -> None:
        raise KeyError("first")

    async def work() -> None:
        ended: list[str] = []
        with pytest.raises(TimeoutError):
            await runtime.within(0.001, forever(ended))
        with pytest.raises(KeyError, match="first"):
            await runtime.gather(forever(ended), fail())
        assert ended == ["cancelled"] * 2

    asyncio.run(work())


def test_time_goes_on_and_randomness_is_the_seeds(runtime: RealRuntime) -> None:
    async def work() -> int:
        begun = runtime.now()
        await runtime.sleep(0.002)
        return runtime.now() - begun

    assert asyncio.run(work()) >= 2_000_000
    again = RealRuntime("node", seed=4)
    assert again.random("retry").random() == runtime.random("retry").random()
    assert again.random("retry").random() != runtime.random("other").random()
    again.close()


def test_process_metrics_tell_cpu_and_memory(runtime: RealRuntime) -> None:
    runtime.memory.allocate(10, torch.float64, "parameters")
    records = {record.name: record for record in runtime.process_metrics("worker")}
    assert set(records) == {"cpu", "memory", "loop_lag"}
    memory: Any = records["memory"]
    assert memory.vectors_bytes == {"parameters": 80}
    assert memory.peak_bytes > 1 << 20


ENDLESS = """
import os, sys
os.sched_setaffinity(0, {int(sys.argv[1])})
print(flush=True)
while True: pass
"""


@pytest.mark.skipif(queued_s(threading.get_native_id()) is None, reason="this system does not tell")
def test_a_core_that_another_process_holds_is_told_apart_from_computing(runtime: RealRuntime) -> None:
    """Arithmetic shares one core with an endless loop: where it does not compute, it waits for that core."""
    core = min(os.sched_getaffinity(0))

    def arithmetic(_: Any) -> float:
        os.sched_setaffinity(0, {core})  # this thread alone
        begun_s = time.perf_counter()
        until_s = time.thread_time() + 0.3
        while time.thread_time() < until_s:
            pass
        return time.perf_counter() - begun_s

    async def work() -> float:
        return await runtime.compute(arithmetic, work=Work("gradient"))

    with subprocess.Popen([sys.executable, "-c", ENDLESS, str(core)], stdout=subprocess.PIPE) as other:
        assert other.stdout is not None
        other.stdout.readline()
        try:
            took_s = asyncio.run(work())
        finally:
            other.kill()
    cpu: Any = runtime.process_metrics("worker")[0]
    assert cpu.load is not None and cpu.cores == os.cpu_count()
    assert cpu.queued_s > 0.5 * (took_s - cpu.compute_s["gradient"]) > 0.0


@pytest.mark.parametrize("on_disk", [False, True])
def test_storage_replaces_appends_and_reads(tmp_path: Path, on_disk: bool) -> None:
    runtime = RealRuntime("node", root=tmp_path / "run" if on_disk else None)
    storage = runtime.storage
    with pytest.raises(FileNotFoundError):
        storage.read("a/b.txt")
    storage.write("a/b.txt", b"one")
    storage.write("a/b.txt", b"two")
    storage.append("events.jsonl", b"1\n")
    storage.append("events.jsonl", b"2\n")
    assert storage.read("a/b.txt") == b"two"
    assert storage.read("events.jsonl") == b"1\n2\n"
    if on_disk:
        assert [path.name for path in (tmp_path / "run" / "a").iterdir()] == ["b.txt"]
    runtime.close()


def test_a_failed_write_leaves_the_old_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    runtime = RealRuntime("node", root=tmp_path)
    runtime.storage.write("model", b"old")

    def full(fd: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.fsync", full)
    with pytest.raises(OSError, match="No space"):
        runtime.storage.write("model", b"new")
    assert runtime.storage.read("model") == b"old"
    assert [path.name for path in tmp_path.iterdir()] == ["model"]
    runtime.close()
