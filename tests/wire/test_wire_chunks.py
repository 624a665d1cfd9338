"""The length of chunks: what may be asked for, what is chosen, and that no result depends on it."""

from __future__ import annotations

from typing import Any, Literal

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import gradstream as gs
from gradstream._simulate import simulate
from gradstream.checkpoint import Resume
from gradstream.data.base import DataProgress
from gradstream.job.job import Job, spread_out
from gradstream.memory.segments import supported
from gradstream.run.planning import plan_run
from gradstream.testing.runs import least_squares
from gradstream.transport import offers
from gradstream.wire.chunks import (
    ALIGNMENT_ELEMS,
    CHUNK_ELEMS,
    MAX_CHUNK_ELEMS,
    ChunkMap,
    shared_chunk_elems,
)
from gradstream.wire.frames import MAX_PAYLOAD_BYTES

MIB = 1 << 20
WIDE = 9 * MIB  # elements; as a model of so many parameters
SIZES = [64, 128, 1024, CHUNK_ELEMS, MIB, MAX_CHUNK_ELEMS]


@given(st.sampled_from(SIZES), st.integers(0, 80), st.integers(0, MAX_CHUNK_ELEMS), st.integers(1, 9))
def test_chunks_cover_the_vector_once(chunk_elems: int, whole: int, rest: int, num_shards: int) -> None:
    elems = whole * chunk_elems + rest % chunk_elems
    chunks = ChunkMap(elems, chunk_elems, num_shards)
    covered = sorted(chunks.bounds(c) for s in range(num_shards) for c in chunks.chunks_of(s))
    assert [start for start, _ in covered] == list(range(0, elems, chunk_elems))
    assert sum(stop - start for start, stop in covered) == elems
    for shard in range(num_shards):
        local = [chunks.local_bounds(chunk) for chunk in chunks.chunks_of(shard)]
        edges = [0, *(stop for _, stop in local)]
        assert [start for start, _ in local] == edges[:-1]
        assert edges[-1] == chunks.shard_elems(shard)


@pytest.mark.parametrize(
    ("elems", "itemsize_bytes", "num_shards", "expected"),
    [
        (0, 4, 1, 262_144),
        (304_389, 4, 1, 262_144),
        (8 * MIB - 1, 4, 1, 262_144),
        (8 * MIB, 4, 1, 524_288),
        (20_000_000, 4, 1, 1_048_576),
        (74_770_901, 4, 1, 4_194_304),
        (74_770_901, 4, 4, 1_048_576),
        (74_770_901, 8, 1, 2_097_152),
        (600_000_000, 4, 1, 4_194_304),
    ],
)
def test_where_memory_is_shared_a_shard_has_sixteen_chunks_or_more(
    elems: int, itemsize_bytes: int, num_shards: int, expected: int
) -> None:
    assert shared_chunk_elems(elems, itemsize_bytes, num_shards) == expected


@given(st.integers(0, 1 << 34), st.sampled_from([4, 8]), st.integers(1, 64))
def test_what_is_chosen_can_be_a_chunk_map(elems: int, itemsize_bytes: int, num_shards: int) -> None:
    chosen = shared_chunk_elems(elems, itemsize_bytes, num_shards)
    assert ChunkMap(elems, chosen, num_shards).chunk_elems % ALIGNMENT_ELEMS == 0
    assert chosen * itemsize_bytes <= MAX_PAYLOAD_BYTES
    if chosen > CHUNK_ELEMS:
        assert chosen * 16 * num_shards <= elems and chosen * itemsize_bytes <= 16 * MIB


def test_a_chunk_of_float64_fits_into_a_frame() -> None:
    assert MAX_CHUNK_ELEMS * torch.float64.itemsize == MAX_PAYLOAD_BYTES


def job(**options: Any) -> Job:
    model, data = least_squares(8, 4)
    options = {"steps": 1, "optimizer": gs.optim.SGD(lr=0.1), **options}
    return Job(model, data, **options)


class Wide:
    """As much of a layout as the choice looks at."""

    elems, dtype, tables = WIDE, torch.float32, ()


def chosen(asked: Job) -> int:
    return plan_run(asked, "id").chunk_elems_of(Wide())  # type: ignore[arg-type]


@pytest.mark.skipif(not supported(), reason="this system has no memory that processes can share")
def test_large_chunks_are_for_nodes_that_all_share_memory() -> None:
    assert chosen(job()) == chosen(job(carrier="shm")) == chosen(job(strategy="allreduce")) == 524_288
    assert chosen(job(servers=2)) == CHUNK_ELEMS
    for other in (
        job(carrier="tcp"),
        job(carrier="grpc"),
        job(strategy="allreduce", carrier="tcp"),
        job(strategy=gs.Downpour(significance=0.01)),
        spread_out(job(), "listen"),
    ):
        assert chosen(other) == CHUNK_ELEMS
    assert chosen(job(chunk_elems=128)) == chosen(spread_out(job(chunk_elems=128), "listen")) == 128


def test_nodes_of_a_system_without_such_memory_keep_to_small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(offers, "supported", lambda: False)
    assert chosen(job()) == CHUNK_ELEMS


def test_a_resumed_run_keeps_the_chunks_of_its_checkpoint() -> None:
    """Also with another number of servers, and on several machines."""
    at = Resume(
        folder="checkpoints/step-1",
        step=1,
        rounds=1,
        steps={},
        done=DataProgress(),
        model={"chunk_elems": 1 << 21},
        seed=0,
        strategy="synchronous",
        num_samples=8,
    )
    for again in (job(steps=2), job(steps=2, servers=3), job(steps=2, carrier="grpc")):
        assert plan_run(again, "id", resume=at).chunk_elems_of(Wide()) == 1 << 21  # type: ignore[arg-type]


def test_origins_say_by_what_the_choice_was_made() -> None:
    assert spread_out(job(), "listen").origins == {"chunk_elems": "listen"}
    assert spread_out(job(chunk_elems=64), "listen").origins == {}


@pytest.mark.parametrize("chunk_elems", [0, 65, MAX_CHUNK_ELEMS + 64])
def test_what_is_no_length_of_a_chunk_is_refused(chunk_elems: int) -> None:
    with pytest.raises(gs.errors.ConfigError, match=f"chunk_elems.*{chunk_elems}.*expected"):
        plan_run(job(chunk_elems=chunk_elems), "id")


@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_bits_do_not_depend_on_the_length_of_chunks(dtype: Literal["float32", "float64"]) -> None:
    """A vector of more than two of the longest chunks, updated on one shard and on three."""
    elems = 2 * MAX_CHUNK_ELEMS + 4097
    init = torch.linspace(-1, 1, elems, dtype=getattr(torch, dtype)).numpy()
    model = gs.from_functions(
        init=lambda seed: {"w": init.copy()},
        outputs=lambda p, x: x,
        gradients=lambda p, x, y: (0.0, {"w": p["w"] * x[0, 0]}),
        dtype=dtype,
    )
    data = gs.from_arrays(torch.tensor([[0.3], [0.7]]).numpy(), torch.zeros(2).numpy())
    given: dict[str, Any] = {"workers": 2, "batch_size": 1, "steps": 2, "optimizer": gs.optim.Adam(lr=0.01)}
    first = simulate(model, data, chunk_elems=CHUNK_ELEMS, **given).parameters["w"].tobytes()
    variants: list[dict[str, Any]] = [
        {"chunk_elems": MAX_CHUNK_ELEMS},
        {"chunk_elems": 1 << 21, "servers": 3},
    ]
    for variant in variants:
        assert simulate(model, data, **given, **variant).parameters["w"].tobytes() == first, variant
