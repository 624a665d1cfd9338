"""Attacks on a real run: every port that its processes have open, every method, by whoever is not allowed to.

What is shown for each: nothing is served, and nothing is told by which the run could be known.
"""

from __future__ import annotations

import asyncio
import ipaddress
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import pytest

from gradstream.errors import GradstreamError, RefusedError
from gradstream.run.remote.certificate_authority import JOB, CertificateAuthority
from gradstream.runtime import RealRuntime
from gradstream.transport.base import Identity
from gradstream.transport.grpc.endpoint import GrpcEndpoint
from gradstream.transport.limits import LIMITS, METHODS, role_of
from gradstream.transport.offers import CarrierOffer
from gradstream.transport.security import Tls
from gradstream.transport.socket.framing import PREFIX
from gradstream.transport.socket.tcp import TcpEndpoint
from gradstream.wire import v1
from gradstream.wire.v1_pb2_grpc import PeerStub
from kit import bare
from kit.bare import Bare, BareSocket, Refused, packed
from kit.insider import Leak

pytestmark = pytest.mark.cold  # looks at command lines and environments of processes

ALL = (*(name for name in METHODS if name not in ("meet", "replica")), "a method that nobody has listed")
"""Those of pairs are left out, being alike to others: after 32 refusals in ten seconds worker-1 itself is shut out."""
OTHER_SECRET = b"the secret of another run, not of this"
KINDS = ("plain", "tls")
NOBODY = 65534
"""Another user of the machine."""


@dataclass
class Run:
    """The run under attack, and what is known of it.

    Args:
        folder: of the test.
        leak: what its last worker knows.
        addresses: by node and carrier.
        token: that machines join by, where there is a port for that.
    """

    folder: Path
    leak: Leak
    addresses: dict[str, dict[str, str]]
    token: str = ""
    pids: list[int] = field(default_factory=list)

    def ports(self, carrier: str) -> list[tuple[str, str]]:
        """(node, address) of each port of a carrier."""
        return [(name, by[carrier]) for name, by in self.addresses.items() if carrier in by]

    def leaks(self, said: str) -> list[str]:
        """What of the run is told in a text."""
        secrets = [*self.leak.identifiers, str(self.folder), *([self.token] if self.token else [])]
        return [known for known in secrets if known in said]


def children(pid: int) -> list[int]:
    """All processes below one."""
    found = []
    for task in Path(f"/proc/{pid}/task").glob("*/children"):
        with suppress(OSError):
            for child in task.read_text().split():
                found += [int(child), *children(int(child))]
    return found


@contextmanager
def begin(folder: Path, kind: str) -> Iterator[Callable[[], Run]]:
    """Starts a run; what it yields waits until it trains. At its end the run must be as it was."""
    script = Path(__file__).parents[1] / "attacked_run.py"
    with subprocess.Popen(
        [sys.executable, str(script), str(folder), kind], stderr=subprocess.PIPE
    ) as process:
        try:
            yield partial(_found, folder, kind, process)
            # It stops with a checkpoint, and blames nobody.
            process.send_signal(signal.SIGTERM)
            assert process.wait(60) == 75
            events = [json.loads(line) for line in (folder / "run/events.jsonl").read_text().splitlines()]
            assert not [event for event in events if event["event"] == "failed"]
            assert not [event for event in events if event["event"] == "left" and event["lost"]]
        finally:
            process.kill()


