"""`Remainders`: what a codec keeps on a worker between two pushes or rounds, in memory and in checkpoints."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial

import torch

from gradstream.checkpoint.manifest import Resume
from gradstream.checkpoint.own_tensors import answering, read_own
from gradstream.codec.base import Codec
from gradstream.codec.low_rank import PowerSGD
from gradstream.errors import DataError
from gradstream.memory import Vector
from gradstream.model.base import Layout
from gradstream.runtime.base import Runtime, Work
from gradstream.transport.base import Endpoint
from gradstream.untrusted import say


class Remainders:
    """Holds the state of one worker's codec. It is zero at first.

    Args:
        runtime: of the worker's node.
        layout: of the parameters that the worker exchanges.
        codec: the codec.

    Attributes:
        vectors: by name, each as long as the parameters.
        bases: further tensors, by name: see `LowRankSums`.
    """

    def __init__(self, runtime: Runtime, layout: Layout, codec: Codec | PowerSGD) -> None:
        self._runtime = runtime
        names = ("residual",) if isinstance(codec, PowerSGD) else codec.state_names
        allocate = partial(runtime.memory.allocate, layout.elems, layout.dtype)
        self.vectors: Mapping[str, Vector] = {name: allocate(name) for name in names}
        self.bases: dict[str, torch.Tensor] = {}

    def serve(self, endpoint: Endpoint) -> None:
        """Gives the coordinator a copy for each checkpoint."""
        endpoint.serve("remainders", answering(self._state), model=False)

    async def _state(self) -> Mapping[str, torch.Tensor]:
        if self._runtime.memory.shape_only:
            return {}
        return {**{name: vector.tensor for name, vector in self.vectors.items()}, **self.bases}

    async def restore(self, resume: Resume) -> None:
        """Takes over what the checkpoint has of this worker. A worker that was not in it begins at zero.

        Raises:
            DataError: the file is of another model, or another codec.
        """
        runtime, node = self._runtime, self._runtime.node
        read = partial(read_own, runtime.storage, resume.folder, "remainders", node)
        found = await runtime.beside(read, work=Work("restore"))
        if found is None:
            say(
                f"{node}: its codec begins with nothing left out; {resume.folder} on this machine has no file of it"
            )
            return
        expected = {name: vector.tensor for name, vector in self.vectors.items()}
        form = {name: (tensor.shape, tensor.dtype) for name, tensor in expected.items()}
        if form != {name: (found[name].shape, found[name].dtype) for name in form if name in found}:
            raise DataError(
                f"{node}: the remainders in {resume.folder} do not fit this model and codec; resume from another "
                "checkpoint, or leave codec out"
            )
        for name, tensor in found.items():
            if name in expected:
                expected[name].copy_(tensor)
            else:
                self.bases[name] = tensor
