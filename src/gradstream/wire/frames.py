"""Frames as bytes: one copy when written, none when read. Checksums, and the numbers of received messages.

A frame is a `v1.Frame`; its payload is field 15, the highest number, so it comes last::

    [ kind field: tag, length, message ] [ 0x7a, varint length, payload bytes ]

If the connection needs a checksum, it precedes everything that it covers, as field 13.

Every protobuf library writes and parses this layout. `encode` appends the payload to the serialised header by
a single join. `decode` walks the outermost tags and returns the payload as a slice of the received message; it
leaves a message of any other layout to the protobuf parser.
"""

from __future__ import annotations

import struct
import sys
import warnings
from typing import Self

import torch
import xxhash
from google.protobuf.message import DecodeError

from gradstream.errors import ConfigError, GradstreamError
from gradstream.wire import v1

# ---- dtypes ------------------------------------------------------------------------------
# Element types on the wire: little-endian IEEE 754, as torch holds them on this machine.

if sys.byteorder != "little":  # payloads are sent as they lie in memory
    raise ImportError("gradstream's wire format needs a little-endian machine")

_TO_WIRE: dict[torch.dtype, v1.DType] = {torch.float32: v1.FLOAT32, torch.float64: v1.FLOAT64}
_FROM_WIRE: dict[int, torch.dtype] = {int(wire): dtype for dtype, wire in _TO_WIRE.items()}


def to_wire(dtype: torch.dtype) -> v1.DType:
    """The wire value of a torch dtype.

    Raises:
        ConfigError: vectors of this dtype cannot be exchanged.
    """
    wire = _TO_WIRE.get(dtype)
    if wire is None:
        known = " or ".join(str(d) for d in _TO_WIRE)
        raise ConfigError(
            f"a vector of dtype {dtype} cannot be sent; expected {known}: convert it with Tensor.to"
        )
    return wire


def from_wire(wire: int) -> torch.dtype | None:
    """The torch dtype of a wire value; None for an unknown value."""
    return _FROM_WIRE.get(wire)


def itemsize_bytes(wire: int) -> int:
    """Bytes per element of a wire dtype; 0 for an unknown value."""
    dtype = _FROM_WIRE.get(wire)
    return dtype.itemsize if dtype is not None else 0


# ---- checksum ----------------------------------------------------------------------------
# Checksums of data on a connection that nothing else guards: neither TLS, nor the memory of one machine.
#
# TCP's checksum has 16 bits, and network cards and switches compute it anew: damage that happens in them, or in two
# places at once, gets past it (Stone and Partridge, 2000). XXH3 (Collet, 2020) has 64 bits and hashes faster than
# memory is copied. It finds damage by accident; it is no protection against an attacker.

CHECKSUM = struct.Struct("<Q")
"""A checksum as bytes."""


def checksum(*parts: bytes | bytearray | memoryview, seed: int = 0) -> int:
    """The checksum of all parts, one after the other.

    Args:
        parts: contiguous bytes, which are not copied.
        seed: another seed gives another checksum: bytes that belong elsewhere do not pass.
    """
    if len(parts) == 1:
        return xxhash.xxh3_64_intdigest(parts[0], seed)
    state = xxhash.xxh3_64(seed=seed)
    for part in parts:
        state.update(part)
    return state.intdigest()


# ---- frames ------------------------------------------------------------------------------

PROTOCOL = 1
"""Version of the wire protocol, `v1.proto`. Nodes with another version refuse each other's streams."""

ABSENT = 1
"""Bit of `Chunk.flags`: the sender contributes nothing to this chunk, and no payload follows."""

CODED = 2
"""Bit of `Chunk.flags`: the payload is the chunk as the run's codec encodes it, filled up with zeros to whole words."""

MAX_PAYLOAD_BYTES = 32 << 20
"""The most bytes of elements in one chunk, over any carrier: 4 Mi elements of float64.

The chunk map of a run defines the length of its chunks."""

MAX_HEADER_BYTES = 5 << 20
"""The most bytes of one frame apart from its payload."""

MAX_FRAME_BYTES = MAX_PAYLOAD_BYTES + (64 << 10)
"""The most bytes of one frame: a full payload and its header."""

_PAYLOAD_TAG = 15 << 3 | 2
_LAST_KIND_TAG = 9 << 3 | 2
_CHECKSUM_TAG = bytes([13 << 3 | 1])
SEAL_BYTES = len(_CHECKSUM_TAG) + CHECKSUM.size
"""Length of the checksum's field."""

