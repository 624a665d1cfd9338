"""`gradstream doctor ADDR:PORT`: checks the network path to a launcher."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Callable, Iterable, Iterator

from gradstream._version import __version__
from gradstream.errors import GradstreamError
from gradstream.machine.description import machine_facts
from gradstream.machine.doctor import DoctorResult, megabytes_s
from gradstream.run.remote.address import Address, new_token
from gradstream.run.remote.certificate_authority import LAUNCHER
from gradstream.run.remote.join_service import JOB
from gradstream.run.remote.reach import LinkSpeed, check_fingerprint, connect, measure, resolve, shake_hands
from gradstream.runtime.real import RealRuntime
from gradstream.transport.base import Identity
from gradstream.transport.grpc.endpoint import GrpcEndpoint
from gradstream.transport.security import Tls
from gradstream.wire import v1

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
