"""A batch's arrays on their way to the user: numpy or torch, copied only where they must be.

Floating-point arrays are cast to the model's own dtype (numpy's default is float64, a model's
float32; mixing the two would silently double the work or fail deep inside the user's code).
Integers, bytes and booleans stay as they are.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch

__all__ = ["for_numpy", "for_torch", "numpy_dtype"]

_NUMPY_DTYPES: dict[torch.dtype, type[np.floating[Any]]] = {
    torch.float32: np.float32,
    torch.float64: np.float64,
}


def numpy_dtype(dtype: torch.dtype) -> np.dtype[np.floating[Any]]:
    """The numpy dtype that is a model's torch dtype."""
    return np.dtype(_NUMPY_DTYPES[dtype])


def for_numpy(tree: Any, dtype: torch.dtype) -> Any:
    """The same tree with numpy arrays in place of arrays and tensors of any kind."""

    def convert(leaf: Any) -> Any:
        array = np.asarray(leaf)
        return array.astype(numpy_dtype(dtype), copy=False) if array.dtype.kind == "f" else array

    return _map(convert, tree)


def for_torch(tree: Any, dtype: torch.dtype) -> Any:
    """The same tree with tensors in place of arrays, sharing their memory where dtypes agree."""

    def convert(leaf: Any) -> Any:
        if isinstance(leaf, np.ndarray | np.generic):
            leaf = _from_numpy(np.asarray(leaf))
        if isinstance(leaf, torch.Tensor) and leaf.is_floating_point():
            return leaf.to(dtype)
        return leaf

    return _map(convert, tree)


def _from_numpy(array: np.ndarray[Any, Any]) -> torch.Tensor:
    if array.flags.writeable:
        return torch.from_numpy(array)
    with warnings.catch_warnings():  # torch has no read-only tensors; a module does not write its inputs
        warnings.filterwarnings("ignore", "The given NumPy array is not writable")
        return torch.from_numpy(array)


def _map(convert: Callable[[Any], Any], tree: Any) -> Any:
    if isinstance(tree, Mapping):
        return {key: _map(convert, branch) for key, branch in tree.items()}
    if isinstance(tree, tuple):
        return tuple(_map(convert, branch) for branch in tree)
    if isinstance(tree, list):
        return [_map(convert, branch) for branch in tree]
    return convert(tree)
