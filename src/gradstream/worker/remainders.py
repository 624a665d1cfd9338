"""`Remainders`: what a worker has not sent yet, in memory and in checkpoints.

What its codec keeps between two pushes or rounds; and how far it has come since the exchange of its round began,
where it computes meanwhile (`GroupStrategy.delay`).
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
    """Names of the vectors that a codec keeps."""
    if codec is None:
        return ()
    return ("residual",) if isinstance(codec, PowerSGD) else codec.state_names


class Remainders:
    """Holds vectors of one worker. They are zero at first.

    Args:
        runtime: of the worker's node.
        layout: of the parameters that the worker exchanges.
        names: of the vectors.

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
                f"{node} begins with nothing left to send; {resume.folder} on this machine has no file of that"
            )
            return
        expected = {name: vector.tensor for name, vector in self.vectors.items()}
        form = {name: (tensor.shape, tensor.dtype) for name, tensor in expected.items()}
        if form != {name: (found[name].shape, found[name].dtype) for name in form if name in found}:
            raise DataError(
                f"{node}: the remainders in {resume.folder} do not fit this model, codec and strategy; resume from "
                "another checkpoint, or leave codec and delay out"
            )
        for name, tensor in found.items():
            if name in expected:
                expected[name].copy_(tensor)
            else:
                self.bases[name] = tensor


def encoder_of(context: ExchangeContext, kept: Remainders | None) -> Encoder | None:
    """Encodes what this worker exchanges; None where its codec encodes nothing by itself."""
    config, codec = context.config, context.config.run.codec
    if kept is None or codec is None or isinstance(codec, PowerSGD):
        return None
    state = {name: kept.vectors[name] for name in codec.state_names}
    seed = f"{config.run.job.seed}/{context.runtime.node}"
    return Encoder(codec, config.model.layout.dtype, seed, state)
