"""Encoded sums of a group: nothing is lost in either way, and bytes do not grow with the workers in two steps."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

import gradstream as gs
from gradstream.codec.base import Codec, Encoder
from gradstream.codec.named import float4, int8, one_bit, sign, top_k
from gradstream.collectives.group import Group
from gradstream.memory import Vector
from gradstream.model.base import Layout
from gradstream.worker.group import coded_sums
from gradstream.worker.group.coded_sums import CodedSums
from gradstream.worker.unsent_state import UnsentState, codec_state
from kit.group_runs import VirtualRanks

C = gs.codecs
ROUNDS, ELEMS = 4, 1000
LAYOUT = Layout.of([("w", (ELEMS,))], torch.float32)
WITH_FEEDBACK: dict[str, Codec] = {
    "int8": int8(), "float4": float4(), "one-bit": one_bit(), "sign": sign(), "top-k": top_k(),
}  # fmt: skip


def given(size: int, number: int) -> torch.Tensor:
    """The gradients of all ranks in a round, (W, E)."""
    rng = np.random.default_rng(100 * size + number)
    return torch.from_numpy(rng.standard_normal((size, ELEMS)).astype("float32"))


async def summed(
    group: Group,
    codec: Codec,
    buckets: list[tuple[int, int]],
    rounds: int = ROUNDS,
    broken: int = -1,
    again: int = 0,
    elems: int = ELEMS,
) -> tuple[list[torch.Tensor], dict[str, torch.Tensor], int]:
    """The sums of some rounds, what the codec keeps, and the words that this rank has given to exchanges."""
    runtime = group._runtime  # type: ignore[attr-defined]
    unsent = UnsentState(runtime, LAYOUT, codec_state(codec))
    unsent.survive(codec_state(codec))
    kept = unsent.vectors
    encoder = Encoder(codec, torch.float32, f"0/{group.rank}", kept)
    sums = CodedSums(runtime, group, buckets, encoder, unsent, elems)
    vector, found, words = group.allocate(ELEMS, torch.float32, "gradient"), [], 0
    for number in range(rounds):
        vector.tensor.copy_(given(group.size, number)[group.rank])
        for start, stop in buckets[:again]:  # a death breaks the round after these buckets
            await sums.allreduce(vector[start:stop], weight=1 / group.size, step=number)
        vector.tensor.copy_(given(group.size, number)[group.rank])
        if (number, group.rank) == (broken, group.size - 1):
            vector.tensor[17] = float("inf")
        for start, stop in buckets:
            sent = await sums.allreduce(vector[start:stop], weight=1 / group.size, step=number)
            words += sum(map(len, sent))
        found.append(vector.tensor.clone())
    return found, {name: one.tensor.clone() for name, one in kept.items()}, words


@pytest.mark.parametrize("name", WITH_FEEDBACK)
@pytest.mark.parametrize("size", [1, 2, 3, 4, 7])
@pytest.mark.parametrize("buckets", [[(0, ELEMS)], [(0, 448), (448, ELEMS)]])
def test_what_was_sent_and_what_is_left_is_what_was_given(
    name: str, size: int, buckets: list[tuple[int, int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(coded_sums, "BLOCK_ELEMS", 256)
    codec = WITH_FEEDBACK[name]

    def missing() -> float:
        outcome = VirtualRanks(size).run(lambda group: summed(group, codec, buckets))
        for sums, _, _ in outcome:
            for mine, first in zip(sums, outcome[0][0], strict=True):
                assert torch.equal(mine, first)  # all have the same bits
        total = sum(given(size, number).mean(0) for number in range(ROUNDS))
        left = sum(kept["residual"] for _, kept, _ in outcome)
        return float((torch.stack(outcome[0][0]).sum(0) + left - total).abs().max())

    assert missing() < 1e-5
    encode = CodedSums._encode

    def forgetful(self: CodedSums, values: torch.Tensor, bucket: Any, number: int, sound: bool) -> None:
        """A planted fault: what this worker has left out of a slice is forgotten before the next encoding."""
        first = bucket.span.start + bucket.slices[number][0]
        for kept in self._encoder.kept(first, first + len(values)):
            kept.tensor.zero_()
        encode(self, values, bucket, number, sound)

    monkeypatch.setattr(CodedSums, "_encode", forgetful)
    assert missing() > 1e-2


@pytest.mark.parametrize("codec", [C.Cast(), C.QSGD(bits=8), int8(), float4()])
@pytest.mark.parametrize("size", [2, 3, 5])
def test_sums_are_near_those_of_the_numbers(codec: Codec, size: int) -> None:
    sums, _, _ = VirtualRanks(size).run(lambda group: summed(group, codec, [(0, ELEMS)], rounds=1))[0]
    exact = given(size, 0).mean(0)
    share = {"Cast": 0.01, "QSGD": 0.1}.get(type(codec).__name__, 0.5)
    assert torch.linalg.vector_norm(sums[0] - exact) < share * torch.linalg.vector_norm(exact)


def test_words_do_not_grow_with_the_workers_in_two_steps() -> None:
    def words(codec: Codec, size: int) -> int:
        outcome = VirtualRanks(size).run(lambda group: summed(group, codec, [(0, ELEMS)], rounds=1))
        return int(outcome[0][2])

    whole = words(int8(), 2)
    assert whole <= words(int8(), 4) <= whole + 4 * coded_sums.PART_WORDS
    assert words(top_k(), 4) == words(top_k(), 2)  # its own part, which goes to all


@pytest.mark.parametrize("name", ["int8", "top-k"])
@pytest.mark.parametrize("size", [2, 4])
def test_a_vector_that_is_not_finite_spoils_its_sum_alone(name: str, size: int) -> None:
    codec = WITH_FEEDBACK[name]
    outcome = VirtualRanks(size).run(lambda group: summed(group, codec, [(0, ELEMS)], broken=1))
    for sums, kept, _ in outcome:
        assert [bool(torch.isfinite(one).all()) for one in sums] == [True, False, True, True]
        assert torch.isnan(sums[1]).all()
        assert torch.isfinite(kept["residual"]).all()


def test_all_to_all_is_a_transposition() -> None:
    async def work(group: Any) -> list[float]:
        vector = Vector("v", torch.arange(64.0 * group.size) // 64 + 100 * group.rank)
        await group.all_to_all(vector.all)
        found: list[float] = vector.tensor[::64].tolist()
        return found

    for size in (1, 2, 3, 6):
        assert VirtualRanks(size).run(work) == [
            [100.0 * other + rank for other in range(size)] for rank in range(size)
        ]


def test_bytes_that_no_codec_makes_are_refused_with_a_name(monkeypatch: pytest.MonkeyPatch) -> None:
    def spoilt(self: Any, *arguments: Any, **options: Any) -> None:
        raise gs.errors.DataError("a block of another scale")

    monkeypatch.setattr(C.Blocks, "decode", spoilt)
    outcome = VirtualRanks(3).run(lambda group: summed(group, C.Blocks("int8"), [(0, ELEMS)], rounds=1))
    errors = [str(error) for error in outcome if isinstance(error, gs.errors.DataError)]
    assert errors and all("in step 0: a block of another scale" in error for error in errors)
    assert all(isinstance(error, gs.errors.GradstreamError) for error in outcome)


@pytest.mark.parametrize("name", WITH_FEEDBACK)
@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize("again", [1, 2])
def test_a_round_that_is_made_again_changes_nothing(name: str, size: int, again: int) -> None:
    codec, buckets = WITH_FEEDBACK[name], [(0, 448), (448, ELEMS)]
    once = VirtualRanks(size).run(lambda group: summed(group, codec, buckets))
    twice = VirtualRanks(size).run(lambda group: summed(group, codec, buckets, again=again))
    for (sums, kept, _), (same_sums, same_kept, _) in zip(once, twice, strict=True):
        assert all(torch.equal(one, other) for one, other in zip(sums, same_sums, strict=True))
        assert torch.equal(kept["residual"], same_kept["residual"])


@pytest.mark.parametrize("size", [1, 2, 3])
@pytest.mark.parametrize("exact", [1, 200, 552, 600])
def test_what_follows_the_gradients_is_summed_as_it_is(size: int, exact: int) -> None:
    codec, buckets = WITH_FEEDBACK["one-bit"], [(0, 448), (448, ELEMS)]
    outcome = VirtualRanks(size).run(lambda group: summed(group, codec, buckets, elems=ELEMS - exact))
    for sums, kept, _ in outcome:
        for number, one in enumerate(sums):
            mean = given(size, number).mean(0)
            torch.testing.assert_close(one[ELEMS - exact :], mean[ELEMS - exact :])
            assert not torch.allclose(one[: ELEMS - exact], mean[: ELEMS - exact])
        assert not kept["residual"][ELEMS - exact :].any()
