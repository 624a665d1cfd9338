"""A worker that leaks its knowledge of a run into a file, for tests that attack the run with it.

A process that holds this file can act as a malicious member of the run.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from gradstream.strategies import Downpour
from gradstream.strategies.api import ServerWorker
from gradstream.transport.base import Identity

_PEM = ("authority", "certificate", "key")
_KNOWN = ("job", "name", "incarnation", "fingerprint", "epoch")


@dataclass(frozen=True, slots=True)
class Leak:
    """A worker's knowledge of its run.

    Args:
        job, name, incarnation, fingerprint, epoch: the worker's identity.
        secret: secret of the run, in hexadecimal.
        coordinator: address of the coordinator. The run's events have the addresses of all other nodes.
        tls: the worker's "authority", "certificate" and "key" as PEM; empty for a run in plain text.
    """

    job: str
    name: str
    incarnation: int
    fingerprint: int
    epoch: int
    secret: str
    coordinator: str
    tls: dict[str, str]

    @classmethod
    def read(cls, path: Path) -> Leak:
        """Reads the file that an `Insider` has written."""
        return cls(**json.loads(path.read_text(encoding="utf-8")))

    def identity(self, **changed: Any) -> Identity:
        """The worker's identity, with these changes."""
        known = {name: getattr(self, name) for name in _KNOWN}
        return Identity(**(known | {"secret": bytes.fromhex(self.secret)} | changed))

    @property
    def identifiers(self) -> list[str]:
        """Secrets of the run as text, to be searched for in everything that a stranger can read."""
        numbers = [self.incarnation, self.fingerprint]
        return [self.job, self.secret, *(f"{n:x}" for n in numbers), *(str(n) for n in numbers)]


@dataclass(frozen=True, slots=True)
class Insider(Downpour):
    """Downpour whose last worker writes a `Leak` to `path` when it begins to train."""

    path: str = ""

    async def train(self, worker: ServerWorker) -> None:
        """See `Downpour.train`."""
        if worker.rank == worker.num_workers - 1:
            endpoint: Any = worker.server._links.endpoint  # type: ignore[attr-defined]
            mine = endpoint.identity
            known = {name: getattr(mine, name) for name in _KNOWN}
            coordinator = endpoint._main._addresses["coordinator"]
            security = endpoint._main._security
            pem = {name: getattr(security, name).decode() for name in _PEM} if security is not None else {}
            leak = Leak(**known, secret=mine.secret.hex(), coordinator=coordinator, tls=pem)
            _leave(Path(self.path), leak)
        await Downpour.train(self, worker)


def _leave(path: Path, leak: Leak) -> None:
    draft = path.with_suffix(".draft")
    draft.write_text(json.dumps(asdict(leak)))
    draft.rename(path)
