"""Codecs: sizes, what is lost, and that nothing is lost with error feedback."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch

import gradstream as gs
from gradstream.codec.base import Codec, pack, packed_bytes, unpack
from gradstream.codec.sparse import SAMPLE, largest
from gradstream.errors import ConfigError, DataError

C = gs.codecs
SIZES = [1, 2, 7, 8, 9, 255, 256, 257, 1000, 4096, 70_000]

PLAIN: list[Any] = [
    pytest.param(codec, id=str(codec).replace("codec=", ""))
    for codec in (
        C.Cast(), C.Cast("float16"), C.Blocks(), C.Blocks("int4"), C.Blocks("float4", block=64),
        C.TopK(0.01), C.TopK(0.3), C.RandomK(0.1), C.RandomK(0.1, scaled=True),
        C.ChunkTopK(), C.ChunkTopK(k=8, chunk=100), C.DCT(), C.DCT(k=16, chunk=40),
        C.QSGD(), C.QSGD(bits=2, bucket=64), C.QSGD(bits=8), C.Sign(), C.Sign(block=64, two_means=True),
    )
]  # fmt: skip


def normal(elems: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(elems, generator=torch.Generator().manual_seed(seed))


def state_of(codec: Codec, elems: int) -> dict[str, torch.Tensor]:
    return {name: torch.zeros(elems) for name in codec.state_names}


def sent(
    codec: Codec, tensor: torch.Tensor, state: dict[str, torch.Tensor] | None = None, seed: int = 0
) -> torch.Tensor:
    """What arrives. The memory around what the codec may write stays as it is."""
    size = codec.encoded_bytes(len(tensor))
    room = torch.full((size + 16,), 0xA5, dtype=torch.uint8)
    before = tensor.clone()
    codec.encode(tensor, room[8 : 8 + size], state or {}, seed=seed)
    assert torch.equal(tensor, before)
    assert (room[:8] == 0xA5).all() and (room[8 + size :] == 0xA5).all()
    into = torch.full((len(tensor),), math.nan)
    codec.decode(room[8 : 8 + size].clone(), into)
    assert torch.isfinite(into).all()
    return into


# ---- sizes ------------------------------------------------------------------------------------


@pytest.mark.parametrize("codec", PLAIN)
@pytest.mark.parametrize("elems", SIZES)
def test_any_size_comes_back_and_zeros_stay_zeros(codec: Codec, elems: int) -> None:
    tensor = normal(elems)
    came = sent(codec, tensor)
    assert float(came.norm()) <= 3 * float(tensor.norm()) * (1 if not codec.unbiased else math.sqrt(elems))
    assert not sent(codec, torch.zeros(elems)).any()


@pytest.mark.parametrize("codec", PLAIN)
def test_a_tensor_without_elements_comes_back(codec: Codec) -> None:
    assert sent(codec, normal(0)).shape == (0,)


def test_feedback_is_dense_where_its_codec_says_so() -> None:
    assert C.ErrorFeedback(C.Sign()).dense and not C.ErrorFeedback(C.TopK()).dense
    assert not C.ErrorFeedback(C.RandomK()).dense  # which says nothing, as a codec of your own may


N = 1 << 16


@pytest.mark.parametrize(
    ("codec", "size"),
    [
        (C.Cast(), 2 * N), (C.Blocks("int8", block=256), N + 4 * N // 256), (C.Blocks("int4"), N // 2 + 4 * N // 256),
        (C.TopK(0.01), 8 * math.ceil(0.01 * N)), (C.DGC(0.001), 8 * math.ceil(0.001 * N)),
        (C.ChunkTopK(), N // 4096 * (64 * (8 + 2) // 8 + 4)), (C.DCT(), 5 * 4 * N // 64),
        (C.QSGD(bits=4, bucket=512), 4 * N // 8 + 4 * N // 512), (C.Sign(), N // 8 + 4),
        (C.Sign(block=256, two_means=True), N // 8 + 8 * (N // 256)), (C.RandomK(0.01), 4 * math.ceil(0.01 * N) + 8),
        (C.ErrorFeedback(C.Sign()), N // 8 + 4), (C.EF21(C.TopK(0.01)), 8 * math.ceil(0.01 * N)),
    ],
    ids=str,
)  # fmt: skip
def test_sizes_are_those_of_the_papers(codec: Codec, size: int) -> None:
    assert codec.encoded_bytes(N) == size


@pytest.mark.parametrize("bits", [1, 2, 4, 8])
@pytest.mark.parametrize("elems", [0, 1, 3, 8, 13])
def test_small_numbers_are_packed(bits: int, elems: int) -> None:
    codes = torch.randint(1 << bits, (elems,), dtype=torch.uint8, generator=torch.Generator().manual_seed(1))
    into = torch.full((packed_bytes(elems, bits),), 255, dtype=torch.uint8)
    pack(codes, bits, into)
    assert torch.equal(unpack(into, bits, elems), codes)
    if elems:
        assert into[0] & ((1 << bits) - 1) == codes[0]  # the first in the lowest bits


# ---- what is lost -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("codec", "share"),
    [(C.Cast(), 2**-8), (C.Cast("float16"), 2**-10), (C.Blocks("int8"), 1 / 254), (C.Blocks("int4"), 1 / 14)],
    ids=str,
)
def test_errors_are_those_that_the_docstrings_say(codec: Codec, share: float) -> None:
    tensor = normal(70_001)
    error = (sent(codec, tensor) - tensor).abs()
    if isinstance(codec, C.Blocks):
        blocks = torch.nn.functional.pad(tensor.abs(), (0, -len(tensor) % 256)).view(-1, 256)
        limit = blocks.amax(1).repeat_interleave(256)[: len(tensor)] * share
    else:
        limit = tensor.abs() * share + 1e-7
    assert (error <= limit * (1 + 1e-5)).all()
    assert (error > limit / 3).any()  # and no smaller


def test_float4_takes_the_nearest_of_its_numbers() -> None:
    numbers = np.array([0.0, *(2.0**-k for k in range(6, -1, -1))], np.float32)
    numbers = np.concatenate((numbers, -numbers))
    tensor = torch.rand(256, generator=torch.Generator().manual_seed(2)) * 2 - 1
    tensor[0] = 1.0  # the scale
    nearest = numbers[np.abs(tensor.numpy()[:, None] - numbers).argmin(1)]
    nearest[np.abs(tensor.numpy()) < 3 / 256] = 0
    assert np.array_equal(sent(C.Blocks("float4", block=256), tensor).numpy(), nearest)


def test_chunks_send_their_largest_by_two_bits() -> None:
    """Beside NumPy. The paper's places take 12 bits; here 8."""
    tensor = normal(300)
    came = sent(C.ChunkTopK(k=8, chunk=100), tensor).numpy().reshape(3, 100)
    for row, chunk in zip(came, tensor.numpy().reshape(3, 100), strict=True):
        kept = np.argsort(-np.abs(chunk))[:8]
        most = np.abs(chunk).max()
        assert set(np.flatnonzero(row)) == set(kept)
        levels = np.array([-most, -most / 3, most / 3, most])
        nearest = levels[np.abs(chunk[kept][:, None] - levels).argmin(1)]
        assert np.allclose(row[kept], nearest, rtol=1e-6)


