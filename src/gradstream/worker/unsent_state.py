"""`UnsentState`: updates that a worker has not sent yet, in memory and in checkpoints.

That is the state of its codec between two pushes or rounds and, with `GroupStrategy.delay`, its steps since the
exchange of the round began.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial

import torch

from gradstream.checkpoint.manifest import Resume
from gradstream.checkpoint.own_state import answering, read_own
from gradstream.codec.base import Codec, Encoder
from gradstream.codec.low_rank import PowerSGD
from gradstream.errors import DataError
from gradstream.memory import Vector
from gradstream.model.base import Layout
from gradstream.runtime.base import Runtime, Work
from gradstream.transport.base import Endpoint
from gradstream.untrusted import say
from gradstream.worker.exchange import ExchangeContext


def codec_state(codec: Codec | PowerSGD | None) -> Sequence[str]:
    """Names of a codec's state vectors."""
    if codec is None:
        return ()
    return ("residual",) if isinstance(codec, PowerSGD) else codec.state_names


class UnsentState:
    """Vectors of one worker, zero at first.

    Args:
        layout: layout of the exchanged parameters.
        names: names of the vectors.

    Attributes:
        vectors: by name, each as long as the parameters.
        bases: further tensors, by name: see `LowRankSums`.
    """

    def __init__(self, runtime: Runtime, layout: Layout, names: Sequence[str]) -> None:
        self._runtime = runtime
        allocate = partial(runtime.memory.allocate, layout.elems, layout.dtype)
        self.vectors: Mapping[str, Vector] = {name: allocate(name) for name in names}
        self.bases: dict[str, torch.Tensor] = {}

    def serve(self, endpoint: Endpoint) -> None:
        """Serves copies to the coordinator for checkpoints."""
        endpoint.serve("remainders", answering(self._state), model=False)

    async def _state(self) -> Mapping[str, torch.Tensor]:
        if self._runtime.memory.shape_only:
            return {}
        return {**{name: vector.tensor for name, vector in self.vectors.items()}, **self.bases}

    async def restore(self, resume: Resume) -> None:
        """Restores this worker's vectors from a checkpoint. A worker that is not in it begins at zero.

        Raises:
            DataError: the file is of another model, or another codec.
        """
        runtime, node = self._runtime, self._runtime.node
        read = partial(read_own, runtime.storage, resume.folder, "remainders", node)
        saved = await runtime.beside(read, work=Work("restore"))
        if saved is None:
            say(f"{node} begins without unsent updates: {resume.folder} on this machine has no file of them")
            return
        expected = {name: vector.tensor for name, vector in self.vectors.items()}
        form = {name: (tensor.shape, tensor.dtype) for name, tensor in expected.items()}
        if form != {name: (saved[name].shape, saved[name].dtype) for name in form if name in saved}:
            raise DataError(
                f"{node}: the unsent updates in {resume.folder} do not fit this model, codec and strategy; resume from "
                "another checkpoint, or leave codec and delay out"
            )
        for name, tensor in saved.items():
            if name in expected:
                expected[name].copy_(tensor)
            else:
                self.bases[name] = tensor


def encoder_of(context: ExchangeContext, unsent: UnsentState | None) -> Encoder | None:
    """The encoder of this worker's exchanges; None if its codec does not encode single vectors."""
    config, codec = context.config, context.config.plan.codec
    if unsent is None or codec is None or isinstance(codec, PowerSGD):
        return None
    state = {name: unsent.vectors[name] for name in codec.state_names}
    seed = f"{config.plan.job.seed}/{context.runtime.node}"
    return Encoder(codec, config.model.layout.dtype, seed, state)
