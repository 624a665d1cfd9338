"""A worker's state at the beginning: the model's first parameters, or its own part of a checkpoint."""

from __future__ import annotations

import traceback
from functools import partial

from gradstream.checkpoint.folder import MODEL, read_own, read_tensors
from gradstream.checkpoint.manifest import Resume
from gradstream.checkpoint.own_state import EXTRA_FILE
from gradstream.errors import GradstreamError, UserCodeError
from gradstream.memory import Vector, trim
from gradstream.model.buffers import buffers_of, load_buffers
from gradstream.model.fixed import fixed_of, load_fixed
from gradstream.runtime.base import Runtime, Work
from gradstream.worker.config import WorkerConfig
from gradstream.worker.replica.base import Replica


async def fill_parameters(config: WorkerConfig, runtime: Runtime, parameters: Vector) -> None:
    """Writes the model's first parameters, which depend on the seed alone.

    Args:
        config: configuration of the worker.
        runtime: runtime of the worker's node.
        parameters: (E,), overwritten; undefined after an error.

    Raises:
        UserCodeError: the model's `init` raised.
    """

    def init(_: object) -> None:
        try:
            config.model.init(config.seed, parameters.tensor)
        except GradstreamError:
            raise
        except (Exception, SystemExit) as error:
            message = f"{runtime.node}: the model's init raised {type(error).__name__}: {error}"
            raise UserCodeError(message, traceback.format_exc()) from error
        trim(parameters.tensor.nbytes)

    await runtime.compute(init, work=Work("init", elems=len(parameters)), writes=[parameters.all])


async def restore_own(config: WorkerConfig, runtime: Runtime, replica: Replica, resume: Resume) -> bool:
    """Restores what this worker had of its own: buffers, samples gone through, and the state of a user's loop.

    Returns:
        Whether the buffers are those of the checkpoint. False: the checkpoint is not on this worker's disk.

    Raises:
        DataError, OSError: the checkpoint cannot be read.
    """
    model, storage = config.model, runtime.storage
    found = True
    if buffers_of(model):
        kept = await runtime.beside(
            lambda: read_own(storage, resume.folder, runtime.node), work=Work("restore")
        )
        found = kept is not None
        if kept is not None:
            load_buffers(model, kept.buffers)
            replica.samples = kept.samples
    if config.loop is not None:
        replica.samples = resume.samples.get(runtime.node, 0)
        frozen = list(fixed_of(model).frozen)  # the script may have made different ones this time
        if frozen:
            read = partial(read_tensors, storage, f"{resume.folder}/{MODEL}", frozen)
            load_fixed(model, await runtime.beside(read, work=Work("restore")))
    if config.gradients_only:
        extra = await runtime.beside(
            lambda: read_own(storage, resume.folder, EXTRA_FILE), work=Work("restore")
        )
        if extra is not None:
            load_fixed(model, extra.buffers)
    return found
