"""Checkpoints as state dicts for torch, and as files for other software."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any, Literal

import torch

from gradstream.checkpoint.folder import FOLDER
from gradstream.checkpoint.layouts import (
    INDEX,
    MODEL,
    PRETRAINED,
    SHARD_BYTES,
    is_distributed,
    parse_configs,
    read_distributed,
    read_file,
    read_shards,
    write_distributed,
    write_shards,
)
from gradstream.checkpoint.own_state import EXTRA_FILE, OwnState, worker_file
from gradstream.errors import ConfigError, DataError
from gradstream.model.built_module import named
from gradstream.run.result import kept_parameters
from gradstream.session.registered import decode
from gradstream.session.replica import NAMES, PLAIN
from gradstream.untrusted import read_regular

__all__ = ["Checkpoint", "export", "load"]

Format = Literal["safetensors", "dcp"]

StateDict = dict[str, Any]


@dataclass(frozen=True)
class Checkpoint:
    """The state dicts of a model and its optimizers, in main memory.

    Attributes:
        path: the folder or file from which they were read.
        model: for `load_state_dict` of the module. Of several modules that were wrapped together, names begin with
            their number: `torch.nn.ModuleList([a, b])` takes it.
        optimizers: for `load_state_dict` of each optimizer, in the order of `session.wrap`; none if the checkpoint has
            no state of the loop's own optimizers.
        names: by optimizer, the names of the parameters of each of its groups.
    """

    path: Path
    model: dict[str, torch.Tensor]
    optimizers: Sequence[StateDict] = ()
    names: Sequence[Sequence[Sequence[str]]] = ()


def load(path: str | Path, checkpoint: str | None = None) -> Checkpoint:
    """Reads a checkpoint as state dicts for the modules and optimizers of torch.

    Args:
        path: a run directory; or a folder or file of safetensors, of a run or of other software; or a distributed
            checkpoint of torch (DCP) with tensors and plain values. No code in these files is executed.
        checkpoint: of a run directory: "final", "best", or the name of a checkpoint: "step-00000120". None takes the
            final parameters, or else the newest checkpoint that is sound.

    Raises:
        ConfigError: there is no such checkpoint.
        DataError: files are damaged.

    Example:
        >>> checkpoint = gs.checkpoints.load("runs/20261120-101500-net")  # doctest: +SKIP
        >>> model.load_state_dict(checkpoint.model)  # doctest: +SKIP
        >>> optimizer.load_state_dict(checkpoint.optimizers[0])  # doctest: +SKIP
    """
    path = Path(path)
    if checkpoint is not None or (path / "run.json").is_file() or (path / FOLDER).is_dir():
        path = kept_parameters(path, checkpoint).parent
    if is_distributed(path):
        return _of_distributed(path, read_distributed(path))
    if path.is_file():
        return Checkpoint(path, dict(named(read_file(path).items())))
    if not any((path / name).is_file() for name in (MODEL, INDEX)):
        raise ConfigError(
            f"{path} is no checkpoint; expected a run directory, a folder with {MODEL} or {INDEX}, or a distributed "
            "checkpoint of torch"
        )
    optimizers, names = _optimizers_in(path / worker_file(EXTRA_FILE))
    return Checkpoint(path, dict(named(read_shards(path).items())), optimizers, names)


def export(
    run: Path,
    folder: Path,
    checkpoint: str | None = None,
    *,
    form: Format = "safetensors",
    module: str = "",
    shard_bytes: int = SHARD_BYTES,
) -> list[Path]:
    """Writes a checkpoint for other software. Returns the files.

    Args:
        run, checkpoint: as for `load`.
        folder: a new or empty folder.
        form: "safetensors", with an index where there are several files; or "dcp", a distributed checkpoint of torch,
            which also has the state of the optimizers.
        module: name of a part of the model that is written alone, under its own names: "backbone".
        shard_bytes: most bytes of a safetensors file.

    Raises:
        ConfigError: there is no such checkpoint or part, or the folder has files.
        DataError: files are damaged.
    """
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise ConfigError(f"{folder} is there, and not empty; expected a new folder, which is made")
    kept = load(run, checkpoint)
    model = kept.model
    if module:
        prefix = f"{module.rstrip('.')}."
        model = {
            name.removeprefix(prefix): tensor for name, tensor in model.items() if name.startswith(prefix)
        }
        if not model:
            raise ConfigError(
                f"{kept.path} has no tensors whose names begin with {prefix!r}; its first: {next(iter(kept.model))!r}"
            )
    folder.mkdir(parents=True, exist_ok=True)
    if form == "safetensors":
        return [*write_shards(folder, model, shard_bytes), *_configs(run / PRETRAINED, module, folder)]
    state: StateDict = {"model": model}
    if kept.optimizers and not module:
        state["optimizer"] = _joined(kept)
    write_distributed(folder, state)
    return sorted(folder.iterdir())


def _configs(kept: Path, module: str, folder: Path) -> list[Path]:
    """Writes the configuration of a model of transformers that a run has kept."""
    try:
        texts = parse_configs(read_regular(kept))
    except FileNotFoundError:
        return []
    except (OSError, ValueError) as error:
        raise DataError(
            f"{kept} cannot be read: {error}; remove it, and write config.json yourself"
        ) from error
    files = texts.get(f"{module.rstrip('.')}." if module else "", {})
    for name, text in files.items():
        (folder / name).write_text(text, encoding="utf-8")
    return [folder / name for name in files]


def _optimizers_in(file: Path) -> tuple[list[StateDict], list[list[list[str]]]]:
    """The optimizers' state dicts that a checkpoint of a user's own loop has, and names of their parameters."""
    try:
        arrays = OwnState.decode(read_regular(file)).buffers
        told = (
            [decode(value, arrays) for value in json.loads(arrays[PLAIN].tobytes())]
            if PLAIN in arrays
            else []
        )
        groups = [optimizer["groups"] for optimizer in told if "groups" in optimizer]
    except FileNotFoundError:
        return [], []
    except (DataError, OSError, ValueError, KeyError, TypeError, AttributeError, RuntimeError) as error:
        raise DataError(f"{file} cannot be read: {error!r}; take another checkpoint") from error
    names = [[group.pop(NAMES) for group in its] for its in groups]
    states = [
        {**{key: value for key, value in optimizer.items() if key != "groups"}, "param_groups": its}
        for optimizer, its in zip(told, groups, strict=False)
    ]
    return states, names


def _joined(kept: Checkpoint) -> StateDict:
    """The state of all optimizers by the names of parameters, as `torch.distributed.checkpoint.state_dict` has it."""
    state: StateDict = {}
    groups: list[StateDict] = []
    for optimizer, names in zip(kept.optimizers, kept.names, strict=True):
        name_of = dict(enumerate(chain.from_iterable(names)))
        state |= {name_of.get(key, key): value for key, value in optimizer["state"].items()}
        groups += [
            {**group, "params": its} for group, its in zip(optimizer["param_groups"], names, strict=True)
        ]
    return {"state": state, "param_groups": groups}


def _of_distributed(path: Path, state: Mapping[str, Any]) -> Checkpoint:
    """The model and optimizer of a distributed checkpoint: its entries "model" and "optimizer", or all of it."""
    entries: Any = state.get("model", state)
    if not isinstance(entries, dict):
        raise DataError(f"{path}: its entry 'model' is a {type(entries).__name__}, expected tensors by name")
    model = {name: tensor for name, tensor in _flat(entries) if isinstance(tensor, torch.Tensor)}
    if not model:
        raise DataError(f"{path} has no tensors of a model; it has: {', '.join(map(str, state))}")
    told = next((state[key] for key in ("optimizer", "optim") if key in state), None)
    if not isinstance(told, dict) or not isinstance(told.get("param_groups"), list):
        return Checkpoint(path, dict(named(model.items())))
    names = [[str(name) for name in group["params"]] for group in told["param_groups"]]
    number = {name: index for index, name in enumerate(chain.from_iterable(names))}
    numbered = {number.get(key, key): value for key, value in told["state"].items()}
    groups = [
        {**group, "params": [number[name] for name in its]}
        for group, its in zip(told["param_groups"], names, strict=True)
    ]
    optimizer = {"state": numbered, "param_groups": groups}
    return Checkpoint(path, dict(named(model.items())), [optimizer], [names])


def _flat(entries: Mapping[str, Any], prefix: str = "") -> list[tuple[str, Any]]:
    pairs: list[tuple[str, Any]] = []
    for name, value in entries.items():
        pairs += _flat(value, f"{prefix}{name}.") if isinstance(value, dict) else [(f"{prefix}{name}", value)]
    return pairs