def _found(folder: Path, kind: str, process: subprocess.Popen[bytes]) -> Run:
    deadline = time.monotonic() + 110
    while not (folder / "leak.json").exists():
        assert process.poll() is None, process.stderr.read().decode()  # type: ignore[union-attr]
        assert time.monotonic() < deadline
        time.sleep(0.05)
    leak = Leak.read(folder / "leak.json")
    addresses = {"coordinator": {"grpc": leak.coordinator}}
    for line in (folder / "run/events.jsonl").read_text().splitlines():
        event = json.loads(line)
        if event["event"] == "joined":
            addresses[event["who"]] = dict(CarrierOffer.parse(event["address"]).addresses)
    run = Run(folder, leak, addresses, pids=[process.pid, *children(process.pid)])
    if kind == "tls":
        words = (folder / "invitation").read_text().split()
        addresses["launcher"] = {"grpc": words[words.index("join") + 1]}
        run.token = words[words.index("--token") + 1]
    return run


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Run]]:
    """Both of them, which begin side by side."""
    with ExitStack() as stack:
        begun = {kind: stack.enter_context(begin(tmp_path_factory.mktemp(kind), kind)) for kind in KINDS}
        yield {kind: find() for kind, find in begun.items()}


@pytest.fixture
def plain(runs: dict[str, Run]) -> Run:
    return runs["plain"]


@pytest.fixture
def tls(runs: dict[str, Run]) -> Run:
    return runs["tls"]


# ---- which ports there are -----------------------------------------------------------------


def host_of(raw: str) -> str:
    """An address of the kernel's tables, which is in hexadecimal and of words whose bytes are reversed."""
    words = bytes.fromhex(raw)
    packed_host = b"".join(words[at : at + 4][::-1] for at in range(0, len(words), 4))
    host = ipaddress.ip_address(packed_host)
    return str(getattr(host, "ipv4_mapped", None) or host)


def listening(pids: list[int]) -> tuple[set[str], set[str]]:
    """TCP addresses and names of Unix sockets at which processes listen, by the kernel's word."""
    inodes = set()
    for pid in pids:
        for entry in Path(f"/proc/{pid}/fd").glob("*"):
            with suppress(OSError):
                if found := re.fullmatch(r"socket:\[(\d+)\]", os.readlink(entry)):
                    inodes.add(found[1])
    tcp = set()
    for table in ("tcp", "tcp6"):
        for line in Path(f"/proc/net/{table}").read_text().splitlines()[1:]:
            words = line.split()
            if words[3] == "0A" and words[9] in inodes:
                raw, _, port = words[1].partition(":")
                tcp.add(f"{host_of(raw)}:{int(port, 16)}")
    unix = set()
    for line in Path("/proc/net/unix").read_text().splitlines()[1:]:
        words = line.split()
        if words[6] in inodes and int(words[3], 16) & 0x10000 and len(words) > 7:
            unix.add(words[7])
    return tcp, unix


@pytest.mark.limit_s(240)
def test_only_known_ports_are_open_and_only_on_loopback(plain: Run, tls: Run) -> None:
    for run in (plain, tls):
        tcp, unix = listening(run.pids)
        known = {address for carrier in ("grpc", "tcp") for _, address in run.ports(carrier)}
        assert tcp == known
        assert all(address.startswith("127.0.0.1:") for address in tcp)
        assert not [name for name in unix if not name.startswith("@gradstream/")]
        assert len(unix) == 2 * len(run.ports("shm"))  # frames, and memory beside them
        assert not run.leaks(" ".join(unix))  # every user can read these names


@pytest.mark.limit_s(240)
def test_secrets_are_in_no_file_and_in_no_command_line(plain: Run, tls: Run) -> None:
    for run in (plain, tls):
        secret = bytes.fromhex(run.leak.secret)
        known = [secret, run.leak.secret.encode(), b"PRIVATE KEY"]
        files = [path for path in (run.folder / "run").rglob("*") if path.is_file()]
        assert len(files) >= 5
        for path in files:
            assert not [one for one in known if one in path.read_bytes()], path
        for pid in run.pids:
            for where in ("cmdline", "environ"):
                said = Path(f"/proc/{pid}/{where}").read_bytes()
                assert said or where == "environ"
                assert not [one for one in known if one in said], (pid, where)
            opened = [os.readlink(entry) for entry in Path(f"/proc/{pid}/fd").glob("*")]
            assert not [path for path in opened if path.endswith((".pem", ".key"))]
    assert not list(Path(tempfile.gettempdir()).glob("gradstream-*/*.key"))


