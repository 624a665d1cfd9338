"""The executor of pipelines: gradients of all parts are the whole model's, whatever the graph and the times."""

from __future__ import annotations

import asyncio
from collections import Counter, defaultdict
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from queue import SimpleQueue
from typing import Any

import pytest
import torch
from torch import Tensor

from gradstream.errors import InternalError
from gradstream.pipeline.executor import PipelineExecutor, TensorTransfer
from gradstream.pipeline.schedule import FLUSHING, make_schedule
from gradstream.split.plan import DATA, SplitPlan
from pipeline_plans import UNITS, TorchStages, VirtualChannel, chain, compute, drawn_plan, run_parts

SAMPLES = 8


def minibatch(plan: SplitPlan, flat: bool, seed: int = 0) -> tuple[Tensor, dict[str, Tensor]]:
    """Parameters and the minibatch; whole numbers if `flat`."""
    generator = torch.Generator().manual_seed(seed)
    shapes = {"parameters": (plan.elems,), "inputs": (SAMPLES, UNITS), "targets": (SAMPLES, UNITS)}
    values = {
        name: torch.randn(shape, generator=generator, dtype=torch.float64) for name, shape in shapes.items()
    }
    if flat:
        values = {name: value.mul(2).round() for name, value in values.items()}
    return values.pop("parameters"), values


def whole_gradient(plan: SplitPlan, parameters: Tensor, data: dict[str, Tensor], flat: bool) -> Tensor:
    """The gradient of the mean loss by one backward through all stages."""
    leaf, values = parameters.clone().requires_grad_(), dict(data)
    for stage in plan.stages:
        weights, inputs = leaf[slice(*stage.ranges[0])], {name: values[name] for name in stage.inputs}
        out = compute(stage.number, weights, inputs, stage.number == len(plan.stages) - 1, flat)
        values.update(dict.fromkeys(stage.outputs, out))
    (gradient,) = torch.autograd.grad(out / SAMPLES, leaf)
    return gradient


