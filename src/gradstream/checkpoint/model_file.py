"""A model's tensors in one safetensors file, and in their own order when it is read.

A safetensors file sorts its tensors by type and name, and its readers give them in any order. So the order is
written beside them, in the file's metadata, which other readers pass over.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import safetensors.numpy

from gradstream.checkpoint.format import MAX_HEADER_BYTES
from gradstream.untrusted import parse_json

__all__ = ["load", "load_file", "save"]

Arrays = Mapping[str, np.ndarray[Any, Any]]

ORDER = "order"


def save(tensors: Arrays) -> bytes:
    """The file of these tensors."""
    arrays = {name: np.asarray(array, order="C") for name, array in tensors.items()}
    return safetensors.numpy.save(arrays, metadata={ORDER: json.dumps(list(arrays))})


def load(data: bytes) -> dict[str, np.ndarray[Any, Any]]:
    """The tensors of a file, in the order of the model; of a file that does not tell it, as they lie in it.

    Raises:
        SafetensorError: it is no such file.
    """
    return _in_order(safetensors.numpy.load(data), data[8 : 8 + _header_bytes(data)])


def load_file(path: Path) -> dict[str, np.ndarray[Any, Any]]:
    """The same of a file on a disk. Raises OSError besides."""
    tensors = safetensors.numpy.load_file(path)
    with open(path, "rb") as file:
        return _in_order(tensors, file.read(_header_bytes(file.read(8))))


def _header_bytes(begin: bytes) -> int:
    return min(int.from_bytes(begin[:8], "little"), MAX_HEADER_BYTES)


def _in_order(tensors: Arrays, header: bytes) -> dict[str, np.ndarray[Any, Any]]:
    """Sorted by what a header that safetensors has read says of them."""
    entries = parse_json(header, max_bytes=MAX_HEADER_BYTES, max_values=MAX_HEADER_BYTES)
    try:
        told = parse_json(entries.get("__metadata__", {}).get(ORDER, "[]"), max_bytes=MAX_HEADER_BYTES)
        rank = {name: place for place, name in enumerate(told) if isinstance(name, str)}
    except (ValueError, TypeError):  # somebody else's metadata
        rank = {}

    def place(name: str) -> tuple[int, list[int]]:
        return rank.get(name, len(rank)), entries[name]["data_offsets"]

    return {name: tensors[name] for name in sorted(tensors, key=place)}
