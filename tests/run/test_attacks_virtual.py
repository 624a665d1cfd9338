"""Every method of every node against every caller that may not call it: after deaths, successions, and regroupings.

The matrix is generated from `METHODS`, on virtual time. Real ports and TLS are in tests/transport/test_attacks.py.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest

import gradstream as gs
from gradstream.coordinator import presence_service
from gradstream.coordinator.durable import StateStore
from gradstream.errors import GradstreamError, PeerLostError, RefusedError
from gradstream.run.simulated import SimulatedCluster
from gradstream.testing.runs import NUM_SAMPLES, QUICK, UNSTEADY, check_exactly_once, count_tokens
from gradstream.transport.endpoint import AccessControl
from gradstream.transport.limits import METHODS, role_of
from gradstream.transport.simulated import MemoryEndpoint
from gradstream.transport.stream import StreamCore
from gradstream.wire import v1

EPOCHS = 6
FIRST = 0x5EC3E7000
"""Incarnation of a node's first process; the next one has one more."""

CALLERS = {
    "none of the run's names": ("worker-9", FIRST),
    "a process that was lost": ("worker-1", FIRST),
    "a living worker's name": ("worker-0", FIRST + 77),
    "a living shard's name": ("shard-0", FIRST + 77),
    "a machine": ("machine-7", FIRST),
    "the launcher": ("launcher", FIRST),
}
"""Name and incarnation of those who are no members; all of them know the secret, the job, the model and the epoch."""


class Attack:
    """A script that has a worker and the coordinator die and come back, and then tries the whole matrix.

    Args:
        back: whether a new process takes the lost worker's place; if not, another worker stands in.

    Attributes:
        outcomes: by node, method and caller, the code of the refusal; "served" for none.
        told: what the refusals have said.
    """

    def __init__(self, *, back: bool) -> None:
        self.outcomes: dict[tuple[str, str, str], str] = {}
        self.told: list[str] = []
        self._back = back

    def store(self, job: str) -> StateStore:
        return StateStore(":memory:", job)

    async def __call__(self, cluster: SimulatedCluster) -> None:
        director = cluster.virtual.runtime("director")
        await director.sleep(0.2)
        cluster.kill("worker-1")
        if self._back:
            await director.sleep(0.01)
            await cluster.restart("worker-1")
        await director.sleep(0.05)
        cluster.kill("coordinator")
        await director.sleep(0.05)
        await cluster.restart("coordinator")
        await director.sleep(0.1)
        living = {
            one.identity.name: one
            for one in cluster.network.endpoints.values()
            if cluster.is_running(one.identity.name)
        }
        for node, endpoint in living.items():
            for name, method, sender, incarnation in tries(node, living):
                by = f"{name}: {sender}"
                self.outcomes[node, method, by] = await self._try(
                    cluster, endpoint, method, sender, incarnation
                )

    async def _try(
        self, cluster: SimulatedCluster, target: MemoryEndpoint, method: str, name: str, incarnation: int
    ) -> str:
        assert cluster.coordinator is not None
        epoch = max(target.identity.epoch, 1)
        identity = replace(target.identity, name=name, incarnation=incarnation, epoch=epoch)
        attacker = MemoryEndpoint(identity, cluster.virtual.runtime("attacker"), cluster.network)
        attacker.know(target.identity.name, target.address)
        request: Any = v1.Body()
        if method == "join":
            rank = int(name.rpartition("-")[2]) if name[-1].isdigit() else 0
            node = v1.Node(name=name, role=role_of(name), rank=rank, incarnation=incarnation)
            request = v1.Join(node=node, software=gs.__version__)
        try:
            stream = await attacker.open(target.identity.name, method, request)
            received = await stream.recv(20)
            stream.cancel("served")
            return f"served {received}"
        except RefusedError as error:
            self.told.append(str(error))
            return error.code
        except GradstreamError as error:
            return str(error)


def tries(node: str, living: dict[str, MemoryEndpoint]) -> Iterator[tuple[str, str, str, int]]:
    """Who must not be served by a node: no members by any method, and members by those that are not of their role."""
    for method, known in METHODS.items():
        for name, (sender, incarnation) in CALLERS.items():
            if known.members or sender not in ("launcher", "machine-7"):
                yield name, method, sender, incarnation
        for sender, endpoint in living.items():
            if role_of(sender) not in known.callers and sender != node:
                yield "a member", method, sender, endpoint.identity.incarnation


def attacked(monkeypatch: pytest.MonkeyPatch, strategy: gs.Strategy, *, back: bool) -> tuple[Attack, gs.Run]:
    start = SimulatedCluster.__init__

    def with_incarnations(self: SimulatedCluster, *given: Any, **options: Any) -> None:
        start(self, *given, **options)
        self._incarnations = defaultdict(lambda: FIRST)

    monkeypatch.setattr(SimulatedCluster, "__init__", with_incarnations)
    attack = Attack(back=back)
    group = isinstance(strategy, gs.AllReduce)
    deadlines = replace(QUICK, silence_s=3.0) if group else QUICK
    options: dict[str, Any] = {
        "servers": 0 if group else 2,
        "deadlines": deadlines,
        "epochs": EPOCHS,
        "seed": 3,
    }
    options["acknowledge"] = "applied" if group else "replicated"  # with backups, every method has a server
    return attack, count_tokens(strategy=strategy, script=attack, config=SLOW, **options)


