"""Buffers: arrays of a model besides its parameters, such as running means. Each replica has its own.

They are neither trained nor exchanged during training. For an evaluation or a checkpoint, which need one model,
the buffers of all workers are averaged, weighted by the samples that each has trained on.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch

from gradstream.errors import ConfigError
from gradstream.model.base import map_leaves

# ---- arrays ------------------------------------------------------------------------------

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


# ---- tree --------------------------------------------------------------------------------
# Trees of arrays: dicts and lists of arrays, or a single array.

Tree = Any
"""A dict or list of trees, or a leaf: anything else. Tuples are leaves here (shapes, for one)."""

ROOT = "parameters"
"""Name of the array in a tree that is a single array."""


def leaves(tree: Tree) -> Iterator[tuple[str, Any]]:
    """(name, leaf) in order; names of nested leaves are joined by dots: "hidden.0.weight".

    Raises:
        ConfigError: two leaves share a name.
    """
    seen: set[str] = set()
    for name, leaf in _walk(tree, ()):
        if name in seen:
            raise ConfigError(
                f"parameters: two arrays are named {name!r}, expected different names: names of nested keys are "
                "joined by dots, so do not use dots in the keys"
            )
        seen.add(name)
        yield name, leaf


def rebuild(tree: Tree, leaf: Callable[[str], Any]) -> Tree:
    """A tree of the same structure, with `leaf(name)` in place of each leaf."""
    return _rebuild(tree, (), leaf)


def _walk(tree: Tree, path: tuple[str, ...]) -> Iterator[tuple[str, Any]]:
    children = _children(tree)
    if children is None:
        yield _name(path), tree
        return
    for key, child in children:
        yield from _walk(child, (*path, key))


def _rebuild(tree: Tree, path: tuple[str, ...], leaf: Callable[[str], Any]) -> Tree:
    if isinstance(tree, dict):
        return {key: _rebuild(child, (*path, str(key)), leaf) for key, child in tree.items()}
    if isinstance(tree, list):
        return [_rebuild(child, (*path, str(index)), leaf) for index, child in enumerate(tree)]
    return leaf(_name(path))


def _children(tree: Tree) -> Iterator[tuple[str, Tree]] | None:
    if isinstance(tree, dict):
        return ((str(key), child) for key, child in tree.items())
    if isinstance(tree, list):
        return ((str(index), child) for index, child in enumerate(tree))
    return None


def _name(path: tuple[str, ...]) -> str:
    return ".".join(path) or ROOT


# ---- buffers -----------------------------------------------------------------------------

Buffers = Mapping[str, np.ndarray[Any, Any]]
"""Arrays by the user's own names."""


def buffers_of(model: object) -> dict[str, np.ndarray[Any, Any]]:
    """Copies of a model's buffers; {} for a model without any."""
    give = getattr(model, "buffers", None)
    return {} if give is None else dict(give())


def load_buffers(model: object, buffers: Buffers) -> None:
    """Sets a model's buffers, if it has any. Names that the model does not know are ignored.

    Raises:
        ConfigError: a buffer is missing, or has another shape than one that the model never changes.
    """
    take = getattr(model, "load_buffers", None)
    if take is not None:
        take(buffers)


@contextmanager
def with_buffers(model: object, buffers: Buffers) -> Iterator[None]:
    """Inside, the model has these buffers. Raises ConfigError as `load_buffers` does."""
    own = buffers_of(model)
    try:
        if buffers:
            load_buffers(model, buffers)
        yield
    finally:
        load_buffers(model, own)


def average_buffers(replicas: Sequence[tuple[float, Buffers]]) -> dict[str, np.ndarray[Any, Any]]:
    """Averages the buffers of several replicas.

    What is equal everywhere stays as it is. Floating-point and complex buffers become the weighted mean, computed in
    double precision. Integers and booleans (a count of batches, a flag) become the largest. The mean of running
    variances is an approximation: it leaves out the distances between the replicas' means. Buffers whose shapes or
    dtypes differ, and those that not every replica has, have no mean: they are those of the first replica that
    has samples.

    Args:
        replicas: (number of samples that the replica has trained on, its buffers) of each replica. A replica
            without samples does not count. If no replica has any, all have the same weight.
    """
    counted = [(weight, buffers) for weight, buffers in replicas if weight] or [
        (1.0, one) for _, one in replicas
    ]
    if not counted:
        return {}
    weights = np.array([weight for weight, _ in counted], dtype=np.float64)
    return {
        name: _average(weights, [buffers[name] for _, buffers in counted if name in buffers])
        for name in counted[0][1]
    }


def _average(weights: np.ndarray[Any, Any], arrays: list[np.ndarray[Any, Any]]) -> np.ndarray[Any, Any]:
    first = arrays[0]
    kinds = {(array.shape, array.dtype) for array in arrays}
    if len(arrays) < len(weights) or len(kinds) > 1 or all(same_bits(array, first) for array in arrays):
        return first
    several = np.stack(arrays)
    if first.dtype.kind not in "fc":
        return np.asarray(np.max(several, axis=0))
    wide = np.complex128 if first.dtype.kind == "c" else np.float64
    with np.errstate(invalid="ignore"):  # inf - inf is NaN, as it should be
        mean = np.tensordot(weights, several.astype(wide), axes=1) / weights.sum()
    return np.where((several == first).all(axis=0), first, np.asarray(mean).astype(first.dtype))
