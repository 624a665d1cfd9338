"""The layout in which Hugging Face's libraries keep a model: one file, or several and an index.

model.safetensors
model-00001-of-00002.safetensors  …  model.safetensors.index.json

{"metadata": {"total_size": 8}, "weight_map": {"fc.weight": "model-00001-of-00002.safetensors", …}}
"""

from __future__ import annotations

import copy
import json
import re
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

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
