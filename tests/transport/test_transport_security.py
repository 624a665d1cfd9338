"""TLS between nodes: who is believed, who may call what, and what a refused one is told."""

from __future__ import annotations

import ast
import asyncio
import datetime
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, nullcontext
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Self

import pytest

import gradstream
from gradstream.errors import PeerLostError, RefusedError
from gradstream.run.remote import certificate_authority
from gradstream.run.remote.certificate_authority import (
    LAUNCHER,
    LIFE,
    CertificateAuthority,
    Key,
    fingerprint_of,
)
from gradstream.runtime import RealRuntime
from gradstream.testing.pairs import SECRET, grpc_pairs
from gradstream.testing.pieces import Check, echo, reply_once
from gradstream.testing.suites import CHECKS, run_check
from gradstream.transport import endpoint as endpoint_module
from gradstream.transport import security
from gradstream.transport.base import Identity, Stream
from gradstream.transport.grpc.endpoint import GrpcEndpoint
from gradstream.transport.limits import LIMITS, METHODS, ROLES, Method, role_of
from gradstream.transport.security import Shown, Tls
from gradstream.transport.socket.tcp import TcpEndpoint
from gradstream.wire import v1

SOURCE = Path(gradstream.__file__).parent


@pytest.fixture(scope="module")
def authority() -> CertificateAuthority:
    return CertificateAuthority()


AnyEndpoint = GrpcEndpoint | TcpEndpoint
carrier: type[AnyEndpoint] = GrpcEndpoint


