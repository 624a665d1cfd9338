"""Decides which machines join a run, and which nodes each of them runs. A pure state machine, without I/O."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

from gradstream._version import __version__
from gradstream.coordinator.lifecycle import LossTolerance
from gradstream.data.alike import checks_of, differences
from gradstream.errors import ConfigError
from gradstream.job.code import JOB_FILE, users_code
from gradstream.job.job import Job
from gradstream.job.sources import file_of, sha256_of
from gradstream.run.remote.listening import ServersOn
from gradstream.untrusted import escaped
from gradstream.untrusted.text import check_name
from gradstream.wire import v1
from gradstream.wire.chunks import member_name

NO_NAME = r"[^\w.-]"

NAME_BYTES = 128
"""Longest name and longest address of a machine."""

REPLACED = LossTolerance(survives_worker_loss=True, obstacle="")


@dataclass(frozen=True, slots=True)
class Seat:
    """A machine that has joined.

    Args:
        machine: its name, which is unique in the run.
        address: its address.
        nodes: names of the shards and workers that it runs.
    """

    machine: str
    address: str
    nodes: tuple[str, ...]


class MachineMembers:
    """Decides which machines may join a run, and which nodes each of them runs.

    Args:
        own: name of the launcher's machine, which has the first shard and the first workers.
        machines: number of machines, including the launcher's.
        workers_per_machine: number of workers on each machine, or of parts of their replicas.
        parts: number of processes of each replica. They are placed one after the other, machine by machine.
        facts: values that must be the same on every machine.
        shards: number of shards of the parameter server.
        servers_on: "all" places shard i on machine i mod `machines`, "launcher" places all on the launcher's.
        losses: whether lost workers can be replaced once training has begun, and whether a lost shard can
            be rescued, since a shard on another machine has a copy.
    """

    kinds = "machine", "machines"

    def __init__(
        self,
        own: str,
        *,
        machines: int,
        workers_per_machine: int,
        parts: int = 1,
        facts: Mapping[str, str],
        shards: int = 0,
        servers_on: ServersOn = "all",
        losses: LossTolerance = REPLACED,
    ) -> None:
        self.own = own
        self.begun = False
        self._machines = machines
        self._per_machine = workers_per_machine
        self._parts = parts
        self._shards = shards
        self._hosts = machines if servers_on == "all" else 1  # number of machines with shards
        self._facts = facts
        self._losses = losses
        self._rescued: list[str] = []  # shards of other machines, now on the launcher's machine
        self._gone: set[int] = set()  # seats whose machines have left since training began
        self._seats: dict[int, Seat] = {0: Seat(own, "", self.nodes_of(0))}

    @property
    def missing(self) -> int:
        """Number of machines that have not joined yet."""
        return self._machines - len(self._seats)

    @property
    def state(self) -> str:
        """The state of the run, in words."""
        here = ", ".join(seat.machine for seat in self._taken)
        if self.begun:
            return f"training on {self.here} {self.kinds[self.here != 1]} (here: {here})"
        if self._machines == 1:
            return f"waiting for no other machine (here: {here})"
        if not self.missing:
            return f"all {self._machines} {self.kinds[1]} are here: {here}"
        return f"waiting for {self.missing} of {self._machines} {self.kinds[1]} (here: {here})"

    @property
    def here(self) -> int:
        """Number of current members, including the launcher's machine."""
        return len(self._taken)

    def begin(self) -> list[str]:
        """Lets training begin. Returns the nodes of missing machines, whose places others may take."""
        self.begun = True
        absent: list[str] = []
        for index in range(self._machines):
            seat = Seat("", "", self.nodes_of(index))
            self._gone.add(index)  # before the seat exists: the join service's thread may take it at once
            if self._seats.setdefault(index, seat) is seat:
                absent += seat.nodes
            else:
                self._gone.discard(index)
        return absent

    def nodes_of(self, index: int) -> tuple[str, ...]:
        """Names of the shards and workers of machine `index`; the launcher's machine is 0."""
        ranks = range(index, self._shards, self._hosts) if index < self._hosts else ()
        shards = [name for rank in ranks if (name := f"shard-{rank}") not in self._rescued]
        first = index * self._per_machine
        processes = (divmod(number, self._parts) for number in range(first, first + self._per_machine))
        rescued = () if index else self._rescued
        return (*shards, *rescued, *(member_name(part, rank) for rank, part in processes))

    def seat_of(self, node: str) -> Seat | None:
        """The machine that runs a node; None if none does."""
        return next((seat for _, seat in sorted(self._seats.items()) if node in seat.nodes), None)

    def enrol(self, request: v1.Enrol) -> Seat | v1.Refuse:
        """Admits a machine that knows the token, or refuses it."""
        try:
            check_name(request.machine or "machine", "the machine's name (--name)")
        except ConfigError as error:
            return v1.Refuse(code=v1.BAD_REQUEST, message=str(error))
        differs = difference(self._facts, dict(request.facts), request.machine)
        if differs is not None:
            return differs
        asked, address = escaped(request.machine, NAME_BYTES), escaped(request.address, NAME_BYTES)
        free = self._may_take(request.machine, self._free(asked))
        if not free:
            if not self.begun:
                why = f"the launcher is {self.state}"
            elif self._gone and self._losses.obstacle:
                why = f"a machine that has left cannot be replaced: {self._losses.obstacle}"
            else:  # the reason first: the launcher shows the beginning
                why = self._losses.stays or f"{request.machine} has no place that is free"
                why += f". If one of the {self.here} {self.kinds[1]} is lost, try again when it has left"
            return v1.Refuse(code=v1.NOT_MEMBER, message=f"no machine can join now: {why}")
        self._machines = max(self._machines, free[0] + 1)
        seat = Seat(self._name(asked), address, self.nodes_of(free[0]))
        self._seats[free[0]] = seat
        self._gone.discard(free[0])
        return seat

    def left(self, seat: Seat) -> None:
        """Notes that a machine has left. Another one may take its seat, see `_free`."""
        index = next(index for index, entry in self._seats.items() if entry is seat)
        if self.begun:
            self._gone.add(index)
        else:
            del self._seats[index]

    def rescue(self, node: str) -> bool:
        """Gives a lost shard to the launcher's machine, for good. False if that is impossible, or done already."""
        if (
            self._losses.acknowledge != "replicated"
            or not node.startswith("shard")
            or node in self.nodes_of(0)
        ):
            return False
        self._rescued.append(node)
        self._seats[0] = Seat(self.own, "", self.nodes_of(0))
        return True

    def is_there(self, node: str) -> bool:
        """Whether the machine that runs a node is currently a member."""
        return any(node in seat.nodes for seat in self._taken)

    @property
    def _taken(self) -> list[Seat]:
        """The current members, in order."""
        return [seat for index, seat in sorted(self._seats.items()) if index not in self._gone]

    def _free(self, asked: str) -> list[int]:
        """The seats that are free for a machine of this name.

        Once training has begun, these are the seats without shards whose machines have left, beginning with the one
        that had this name: a shard takes its ranges of the parameters with it, unless it was rescued. A run that may
        grow has one more.
        """
        if not self.begun:
            return [index for index in range(self._machines) if index not in self._seats]
        if self._losses.obstacle:
            return []
        grown = [self._machines] if self._losses.grows else []
        alone = [
            i
            for i in sorted(self._gone)
            if all(name.startswith(("worker", "part")) for name in self.nodes_of(i))
        ]
        return [*sorted(alone, key=lambda index: self._seats[index].machine != asked), *grown]

    def _may_take(self, machine: str, free: list[int]) -> list[int]:
        """The free seats that a machine may take."""
        del machine
        return free

    def _name(self, asked: str) -> str:
        """The requested name, with a number appended if another machine has it."""
        taken = {seat.machine for seat in self._taken}
        name, count = asked or "machine", 1
        while name in taken:
            count += 1
            name = f"{asked or 'machine'}-{count}"
        return name


