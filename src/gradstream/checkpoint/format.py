"""The safetensors header of a flat vector's file, made from the layout alone.

    8 bytes   length of the header, little-endian
    header    JSON: {"layer.weight": {"dtype": "F32", "shape": [2, 3], "data_offsets": [0, 24]}, …}
    data      the flat vector's bytes as they are, then other tensors one after the other

The tensors of a layout lie in the flat vector without gaps, so the vector *is* the data of a valid
file, and each shard writes its range of the vector at the range's own offset. No node needs the whole vector.

Reference: the safetensors format, https://github.com/huggingface/safetensors.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import safetensors.numpy
import torch

from gradstream.errors import ConfigError, DataError
from gradstream.untrusted import check_value, open_regular, parse_json
from gradstream.wire import v1

# ---- format ------------------------------------------------------------------------------

_OF_NUMPY = {
    "float64": "F64", "float32": "F32", "float16": "F16",
    "int64": "I64", "int32": "I32", "int16": "I16", "int8": "I8",
    "uint64": "U64", "uint32": "U32", "uint16": "U16", "uint8": "U8", "bool": "BOOL",
    "complex64": "C64",
}  # fmt: skip
_OF_TORCH = {torch.float32: "F32", torch.float64: "F64"}
_TO_NUMPY = {theirs: ours for ours, theirs in _OF_NUMPY.items()}

FOR_TORCH = {"format": "pt"}
"""Metadata without which transformers does not load a file."""

ALIGNMENT_BYTES = 8
MAX_HEADER_BYTES = 100_000_000
"""The limit of safetensors itself."""

MAX_VALUES = 4 << 20
"""The most JSON values in a header, which has about seven for each tensor."""

MAX_DIMENSIONS = 64
MAX_TENSOR_BYTES = 1 << 53


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """A tensor's name, shape, and element type as safetensors spells it: "F32".

    Args:
        same_as: the tensor of which this is a second name. A file has its elements twice, since safetensors
            has no second names.
    """

    name: str
    shape: tuple[int, ...]
    dtype: str
    same_as: str = ""

    @property
    def size_bytes(self) -> int:
        """Number of bytes of its elements."""
        return math.prod(self.shape) * self.numpy_dtype.itemsize

    @property
    def numpy_dtype(self) -> np.dtype[Any]:
        """Element type for numpy."""
        return np.dtype(_TO_NUMPY[self.dtype])


def spec_of(name: str, shape: Sequence[int], dtype: torch.dtype | np.dtype[Any]) -> TensorSpec:
    """Returns the description of a tensor. Raises ConfigError for an element type without a safetensors name."""
    known = _OF_TORCH.get(dtype) if isinstance(dtype, torch.dtype) else _OF_NUMPY.get(dtype.name)
    if known is None:
        raise ConfigError(
            f"{name!r} has elements of {dtype}, expected {', '.join(_TO_NUMPY)}, which a checkpoint holds; convert it"
        )
    return TensorSpec(name, tuple(shape), known)


def to_spec(spec: TensorSpec) -> v1.TensorSpec:
    """Returns the message for the wire."""
    return v1.TensorSpec(name=spec.name, shape=spec.shape, dtype=spec.dtype, same_as=spec.same_as)


def of_spec(spec: v1.TensorSpec) -> TensorSpec:
    """Parses a message from the wire. Raises DataError for an unknown element type."""
    if spec.dtype not in _TO_NUMPY:
        raise DataError(
            f"{spec.name[:80]!r} has elements of {spec.dtype[:80]!r}, expected {', '.join(_TO_NUMPY)}; every node must "
            "run the same version of gradstream"
        )
    return TensorSpec(spec.name, tuple(spec.shape), spec.dtype, spec.same_as)


def header_of(tensors: Sequence[TensorSpec]) -> bytes:
    """Returns the header of a file with these tensors in this order, after its length.

    Raises:
        ConfigError: two tensors have the same name.
    """
    entries: dict[str, Any] = {"__metadata__": FOR_TORCH}
    start = 0
    for tensor in tensors:
        if tensor.name in entries:
            raise ConfigError(f"two tensors are called {tensor.name!r}: a file needs one name for each")
        stop = start + tensor.size_bytes
        entries[tensor.name] = {
            "dtype": tensor.dtype,
            "shape": list(tensor.shape),
            "data_offsets": [start, stop],
        }
        start = stop
    return _framed(entries)


@dataclass(frozen=True, slots=True)
class _Entry:
    """The entry of a tensor in a header."""

    dtype: str
    shape: list[int]
    data_offsets: tuple[int, int]


def _placed(name: str, entry: Mapping[str, Any]) -> tuple[TensorSpec, int]:
    """Returns a tensor and its offset. Raises ValueError for an impossible place, KeyError for an unknown type."""
    (start, stop), shape = entry["data_offsets"], tuple(entry["shape"])
    if len(shape) > MAX_DIMENSIONS or not all(0 <= length <= MAX_TENSOR_BYTES for length in shape):
        raise ValueError(f"{name[:80]!r} has a shape that no tensor has")
    spec = TensorSpec(name, shape, entry["dtype"])
    if not 0 <= start <= stop <= MAX_TENSOR_BYTES or stop - start != spec.size_bytes:
        raise ValueError(f"{name[:80]!r} lies at [{start}, {stop}), which are not the bytes of its shape")
    return spec, start


def parse(begin: bytes) -> tuple[int, Mapping[str, tuple[TensorSpec, int]]]:
    """Returns the offset of a file's data, and each tensor with its offset in that data.

    Args:
        begin: the first bytes of a file, at least its whole header.

    Raises:
        DataError: the header is malformed, or impossible.
    """
    length = int.from_bytes(begin[:8], "little")
    if len(begin) < 8 or not 2 <= length <= min(MAX_HEADER_BYTES, len(begin) - 8):
        raise DataError(f"not a safetensors file: its header would have {length} of {len(begin)} bytes")
    try:
        entries = parse_json(begin[8 : 8 + length], max_bytes=MAX_HEADER_BYTES, max_values=MAX_VALUES)
        entries.pop("__metadata__", None)
        check_value(entries, Mapping[str, _Entry], "header")
        tensors = {name: _placed(name, entry) for name, entry in entries.items()}
        end = 0
        for name, (spec, start) in sorted(
            tensors.items(), key=lambda item: (item[1][1], item[1][0].size_bytes)
        ):
            if start != end:
                raise ValueError(f"{name[:80]!r} lies at {start}: the one before it ends at {end}")
            end = start + spec.size_bytes
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise DataError(f"not a safetensors file: {error!r}") from error
    return 8 + length, tensors


# ---- model file --------------------------------------------------------------------------
# A model's tensors in one safetensors file, which keeps the order of the model.
#
# A safetensors file sorts its tensors by type and name, and its readers return them in any order. So this module
# writes the order into the file's metadata, which other readers ignore.

Arrays = Mapping[str, np.ndarray[Any, Any]]

ORDER = "order"


def save(tensors: Arrays) -> bytes:
    """Returns the bytes of a file with these tensors."""
    arrays = {name: np.asarray(array, order="C") for name, array in tensors.items()}
    data = safetensors.numpy.save(arrays, metadata={**FOR_TORCH, ORDER: json.dumps(list(arrays))})
    return _with_sorted_metadata(data)


def _with_sorted_metadata(data: bytes) -> bytes:
    """The same file; safetensors writes the metadata in another order each time."""
    length = int.from_bytes(data[:8], "little")
    entries = json.loads(data[8 : 8 + length])
    entries["__metadata__"] = dict(sorted(entries["__metadata__"].items()))
    return _framed(entries) + data[8 + length :]


def _framed(entries: Mapping[str, Any]) -> bytes:
    """A header after its length."""
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-len(text) % ALIGNMENT_BYTES)
    return len(text).to_bytes(8, "little") + text


def load(data: bytes) -> dict[str, np.ndarray[Any, Any]]:
    """Returns the tensors of a file in the order of the model, or of the file if that is unknown.

    Raises:
        SafetensorError: `data` is not a safetensors file.
    """
    return _in_order(safetensors.numpy.load(data), data[8 : 8 + _header_bytes(data)])


def load_file(path: Path) -> dict[str, np.ndarray[Any, Any]]:
    """Loads a file from disk as `load` does. Also raises OSError."""
    with open_regular(path) as file:
        tensors = safetensors.numpy.load_file(path)
        return _in_order(tensors, file.read(_header_bytes(file.read(8))))


def _header_bytes(begin: bytes) -> int:
    return min(int.from_bytes(begin[:8], "little"), MAX_HEADER_BYTES)


def _in_order(tensors: Arrays, header: bytes) -> dict[str, np.ndarray[Any, Any]]:
    """Sorts tensors by the order in a file's header, which safetensors has already read."""
    entries = parse_json(header, max_bytes=MAX_HEADER_BYTES, max_values=MAX_HEADER_BYTES)
    try:
        order = parse_json(entries.get("__metadata__", {}).get(ORDER, "[]"), max_bytes=MAX_HEADER_BYTES)
        rank = {name: place for place, name in enumerate(order) if isinstance(name, str)}
    except (ValueError, TypeError):  # metadata of another program
        rank = {}

    def place(name: str) -> tuple[int, list[int]]:
        return rank.get(name, len(rank)), entries[name]["data_offsets"]

    return {name: tensors[name] for name in sorted(tensors, key=place)}