@pytest.fixture(params=[GrpcEndpoint, TcpEndpoint], ids=["grpc", "tcp"])
def both(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Endpoints of either carrier."""
    monkeypatch.setitem(globals(), "carrier", request.param)


def endpoint(name: str, tls: Tls | None) -> AnyEndpoint:
    return carrier(Identity("job", name, 1, secret=SECRET), RealRuntime(name), security=tls)


@asynccontextmanager
async def two(
    caller: AnyEndpoint, server: AnyEndpoint, methods: tuple[str, ...] = ("join",)
) -> AsyncIterator[None]:
    for method in methods:
        server.serve(method, reply_once, model=False)
    await server.start()
    caller.know(server.identity.name, server.address)
    try:
        yield
    finally:
        await caller.close()
        await server.close()


def call(caller: AnyEndpoint, server: AnyEndpoint, method: str = "join", peer: str = "") -> None:
    async def main() -> None:
        async with two(caller, server, (method,)):
            if peer:
                caller.know(peer, server.address)
            await caller.call(peer or server.identity.name, method, v1.Body(), v1.Body, silence_s=10)

    asyncio.run(main())


@pytest.mark.usefixtures("both")
def test_nodes_of_one_authority_talk(authority: CertificateAuthority) -> None:
    call(
        endpoint("shard-0", authority.issue("shard-0")),
        endpoint("coordinator", authority.issue("coordinator")),
    )


@pytest.mark.parametrize(
    "check", [c for c in CHECKS if c.__name__ in {"order", "credit", "peer_death", "tensors"}]
)
def test_a_carrier_with_tls_keeps_its_promises(check: Check, authority: CertificateAuthority) -> None:
    run, make_pair = grpc_pairs(authority.issue)
    run(run_check(check, make_pair))


@pytest.mark.usefixtures("both")
def test_another_authority_is_not_believed_by_either_side(authority: CertificateAuthority) -> None:
    theirs = CertificateAuthority()
    with pytest.raises(PeerLostError, match=r"coordinator: .*not signed by this run's authority"):
        call(
            endpoint("worker-0", theirs.issue("worker-0")),
            endpoint("coordinator", authority.issue("coordinator")),
        )
    # A caller that would believe anything still has to show a certificate of ours.
    stranger = theirs.issue("worker-0")
    mixed = Tls(authority=authority.certificate, certificate=stranger.certificate, key=stranger.key)
    with pytest.raises(PeerLostError, match="coordinator: "):
        call(endpoint("worker-0", mixed), endpoint("coordinator", authority.issue("coordinator")))


@pytest.mark.usefixtures("both")
def test_plain_text_and_no_certificate_get_nowhere(
    authority: CertificateAuthority, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("gradstream.transport.socket.endpoint.CONNECT_S", 1)
    for shown in (None, Tls(authority=authority.certificate)):
        caller = endpoint("worker-0", None)
        caller._security = shown  # it only dials
        with pytest.raises(PeerLostError, match="coordinator: "):
            call(caller, endpoint("coordinator", authority.issue("coordinator")))


@pytest.mark.usefixtures("both")
def test_tls_against_plain_text_says_so(authority: CertificateAuthority) -> None:
    with pytest.raises(PeerLostError, match="plain text"):
        call(endpoint("worker-0", authority.issue("worker-0")), endpoint("coordinator", None))


@pytest.mark.usefixtures("both")
def test_a_certificate_is_one_nodes(authority: CertificateAuthority) -> None:
    thief = endpoint("worker-1", authority.issue("worker-0"))
    with pytest.raises(RefusedError, match="the certificate of worker-0 says that it is worker-1") as caught:
        call(thief, endpoint("coordinator", authority.issue("coordinator")))
    assert caught.value.code == "BAD_CERTIFICATE"


def test_a_certificate_makes_no_session_for_another_node(
    authority: CertificateAuthority, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else it could use up what the other one may have, or have it hung up on."""

    async def main() -> None:
        monkeypatch.setattr(endpoint_module, "LIMITS", replace(LIMITS, turned_away_s=0.01))
        thief, shard = endpoint("worker-1", authority.issue("worker-0")), endpoint("shard-0", None)
        shard._security, shard.protected = authority.issue("shard-0"), True
        async with two(thief, shard):
            for _ in range(LIMITS.sessions + LIMITS.refusals):
                with pytest.raises(
                    RefusedError, match="the certificate of worker-0 says that it is worker-1"
                ):
                    await ask(thief)
            assert isinstance(shard, GrpcEndpoint)
            assert not shard._sessions._sessions and not shard._ends
            owner = endpoint("worker-1", authority.issue("worker-1"))
            owner.know("shard-0", shard.address)
            await ask(owner)
            await owner.close()

    asyncio.run(main())


@pytest.mark.usefixtures("both")
def test_who_is_dialled_must_be_who_answers(authority: CertificateAuthority) -> None:
    worker = endpoint("worker-0", authority.issue("worker-0"))
    with pytest.raises(PeerLostError, match=r"shard-0: .*another node's"):
        call(worker, endpoint("worker-1", authority.issue("worker-1")), peer="shard-0")


@pytest.mark.usefixtures("both")
@pytest.mark.parametrize("is_protected", [True, False], ids=["TLS", "plain text"])
@pytest.mark.parametrize("role", ROLES)
def test_the_role_decides(
    role: str, is_protected: bool, authority: CertificateAuthority, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every method against every role, over one connection: by the certificate, and by the member's name."""
    more = replace(LIMITS, refusals=2 * len(METHODS))
    monkeypatch.setattr("gradstream.transport.limits.LIMITS", more)
    name = role if role in ("coordinator", "launcher") else f"{role}-0"
    methods = (*METHODS, "a method that nobody has listed")

    async def main() -> None:
        caller, server = (
            endpoint(one, authority.issue(one) if is_protected else None) for one in (name, "shard-1")
        )
        server.identity.members = {name: caller.identity.incarnation, "shard-1": 1}
        async with two(caller, server, methods):
            for method in methods:
                allowed = method in METHODS and role in METHODS[method].callers
                refused = nullcontext() if allowed else pytest.raises(RefusedError, match="FORBIDDEN")
                with refused:
                    await caller.call("shard-1", method, v1.Body(), v1.Body, silence_s=10)

    asyncio.run(main())


def served_by(path: Path) -> set[object]:
    """Names of the methods that a source file serves: constants, or names of constants in that file."""
    tree = ast.parse(path.read_text())
    constants = {
        node.targets[0].id: node.value.value
        for node in tree.body
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.Constant)
        if isinstance(node.targets[0], ast.Name)
    }
    calls = [node for node in ast.walk(tree) if isinstance(node, ast.Call)]
    named = [
        node.args[0]
        for node in calls
        if ast.unparse(node.func).endswith(("endpoint.serve", "self.serve"))
        # A `ShardAgreement` names its method, and a lead its requests.
        if ast.unparse(node.args[0]) not in ("self.METHOD", "method")
    ]
    named += [
        key
        for node in ast.walk(tree)
        if isinstance(node, ast.AnnAssign) and ast.unparse(node.target) == "REQUESTS"
        if isinstance(node.value, ast.Dict)
        for key in node.value.keys
        if key is not None
    ]
    named += [
        node.value
        for node in ast.walk(tree)
        if isinstance(node, ast.AnnAssign) and ast.unparse(node.target) == "METHOD" and node.value is not None
    ]
    return {
        arg.value if isinstance(arg, ast.Constant) else constants.get(ast.unparse(arg), ast.unparse(arg))
        for arg in named
    }


@pytest.mark.kept
def test_every_method_that_nodes_serve_is_listed() -> None:
    served = set().union(*(served_by(path) for path in SOURCE.rglob("*.py") if path.parent.name != "testing"))
    assert "push" in served
    assert served == set(METHODS)
    for name, method in METHODS.items():
        assert method.served_by and method.served_by <= set(ROLES), name
        assert method.callers and method.callers <= set(ROLES), name
        machines = {"machine"} & method.callers
        before = name in ("join", "plan")  # nodes call them before they are members
        assert method.members == (not before and not machines), name
        assert not machines or method.callers == machines, name


def test_roles() -> None:
    assert [role_of(name) for name in ("worker-3", "coordinator", "machine-a-b", "")] == [
        "worker",
        "coordinator",
        "machine",
        "",
    ]


def test_keys_and_secrets_are_not_printed(authority: CertificateAuthority) -> None:
    made = authority.credentials("worker-3", SECRET)
    tls = Tls.of(made)
    assert tls is not None
    assert tls.key is not None
    identity = Identity("job", "worker-3", 1, secret=SECRET)
    for printed in (repr(made), repr(tls), repr(identity), f"{identity}"):
        assert tls.key.decode().splitlines()[1] not in printed
        assert SECRET.decode() not in printed and SECRET.hex() not in printed


def test_signing_requests() -> None:
    authority = CertificateAuthority()
    assert fingerprint_of(authority.certificate) == authority.fingerprint
    assert authority.fingerprint != CertificateAuthority().fingerprint
    request = Key().request()
    assert b"BEGIN CERTIFICATE-----" in authority.sign("worker-0", request)
    for bad in (b"", b"nonsense", request.replace(b"MII", b"MIJ").replace(b"A", b"B", 3)):
        with pytest.raises(RefusedError, match="signing request") as caught:
            authority.sign("worker-0", bad)
        assert caught.value.peer == LAUNCHER


# ---- certificates that are worth nothing any more -------------------------------------------


async def talk(stream: Stream) -> None:
    await stream.send(v1.Frame(body=v1.Body(data=b"x")))
    assert await stream.recv(20) is not None


@asynccontextmanager
async def connected(
    authority: CertificateAuthority,
) -> AsyncIterator[tuple[AnyEndpoint, AnyEndpoint, Stream]]:
    """A worker that has a stream to a shard already, over a connection that stays."""
    worker, shard = (endpoint(name, authority.issue(name)) for name in ("worker-0", "shard-0"))
    async with two(worker, shard):
        shard.methods = {
            "join": Method(callers=frozenset({"worker"}), members=False),
            "push": Method(callers=frozenset({"worker"}), members=False),
        }
        shard.serve("join", reply_once, model=False)
        shard.serve("push", echo, model=False)
        stream = await worker.open("shard-0", "push", v1.Body())
        await talk(stream)
        await ask(worker)
        yield worker, shard, stream


async def ask(worker: AnyEndpoint) -> None:
    await worker.call("shard-0", "join", v1.Body(), v1.Body, silence_s=20)


def digest(tls: Tls | None) -> bytes:
    assert tls is not None and tls.certificate is not None
    return Shown.read(tls.certificate).digest


@pytest.mark.usefixtures("both")
def test_a_revoked_certificate_opens_no_stream_though_its_connection_lives(
    authority: CertificateAuthority,
) -> None:
    async def main() -> None:
        async with connected(authority) as (worker, shard, _):
            assert shard._security is not None
            revoked = digest(worker._security)
            shard.members_changed({"worker-0": 1}, [bytes(32)])
            await ask(worker)
            shard.members_changed({"worker-0": 1}, [bytes(32), revoked])
            for _ in range(2):
                with pytest.raises(RefusedError, match="the certificate of worker-0 was revoked") as refused:
                    await ask(worker)
                assert refused.value.code == "BAD_CERTIFICATE"
            # Nor over a new connection, nor as a new start of the process.
            again = endpoint("worker-0", worker._security)
            again.identity.incarnation = 2
            again.know("shard-0", shard.address)
            with pytest.raises(RefusedError, match="was revoked"):
                await ask(again)
            await again.close()
            # A new certificate of the same name is another one.
            newer = endpoint("worker-0", authority.issue("worker-0"))
            newer.identity.incarnation = 3
            newer.know("shard-0", shard.address)
            await ask(newer)
            await newer.close()

    asyncio.run(main())


@pytest.mark.usefixtures("both")
@pytest.mark.parametrize("why", ["revoked", "expired", "another process's"])
def test_by_no_method_does_a_member_that_is_out_get_in(
    why: str, authority: CertificateAuthority, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every method against every role, with a certificate that was good when its connection was made."""
    monkeypatch.setattr(security, "datetime", SimpleNamespace(datetime=Later, UTC=datetime.UTC))
    monkeypatch.setattr(Later, "ahead", datetime.timedelta())
    monkeypatch.setattr(endpoint_module, "LIMITS", replace(LIMITS, turned_away_s=0.01))
    code = "NOT_MEMBER" if why == "another process's" else "BAD_CERTIFICATE"

    async def main(role: str) -> None:
        caller, server = (endpoint(name, authority.issue(name)) for name in (f"{role}-0", "shard-1"))
        members = {f"{role}-0": 1, "shard-1": 1}
        server.identity.members = members
        mine = [name for name, one in METHODS.items() if role in one.callers]
        async with two(caller, server, tuple(mine)):
            await caller.call("shard-1", mine[0], v1.Body(), v1.Body, silence_s=10)
            if why == "revoked":
                server.members_changed(members, [digest(caller._security)])
            elif why == "expired":
                Later.ahead = LIFE + datetime.timedelta(hours=1)
            else:
                server.members_changed({f"{role}-0": 2, "shard-1": 1})
            for method in mine:
                if why == "another process's" and not METHODS[method].members:
                    continue  # such a method makes members
                with pytest.raises(RefusedError) as refused:
                    await caller.call("shard-1", method, v1.Body(), v1.Body, silence_s=10)
                assert refused.value.code == code, (role, method)
        Later.ahead = datetime.timedelta()

    for role in ("worker", "shard"):
        asyncio.run(main(role))


class Later(datetime.datetime):
    """A clock that is ahead."""

    ahead = datetime.timedelta()

    @classmethod
    def now(cls, tz: datetime.tzinfo | None = None) -> Self:
        """See `datetime`."""
        ahead: Self = super().now(tz) + cls.ahead
        return ahead


def test_a_certificate_that_expires_while_its_connection_is_open(
    authority: CertificateAuthority, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(security, "datetime", SimpleNamespace(datetime=Later, UTC=datetime.UTC))
    monkeypatch.setattr(Later, "ahead", datetime.timedelta())

    async def main() -> None:
        async with connected(authority) as (worker, _, stream):
            Later.ahead = LIFE - datetime.timedelta(hours=1)
            await ask(worker)
            Later.ahead = LIFE + datetime.timedelta(hours=1)
            with pytest.raises(RefusedError, match="the certificate of worker-0 has expired at ") as refused:
                await ask(worker)
            assert refused.value.code == "BAD_CERTIFICATE"
            await talk(stream)  # what was begun before goes on

    asyncio.run(main())


def test_a_certificate_that_has_expired_makes_no_connection(monkeypatch: pytest.MonkeyPatch) -> None:
    old = CertificateAuthority()
    with monkeypatch.context() as patch:
        patch.setattr(certificate_authority, "LIFE", -datetime.timedelta(minutes=1))
        expired = old.issue("worker-0")
    with pytest.raises(PeerLostError, match="coordinator: "):
        call(endpoint("worker-0", expired), endpoint("coordinator", old.issue("coordinator")))


@pytest.mark.parametrize(
    ("skew_days", "life_days", "what"), [(6, -3, "has expired"), (-3, 6, "is not valid yet")]
)
def test_a_clock_that_is_days_off_is_named(
    skew_days: int, life_days: int, what: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(certificate_authority, "SKEW", datetime.timedelta(days=skew_days))
    monkeypatch.setattr(certificate_authority, "LIFE", datetime.timedelta(days=life_days))
    other = CertificateAuthority()
    with pytest.raises(
        PeerLostError, match=f"its certificate {what} by the clock of this machine, which shows 20"
    ):
        call(
            endpoint("worker-0", other.issue("worker-0")), endpoint("coordinator", other.issue("coordinator"))
        )
