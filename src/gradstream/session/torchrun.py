"""Connects scripts that an engine has started (torchrun, srun, Kubernetes, or a process group of their own).

Ranks and store come from the user's own `init_process_group`, or else from the engine's environment variables.
gradstream's process groups are separate from the user's.

On one machine, rank 0 puts into the store the path of a file that only this user can read. On several machines, each
process joins as a machine would: see `StoreRendezvous`.
"""

from __future__ import annotations

import dataclasses
import hashlib
import hmac
import json
import os
import secrets
import socket
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch

from gradstream._resume import resume
from gradstream._train import train
from gradstream.errors import ConfigError, DeadlineError
from gradstream.job.job import Job
from gradstream.run.followed_events import OnEvent
from gradstream.run.place import Place
from gradstream.run.placement import WorkerPlacement, handed_out
from gradstream.run.remote.address import Address, local_address, new_token, token_of_environment
from gradstream.run.remote.join import Joining, join
from gradstream.run.remote.listening import Listening, ServersOn, workers_each
from gradstream.run.remote.members import name_of_rank
from gradstream.run.result import FINAL_MODEL, Run
from gradstream.session.host import Guest, Host
from gradstream.transport.offers import is_loopback
from gradstream.transport.socket.unix import host_id
from gradstream.untrusted import escaped, say

# ---- rendezvous --------------------------------------------------------------------------
# `StoreRendezvous`: lets processes that an engine has started on several machines find one another.
#
# They exchange a few bytes through a key-value store of torch: that of the user's process group, torchrun's, or one
# that process 0 opens. Any process that reaches the store can read and write it, so no secret goes through it. All
# processes know a token, with which process 0 signs its address and certificate; then each process joins as a machine
# would.

KEY = "gradstream/assignment"
KEY_ROUNDS = 200_000  # of PBKDF2: makes guessing a weak token slow
NO_TOKEN = """\
the workers are on several machines, and {engine} gives them no secret by which they could trust one another.
Make one:

    (umask 077; openssl rand -hex 16 > gradstream.token)

copy that file to each machine, and start on each of them

    {example}

(GRADSTREAM_TOKEN takes the token itself)"""
EXAMPLES = {
    "torchrun": "GRADSTREAM_TOKEN_FILE=gradstream.token torchrun --nnodes ... script.py",
    "Slurm": "GRADSTREAM_TOKEN_FILE=$PWD/gradstream.token srun ...",
    "Kubernetes": "the pods with GRADSTREAM_TOKEN from a secret: `gradstream launch --emit kubernetes` writes that",
}


