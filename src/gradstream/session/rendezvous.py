"""`StoreRendezvous`: lets processes that an engine has started on several machines find one another.

A few bytes go through a key-value store of torch: that of the user's own process group, torchrun's, or one that
process 0 opens. Any process that reaches the store can read and write it, so no secret goes through it. All processes
know a token: with it process 0 signs its address and certificate, and each process joins as a machine does.
"""

from __future__ import annotations

import hashlib
import hmac
import json
import os
import secrets
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import torch

from gradstream.errors import ConfigError, DeadlineError
from gradstream.run.place import Place
from gradstream.run.remote.address import Address, local_address, new_token, token_of_environment
from gradstream.transport.offers import is_loopback
from gradstream.transport.socket.unix import host_id
from gradstream.untrusted import escaped, say

KEY = "gradstream/assignment"
KEY_ROUNDS = 200_000  # of PBKDF2: makes it slow to find a weak token by trial
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
    """The store, as one process uses it.

    Args:
        place: place of this process.
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
        """Host id and address of each other process with which the run begins, once all are there."""
        ranks = range(1, self.place.least or self.place.size)
        found = [json.loads(self._wait_for(_key_of(rank), rank)) for rank in ranks]
        return [{key: str(one[key]) for key in ("host", "address")} for one in found]

    def own_address(self, away: str) -> Address:
        """The address at which the others reach this machine.

        Many systems give a machine's own name a loopback address, which other machines cannot reach.

        Args:
            away: address of a process on another machine.

        Raises:
            ConfigError: neither the host that the engine names nor that address leads to one.
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
        """Tells all others something that nobody needs to trust."""
        self._store.set(KEY, json.dumps(what))

    def say_where(self, address: str, fingerprint: str) -> None:
        """Tells all others where they join, signed with the token."""
        nonce, text = secrets.token_hex(16), json.dumps({"address": address, "fingerprint": fingerprint})
        self.say({"signed": text, "nonce": nonce, "proof": proof_of(self.token(), nonce, text)})

    # ---- the others ---------------------------------------------------------------------

    def heard(self) -> dict[str, Any]:
        """Says that this process is there, and waits for what process 0 says.

        Raises:
            ConfigError: process 0 could not begin the run.
            DeadlineError: it has said nothing in time.
        """
        me = {"host": host_id(), "address": self._route()}
        self._store.set(_key_of(self.place.rank), json.dumps(me))
        said: dict[str, Any] = json.loads(self._wait_for(KEY, 0))
        if "error" in said:
            raise ConfigError(f"rank 0 could not begin the run: {said['error']}")
        return said

    def where(self, said: Mapping[str, Any]) -> tuple[Address, str]:
        """Address and fingerprint in a message of `say_where`. Raises ConfigError unless the token has signed it."""
        text = str(said["signed"])
        if not hmac.compare_digest(proof_of(self.token(), str(said["nonce"]), text), str(said["proof"])):
            raise ConfigError(
                f"rank {self.place.rank}: the message of rank 0 is not signed with this machine's token: "
                "GRADSTREAM_TOKEN, or the file of GRADSTREAM_TOKEN_FILE, must be the same on all machines"
            )
        at = json.loads(text)
        return Address.parse(str(at["address"]), "rank 0"), str(at["fingerprint"])

    def _route(self) -> str:
        """Address of this machine on the route to process 0; "" if its host is not known, or leads nowhere."""
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
    """The store of a run's processes. If this one has opened it, it stays until this one ends: others may read it."""
    from torch.distributed.rendezvous import rendezvous

    dist: Any = torch.distributed
    limit = timedelta(seconds=limit_s)
    if dist.is_available() and dist.is_initialized():
        found = dist.distributed_c10d._get_default_store()
    else:
        with _waiting(place, limit_s):
            if place.engine == "torchrun":  # its agent may have opened one already
                found, _, _ = next(iter(rendezvous("env://", place.rank, place.size, timeout=limit)))
            else:
                found = dist.TCPStore(
                    place.host, place.port, None, place.rank == 0, timeout=limit, wait_for_workers=False
                )
    _stores.append(dist.PrefixStore("gradstream", found))
    return _stores[-1]


@contextmanager
def _waiting(place: Place, limit_s: float) -> Iterator[None]:
    """Says whom this process waits for, if it takes `SAY_S`. Raises DeadlineError where torch's store is not made."""
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
"""Seconds after which a process that waits says so."""


_stores: list[Any] = []
"""Keeps stores alive until the process ends."""
