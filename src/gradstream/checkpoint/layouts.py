"""The layout in which Hugging Face's libraries keep a model: one file, or several and an index.

model.safetensors
model-00001-of-00002.safetensors  …  model.safetensors.index.json

{"metadata": {"total_size": 8}, "weight_map": {"fc.weight": "model-00001-of-00002.safetensors", …}}
"""

from __future__ import annotations

import copy
import io
import json
import math
import pickletools
import re
import sys
import warnings
import zipfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import safetensors.torch
import torch
from safetensors import SafetensorError
from torch import nn

from gradstream.checkpoint.format import FOR_TORCH, MAX_HEADER_BYTES
from gradstream.errors import DataError
from gradstream.model.built_module import COMPILED, unwrapped
from gradstream.runtime.base import Storage
from gradstream.untrusted import check_value, open_regular, parse_json, read_regular

Tensors = Mapping[str, torch.Tensor]

SHARD_BYTES = 5_000_000_000
"""Most bytes of a file, unless one tensor has more: the bound of Hugging Face."""

MODEL, INDEX = "model.safetensors", "model.safetensors.index.json"

_FILE_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,200}")


def write_shards(folder: Path, tensors: Tensors, shard_bytes: int = SHARD_BYTES) -> list[Path]:
    """Writes tensors into one file, or into several with an index. Returns the files."""
    shards: list[dict[str, torch.Tensor]] = [{}]
    free_bytes = shard_bytes
    for name, tensor in tensors.items():
        if tensor.nbytes > free_bytes and shards[-1]:
            shards.append({})
            free_bytes = shard_bytes
        shards[-1][name] = tensor.contiguous()
        free_bytes -= tensor.nbytes
    if len(shards) == 1:
        names = [MODEL]
    else:
        names = [
            f"model-{number:05d}-of-{len(shards):05d}.safetensors" for number in range(1, len(shards) + 1)
        ]
    for name, shard in zip(names, shards, strict=True):
        safetensors.torch.save_file(shard, folder / name, metadata=dict(FOR_TORCH))
    if len(shards) > 1:
        total = sum(tensor.nbytes for tensor in tensors.values())
        places = {name: file for file, shard in zip(names, shards, strict=True) for name in shard}
        index = {"metadata": {"total_size": total}, "weight_map": dict(sorted(places.items()))}
        (folder / INDEX).write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")
        names.append(INDEX)
    return [folder / name for name in names]


def read_shards(folder: Path) -> dict[str, torch.Tensor]:
    """Reads what `write_shards`, or Hugging Face, has written.

    Raises:
        DataError: a file is missing or damaged.
    """
    if not (folder / INDEX).exists():
        return read_file(folder / MODEL)
    try:
        places = parse_json(read_regular(folder / INDEX), max_bytes=MAX_HEADER_BYTES)["weight_map"]
        files = dict.fromkeys(places.values())
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise DataError(f"{folder / INDEX} cannot be read: {error!r}; put it back from a copy") from error
    tensors: dict[str, torch.Tensor] = {}
    for file in files:
        if not isinstance(file, str) or not _FILE_NAME.fullmatch(file):
            raise DataError(f"{folder / INDEX} lists {str(file)[:80]!r}; expected names of files beside it")
        tensors.update(read_file(folder / file))
    if missing := sorted(places.keys() - tensors.keys()):
        raise DataError(f"{folder} lacks {missing[0]!r}, which {INDEX} lists; put its files back from a copy")
    return tensors


def read_file(path: Path) -> dict[str, torch.Tensor]:
    """Reads one safetensors file. Raises DataError."""
    try:
        with open_regular(path):
            return safetensors.torch.load_file(path)
    except (OSError, SafetensorError, ValueError) as error:
        raise DataError(f"{path} cannot be read: {error}; put it back from a copy") from error


# ---- transformers ------------------------------------------------------------------------
# A folder that `from_pretrained` loads has config.json beside the parameters. A run keeps that file of its models from
# the beginning on, so that a checkpoint of a run that was killed can be exported too.

PRETRAINED = "checkpoints/pretrained.json"
"""By the prefix of a model's names, "" or "backbone.", the text of each of its files."""

Texts = dict[str, dict[str, str]]