class StoreRendezvous:
    """One process's view of the store.

    Args:
        limit_s: the longest wait for another process, in seconds.
        token: the token; None takes it from the environment.
    """

    def __init__(self, place: Place, limit_s: float, token: str | None = None) -> None:
        self.place = place
        self.limit_s = limit_s
        self._token = token
        self._store = _store(place, limit_s)

    def token(self) -> str:
        """The token that all processes know. Raises ConfigError if this process has none."""
        token = self._token or token_of_environment(os.environ)
        if token is None:
            engine = self.place.engine
            raise ConfigError(
                NO_TOKEN.format(engine=engine, example=EXAMPLES.get(engine, EXAMPLES["torchrun"]))
            )
        return new_token(token)

    # ---- process 0 ----------------------------------------------------------------------

    def others(self) -> list[dict[str, str]]:
        """Waits for the other processes with which the run begins. Returns the host id and address of each."""
        ranks = range(1, self.place.least or self.place.size)
        messages = [json.loads(self._wait_for(_key_of(rank), rank)) for rank in ranks]
        return [{key: str(message[key]) for key in ("host", "address")} for message in messages]

    def own_address(self, away: str) -> Address:
        """The address at which other machines reach this one.

        Many systems give a machine's own name a loopback address, which other machines cannot reach.

        Args:
            away: address of a process on another machine.

        Raises:
            ConfigError: neither the engine's host name nor a route to `away` yields such an address.
        """
        for host in filter(None, (self.place.host, away)):
            try:
                own = local_address(Address(host))
            except OSError:
                continue
            if not is_loopback(own):
                return Address(own)
        raise ConfigError(
            f"the other machines cannot reach process 0 at {self.place.host!r}, the host of {self.place.engine}; "
            "expected a network address of its machine: torchrun --master-addr 10.0.0.1, for example, or with "
            "--rdzv-backend, --local-addr 10.0.0.1"
        )

    def say(self, what: Mapping[str, str]) -> None:
        """Sends the other processes a message that nobody needs to trust."""
        self._store.set(KEY, json.dumps(what))

    def say_where(self, address: str, fingerprint: str) -> None:
        """Tells the other processes where to join, in a message signed with the token."""
        nonce, text = secrets.token_hex(16), json.dumps({"address": address, "fingerprint": fingerprint})
        self.say({"signed": text, "nonce": nonce, "proof": proof_of(self.token(), nonce, text)})

    # ---- the others ---------------------------------------------------------------------

    def heard(self) -> dict[str, Any]:
        """Announces this process, and waits for process 0's message.

        Raises:
            ConfigError: process 0 could not begin the run.
            DeadlineError: process 0 has sent nothing in time.
        """
        me = {"host": host_id(), "address": self._route()}
        self._store.set(_key_of(self.place.rank), json.dumps(me))
        said: dict[str, Any] = json.loads(self._wait_for(KEY, 0))
        if "error" in said:
            raise ConfigError(f"rank 0 could not begin the run: {said['error']}")
        return said

    def where(self, said: Mapping[str, Any]) -> tuple[Address, str]:
        """Address and fingerprint in a message of `say_where`. Raises ConfigError unless the token signed it."""
        text = str(said["signed"])
        if not hmac.compare_digest(proof_of(self.token(), str(said["nonce"]), text), str(said["proof"])):
            raise ConfigError(
                f"rank {self.place.rank}: the message of rank 0 is not signed with this machine's token: "
                "GRADSTREAM_TOKEN, or the file of GRADSTREAM_TOKEN_FILE, must be the same on all machines"
            )
        at = json.loads(text)
        return Address.parse(str(at["address"]), "rank 0"), str(at["fingerprint"])

    def _route(self) -> str:
        """This machine's address on the route to process 0; "" if process 0's host is unknown or unreachable."""
        try:
            return local_address(Address(self.place.host)) if self.place.host else ""
        except OSError:
            return ""

    def _wait_for(self, key: str, rank: int) -> str:
        try:
            return bytes(self._store.get(key)).decode()
        except Exception as error:  # torch raises several kinds
            message = f"did not answer within {self.limit_s:g} s through torch's store: {error}"
            raise DeadlineError(f"worker-{rank}", message) from error


def _key_of(rank: int) -> str:
    return f"gradstream/rank-{rank}"


def proof_of(token: str, nonce: str, text: str) -> str:
    """A signature of `text`, which only a process that knows the token can make."""
    key = hashlib.pbkdf2_hmac("sha256", token.encode(), nonce.encode(), KEY_ROUNDS)
    return hmac.new(key, text.encode(), "sha256").hexdigest()


def _store(place: Place, limit_s: float) -> Any:
    """The store of a run's processes. If this process opens it, the store stays until this process ends."""
    from torch.distributed.rendezvous import rendezvous

    dist: Any = torch.distributed
    limit = timedelta(seconds=limit_s)
    if dist.is_available() and dist.is_initialized():
        store = dist.distributed_c10d._get_default_store()
    else:
        with _waiting(place, limit_s):
            if place.engine == "torchrun":  # its agent may have opened a store already
                store, _, _ = next(iter(rendezvous("env://", place.rank, place.size, timeout=limit)))
            else:
                store = dist.TCPStore(
                    place.host, place.port, None, place.rank == 0, timeout=limit, wait_for_workers=False
                )
    _stores.append(dist.PrefixStore("gradstream", store))
    return _stores[-1]