# ---- strangers by gRPC -----------------------------------------------------------------------

Attack = Callable[[grpc.aio.Channel, Bare, str], Awaitable[str]]
"""Tries to open a stream of a method; returns everything that the other side has said."""


async def everything(call: Any) -> str:
    """All that comes of a call, as text; a served one is told apart by what it is accepted with."""
    said = []
    try:
        while (message := await asyncio.wait_for(call.read(), 60)) is not grpc.aio.EOF:  # type: ignore[attr-defined]
            said.append(str(message))
        said.append(f"{await call.code()} {await call.details()} {await call.trailing_metadata()}")
        said.append(str(await call.initial_metadata()))
    except grpc.aio.AioRpcError as error:
        said.append(
            f"{error.code()} {error.details()} {error.trailing_metadata()} {error.initial_metadata()}"
        )
    return "\n".join(said)


async def stream_with(channel: grpc.aio.Channel, metadata: Any, opening: v1.Frame) -> str:
    call = PeerStub(channel).Stream(metadata=metadata)  # type: ignore[no-untyped-call]
    with suppress(grpc.aio.AioRpcError, asyncio.InvalidStateError):
        await call.write(opening)
        await call.write(v1.Frame(body=v1.Body(data=b"x")))
        await call.done_writing()
    return await everything(call)


async def no_secret(channel: grpc.aio.Channel, by: Bare, method: str) -> str:
    return await stream_with(channel, None, by.opening(method))


async def empty_greeting(channel: grpc.aio.Channel, by: Bare, method: str) -> str:
    try:
        await bare.show(channel, by, b"")
    except Refused as refused:
        return str(refused)
    return "accept: a session for nothing"


async def wrong_secret(channel: grpc.aio.Channel, by: Bare, method: str) -> str:
    mine = by.identity
    stranger = Bare(Identity(mine.job, mine.name, mine.incarnation, secret=OTHER_SECRET), by.called)
    try:
        session = await bare.open_session(channel, stranger)
    except Refused as refused:
        return str(refused) + await stream_with(channel, bare.pass_metadata(bytes(40)), by.opening(method))
    return f"accept: {session}"


async def another_runs(channel: grpc.aio.Channel, by: Bare, method: str) -> str:
    """Right secret, but proved for another job: as of a run that was given the same token."""
    other = Bare(Identity("another job", by.identity.name, 3, secret=by.identity.secret), by.called)
    try:
        session = await bare.open_session(channel, other)
    except Refused as refused:
        return str(refused)
    return f"accept: {session}"


async def replayed_greeting(channel: grpc.aio.Channel, by: Bare, method: str) -> str:
    """What somebody has recorded who listens on the wire."""
    session = await bare.open_session(channel, by)
    session.close()
    try:
        await bare.show(channel, by, session.greeting)
    except Refused as refused:
        return str(refused)
    return "accept: a greeting was good twice"


async def replayed_pass(channel: grpc.aio.Channel, by: Bare, method: str) -> str:
    session = await bare.open_session(channel, by)
    shown = session.metadata()
    await stream_with(channel, shown, by.opening("a method of no interest"))
    said = await stream_with(channel, shown, by.opening(method))
    session.close()
    return said


async def forged_pass(channel: grpc.aio.Channel, by: Bare, method: str) -> str:
    """A session that is somebody's, and a number that was not used, but no key."""
    session = await bare.open_session(channel, by)
    forged = v1.Pass(session=session.proven.session, number=77, proof=bytes(32)).SerializeToString()
    said = await stream_with(channel, bare.pass_metadata(forged), by.opening(method))
    session.close()
    return said


GRPC_ATTACKS: list[Attack] = [
    no_secret,
    empty_greeting,
    wrong_secret,
    another_runs,
    replayed_greeting,
    replayed_pass,
    forged_pass,
]


def served(said: str) -> bool:
    """Whether a stream was let in, or told anything but that it is not."""
    return "accept" in said or "body" in said or "chunk" in said