def keep_configs(storage: Storage, modules: Sequence[nn.Module]) -> None:
    """Writes the configurations of models of transformers; nothing if there are none, or they cannot be written."""
    try:
        if texts := configs_of(modules):
            storage.write(PRETRAINED, json.dumps(texts).encode())
    except (OSError, TypeError):  # the disk is full, or a configuration has objects: the run can do without
        pass


def configs_of(modules: Sequence[nn.Module]) -> Texts:
    """The configuration of each model of transformers in these modules, the outermost ones alone."""
    loaded = sys.modules.get("transformers.modeling_utils")
    found: Texts = {}
    for index, module in enumerate(modules) if loaded is not None else ():
        first = f"{index}." if len(modules) > 1 else ""
        for name, part in unwrapped(module).named_modules():
            prefix = first + "".join(f"{each}." for each in name.split(".") if each not in ("", COMPILED))
            if isinstance(part, loaded.PreTrainedModel) and not any(map(prefix.startswith, found)):  # type: ignore[union-attr]
                config = copy.deepcopy(part.config)
                config.architectures = [type(part).__name__]
                found[prefix] = {"config.json": config.to_json_string()}
                if part.can_generate() and part.generation_config is not None:
                    found[prefix]["generation_config.json"] = part.generation_config.to_json_string()
    return found


def parse_configs(data: bytes) -> Texts:
    """Parses the contents of `PRETRAINED`. Raises ValueError."""
    texts: Texts = parse_json(data, max_bytes=1 << 24)
    check_value(texts, Mapping[str, Mapping[str, str]], PRETRAINED)
    if not all(_FILE_NAME.fullmatch(file) for files in texts.values() for file in files):
        raise ValueError(f"{PRETRAINED} names a file in another folder")
    return texts


# ---- distributed -------------------------------------------------------------------------
# Distributed checkpoints of torch (DCP), written by torch, and read without running what is in them.
#
#     .metadata       a pickle: which bytes of which file are which slice of a tensor
#     __0_0.distcp    one archive of `torch.save` after the other: of a slice, or of a plain value
#
# A pickle is a program that may do anything. `described` goes through its instructions, and makes nothing of them but
# numbers, text, lists, dicts, and records of the calls that it asks for. The numbers of a tensor are no pickle: they
# are read as they lie in the archive.
#
# Reference: https://docs.pytorch.org/docs/stable/distributed.checkpoint.html.

METADATA = ".metadata"

_STORAGES = {
    "DoubleStorage": torch.float64, "FloatStorage": torch.float32, "HalfStorage": torch.float16,
    "BFloat16Storage": torch.bfloat16, "LongStorage": torch.int64, "IntStorage": torch.int32,
    "ShortStorage": torch.int16, "CharStorage": torch.int8, "ByteStorage": torch.uint8,
    "BoolStorage": torch.bool, "ComplexFloatStorage": torch.complex64, "ComplexDoubleStorage": torch.complex128,
}  # fmt: skip
_REMEDY = (
    "if you trust whoever wrote it, convert it with torch, which runs what is in it: python -m "
    "torch.distributed.checkpoint.format_utils dcp_to_torch FOLDER model.pt"
)


def is_distributed(folder: Path) -> bool:
    """Whether a folder is a distributed checkpoint of torch."""
    return (folder / METADATA).is_file()


def write_distributed(folder: Path, state: Mapping[str, Any]) -> None:
    """Writes nested dicts of tensors and plain values with torch's own writer."""
    from torch.distributed.checkpoint.state_dict_saver import save

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch warns that there is no process group
        save(dict(state), checkpoint_id=folder, no_dist=True)


def read_distributed(folder: Path) -> dict[str, Any]:
    """Reads a distributed checkpoint as nested dicts and lists, whole, in main memory. Keys of dicts are text.

    Raises:
        DataError: it is damaged, or has more than tensors and plain values.
    """
    try:
        metadata = described(read_regular(folder / METADATA)).state
        places = {
            (index.state["fqn"], _size(index.state.get("offset"))): info.state
            for index, info in metadata["storage_data"].items()
        }
        paths = metadata["planner_data"] or {}
        state: dict[str, Any] = {}
        for name, kind in metadata["state_dict_metadata"].items():
            value = _read(folder, places, name, kind)
            _put(state, paths.get(name, (name,)), value)
    except DataError as error:
        raise DataError(f"{folder}: {error}; {_REMEDY}") from error
    except Exception as error:  # of a damaged file: anything
        raise DataError(f"{folder} is no checkpoint of this form: {error!r}; {_REMEDY}") from error
    return state


