"""`losses_of`: what becomes of a run when a worker dies, decided in one place.

the others go on without it        as the strategy says; in rounds only where others stand in for it, or where workers
                                   exchange in pairs: its part is left out then, until a new process takes its place
a new process takes its place      unless one of `_obstacles` holds
until then others stand in for it  in rounds, where a new process may come
its torn pushes are redone         elsewhere, where it pushed gradients to servers and a new process may come;
                                   not in passes, where each chunk knows the portions that it has

The reasons are ends of a sentence, for messages. docs/assumptions.md says the same in words.
"""

from __future__ import annotations

import json
import os
import secrets
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from gradstream.coordinator.phases import LossTolerance
from gradstream.errors import ConfigError
from gradstream.optim.base import PerTensor
from gradstream.pipeline.hybrid import Hybrid
from gradstream.pipeline.schedule import FLUSHING
from gradstream.run.plan import RunPlan, shard_name
from gradstream.runtime.base import Runtime, Storage
from gradstream.strategies.base import GroupStrategy, PeerStrategy, SharedMemoryStrategy
from gradstream.untrusted import parse_json

# ---- reshards ----------------------------------------------------------------------------
# A change of a run's shards from outside of its nodes: which runs can, how they are asked, what the launcher does.
#
# A request is a file in the run directory, which the coordinator takes. The launcher learns from the events which
# shards it has to start, and which of them hold the parameters; so does another launcher that takes the run over.

REQUEST = "reshard.json"
"""The file of a request, in the run directory."""

POLL_S = 0.1
"""Seconds between two looks for a request."""

MAX_BYTES = 256


def why_shards_stay(plan: RunPlan, *, spread: bool) -> str:
    """Why a run cannot change its number of shards while it goes on, with the remedy; "" if it can.

    Args:
        plan: plan of the run.
        spread: whether nodes may be on several machines.
    """
    served, name = plan.served, type(plan.strategy).__name__
    if served is None:
        return f"the workers of {name} exchange without shards; take a strategy with servers"
    if plan.whole is not None:
        return "each phase of the job says how many shards it has; give phases servers=, or leave phases out"
    if plan.job.record:
        why = "a recording has one file for each shard, from its first push on"
    elif served.quorum(plan.workers) is not None:
        why = "a quorum decides over all shards at once which pushes count, and new shards lack its decisions"
    elif isinstance(plan.optimizer, PerTensor):
        why = f"the norms of {type(plan.optimizer).__name__} are sums over all shards, and new shards are in none"
    elif served.correction() is not None:
        why = f"{name} corrects pushes by what each worker has read, which new shards lack"
    elif plan.parts > 1:
        why = "each part of a split model has shards of its own, and their numbers have to stay equal"
    elif spread:
        why = "the run may have nodes on several machines, and the new shards would have no certificates"
    else:
        return ""
    return f"{why}: stop the run, and resume it with this number of servers"


# ---- requests ---------------------------------------------------------------------------


def ask(run_dir: Path, servers: int) -> str:
    """Asks a run for another number of shards. Returns the token of the request, which the events about it have.

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
    """Takes the request that waits: number of shards, and token. None if there is none, or no sensible one."""
    try:
        size_bytes = storage.size(REQUEST)
        data = storage.read_at(REQUEST, 0, min(size_bytes, MAX_BYTES))
        storage.remove(REQUEST)
        found = parse_json(data, max_bytes=MAX_BYTES)
    except (OSError, ValueError):
        return None
    servers, token = (found.get("servers"), found.get("token")) if isinstance(found, dict) else (None, None)
    return (servers, token) if type(servers) is int and isinstance(token, str) else None


async def follow_requests(runtime: Runtime, reshard: Callable[[int, str], object]) -> None:
    """Passes requests on to the coordinator, until it is cancelled; those that are refused are in the events."""
    while True:
        request = take_request(runtime.storage)
        if request is not None:
            try:
                reshard(*request)
            except ConfigError:
                pass  # the coordinator has said so
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
        """Whether a node is a shard that holds no parameters: a new one, or one that others have replaced."""
        return name.startswith("shard") and name not in self.holders


# ---- losses ------------------------------------------------------------------------------


def losses_of(plan: RunPlan, *, spread: bool = False) -> LossTolerance:
    """Which losses of workers the run of a plan survives, and how.

    Args:
        plan: plan of the run.
        spread: whether nodes may be on several machines.
    """
    served, rounds = plan.served, plan.strategy.partitioning == "rounds"
    pairs = isinstance(plan.strategy, PeerStrategy)
    obstacle = next(_obstacles(plan, rounds=rounds), "")
    redoes = (
        served is not None
        and served.pushes == "gradients"
        and not (rounds or served.in_passes)
        and plan.workers > 1
    )
    return LossTolerance(
        survives_worker_loss=not obstacle if rounds and not pairs else plan.strategy.survives_worker_loss,
        quorum=None if served is None else served.quorum(plan.workers),
        allow_lost=plan.job.allow_lost,
        # A trial of a line search may lie where the loss has no value, with all portions of a worker.
        quarantine_after=sys.maxsize if plan.strategy.in_passes else plan.job.quarantine_after,
        obstacle=obstacle,
        redoes=redoes and not obstacle,
        stands_in=rounds and not obstacle and not pairs,
        leaves_out=pairs,
        keeps_shards=why_shards_stay(plan, spread=spread),
        acknowledge=plan.job.acknowledge,
        regroups=isinstance(plan.strategy, GroupStrategy),
    )


def losses_of_all(plan: RunPlan) -> LossTolerance:
    """The losses that some phase of the run survives: where the present one does not, the coordinator ends the run."""
    losses = [losses_of(one) for one in plan.every or (plan,)]
    return next((one for one in losses if one.replaces), losses[0])


def _obstacles(plan: RunPlan, *, rounds: bool) -> Iterator[str]:
    """Why no new process can take the place of a lost worker."""
    served, strategy, job = plan.served, plan.strategy, plan.job
    if isinstance(strategy, SharedMemoryStrategy):
        yield "its workers exchange through one vector in shared memory"
        return
    if served is not None and served.quorum(plan.workers) is not None:
        yield "a quorum of workers makes each update"
    if plan.open_ended:
        yield "the training loop is the user's own"
    if job.record:
        yield "a recording has one file for each worker, from its first minibatch on"
    if not rounds and not strategy.survives_worker_loss:
        yield "it does not survive the loss of one"
    if rounds and not strategy.stands_in and not isinstance(strategy, PeerStrategy):
        yield (
            "no other worker can compute the part of a lost one"
            if served is None
            else "what a worker pushes is more than the gradient of its minibatch"
        )
    if rounds and plan.parts > 1 and job.pipeline not in FLUSHING and not isinstance(job.pipeline, Hybrid):
        yield "its parts have more than their parameters from one minibatch to the next"
    if rounds and plan.balanced and plan.parts > 1:
        yield "shares follow measured speeds, which the parts of a new process do not know"
    if rounds and served is not None and served.rows(tables=True) is not None:
        yield "rounds exchange rows"
    if rounds and job.data.num_samples is None:
        yield "only reading a minibatch of a stream tells its size"