with warnings.catch_warnings():
    # Received payloads are read-only on purpose. Torch warns of the first such tensor of a process: this one.
    warnings.simplefilter("ignore")
    torch.frombuffer(bytes(4), dtype=torch.float32)


class FrameError(GradstreamError, ValueError):
    """A peer sent bytes that are no valid frame (see `v1.proto`). The receiver closes the stream."""


class DamagedError(FrameError):
    """Bytes have changed on their way. The receiver drops the connection, and the sender tries again.

    Args:
        size_bytes: number of bytes whose checksum is wrong.
    """

    def __init__(self, size_bytes: int) -> None:
        super().__init__(f"{size_bytes} bytes with a wrong checksum: they were damaged on their way")
        self.size_bytes = size_bytes


def verify(data: bytes | bytearray | memoryview, expected: int, seed: int = 0) -> None:
    """Raises DamagedError unless the bytes have the expected checksum."""
    if checksum(data, seed=seed) != expected:
        raise DamagedError(memoryview(data).nbytes)


def _varint(value: int) -> bytes:
    out = bytearray()
    while value > 0x7F:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    out.append(value)
    return bytes(out)


def encode(frame: v1.Frame, payload: bytes | memoryview | None = None, *, seed: int | None = None) -> bytes:
    """Serialises a frame; the payload's bytes are copied once.

    Args:
        frame: the header; its `payload` field must be empty.
        payload: contiguous bytes; a peer accepts at most `MAX_PAYLOAD_BYTES`.
        seed: seed of the frame's checksum; None leaves the checksum out.
    """
    header = frame.SerializeToString()
    if payload is None or not (view := memoryview(payload)).nbytes:
        return header if seed is None else seal(header, seed=seed)
    header += b"\x7a" + _varint(view.nbytes)
    return b"".join((header, view)) if seed is None else seal(header, view, seed=seed)


def seal(*parts: bytes | memoryview, seed: int) -> bytes:
    """A message with its checksum before it. Copies all parts once."""
    return b"".join((_CHECKSUM_TAG, CHECKSUM.pack(checksum(*parts, seed=seed)), *parts))


def unseal(data: bytes, *, seed: int, required: bool = False) -> int:
    """Checks the checksum of a message that has one, and returns where the message begins.

    Raises:
        DamagedError: the checksum is wrong, or missing where it is `required`.
    """
    if data[:1] == _CHECKSUM_TAG and len(data) >= SEAL_BYTES:
        verify(memoryview(data)[SEAL_BYTES:], CHECKSUM.unpack_from(data, 1)[0], seed)
        return SEAL_BYTES
    if required:
        raise DamagedError(len(data))
    return 0


def decode(data: bytes, *, seed: int = 0, checked: bool = False) -> tuple[v1.Frame, memoryview | None]:
    """Parses a frame into its header and its payload. Copies the payload only where it does not come last.

    Args:
        data: the bytes of the frame.
        seed: seed of the frame's checksum, if it has one.
        checked: the frame must have a checksum.

    Returns:
        The frame with an empty `payload` field, and the payload as a read-only view that keeps
        `data` alive; None if there is none.

    Raises:
        DamagedError: the checksum is wrong, or missing.
        FrameError: the bytes are no frame, have no kind, are longer than `MAX_FRAME_BYTES`, or are longer
            than `MAX_HEADER_BYTES` without a payload at their end. No other exception.
    """
    if len(data) > MAX_FRAME_BYTES:
        raise FrameError(f"a frame of {len(data)} bytes: expected at most {MAX_FRAME_BYTES}")
    begin = unseal(data, seed=seed, required=checked)
    header_bytes, start = _layout(data, begin)
    if header_bytes > MAX_HEADER_BYTES:
        raise FrameError(
            f"a frame of {header_bytes} bytes before its payload: expected at most {MAX_HEADER_BYTES}"
        )
    try:
        frame = v1.Frame.FromString(data[begin:header_bytes])
    except DecodeError as error:
        raise FrameError(f"{len(data)} bytes that are no gradstream.v1.Frame: {error}") from None
    if frame.WhichOneof("kind") is None:
        raise FrameError(f"a frame of {len(data)} bytes without a kind: expected one of open ... end")
    if start < len(data):
        return frame, memoryview(data)[start:]
    if frame.payload:  # not last, or sent twice: the parser has copied it
        view = memoryview(frame.payload)
        frame.ClearField("payload")
        return frame, view
    return frame, None


