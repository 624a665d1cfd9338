"""A model's tensors in one safetensors file, which keeps the order of the model.

A safetensors file sorts its tensors by type and name, and its readers return them in any order. So this
module writes the order into the file's metadata, which other readers ignore.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import safetensors.numpy

from gradstream.checkpoint.format import MAX_HEADER_BYTES
from gradstream.untrusted import open_regular, parse_json

Arrays = Mapping[str, np.ndarray[Any, Any]]

ORDER = "order"


def save(tensors: Arrays) -> bytes:
    """Returns the bytes of a file with these tensors."""
    arrays = {name: np.asarray(array, order="C") for name, array in tensors.items()}
    return safetensors.numpy.save(arrays, metadata={ORDER: json.dumps(list(arrays))})


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
