"""Places in few bits: all that `ChunkTopK` can ask for come back, and bytes that are none are refused."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

import gradstream as gs
from gradstream.codec.chunked import Places
from gradstream.errors import DataError

CASES = [
    (1, 1), (4, 4), (4, 5), (4, 7), (4, 8), (8, 100), (12, 100), (64, 64), (64, 127), (64, 4096), (100, 4096),
    (4, 32768), (16384, 32768),
]  # fmt: skip


def drawn(k: int, length: int, rows: int, seed: int = 0) -> NDArray[np.int64]:
    rng = np.random.default_rng(seed)
    return np.sort(np.stack([rng.choice(length, k, replace=False) for _ in range(rows)]), axis=1)


@pytest.mark.parametrize(("k", "length"), CASES)
def test_places_come_back(k: int, length: int) -> None:
    places, rows = Places(k, length), 5
    first, last = np.arange(k), np.arange(length - k, length)
    given = np.concatenate((drawn(k, length, rows - 2), [first], [last]))
    into = np.full(rows * places.row_bytes, 0xA5, np.uint8)
    there = np.ones((rows, k), bool)
    places.write(given, there, into)
    came, are = places.read(into, rows)
    assert np.array_equal(came, given) and are.all()


@pytest.mark.parametrize(("k", "length"), CASES)
def test_a_row_may_have_fewer(k: int, length: int) -> None:
    places, rows = Places(k, length), 4
    given = drawn(k, length, rows)
    there = np.arange(k) < np.array([[0], [1], [k // 2], [k]])
    into = np.full(rows * places.row_bytes, 0xA5, np.uint8)
    places.write(given, there, into)
    came, are = places.read(into, rows)
    assert np.array_equal(are, there) and np.array_equal(came[there], given[there])


@pytest.mark.parametrize(("k", "length"), [(64, 4096), (8, 1024), (16, 4096), (100, 4096), (4, 32768)])
def test_they_take_little_more_than_they_must(k: int, length: int) -> None:
    """Elias's bound: within two bits of lg(length choose k) a place, and the bytes that are not full."""
    must = (math.lgamma(length + 1) - math.lgamma(k + 1) - math.lgamma(length - k + 1)) / math.log(2)
    assert must <= 8 * Places(k, length).row_bytes <= must + 0.6 * k + 16
    assert Places(k, length).row_bytes <= 2 * k


def test_bytes_that_have_other_numbers_of_places_are_refused() -> None:
    places = Places(64, 4096)
    into = np.empty(2 * places.row_bytes, np.uint8)
    places.write(drawn(64, 4096, 2), np.ones((2, 64), bool), into)
    into[2 * 48 :] = 255
    with pytest.raises(DataError, match="chunk 0 has 128 places; expected up to 64"):
        places.read(into, 2)


def test_places_that_do_not_increase_are_refused() -> None:
    places = Places(4, 64)
    into = np.empty(places.row_bytes, np.uint8)
    for wrong in ([3, 3, 9, 10], [5, 4, 9, 10]):
        places.write(np.array([wrong]), np.ones((1, 4), bool), into)
        with pytest.raises(DataError, match="not increasing numbers from 0 to 63"):
            places.read(into, 1)


def test_places_beyond_the_row_are_refused() -> None:
    wide, narrow = Places(4, 127), Places(4, 101)
    assert (narrow.low_bits, narrow.row_bytes) == (wide.low_bits, wide.row_bytes)
    into = np.empty(wide.row_bytes, np.uint8)
    wide.write(np.array([[1, 2, 3, 101]]), np.ones((1, 4), bool), into)
    with pytest.raises(DataError, match="from 0 to 100"):
        narrow.read(into, 1)


# ---- the codec --------------------------------------------------------------------------------


@pytest.mark.parametrize("elems", [1, 63, 4095, 4096, 4097, 70_000])
@pytest.mark.parametrize("kind", ["normal", "zeros", "constant", "few", "small integers"])
def test_the_codec_sends_as_large_numbers_as_topk_finds(elems: int, kind: str) -> None:
    """Equal numbers, and chunks with fewer than k that are not zero, among them."""
    generator = torch.Generator().manual_seed(elems)
    tensor = torch.randn(elems, generator=generator)
    if kind == "zeros":
        tensor.zero_()
    elif kind == "constant":
        tensor.fill_(-2.0)
    elif kind == "few":
        tensor[torch.rand(elems, generator=generator) > 0.005] = 0.0
    elif kind == "small integers":
        tensor = torch.randint(-3, 4, (elems,), generator=generator).float()
    codec = gs.codecs.ChunkTopK()
    encoded = torch.empty(codec.encoded_bytes(elems), dtype=torch.uint8)
    codec.encode(tensor, encoded)
    places, values = codec.entries(encoded, elems)
    decoded = torch.full((elems,), math.nan)
    codec.decode(encoded, decoded)
    assert torch.equal(decoded, torch.zeros(elems).index_put((places,), values))
    for start in range(0, elems, 4096):
        chunk = tensor[start : start + 4096]
        inside = places[(places >= start) & (places < start + 4096)] - start
        largest = torch.topk(chunk.abs(), min(64, len(chunk))).values
        expected = largest[largest > largest[0] / 6]
        assert torch.equal(chunk.abs()[inside].sort(descending=True).values, expected)
        assert float(decoded[start : start + 4096].abs().max()) == float(chunk.abs().max())


def test_it_is_nearer_than_nothing_is() -> None:
    """A contraction: each number is at most as far from what is sent for it as from 0."""
    outlier = 1e-6 * torch.randn(4096, generator=torch.Generator().manual_seed(0))
    outlier[7] = 1.0
    for tensor in (outlier, torch.tensor([1.0, 0, 0, 0, 0]), torch.tensor([3.4e38, -1e38, 1.0])):
        codec = gs.codecs.ChunkTopK()
        encoded, decoded = (
            torch.empty(codec.encoded_bytes(len(tensor)), dtype=torch.uint8),
            torch.empty_like(tensor),
        )
        codec.encode(tensor, encoded)
        codec.decode(encoded, decoded)
        assert ((tensor - decoded).abs() <= tensor.abs()).all()
        assert decoded.abs().max() == tensor.abs().max()


def test_no_elements_are_no_bytes_and_other_sizes_are_refused() -> None:
    codec, nothing = gs.codecs.ChunkTopK(), torch.empty(0)
    encoded = torch.empty(codec.encoded_bytes(0), dtype=torch.uint8)
    codec.encode(nothing, encoded)
    codec.decode(encoded, nothing)
    with pytest.raises(DataError, match="0 bytes for 4096 elements; expected 84"):
        codec.decode(encoded, torch.empty(4096))