def _read(folder: Path, places: Mapping[Any, Any], name: str, kind: Unmade) -> Any:
    """Reads one entry: a tensor of slices, or a value."""
    if not kind.what.endswith(" TensorStorageMetadata"):
        return _load(folder, places[name, ()])
    shape, dtype = _size(kind.state["size"]), _dtype(kind.state["properties"].state[0])
    slices = [(_size(chunk.state["offsets"]), _size(chunk.state["sizes"])) for chunk in kind.state["chunks"]]
    if sum(math.prod(sizes) for _, sizes in slices) != math.prod(shape):
        raise DataError(f"the slices of {name[:80]!r} are not its shape, {shape}")
    if math.prod(shape) * dtype.itemsize > sum(places[name, offsets]["length"] for offsets, _ in slices):
        raise DataError(f"{name[:80]!r} has fewer bytes than its shape, {shape}")
    tensor = torch.empty(shape, dtype=dtype)
    for offsets, sizes in slices:
        into = tensor
        for axis, (start, length) in enumerate(zip(offsets, sizes, strict=True)):
            into = into.narrow(axis, start, length)
        into.copy_(_load(folder, places[name, offsets]).reshape(sizes))
    return tensor


def _load(folder: Path, place: Mapping[str, Any]) -> Any:
    """Reads an archive of `torch.save`."""
    file = place["relative_path"]
    if not _FILE_NAME.fullmatch(file) or place.get("transform_descriptors"):
        raise DataError(f"it has values in {file[:80]!r}, or compressed ones, which are not read here")
    with open_regular(folder / file) as opened:
        opened.seek(place["offset"])
        data = opened.read(place["length"])
    with zipfile.ZipFile(io.BytesIO(data)) as archive:
        (program,) = (name for name in archive.namelist() if name.endswith("/data.pkl"))
        root = program.removesuffix("data.pkl")
        if f"{root}byteorder" in archive.namelist() and archive.read(f"{root}byteorder") != b"little":
            raise DataError("it was written by a machine with another order of bytes")
        return _plain(described(archive.read(program)), archive, root)


def _plain(value: Any, archive: zipfile.ZipFile, root: str) -> Any:
    """The value with tensors in place of the calls that make them. Raises DataError for other calls."""
    if isinstance(value, dict):
        return {key: _plain(item, archive, root) for key, item in value.items()}
    if isinstance(value, list | tuple | set):
        return type(value)(_plain(item, archive, root) for item in value)
    if not isinstance(value, Unmade):
        return value
    if value.what == "torch Size":
        return torch.Size(value.args[0])
    if not value.args:
        return _dtype(value)
    if value.what == "torch._utils _rebuild_parameter":
        return _plain(value.args[0], archive, root)
    if value.what not in ("torch._utils _rebuild_tensor_v2", "torch._utils _rebuild_tensor_v3"):
        raise DataError(f"it has a value of {value.what[:80]}")
    storage, start, shape, strides, *rest = value.args
    _, kind, key, _, _ = storage.args
    dtype = _dtype(rest[2]) if value.what.endswith("v3") else _dtype(kind)
    entry = archive.getinfo(f"{root}data/{key}")
    if entry.compress_type != zipfile.ZIP_STORED or math.prod(shape) * dtype.itemsize > entry.file_size:
        raise DataError(f"a tensor of {shape} has {entry.file_size} bytes")
    if not math.prod(shape):
        return torch.empty(shape, dtype=dtype)
    numbers = torch.frombuffer(bytearray(archive.read(entry)), dtype=dtype)
    return numbers.as_strided(shape, strides, start).clone()


def _size(value: Unmade | None) -> tuple[int, ...]:
    return () if value is None else tuple(value.args[0])


def _dtype(value: Unmade) -> torch.dtype:
    """The dtype that a record names: "torch float32", "torch FloatStorage". Raises DataError."""
    module, _, name = value.what.partition(" ")
    dtype = _STORAGES.get(name) or getattr(torch, name, None)
    if module != "torch" or not isinstance(dtype, torch.dtype):
        raise DataError(f"it has a value of {value.what[:80]}")
    return dtype


def _put(state: Any, path: Sequence[str | int], value: Any) -> None:
    """Puts a value into nested dicts and lists. A number in a path is a place in a list; places come in order."""
    for key, following in zip(path, [*path[1:], None], strict=True):
        if isinstance(key, int) and key == len(state):
            state.append(None)
        if following is None:
            state[key] = value
        else:
            made = state[key] if isinstance(key, int) else state.get(key)
            if made is None:
                made = state[key] = [] if isinstance(following, int) else {}
            state = made


