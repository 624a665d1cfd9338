"""Frames as bytes: protobuf reads what we write and the other way round; garbage is a FrameError."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from gradstream.errors import ConfigError
from gradstream.wire import frames, v1
from gradstream.wire.frames import (
    ABSENT,
    MAX_FRAME_BYTES,
    MAX_HEADER_BYTES,
    MAX_PAYLOAD_BYTES,
    FrameError,
    check_chunk,
    decode,
    encode,
    payload_tensor,
)

UINT32 = st.integers(0, 2**32 - 1)
HEADERS = st.one_of(
    st.builds(
        lambda index, sequence, flags: v1.Frame(
            chunk=v1.Chunk(index=index, sequence=sequence, elems=5, dtype=v1.FLOAT32, flags=flags)
        ),
        UINT32,
        st.integers(0, 2**64 - 1),
        UINT32,
    ),
    st.builds(lambda data: v1.Frame(body=v1.Body(data=data)), st.binary(max_size=300)),
    st.builds(lambda on: v1.Frame(waiting=v1.Waiting(on=on)), st.lists(st.text(max_size=9), max_size=3)),
    st.builds(lambda n: v1.Frame(credit=v1.Credit(frames=n)), UINT32),
    st.just(v1.Frame(end=v1.End())),
)


@given(HEADERS, st.binary(max_size=400))
def test_protobuf_reads_what_we_write(header: v1.Frame, payload: bytes) -> None:
    parsed = v1.Frame.FromString(encode(header, payload))
    assert parsed.payload == payload
    parsed.ClearField("payload")
    assert parsed == header


@given(HEADERS, st.binary(max_size=400))
def test_we_read_what_protobuf_writes(header: v1.Frame, payload: bytes) -> None:
    whole = v1.Frame()
    whole.CopyFrom(header)
    whole.payload = payload
    frame, view = decode(whole.SerializeToString())
    assert frame == header
    assert (b"" if view is None else bytes(view)) == payload


@given(HEADERS, st.binary(min_size=1, max_size=400))
def test_a_payload_that_comes_last_is_a_slice(header: v1.Frame, payload: bytes) -> None:
    data = encode(header, payload)
    _, view = decode(data)
    assert view is not None
    assert view.obj is data
    assert view.readonly


@given(HEADERS, st.binary(min_size=1, max_size=40), st.binary(min_size=1, max_size=40))
def test_fields_in_any_order_and_twice(header: v1.Frame, first: bytes, last: bytes) -> None:
    data = v1.Frame(payload=first).SerializeToString() + encode(header, last) + header.SerializeToString()
    frame, view = decode(data)
    expected = v1.Frame.FromString(data)
    assert view is not None
    assert bytes(view) == expected.payload == last
    expected.ClearField("payload")
    assert frame == expected


@given(st.binary(max_size=200))
def test_garbage(data: bytes) -> None:
    _decodes_like_protobuf(data)


@given(HEADERS, st.binary(max_size=60), st.data())
def test_damaged_frames(header: v1.Frame, payload: bytes, draw: st.DataObject) -> None:
    data = bytearray(encode(header, payload))
    for _ in range(draw.draw(st.integers(1, 4))):
        at = draw.draw(st.integers(0, len(data) - 1))
        data[at] = draw.draw(st.integers(0, 255))
    cut = draw.draw(st.integers(0, len(data)))
    _decodes_like_protobuf(bytes(data[:cut]))


def _decodes_like_protobuf(data: bytes) -> None:
    """Where protobuf parses a frame of a kind, so do we, to the same; where not, it is a FrameError."""
    try:
        expected = v1.Frame.FromString(data)
    except Exception:
        expected = v1.Frame()
    if expected.WhichOneof("kind") is None:
        with pytest.raises(FrameError):
            decode(data)
        return
    frame, view = decode(data)
    assert (b"" if view is None else bytes(view)) == expected.payload
    expected.ClearField("payload")
    assert frame.SerializeToString() == expected.SerializeToString()


def test_too_long_is_refused_before_parsing() -> None:
    with pytest.raises(FrameError, match=str(MAX_FRAME_BYTES)):
        decode(bytes(MAX_FRAME_BYTES + 1))


def test_a_header_has_a_limit_of_its_own() -> None:
    frame = v1.Frame(body=v1.Body(data=bytes(MAX_HEADER_BYTES)))
    with pytest.raises(FrameError, match=f"expected at most {MAX_HEADER_BYTES}"):
        decode(encode(frame))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_elements_come_back(dtype: torch.dtype) -> None:
    sent = torch.randn(33, dtype=dtype)
    chunk = v1.Chunk(index=1, elems=33, dtype=frames.to_wire(dtype))
    frame, view = decode(encode(v1.Frame(chunk=chunk), memoryview(sent.numpy()).cast("B")))  # type: ignore[arg-type]
    got = payload_tensor(frame.chunk, view)
    assert got is not None
    assert torch.equal(got, sent)


def test_absent_and_empty_chunks_differ() -> None:
    assert payload_tensor(v1.Chunk(elems=7, flags=ABSENT), None) is None
    empty = payload_tensor(v1.Chunk(elems=0, dtype=v1.FLOAT64), None)
    assert empty is not None
    assert (empty.numel(), empty.dtype) == (0, torch.float64)


@pytest.mark.parametrize(
    ("chunk", "payload_bytes"),
    [
        (v1.Chunk(elems=2, dtype=v1.FLOAT32), 4),
        (v1.Chunk(elems=2, dtype=v1.FLOAT64), 8),
        (v1.Chunk(elems=2, dtype=v1.DTYPE_UNSPECIFIED), 8),
        (v1.Chunk(elems=2, dtype=99), 8),  # type: ignore[arg-type]
        (v1.Chunk(elems=2, dtype=v1.FLOAT32), 0),
        (v1.Chunk(elems=2, dtype=v1.FLOAT32, flags=ABSENT), 8),
        (v1.Chunk(elems=MAX_PAYLOAD_BYTES // 4 + 1, dtype=v1.FLOAT32), MAX_PAYLOAD_BYTES + 4),
    ],
)
def test_chunks_that_lie(chunk: v1.Chunk, payload_bytes: int) -> None:
    with pytest.raises(FrameError):
        check_chunk(chunk, payload_bytes)


def test_dtypes_that_cannot_be_sent() -> None:
    with pytest.raises(ConfigError, match=r"int32.*float32 or torch.float64"):
        frames.to_wire(torch.int32)
    assert frames.from_wire(99) is None
    assert frames.itemsize_bytes(v1.FLOAT64) == 8