def _layout(data: bytes, at: int) -> tuple[int, int]:
    """The end of the header and the start of the payload; (len, len) leaves all bytes to the parser."""
    size = len(data)
    while at < size:
        tag = data[at]
        length, start = _length(data, at + 1)
        if tag == _PAYLOAD_TAG and start + length == size and length:
            return at, start
        if tag > _LAST_KIND_TAG or tag & 7 != 2 or start + length > size:
            break
        at = start + length
    return size, size


def _length(data: bytes, at: int) -> tuple[int, int]:
    """A varint of at most 5 bytes and the position after it; more than the data holds if there is none."""
    value = 0
    for shift in range(0, 35, 7):
        if at >= len(data):
            break
        byte = data[at]
        at += 1
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            return value, at
    return len(data) + 1, at


def check_chunk(chunk: v1.Chunk, payload_bytes: int) -> None:
    """Checks that a chunk's payload agrees with its header, and is within bounds.

    Raises:
        FrameError: unknown dtype, a payload of another length, more than `MAX_PAYLOAD_BYTES`,
            or a payload with a chunk flagged absent.
    """
    if payload_bytes > MAX_PAYLOAD_BYTES:
        raise FrameError(
            f"chunk {chunk.index} has {payload_bytes} bytes of payload: expected at most {MAX_PAYLOAD_BYTES}"
        )
    if chunk.flags & ABSENT:
        expected = 0
    else:
        itemsize = itemsize_bytes(chunk.dtype)
        if not itemsize:
            raise FrameError(f"chunk {chunk.index} has dtype {chunk.dtype}: expected FLOAT32 or FLOAT64")
        expected = chunk.elems * itemsize
    if payload_bytes != expected:
        raise FrameError(
            f"chunk {chunk.index} has {payload_bytes} bytes of payload: expected {expected} "
            f"({chunk.elems} elements, dtype {chunk.dtype}, flags {chunk.flags})"
        )


def payload_tensor(chunk: v1.Chunk, payload: memoryview | None) -> torch.Tensor | None:
    """Checks a chunk, and returns its elements as a read-only tensor on the payload's memory.

    Returns:
        The tensor; None if the chunk is flagged absent, or refers to shared memory. In shared memory, the receiver
        checks the payload when it finds it.

    Raises:
        FrameError: see `check_chunk`.
    """
    if chunk.HasField("reference") and payload is None:
        return None
    check_chunk(chunk, payload.nbytes if payload is not None else 0)
    if chunk.flags & ABSENT:
        return None
    dtype = from_wire(chunk.dtype)
    assert dtype is not None
    return torch.frombuffer(payload, dtype=dtype) if payload is not None else torch.empty(0, dtype=dtype)


# ---- sequence window ---------------------------------------------------------------------
# `SequenceWindow`: the received sequence numbers of a sender, as a low-water mark and a bitmap.
#
# The last number alone would not be enough: it would refuse messages that others have overtaken. All numbers would
# take more and more memory.


class SequenceWindow:
    """A set of positive integers that mostly grows at its upper end.

    All numbers up to the low-water mark `low` are in the set. Numbers more than `WIDTH` below the highest count as
    in the set too: the sender has given them up, or their messages were lost.
    """

    WIDTH = 4096

    __slots__ = ("_above", "low")

    def __init__(self) -> None:
        self.low = 0
        self._above = 0  # bit i: low + 1 + i is in the set; bit 0 is never set

    @classmethod
    def of(cls, low: int, above: bytes) -> Self:
        """The window that has this low-water mark, and this bitmap of the numbers above it; see `above`."""
        window = cls()
        window.low, window._above = low, int.from_bytes(above[: cls.WIDTH // 8 + 1], "little")
        return window

    @property
    def above(self) -> bytes:
        """The numbers above the low-water mark, as a bitmap, little-endian: bit i is set for low + 1 + i."""
        return self._above.to_bytes((self._above.bit_length() + 7) // 8, "little")

    def __contains__(self, number: int) -> bool:
        if number <= self.low:
            return True
        return bool(self._above >> (number - self.low - 1) & 1)

    def add(self, number: int) -> bool:
        """Adds a number. Returns whether it is new."""
        if number in self:
            return False
        ahead = number - self.low - self.WIDTH
        if ahead > 0:  # before the bit is set: the sender must not determine the length of the bitmap
            self._raise_low(ahead)
        self._above |= 1 << (number - self.low - 1)
        self._raise_low((self._above ^ (self._above + 1)).bit_length() - 1)  # trailing ones
        return True

    def _raise_low(self, count: int) -> None:
        self.low += count
        self._above >>= count