# ---- pickles as data ---------------------------------------------------------------------


class Unmade:
    """A call or an object that a pickle asks for, which is not made.

    Attributes:
        what: module and name: "torch Size".
        args: the arguments of the call.
        state: the attributes that are set then.
    """

    def __init__(self, what: str, args: tuple[Any, ...] = ()) -> None:
        self.what, self.args = what, args
        self.state: Any = None


_MARK = Unmade("mark")


def described(data: bytes) -> Any:
    """What a pickle makes, with a `Unmade` in place of each object. Nothing is imported, called or made.

    Raises:
        DataError: it has an instruction that checkpoints do not need.
        ValueError, IndexError, KeyError, TypeError, AttributeError: it is damaged.
    """
    stack: list[Any] = []
    memo: dict[Any, Any] = {}
    for opcode, argument, _ in pickletools.genops(data):
        name = opcode.name
        if name in _LITERALS:
            stack.append(argument)
        elif name in ("MEMOIZE", "BINPUT", "LONG_BINPUT"):
            memo[len(memo) if name == "MEMOIZE" else argument] = stack[-1]
        elif name in ("BINGET", "LONG_BINGET"):
            stack.append(memo[argument])
        elif name in _MAKE:
            stack.append(_MAKE[name]())
        elif name in _TAKE:
            _TAKE[name](stack)
        elif name == "GLOBAL":
            stack.append(Unmade(str(argument)))
        elif name not in ("PROTO", "FRAME", "STOP"):
            raise DataError(f"it has the instruction {name}")
    return stack.pop()


def _take(stack: list[Any], count: int) -> list[Any]:
    items = stack[-count:]
    del stack[-count:]
    return items


def _since_mark(stack: list[Any]) -> list[Any]:
    place = max(index for index, item in enumerate(stack) if item is _MARK)
    _, *items = _take(stack, len(stack) - place)
    return items


def _set_items(stack: list[Any], items: list[Any]) -> None:
    stack[-1].update(zip(items[::2], items[1::2], strict=True))


def _call(stack: list[Any]) -> None:
    called, args = _take(stack, 2)
    is_dict = called.what == "collections OrderedDict" and not args
    stack.append({} if is_dict else Unmade(called.what, args))


def _build(stack: list[Any]) -> None:
    state = stack.pop()
    stack[-1].state = state


_LITERALS = {
    "BININT", "BININT1", "BININT2", "LONG1", "LONG4", "BINFLOAT", "BINUNICODE", "SHORT_BINUNICODE",
    "BINUNICODE8", "BINBYTES", "SHORT_BINBYTES",
}  # fmt: skip
_MAKE: Mapping[str, Callable[[], Any]] = {
    "NONE": lambda: None,
    "NEWTRUE": lambda: True,
    "NEWFALSE": lambda: False,
    "EMPTY_LIST": list,
    "EMPTY_DICT": dict,
    "EMPTY_SET": set,
    "EMPTY_TUPLE": tuple,
    "MARK": lambda: _MARK,
}
_TAKE: Mapping[str, Callable[[list[Any]], object]] = {
    "TUPLE1": lambda stack: stack.append(tuple(_take(stack, 1))),
    "TUPLE2": lambda stack: stack.append(tuple(_take(stack, 2))),
    "TUPLE3": lambda stack: stack.append(tuple(_take(stack, 3))),
    "TUPLE": lambda stack: stack.append(tuple(_since_mark(stack))),
    "APPEND": lambda stack: stack[-2].append(stack.pop()),
    "APPENDS": lambda stack: (items := _since_mark(stack)) and stack[-1].extend(items),
    "ADDITEMS": lambda stack: (items := _since_mark(stack)) and stack[-1].update(items),
    "SETITEM": lambda stack: _set_items(stack, _take(stack, 2)),
    "SETITEMS": lambda stack: _set_items(stack, _since_mark(stack)),
    "STACK_GLOBAL": lambda stack: stack.append(Unmade(" ".join(_take(stack, 2)))),
    "NEWOBJ": _call,
    "REDUCE": _call,
    "BUILD": _build,
    "BINPERSID": lambda stack: stack.append(Unmade("storage", stack.pop())),
}
