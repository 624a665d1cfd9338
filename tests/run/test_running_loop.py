"""What runs on virtual time runs where an event loop is running already: in a notebook's cell."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import pytest

import gradstream as gs
from gradstream.coordinator import Coordinator

NUM_SAMPLES = 200
INPUTS = np.random.default_rng(0).standard_normal((NUM_SAMPLES, 3)).astype(np.float32)
DATA = gs.from_arrays(INPUTS, INPUTS @ np.array([2, -1, 0.5], np.float32))


def recorded(on_gradient: Callable[[], None] = lambda: None, **options: Any) -> gs.Run:
    """A run on virtual time, of a linear model whose user is told of each gradient."""

    def init(seed: int) -> dict[str, Any]:
        return {"w": np.zeros(3)}

    def outputs(parameters: Mapping[str, Any], inputs: Any) -> Any:
        return inputs @ parameters["w"]

    def gradients(parameters: Mapping[str, Any], inputs: Any, targets: Any) -> dict[str, Any]:
        on_gradient()
        return {"w": 2 / len(inputs) * inputs.T @ (outputs(parameters, inputs) - targets)}

    model = gs.from_functions(init, outputs, gradients)
    return gs.simulate(
        model,
        DATA,
        optimizer=gs.optim.SGD(lr=0.1),
        workers=2,
        batch_size=10,
        epochs=3,
        record=True,
        **options,
    )


def in_a_cell(work: Callable[[], Any]) -> Any:
    """What `work` returns where a loop is running, which is found as it was left."""

    async def cell() -> Any:
        task, ticks = asyncio.current_task(), 0

        async def tick() -> None:
            nonlocal ticks
            while True:
                ticks += 1
                await asyncio.sleep(0)

        beside = asyncio.ensure_future(tick())
        await asyncio.sleep(0)
        try:
            found, before = work(), ticks
            assert asyncio.current_task() is task
            await asyncio.sleep(0)
            assert ticks == before + 1  # it stood still, and goes on
        finally:
            beside.cancel()
        return found

    return asyncio.run(cell())


def test_a_simulation_has_the_same_bits_in_a_cell() -> None:
    run, plain = in_a_cell(recorded), recorded()
    assert run.events == plain.events
    assert run.parameters["w"].tobytes() == plain.parameters["w"].tobytes()


def test_a_replay_goes_on_from_cell_to_cell() -> None:
    run = recorded()
    again = in_a_cell(lambda: gs.replay.replay(run))
    first = in_a_cell(lambda: next(again))
    rest = in_a_cell(lambda: list(again))
    assert (first.number, rest[-1].number, again.ended) == (1, again.num_updates, "the run is over")
    assert again.parameters["w"].tobytes() == run.parameters["w"].tobytes()


def test_a_replay_that_is_left_early_is_closed_in_a_cell() -> None:
    again = in_a_cell(lambda: gs.replay.replay(recorded()))
    in_a_cell(lambda: next(again))
    in_a_cell(again.close)
    assert again.ended == "closed"


def test_what_a_simulation_fails_with_comes_out_of_the_cell() -> None:
    def fail() -> None:
        raise RuntimeError("mine")

    with pytest.raises(gs.errors.UserCodeError, match="mine"):
        in_a_cell(lambda: recorded(fail))


class Fingers:
    """Press Ctrl-C at the tenth call.

    Attributes:
        num_calls: made so far.
    """

    def __init__(self) -> None:
        self.num_calls = 0

    def __call__(self, *_: object) -> None:
        self.num_calls += 1
        if self.num_calls == 10:
            signal.raise_signal(signal.SIGINT)


def plainly(work: Callable[[], Any]) -> Any:
    return work()


@pytest.mark.parametrize("where", [in_a_cell, plainly])
@pytest.mark.parametrize("hook", ["on_event", "on_gradient"])
def test_ctrl_c_ends_a_simulation_at_once(hook: str, where: Callable[[Callable[[], Any]], Any]) -> None:
    fingers, handler = Fingers(), signal.getsignal(signal.SIGINT)
    with pytest.raises(KeyboardInterrupt):
        where(lambda: recorded(**{hook: fingers}))
    assert fingers.num_calls == 10
    assert signal.getsignal(signal.SIGINT) is handler


def test_ctrl_c_is_not_taken_for_the_death_of_a_node(monkeypatch: pytest.MonkeyPatch) -> None:
    async def pressed(coordinator: Coordinator) -> None:
        signal.raise_signal(signal.SIGINT)

    monkeypatch.setattr(Coordinator, "run", pressed)
    with pytest.raises(KeyboardInterrupt):
        recorded()


def test_ctrl_c_ends_a_replay_at_once() -> None:
    def pressed() -> None:
        if replaying:
            fingers()

    fingers, replaying = Fingers(), False
    again = gs.replay.replay(recorded(pressed))
    replaying = True
    with pytest.raises(KeyboardInterrupt):
        in_a_cell(lambda: list(again))
    assert fingers.num_calls == 10
    in_a_cell(again.close)


def test_who_handles_ctrl_c_himself_is_asked_in_a_cell_too() -> None:
    pressed: list[int] = []
    before = signal.signal(signal.SIGINT, lambda number, frame: pressed.append(number))
    try:
        in_a_cell(lambda: recorded(Fingers()))
    finally:
        signal.signal(signal.SIGINT, before)
    assert pressed == [signal.SIGINT]
