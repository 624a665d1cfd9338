"""Reports of runs that were stopped and went on elsewhere than where they were."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import gradstream as gs
from gradstream._simulate import simulate
from gradstream.errors import Interrupted
from gradstream.run.simulated import SimulatedCluster
from gradstream.runtime.simulation import Cost, SimulationConfig
from gradstream.runtime.storage import MemoryStorage
from gradstream.testing.runs import NUM_SAMPLES as TOKENS
from gradstream.testing.runs import check_exactly_once, count_tokens, kill_at, least_squares, replace_at

WORLD = SimulationConfig(costs={"gradient": Cost(base_s=0.1)})
NUM_SAMPLES = 40
JOB: dict[str, Any] = {
    "optimizer": gs.optim.SGD(lr=0.05, momentum=0.9),
    "strategy": "synchronous",
    "workers": 2,
    "batch_size": 4,  # 5 rounds an epoch
    "epochs": 4,
    "chunk_elems": 64,
    "config": WORLD,
}


def stop_at(seconds: float) -> Any:
    async def script(cluster: SimulatedCluster) -> None:
        await cluster.virtual.runtime("director").sleep(seconds)
        cluster.stop()

    return script


def linear(**options: Any) -> gs.Run:
    model, data = least_squares(NUM_SAMPLES, 100, whole=False)
    return simulate(model, data, **{**JOB, **options})


def stopped(seconds: float, **options: Any) -> MemoryStorage:
    """What is on the disk of a run that was stopped then."""
    storage = MemoryStorage()
    with pytest.raises(Interrupted):
        linear(storage=storage, script=stop_at(seconds), **options)
    return storage


def rates(run: gs.Run) -> dict[int, float]:
    return {row["step"]: row["lr"] for row in run.history}


SCHEDULES: dict[str, Any] = {
    "lightly-ai/lightly-train#301": gs.schedules.Warmup(gs.schedules.Cosine(0.05), 6),
    "chainer/chainermn#225": gs.schedules.StepDecay(0.05, every=3, factor=0.5, unit="steps"),
    "FAIR-Chem/fairchem#146": gs.schedules.StepDecay(0.05, every=2, factor=0.1, unit="epochs"),
}
"""Reports, with what the rate followed: a warm-up began anew, a divided rate was the first one again."""


@pytest.mark.parametrize("report", SCHEDULES)
def test_a_rate_goes_on_along_its_curve(report: str) -> None:
    """See `SCHEDULES`: the place on the curve of the learning rate was in no checkpoint."""
    options: dict[str, Any] = {"optimizer": gs.optim.SGD(lr=SCHEDULES[report], momentum=0.9)}
    whole = linear(**options)
    resumed = linear(storage=stopped(1.2, **options), resume=True, **options)
    expected = rates(whole)
    assert len(set(expected.values())) > 1
    later = rates(resumed)
    assert 0 < len(later) < len(expected)
    assert later == {step: expected[step] for step in later}
    assert np.array_equal(whole.parameters["w"], resumed.parameters["w"])


def test_what_an_epoch_had_left_comes_in_the_order_it_would_have_had() -> None:
    """huggingface/accelerate#4233: a state drawn in the middle of an epoch skipped minibatches of another order."""
    whole = linear()
    resumed = linear(storage=stopped(0.75), resume=True)
    first = min(row["step"] for row in resumed.history)
    assert first % 5, "it was to be stopped within an epoch"
    assert np.array_equal(whole.parameters["w"], resumed.parameters["w"])


def test_samples_behind_a_checkpoint_do_not_come_again() -> None:
    """mosaicml/streaming#880: the loader was given its state of the middle of an epoch, and began with sample 0."""
    storage = MemoryStorage()
    options: dict[str, Any] = {"strategy": "downpour", "epochs": 3, "storage": storage}
    with pytest.raises(Interrupted):
        count_tokens(script=stop_at(0.15), **options)
    check_exactly_once(count_tokens(resume=True, **options), TOKENS, epochs=3)


def test_after_a_checkpoint_at_the_end_of_an_epoch_comes_the_next_epoch() -> None:
    """verl-project/verl#7401: a loader that was saved when it was through still was so, and an epoch was skipped."""
    whole = linear()
    resumed = linear(storage=stopped(0.95), resume=True)
    assert {row["step"] for row in resumed.history} == set(range(10, 20))
    assert np.array_equal(whole.parameters["w"], resumed.parameters["w"])


@pytest.mark.parametrize(("before", "after"), [(1, 2), (3, 2)])
def test_another_number_of_workers_shares_what_is_left(before: int, after: int) -> None:
    """huggingface/transformers#40245: where two went on from one, each skipped as many minibatches of its new part."""
    storage = MemoryStorage()
    options: dict[str, Any] = {"strategy": "downpour", "epochs": 3, "storage": storage}
    with pytest.raises(Interrupted):
        count_tokens(script=stop_at(0.2), workers=before, **options)
    check_exactly_once(count_tokens(resume=True, workers=after, **options), TOKENS, epochs=3)


def test_more_workers_make_fewer_steps_of_the_rest() -> None:
    """huggingface/transformers#22580: with three times the processes as many steps were made, on more samples each."""
    storage = stopped(1.45, workers=1)  # 10 rounds an epoch, of 4 samples
    run = linear(storage=storage, resume=True, workers=2)
    (resumed,) = [event for event in run.events if event["event"] == "resumed"]
    left = 4 * NUM_SAMPLES - resumed["samples"]
    assert resumed["samples"] % NUM_SAMPLES > 0
    assert sum(row["samples"] for row in run.history) == left
    assert len({row["step"] for row in run.history}) == -(-left // 8)
    assert run.summary["samples_accounted"] == 4 * NUM_SAMPLES


def test_a_process_that_comes_back_takes_no_samples_that_others_had() -> None:
    """meta-pytorch/torchft#58: a restarted process had no place in the data, so its loader began from the beginning."""
    for at_s in (0.06, 0.3):
        run = count_tokens(strategy="downpour", epochs=4, script=replace_at("worker-1", at_s, 0.02))
        check_exactly_once(run, TOKENS, epochs=4)


def test_samples_of_a_lost_process_are_not_taken_for_done() -> None:
    """horovod/horovod#3143: samples that a lost process had begun were in nobody's list, and never came again."""
    for at_s in (0.05, 0.22):
        run = count_tokens(strategy="downpour", epochs=4, script=kill_at("worker-2", at_s))
        check_exactly_once(run, TOKENS, epochs=4)


@pytest.mark.parametrize("part", ["state.json", "model"])
def test_a_checkpoint_that_was_not_written_whole_is_passed_over(part: str) -> None:
    """Lightning-AI/pytorch-lightning#688: killed while it wrote, a process left half of a file."""
    storage = MemoryStorage()
    options: dict[str, Any] = {"checkpoint_every": 4, "keep_last": 2}
    with pytest.raises(gs.errors.PeerLostError):
        linear(storage=storage, script=kill_at("coordinator", 1.5), **options)
    older, newest = sorted(storage.names("checkpoints"))
    (file,) = [name for name in storage.names(f"checkpoints/{newest}") if name.startswith(part)]
    path = f"checkpoints/{newest}/{file}"
    storage.write(path, storage.read(path)[: storage.size(path) // 2])
    resumed = linear(storage=storage, resume=True, **options)
    assert min(row["step"] for row in resumed.history) == int(older.removeprefix("step-"))
    assert np.array_equal(linear().parameters["w"], resumed.parameters["w"])
