"""Reaches a launcher in steps: name, TCP, TLS, certificate. The error says which step failed."""

from __future__ import annotations

import asyncio
import os
import socket
import ssl
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

import torch

from gradstream._version import __version__
from gradstream.errors import (
    ConfigError,
    DeadlineError,
    GradstreamError,
    JoinRefusedError,
    PeerLostError,
    RefusedError,
)
from gradstream.machine.description import machine_facts
from gradstream.machine.doctor import DoctorResult, megabytes_s
from gradstream.run.remote.address import Address, new_token
from gradstream.run.remote.certificate_authority import JOB, LAUNCHER, fingerprint_of
from gradstream.runtime.base import Runtime
from gradstream.runtime.real import RealRuntime
from gradstream.transport.base import Endpoint, Identity, Stream
from gradstream.transport.grpc.endpoint import GrpcEndpoint
from gradstream.transport.security import Tls
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


# ---- doctor ------------------------------------------------------------------------------
# `gradstream doctor ADDR:PORT`: checks the network path to a launcher.

CLOCK_WARNING_S = 60.0
CLOCK_FAILED_S = 3600.0
"""Certificates are valid from an hour before they were made."""

NUM_PINGS = 20
MEASURE_BYTES = 64 << 20


def look_there(
    address: Address,
    token: str | None = None,
    fingerprint: str | None = None,
    num_bytes: int = MEASURE_BYTES,
) -> Iterator[DoctorResult]:
    """Checks the path to a launcher in steps; the first step that fails is the last one, and has a remedy.

    Args:
        address: address of the launcher.
        token: token of the run; None checks no further than TLS.
        fingerprint: expected fingerprint of the launcher's certificate; None skips the comparison.
        num_bytes: bytes to send each way.
    """
    shown: list[bytes | None] = []

    def tls() -> str:
        begun = time.monotonic()
        certificate = shake_hands(address)
        shown.append(certificate)
        if certificate is None:
            return "none: plain text, as of a launcher that was started with --insecure"
        took = _ms(time.monotonic() - begun)
        if fingerprint is None:
            return f"{took}; whose certificate it is was not checked: no --fingerprint"
        check_fingerprint(address, certificate, fingerprint)
        return f"{took}; the fingerprint is right"

    steps: list[tuple[str, Callable[[], str]]] = [
        ("name", lambda: ", ".join(resolve(address))),
        ("TCP", lambda: f"connected in {_ms(connect(address))}"),
        ("TLS", tls),
    ]
    for what, step in steps:
        try:
            text = step()
        except GradstreamError as error:
            yield DoctorResult(what, str(error), "failed")
            return
        odd = text.startswith("none") or "not checked" in text
        yield DoctorResult(what, text, "warning" if odd else "ok")
    if token is None:
        text = "not checked: a launcher answers only machines that know its token; give --token"
        yield DoctorResult("gRPC", text, "warning")
        return
    yield from asyncio.run(_talk(address, token, shown[0], num_bytes))


async def _talk(
    address: Address, token: str, certificate: bytes | None, num_bytes: int
) -> list[DoctorResult]:
    runtime = RealRuntime("doctor")
    security = Tls(authority=certificate, mutual=False) if certificate else None
    identity = Identity(JOB, "machine-doctor", int.from_bytes(os.urandom(8), "little"))
    identity.secret = new_token(token).encode()
    endpoint = GrpcEndpoint(identity, runtime, security=security)
    endpoint.know(LAUNCHER, str(address))
    findings: list[DoctorResult] = []
    try:
        findings += await _greet(runtime, endpoint)
        speed = await measure(runtime, endpoint, LAUNCHER, num_bytes=num_bytes)
        findings += _speed_findings(speed)
    except GradstreamError as error:
        findings.append(DoctorResult("speed" if findings else "gRPC", str(error), "failed"))
    finally:
        await endpoint.close()
        runtime.close()
    return findings


async def _greet(runtime: RealRuntime, endpoint: GrpcEndpoint) -> list[DoctorResult]:
    trips: list[tuple[float, float]] = []  # round trip in seconds, difference of the clocks
    for _ in range(NUM_PINGS):
        begun, date_s = runtime.now(), time.time()
        welcome = await endpoint.call(LAUNCHER, "hello", v1.Hello(), v1.Welcome, silence_s=10)
        trip_s = (runtime.now() - begun) / 1e9
        trips.append((trip_s, welcome.clock_s - (date_s + trip_s / 2)))
    median_s = sorted(trips)[len(trips) // 2][0]
    return [
        DoctorResult("gRPC", f"a launcher answers: {welcome.state}"),
        *version_findings({"gradstream": __version__}, {"gradstream": welcome.software}),
        DoctorResult("round trip", f"{_ms(median_s)}, at best {_ms(min(trips)[0])}"),
        clock_finding(min(trips)[1]),
    ]


def clock_finding(offset_s: float) -> DoctorResult:
    """Judges the difference of two clocks in seconds: the launcher's minus this machine's."""
    text = f"the launcher's is {abs(offset_s):.3f} s {'ahead' if offset_s >= 0 else 'behind'}"
    if abs(offset_s) > CLOCK_FAILED_S:
        return DoctorResult(
            "clock", f"{text}: certificates are not valid yet; set the clocks (NTP)", "failed"
        )
    if abs(offset_s) > CLOCK_WARNING_S:
        return DoctorResult("clock", f"{text}: training works, but times in logs will differ", "warning")
    return DoctorResult("clock", text)


def version_findings(here: dict[str, str], there: dict[str, str]) -> Iterable[DoctorResult]:
    """Compares versions on both sides: gradstream and torch must be equal, others only cause a warning."""
    for name, mine in here.items():
        expected = there.get(name, "unknown")
        if mine.partition("+")[0] == expected.partition("+")[0]:
            continue
        must = name in ("gradstream", "torch")
        hint = ": install the same version on both machines" if must else ""
        yield DoctorResult(
            name, f"{mine} here, {expected} at the launcher{hint}", "failed" if must else "warning"
        )


def _speed_findings(speed: LinkSpeed) -> list[DoctorResult]:
    here = machine_facts()
    names = ("gradstream", "torch", "python", "grpcio", "protobuf")
    there = ", ".join(f"{key} {value}" for key, value in speed.facts.items())
    return [
        DoctorResult(
            "speed",
            f"{megabytes_s(speed.up_bytes_s)} to the launcher, {megabytes_s(speed.down_bytes_s)} from it",
        ),
        DoctorResult("launcher", there),
        *version_findings({name: here[name] for name in names}, speed.facts),
    ]


def _ms(seconds: float) -> str:
    return f"{1e3 * seconds:.2f} ms"
