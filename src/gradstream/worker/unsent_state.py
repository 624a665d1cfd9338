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
from gradstream.worker.loop import Loop


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
        self._allocate = partial(runtime.memory.allocate, layout.elems, layout.dtype)
        self.vectors: Mapping[str, Vector] = {name: self._allocate(name) for name in names}
        self.bases: dict[str, torch.Tensor] = {}
        self._before: RoundBefore | None = None

    def survive(self, names: Sequence[str]) -> None:
        """Prepares for rounds that are made again after a worker's death: see `RoundBefore`.

        Args:
            names: the vectors that encoding changes.
        """
        if names and not self._runtime.memory.shape_only:
            kept = {name: self._allocate(f"{name} before") for name in names}
            self._before = RoundBefore(self, kept)

    def encodes(self, number: int, start: int, stop: int, base: str = "") -> None:
        """A codec is about to encode the elements [start, stop) in the round of this number, from the front on.

        Args:
            base: name of their basis.
        """
        if self._before is not None:
            self._before.encodes(number, start, stop, base)

    def serve(self, endpoint: Endpoint, loop: Loop | None) -> None:
        """Serves copies to the coordinator for checkpoints.

        Args:
            loop: the user's own loop, if only its gradients are exchanged.
        """

        async def state() -> Mapping[str, torch.Tensor]:
            if self._runtime.memory.shape_only:
                return {}
            if loop is not None and loop.unfinished and self._before is not None:
                return self._before.state()
            return self._state()

        endpoint.serve("remainders", answering(state), model=False)

    def _state(self) -> dict[str, torch.Tensor]:
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


class RoundBefore:
    """The state of a worker's codec before the present round, which the death of another worker may break.

    What is encoded then has left the codec's state, but is in no model. Where the round is made again, its state
    begins as before; if others have completed it, the state is right as it is.

    Args:
        state: the state.
        kept: memory for its vectors, by name.
    """

    def __init__(self, state: UnsentState, kept: Mapping[str, Vector]) -> None:
        self._state = state
        self._kept = kept
        self._bases: dict[str, torch.Tensor] = {}
        self._number = -1
        self._stop = 0  # the elements before are kept

    def encodes(self, number: int, start: int, stop: int, base: str) -> None:
        """See `UnsentState.encodes`: keeps the state of these elements; of a round that is made again, restores it."""
        if number != self._number:
            self._number, self._stop, self._bases = number, 0, dict(self._state.bases)
        again, first = slice(start, min(stop, self._stop)), slice(self._stop, max(stop, self._stop))
        for name, kept in self._kept.items():
            now = self._state.vectors[name].tensor
            if again.start < again.stop:
                now[again].copy_(kept.tensor[again])
            kept.tensor[first].copy_(now[first])
        if base in self._bases and again.start < again.stop:
            self._state.bases[base] = self._bases[base]
        self._stop = first.stop

    def state(self) -> dict[str, torch.Tensor]:
        """Copies of the state before the round."""
        found = {name: vector.tensor.clone() for name, vector in self._state.vectors.items()}
        for name, kept in self._kept.items():
            found[name][: self._stop] = kept.tensor[: self._stop]
        return {**found, **self._state.bases, **self._bases}


def encoder_of(context: ExchangeContext, unsent: UnsentState | None) -> Encoder | None:
    """The encoder of this worker's exchanges; None if its codec does not encode single vectors."""
    config, codec = context.config, context.config.plan.codec
    if unsent is None or codec is None or isinstance(codec, PowerSGD):
        return None
    state = {name: unsent.vectors[name] for name in codec.state_names}
    seed = f"{config.plan.job.seed}/{context.runtime.node}"
    return Encoder(codec, config.model.layout.dtype, seed, state)
