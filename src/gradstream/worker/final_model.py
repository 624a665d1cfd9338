"""The final model, and the best one so far, as files under the user's own names."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable

import torch

from gradstream.checkpoint.format import save
from gradstream.checkpoint.layouts import PRETRAINED, parse_configs
from gradstream.checkpoint.manifest import Evaluated
from gradstream.checkpoint.own_state import EXTRA_FILE, OwnState, worker_file
from gradstream.errors import ConfigError, DiskError
from gradstream.memory import trim
from gradstream.model.base import Model
from gradstream.model.buffers import Buffers
from gradstream.model.built_module import extra_of
from gradstream.runtime.base import Runtime, Storage, Work
from gradstream.runtime.storage import DISK_ERRORS, RETRY_S, disk_error, disk_remedy
from gradstream.telemetry.events import DiskEvent, Event
from gradstream.worker.replica import Replica

FINAL_MODEL = "checkpoints/final/model.safetensors"
BEST_MODEL = "checkpoints/best/model.safetensors"
BEST_EVALUATION = "checkpoints/best/evaluation.json"

WAIT_S = 60.0
"""Seconds to wait for room on a full disk: losing the final parameters, the run's result, would cost more."""


async def write_final_model(
    runtime: Runtime, model: Model, replica: Replica, buffers: Buffers, emit: Callable[[Event], None]
) -> None:
    """Writes the replica's parameters and the buffers. The strategy can no longer use the replica.

    While the disk is full, waits up to `WAIT_S` for room.

    Args:
        emit: called with an event if it waits.

    Raises:
        DiskError: the disk is still full, or broken; then the file is missing or an older one.
    """
    replica.retire()  # makes room for the copy that is written

    def write(_: object) -> None:
        trim(replica.parameters.tensor.nbytes)
        if tree := model.tree(replica.parameters.tensor):  # none where a loop's parts have written theirs
            runtime.storage.write(FINAL_MODEL, save({**tree, **buffers}))
            _write_beside(runtime.storage, model)

    work = Work("checkpoint", elems=len(replica.parameters))
    size_bytes = replica.parameters.tensor.nbytes + sum(array.nbytes for array in buffers.values())
    begun_ns, waits = runtime.now(), False
    while True:
        try:
            await runtime.compute(write, work=work, reads=[replica.parameters.all])
            return
        except OSError as error:
            waited_s, why = (runtime.now() - begun_ns) / 1e9, f"{disk_error(error)}; {disk_remedy(error)}"
            if error.errno not in DISK_ERRORS or waited_s >= WAIT_S:
                raise DiskError(
                    f"the final parameters ({size_bytes:,} bytes) are lost: {FINAL_MODEL} in the run "
                    f"directory cannot be written after {waited_s:.0f} s: {why}, and resume "
                    "the run from its newest checkpoint"
                ) from error
        if not waits:
            waits = True
            text = (
                f"the final parameters wait for the disk, up to {WAIT_S:g} s: {size_bytes:,} bytes for "
                f"{FINAL_MODEL} in the run directory; {why}"
            )
            emit(DiskEvent(what="final parameters", state="waiting", error=why, message=text))
        await runtime.sleep(RETRY_S)


def _write_beside(storage: Storage, model: Model) -> None:
    """Writes the state of a loop's own optimizers, and config.json of a model of transformers."""
    folder, _, _ = FINAL_MODEL.rpartition("/")
    try:
        state = extra_of(model)
    except ConfigError:  # a state that no file can hold, in a run without checkpoints
        state = {}
    if state:
        storage.write(f"{folder}/{worker_file(EXTRA_FILE)}", OwnState(0, state).encode())
    try:
        files = parse_configs(storage.read(PRETRAINED)).get("", {})
    except (FileNotFoundError, ValueError):
        files = {}
    for name, text in files.items():
        storage.write(f"{folder}/{name}", text.encode())


def keep_if_best(
    storage: Storage, model: Model, parameters: torch.Tensor, buffers: Buffers, found: Evaluated
) -> None:
    """Writes the evaluated parameters if no earlier evaluation of the run was as good. See `Evaluated.rank`.

    Raises:
        OSError: they cannot be written. The files are as before, or the evaluation is the older one.
    """
    try:
        before = json.loads(storage.read(BEST_EVALUATION))
        if (
            Evaluated(int(before["step"]), before["accuracy"], before["loss"], before.get("score")).rank
            >= found.rank
        ):
            return
    except (FileNotFoundError, ValueError, KeyError, TypeError):
        pass  # the file is missing or damaged
    if tree := model.tree(parameters):
        storage.write(BEST_MODEL, save({**tree, **buffers}))
        storage.write(BEST_EVALUATION, json.dumps(dataclasses.asdict(found)).encode())
