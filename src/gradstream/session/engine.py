"""A job file whose processes an engine has started, one on each machine: process 0 trains, the others join it.

    gradstream train JOB.py      in every process of torchrun, srun or an indexed Job of Kubernetes

A job that the engine starts again, under the same name or with the same run directory, goes on from its newest
checkpoint, by the options that it has now.
"""

from __future__ import annotations

import dataclasses
import socket
from collections.abc import Callable, Sequence
from pathlib import Path

from gradstream._resume import resume
from gradstream._train import train
from gradstream.errors import ConfigError
from gradstream.job.job import Job
from gradstream.run.followed_events import OnEvent
from gradstream.run.place import Place
from gradstream.run.remote.address import Address, local_address
from gradstream.run.remote.join import Joining, join
from gradstream.run.remote.listening import Listening, ServersOn, workers_each
from gradstream.run.remote.members import name_of_rank
from gradstream.run.result import FINAL_MODEL, Run
from gradstream.session.rendezvous import StoreRendezvous
from gradstream.transport.addresses import is_loopback
from gradstream.transport.socket.unix import host_id
from gradstream.untrusted import say


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