SLOW = replace(UNSTEADY, costs={**UNSTEADY.costs, "gradient": gs.sim.Cost(base_s=0.2)})
"""There is time for all that is tried."""

REFUSED = ("NOT_MEMBER", "FORBIDDEN", "UNKNOWN_METHOD")


@pytest.mark.parametrize(
    ("strategy", "back"),
    [(gs.Downpour(), True), (gs.Synchronous(), False), (gs.AllReduce(algorithm="ring"), True)],
    ids=["redone pushes and newcomers", "stand-ins", "groups"],
)
def test_nobody_is_served_who_may_not_call(
    monkeypatch: pytest.MonkeyPatch, strategy: gs.Strategy, back: bool
) -> None:
    attack, run = attacked(monkeypatch, strategy, back=back)
    wrong = {
        case: code
        for case, code in attack.outcomes.items()
        if code not in (*REFUSED, *(("BAD_REQUEST",) if case[1] == "join" else ()))
    }
    assert not wrong
    nodes = {node for node, _, _ in attack.outcomes}
    assert nodes >= {"coordinator", "worker-0", "worker-2"} and len(attack.outcomes) > 350
    served = set(attack.outcomes.values())
    assert {"NOT_MEMBER", "FORBIDDEN", "UNKNOWN_METHOD"} <= served
    # What a member proves itself by in plain text is told to nobody.
    assert not [said for said in attack.told if f"{FIRST + 1:x}" in said]
    assert not [said for said in attack.told if said.count(f"{FIRST:x}") > 1]
    assert run.summary["workers_lost"] == ["worker-1"]
    assert run.summary["samples_accounted"] == NUM_SAMPLES * EPOCHS
    if strategy.partitioning != "rounds":
        check_exactly_once(run, NUM_SAMPLES, EPOCHS)


def test_a_missing_check_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(AccessControl, "is_member", lambda self, opened: True)
    try:
        attack, _ = attacked(monkeypatch, gs.Downpour(), back=True)
    except (GradstreamError, PeerLostError):
        return  # what was served has changed the run
    assert any(code not in (*REFUSED, "BAD_REQUEST") for code in attack.outcomes.values())


# ---- when a new process of the coordinator waits for its members ----------------------------


class Successor:
    """A script that starts the coordinator again, and meanwhile has somebody ask to join as a living worker."""

    answer = ""

    def store(self, job: str) -> StateStore:
        return StateStore(":memory:", job)

    async def __call__(self, cluster: SimulatedCluster) -> None:
        director = cluster.virtual.runtime("director")
        await director.sleep(0.2)
        cluster.kill("coordinator")
        await director.sleep(0.05)
        await cluster.restart("coordinator")
        coordinator = cluster.network.endpoints.get("memory:coordinator")
        assert coordinator is not None
        self.answer = await Attack(back=True)._try(cluster, coordinator, "join", "worker-0", FIRST + 77)


def test_nobody_pushes_a_living_member_out_while_it_looks_for_the_new_coordinator(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    script = Successor()
    run = count_tokens(strategy=gs.Downpour(), script=script, config=SLOW, epochs=EPOCHS)
    assert script.answer == "NOT_MEMBER"
    assert not run.summary["workers_lost"]
    check_exactly_once(run, NUM_SAMPLES, EPOCHS)
    monkeypatch.setattr(presence_service, "RETURN_S", 0.0)
    assert count_tokens(strategy=gs.Downpour(), script=Successor(), config=SLOW, epochs=EPOCHS).summary[
        "workers_lost"
    ] == ["worker-0"]


CERTIFICATE = property(lambda self: self.opened.sender.encode(), lambda self, value: None)
"""The digest of a caller's certificate, on a network without TLS."""


def test_who_does_not_come_back_to_the_new_coordinator_has_its_certificate_revoked(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(StreamCore, "certificate", CERTIFICATE, raising=False)
    revoked: list[bytes] = []

    class Gone(Successor):
        async def __call__(self, cluster: SimulatedCluster) -> None:
            director = cluster.virtual.runtime("director")
            await director.sleep(0.2)
            cluster.kill("coordinator")
            cluster.kill("worker-1")
            await director.sleep(0.05)
            await cluster.restart("coordinator")
            await director.sleep(1.1 * QUICK.lease_s)
            assert cluster.coordinator is not None
            revoked.extend(cluster.coordinator.membership.nodes.revoked)

    run = count_tokens(strategy=gs.Downpour(), script=Gone(), config=SLOW, epochs=EPOCHS)
    assert run.summary["workers_lost"] == ["worker-1"]
    assert revoked == [b"worker-1"]