def split_gradient(
    name: str,
    plan: SplitPlan,
    count: int,
    parameters: Tensor,
    data: dict[str, Tensor],
    flat: bool,
    seed: int = 0,
) -> tuple[Tensor, VirtualChannel, list[TorchStages]]:
    """The gradient by a schedule, of micro-batches of any sizes."""
    edges = [SAMPLES * number // count for number in range(count + 1)]
    stages = [TorchStages(plan, parameters, samples=SAMPLES, flat=flat) for _ in range(plan.parts)]
    for each in stages:
        each.defers = name == "zero-bubble"
    channel = run_parts(
        plan,
        make_schedule(name, plan, count),
        stages,
        lambda value, number: data[value][edges[number] : edges[number + 1]],
        seed=seed,
        pausing=stages,
    )
    assert channel.left() == []
    assert all(not each.saved and not each.late for each in stages)
    return torch.stack([each.gradient for each in stages]).sum(0), channel, stages


def close(a: Tensor, b: Tensor) -> bool:
    return bool((a - b).abs().max() <= 1e-12 * max(1.0, float(b.abs().max())))


@pytest.mark.parametrize("flat", [False, True], ids=["float64", "whole numbers"])
@pytest.mark.parametrize("name", FLUSHING)
def test_on_a_chain_the_gradient_is_that_of_the_whole_model(name: str, flat: bool) -> None:
    for parts in (1, 2, 3, 4):
        for count in (1, 2, 4):
            if name == "interleaved" and count % parts:
                continue
            plan = chain(parts, 2 if name == "interleaved" else 1)
            parameters, data = minibatch(plan, flat)
            expected = whole_gradient(plan, parameters, data, flat)
            gradient, _, _ = split_gradient(name, plan, count, parameters, data, flat)
            assert torch.equal(gradient, expected) if flat else close(gradient, expected), (parts, count)


@pytest.mark.parametrize("name", [name for name in FLUSHING if name != "interleaved"])
def test_on_any_graph_the_gradient_is_that_of_the_whole_model(name: str) -> None:
    for seed in range(25):
        plan = drawn_plan(1 + seed % 4, 1 + seed % 9, seed)
        parameters, data = minibatch(plan, False, seed)
        gradient, _, _ = split_gradient(name, plan, 1 + seed % 5, parameters, data, False, seed)
        assert close(gradient, whole_gradient(plan, parameters, data, False)), seed


@pytest.mark.parametrize("fault", ["a user's gradient is lost", "sums in place of means"])
def test_the_check_of_gradients_finds_a_planted_fault(fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    plan = drawn_plan(3, 9, 5)
    parameters, data = minibatch(plan, False)
    if fault == "a user's gradient is lost":
        monkeypatch.setattr("gradstream.pipeline.executor._sum", lambda tensors: tensors[0])
    else:
        monkeypatch.setattr("pipeline_plans.TorchStages.share", property(lambda stages: 1.0))
    gradient, _, _ = split_gradient("1f1b", plan, 4, parameters, data, False)
    assert not close(gradient, whole_gradient(plan, parameters, data, False))


def test_the_times_of_passes_and_transfers_have_no_effect_on_the_bits() -> None:
    plan = drawn_plan(3, 9, 5)
    parameters, data = minibatch(plan, False)
    results = [split_gradient("1f1b", plan, 4, parameters, data, False, seed)[0] for seed in range(6)]
    assert all(torch.equal(result, results[0]) for result in results)


def test_a_value_and_its_gradient_travel_once_for_each_part_that_uses_it() -> None:
    for seed in range(10):
        plan = drawn_plan(4, 9, seed)
        parameters, data = minibatch(plan, False)
        _, channel, _ = split_gradient("gpipe", plan, 2, parameters, data, False)
        expected = Counter[TensorTransfer]()
        for value, part in plan.crossings():
            for number in range(2):
                expected[TensorTransfer(value.name, number, plan.part_of(value), part, False)] += 1
                if value.source != DATA:
                    expected[TensorTransfer(value.name, number, part, plan.part_of(value), True)] += 1
        assert Counter(channel.sent) == expected


def test_activations_are_held_for_as_many_micro_batches_as_the_schedule_says() -> None:
    plan = chain(4)
    parameters, data = minibatch(plan, False)
    for name, most in (("gpipe", [8, 8, 8, 8]), ("1f1b", [4, 3, 2, 1])):
        stages = split_gradient(name, plan, 8, parameters, data, False)[2]
        assert [each.most_saved for each in stages] == most


@pytest.mark.parametrize("operation", ["send", "receive"])
def test_a_transfer_that_fails_ends_the_run(operation: str) -> None:
    """The injector proves that it has fired: its error is the one that comes out."""

    class Broken(VirtualChannel):
        async def send(self, transfer: TensorTransfer, tensor: Tensor) -> None:
            if operation == "send" and transfer.gradient:
                raise ConnectionError(f"part {transfer.target} is gone")
            await super().send(transfer, tensor)

        async def receive(self, transfer: TensorTransfer) -> Tensor:
            if operation == "receive" and transfer.gradient:
                raise ConnectionError(f"part {transfer.source} is gone")
            return await super().receive(transfer)

    plan = chain(3)
    parameters, data = minibatch(plan, False)
    stages = [TorchStages(plan, parameters) for _ in range(3)]
    with pytest.raises(ConnectionError, match="part 1 is gone"):
        run_parts(
            plan,
            make_schedule("1f1b", plan, 4),
            stages,
            lambda name, number: data[name][number : number + 1],
            make_channel=Broken,
        )


def test_a_stage_that_leaves_out_a_value_is_named() -> None:
    class Silent(TorchStages):
        async def forward(self, *args: object) -> dict[str, Tensor]:
            return {}

    plan = chain(2)
    parameters, data = minibatch(plan, False)
    stages = [Silent(plan, parameters), TorchStages(plan, parameters)]
    with pytest.raises(InternalError, match=r"kind='forward', stage=0, micro_batch=0\) gave \[\].*'h0'"):
        run_parts(plan, make_schedule("1f1b", plan, 2), stages, lambda name, number: data[name])


def test_a_send_begins_before_the_next_pass_also_where_stages_never_wait() -> None:
    events: list[str] = []

    class Noting(TorchStages):
        async def forward(self, stage: int, micro_batch: int, *args: Any) -> Mapping[str, Tensor]:
            events.append(f"f{micro_batch}")
            return await super().forward(stage, micro_batch, *args)

    class NotingChannel(VirtualChannel):
        async def send(self, transfer: TensorTransfer, tensor: Tensor) -> None:
            if transfer.value == "h0" and not transfer.gradient:
                events.append(f"s{transfer.micro_batch}")
            self.arrived[transfer].set_result(tensor)

    plan = chain(2)
    parameters, data = minibatch(plan, False)
    stages = [Noting(plan, parameters), TorchStages(plan, parameters)]
    schedules = make_schedule("gpipe", plan, 3)
    run_parts(plan, schedules, stages, lambda name, number: data[name], make_channel=NotingChannel)
    assert events == ["f0", "s0", "f1", "s1", "f2", "s2"]


class Parts:
    """A channel between parts that compute in threads: a wait blocks the thread."""

    def __init__(self) -> None:
        self._queues: defaultdict[TensorTransfer, SimpleQueue[Tensor]] = defaultdict(SimpleQueue)

    async def send(self, transfer: TensorTransfer, tensor: Tensor) -> None:
        self._queues[transfer].put(tensor)

    async def receive(self, transfer: TensorTransfer) -> Tensor:
        return self._queues[transfer].get(timeout=10)


@pytest.mark.parametrize("name", FLUSHING)
def test_parts_in_threads_of_their_own_compute_the_same_bits(name: str) -> None:
    plan = chain(2, 2 if name == "interleaved" else 1)
    parameters, data = minibatch(plan, flat=False)
    expected, _, _ = split_gradient(name, plan, 4, parameters, data, flat=False)
    stages = [TorchStages(plan, parameters, samples=SAMPLES) for _ in range(plan.parts)]
    for each in stages:
        each.defers = name == "zero-bubble"
    channel, schedules = Parts(), make_schedule(name, plan, 4)

    def run(part: int) -> None:
        PipelineExecutor(
            plan, part, stages[part], channel, lambda value, number: data[value][2 * number : 2 * number + 2]
        ).run_in_thread(schedules[part])

    with ThreadPoolExecutor(plan.parts) as threads:
        list(threads.map(run, range(plan.parts)))
    assert torch.equal(sum(each.gradient for each in stages), expected)  # type: ignore[arg-type]


def test_stages_that_need_an_event_loop_are_refused_in_a_thread() -> None:
    plan = chain(1)
    parameters, data = minibatch(plan, flat=False)
    stages = TorchStages(plan, parameters)

    async def pause() -> None:
        await asyncio.Future(loop=asyncio.new_event_loop())

    stages.pause = pause
    executor = PipelineExecutor(plan, 0, stages, Parts(), lambda value, number: data[value])
    with pytest.raises(InternalError, match="part 0 waits for an event loop in a thread that has none"):
        executor.run_in_thread(make_schedule("1f1b", plan, 1)[0])
