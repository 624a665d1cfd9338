"""Connects the scripts that an engine has started (torchrun, srun, Kubernetes, or a process group of their own).

Ranks and store are those of the user's own `init_process_group`, or else those that the engine has set in the
environment. gradstream makes its process groups beside the user's, and shares nothing with it.

On one machine, rank 0 writes the path of a file into the store that only this user can read. On several, each process
joins as a machine does: see `StoreRendezvous`.
"""

from __future__ import annotations

import os

import torch

from gradstream.job.job import Job
from gradstream.run.place import Place
from gradstream.run.placement import WorkerPlacement, handed_out
from gradstream.run.remote.listening import Listening
from gradstream.session.host import Guest, Host
from gradstream.session.rendezvous import StoreRendezvous
from gradstream.transport.socket.unix import host_id


def of_process_group() -> Place | None:
    """The place in the user's process group; None if there is none, or it has one process."""
    dist = torch.distributed
    if not dist.is_available() or not dist.is_initialized() or dist.get_world_size() == 1:
        return None
    return Place(
        engine="torchrun",
        rank=dist.get_rank(),
        size=dist.get_world_size(),
        host=os.environ.get("MASTER_ADDR", ""),
        port=0,
    )


def take_part(job: Job, place: Place) -> tuple[WorkerPlacement, Host | None]:
    """Joins the run as the worker of this rank. Returns its placement, and the host or guest to keep until the end.

    Rank 0 runs coordinator and servers as processes of its own. They listen on loopback, unless there are
    ranks on another machine.

    Args:
        job: the job that this process's script asks for.
        place: place of this process.

    Raises:
        ConfigError: there are several machines, and no token.
        DeadlineError, PeerLostError, JoinRefusedError: the run did not come about.
    """
    rendezvous = StoreRendezvous(place, job.deadlines.join_s + 60.0)  # a process imports torch first
    return _host(job, rendezvous) if place.rank == 0 else _follow(job, rendezvous)


def _host(job: Job, rendezvous: StoreRendezvous) -> tuple[WorkerPlacement, Host]:
    """Joins as rank 0. Tells the other ranks about an error."""
    size = rendezvous.place.size
    try:
        away = [one["address"] for one in rendezvous.others() if one["host"] != host_id()]
        host = Host(job, listening=_listening(rendezvous, away[0]) if away else None)
        spec, coordinator = host.start()
    except Exception as error:
        rendezvous.say({"error": f"{type(error).__name__}: {error}"})
        raise
    if not away:
        rendezvous.say({"spec": spec, "coordinator": coordinator})
    return WorkerPlacement(0, size, spec, coordinator, host.network), host


def _follow(job: Job, rendezvous: StoreRendezvous) -> tuple[WorkerPlacement, Host | None]:
    """Joins as another rank."""
    rank, size, said = rendezvous.place.rank, rendezvous.place.size, rendezvous.heard()
    if "signed" not in said:
        spec, coordinator = str(said["spec"]), str(said["coordinator"])
        return WorkerPlacement(rank, size, spec, coordinator, handed_out(spec)), None
    guest = Guest(job, rank, rendezvous.token(), *rendezvous.where(said))
    spec, coordinator = guest.start()
    return WorkerPlacement(rank, size, spec, coordinator, guest.network), guest


def _listening(rendezvous: StoreRendezvous, away: str) -> Listening:
    """Where the others join: each process as a machine of its own."""
    return Listening(
        address=rendezvous.own_address(away),
        machines=rendezvous.place.size,
        servers_on="launcher",
        token=rendezvous.token(),
        wait_s=rendezvous.limit_s,
        on_open=rendezvous.say_where,
    )
