"""A request from outside to change a run's shards: how it is made, and what the launcher does.

A request is a file in the run directory, which the coordinator takes. The launcher learns from the events which
shards it has to start, and which of them hold the parameters.
"""

from __future__ import annotations

import json
import os
import secrets
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from gradstream.errors import ConfigError
from gradstream.job.plan import shard_name
from gradstream.runtime.base import Runtime, Storage
from gradstream.untrusted import parse_json

REQUEST = "reshard.json"
"""The file of a request, in the run directory."""

POLL_S = 0.1
"""Seconds between two checks for a request."""

MAX_BYTES = 256


def ask(run_dir: Path, servers: int) -> str:
    """Requests another number of shards. Returns the token of the request, which the events about it have.

    Raises:
        ConfigError: the run has not taken an earlier request yet, or the directory cannot be written.
    """
    token, path = secrets.token_hex(8), run_dir / REQUEST
    draft = path.with_suffix(f".{token}")
    try:
        draft.write_text(json.dumps({"servers": servers, "token": token}))
        os.link(draft, path)
    except FileExistsError:
        raise ConfigError(f"{path}: another request waits to be taken; try again in a second") from None
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror}; expected a directory that can be written") from error
    finally:
        draft.unlink(missing_ok=True)
    return token


def take_request(storage: Storage) -> tuple[int, str] | None:
    """Takes the pending request: number of shards, and token. None if there is none, or no sensible one."""
    try:
        size_bytes = storage.size(REQUEST)
        data = storage.read_at(REQUEST, 0, min(size_bytes, MAX_BYTES))
        storage.remove(REQUEST)
        request = parse_json(data, max_bytes=MAX_BYTES)
    except (OSError, ValueError):
        return None
    servers, token = (
        (request.get("servers"), request.get("token")) if isinstance(request, dict) else (None, None)
    )
    return (servers, token) if type(servers) is int and isinstance(token, str) else None


async def follow_requests(runtime: Runtime, reshard: Callable[[int, str], object]) -> None:
    """Passes requests on to the coordinator, until it is cancelled; the events report refused requests."""
    while True:
        request = take_request(runtime.storage)
        if request is not None:
            try:
                reshard(*request)
            except ConfigError:
                pass  # the coordinator has reported it
        await runtime.sleep(POLL_S)


# ---- the launcher -----------------------------------------------------------------------


class ShardChanges:
    """Which shards the launcher has to start, and which hold the parameters.

    Args:
        servers: number of shards that the run begins with.
    """

    def __init__(self, servers: int) -> None:
        self.holders: Sequence[str] = [shard_name(rank) for rank in range(servers)]
        self._due: Sequence[str] = ()

    def take(self, event: Mapping[str, Any]) -> None:
        """Takes a "reshard" event."""
        self._due = ()
        if event["state"] == "preparing":
            self._due = event["shards"]
        elif event["state"] == "switched":
            self.holders = event["shards"]

    def take_due(self) -> Sequence[str]:
        """The shards to start now; they count as started."""
        due, self._due = self._due, ()
        return due

    def is_extra(self, name: str) -> bool:
        """Whether a node is a shard that holds no parameters: a new shard, or a replaced one."""
        return name.startswith("shard") and name not in self.holders
