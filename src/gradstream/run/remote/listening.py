"""How a run admits other machines: the user's settings, checked before anything is started."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Literal, TypeAlias, get_args

from gradstream.errors import ConfigError
from gradstream.job.job import Job, strategy_of
from gradstream.job.losses import losses_of
from gradstream.job.phase_jobs import jobs_of
from gradstream.job.plan import RunPlan
from gradstream.job.registry import find_optimizer
from gradstream.job.traits import traits_of, traits_of_strategy
from gradstream.run.remote.address import Address
from gradstream.strategies.base import ServerStrategy
from gradstream.traits import refuse

ServersOn: TypeAlias = Literal["all", "launcher"]
"""The machines on which the shards of the parameter server run."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Listening:
    """How a run admits other machines.

    Args:
        address: address of this machine at which the others reach it: "10.0.0.1:4000", or an `Address`. With
            port P, the join service is at P, the coordinator at P + 1 and shard i at P + 2 + i of its
            machine; the process group of a script with S shards meets at P + 2 + S. With port 0 all take
            free ports.
        machines: number of machines, this one included.
        least: number of machines, this one included, with which training begins; the others may join later, and then
            take their share of the minibatches. None waits for all.
        workers_per_machine: number of workers on each machine; for a split model, of parts of replicas.
        servers_on: where the shards of the parameter server run. "all": shard i on machine i mod `machines`
            (the launcher's is machine 0), by default one on each machine. "launcher": all of them on the
            launcher's machine, by default one.
        insecure: whether to use plain text, without encryption or authentication.
        token: a secret that machines must know; None makes one.
        wait_s: seconds within which the other machines have to join.
        on_invitation: called with the command line that joins a machine; None prints it to stderr.
        on_open: called with the address and the certificate's fingerprint instead; passes them to processes
            that another launcher, such as torchrun, has started. Each of these processes then counts as a
            machine with one worker; this process is worker 0. See `RankMembers`.
    """

    address: Address | str
    machines: int
    least: int | None = None
    workers_per_machine: int = 1
    servers_on: ServersOn = "all"
    insecure: bool = False
    token: str | None = None
    wait_s: float = 600.0
    on_invitation: Callable[[str], None] | None = None
    on_open: Callable[[str, str], None] | None = None

    def __post_init__(self) -> None:
        if not isinstance(self.address, Address | str):
            raise ConfigError(
                f"Listening(address={self.address!r}): expected a text with the address of this machine at which the "
                'others reach it, "10.0.0.1:4000" for example'
            )
        self.own  # noqa: B018  # raises ConfigError where the text is no address

    @property
    def own(self) -> Address:
        """The address of this machine at which the others reach it."""
        address = self.address
        return address if isinstance(address, Address) else Address.parse(address, "Listening: address=")

    @property
    def fewest(self) -> int:
        """Number of machines with which training begins."""
        return self.machines if self.least is None else self.least

    def check(self, job: Job, *, earlier: bool) -> None:
        """Raises ConfigError if machines, strategy and job do not fit, or this machine cannot listen there."""
        self.own.check_listen()
        for name, value in (("wait", self.machines), ("workers_per_machine", self.workers_per_machine)):
            if value < 1:
                raise ConfigError(f"{name}={value}: expected at least 1")
        if self.servers_on not in get_args(ServersOn):
            raise ConfigError(
                f"servers_on={self.servers_on!r}: expected one of {', '.join(map(repr, get_args(ServersOn)))}"
            )
        self._check_least()
        total = self.machines * self.workers_per_machine
        if job.split > 1 and job.workers * job.split != total:
            raise ConfigError(
                f"workers={job.workers} with split={job.split} are {job.workers * job.split} processes, but wait="
                f"{self.machines} machines with workers_per_machine={self.workers_per_machine} are {total}; change one "
                "of the four, so that both numbers are equal"
            )
        phases = jobs_of(job)
        most = max(phase.workers for phase in phases)
        if job.phases and most != total:
            raise ConfigError(
                f"the phase with most workers has workers={most}, but {self.machines} machines with "
                f"{self.workers_per_machine} workers each have {total}; expected a phase with workers={total} (all "
                "machines together), or without workers, and none with more"
            )
        if job.split == 1 and most != total:
            raise ConfigError(
                f"workers={job.workers}, but {self.machines} machines with {self.workers_per_machine} workers each "
                f"have {total} workers; expected workers={total} (all machines together), or leave workers out"
            )
        shm = {"shm": "carrier='shm'"} if job.carrier == "shm" else {}
        for phase in phases if self.machines > 1 else ():
            of_strategy = traits_of_strategy(strategy_of(phase), phase.workers)
            refuse({**shm, **of_strategy, "several machines": f"wait={self.machines} machines"})
        if earlier:
            raise ConfigError(
                "listen: this script has made another run before this one, which the other machines do not have: "
                "put the job of this run into a file of its own"
            )
        for number in range(2 if self.own.port else 1):  # join service, coordinator
            self.own.at(self.own.port + number).check_free()

    def check_losses(self, obstacle: str) -> None:
        """Raises ConfigError if training is to begin without some machines, and no worker can join later.

        Args:
            obstacle: why no worker can; "" if workers can: see `LossTolerance`.
        """
        if self.fewest < self.machines and obstacle:
            raise ConfigError(
                f"least={self.least}: no worker can join this run after its beginning: {obstacle}; leave least out, or "
                "take another strategy"
            )

    def _check_least(self) -> None:
        if not 1 <= self.fewest <= self.machines:
            raise ConfigError(
                f"least={self.least}: expected a number of machines from 1 to {self.machines}, which are all"
            )
        if self.fewest < self.machines and self.servers_on == "all":
            raise ConfigError(
                f"least={self.least} with servers_on='all': a machine that joins later cannot have a shard, since "
                "training begins with all parameters; expected servers_on='launcher'"
            )

    def spread_servers(self, job: Job) -> Job:
        """The job with at least one shard per machine and a backup of each, where shards are spread.

        A number of shards, or `acknowledge`, that the user has set stays as it is.

        Raises:
            UnknownNameError: there is no such strategy.
        """
        served = [phase for phase in jobs_of(job) if isinstance(strategy_of(phase), ServerStrategy)]
        if self.servers_on != "all" or self.machines == 1 or not served:
            return job
        if job.servers is None and any(phase.servers is None for phase in served):
            servers = max(1, self.machines // job.split)  # per part
            job = replace(job, servers=servers, origins={**job.origins, "servers": "listen"})
        origins = {**job.origins, "acknowledge": "listen"}
        safe = replace(job, acknowledge="replicated", origins=origins)
        return safe if job.acknowledge is None and _is_allowed(safe) else job

    def promise(self, plan: RunPlan) -> str:
        """Which machines may be lost while the run goes on, in a clause, and what that costs."""
        phases = plan.every or (plan,)
        if not all(losses_of(phase, spread=True).survives_worker_loss for phase in phases):
            return "a machine that is lost ends the run"
        if self.servers_on != "all" or all(phase.servers < 2 for phase in phases):
            return "any machine but this one may be lost"
        if plan.acknowledge == "replicated":
            return (
                "any machine but this one may be lost: each shard sends what it updates to the next machine too "
                "(acknowledge='applied' leaves that out)"
            )
        return "a machine that is lost takes its shard along and ends the run"

    def port_of(self, name: str) -> int:
        """The port at which a node listens on its machine; 0 takes a free one. See `address`."""
        first = self.own.port
        role, _, rank = name.partition("-")
        if not first or role not in ("coordinator", "shard"):
            return 0
        return first + 1 if role == "coordinator" else first + 2 + int(rank)

    def meeting_port(self, shards: int) -> int:
        """The port of this machine for the process group of a script; 0 takes a free one."""
        return self.own.port and self.own.port + 2 + shards


def _is_allowed(job: Job) -> bool:
    """Whether no trait of a job, or of one of its phases, excludes another."""
    try:
        for phase in jobs_of(job):
            strategy = strategy_of(phase)
            rule = strategy.optimizer() if phase.optimizer is None else find_optimizer(phase.optimizer)
            refuse(traits_of(phase, strategy, rule))
    except ConfigError:
        return False
    return True


def workers_each(machines: int, per_machine: int | None, workers: int | None) -> int:
    """Number of workers on each machine, by default 1.

    Args:
        machines: number of machines.
        per_machine: requested number of workers on each machine; None if unset.
        workers: requested number of all workers; None if unset.

    Raises:
        ConfigError: the workers do not divide among the machines, or the two numbers contradict each other.
    """
    if workers is None or machines < 1:
        return 1 if per_machine is None else per_machine
    each, left = divmod(workers, machines)
    if left or per_machine not in (None, each):
        raise ConfigError(
            f"--workers {workers} counts the workers of all machines together, which do not divide into "
            f"{per_machine or 'equal numbers'} on each of {machines} machines; expected "
            + (f"--workers {machines * per_machine}" if per_machine else f"a multiple of {machines}")
        )
    return each
