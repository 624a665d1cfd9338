"""Reaches a launcher in steps: name, TCP, TLS, certificate. The error says which step failed."""

from __future__ import annotations

import socket
import ssl
import time
from dataclasses import dataclass

import torch

from gradstream.errors import ConfigError, DeadlineError, JoinRefusedError, PeerLostError, RefusedError
from gradstream.machine.description import machine_facts
from gradstream.run.remote.address import Address
from gradstream.run.remote.certificate_authority import fingerprint_of
from gradstream.runtime.base import Runtime
from gradstream.transport.base import Endpoint, Stream
from gradstream.wire import v1

# ---- reach -------------------------------------------------------------------------------

CONNECT_S = 5.0

# The beginning of an HTTP/2 connection in plain text: the preface, and empty settings.
PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + b"\0\0\0\4\0\0\0\0\0"
SETTINGS = 4  # the type of the other side's first frame


def reach(address: Address, *, fingerprint: str | None, insecure: bool) -> bytes | None:
    """Connects to a launcher, and returns its verified certificate, PEM; None if it speaks plain text.

    Raises:
        ConfigError: the name is unknown; or there is no fingerprint to verify the launcher.
        PeerLostError, DeadlineError: nothing answers.
        JoinRefusedError: another launcher answers (BAD_CERTIFICATE), or it uses TLS where plain text was
            expected (TLS), or vice versa (PLAIN_TEXT).
    """
    resolve(address)
    connect(address)
    certificate = shake_hands(address)
    if insecure:
        if certificate is not None:
            raise JoinRefusedError(
                str(address),
                "TLS",
                "the launcher speaks TLS, and no plain text: leave --insecure out, and give the "
                "--fingerprint that the launcher has printed",
            )
        return None
    if certificate is None:
        raise JoinRefusedError(
            str(address),
            "PLAIN_TEXT",
            "it answers in plain text, so that its identity cannot be verified. If the launcher was started "
            "with --insecure, and you trust the network, join with --insecure too",
        )
    check_fingerprint(address, certificate, fingerprint)
    return certificate


def resolve(address: Address) -> list[str]:
    """IP addresses of a host name. Raises ConfigError for an unknown name."""
    try:
        entries = socket.getaddrinfo(address.host, address.port, type=socket.SOCK_STREAM)
    except socket.gaierror as error:
        raise ConfigError(
            f"{address.host}: no machine of this name is known here ({error.strerror}): check the spelling, "
            "or use the number that `ip address` shows on the launcher's machine"
        ) from None
    return sorted({str(entry[4][0]) for entry in entries})


def connect(address: Address, timeout_s: float = CONNECT_S) -> float:
    """Opens a TCP connection and closes it; returns the seconds that opening took.

    Raises:
        PeerLostError: no process listens there, or the network is unreachable.
        DeadlineError: there was no answer within `timeout_s`.
    """
    begun = time.monotonic()
    with _socket(address, timeout_s):
        return time.monotonic() - begun


def shake_hands(address: Address, timeout_s: float = CONNECT_S) -> bytes | None:
    """The certificate, PEM, that an address presents; None if gRPC answers in plain text.

    `check_fingerprint` verifies it.

    Raises:
        JoinRefusedError: the answer is neither TLS nor HTTP/2.
        PeerLostError, DeadlineError: nothing answers.
    """
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE
    context.set_alpn_protocols(["h2"])
    with _socket(address, timeout_s) as connection:
        try:
            with context.wrap_socket(connection) as secure:
                shown = secure.getpeercert(binary_form=True)
                assert shown is not None
                return ssl.DER_cert_to_PEM_cert(shown).encode()
        except TimeoutError:
            raise DeadlineError(
                str(address),
                f"took the connection, then said nothing for {timeout_s:g} s: is it a launcher's address?",
            ) from None
        except OSError as error:  # ssl.SSLError is one
            if _speaks_plain_http2(address, timeout_s):
                return None
            raise JoinRefusedError(
                str(address), "NOT_GRADSTREAM", f"it answers, but is no launcher ({error}): check the port"
            ) from None