class RankMembers(MachineMembers):
    """Members of a run whose processes already have ranks (torchrun started them): process r runs worker r."""

    kinds = "process", "processes"

    def _may_take(self, machine: str, free: list[int]) -> list[int]:
        return [index for index in free if machine.startswith(name_of_rank(index, ""))]


def name_of_rank(rank: int, host: str) -> str:
    """The machine name of the process of a rank."""
    return f"rank-{rank}-{re.sub(NO_NAME, '-', host)}"


# ---- facts -------------------------------------------------------------------------------
# Compares values that must be the same on all machines of a run; each has a remedy for a difference.


@dataclass(frozen=True, slots=True)
class _Fact:
    """One of the compared values.

    Args:
        code: code of the refusal if it differs.
        remedy: what the user can do.
        of_ports: whether a machine whose worker is written in another language has it, too.
    """

    code: v1.Code
    remedy: str
    of_ports: bool = True


FACTS: Mapping[str, _Fact] = {
    "gradstream": _Fact(v1.BAD_VERSION, "install the same version on both machines", of_ports=False),
    "torch": _Fact(v1.BAD_VERSION, "install the same version on both machines", of_ports=False),
    "job file": _Fact(v1.BAD_JOB_FILE, "copy the file from one machine to the other"),
    "job function": _Fact(v1.BAD_JOB_FILE, "name the same function of the job file on both machines"),
    "data set": _Fact(v1.BAD_DATA, "both machines must read the same data"),
    "data samples": _Fact(v1.BAD_DATA, "both machines must read the same data"),
    "data checksum": _Fact(
        v1.BAD_DATA, "the data differ in their bytes: copy them from one machine to the other"
    ),
}
"""In the order of comparison: a refusal names the first difference."""

