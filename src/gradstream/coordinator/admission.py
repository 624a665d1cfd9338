"""`Admission`: admits expected nodes of the same version, if all workers have built the same model."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from gradstream._version import __version__
from gradstream.checkpoint.format import of_spec
from gradstream.checkpoint.manifest import Resume
from gradstream.checkpoint.own_state import CHECK
from gradstream.coordinator.lead import Lead, Refuse
from gradstream.coordinator.nodes import Nodes
from gradstream.telemetry.events import StartedEvent
from gradstream.untrusted import parse_json
from gradstream.wire import v1
from gradstream.wire.chunks import part_map_of

# ---- admission ---------------------------------------------------------------------------

MAX_ELEMS, MAX_CHUNKS, MAX_DIMENSIONS = 1 << 44, 1 << 24, 64
_ADDRESS = re.compile(r"[ -~]{0,1024}")


class Admission(Lead):
    """Checks nodes that want to join, and keeps the model as the first worker registered it.

    Args:
        nodes: the expected nodes, and the current members.
        resume: the checkpoint whose model the workers must have; None if the first worker's model counts.

    Attributes:
        model: the registered model; None before a worker has joined.
        tensors: its trained parameters, for checkpoints.
        buffers: its buffers, for checkpoints.
        fixed: its frozen parameters, for checkpoints.
    """

    KEPT = ("model", "tensors", "buffers", "fixed", "_registrar", "_rows_open")
    """See `durable.state`."""

    def __init__(self, nodes: Nodes, resume: Resume | None) -> None:
        self.model: v1.ModelSpec | None = None
        self.tensors: Sequence[v1.TensorSpec] = ()
        self.buffers: Sequence[v1.TensorSpec] = ()
        self.fixed: Sequence[v1.TensorSpec] = ()
        self._nodes = nodes
        self._registrar = ""
        if resume is not None:
            self.model, self._registrar = _spec_of(resume.model), f"the checkpoint {resume.folder}"
        self._rows_open = resume is not None  # it may exchange other rows, and be split into other parts

    def notice(self, notice: v1.Notice) -> None:
        """Adds the registered model."""
        if self.model is not None:
            notice.model.CopyFrom(self.model)

    def with_model(self, started: StartedEvent) -> StartedEvent:
        """Fills the registered model into the record of a planned run."""
        model = self.model
        if model is None:
            return started
        no_parameters = sum(math.prod(tensor.shape) for tensor in self.tensors if tensor.name == CHECK)
        optimizer = started.optimizer
        if model.optimizer:  # brought by the workers
            optimizer = _rule_of(model.optimizer)["class"].rpartition(":")[2].lower() or optimizer
        return replace(
            started,
            num_parameters=model.elems - no_parameters,
            chunk_elems=model.chunk_elems,
            optimizer=optimizer,
        )

    def objection(self, request: v1.Join, closed: str) -> Refuse | None:
        """Returns why a node cannot join; None if it can.

        Args:
            request: the node's request.
            closed: why the run admits nobody now; "" if it does.
        """
        node = request.node
        if not _ADDRESS.fullmatch(node.address):
            return Refuse(v1.BAD_REQUEST, "a node joined with an invalid address")
        if request.software and request.software != __version__:  # workers in other languages send none
            return Refuse(
                v1.BAD_PROTOCOL,
                f"{node.name} runs gradstream {request.software}, expected {__version__}: "
                "install the same version everywhere",
            )
        if not self._nodes.expects(node):
            return self._name_objection(node)
        if closed:
            return Refuse(v1.NOT_MEMBER, f"{node.name}: {closed}")
        return self._model_objection(request) if node.role != "shard" else None

    def admit(self, request: v1.Join) -> None:
        """Adds a node that passed `objection`."""
        node = request.node
        if node.role != "shard":
            self._register(request)
        self._nodes.add(node)

    def _register(self, request: v1.Join) -> None:
        if self.model is None:
            self.model, self._registrar = request.model, request.node.name
        elif self._rows_open:
            self.model.CopyFrom(request.model)
            self._rows_open = False
        if not self.tensors:
            self.tensors, self.buffers, self.fixed = request.tensors, request.buffers, request.fixed

    def _name_objection(self, node: v1.Node) -> Refuse:
        there = self._nodes.get(node.name)
        if there is not None:
            return Refuse(
                v1.NOT_MEMBER,
                # Without its incarnation: anybody who knows that could speak in its name.
                f"{node.name} is in already, from {there.address}: give each node its own rank",
            )
        return Refuse(
            v1.BAD_REQUEST,
            f"{node.name} is not expected: this run has begun with {self._nodes.num_workers} workers "
            f"and {self._nodes.num_servers} servers, ranks from 0",
        )

    def _model_objection(self, request: v1.Join) -> Refuse | None:
        spec, model = request.model, self.model
        if len(spec.parts) != (self._nodes.parts if self._nodes.parts > 1 else 0):
            text = f"{request.node.name} joined with a model of {len(spec.parts)} parts, expected {self._nodes.parts}"
            return Refuse(v1.BAD_REQUEST, text)
        if not spec.elems or not spec.fingerprint:
            return Refuse(v1.BAD_REQUEST, f"{request.node.name} joined without a model")
        try:
            _check_model(request)
        except ValueError as error:
            return Refuse(v1.BAD_REQUEST, f"{request.node.name} joined with an impossible model: {error}")
        if model is not None and self._rows_open:
            spec = v1.ModelSpec()
            spec.CopyFrom(request.model)
            spec.ClearField("rows")
            spec.ClearField("parts")
        if model is None or spec == model:
            return None
        return Refuse(
            v1.BAD_FINGERPRINT,
            f"model of {request.node.name}: {_describe(spec)}; expected that of {self._registrar}: "
            f"{_describe(model)}. All workers must build the same model, from the same version of the job",
        )


def _check_model(request: v1.Join) -> None:
    """Raises ValueError for an impossible model."""
    spec = request.model
    if spec.dtype not in (v1.FLOAT32, v1.FLOAT64, v1.DTYPE_UNSPECIFIED) or spec.elems > MAX_ELEMS:
        raise ValueError(
            f"{spec.elems} elements of type {spec.dtype}; expected at most {MAX_ELEMS}, FLOAT32 or FLOAT64"
        )
    if spec.chunk_elems and spec.elems // spec.chunk_elems > MAX_CHUNKS:
        raise ValueError(
            f"{spec.elems} elements in chunks of {spec.chunk_elems}; expected at most {MAX_CHUNKS} chunks"
        )
    if spec.optimizer:
        _rule_of(spec.optimizer)
    if spec.parts:
        _check_parts(spec)
    names: dict[str, v1.TensorSpec] = {}
    for tensor in (*request.tensors, *request.buffers, *request.fixed):
        if tensor.name in names:
            raise ValueError(f"two tensors are called {tensor.name[:80]!r}")
        names[tensor.name] = tensor
        if len(tensor.shape) > MAX_DIMENSIONS or of_spec(tensor).size_bytes > MAX_ELEMS * 8:
            raise ValueError(f"{tensor.name[:80]!r} has a shape that no tensor has")
        if tensor.same_as and tensor.same_as not in names:
            raise ValueError(f"{tensor.name[:80]!r} is another name of no tensor")
    if request.tensors and sum(math.prod(tensor.shape) for tensor in request.tensors) != spec.elems:
        raise ValueError(f"tensors that do not have {spec.elems} elements together")


def _check_parts(spec: v1.ModelSpec) -> None:
    """Raises ValueError unless each element belongs to one part."""
    ranges = sorted(bounds for part in range(len(spec.parts)) for bounds in part_map_of(spec, part).ranges)
    end = 0
    for start, stop in ranges:
        if start != end or stop <= start:
            break
        end = stop
    if end != spec.elems:
        raise ValueError(f"{len(spec.parts)} parts that do not have each of {spec.elems} elements once")


def _rule_of(text: str) -> dict[str, Any]:
    """Parses the update rule that workers bring. Raises ValueError."""
    rule = parse_json(text)
    if not isinstance(rule, dict) or not isinstance(rule.get("class"), str):
        raise ValueError("an update rule without a class")
    return rule


def _spec_of(model: Mapping[str, Any]) -> v1.ModelSpec:
    """Returns the model of a checkpoint's manifest."""
    return v1.ModelSpec(
        fingerprint=model["fingerprint"],
        elems=model["elems"],
        dtype=v1.DType.Name(model["dtype"]),
        chunk_elems=model["chunk_elems"],
        optimizer=model.get("optimizer", ""),
    )


def _describe(spec: v1.ModelSpec) -> str:
    return (
        f"fingerprint {spec.fingerprint:016x}, {spec.elems:,} parameters of {v1.DType.Name(spec.dtype)}, "
        f"chunks of {spec.chunk_elems:,}" + (f", update rule {spec.optimizer}" if spec.optimizer else "")
    )
