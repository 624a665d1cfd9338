"""Strangers at the enrolment port: what they cause to be written is one short line a second, escaped."""

from __future__ import annotations

import asyncio
import json
import time
from pathlib import Path
from typing import Any

import pytest

from gradstream.cli.display import Display
from gradstream.errors import RefusedError
from gradstream.events import Event, encode
from gradstream.remote.address import Address
from gradstream.remote.enrolment import JOB, Enrolment, Invitation
from gradstream.remote.gathering import Gathering
from gradstream.remote.roster import Roster
from gradstream.runtime.real import RealRuntime
from gradstream.transport.base import Identity
from gradstream.transport.grpc import GrpcEndpoint
from gradstream.wire import v1

TOKEN = "a token of sixteen characters or more"
NUM_TOKENS = 10_000


async def knock(address: str, count: int) -> int:
    """Shows wrong tokens, many at a time; returns how many were refused for them."""
    runtime = RealRuntime("stranger")
    endpoint = GrpcEndpoint(Identity(JOB, "stranger", 1), runtime)
    await endpoint.start()
    endpoint.know("enrolment", address)
    refused, numbers = 0, iter(range(count))

    async def one_after_the_other() -> None:
        nonlocal refused
        for number in numbers:
            name = f"\x1b]0;owned\x07\x1b[2J\u202e\n{number}" + "x" * (number % 300)
            request = v1.Enrol(token=f"wrong {number}", machine=name, address="\x9b31m\r\n" + "y" * 200)
            try:
                await endpoint.call("enrolment", "enrol", request, v1.Order, silence_s=60.0)
            except RefusedError as error:
                refused += error.code == "BAD_TOKEN"

    try:
        await asyncio.gather(*(one_after_the_other() for _ in range(32)))
    finally:
        await endpoint.close()
        runtime.close()
    return refused


@pytest.mark.limit_s(300)
def test_ten_thousand_wrong_tokens_are_a_few_short_lines(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    roster = Roster("here", machines=2, workers_per_machine=1, facts={}, token=TOKEN)
    events = tmp_path / "events.jsonl"
    gathering = Gathering.__new__(Gathering)
    gathering.roster = roster
    heard: list[dict[str, Any]] = []

    def emit(event: Event) -> None:
        with events.open("ab") as file:
            file.write(encode(event, node="launcher", time_s=0.0))

    gathering._emit = emit
    began_s = time.monotonic()
    with Enrolment(Address("127.0.0.1"), None, roster, Invitation("{}", {}), heard.append) as service:
        refused = asyncio.run(knock(str(service.address), NUM_TOKENS))
    took_s = time.monotonic() - began_s
    with Display() as display:
        for message in heard:
            gathering.note(message)
        for line in events.read_bytes().splitlines():
            display.on_event(json.loads(line))
    assert refused == NUM_TOKENS  # all of them were there
    written = events.read_bytes()
    said = capfd.readouterr().err.encode()
    assert len(written) + len(said) < 100_000
    assert not {byte for byte in written + said if byte < 0x20} - {0x0A}
    for what in (b"\x7f", b"\xc2\x9b", "\u202e".encode()):
        assert what not in written + said
    refusals = [line for line in written.splitlines() if b'"refused"' in line]
    assert 1 <= len(refusals) <= took_s + 2
    assert max(map(len, refusals)) <= 256
    assert max(len(line) for line in said.splitlines() if b"was refused" in line) <= 256
    counts = [json.loads(line)["reason"] for line in refusals]
    more = sum(
        int(reason.rpartition("(and ")[2].split(" ")[0].replace(",", ""))
        for reason in counts
        if "(and " in reason
    )
    assert more + len(refusals) == NUM_TOKENS  # each is counted