@pytest.mark.limit_s(240)
@pytest.mark.parametrize("attack", GRPC_ATTACKS, ids=lambda attack: attack.__name__)
def test_strangers_by_grpc(plain: Run, attack: Attack) -> None:
    # The first use of a pass is refused to a member, which may not be refused more often.
    methods = ALL[: LIMITS.refusals // 2] if attack is replayed_pass else ALL

    async def one(channel: grpc.aio.Channel, node: str, method: str) -> None:
        said = await attack(channel, Bare(plain.leak.identity(), node), method)
        assert said, (node, method)
        assert not served(said), (node, method, said)
        assert not plain.leaks(said), (node, method, said)

    async def on(node: str, address: str) -> int:
        turns = asyncio.Semaphore(8)  # an honest node has no more connections

        async def in_turn(channel: grpc.aio.Channel, method: str) -> None:
            async with turns:
                await one(channel, node, method)

        async with grpc.aio.insecure_channel(address) as channel:
            await asyncio.gather(*(in_turn(channel, method) for method in methods))
        return len(methods)

    async def main() -> int:
        return sum(await asyncio.gather(*(on(*port) for port in plain.ports("grpc"))))

    assert asyncio.run(main()) == len(plain.ports("grpc")) * len(methods) >= 4 * 16


def test_the_suite_would_notice(plain: Run) -> None:
    """With the secret and a member's name, the same steps are served: what refuses is the proof."""

    async def main() -> str:
        (address,) = [address for node, address in plain.ports("grpc") if node == "shard-0"]
        by = Bare(plain.leak.identity(), "shard-0")
        async with grpc.aio.insecure_channel(address) as channel:
            session = await bare.open_session(channel, by)
            request = v1.Fetch(chunks=[0]).SerializeToString()
            call = PeerStub(channel).Stream(metadata=session.metadata())  # type: ignore[no-untyped-call]
            await call.write(by.opening("fetch", request))
            said = str(await call.read()) + str(await call.read())
            session.close()
            return said

    said = asyncio.run(main())
    assert served(said)
    assert plain.leaks(f"job {plain.leak.job}")


# ---- strangers by TCP ------------------------------------------------------------------------


async def all_of(raw: BareSocket) -> bytes:
    with suppress(ConnectionError):
        return await asyncio.wait_for(raw.reader.read(1 << 20), 60)
    return b""


@pytest.mark.limit_s(240)
def test_strangers_by_tcp(plain: Run) -> None:
    """No greeting, garbage, a wrong secret, another run's, and a greeting that was said before."""

    async def attack(kind: str, address: str, by: Bare, method: str) -> str:
        opening = packed(1, 0, by.opening(method))
        async with BareSocket(address) as raw:
            if kind == "no greeting":
                await raw.challenge()
                await raw.say(opening)
            elif kind == "http":
                await raw.challenge()
                await raw.say(b"GET / HTTP/1.1\r\n\r\n" * 10)
            else:
                secret = OTHER_SECRET if kind == "wrong secret" else by.identity.secret
                job = "another job" if kind == "another run's" else by.identity.job
                greeter = Bare(Identity(job, by.identity.name, 3, secret=secret), by.called)
                challenge = await raw.challenge()
                if kind == "replayed":
                    async with BareSocket(address) as recorded:
                        said, _ = await recorded.greet(Bare(by.identity, by.called))
                else:
                    said = greeter.greeting(challenge)
                await raw.say(packed(0, 0, v1.Frame(greeting=said)), opening)
            data = await all_of(raw)
        frames = []
        while data:
            _, _, header_bytes, payload_bytes = PREFIX.unpack(data[: PREFIX.size])
            end = PREFIX.size + header_bytes + payload_bytes
            frames.append(str(v1.Frame.FromString(data[PREFIX.size : PREFIX.size + header_bytes])))
            data = data[end:]
        return "\n".join(frames)

    async def main() -> None:
        kinds = ("no greeting", "http", "wrong secret", "another run's", "replayed")
        for node, address in plain.ports("tcp"):
            for kind in kinds:
                # Nothing of the Open is looked at before the greeting, so a few methods stand for all.
                for method in ("push", "fetch", "exchange"):
                    said = await attack(kind, address, Bare(plain.leak.identity(), node), method)
                    assert not served(said), (node, kind, said)
                    assert not plain.leaks(said), (node, kind, said)
                    if kind in ("wrong secret", "another run's", "replayed"):
                        assert "BAD_SECRET" in said

    asyncio.run(main())


# ---- other users of the machine ----------------------------------------------------------------

INTRUDER = """
import json, os, socket, sys
names, run_dir, secrets = json.loads(sys.argv[1])
os.setgroups([]); os.setgid({nobody}); os.setuid({nobody})
got = dict()
for name in names:
    for kind in (socket.SOCK_STREAM, socket.SOCK_SEQPACKET):
        with socket.socket(socket.AF_UNIX, kind) as connection:
            connection.settimeout(60)
            try:
                connection.connect(chr(0) + name[1:])
            except OSError:
                continue
            try:
                got[name] = connection.recv(1 << 16).hex()
            except OSError as error:
                got[name] = "" if isinstance(error, ConnectionError) else repr(error)
for secret in secrets:
    try:
        got[secret] = open(secret).read()
    except OSError:
        pass
print(json.dumps(got))
"""


@pytest.mark.skipif(os.geteuid() != 0, reason="becoming another user takes root")
def test_other_users_of_the_machine(plain: Run) -> None:
    """Unix sockets hang up on them at once, without a word."""
    _, unix = listening(plain.pids)
    assert unix
    given = json.dumps([sorted(unix), str(plain.folder / "run"), [f"/proc/{plain.pids[0]}/environ"]])
    code = INTRUDER.format(nobody=NOBODY)
    done = subprocess.run([sys.executable, "-c", code, given], capture_output=True, text=True, check=True)
    got = json.loads(done.stdout)
    assert set(got) == unix  # each was there to be tried
    assert set(got.values()) == {""}


# ---- TLS ---------------------------------------------------------------------------------------


def stolen(run: Run, **changed: Any) -> Tls:
    pem = {name: text.encode() for name, text in run.leak.tls.items()}
    return Tls(**(pem | changed))


async def ask(
    identity: Identity,
    security: Tls | None,
    node: str,
    address: str,
    method: str,
    carrier: type[GrpcEndpoint | TcpEndpoint] = GrpcEndpoint,
) -> str:
    endpoint = carrier(identity, RealRuntime("attacker"), security=security)
    endpoint.know(node, address)
    try:
        stream = await endpoint.open(node, method, v1.Body())
        await stream.end()
        received = await stream.recv(10)
        return f"accept {received}"
    except GradstreamError as error:
        return str(error)
    finally:
        await endpoint.close()


@pytest.mark.limit_s(300)
def test_strangers_under_tls(tls: Run) -> None:
    """Plain text, no certificate, another authority's, and a good certificate without the secret."""
    other = CertificateAuthority()

    async def main() -> None:
        insider = tls.leak.identity()
        unproved = tls.leak.identity(secret=OTHER_SECRET)

        async def on(carrier: type[GrpcEndpoint | TcpEndpoint], node: str, address: str) -> None:
            job = {"job": JOB} if node == "launcher" else {}
            kinds = {
                "plain text": (tls.leak.identity(**job), None),
                "no certificate": (tls.leak.identity(**job), stolen(tls, certificate=None, key=None)),
                "another authority": (tls.leak.identity(**job), other.issue(insider.name)),
                "no secret": (tls.leak.identity(secret=OTHER_SECRET, **job), stolen(tls)),
            }
            for kind, (identity, security) in kinds.items():
                for method in ALL if kind == "no secret" else ("join", "push", "enrol"):
                    said = await ask(identity, security, node, address, method, carrier)
                    assert "accept" not in said, (node, kind, method, said)
                    assert not tls.leaks(said), (node, kind, method, said)

        assert tls.ports("tcp")
        await asyncio.gather(
            *(on(GrpcEndpoint, *port) for port in tls.ports("grpc")),
            *(on(TcpEndpoint, *port) for port in tls.ports("tcp")),
        )
        assert unproved.secret != insider.secret

    asyncio.run(main())


@pytest.mark.limit_s(300)
def test_a_member_stays_in_its_role(tls: Run) -> None:
    """worker-1's own certificate and the secret: as another node, and for methods that are not a worker's."""

    async def main() -> None:
        member = tls.leak.identity()

        async def as_another(node: str, address: str) -> None:
            """Over TCP; the roles are in `test_transport_security`, since so many refusals would shut worker-1 out."""
            for name in ("worker-0", "shard-0", "coordinator"):
                identity = tls.leak.identity(name=name)
                said = await ask(identity, stolen(tls), node, address, "fetch", TcpEndpoint)
                assert "BAD_CERTIFICATE" in said, (node, name, said)

        async def on(node: str, address: str) -> None:
            for name in ("worker-0", "shard-0", "coordinator"):
                said = await ask(tls.leak.identity(name=name), stolen(tls), node, address, "fetch")
                assert "BAD_CERTIFICATE" in said, (node, name, said)
            for method in ALL:
                known = METHODS.get(method)
                if known is not None and "worker" in known.callers and role_of(node) in known.served_by:
                    continue
                said = await ask(member, stolen(tls), node, address, method)
                assert re.search("FORBIDDEN|UNKNOWN_METHOD", said), (node, method, said)

        await asyncio.gather(
            *(on(*port) for port in tls.ports("grpc") if port[0] != "launcher"),
            *(as_another(*port) for port in tls.ports("tcp")),
        )

    asyncio.run(main())


@pytest.mark.limit_s(240)
def test_machines_need_the_token(tls: Run) -> None:
    """The port of enrolment serves its own methods alone, to whoever proves to know the token."""

    async def main() -> None:
        (address,) = [address for node, address in tls.ports("grpc") if node == "launcher"]
        security = Tls(authority=tls.leak.tls["authority"].encode(), mutual=False)
        for method in ALL:
            stranger = Identity(JOB, "machine-x", 5, secret=OTHER_SECRET)
            said = await ask(stranger, security, "launcher", address, method)
            assert "BAD_SECRET" in said
            assert not tls.leaks(said)
            guest = Identity(JOB, "machine-x", 5, secret=tls.token.encode())
            if METHODS.get(method) is None or "machine" not in METHODS[method].callers:
                said = await ask(guest, security, "launcher", address, method)
                assert "UNKNOWN_METHOD" in said, (method, said)

    asyncio.run(main())


# ---- thieves -------------------------------------------------------------------------------------


@pytest.mark.limit_s(240)
def test_with_the_secret_but_no_member(plain: Run) -> None:
    """Reading the model, pushing, scaling it: as a worker that there is none of, or that is another one."""

    async def on(node: str, address: str, name: str) -> int:
        endpoint = GrpcEndpoint(plain.leak.identity(name=name, incarnation=7), RealRuntime("thief"))
        endpoint.know(node, address)
        methods = [method for method, known in METHODS.items() if role_of(node) in known.served_by]
        try:
            return sum(await asyncio.gather(*(refused(endpoint, node, method) for method in methods)))
        finally:
            await endpoint.close()

    async def refused(endpoint: GrpcEndpoint, node: str, method: str) -> int:
        stream = await endpoint.open(node, method, v1.Body())
        # A run without quorums, say, serves none.
        with pytest.raises(RefusedError, match=r"NOT_MEMBER|FORBIDDEN|BAD_REQUEST|UNKNOWN_METHOD"):
            await stream.recv(20)
        return 1

    async def main() -> int:
        thieves = ("worker-7", plain.leak.name)
        tried = [on(*port, name) for port in plain.ports("grpc") for name in thieves]
        return sum(await asyncio.gather(*tried))

    assert asyncio.run(main()) >= 2 * 8
