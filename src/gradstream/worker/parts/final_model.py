"""The final model of a split replica, as the same file as an unsplit one's. No process has all of it at once."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from gradstream.checkpoint.format import header_of, of_spec
from gradstream.memory import Vector
from gradstream.model.buffers import Buffers
from gradstream.runtime.base import Runtime, Work
from gradstream.split.part_model import PartModel
from gradstream.wire import v1
from gradstream.wire.parts import PartMap
from gradstream.worker.final_model import FINAL_MODEL
from gradstream.worker.parts.channel import PartChannel

PIECE_ELEMS = 1 << 22
"""Elements that are sent and written at once."""


def _pieces(elems: int) -> Iterator[tuple[int, int]]:
    for start in range(0, elems, PIECE_ELEMS):
        yield start, min(start + PIECE_ELEMS, elems)


async def send_parameters(channel: PartChannel, parameters: torch.Tensor) -> None:
    """Sends a part's parameters to the worker."""
    for start, stop in _pieces(len(parameters)):
        await channel.give(0, parameters[start:stop])


async def write_final_parts(
    runtime: Runtime,
    channel: PartChannel,
    model: PartModel,
    parameters: Vector,
    specs: tuple[list[v1.TensorSpec], ...],
    others: Buffers,
) -> None:
    """Writes the final model of a split replica. Runs on part 0, while the other parts send their parameters.

    Args:
        runtime: runtime of part 0.
        channel: over which the other parts send.
        model: the model of part 0.
        parameters: the parameters of part 0.
        specs: of the whole model, the parameters, the buffers and the frozen parameters: see `tensor_specs_of`.
        others: the buffers and frozen parameters themselves, by name.

    Raises:
        OSError: the file could not be written; an older one, if there was any, is unchanged.
        PeerLostError: the process of another part was lost before it had sent everything.
    """
    tensors, *rest = [[of_spec(spec) for spec in one] for one in specs]
    behind = [spec for one in rest for spec in one]
    header, storage = header_of([*tensors, *behind]), runtime.storage
    folder, _, _ = FINAL_MODEL.rpartition("/")
    draft, dtype = f"{FINAL_MODEL}.part", model.layout.dtype
    storage.mkdir(folder)

    async def put(at: int, data: bytes | memoryview) -> None:
        work = Work("checkpoint", elems=len(data) // dtype.itemsize)
        await runtime.beside(lambda: storage.patch(draft, [(at, data)]), work=work)

    await put(0, header)
    for part in range(model.plan.parts):
        place = PartMap(model.plan.ranges_of(part))
        for start, stop in _pieces(place.elems):
            own = parameters.tensor[start:stop]
            piece = own if part == model.part else await channel.take(part, stop - start, dtype)
            for at, begin, until in place.pieces(start, stop):
                data = piece[begin - start : until - start].numpy().data.cast("B")
                await put(len(header) + at * dtype.itemsize, data)
    end = len(header) + sum(spec.size_bytes for spec in tensors)
    starts = {spec.name: sum(one.size_bytes for one in tensors[:index]) for index, spec in enumerate(tensors)}
    for spec in behind:
        if spec.same_as:
            await put(end, storage.read_at(draft, len(header) + starts[spec.same_as], spec.size_bytes))
        else:
            await put(end, others[spec.name].tobytes())
        end += spec.size_bytes
    storage.rename(draft, FINAL_MODEL)
    storage.sync(folder)
