"""Groups are formed here: the one place that knows their kinds."""

from __future__ import annotations

from collections.abc import Sequence

from gradstream.collectives.algorithms import ALGORITHMS
from gradstream.collectives.group import Group
from gradstream.collectives.mesh import Mesh
from gradstream.collectives.message_group import PIECE_BYTES, MessageGroup
from gradstream.collectives.torch_group import TorchGroup
from gradstream.errors import UnknownNameError
from gradstream.runtime.base import Runtime
from gradstream.transport.base import Endpoint

__all__ = ["KINDS", "form_group"]

TORCH = {"torch": "auto", "gloo": "gloo", "nccl": "nccl", "mpi": "mpi"}
"""Kinds that torch.distributed carries out, and the backend that each asks for."""

KINDS = ("auto", *ALGORITHMS, *TORCH)
"""What `form_group` knows: "auto" chooses, algorithms of message carriers, and those of `TORCH`."""


async def form_group(
    runtime: Runtime,
    endpoint: Endpoint,
    names: Sequence[str],
    rank: int,
    epoch: int,
    how: str = "auto",
    *,
    silence_s: float = 30.0,
    host: str = "",
    piece_bytes: int = PIECE_BYTES,
) -> Group:
    """All ranks come together; each calls this at about the same time.

    Args:
        runtime: of this node.
        endpoint: started, and told the addresses of all of `names`.
        names: of all nodes, by rank.
        rank: of this one.
        epoch: membership epoch of the group: ranks of different ones do not meet.
        how: one of `KINDS`; the same at all ranks.
        silence_s: how long a rank may be silent, now and later, before it counts as lost.
        piece_bytes: messages go in pieces of this size.
        host: names what ranks have in common that are close to each other; "" finds out.

    Raises:
        UnknownNameError: there is no such kind.
        ConfigError: torch.distributed cannot do it here; see `TorchGroup.form`.
        DeadlineError, PeerLostError: a rank has not come within `silence_s`, or is gone.
        RefusedError: ranks do not agree on who they are.
    """
    if how not in KINDS:
        raise UnknownNameError("kind of group", how, KINDS)
    if how in TORCH:
        return await TorchGroup.form(
            runtime, endpoint, names, rank, epoch, silence_s=silence_s, backend=TORCH[how]
        )
    mesh = Mesh(runtime, endpoint, names, rank, epoch=epoch, silence_s=silence_s)
    await mesh.meet()
    return MessageGroup(mesh, algorithm="ring" if how == "auto" else how, piece_bytes=piece_bytes)
