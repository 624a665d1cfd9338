"""Connects processes that torchrun has started, or another program that sets up torch.distributed.

Ranks and store are those of the user's own `init_process_group`, or else those that torchrun has set in the
environment. Only a few bytes go through the store; gradstream makes its process groups beside the user's, and
shares nothing with it.

Any process that reaches the store can read and write it, so no secret goes through it. On one machine, rank 0
writes the path of a file there that only this user can read. On several, all processes know a token: with it
rank 0 signs its address and certificate, and each process joins as a machine does.
"""

from __future__ import annotations

import hashlib
import hmac
import json
import os
import secrets
from collections.abc import Mapping
from datetime import timedelta
from typing import Any

import torch

from gradstream.errors import ConfigError, DeadlineError
from gradstream.job.job import Job
from gradstream.run.placement import WorkerPlacement, handed_out
from gradstream.run.remote.address import Address, local_address, new_token, token_of_environment
from gradstream.run.remote.listening import Listening
from gradstream.session.host import Guest, Host
from gradstream.transport.addresses import is_loopback
from gradstream.transport.socket.unix import host_id

KEY = "gradstream/assignment"
KEY_ROUNDS = 200_000  # of PBKDF2: makes it slow to find a weak token by trial
NO_TOKEN = """\
the workers are on several machines, and torchrun gives them no secret by which they could trust one another.
Make one:

    (umask 077; openssl rand -hex 16 > gradstream.token)

copy that file to each machine, and start on each of them

    GRADSTREAM_TOKEN_FILE=gradstream.token torchrun --nnodes ... script.py

(GRADSTREAM_TOKEN takes the token itself)"""


def of_process_group() -> tuple[int, int] | None:
    """(rank, world size) of the user's process group; None if there is none, or it has one process."""
    dist = torch.distributed
    if not dist.is_available() or not dist.is_initialized() or dist.get_world_size() == 1:
        return None
    return dist.get_rank(), dist.get_world_size()


def of_torchrun(environment: Mapping[str, str]) -> tuple[int, int] | None:
    """(rank, world size) as torchrun has set them; None if it has not, or has started one process.

    Raises:
        ConfigError: the environment variables contradict each other, or are no numbers.
    """
    if "RANK" not in environment or "WORLD_SIZE" not in environment:
        return None
    try:
        rank, size = int(environment["RANK"]), int(environment["WORLD_SIZE"])
    except ValueError as error:
        raise ConfigError(
            f"environment: RANK={environment['RANK']!r}, WORLD_SIZE={environment['WORLD_SIZE']!r}; expected "
            f"whole numbers, as torchrun sets them: {error}"
        ) from None
    if not 0 <= rank < size:
        raise ConfigError(
            f"environment: RANK={rank}, WORLD_SIZE={size}; expected a rank from 0 to WORLD_SIZE - 1, as torchrun "
            "sets it"
        )
    if size == 1:
        return None
    for name in ("MASTER_ADDR", "MASTER_PORT"):
        if not environment.get(name):
            raise ConfigError(
                f"environment: RANK and WORLD_SIZE are set, but {name} is not: start the script with torchrun, "
                "or unset RANK and WORLD_SIZE to run it alone"
            )
    return rank, size


def take_part(job: Job, rank: int, size: int) -> tuple[WorkerPlacement, Host | None]:
    """Joins the run as the worker `rank`. Returns its placement, and the host or guest to keep until the end.

    Rank 0 runs coordinator and servers as processes of its own. They listen on loopback, unless there are
    ranks on another machine.

    Args:
        job: the job that this process's script asks for.
        rank: rank of this process.
        size: number of processes.

    Raises:
        ConfigError: there are several machines, and no token.
        DeadlineError, PeerLostError, JoinRefusedError: the run did not come about.
    """
    rendezvous = _TorchRendezvous(job, rank, size)
    return rendezvous.host() if rank == 0 else rendezvous.follow()


