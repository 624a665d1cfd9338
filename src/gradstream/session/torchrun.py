"""Connects the scripts that an engine has started (torchrun, srun, Kubernetes, or a process group of their own).

Ranks and store are those of the user's own `init_process_group`, or else those that the engine has set in the
environment. gradstream makes its process groups beside the user's, and shares nothing with it.

On one machine, rank 0 writes the path of a file into the store that only this user can read. On several, each process
joins as a machine does: see `StoreRendezvous`.
"""

from __future__ import annotations

import dataclasses
import os
import socket
from collections.abc import Callable, Sequence
from pathlib import Path

import torch

from gradstream._resume import resume
from gradstream._train import train
from gradstream.errors import ConfigError
from gradstream.job.job import Job
from gradstream.run.followed_events import OnEvent
from gradstream.run.place import Place
from gradstream.run.placement import WorkerPlacement, handed_out
from gradstream.run.remote.address import Address, local_address
from gradstream.run.remote.join import Joining, join
from gradstream.run.remote.listening import Listening, ServersOn, workers_each
from gradstream.run.remote.members import name_of_rank
from gradstream.run.result import FINAL_MODEL, Run
from gradstream.session.host import Guest, Host
from gradstream.session.rendezvous import StoreRendezvous
from gradstream.transport.offers import is_loopback
from gradstream.transport.socket.unix import host_id
from gradstream.untrusted import say

# ---- torchrun ----------------------------------------------------------------------------


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


# ---- engine ------------------------------------------------------------------------------
# A job file whose processes an engine has started, one on each machine: process 0 trains, the others join it.
#
#     gradstream train JOB.py      in every process of torchrun, srun or an indexed Job of Kubernetes
#
# A job that the engine starts again, under the same name or with the same run directory, goes on from its newest
# checkpoint, by the options that it has now.


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Together:
    """How the processes of an engine train a job together.

    Args:
        place: place of this process.
        workers_per_machine: workers of each process; None gives each one, or divides those of the job.
        servers_on: see `Listening`. By default process 0 has all shards: an engine that takes a process away sends it
            SIGTERM, and only a process without a shard can leave.
        wait_s: seconds within which the other processes have to be there.
        token: the token; None takes it from the environment.
    """

    place: Place
    workers_per_machine: int | None = None
    servers_on: ServersOn = "launcher"
    wait_s: float = 600.0
    token: str | None = None

    def lead(self, job: Job, *, workers: int | None, on_event: OnEvent | None = None) -> Run:
        """Trains as process 0, or goes on with the run that this job of the engine had begun before.

        Args:
            job: the job.
            workers: number of all workers, where the user has asked for one.
            on_event: as for `train`.

        Raises:
            ConfigError: there is no token, or numbers do not fit. The other processes are told.
            GradstreamError: as in `train`.
        """
        rendezvous = StoreRendezvous(self.place, self.wait_s, self.token)
        run_dir = job.run_dir or (Path("runs") / self.place.job if self.place.job else None)
        try:
            listening = self._listening(rendezvous, workers)
            options = {} if workers is None else {"workers": workers}
            if run_dir is not None and (run_dir / FINAL_MODEL).is_file():
                raise ConfigError(
                    f"{run_dir} has finished, so nothing is left to do; name another --run-dir to train anew"
                )
            total = listening.machines * listening.workers_per_machine
            if workers is None and not job.phases and job.workers * job.split not in (1, total):
                say(
                    f"{total} workers: workers={job.workers} of the job is for one machine, and here are more"
                )
            job = dataclasses.replace(job, run_dir=run_dir)
            if run_dir is not None and (run_dir / "run.json").is_file():
                return resume(run_dir, job=job, on_event=on_event, listen=listening, **options)  # type: ignore[arg-type]
            return train(job, on_event=on_event, listen=listening, **options)  # type: ignore[arg-type]
        except Exception as error:
            rendezvous.say({"error": f"{type(error).__name__}: {error}"})
            raise

    def _listening(self, rendezvous: StoreRendezvous, workers: int | None) -> Listening:
        token = rendezvous.token()
        return Listening(
            address=self._address(rendezvous),
            machines=self.place.size,
            least=self.place.least or None,
            workers_per_machine=workers_each(self.place.size, self.workers_per_machine, workers),
            servers_on=self.servers_on,
            token=token,
            wait_s=self.wait_s,
            on_open=rendezvous.say_where,
        )

    def _address(self, rendezvous: StoreRendezvous) -> Address:
        """The address of this machine at which the others reach it; loopback where all are here."""
        if self.place.least:  # others may come from other machines later
            own = local_address(Address(self.place.host))
            if is_loopback(self.place.host) or not is_loopback(own):
                return Address(own)
        away = [one["address"] for one in rendezvous.others() if one["host"] != host_id()]
        return rendezvous.own_address(away[0]) if away else Address("127.0.0.1")

    def follow(
        self,
        job: str,
        arguments: Sequence[str],
        on_note: Callable[[str], None],
        run_dir: Path | None = None,
    ) -> int:
        """Takes part as another process. Returns the exit status of the run.

        Args:
            job: place of the job file.
            arguments: command-line arguments of the job file.
            on_note: called with sentences on what is going on.
            run_dir: folder for logs; None makes one.

        Raises:
            ConfigError: process 0 could not begin the run, or its message is not signed with the token.
            GradstreamError: as in `join`.
        """
        rendezvous = StoreRendezvous(self.place, self.wait_s, self.token)
        token = rendezvous.token()
        address, fingerprint = rendezvous.where(rendezvous.heard())
        joining = Joining(
            address=address,
            job=job,
            token=token,
            fingerprint=fingerprint,
            arguments=arguments,
            machine=name_of_rank(self.place.rank, socket.gethostname()),
            run_dir=run_dir,
        )
        return join(joining, on_note)
