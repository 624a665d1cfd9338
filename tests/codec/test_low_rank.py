"""PowerSGD: exact where it can be, nothing lost, and the sums of a group."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import gradstream as gs
from gradstream.codec.low_rank import MatrixPlace, orthonormal
from gradstream.errors import ConfigError
from gradstream.memory import Memory
from gradstream.model.base import Layout
from gradstream.runtime.virtual import VirtualCluster
from gradstream.testing.runs import QUICK, UNSTEADY, kill_at, least_squares
from gradstream.worker.group.coded_sums import LowRankSums, name_of
from gradstream.worker.unsent_state import UnsentState
from whole_runs import same

Array = np.ndarray[Any, Any]
LAYOUT = Layout.of([("bias", (5,)), ("w", (12, 8)), ("kernel", (6, 4, 3)), ("small", (2, 2))], torch.float64)
WHOLE = 0, LAYOUT.elems


class Alone:
    """A group of one rank."""

    size, rank = 1, 0

    def allocate(self, elems: int, dtype: torch.dtype, name: str) -> Any:
        return Memory().allocate(elems, dtype, name)

    async def allreduce(self, span: Any, *, weight: float = 1.0) -> Any:
        return span


def run(work: Any) -> Any:
    cluster = VirtualCluster(0, gs.sim.SimulationConfig())
    return cluster.run(work(cluster.runtime("worker-0")))


def sums_of(runtime: Any, rank: int) -> LowRankSums:
    codec, unsent = gs.codecs.PowerSGD(rank), UnsentState(runtime, LAYOUT, ["residual"])
    return LowRankSums(runtime, Alone(), LAYOUT, [WHOLE], codec, 0, unsent)  # type: ignore[arg-type]


def test_only_matrices_that_become_smaller_are_thin() -> None:
    tensors = [(slot.start, slot.shape) for slot in LAYOUT.slots]
    assert gs.codecs.PowerSGD(2).matrices(tensors) == [MatrixPlace(5, 12, 8), MatrixPlace(101, 6, 12)]
    assert gs.codecs.PowerSGD(4).matrices(tensors) == [MatrixPlace(5, 12, 8)]
    assert gs.codecs.PowerSGD(1).matrices([(0, ()), (1, (9,)), (10, (0, 9))]) == []


def test_a_matrix_of_low_rank_is_exact_after_one_round() -> None:
    rng = np.random.default_rng(0)
    low = torch.tensor(rng.standard_normal((12, 2)) @ rng.standard_normal((2, 8)))

    async def work(runtime: Any) -> None:
        sums = sums_of(runtime, 2)
        vector = runtime.memory.allocate(LAYOUT.elems, torch.float64, "gradient")
        matrix = sums.layers[0]
        matrix.of(vector.tensor).copy_(low)
        await sums.exchange(WHOLE, vector, 1.0, step=0)
        assert float((matrix.of(vector.tensor) - low).abs().max()) < 3e-14
        assert float(matrix.of(sums._left.tensor).abs().max()) < 3e-14

    run(work)


def test_nothing_is_lost_and_what_is_not_finite_changes_nothing() -> None:
    rng = np.random.default_rng(1)

    async def work(runtime: Any) -> None:
        sums = sums_of(runtime, 1)
        vector = runtime.memory.allocate(LAYOUT.elems, torch.float64, "gradient")
        matrix, total, came = sums.layers[0], np.zeros((12, 8)), np.zeros((12, 8))
        for step in range(20):
            gradient = rng.standard_normal((12, 8))
            matrix.of(vector.tensor).copy_(torch.tensor(gradient))
            if step == 10:
                left, q = sums._left.tensor.clone(), sums._bases[name_of(matrix)].clone()
                await sums.exchange(WHOLE, vector, float("nan"), step=step)
                assert torch.isnan(matrix.of(vector.tensor)).all()
                assert torch.equal(left, sums._left.tensor) and torch.equal(q, sums._bases[name_of(matrix)])
                continue
            await sums.exchange(WHOLE, vector, 0.5, step=step)
            total += 0.5 * gradient
            came += matrix.of(vector.tensor).numpy()
        assert np.allclose(came + matrix.of(sums._left.tensor).numpy(), total, atol=1e-12)

    run(work)


def test_a_round_that_is_made_again_begins_with_what_it_began_with() -> None:
    rng = np.random.default_rng(2)
    gradients = [torch.tensor(rng.standard_normal(LAYOUT.elems)) for _ in range(3)]

    async def work(runtime: Any) -> None:
        outcomes = []
        for again in (False, True):
            sums = sums_of(runtime, 1)
            sums._unsent.survive(["residual"])
            vector = runtime.memory.allocate(LAYOUT.elems, torch.float64, "gradient")
            for step, gradient in enumerate(gradients):
                for broken in (True, False) if again else (False,):
                    vector.tensor.copy_(gradient)
                    await sums.exchange((0, 101) if broken else WHOLE, vector, 0.5, step=step)
            outcomes.append([sums._left.tensor, vector.tensor, *sums._bases.values()])
        assert all(torch.equal(one, other) for one, other in zip(*outcomes, strict=True))

    run(work)


def test_a_bucket_takes_two_sums_and_what_is_no_matrix_comes_along() -> None:
    async def work(runtime: Any) -> None:
        sums, asked = sums_of(runtime, 1), list[int]()
        vector = runtime.memory.allocate(LAYOUT.elems, torch.float64, "gradient")
        vector.tensor.copy_(torch.arange(LAYOUT.elems, dtype=torch.float64))

        async def allreduce(span: Any, *, weight: float = 1.0) -> Any:
            asked.append(len(span))
            return span

        sums._group.allreduce = allreduce  # type: ignore[method-assign]
        await sums.exchange(WHOLE, vector, 0.5, step=0)
        assert asked == [12 + 6 + 5 + 4, 8 + 12]
        for start, stop in ((0, 5), (173, 177)):
            assert torch.equal(vector.tensor[start:stop], torch.arange(start, stop, dtype=torch.float64) / 2)
        assert [await sums.exchange((101, 102), vector, 1.0, step=1), len(asked)] == [
            [],
            2,
        ]  # within a matrix

    run(work)


def test_a_basis_is_orthonormal() -> None:
    thin = torch.randn(20, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    basis = orthonormal(thin)
    assert torch.allclose(basis.T @ basis, torch.eye(3, dtype=torch.float64), atol=1e-14)
    assert torch.allclose(basis @ (basis.T @ thin), thin, atol=1e-13)


# ---- runs -------------------------------------------------------------------------------------------


def net() -> nn.Module:
    return nn.Sequential(nn.Linear(12, 40), nn.Tanh(), nn.Linear(40, 3))


def data() -> Any:
    rng = np.random.default_rng(0)
    inputs = rng.standard_normal((240, 12)).astype("float32")
    return gs.from_arrays(inputs, (inputs @ rng.standard_normal((12, 3)).astype("float32")).argmax(1))


def train(**options: Any) -> gs.Run:
    model = gs.from_torch(net, nn.functional.cross_entropy)
    usual: dict[str, Any] = {"strategy": "allreduce", "workers": 3, "batch_size": 8, "epochs": 6}
    return gs.simulate(model, data(), **{**usual, "optimizer": gs.optim.SGD(0.3), **options})


def final_loss(run: gs.Run) -> float:
    return float(np.mean([row["loss"] for row in run.history[-30:]]))


@pytest.mark.parametrize("strategy", ["allreduce", gs.LocalSGD(every=4)])
def test_it_learns_with_fewer_bytes(strategy: Any) -> None:
    whole, thin = train(strategy=strategy), train(strategy=strategy, codec="powersgd")
    assert thin.summary["pushed_bytes"] < whole.summary["pushed_bytes"] / 2
    assert final_loss(thin) < 1.3 * final_loss(whole) < 0.5 * whole.history[0]["loss"]


def test_bytes_are_those_of_thin_matrices_and_of_biases() -> None:
    rounds, thin, biases = 6 * 10, 2 * (40 + 12) + 2 * (3 + 40), 40 + 3
    run = train(codec=gs.codecs.PowerSGD(2))
    assert run.summary["pushed_bytes"] == 3 * rounds * 4 * (thin + biases)


def test_the_order_of_buckets_and_overlap_change_no_bit() -> None:
    codec = gs.codecs.PowerSGD(1)
    one = train(codec=codec)
    assert same(one, train(codec=codec, strategy=gs.AllReduce(overlap=False)))
    assert not same(one, train())


@pytest.mark.parametrize("seed", range(4))
def test_workers_may_die(seed: int) -> None:
    run = train(
        codec="powersgd", config=UNSTEADY, deadlines=QUICK, seed=seed, epochs=3,
        script=kill_at(f"worker-{seed % 3}", 0.2 + 0.1 * seed),
    )  # fmt: skip
    assert run.summary["samples_accounted"] == 3 * 240
    assert final_loss(run) < run.history[0]["loss"]


def test_what_cannot_be_is_refused() -> None:
    model, rows = least_squares(48, 20, reduction="mean")
    with pytest.raises(ConfigError, match="needs whole matrices; take strategy='allreduce'"):
        gs.simulate(model, rows, strategy="synchronous", codec="powersgd", workers=2, epochs=1)
    with pytest.raises(ConfigError, match="rank is 0"):
        gs.codecs.PowerSGD(0)