class _TorchRendezvous:
    """Lets the processes of one run find each other through torch's store."""

    def __init__(self, job: Job, rank: int, size: int) -> None:
        self._job = job
        self._rank = rank
        self._size = size
        self._limit_s = job.deadlines.join_s + 60.0  # a process imports torch first
        self._store = _store(rank, size, self._limit_s)

    def host(self) -> tuple[WorkerPlacement, Host]:
        """Joins as rank 0. Tells the other ranks about an error."""
        try:
            found = [json.loads(self._wait_for(_key_of(rank), rank)) for rank in range(1, self._size)]
            away = [one["address"] for one in found if one["host"] != host_id()]
            host = Host(self._job, listening=self._listening(str(away[0])) if away else None)
            spec, coordinator = host.start()
        except Exception as error:
            self._say({"error": f"{type(error).__name__}: {error}"})
            raise
        if not away:
            self._say({"spec": spec, "coordinator": coordinator})
        return WorkerPlacement(0, self._size, spec, coordinator, host.network), host

    def follow(self) -> tuple[WorkerPlacement, Host | None]:
        """Joins as another rank."""
        me = {"host": host_id(), "address": _own_address()}
        self._store.set(_key_of(self._rank), json.dumps(me))
        said: dict[str, Any] = json.loads(self._wait_for(KEY, 0))
        if "error" in said:
            raise ConfigError(f"rank 0 could not begin the run: {said['error']}")
        if "signed" not in said:
            spec, coordinator = str(said["spec"]), str(said["coordinator"])
            return WorkerPlacement(self._rank, self._size, spec, coordinator, handed_out(spec)), None
        token, text = _token(), str(said["signed"])
        if not hmac.compare_digest(_proof(token, str(said["nonce"]), text), str(said["proof"])):
            raise ConfigError(
                f"rank {self._rank}: the message of rank 0 is not signed with this machine's token: "
                "GRADSTREAM_TOKEN, or the file of GRADSTREAM_TOKEN_FILE, must be the same on all machines"
            )
        at = json.loads(text)
        address = Address.parse(str(at["address"]), "rank 0")
        guest = Guest(self._job, self._rank, token, address, str(at["fingerprint"]))
        spec, coordinator = guest.start()
        return WorkerPlacement(self._rank, self._size, spec, coordinator, guest.network), guest

    def _listening(self, away: str) -> Listening:
        """Where the others join: each process as a machine of its own."""
        token = _token()

        def tell(address: str, fingerprint: str) -> None:
            nonce, text = secrets.token_hex(16), json.dumps({"address": address, "fingerprint": fingerprint})
            self._say({"signed": text, "nonce": nonce, "proof": _proof(token, nonce, text)})

        return Listening(
            address=_reachable(away),
            machines=self._size,
            servers_on="launcher",
            token=token,
            wait_s=self._limit_s,
            on_open=tell,
        )

    def _say(self, what: Mapping[str, str]) -> None:
        self._store.set(KEY, json.dumps(what))

    def _wait_for(self, key: str, rank: int) -> str:
        try:
            return bytes(self._store.get(key)).decode()
        except Exception as error:  # torch raises several kinds
            message = f"did not answer within {self._limit_s:g} s through torch's store: {error}"
            raise DeadlineError(f"worker-{rank}", message) from error


def _key_of(rank: int) -> str:
    return f"gradstream/rank-{rank}"


def _token() -> str:
    """The token that all processes know. Raises ConfigError if this process has none."""
    token = token_of_environment(os.environ)
    if token is None:
        raise ConfigError(NO_TOKEN)
    return new_token(token)


def _proof(token: str, nonce: str, text: str) -> str:
    """A signature of `text`, which only a process that knows the token can make."""
    key = hashlib.pbkdf2_hmac("sha256", token.encode(), nonce.encode(), KEY_ROUNDS)
    return hmac.new(key, text.encode(), "sha256").hexdigest()


def _own_address() -> str:
    """Address of this machine on the route to rank 0; "" if MASTER_ADDR is not set or leads nowhere."""
    try:
        return local_address(Address(os.environ["MASTER_ADDR"]))
    except (KeyError, OSError):
        return ""


def _reachable(away: str) -> Address:
    """Address at which the others reach rank 0's machine: MASTER_ADDR, or the one on the route to one of them.

    Many systems give a machine's own name a loopback address, which other machines cannot reach.
    """
    for host in filter(None, (os.environ.get("MASTER_ADDR"), away)):
        try:
            own = local_address(Address(host))
        except OSError:
            continue
        if not is_loopback(own):
            return Address(own)
    raise ConfigError(
        f"MASTER_ADDR={os.environ.get('MASTER_ADDR')!r}: the other machines cannot reach rank 0 there; expected "
        "a network address of rank 0's machine: torchrun --master-addr 10.0.0.1, for example, or with "
        "--rdzv-backend, --local-addr 10.0.0.1"
    )


def _store(rank: int, size: int, limit_s: float) -> Any:
    """The key-value store of the user's process group, or torchrun's own at MASTER_ADDR:MASTER_PORT.

    If rank 0 has made it, it lives as long as the process: others may still read it.
    """
    from torch.distributed.rendezvous import rendezvous

    dist: Any = torch.distributed
    if of_process_group() is not None:
        found = dist.distributed_c10d._get_default_store()
    else:
        found, _, _ = next(iter(rendezvous("env://", rank, size, timeout=timedelta(seconds=limit_s))))
    _stores.append(dist.PrefixStore("gradstream", found))
    return _stores[-1]


_stores: list[Any] = []
"""Keeps stores alive until the process ends."""
