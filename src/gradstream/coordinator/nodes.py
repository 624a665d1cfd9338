"""`Nodes`: the members, under which membership epoch, and which workers have finished."""

from __future__ import annotations

from typing import ClassVar, NamedTuple

from gradstream.coordinator.lead import SHARDS, WORKERS, Emit, Instruction, Lead, Notify
from gradstream.telemetry.events import BackedUpEvent
from gradstream.wire import v1
from gradstream.wire.chunks import Placement, member_name, replica_of

# ---- nodes -------------------------------------------------------------------------------

COORDINATOR = "coordinator"
"""The name of the coordinator, which every endpoint knows."""


MOST_FURTHER = 64
"""How far the rank of a further worker may be above all others: machines come and go."""


class _Workers(NamedTuple):
    """The workers among some members, by rank: looked up at each beat of thousands."""

    members: list[v1.Node]
    nodes: list[v1.Node]
    names: list[str]


class Nodes(Lead):
    """The nodes of a run. A name is a role and a rank: "worker-0", "shard-1".

    Args:
        num_workers: number of expected workers; their ranks start at 0.
        num_servers: number of expected shards.
        parts: number of processes of each worker's replica.
        before: the nodes before the boundary after which these begin; None at the run's beginning.
        alike: whether every replica holds all vectors, so that any of them can write a checkpoint.
        grows: whether more workers may come, once training has begun.

    Attributes:
        placement: the shards that hold the parameters.
        newcomers: the shards that are about to replace them; None if there are none.
        handing_over: whether the newcomers get the parameters now: nothing is updated meanwhile.
        absent: names of the nodes that were missing when the run came to a boundary.
        crossing: by name, the incarnation of the nodes that were members then.
        gone: the same of the last boundary, and nodes that may come later: the beginning does not wait for these.
        revoked: SHA-256 of the certificates of lost members. A node that shows one is not admitted again.
        epoch: the membership epoch: 0 while gathering, `first_epoch` when training begins, one more after each
            loss, each worker that joins later, and each group that has failed without a loss.
        first_epoch: 1, or one more than the last before the boundary, so that nobody takes late messages.
        leaving: names of workers that were asked to leave, and have said that they do.
        expelled: why members count as lost although they are alive, by name. They may not come back.
        backed_up: by shard, the incarnation of the shard that has a backup of all its chunks.
        entering: names of workers that joined late, and wait for the round in which they begin.
    """

    KEPT = (
        "epoch",
        "first_epoch",
        "absent",
        "revoked",
        "_nodes",
        "_finished",
        "leaving",
        "entering",
        "expelled",
        "backed_up",
        "placement",
        "newcomers",
        "handing_over",
    )
    """See `durable.state`."""

    REPORTS: ClassVar = {"broken": WORKERS, "backed_up": SHARDS}

    CACHES = ("_in_order", "_workers", "_incarnations")
    """Attributes derived from others, recomputed if missing."""

    def __init__(
        self,
        num_workers: int,
        num_servers: int,
        parts: int = 1,
        before: Nodes | None = None,
        *,
        alike: bool = False,
        grows: bool = False,
    ) -> None:
        self.epoch = 0
        self.first_epoch: int = 1 if before is None else max(before.first_epoch, before.epoch) + 1
        self.absent: list[str] = []
        self.crossing: dict[str, int] = {}
        self._before = None if before is None else before.crossing
        self.gone = frozenset[str]() if before is None else frozenset(before.absent)
        self.revoked: list[bytes] = [] if before is None else list(before.revoked)
        self.num_workers = num_workers
        self.parts = parts
        self._alike = alike
        self._grows = grows
        self.placement = Placement(0, num_servers)
        self.newcomers: Placement | None = None
        self.handing_over = False
        self._replicas = [member_name(part, rank) for part in range(parts) for rank in range(num_workers)]
        self._nodes: dict[str, v1.Node] = {}  # in the order of joining
        self._in_order: list[v1.Node] | None = None  # cache of `as_notice`
        self._workers = _Workers([], [], [])
        self._incarnations: tuple[list[v1.Node], dict[str, int]] = ([], {})
        self._finished: set[str] = set()
        self.leaving: set[str] = set()
        self.entering: set[str] = set()
        self.expelled: dict[str, str] = {}
        self.backed_up: dict[str, int] = {}

    @property
    def num_servers(self) -> int:
        """Number of the shards that hold the parameters."""
        return self.placement.shards

    @property
    def missing(self) -> list[str]:
        """Names of the expected nodes that are not members."""
        newcomers = [] if self.newcomers is None else self.newcomers.names
        expected = (*self.placement.names, *newcomers, *self._replicas)
        return [name for name in expected if name not in self._nodes]

    @property
    def missing_shards(self) -> list[str]:
        """Names of the shards that should hold parameters, and are not members."""
        return [name for name in self.placement.names if name not in self._nodes]

    def expects(self, node: v1.Node) -> bool:
        """Whether a node of this name and rank may be a member, and is none."""
        if node.name in self._nodes or node.name != f"{node.role}-{node.rank}":
            return False
        return node.name in self.missing or (self.epoch > 0 and self.is_further(node))

    def is_further(self, node: v1.Node) -> bool:
        """Whether this is a worker beyond those of the beginning, which may come once these train."""
        highest = max([self.num_workers, *(other.rank for other in self.workers)])
        is_worker = node.role == "worker" and node.name == f"worker-{node.rank}"
        return self._grows and is_worker and self.num_workers <= node.rank <= highest + MOST_FURTHER

    def cross(self) -> None:
        """The nodes stop here, perhaps at a boundary."""
        self.absent = self.missing
        self.crossing = {node.name: node.incarnation for node in self._nodes.values()}

    def is_fresh(self, node: v1.Node) -> bool:
        """Whether this process was not there before the boundary after which these nodes begin."""
        return self._before is not None and self._before.get(node.name) != node.incarnation

    def awaits(self, name: str) -> bool:
        """Whether a node of this name is one of the shards that are about to hold the parameters."""
        return self.newcomers is not None and name in self.newcomers.names

    def begin(self) -> None:
        """Begins the first epoch: no shard has anything yet that its backup lacks."""
        self.epoch = self.first_epoch
        self._all_backed_up()

    def switch(self) -> None:
        """Makes the newcomers, which have all joined, hold the parameters; the old shards are to leave."""
        assert self.newcomers is not None
        self.leaving.update(self.placement.names)
        self.placement, self.newcomers, self.handing_over = self.newcomers, None, False
        self._all_backed_up()

    def dismiss(self) -> None:
        """Ends a failed change of shards: the old shards keep the parameters, and the newcomers are to leave."""
        assert self.newcomers is not None
        self.leaving.update(self.newcomers.names)
        self.newcomers, self.handing_over = None, False

    def _all_backed_up(self) -> None:
        names = self.placement.names
        self.backed_up = {name: self._nodes[self._holder_of(name)].incarnation for name in names}

    def is_backed_up(self, shard: str) -> bool:
        """Whether a living shard has a backup of this one."""
        holder = self._nodes.get(self._holder_of(shard))
        return holder is not None and self.backed_up.get(shard) == holder.incarnation

    def _holder_of(self, shard: str) -> str:
        names = self.placement.names
        each, index = len(names) // self.parts, names.index(shard)
        own = names[index - index % each :][:each]  # the shards of its part
        return own[(index % each + 1) % each]

    @property
    def incarnations(self) -> dict[str, int]:
        """The incarnation of every member, by name: the same until a member comes or goes."""
        members = self.as_notice()
        if self._incarnations[0] is not members:
            self._incarnations = members, {node.name: node.incarnation for node in members}
        return self._incarnations[1]

    @property
    def names(self) -> list[str]:
        """Names of all members, in the order of joining."""
        return list(self._nodes)

    @property
    def workers(self) -> list[v1.Node]:
        """The worker members, by rank: the same list object until a member comes or goes."""
        return self._workers_of(self.as_notice()).nodes

    @property
    def worker_names(self) -> list[str]:
        """Names of the worker members, by rank: the same list object until a member comes or goes."""
        return self._workers_of(self.as_notice()).names

    def _workers_of(self, members: list[v1.Node]) -> _Workers:
        if self._workers.members is not members:
            workers = [node for node in members if node.role == "worker"]
            self._workers = _Workers(members, workers, [node.name for node in workers])
        return self._workers

    @property
    def holders(self) -> list[str]:
        """Names of the nodes that write the vectors, part by part: the shards or, if there are none, the replicas.

        If replicas are alike, those that need no network for it, if there are any: over a link of 10 Mbit/s, 86 MB
        take a minute.
        """
        ranks = [node.rank for node in self.workers]
        if self._alike:
            ranks = [rank for rank in ranks if not self._is_elsewhere(rank)] or ranks
        return self.placement.names or [
            member_name(part, rank) for part in range(self.parts) for rank in ranks
        ]

    def _is_elsewhere(self, rank: int) -> bool:
        """Whether a process of a replica writes over the network."""
        replica = [self._nodes.get(name) for name in replica_of(rank, self.parts)]
        return any(node is None or node.elsewhere for node in replica)

    def rest_of_replica(self, node: v1.Node) -> list[str]:
        """Names of the other processes of a lost one's replica that are members."""
        if node.role == "shard" or self.parts == 1:
            return []
        return [
            name for name in replica_of(node.rank, self.parts) if name != node.name and name in self._nodes
        ]

    def missing_parts(self, rank: int) -> list[str]:
        """Names of the processes that a worker's replica lacks, besides the worker itself."""
        return [name for name in replica_of(rank, self.parts)[1:] if name not in self._nodes]

    @property
    def unfinished(self) -> list[str]:
        """Names of the worker members that have not finished."""
        return [name for name in self.worker_names if name not in self._finished]

    def get(self, name: str) -> v1.Node | None:
        """Returns the member of this name; None if there is none."""
        return self._nodes.get(name)

    def as_notice(self) -> list[v1.Node]:
        """Returns the members by role and rank, as notices list them."""
        if self._in_order is None:
            self._in_order = sorted(self._nodes.values(), key=lambda node: (node.role, node.rank))
        return self._in_order

    def notice(self, notice: v1.Notice) -> None:
        """Adds the members, and which shards hold the parameters."""
        notice.epoch, notice.first_epoch = self.epoch, self.first_epoch
        notice.nodes.extend(self.as_notice())
        notice.placement.CopyFrom(self.placement.as_message())
        notice.revoked.extend(self.revoked)

    def on_report(self, node: v1.Node, kind: str, report: int, at_s: float) -> list[Instruction]:
        """Handles a report that a worker's group failed although all are there, or that a shard has a backup."""
        if kind == "backed_up":
            before, self.backed_up[node.name] = self.backed_up.get(node.name), report
            known = report == before or not self.is_backed_up(node.name)
            return [] if known else [Emit(BackedUpEvent(who=node.name))]
        if not self.epoch or report != self.epoch:  # nobody has a group before training begins
            return []
        self.epoch += 1  # the same workers form another group under it
        return [Notify()]

    def add(self, node: v1.Node) -> None:
        """Adds a member, as of the current epoch."""
        self.leaving.discard(node.name)
        self._nodes[node.name] = member = v1.Node()
        member.CopyFrom(node)
        member.since = self.epoch
        member.ClearField("first_round")
        self._in_order = None

    @property
    def active_workers(self) -> list[str]:
        """Names of the worker members that do not wait to begin, by rank."""
        return [name for name in self.worker_names if name not in self.entering]

    def enter(self, name: str, number: int) -> None:
        """Lets a waiting worker begin with a round, with all parts of its replica."""
        self.entering.discard(name)
        for member in replica_of(self._nodes[name].rank, self.parts):
            self._nodes[member].first_round = number

    def finish(self, name: str, *, relies: bool) -> None:
        """Notes that a worker has finished.

        Args:
            name: name of the worker.
            relies: whether it relies on the worker of the lowest rank to write the final parameters. If it has become
                that worker without knowing it yet, it counts as unfinished until it has written them and
                reports again.
        """
        if not (relies and name == self.worker_names[0]):
            self._finished.add(name)

    def remove(self, name: str) -> v1.Node | None:
        """Removes a member and returns it; returns None if there is none of that name.

        If the lost worker had the lowest rank, it was the one to write the final parameters. That duty passes to the
        next worker, which counts as unfinished until it reports that it has written them.
        """
        node = self._nodes.pop(name, None)
        self._in_order = None
        self.entering.discard(name)
        if node is None:
            return None
        had_finished = name in self._finished
        self._finished.discard(name)
        following = self.workers[0] if self.workers else None
        if node.role == "worker" and not had_finished and following and node.rank < following.rank:
            self._finished.discard(following.name)
        return node
