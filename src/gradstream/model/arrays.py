"""Converts between numpy and torch: a batch's arrays for the user's functions, and tensors for a file.

Of a batch, floating-point arrays are cast to the model's dtype. numpy's default is float64, a model's float32;
mixing the two would silently double the work or fail inside the user's code. Integers, bytes and booleans stay
unchanged.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch

from gradstream.errors import ConfigError
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


# ---- tensors of any kind, for a file ----------------------------------------------------

Arrays = dict[str, np.ndarray[Any, Any]]

_COMPRESSED = {  # the names of the indices of a sparse tensor, by its layout
    torch.sparse_csr: ("crow_indices", "col_indices"),
    torch.sparse_bsr: ("crow_indices", "col_indices"),
    torch.sparse_csc: ("ccol_indices", "row_indices"),
    torch.sparse_bsc: ("ccol_indices", "row_indices"),
}


def as_numpy(tensor: torch.Tensor) -> np.ndarray[Any, Any]:
    """A dense tensor as a numpy array, with the same values; a view where it can be.

    Of dtypes that numpy lacks, bfloat16, float8 and quantized numbers become float32. complex128, which a file
    lacks, becomes pairs of float64.
    """
    here = tensor.detach().cpu()
    if here.is_quantized:
        here = here.dequantize()
    elif here.dtype == torch.float4_e2m1fn_x2:
        here = here.view(torch.uint8)
    elif here.dtype == torch.complex128:
        here = torch.view_as_real(here)
    elif here.dtype == torch.complex32:
        here = here.to(torch.complex64)
    elif here.is_floating_point() and here.dtype not in (torch.float16, torch.float32, torch.float64):
        here = here.float()
    array: np.ndarray[Any, Any] = here.resolve_conj().resolve_neg().numpy()
    return array


def arrays_of(name: str, tensor: torch.Tensor) -> Arrays:
    """A tensor of any dtype and layout as copies in arrays that a file can hold.

    A sparse tensor is its indices and its values, each under the name with an ending, "adjacency.values".

    Raises:
        ConfigError: the tensor has a layout or dtype that cannot be carried.
    """
    tensor = tensor.detach()
    try:
        if tensor.layout is torch.sparse_coo:
            tensor = tensor.coalesce()
            parts = {"indices": tensor.indices(), "values": tensor.values()}
        elif tensor.layout in _COMPRESSED:
            parts = {key: getattr(tensor, key)() for key in (*_COMPRESSED[tensor.layout], "values")}
        else:
            dense = tensor if tensor.layout is torch.strided else tensor.to_dense()
            return {name: as_numpy(dense).copy()}
        return {f"{name}.{key}": as_numpy(part).copy() for key, part in parts.items()}
    except (TypeError, RuntimeError, NotImplementedError) as error:
        raise ConfigError(
            f"{name!r} is a {tensor.layout} tensor of {tensor.dtype} that cannot be saved or sent ({error}); "
            "expected numbers in a dense or sparse tensor: convert it, or keep it outside of the module's buffers"
        ) from error


def set_tensor(name: str, tensor: torch.Tensor, arrays: Mapping[str, np.ndarray[Any, Any]]) -> None:
    """Gives a tensor the values that `arrays_of` has returned; does nothing where it has them, or they are not there.

    Where they have another shape, the tensor gets other memory, of that shape.
    """
    before = arrays_of(name, tensor)
    given = {key: arrays[key] for key in before if key in arrays}
    if len(given) < len(before) or all(same_bits(given[key], before[key]) for key in before):
        return
    with torch.no_grad():
        new = _tensor_like(tensor.detach(), name, given)
        overlaps = tensor.layout is torch.strided and 0 in tensor.stride() and tensor.numel() > 1  # expanded
        if tensor.layout in _COMPRESSED:
            tensor.detach().resize_as_sparse_(new).copy_(new)
        elif new.shape != tensor.shape or overlaps:
            tensor.data = new.to(tensor.device, tensor.dtype)
        else:
            tensor.copy_(new)


def same_bits(one: np.ndarray[Any, Any], other: np.ndarray[Any, Any]) -> bool:
    """Whether two arrays have the same shape, dtype and bytes."""
    return one.shape == other.shape and one.dtype == other.dtype and one.tobytes() == other.tobytes()


def _tensor_like(like: torch.Tensor, name: str, given: Mapping[str, np.ndarray[Any, Any]]) -> torch.Tensor:
    """A tensor of these arrays, with the layout of `like`."""
    parts = {key.removeprefix(f"{name}."): torch.from_numpy(np.array(array)) for key, array in given.items()}
    if like.layout is torch.sparse_coo:
        return torch.sparse_coo_tensor(parts["indices"], parts["values"], like.shape, check_invariants=True)
    if like.layout in _COMPRESSED:
        compressed, plain = (parts[key] for key in _COMPRESSED[like.layout])
        return torch.sparse_compressed_tensor(
            compressed, plain, parts["values"], like.shape, layout=like.layout, check_invariants=True
        )
    (dense,) = parts.values()
    if like.dtype == torch.complex128:
        return torch.view_as_complex(dense.contiguous())
    if like.dtype == torch.float4_e2m1fn_x2:
        return dense.view(torch.float4_e2m1fn_x2)
    return dense
