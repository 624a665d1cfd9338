"""The nodes that are in, the epoch under which they are, and who of them has finished."""

from __future__ import annotations

from gradstream.wire import v1

__all__ = ["COORDINATOR", "Nodes"]

COORDINATOR = "coordinator"
"""The name of the coordinator, which every endpoint knows."""


class Nodes:
    """Who is in. A name is a role and a rank: "worker-0", "shard-1".

    Args:
        num_workers: so many are expected, ranks from 0.
        num_servers: so many shards are.

    Attributes:
        revoked: SHA-256 of the certificates of members that were lost: whoever shows one is not let in again.
        epoch: the membership epoch: 0 while gathering, 1 when training begins, one more after each loss.
    """

    def __init__(self, num_workers: int, num_servers: int) -> None:
        self.epoch = 0
        self.revoked: list[bytes] = []
        self.num_workers = num_workers
        self.num_servers = num_servers
        self._shards = [f"shard-{rank}" for rank in range(num_servers)]
        self._expected = self._shards + [f"worker-{rank}" for rank in range(num_workers)]
        self._nodes: dict[str, v1.Node] = {}  # in the order in which they came
        self._in_order: list[v1.Node] | None = None  # made when it is asked for
        self._finished: set[str] = set()

    @property
    def missing(self) -> list[str]:
        """Names of the expected nodes that are not in."""
        return [name for name in self._expected if name not in self._nodes]

    @property
    def incarnations(self) -> dict[str, int]:
        """Those of all who are in, by name."""
        return {name: node.incarnation for name, node in self._nodes.items()}

    @property
    def names(self) -> list[str]:
        """Of all who are in, in the order in which they came."""
        return list(self._nodes)

    @property
    def workers(self) -> list[v1.Node]:
        """The workers that are in, by rank."""
        return [node for node in self.as_notice() if node.role == "worker"]

    @property
    def worker_names(self) -> list[str]:
        """Their names."""
        return [node.name for node in self.workers]

    @property
    def holders(self) -> list[str]:
        """Who holds the vectors: the shards, or else the workers."""
        return list(self._shards) or self.worker_names

    @property
    def unfinished(self) -> list[str]:
        """Workers that are in and have something left to do."""
        return [name for name in self.worker_names if name not in self._finished]

    def get(self, name: str) -> v1.Node | None:
        """The node, if it is in."""
        return self._nodes.get(name)

    def as_notice(self) -> list[v1.Node]:
        """As every node is told them: by role and rank."""
        if self._in_order is None:
            self._in_order = sorted(self._nodes.values(), key=lambda node: (node.role, node.rank))
        return self._in_order

    def add(self, node: v1.Node) -> None:
        """It is in."""
        self._nodes[node.name] = node
        self._in_order = None

    def finish(self, name: str, *, relies: bool) -> None:
        """A worker has nothing left to do.

        Args:
            name: of the worker.
            relies: on the worker of the lowest rank to keep the final parameters. If it is that worker by
                now, it has not heard so yet: it says once more that it has finished when it has kept them.
        """
        if not (relies and name == self.worker_names[0]):
            self._finished.add(name)

    def remove(self, name: str) -> v1.Node | None:
        """It is gone. Returns what it was, or None if it was not in.

        With a worker that had not finished, the duty to keep the final parameters may have gone to one that
        had: that one says once more that it has finished when it has done this.
        """
        node = self._nodes.pop(name, None)
        self._in_order = None
        if node is None:
            return None
        had_finished = name in self._finished
        self._finished.discard(name)
        if node.role == "worker" and not had_finished and self.workers:
            self._finished.discard(self.worker_names[0])
        return node