@contextmanager
def _waiting(place: Place, limit_s: float) -> Iterator[None]:
    """Reports whom this process waits for after `SAY_S`. Raises DeadlineError if torch cannot open the store."""
    others = ", ".join(f"rank {rank}" for rank in range(min(place.size, 9)) if rank != place.rank)
    at = f"{os.environ.get('MASTER_ADDR', place.host)}:{os.environ.get('MASTER_PORT', place.port)}"
    told = threading.Timer(
        SAY_S,
        say,
        [f"rank {place.rank} of {place.size} waits for the others at {at}, for {limit_s:g} s at most"],
    )
    told.daemon = True
    told.start()
    try:
        yield
    except Exception as error:  # torch raises several kinds
        raise DeadlineError(
            f"worker-{place.rank}",
            f"did not meet the other {place.size - 1} ({others}) within {limit_s:g} s at {at}: each of the "
            f"{place.size} processes has to be started. This one is rank {place.rank} of {place.size} by its "
            f"environment (RANK, WORLD_SIZE, or what {place.engine} sets); without these variables it trains alone. "
            f"torch: {escaped(str(error).strip().partition(chr(10))[0], 200)}",
        ) from None
    finally:
        told.cancel()


SAY_S = 10.0
"""Seconds after which a waiting process says so."""


_stores: list[Any] = []
"""Keeps stores alive until the process ends."""


# ---- torchrun ----------------------------------------------------------------------------


def of_process_group() -> Place | None:
    """The place in the user's process group; None without a group of several processes."""
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
    """Joins the run as the worker of this rank. Returns its placement, and the host or guest (kept until the end).

    Rank 0 runs coordinator and servers as processes of its own. They listen on loopback, unless there are
    ranks on another machine.

    Args:
        job: the job that this process's script asks for.
        place: place of this process.

    Raises:
        ConfigError: there are several machines, and no token.
        DeadlineError, PeerLostError, JoinRefusedError: the run could not start.
    """
    rendezvous = StoreRendezvous(place, job.deadlines.join_s + 60.0)  # a process imports torch first
    return _host(job, rendezvous) if place.rank == 0 else _follow(job, rendezvous)


def _host(job: Job, rendezvous: StoreRendezvous) -> tuple[WorkerPlacement, Host]:
    """Joins as rank 0, and reports an error to the other ranks."""
    size = rendezvous.place.size
    try:
        away = [other["address"] for other in rendezvous.others() if other["host"] != host_id()]
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
    """Where the other processes join, each as a machine of its own."""
    return Listening(
        address=rendezvous.own_address(away),
        machines=rendezvous.place.size,
        servers_on="launcher",
        token=rendezvous.token(),
        wait_s=rendezvous.limit_s,
        on_open=rendezvous.say_where,
    )


# ---- engine ------------------------------------------------------------------------------
# A job file that an engine runs in one process on each machine: process 0 trains, the others join it.
#
#     gradstream train JOB.py      in every process of torchrun, srun or an indexed Job of Kubernetes
#
# If the engine restarts the job with the same name or run directory, it continues from its newest checkpoint, with
# its current options.


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Together:
    """How the processes of an engine train a job together.

    Args:
        place: place of this process.
        workers_per_machine: workers of each process; None means one each, or an equal share of the job's workers.
        servers_on: see `Listening`. By default process 0 has all shards: an engine removes a process by SIGTERM, and
            only a process without a shard can leave.
        wait_s: seconds to wait for the other processes.
        token: the token; None takes it from the environment.
    """

    place: Place
    workers_per_machine: int | None = None
    servers_on: ServersOn = "launcher"
    wait_s: float = 600.0
    token: str | None = None

    def lead(self, job: Job, *, workers: int | None, on_event: OnEvent | None = None) -> Run:
        """Trains as process 0, or resumes the run that this engine's job began earlier.

        Args:
            workers: total number of workers, if the user has set it.
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
                    f"{run_dir} has finished, so nothing is left to do; pass another --run-dir to train again"
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
        """The address at which other processes reach this machine; loopback if all are on it."""
        if self.place.least:  # others may come from other machines later
            own = local_address(Address(self.place.host))
            if is_loopback(self.place.host) or not is_loopback(own):
                return Address(own)
        away = [other["address"] for other in rendezvous.others() if other["host"] != host_id()]
        return rendezvous.own_address(away[0]) if away else Address("127.0.0.1")

    def follow(
        self,
        job: str,
        arguments: Sequence[str],
        on_note: Callable[[str], None],
        run_dir: Path | None = None,
    ) -> int:
        """Takes part as one of the other processes. Returns the exit status of the run.

        Args:
            job: path of the job file.
            arguments: command-line arguments of the job file.
            on_note: called with progress messages.
            run_dir: folder for logs; None creates one.

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