def check_fingerprint(address: Address, certificate: bytes, expected: str | None) -> None:
    """Raises JoinRefusedError if the certificate is not the expected one, ConfigError if none is expected."""
    shown = fingerprint_of(certificate)
    if expected is None:
        raise ConfigError(
            f"{address} shows a certificate with fingerprint {shown}. If the launcher has printed this "
            f"fingerprint, give it: --fingerprint {shown}"
        )
    if shown != expected.lower():
        raise JoinRefusedError(
            str(address),
            "BAD_CERTIFICATE",
            f"it shows a certificate with fingerprint {shown}, expected {expected}: it is another run's "
            "launcher, or somebody in between. Copy the line that the launcher has printed anew",
        )


def _socket(address: Address, timeout_s: float) -> socket.socket:
    try:
        return socket.create_connection((address.host, address.port), timeout_s)
    except TimeoutError:
        raise DeadlineError(
            str(address),
            f"no answer to a TCP connection in {timeout_s:g} s: the address is wrong, the machine is down, "
            "or a firewall drops the packets",
        ) from None
    except ConnectionRefusedError:
        raise PeerLostError(
            str(address),
            "the machine answers, but no program listens at this port: is the launcher still running?",
        ) from None
    except OSError as error:
        raise PeerLostError(
            str(address),
            f"it cannot be reached ({error.strerror or error}): are both machines in one network?",
        ) from None


def _speaks_plain_http2(address: Address, timeout_s: float) -> bool:
    try:
        with socket.create_connection((address.host, address.port), timeout_s) as connection:
            connection.sendall(PREFACE)
            answer = connection.recv(9)
    except OSError:
        return False
    return len(answer) >= 4 and answer[3] == SETTINGS


# ---- measure -----------------------------------------------------------------------------
# Measures the speed to a launcher and back: both sides of the measurement.

CHUNK_BYTES = 1 << 20
MAX_CHUNKS = 512
SILENCE_S = 20.0


@dataclass(frozen=True, slots=True)
class LinkSpeed:
    """The speed of a link.

    Args:
        up_bytes_s, down_bytes_s: bytes per second to the launcher, and from it.
        facts: description of the launcher's machine.
    """

    up_bytes_s: float
    down_bytes_s: float
    facts: dict[str, str]


async def serve_measure(stream: Stream, request: v1.Measure) -> None:
    """The launcher's side: counts the bytes it receives, then sends as many chunks as requested."""
    received_bytes = 0
    while (received := await stream.recv(SILENCE_S)) is not None:
        if received.payload is not None:
            received_bytes += received.payload.numel() * received.payload.element_size()
    measured = v1.Measured(received_bytes=received_bytes, facts=machine_facts())
    await _send_chunks(stream, min(request.chunks, MAX_CHUNKS))
    await stream.send(v1.Frame(body=v1.Body(data=measured.SerializeToString())))


async def measure(runtime: Runtime, endpoint: Endpoint, peer: str, *, num_bytes: int) -> LinkSpeed:
    """Measures the speed of the link to a launcher with `num_bytes` each way.

    Raises:
        RefusedError: this machine does not know the run's token.
        PeerLostError, DeadlineError: the launcher is gone, or silent.
    """
    chunks = max(1, min(MAX_CHUNKS, num_bytes // CHUNK_BYTES))
    stream = await endpoint.open(peer, "measure", v1.Measure(chunks=chunks))
    begun = runtime.now()
    await _send_chunks(stream, chunks)
    await stream.end()
    turned: int | None = None
    measured = None
    while (received := await stream.recv(SILENCE_S)) is not None:
        turned = turned or runtime.now()  # the first chunk back: the launcher has received everything
        if received.frame.HasField("body"):
            measured = v1.Measured.FromString(received.frame.body.data)
    ended = runtime.now()
    if measured is None or turned is None or measured.received_bytes != chunks * CHUNK_BYTES:
        raise RefusedError(peer, "INTERNAL", "the measurement ended early")
    total = chunks * CHUNK_BYTES
    back = (chunks - 1) * CHUNK_BYTES  # the first had arrived when the clock was read
    return LinkSpeed(
        up_bytes_s=total / max(turned - begun, 1) * 1e9,
        down_bytes_s=back / max(ended - turned, 1) * 1e9,
        facts=dict(measured.facts),
    )


async def _send_chunks(stream: Stream, count: int) -> None:
    elems = CHUNK_BYTES // 4
    payload = torch.rand(elems)  # random, so that no network compresses it
    for index in range(count):
        chunk = v1.Chunk(index=index, elems=elems, dtype=v1.FLOAT32)
        await stream.send(v1.Frame(chunk=chunk), payload, SILENCE_S)
