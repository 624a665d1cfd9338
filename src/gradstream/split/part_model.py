"""`PartModel`: the `Model` of one process of a split replica. Its flat vector is its part alone."""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Any

import numpy as np
import torch
from torch import fx, nn

from gradstream.errors import ConfigError, InternalError
from gradstream.model.base import Batch, Layout, Model, Reduction, leaves_of
from gradstream.model.buffers import Buffers, as_numpy
from gradstream.model.built_module import Fixed, names_of
from gradstream.model.torch_module import BUILD_SEED, TorchModel
from gradstream.runtime.base import Report
from gradstream.split.cut import TorchPlan, layout_of_stage, plan_split
from gradstream.split.graph import Form, form_of, minibatch_values
from gradstream.split.partial_build import tensor_at
from gradstream.split.stage_model import StageModel

PLANS_KEPT = 4

_planning = threading.Lock()  # torch.fx changes torch while it records, for all threads
_plans: dict[object, TorchPlan] = {}
"""The newest plans of this process: the nodes of a simulation, and threads, share them."""


class PartModel:
    """Implements `Model` for one part: layout and first parameters. Its gradients need the other parts.

    Each process makes the same plan by itself, when it first looks at the layout.

    Args:
        model: the whole model, which is never built.
        example: a minibatch, whose shapes the plan follows.
        parts: number of parts, K.
        part: the part that this process holds.
        apart: parts train apart: no layer is divided, and parts share no parameters and no buffers.
        rounds: number of stages of each part; see `plan_split`.

    Attributes:
        changed: on part 0, buffers of other parts were loaded, which those do not have yet.
    """

    def __init__(
        self,
        model: TorchModel,
        example: Batch,
        parts: int,
        part: int,
        *,
        apart: bool = False,
        rounds: int = 1,
    ) -> None:
        self.reduction: Reduction = model.reduction
        self.part = part
        self._model = model
        self._example = example
        self._parts = parts
        self._apart = apart
        self._rounds = rounds
        self._theirs: dict[str, np.ndarray[Any, Any]] = {}
        self.changed = False

    @cached_property
    def plan(self) -> TorchPlan:
        """The plan of the split.

        Raises:
            ConfigError: the model cannot be divided, or not into this many parts.
        """
        leaves = leaves_of((self._example.inputs, self._example.targets))
        key = (
            *map(id, self._model.given),
            self._parts,
            *self._kind,
            *((path, leaf.shape, leaf.dtype) for path, leaf in leaves if leaf is not None),
        )
        with _planning:
            if key not in _plans:
                _plans[key] = self._checked()
                while len(_plans) > PLANS_KEPT:
                    del _plans[next(iter(_plans))]
            return _plans[key]

    def _checked(self) -> TorchPlan:
        planned = self._planned()
        if empty := [part for part in range(self._parts) if not planned.ranges_of(part)]:
            raise ConfigError(
                f"split={self._parts}: {len(empty)} parts would have no trained parameters, since the model has "
                f"too few layers with some that can be apart; expected at most split={self._parts - len(empty)}"
            )
        if self._apart:
            _check_apart(planned)
        return planned

    @property
    def _kind(self) -> tuple[object, ...]:
        """What distinguishes its plan from others of the same model."""
        return self._apart, self._rounds

    def _planned(self) -> TorchPlan:
        return plan_split(
            self._model, self._example, self._parts, divides=not self._apart, rounds=self._rounds
        )

    @cached_property
    def stages(self) -> Mapping[int, StageModel]:
        """The stages of this part, by number."""
        own = self.plan.stages_of(self.part)
        return {stage.number: StageModel(self._model, self.plan, stage.number) for stage in own}

    @cached_property
    def layout(self) -> Layout:
        """Layout of the part's own vector: the layouts of its stages, one after the other."""
        stages = [layout_of_stage(self.plan, stage.number) for stage in self.plan.stages_of(self.part)]
        slots = [slot for stage in stages for slot in stage.slots]
        return Layout.of([(slot.name, slot.shape) for slot in slots], self.whole.dtype)

    @cached_property
    def whole(self) -> Layout:
        """Layout of the unsplit model."""
        return self.plan.graph.layout

    @cached_property
    def _places(self) -> Mapping[int, slice]:
        places, end = {}, 0
        for number, stage in self.stages.items():
            places[number] = slice(end, end + stage.layout.elems)
            end += stage.layout.elems
        return places

    def place_of(self, number: int) -> slice:
        """The place of a stage in a vector of this part."""
        return self._places[number]

    def of_stage(self, number: int, vector: torch.Tensor) -> torch.Tensor:
        """The elements of a stage, in a vector of this part."""
        return vector[self._places[number]]

    def unknown(self, number: int, samples: int) -> dict[str, torch.Tensor]:
        """Gradients of a stage's inputs where the loss is not a number: NaN, so that no part below uses its own."""
        values = map(self.plan.value, self.plan.stages[number].inputs)
        return {
            value.name: torch.full(value.shape_of(samples), torch.nan, dtype=value.dtype)
            for value in values
            if value.has_gradient
        }

    def share(self, number: int) -> float:
        """The share of a stage in the model's arithmetic, as its parameters say: for simulations."""
        return float(self.stages[number].layout.elems / max(1, self.whole.elems))

    @cached_property
    def output(self) -> Form:
        """How the model's output depends on the number of samples.

        Raises:
            ConfigError: it is no single tensor.
        """
        node = self.plan.graph.output.args[0]
        form = form_of(node) if isinstance(node, fx.Node) else None
        if form is None:
            raise ConfigError(
                "the outputs of a split model are evaluated on its worker, and must be one tensor: "
                f"got {node}; leave evaluate_every out"
            )
        return form

    # ---- buffers ------------------------------------------------------------------------

    @cached_property
    def whole_buffers(self) -> Mapping[str, torch.Tensor]:
        """The persistent buffers of the whole model, without values."""
        state = self.plan.graph.blueprint.module.state_dict(keep_vars=True)
        return {name: tensor for name, tensor in state.items() if not isinstance(tensor, nn.Parameter)}

    @cached_property
    def second_names(self) -> Mapping[str, str]:
        """Further names of trained parameters of the whole model, each with its name in the layout."""
        names, _ = names_of(self.plan.graph.blueprint.module)
        return {name: first for name, first in names.items() if first is not None and first != name}

    @cached_property
    def frozen(self) -> Mapping[str, torch.Tensor]:
        """Frozen parameters of the whole model, under all of their names, without values."""
        return names_of(self.plan.graph.blueprint.module)[1]

    def fixed(self) -> Fixed:
        """The same with values, which a stage has only of what it uses: for a checkpoint, and the final model."""
        module = self.plan.graph.blueprint.part(self.frozen, BUILD_SEED)
        frozen = {name: as_numpy(tensor_at(module, name).detach()) for name in self.frozen}
        return Fixed(frozen, self.second_names)

    def buffers_of_part(self, part: int) -> Sequence[str]:
        """Names of the buffers that a part updates."""
        return self._buffers_of_parts[part]

    @cached_property
    def _buffers_of_parts(self) -> Sequence[Sequence[str]]:
        return [self._used_buffers(part) for part in range(self._parts)]

    def _used_buffers(self, part: int) -> list[str]:
        plan = self.plan
        used = [
            {piece.name for node in nodes for piece in plan.graph.tensors_of(node)} for nodes in plan.nodes
        ]
        own = set().union(*(used[stage.number] for stage in plan.stages_of(part)))
        if part == plan.stages[-1].part:  # nobody uses the rest
            own |= set(self.whole_buffers) - set().union(*used)
        return [name for name in self.whole_buffers if name in own]

    def buffers(self) -> dict[str, np.ndarray[Any, Any]]:
        """Copies of the buffers: those of this part; on part 0 also those of the others, as they were last heard."""
        own = {name: array for stage in self.stages.values() for name, array in stage.buffers().items()}
        if self.part == 0 and not self._theirs and len(own) < len(self.whole_buffers):
            names = [name for name in self.whole_buffers if name not in own]
            module = self.plan.graph.blueprint.part(names, BUILD_SEED)
            self._theirs = {name: as_numpy(tensor_at(module, name)).copy() for name in names}
        known = {**self._theirs, **own}
        return {name: known[name].copy() for name in self.whole_buffers if name in known}

    def load_buffers(self, buffers: Buffers) -> None:
        """Sets the buffers of this part; on part 0 also what the others are to take."""
        for stage in self.stages.values():
            stage.load_buffers(buffers)
        if self.part == 0:
            self._theirs = {name: np.array(buffers[name]) for name in self.whole_buffers}
            self.changed = bool(self._theirs)

    def packed_buffers(self, part: int) -> torch.Tensor:
        """The buffers that a part updates, as one vector of float64."""
        known = self.buffers()
        arrays = [known[name].reshape(-1).astype(np.float64) for name in self.buffers_of_part(part)]
        return torch.from_numpy(np.concatenate(arrays) if arrays else np.empty(0))

    def unpack_buffers(self, part: int, vector: torch.Tensor) -> None:
        """Takes the buffers of a part: as its own, or on part 0 as what it has heard of another one."""
        found, end = self.buffers(), 0
        for name in self.buffers_of_part(part):
            like = found[name]
            found[name] = vector[end : end + like.size].numpy().reshape(like.shape).astype(like.dtype)
            end += like.size
        if part == self.part:
            for stage in self.stages.values():
                stage.load_buffers(found)
        else:
            self._theirs.update({name: found[name] for name in self.buffers_of_part(part)})

    def buffer_elems(self, part: int) -> int:
        """Length of `packed_buffers`."""
        return sum(self.whole_buffers[name].numel() for name in self.buffers_of_part(part))

    def values(self, batch: Batch) -> Mapping[str, torch.Tensor]:
        """The tensors of a minibatch, by the names that the plan gives them."""
        return minibatch_values(self.plan.graph, batch)

    def init(self, seed: int, parameters: torch.Tensor) -> None:
        """See `Model.init`: the values that the unsplit model has there, to the bit."""
        for number, stage in self.stages.items():
            stage.init(seed, self.of_stage(number, parameters))

    def gradient(
        self, parameters: torch.Tensor, batch: Batch, gradient: torch.Tensor, *, seed: int, report: Report
    ) -> float:
        """Raises InternalError: a gradient needs all parts; see `worker.parts`."""
        raise InternalError(f"part {self.part} alone was asked for a gradient")

    def outputs(self, parameters: torch.Tensor, inputs: Any) -> torch.Tensor:
        """Raises InternalError: outputs need all parts."""
        raise InternalError(f"part {self.part} alone was asked for outputs")

    def tree(self, parameters: torch.Tensor) -> Mapping[str, np.ndarray[Any, Any]]:
        """The part's own parameters; a divided tensor's piece has the name of the tensor."""
        return {name: view.numpy() for name, view in self.layout.views(parameters)}


def _check_apart(plan: TorchPlan) -> None:
    """Raises ConfigError if a part would need more of another one than its outputs and their gradients."""
    buffers = {name for name, _ in plan.graph.blueprint.module.named_buffers()}
    written = {
        piece.name
        for node in plan.graph.nodes
        if node.meta["writes"]
        for piece in plan.graph.tensors_of(node)
    }
    for name in sorted(buffers & written):
        raise ConfigError(
            f"pipeline=SyntheticGradients(...): the model changes buffer {name!r} while it trains, for which the "
            "worker would have to wait; take a layer without running statistics, such as GroupNorm"
        )
    for value in plan.values:
        if value.has_gradient and not value.per_sample:
            raise ConfigError(
                f"pipeline=SyntheticGradients(...): {value.name!r} is used by several parts, and none can predict a "
                "parameter's gradient from one minibatch; put its users on one part, or do not tie it"
            )


def whole_layout_of(model: Model) -> Layout:
    """The layout of the run's model, of which a split replica's process holds a part."""
    return model.whole if isinstance(model, PartModel) else model.layout
