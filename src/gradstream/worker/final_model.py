"""The final model as a file, under the user's own names."""

from __future__ import annotations

import numpy as np
import safetensors.numpy

from gradstream.memory import trim
from gradstream.model.base import Model
from gradstream.model.buffers import Buffers
from gradstream.runtime.base import Runtime, Work
from gradstream.worker.worker import Replica

__all__ = ["FINAL_MODEL", "write_final_model"]

FINAL_MODEL = "checkpoints/final/model.safetensors"


async def write_final_model(runtime: Runtime, model: Model, replica: Replica, buffers: Buffers) -> None:
    """Writes the replica's parameters and the buffers. No verb of the replica can be used any more.

    Raises:
        OSError: the disk is full or broken; there is no file then, or the one of before.
    """
    replica.retire()  # makes room for the copy that is written

    def write(_: object) -> None:
        trim()
        tree = {**model.tree(replica.parameters.tensor), **buffers}
        arrays = {name: np.asarray(array, order="C") for name, array in tree.items()}
        runtime.storage.write(FINAL_MODEL, safetensors.numpy.save(arrays))

    work = Work("checkpoint", elems=len(replica.parameters))
    await runtime.compute(write, work=work, reads=[replica.parameters.all])
