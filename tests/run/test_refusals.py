"""Strangers at the port of the join service: what they cause to be written is one short line a second, escaped."""

from __future__ import annotations

import asyncio
import json
import time
from pathlib import Path
from typing import Any

import grpc.aio
import pytest

from gradstream.report.progress_line import Display
from gradstream.run.remote.address import Address
from gradstream.run.remote.certificate_authority import JOB, Invitation
from gradstream.run.remote.join_service import JoinService, MachineRendezvous
from gradstream.run.remote.members import MachineMembers
from gradstream.runtime.deadlines import Deadlines
from gradstream.telemetry.events import Event, encode
from gradstream.transport.base import Identity
from gradstream.wire import v1
from kit.bare import Bare, Refused, open_session

TOKEN = "a token of sixteen characters or more"
NUM_TOKENS = 2_000  # a line of 50 bytes for each would be over what is allowed


async def knock(address: str, count: int) -> int:
    """Shows wrong tokens, many at a time; returns how many were refused for them."""
    refused, numbers = 0, iter(range(count))

    async def one_after_the_other() -> None:
        nonlocal refused
        async with grpc.aio.insecure_channel(address) as channel:
            for number in numbers:
                name = f"\x1b]0;owned\x07\x1b[2J\u202e\n{number}" + "x" * (number % 300)
                secret = f"wrong token {number:08}".encode()
                try:
                    await open_session(channel, Bare(Identity(JOB, name, 1, secret=secret), "launcher"))
                except Refused as error:
                    refused += error.refuse.code == v1.BAD_SECRET

    await asyncio.gather(*(one_after_the_other() for _ in range(250)))
    return refused


def test_two_thousand_wrong_tokens_are_a_few_short_lines(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    members = MachineMembers("here", machines=2, workers_per_machine=1, facts={})
    events = tmp_path / "events.jsonl"
    machines = MachineRendezvous.__new__(MachineRendezvous)
    machines.members = members
    heard: list[dict[str, Any]] = []

    def emit(event: Event) -> None:
        with events.open("ab") as file:
            file.write(encode(event, node="launcher", time_s=0.0))

    machines._emit = emit
    began_s = time.monotonic()
    invitation = Invitation("{}", {}, Deadlines())
    given = (Address("127.0.0.1"), None, members, invitation, heard.append, TOKEN.encode())
    with JoinService(*given) as service:
        refused = asyncio.run(knock(str(service.address), NUM_TOKENS))
    took_s = time.monotonic() - began_s
    with Display() as display:
        for message in heard:
            machines.note(message)
        for line in events.read_bytes().splitlines():
            display.on_event(json.loads(line))
    assert refused == NUM_TOKENS  # all of them were there
    written = events.read_bytes()
    said = capfd.readouterr().err.encode()
    assert len(written) + len(said) < 20_000
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
