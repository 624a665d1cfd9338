"""`Nodes`: which nodes are in, under which membership epoch, and which workers have finished."""

from __future__ import annotations

from gradstream.wire import v1
from gradstream.wire.parts import member_name, replica_of

__all__ = ["COORDINATOR", "Nodes"]

COORDINATOR = "coordinator"
"""The name of the coordinator, which every endpoint knows."""


class Nodes:
    """The nodes of a run. A name is a role and a rank: "worker-0", "shard-1".

    Args:
        num_workers: number of expected workers; their ranks start at 0.
        num_servers: number of expected shards.
        parts: number of processes of each worker's replica.

    Attributes:
        revoked: SHA-256 of the certificates of lost members. A node that shows one is not admitted again.
        epoch: the membership epoch: 0 while gathering, 1 when training begins, one more after each loss, each
            worker that joins later, and each group that has failed without a loss.
        leaving: names of workers that were asked to go, and have said that they do.
        backed_up: by shard, the incarnation of the shard that has a backup of all its chunks.
        entering: names of workers that have joined late, and wait for the round in which they begin.
    """

    KEPT = ("epoch", "revoked", "_nodes", "_finished", "leaving", "entering", "backed_up")
    """See `durable.state`."""

    def __init__(self, num_workers: int, num_servers: int, parts: int = 1) -> None:
        self.epoch = 0
        self.revoked: list[bytes] = []
        self.num_workers = num_workers
        self.num_servers = num_servers
        self.parts = parts
        self._shards = [f"shard-{rank}" for rank in range(num_servers)]
        self._expected = [
            *self._shards,
            *(member_name(part, rank) for part in range(parts) for rank in range(num_workers)),
        ]
        self._nodes: dict[str, v1.Node] = {}  # in the order of joining
        self._in_order: list[v1.Node] | None = None  # cache of `as_notice`
        self._finished: set[str] = set()
        self.leaving: set[str] = set()
        self.entering: set[str] = set()
        self.backed_up: dict[str, int] = {}

    @property
    def missing(self) -> list[str]:
        """Names of the expected nodes that are not in."""
        return [name for name in self._expected if name not in self._nodes]

    @property
    def missing_shards(self) -> list[str]:
        """Names of the shards that are not in."""
        return [name for name in self._shards if name not in self._nodes]

    def begin(self) -> None:
        """Begins epoch 1: all are in, and no shard has anything yet that its backup lacks."""
        self.epoch = 1
        self.backed_up = {name: self._nodes[self._holder_of(name)].incarnation for name in self._shards}

    def is_backed_up(self, shard: str) -> bool:
        """Whether a living shard has a backup of this one."""
        holder = self._nodes.get(self._holder_of(shard))
        return holder is not None and self.backed_up.get(shard) == holder.incarnation

    def _holder_of(self, shard: str) -> str:
        return self._shards[(self._shards.index(shard) + 1) % self.num_servers]

    @property
    def incarnations(self) -> dict[str, int]:
        """The incarnation of every member, by name."""
        return {name: node.incarnation for name, node in self._nodes.items()}

    @property
    def names(self) -> list[str]:
        """Names of all members, in the order of joining."""
        return list(self._nodes)

    @property
    def workers(self) -> list[v1.Node]:
        """The workers that are in, by rank."""
        return [node for node in self.as_notice() if node.role == "worker"]

    @property
    def worker_names(self) -> list[str]:
        """Names of the workers that are in, by rank."""
        return [node.name for node in self.workers]

    @property
    def holders(self) -> list[str]:
        """Names of the nodes that hold the vectors, part by part: the shards, or where there are none, the replicas."""
        ranks = [node.rank for node in self.workers]
        return list(self._shards) or [member_name(part, rank) for part in range(self.parts) for rank in ranks]

    def rest_of_replica(self, node: v1.Node) -> list[str]:
        """Names of the other processes of a lost one's replica that are in."""
        if node.role == "shard" or self.parts == 1:
            return []
        return [
            name for name in replica_of(node.rank, self.parts) if name != node.name and name in self._nodes
        ]

    @property
    def unfinished(self) -> list[str]:
        """Names of the workers that are in and have not finished."""
        return [name for name in self.worker_names if name not in self._finished]

    def get(self, name: str) -> v1.Node | None:
        """Returns the node of this name; None if it is not in."""
        return self._nodes.get(name)

    def as_notice(self) -> list[v1.Node]:
        """Returns the members by role and rank, as notices list them."""
        if self._in_order is None:
            self._in_order = sorted(self._nodes.values(), key=lambda node: (node.role, node.rank))
        return self._in_order

    def add(self, node: v1.Node) -> None:
        """Adds a member, which is in since the present epoch."""
        self.leaving.discard(node.name)
        self._nodes[node.name] = member = v1.Node()
        member.CopyFrom(node)
        member.since, member.enters = self.epoch, 0
        self._in_order = None

    @property
    def active_workers(self) -> list[str]:
        """Names of the workers that are in and do not wait to begin, by rank."""
        return [name for name in self.worker_names if name not in self.entering]

    def enter(self, name: str, number: int) -> None:
        """Lets a worker that waits begin with a round."""
        self.entering.discard(name)
        self._nodes[name].enters = number + 1

    def finish(self, name: str, *, relies: bool) -> None:
        """Notes that a worker has finished.

        Args:
            name: name of the worker.
            relies: it relies on the worker of the lowest rank to write the final parameters. If it has become
                that worker without knowing it yet, it counts as unfinished until it has written them and
                reports again.
        """
        if not (relies and name == self.worker_names[0]):
            self._finished.add(name)

    def remove(self, name: str) -> v1.Node | None:
        """Removes a member and returns it; returns None if it was not in.

        A lost worker of the lowest rank was the one to write the final parameters. The duty then passes to the next
        one, which counts as unfinished until it reports that it has written them.
        """
        node = self._nodes.pop(name, None)
        self._in_order = None
        self.entering.discard(name)
        if node is None:
            return None
        had_finished = name in self._finished
        self._finished.discard(name)
        heir = self.workers[0] if self.workers else None
        if node.role == "worker" and not had_finished and heir is not None and node.rank < heir.rank:
            self._finished.discard(heir.name)
        return node
