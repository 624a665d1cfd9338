"""What only TLS over sockets has: records, and peers that speak something else or nothing."""

from __future__ import annotations

import asyncio
import random
import socket
import ssl
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace

import pytest

from gradstream.errors import PeerLostError, RefusedError
from gradstream.run.remote.certificate_authority import CertificateAuthority
from gradstream.runtime import RealRuntime
from gradstream.testing.pairs import SECRET
from gradstream.testing.pieces import reply_once
from gradstream.transport.base import Identity
from gradstream.transport.limits import LIMITS
from gradstream.transport.security import Shown, Tls
from gradstream.transport.socket import endpoint as endpoint_module
from gradstream.transport.socket.tcp import TcpEndpoint
from gradstream.transport.socket.tls import TlsSocket
from gradstream.wire import v1

AUTHORITY = CertificateAuthority()


def endpoint(name: str, tls: Tls | None) -> TcpEndpoint:
    return TcpEndpoint(Identity("job", name, 1, secret=SECRET), RealRuntime(name), security=tls)


@asynccontextmanager
async def shard(**options: Tls | None) -> AsyncIterator[TcpEndpoint]:
    server = endpoint("shard-0", options.get("tls", AUTHORITY.issue("shard-0")))
    server.serve("join", reply_once, model=False)
    await server.start()
    try:
        yield server
    finally:
        await server.close()


async def ask(server: TcpEndpoint, tls: Tls | None) -> None:
    caller = endpoint("worker-0", tls)
    caller.know("shard-0", server.address)
    try:
        await caller.call("shard-0", "join", v1.Body(), v1.Body, silence_s=20)
    finally:
        await caller.close()


async def closed(server: TcpEndpoint, said: bytes) -> bytes:
    """What a stranger who says this is told before it is hung up on."""
    host, _, port = server.address.rpartition(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    writer.write(said)
    try:
        return await asyncio.wait_for(reader.read(), 20)
    except ConnectionResetError:
        return b""
    finally:
        writer.close()


@pytest.mark.parametrize(
    "said", [b"", b"GET / HTTP/1.1\r\n\r\n", bytes(64), random.Random(1).randbytes(5000)]
)
def test_strangers_have_so_much_time_and_are_told_nothing(
    said: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(endpoint_module, "LIMITS", replace(LIMITS, handshake_s=0.5))

    async def main() -> None:
        async with shard() as server:
            answer = await closed(server, said)
            assert not answer or (answer[0] == 21 and len(answer) == 7)  # nothing, or an alert of TLS
            await ask(server, AUTHORITY.issue("worker-0"))

    asyncio.run(main())


def test_plain_text_that_meets_tls_says_so_on_either_side(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(endpoint_module, "CONNECT_S", 0.5)

    async def main() -> None:
        async with shard() as server:
            with pytest.raises(
                PeerLostError, match=r"said nothing for 0.5 s.* speaks TLS, and this node plain text"
            ):
                await ask(server, None)
        async with shard(tls=None) as server:
            with pytest.raises(PeerLostError, match="it speaks plain text, this node TLS"):
                await ask(server, AUTHORITY.issue("worker-0"))

    asyncio.run(main())


@pytest.mark.parametrize("which", ["none", "another run's", "another node's"])
def test_a_caller_without_its_certificate_learns_why(which: str) -> None:
    other = CertificateAuthority().issue("worker-0")
    tls, why = {
        "none": (Tls(authority=AUTHORITY.certificate), "this node has shown none"),
        "another run's": (replace(other, authority=AUTHORITY.certificate), "does not know the authority"),
        "another node's": (AUTHORITY.issue("worker-1"), "certificate of worker-1 says that it is worker-0"),
    }[which]

    async def main() -> None:
        async with shard() as server:
            with pytest.raises((PeerLostError, RefusedError), match=why):
                await ask(server, tls)
            await ask(server, AUTHORITY.issue("worker-0"))

    asyncio.run(main())


def test_data_sockets_are_encrypted_and_refused_to_who_is_out() -> None:
    async def main() -> None:
        mine = AUTHORITY.issue("worker-0")
        assert mine.certificate is not None
        async with shard() as server:
            caller = endpoint("worker-0", mine)
            await caller.start()
            caller.know("shard-0", server.address)
            server.know("worker-0", caller.address)
            both = await asyncio.gather(
                caller.data_socket("shard-0", "line", dial=True),
                server.data_socket("worker-0", "line", dial=False),
            )
            for one in both:
                assert one is not None and isinstance(one.socket, TlsSocket) and not one.checked
                one.socket.close()
            server.members_changed({"worker-0": 1}, [Shown.read(mine.certificate).digest])
            assert await caller.data_socket("shard-0", "line", dial=True) is None
            await caller.close()

    asyncio.run(main())


async def pair() -> tuple[TlsSocket, TlsSocket]:
    raw = socket.socketpair()
    for one in raw:
        one.setblocking(False)
    near = TlsSocket(raw[0], AUTHORITY.issue("worker-0"), "shard-0")
    far = TlsSocket(raw[1], AUTHORITY.issue("shard-0"), None)
    await asyncio.gather(near.handshake(), far.handshake())
    return near, far


@pytest.mark.parametrize("seed", range(5))
def test_bytes_are_the_same_however_they_are_cut(seed: int) -> None:
    """With a reader that takes a little and a writer whose socket is full most of the time."""
    draw = random.Random(seed)
    data = draw.randbytes(3 << 20)

    async def main() -> None:
        near, far = await pair()
        sent, got, stuck = 0, bytearray(), 0
        while len(got) < len(data):
            try:
                left, cut = memoryview(data)[sent:], draw.randrange(1, 100)
                sent += near.sendmsg([left[:cut], left[cut : cut + draw.choice([0, 10, 1 << 16, 1 << 19])]])
            except BlockingIOError:
                stuck += 1
            while True:
                places = [memoryview(bytearray(draw.choice([1, 100, 1 << 15, 1 << 18]))) for _ in range(2)]
                try:
                    (num_bytes,) = far.recvmsg_into(places)
                except BlockingIOError:
                    break
                got += b"".join(places)[:num_bytes]
                if not far.more and draw.random() < 0.5:
                    break
        assert got == data
        assert stuck > 0
        near.close()
        assert far.recv_into(memoryview(bytearray(10))) == 0
        far.close()

    asyncio.run(main())


def test_nothing_leaves_in_plain_text_after_a_shutdown() -> None:
    async def main() -> None:
        near, far = await pair()
        near.shutdown(socket.SHUT_RDWR)
        with pytest.raises(OSError, match="ipe"):
            near.sendmsg([b"secret"])
        assert far.recv_into(memoryview(bytearray(10))) == 0
        near.close()
        far.close()

    asyncio.run(main())


def test_settings() -> None:
    for calls in (True, False):
        context = AUTHORITY.issue("shard-0").context(calls=calls)
        assert context.minimum_version >= ssl.TLSVersion.TLSv1_2
        assert context.verify_mode is ssl.CERT_REQUIRED
        assert context.check_hostname is calls
        old = [one for one in context.get_ciphers() if one["protocol"] != "TLSv1.3"]
        assert old and all("GCM" in one["name"] and one["name"].startswith("ECDHE") for one in old)
        assert len(context.get_ca_certs()) == 1