MODULE = "module "
"""Begins the name of the fact about a user's module: the SHA-256 of its file."""

DATA = "data, "
"""Begins the name of the fact about a drawn sample: see `data.alike`."""

_OF_SAMPLES = _Fact(
    v1.BAD_DATA,
    "both machines must read the same data, in the same order: sort what comes from a set or from a folder, "
    "sorted(os.listdir(...))",
)
_OF_MODULE = _Fact(v1.BAD_JOB_FILE, "copy its file from one machine to the other")


def facts_of(job: Job) -> dict[str, str]:
    """This machine's facts about a job; a job with a spec has a job file.

    A user's module is compared if both machines have imported it, or may. A data set with an attribute
    `checksum`, a string, is compared by it; others by name and number of samples.
    """
    path, function = _source(job) if job.spec is not None else (None, "")
    code = users_code(job.spec)
    facts = {
        "gradstream": __version__,
        "torch": metadata.version("torch").partition("+")[0],  # builds for CPU and GPU are compatible
        "job file": "none" if path is None else f"{path.name} sha256:{file_hash(path)}",
        "job function": function,
        **{
            f"{MODULE}{name}": f"{file.path.name} sha256:{file.digest}"
            for name, file in code.items()
            if name != JOB_FILE
        },
        "data set": job.data.name,
        "data samples": f"{job.data.num_samples} and {job.data.num_test_samples} held out",
    }
    checksum = getattr(job.data, "checksum", None)
    if checksum is not None:
        return {**facts, "data checksum": str(checksum)}
    return facts | {f"{DATA}{name}": checksum for name, checksum in checks_of(job.data).items()}


def difference(launcher: Mapping[str, str], machine: Mapping[str, str], who: str) -> v1.Refuse | None:
    """The refusal of a machine, by the first fact in which it differs from the launcher; None if all are equal."""
    modules = {name: _OF_MODULE for name in launcher if name.startswith(MODULE) and name in machine}
    for name, fact in {**modules, **FACTS}.items():
        mine, expected = machine.get(name, "none"), launcher.get(name, "none")
        if name == "job file" and _hash_in(mine) == _hash_in(expected):
            continue  # the same file under another name
        if name not in machine and not fact.of_ports:
            continue  # the version of the protocol is compared instead, in every greeting
        if mine != expected:
            return _differs(name, mine, expected, who, fact)
    own, others = (
        {name: value for name, value in facts.items() if name.startswith(DATA)}
        for facts in (machine, launcher)
    )
    for name, mine, expected in differences(own, others) if own and others else ():
        return _differs(name, mine, expected, who, _OF_SAMPLES)
    return None


def _differs(name: str, mine: str, expected: str, who: str, fact: _Fact) -> v1.Refuse:
    text = f"{name} differs: {who} has {mine}, the launcher has {expected}. {fact.remedy.capitalize()}"
    return v1.Refuse(code=fact.code, message=text)


def file_hash(path: Path) -> str:
    """SHA-256 of a file, in hexadecimal. Raises ConfigError if it cannot be read."""
    try:
        return sha256_of(path)
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {error.strerror}") from None


def _hash_in(fact: str) -> str:
    return fact.rpartition(" ")[2]


def _source(job: Job) -> tuple[Path, str]:
    """The file that a job comes from, and the function, or ""."""
    assert job.spec is not None
    _, colon, function = job.spec.rpartition(":")
    file = file_of(job.spec)
    if file is None:
        raise ConfigError(
            f"job {job.spec!r}: its module has no file, and machines compare the job's file; give the path of a "
            ".py file"
        )
    return file, function if colon else ""
