"""Makes the part of a split model that one process of a session has."""

from __future__ import annotations

import json
import math
import zlib
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.utils._python_dispatch import _disable_current_modes

from gradstream.errors import ConfigError
from gradstream.job.job import Job
from gradstream.model.batch import leaves_of
from gradstream.model.torch_module import TorchModel
from gradstream.run.plan import worker_name
from gradstream.session.binding import GradientBinding
from gradstream.session.bridge import LoopBridge
from gradstream.session.gradient_vector import GradientVector
from gradstream.session.part_link import OutputHook, PartLink
from gradstream.session.split_module import SplitModule, batch_of
from gradstream.split.part_model import PartModel
from gradstream.worker.parts.value_forms import check_encodable


class LoopSplit:
    """A part of a loop's model, before and while its process joins the run.

    Args:
        part: of this process.
        build, example, into, pipeline_dtype: see `Session.split`.
        processes: number of processes of the session.
        job: of the run.

    Attributes:
        binding: presents the loop to the run, in which parts exchange no parameters.

    Raises:
        ConfigError: see `Session.split`.
    """

    RULE = json.dumps({"class": "of each part", "fields": {}})
    """In the place of the description of an optimizer, which the session does not see before its first step."""

    def __init__(
        self,
        part: int,
        build: Callable[[], nn.Module],
        example: Any,
        into: int,
        processes: int,
        job: Job,
        pipeline_dtype: str | None,
    ) -> None:
        if isinstance(build, nn.Module) or not callable(build):
            raise ConfigError(
                f"session.split: got a {type(build).__name__}; expected a function that builds the module, since no "
                "process is to hold the whole: lambda: Net()"
            )
        if into != processes:
            raise ConfigError(
                f"session.split(into={into}) in a session of {processes} processes; expected into={processes}, or "
                f"{into} processes: each has one part. Several replicas of a split model are a job of train(split=)"
            )
        if job.checkpoint_every is not None:
            raise ConfigError(
                f"session.split: the run makes checkpoints (checkpoint_every={job.checkpoint_every!r}), which would "
                "not have the parts; expected join(checkpoint_every=None): save model.state_dict() of each part"
            )
        self._deadlines, self._example, self._batch = job.deadlines, example, batch_of(example)
        self._build, self._hook, self._dtype = _Seeded(build), OutputHook(), pipeline_dtype
        model = TorchModel(self._build, self._hook, "mean", "outputs", spread=True)
        self._model = PartModel(model, self._batch, into, part)
        check_encodable(
            self._model.plan, pipeline_dtype
        )  # raises before this process joins, as the plan does
        self.binding = _NoExchange()

    def join(self, bridge: LoopBridge, seed: int, stepped: Callable[[int], None]) -> SplitModule:
        """Makes this process's part, with the values that the whole module would have.

        Args:
            bridge: the worker beside the loop, which has joined the run.
            seed: of the run.
            stepped: see `SplitModule`.
        """
        model = self._model
        names = [worker_name(part) for part in range(model.plan.parts)]
        silence_s = self._deadlines.silence_s
        link = PartLink(bridge, model, self._hook, names, self._dtype, seed=seed, silence_s=silence_s)
        bridge.open(1, silent=True).zero_()
        bridge.exchange(math.nan)  # now all parts answer
        shapes = repr([(path, leaf.shape, leaf.dtype) for path, leaf in leaves_of(self._batch.inputs)])
        link.agree("split", model.whole.fingerprint % 2**32, zlib.crc32(shapes.encode()))
        self._build.state = link.first(self._build.state.double()).to(torch.uint8)
        parameters = torch.empty(model.layout.elems, dtype=model.layout.dtype)
        model.init(0, parameters)
        if model.part == 0:
            model.plan.graph.blueprint.draw(0)
        torch.set_rng_state(link.first(self._build.after.double()).to(torch.uint8))
        return SplitModule(model, link, parameters, self._example, stepped)


class _Seeded:
    """A build function that begins with one state of torch's generator, whichever seed is set.

    Attributes:
        state: the state with which it begins.
        after: the state with which it has ended, at its last call.
    """

    def __init__(self, build: Callable[[], nn.Module]) -> None:
        self.state = self.after = torch.get_rng_state()
        self._build = build

    def __call__(self) -> nn.Module:
        with _disable_current_modes():  # a part is built in modes that would take the states for its tensors
            torch.set_rng_state(self.state)
        module = self._build()
        with _disable_current_modes():
            self.after = torch.get_rng_state()
        return module


class _NoExchange(GradientBinding):
    """Rounds without gradients: they count steps, and keep the loops of the parts together."""

    def __init__(self) -> None:
        super().__init__(GradientVector({}, 0, torch.float64))

    def tree(self, parameters: torch.Tensor) -> Mapping[str, np.ndarray[Any, Any]]:
        """Nothing: the parts have written the final model."""
        return {}
