"""The description of its model that a worker registers when it joins. All workers must register the same."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import torch

from gradstream.checkpoint.format import TensorSpec, spec_of, to_spec
from gradstream.memory import trim
from gradstream.model.base import Model
from gradstream.model.buffers import as_numpy, buffers_of
from gradstream.model.built_module import fixed_of
from gradstream.runtime.base import Runtime, Work
from gradstream.split.part_model import PartModel, whole_layout_of
from gradstream.strategies.base import RowExchange, ServerStrategy
from gradstream.wire import v1
from gradstream.wire.frames import to_wire
from gradstream.worker.config import WorkerConfig


async def model_spec_of(config: WorkerConfig, runtime: Runtime) -> v1.ModelSpec:
    """The model's size and fingerprint, and how it is exchanged. Builds the model.

    Raises:
        UserCodeError: the user's code could not build the model.
    """
    model = config.model
    # The first look at the layout may build the model; a shape-only run takes it below.
    await runtime.compute(lambda _: _build(model), work=Work("build"))
    layout = whole_layout_of(model)
    return v1.ModelSpec(
        fingerprint=layout.fingerprint,
        elems=layout.elems,
        dtype=to_wire(layout.dtype),
        chunk_elems=config.chunk_elems,
        optimizer=config.registered_rule,
        rows=row_spec_for(config),
        parts=_parts_of(model),
    )


def _parts_of(model: Model) -> list[v1.ModelPart]:
    if not isinstance(model, PartModel):
        return []
    ranges = [model.plan.ranges_of(part) for part in range(model.plan.parts)]
    return [v1.ModelPart(bounds=[edge for bounds in one for edge in bounds]) for one in ranges]


def row_exchange_of(config: WorkerConfig) -> RowExchange | None:
    """Which rows are exchanged; None for all of every chunk, as with a user's loop."""
    if config.loop is not None or not isinstance(config.plan.strategy, ServerStrategy):
        return None
    return config.plan.strategy.rows(bool(config.model.layout.tables))


def row_spec_for(config: WorkerConfig) -> v1.RowSpec | None:
    """The same, as a message to the shards."""
    exchange = row_exchange_of(config)
    if exchange is None:
        return None
    from gradstream.server.rows import row_spec_of  # runs without servers do not import it

    return row_spec_of(config.model.layout, exchange.block_elems)


def tensor_specs_of(model: Model) -> tuple[list[v1.TensorSpec], ...]:
    """The tensors of a checkpoint's files: those of the flat vector, buffers, and fixed tensors."""
    layout = whole_layout_of(model)
    tensors = [spec_of(slot.name, slot.shape, layout.dtype) for slot in layout.slots]
    if isinstance(model, PartModel):
        buffers, frozen = _specs_of(model.whole_buffers), _specs_of(model.frozen)
        seconds = model.second_names
    else:
        fixed = fixed_of(model)
        buffers, frozen, seconds = _specs_of(buffers_of(model)), _specs_of(fixed.frozen), fixed.second
    by_name = {tensor.name: tensor for tensor in tensors}
    second = [replace(by_name[first], name=name, same_as=first) for name, first in seconds.items()]
    return tuple(list(map(to_spec, specs)) for specs in (tensors, buffers, frozen + second))


def _specs_of(tensors: Mapping[str, np.ndarray[Any, Any] | torch.Tensor]) -> list[TensorSpec]:
    arrays = {
        name: as_numpy(torch.empty(0, dtype=tensor.dtype)) if isinstance(tensor, torch.Tensor) else tensor
        for name, tensor in tensors.items()
    }
    return [spec_of(name, tuple(tensor.shape), arrays[name].dtype) for name, tensor in tensors.items()]


def _build(model: Model) -> None:
    """Builds the model, and frees the memory that only building it took."""
    layout = model.layout
    trim(layout.elems * layout.dtype.itemsize)
