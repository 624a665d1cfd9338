"""In a group each worker makes the first parameters of the seed; they are sent where a worker makes other ones."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

import gradstream as gs
from gradstream._simulate import simulate
from gradstream.runtime.simulation import Link, Network, SimulationConfig
from gradstream.testing.runs import least_squares
from gradstream.worker import node
from gradstream.worker.group.exchange import GroupExchange
from gradstream.worker.group.peers import GroupPeers

WORKERS, ELEMS = 3, 600
MODEL, DATA = least_squares(24, ELEMS, whole=False, reduction="mean")
SLOW = SimulationConfig(network=Network(link=Link(latency_s=1e-3), bandwidth_bytes_s=1e5))

Finals = list[torch.Tensor]


@pytest.fixture
def sent(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Elements of each broadcast."""
    found, broadcast = list[int](), GroupPeers.broadcast

    async def noted(self: GroupPeers, vector: Any, root: int = 0) -> None:
        found.append(len(vector))
        await broadcast(self, vector, root)

    monkeypatch.setattr(GroupPeers, "broadcast", noted)
    return found


@pytest.fixture
def finals(monkeypatch: pytest.MonkeyPatch) -> Finals:
    """The parameters with which each worker ends."""
    found, close = Finals(), GroupExchange.close

    async def noted(self: GroupExchange) -> None:
        found.append(self.replica.parameters.tensor.clone())
        await close(self)

    monkeypatch.setattr(GroupExchange, "close", noted)
    return found


def run() -> gs.Run:
    options: dict[str, Any] = {"workers": WORKERS, "batch_size": 2, "epochs": 1, "config": SLOW}
    return simulate(
        MODEL, DATA, strategy=gs.AllReduce(algorithm="ring"), optimizer=gs.optim.SGD(lr=0.01), **options
    )


def test_nothing_is_sent_where_all_make_the_same(sent: list[int], finals: Finals) -> None:
    run()
    assert sent == []
    assert len(finals) == WORKERS and all(torch.equal(one, finals[0]) for one in finals)


@pytest.mark.parametrize("how", ["others", "none"])
def test_whoever_makes_others_or_none_receives_those_of_rank_0(
    how: str, sent: list[int], finals: Finals, monkeypatch: pytest.MonkeyPatch
) -> None:
    usual = run().parameters["w"]
    made, fill = [0], node.fill_parameters

    async def odd(config: Any, runtime: Any, parameters: Any) -> None:
        await fill(config, runtime, parameters)
        if runtime.node == "worker-2":
            made[0] += 1
            parameters.tensor.fill_(7.0)
            if how == "none":
                raise gs.errors.UserCodeError("no file of weights here", "")

    monkeypatch.setattr("gradstream.worker.node.fill_parameters", odd)
    finals.clear()
    np.testing.assert_array_equal(run().parameters["w"], usual)
    assert made == [1] and sent == [ELEMS] * WORKERS
    assert all(torch.equal(one, finals[0]) for one in finals)


def test_the_first_rank_that_cannot_make_them_ends_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    async def odd(config: Any, runtime: Any, parameters: Any) -> None:
        raise gs.errors.UserCodeError(f"{runtime.node} has no file of weights", "")

    monkeypatch.setattr("gradstream.worker.node.fill_parameters", odd)
    with pytest.raises(gs.errors.UserCodeError, match="worker-0 has no file of weights"):
        run()


def test_other_parameters_that_nobody_compares_are_noticed(
    finals: Finals, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Planted: all digests are alike."""
    fill = node.fill_parameters

    async def odd(config: Any, runtime: Any, parameters: Any) -> None:
        await fill(config, runtime, parameters)
        parameters.tensor.add_(float(runtime.node[-1]))

    async def alike(self: GroupExchange, vectors: Any) -> tuple[int, int]:
        return 0, 0

    monkeypatch.setattr("gradstream.worker.node.fill_parameters", odd)
    monkeypatch.setattr(GroupExchange, "_digest", alike)
    run()
    assert not all(torch.equal(one, finals[0]) for one in finals)
