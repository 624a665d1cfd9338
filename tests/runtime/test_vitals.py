"""Looking at how a process is doing must not take what it needs for training."""

import asyncio

import torch

from gradstream.runtime.real import LoopLag, OwnMemory, own_bytes


class Machine:
    """Tells resident and proportional memory; the latter takes it `slow_s`."""

    def __init__(self, slow_s: float) -> None:
        self.now_s, self.slow_s = 100.0, slow_s
        self.resident, self.proportional = 1000, 600
        self.walks = 0

    def read(self, shared: bool) -> int:
        if not shared:
            return self.resident
        self.walks += 1
        self.now_s += self.slow_s
        return self.proportional

    def memory(self) -> OwnMemory:
        return OwnMemory(shared=True, read=self.read, clock=lambda: self.now_s)


def test_shared_memory_is_gone_through_for_a_thousandth_of_the_time() -> None:
    machine = Machine(slow_s=0.02)
    memory = machine.memory()
    for _ in range(1000):  # as process metrics are taken
        assert memory.take() == 600
        machine.now_s += 1
    assert 40 <= machine.walks <= 51  # 1000 s / (0.02 s / 0.001)


def test_memory_that_grows_is_noticed_at_once() -> None:
    machine = Machine(slow_s=0.02)
    memory = machine.memory()
    memory.take()
    machine.resident, machine.proportional = 1050, 650
    assert memory.take() == 650
    machine.resident, machine.proportional = 500, 300
    assert memory.take() == 300
    assert memory.peak_bytes == 650
    machine.resident, machine.proportional = 501, 301
    assert memory.take() == 300  # too little to look for


def test_own_memory_counts_what_is_there() -> None:
    memory = OwnMemory(shared=False)
    before = memory.take()
    held = torch.ones(25_000_000)
    assert 90_000_000 < memory.take() - before < 130_000_000
    del held
    assert 0 < own_bytes(shared=True) <= own_bytes()


def test_a_loop_that_is_held_up_is_late() -> None:
    async def held_up() -> tuple[float, float]:
        lateness, loop = LoopLag(), asyncio.get_running_loop()
        watching = asyncio.create_task(lateness.watch())
        await asyncio.sleep(3 * LoopLag.PERIOD_S)
        lateness.take()
        until = loop.time() + 5 * LoopLag.PERIOD_S
        while loop.time() < until:  # nobody else has a turn
            pass
        await asyncio.sleep(LoopLag.PERIOD_S)
        watching.cancel()
        return lateness.take()

    assert asyncio.run(held_up())[1] > 3 * LoopLag.PERIOD_S
    assert LoopLag().take() == (0.0, 0.0)