def test_all_coefficients_are_the_tensor_and_a_smooth_one_needs_few() -> None:
    tensor = normal(256)
    assert torch.allclose(sent(C.DCT(k=64, chunk=64), tensor), tensor, atol=1e-5)
    smooth = torch.sin(torch.arange(256) / 20)
    assert float((sent(C.DCT(k=8), smooth) - smooth).norm()) < 0.05 * float(smooth.norm())
    assert float((sent(C.TopK(8 / 64), smooth) - smooth).norm()) > 0.5 * float(smooth.norm())


@pytest.mark.parametrize("codec", [C.TopK(1.0), C.RandomK(1.0), C.ErrorFeedback(C.TopK(1.0))], ids=str)
def test_all_numbers_are_the_tensor_itself(codec: Codec) -> None:
    tensor = normal(1000)
    assert torch.equal(sent(codec, tensor, state_of(codec, 1000)), tensor)


def test_many_levels_are_nearly_the_tensor() -> None:
    tensor = normal(512)
    assert float((sent(C.QSGD(bits=8), tensor) - tensor).abs().max()) <= float(tensor.norm()) / 127


@pytest.mark.parametrize("elems", [100, SAMPLE, 3 * SAMPLE, 300_000])
@pytest.mark.parametrize("k", [1, 10, 300, 20_000])
@pytest.mark.parametrize("kind", ["normal", "heavy", "constant", "one", "periodic"])
def test_the_largest_are_the_largest(elems: int, k: int, kind: str) -> None:
    k, tensor = min(k, elems), normal(elems)
    if kind == "heavy":
        tensor = tensor**9
    elif kind == "constant":
        tensor = torch.ones(elems)
    elif kind == "one":
        tensor = torch.zeros(elems)
        tensor[elems // 2] = -1.0
    elif kind == "periodic":  # the sample sees but one of them
        tensor[:: max(1, elems // SAMPLE)] *= 1e3
    places = largest(tensor, k)
    assert len(set(places.tolist())) == k and torch.equal(places, places.sort().values)
    chosen = tensor.abs()[places].sort(descending=True).values
    assert torch.equal(chosen, torch.topk(tensor.abs(), k).values)


# ---- means over seeds ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "codec", [C.QSGD(bits=2, bucket=8), C.QSGD(bits=4, bucket=8), C.RandomK(0.25, scaled=True)]
)
def test_the_mean_is_the_tensor_and_the_variance_within_its_bound(codec: Codec) -> None:
    """Of 1e5 draws: within five standard errors."""
    tensor, draws = normal(8, seed=3), 100_000
    assert codec.unbiased
    if isinstance(codec, C.QSGD):
        came = sent(codec, tensor.repeat(draws)).view(draws, 8)
    else:
        came = torch.stack([sent(codec, tensor, seed=seed) for seed in range(10_000)])
    error = came.double().mean(0) - tensor
    assert (error.abs() <= 5 * came.double().std(0) / math.sqrt(len(came)) + 1e-7).all()
    if isinstance(codec, C.QSGD):
        variance = float(came.double().var(0).sum())
        bound = min(8 / codec.levels**2, math.sqrt(8) / codec.levels) * float(tensor.double().norm()) ** 2
        assert bound / 20 < variance <= bound


def test_rounding_to_the_nearest_level_is_seen_as_biased(monkeypatch: pytest.MonkeyPatch) -> None:
    class Nearest:
        def __init__(self, bits: object) -> None:
            pass

        def integers(self, most: int, size: Any, dtype: Any) -> Any:
            return np.full(size, most // 2, dtype)

    monkeypatch.setattr(np.random, "Generator", Nearest)
    with pytest.raises(AssertionError):
        test_the_mean_is_the_tensor_and_the_variance_within_its_bound(C.QSGD(bits=4, bucket=8))


@pytest.mark.parametrize("scale", [1e30, 3e38, 1e-25, 1e-32])
@pytest.mark.parametrize("bits", [2, 4, 8])
def test_a_norm_whose_squares_float32_does_not_hold(scale: float, bits: int) -> None:
    codec = C.QSGD(bits=bits, bucket=8)
    numbers = torch.tensor([1.0, -1.0, 0.5, 0.0, 0.25, -0.5, 1.0, 0.0]).repeat(4)
    whole = sent(codec, numbers * scale) / scale
    assert torch.isfinite(whole).all()
    assert float((whole - numbers).abs().max()) <= float(numbers[:8].norm()) / codec.levels * 1.001
    assert not sent(codec, numbers * 1e-40).any()  # nor a NaN below


def test_equal_seeds_have_equal_places_whose_sums_are_sums() -> None:
    codec, one, two = C.RandomK(0.2), normal(100, 1), normal(100, 2)
    assert torch.equal(sent(codec, one, seed=5) + sent(codec, two, seed=5), sent(codec, one + two, seed=5))
    assert not torch.equal(sent(codec, one, seed=5) != 0, sent(codec, one, seed=6) != 0)
    assert torch.equal(sent(codec, one, seed=1 << 40), sent(codec, one, seed=1 << 40))


# ---- error feedback ---------------------------------------------------------------------------------

FAMILY = [pytest.param(one.values[0], id=one.id) for one in PLAIN if not one.values[0].unbiased]


def check_nothing_is_lost(codec: Codec, steps: int = 30, elems: int = 1000) -> None:
    """Σ sent + remainder = Σ gradients, to 1e-6 of their size."""
    state, total, came = state_of(codec, elems), torch.zeros(elems).double(), torch.zeros(elems).double()
    for step in range(steps):
        gradient = normal(elems, seed=step)
        total += gradient
        came += sent(codec, gradient, state, seed=step)
    assert float((came + state["residual"] - total).abs().max()) <= 1e-6 * float(total.abs().max()) * steps


@pytest.mark.parametrize("codec", FAMILY)
def test_nothing_is_lost_with_error_feedback(codec: Codec) -> None:
    check_nothing_is_lost(C.ErrorFeedback(codec))


def test_a_remainder_of_what_was_not_rounded_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """As if it was taken before the rounding to the numbers that travel."""

    def without_rounding(codec: Any, encoded: torch.Tensor, into: torch.Tensor) -> None:
        into.copy_(latest[-1])

    latest: list[torch.Tensor] = []
    real_encode, real_decode = C.Cast.encode, C.Cast.decode

    def encode(codec: Any, tensor: torch.Tensor, *arguments: Any, **options: Any) -> None:
        latest.append(tensor.clone())
        real_encode(codec, tensor, *arguments, **options)

    def decode(codec: Any, encoded: torch.Tensor, into: torch.Tensor) -> None:
        (without_rounding if latest else real_decode)(codec, encoded, into)
        latest.clear()

    monkeypatch.setattr(C.Cast, "encode", encode)
    monkeypatch.setattr(C.Cast, "decode", decode)
    with pytest.raises(AssertionError):
        check_nothing_is_lost(C.ErrorFeedback(C.Cast()))


def test_a_codec_without_feedback_loses_what_it_leaves_out() -> None:
    with pytest.raises(AssertionError):
        check_nothing_is_lost(C.ErrorFeedback(C.TopK(0.01), decay=0.0))


def test_momentum_correction_is_momentum_where_everything_is_sent() -> None:
    codec, state, velocity = C.DGC(density=1.0, momentum=0.9), state_of(C.DGC(), 50), torch.zeros(50)
    for step in range(4):
        gradient = normal(50, seed=step)
        velocity = gradient  # factor masking: what was sent has no momentum left
        assert torch.equal(sent(codec, gradient, state), velocity)


def twin(gradients: list[np.ndarray[Any, Any]], k: int, m: float, *, masks: bool = True) -> list[Any]:
    """DGC in NumPy."""
    u, v, out = np.zeros_like(gradients[0]), np.zeros_like(gradients[0]), []
    for g in gradients:
        u = m * u + g
        v = v + u
        mask = np.zeros(len(g), bool)
        mask[np.argsort(-np.abs(v))[:k]] = True
        out.append(np.where(mask, v, 0))
        v = np.where(mask, 0, v)
        u = np.where(mask & masks, 0, u)
    return out


def test_deep_gradient_compression_is_its_twin_in_numpy() -> None:
    gradients = [normal(200, seed=step) for step in range(12)]
    codec, state = C.DGC(density=0.05, momentum=0.8), state_of(C.DGC(), 200)
    came = [sent(codec, gradient, state).numpy() for gradient in gradients]
    plain = [gradient.numpy() for gradient in gradients]
    assert all(np.allclose(a, b, atol=1e-5) for a, b in zip(came, twin(plain, 10, 0.8), strict=True))
    unmasked = twin(plain, 10, 0.8, masks=False)
    assert not all(np.allclose(a, b, atol=1e-5) for a, b in zip(came, unmasked, strict=True))


# ---- least squares of workers that differ ------------------------------------------------------------


def distance(
    codec: Codec, *, workers: int = 4, elems: int = 20, steps: int = 8000, lr: float = 0.02
) -> float:
    """From the minimum, after gradient descent by the mean of what full gradients of different workers become.

    Each worker has 30 samples of its own, and a minimum of its own.
    """
    rng = np.random.default_rng(0)
    inputs = [rng.standard_normal((30, elems)) for _ in range(workers)]
    targets = [x @ rng.standard_normal(elems) * 2 for x in inputs]
    hessians = torch.tensor(np.mean([x.T @ x / 30 for x in inputs], axis=0))
    linear = torch.tensor(np.mean([x.T @ y / 30 for x, y in zip(inputs, targets, strict=True)], axis=0))
    best = torch.linalg.solve(hessians, linear)
    each = [
        (torch.tensor(x.T @ x / 30), torch.tensor(x.T @ y / 30)) for x, y in zip(inputs, targets, strict=True)
    ]
    weights = torch.zeros(elems, dtype=torch.float64)
    states = [state_of(codec, elems) for _ in each]
    room, into = torch.empty(codec.encoded_bytes(elems), dtype=torch.uint8), torch.empty(elems)
    known = [torch.zeros(elems) for _ in each]
    for _ in range(steps):
        total = torch.zeros(elems)
        for (a, b), state, h in zip(each, states, known, strict=True):
            codec.encode((a @ weights - b).float(), room, state)
            if isinstance(codec, C.EF21):
                codec.decode(room, h)
                total += h
            else:
                codec.decode(room, into)
                total += into
        weights -= lr / workers * total.double()
    return float((weights - best).norm())


def test_where_workers_differ_feedback_is_better_than_none_and_ef21_than_feedback() -> None:
    none, feedback, ef21 = (
        distance(codec) for codec in (C.TopK(0.1), C.ErrorFeedback(C.TopK(0.1)), C.EF21(C.TopK(0.1)))
    )
    assert none > 5 * feedback
    assert feedback > 100 * ef21  # limited by float32
    assert ef21 < 1e-4


# ---- bad input -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (lambda: C.TopK(0.0), r"density is 0.0; expected a share of the elements in \(0, 1\]"),
        (lambda: C.RandomK(2), "density is 2"),
        (lambda: C.Blocks("int5"),  # type: ignore[arg-type]
         "kind is 'int5'; expected 'int8', 'int4', 'float4'"),
        (lambda: C.Blocks(block=100), "block is 100; expected a power of 2"),
        (lambda: C.QSGD(bits=3), "bits is 3"),
        (lambda: C.QSGD(bucket=9), "bucket is 9"),
        (lambda: C.Sign(block=0), "block is 0"),
        (lambda: C.Sign(block=12), "block is 12"),
        (lambda: C.Cast("float8"), "dtype is 'float8'"),
        (lambda: C.DGC(momentum=1.0), "momentum is 1.0"),
        (lambda: C.ChunkTopK(k=5), "k is 5"),
        (lambda: C.ChunkTopK(k=64, chunk=32), "chunk is 32"),
        (lambda: C.ChunkTopK(k=4.0),  # type: ignore[arg-type]
         "k=4.0, chunk=4096; expected whole numbers"),
        (lambda: C.DCT(chunk=512), "chunk is 512"),
        (lambda: C.ErrorFeedback(C.DGC()), "DGC keeps what it leaves out already"),
        (lambda: C.EF21(C.ErrorFeedback(C.TopK())), "keeps what it leaves out"),
        (lambda: C.ErrorFeedback(C.TopK(), decay=1.5), "decay is 1.5"),
    ],
)  # fmt: skip
def test_options_out_of_their_range_are_refused(make: Any, says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        make()


def test_places_from_the_network_are_checked() -> None:
    codec, into = C.TopK(0.1), torch.zeros(100)
    encoded = torch.zeros(codec.encoded_bytes(100), dtype=torch.uint8)
    encoded[:4].view(torch.int32)[0] = 100
    with pytest.raises(DataError, match="an element at 100; expected places from 0 to 99"):
        codec.decode(encoded, into)
    encoded[:4].view(torch.int32)[0] = -1
    with pytest.raises(DataError, match="at -1"):
        codec.decode(encoded, into)
    seed = torch.zeros(C.RandomK(0.1).encoded_bytes(100), dtype=torch.uint8)
    seed[:4].view(torch.int32)[0] = -5
    with pytest.raises(DataError, match="seed"):
        C.RandomK(0.1).decode(seed, into)


@pytest.mark.parametrize("codec", PLAIN)
def test_no_bytes_from_the_network_bring_a_decoder_down(codec: Codec) -> None:
    generator = torch.Generator().manual_seed(7)
    for elems in (1, 100, 1000):
        size, into = codec.encoded_bytes(elems), torch.zeros(elems)
        for _ in range(20):
            try:
                codec.decode(torch.randint(256, (size,), dtype=torch.uint8, generator=generator), into)
            except DataError:
                pass
