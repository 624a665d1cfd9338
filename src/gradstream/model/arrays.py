"""Converts a batch's arrays to numpy or torch for the user's functions, and copies only where it must.

Floating-point arrays are cast to the model's dtype. numpy's default is float64, a model's float32; mixing the
two would silently double the work or fail inside the user's code. Integers, bytes and booleans stay unchanged.
"""

from __future__ import annotations

import warnings
from typing import Any

import numpy as np
import torch

from gradstream.model.batch import map_leaves

_NUMPY_DTYPES: dict[torch.dtype, type[np.floating[Any]]] = {
    torch.float32: np.float32,
    torch.float64: np.float64,
}


def numpy_dtype(dtype: torch.dtype) -> np.dtype[np.floating[Any]]:
    """The numpy dtype of a torch dtype."""
    return np.dtype(_NUMPY_DTYPES[dtype])


def for_numpy(tree: Any, dtype: torch.dtype) -> Any:
    """The same tree with numpy arrays in place of arrays and tensors of any kind.

    Leaves that are not numbers (text, None) stay unchanged.
    """

    def convert(leaf: Any) -> Any:
        array = np.asarray(leaf)
        if array.dtype.kind not in "biufc":
            return leaf
        return array.astype(numpy_dtype(dtype), copy=False) if array.dtype.kind == "f" else array

    return map_leaves(convert, tree)


def for_torch(tree: Any, dtype: torch.dtype) -> Any:
    """The same tree with tensors in place of arrays, sharing their memory where dtypes agree."""

    def convert(leaf: Any) -> Any:
        if isinstance(leaf, np.ndarray | np.generic):
            leaf = _from_numpy(np.asarray(leaf))
        if isinstance(leaf, torch.Tensor) and leaf.is_floating_point():
            return leaf.to(dtype)
        return leaf

    return map_leaves(convert, tree)


def _from_numpy(array: np.ndarray[Any, Any]) -> torch.Tensor:
    if array.flags.writeable:
        return torch.from_numpy(array)
    with warnings.catch_warnings():  # torch has no read-only tensors; modules do not write their inputs
        warnings.filterwarnings("ignore", "The given NumPy array is not writable")
        return torch.from_numpy(array)
