"""Decoders of addresses, frames, text and events."""

from __future__ import annotations

import dataclasses
import json
import random
from typing import Any

from fuzzing.harness import Decoder
from fuzzing.mutator import mutated_json
from gradstream.errors import ConfigError
from gradstream.report.lanes import trace_json
from gradstream.report.page import PageSource, page
from gradstream.report.progress_line import ProgressLine
from gradstream.report.staleness import staleness_by
from gradstream.report.summary import evaluations_of, history_of, summary_of
from gradstream.run.remote.address import Address
from gradstream.run.result import check_info
from gradstream.telemetry import events as kinds
from gradstream.telemetry.event_lines import EventError, EventLines, parse_event
from gradstream.trackers.tensorboard import Scalars
from gradstream.transport.offers import CarrierOffer, choose, host_and_port, is_loopback
from gradstream.transport.socket.framing import FrameReader, PayloadPlace
from gradstream.untrusted import escaped, parse_json
from gradstream.wire import v1
from gradstream.wire.frames import FrameError, check_chunk, decode, encode


def _json(value: Any) -> bytes:
    return json.dumps(value).encode()


# ---- addresses, frames, text --------------------------------------------------------------


def _address(data: bytes) -> None:
    text = data.decode(errors="replace")
    for read in (
        lambda: Address.parse(text, "--join").check_listen(),
        lambda: is_loopback(host_and_port(text)[0]),
    ):
        read()


def _offer(data: bytes) -> None:
    offer = CarrierOffer.parse(data.decode(errors="surrogateescape"))
    str(offer)
    choose(offer, CarrierOffer({"tcp": "127.0.0.1:1", "grpc": "127.0.0.1:2"}, "h"))


_CHUNK = v1.Frame(chunk=v1.Chunk(index=1, elems=4, dtype=v1.FLOAT32, version=3))
_OPEN = v1.Frame(
    open=v1.Open(protocol=1, job="j", sender="worker-0", method="push", window=4, body=b"\x08\x01")
)


def _frame(data: bytes) -> None:
    frame, payload = decode(data)
    if frame.HasField("chunk"):
        check_chunk(frame.chunk, 0 if payload is None else payload.nbytes)


def _wired(frame: v1.Frame, payload: bytes = b"") -> bytes:
    header = frame.SerializeToString()
    return b"".join(n.to_bytes(4, "little") for n in (1, 0, len(header), len(payload))) + header + payload


class _Sink:
    """Gives no payload a place."""

    def place(self, stream: int, frame: v1.Frame, payload_bytes: int) -> PayloadPlace | None:
        return None

    def arrived(self, stream: int, number: int, frame: v1.Frame, place: PayloadPlace | None) -> None:
        pass


def _stream(data: bytes) -> None:
    inbox, at, piece = FrameReader(_Sink()), 0, 1 + len(data) % 977
    while at < len(data):
        room = inbox.room()[0]
        part = data[at : at + min(piece, len(room))]
        room[: len(part)] = part
        inbox.took(len(part))
        at += len(part)


def _text(data: bytes) -> None:
    for newlines in (False, True):
        shown = escaped(data.decode(errors="surrogateescape"), 256, newlines=newlines)
        assert len(shown.encode()) <= 256 and (shown.replace("\n", "") if newlines else shown).isprintable()


# ---- events -------------------------------------------------------------------------------


def _event_seeds() -> list[bytes]:
    """A line of each class; fields by their annotation."""
    given: dict[str, Any] = {
        "str": "worker-0",
        "int": 3,
        "float": 0.5,
        "bool": True,
        "list[str]": ["worker-0", "worker-1"],
        "list[int]": [1, 2],
        "list[float]": [1.5, 2.0],
        "Mapping[str, str]": {"1024": "ring"},
        "Mapping[str, float]": {"worker-1": 0.25},
        "Literal['push', 'fetch']": "push",
        "Literal['joined', 'left', 'refused']": "left",
        "Literal['dialled back', 'relayed']": "relayed",
        "Literal['preparing', 'holding', 'switched', 'failed']": "switched",
        "Mapping[str, int]": {"1": 4},
        "Mapping[str, float | None]": {"top5": 0.5},
    }
    found = []
    for cls in vars(kinds).values():
        if isinstance(cls, type) and issubclass(cls, kinds.Event) and cls.name:
            values = {
                one.name: given[str(one.type).replace('"', "'").removesuffix(" | None")]
                for one in dataclasses.fields(cls)
            }
            node = "worker-0" if cls.from_members else "coordinator"
            found.append(kinds.encode(cls(**values), node=node, time_s=1.5).rstrip(b"\n"))
    return found


_LINES = _event_seeds()
_INFO = _json({"name": "n", "id": "ab", "began_unix_s": 1.7e9, "nodes": "processes", "machine": {"cores": 2}})


def _event(data: bytes) -> None:
    lenient = parse_event(data)
    try:
        strict = parse_event(data, max_bytes=1 << 16, member="worker-0")
    except EventError:
        return
    assert strict["node"] == "worker-0" and lenient["event"] == strict["event"]


def _lines_changed(data: bytes, rng: random.Random) -> bytes:
    lines = [rng.choice(_LINES) for _ in range(rng.choice((2, 6, 30)))]
    for _ in range(rng.choice((1, 3, 6))):
        at = rng.randrange(len(lines))
        lines[at] = mutated_json(lines[at], rng)
    return b"\n".join([mutated_json(_INFO, rng) if rng.random() < 0.3 else _INFO, *lines, b""])


def _run_directory(data: bytes) -> None:
    """What `report`, `runs`, the progress line and TensorBoard make of files; none of it may fail."""
    first, _, rest = data.partition(b"\n")
    info = {}
    try:
        info = parse_json(first)
        check_info(info)
    except ValueError:
        info = {}
    lines = EventLines()
    events = list(lines.take(rest))
    assert len(events) + lines.num_skipped == rest.count(b"\n")
    json.dumps([summary_of(events), history_of(events), evaluations_of(events)])
    progress, scalars = ProgressLine(), Scalars()
    for event in events:
        progress.update(event)
        scalars.update(event)
        assert progress.notice(event).isprintable() and progress.line().isprintable()
    staleness_by(events, "link")
    trace_json(events)
    page(PageSource(events=events, title="title", info=info)).encode()


DECODERS = (
    Decoder(
        "address",
        _address,
        [b"10.0.0.1:4000", b"127.0.0.1:0"],
        (ConfigError,),
        None,
        ["²".encode(), b"[fd00::1%x]:1"],
    ),
    Decoder(
        "offer",
        _offer,
        [b"127.0.0.1:1 tcp=127.0.0.1:2 shm=x host=h"],
        (ConfigError,),
        None,
        [b" host=", b"tcp=", b"grpc="],
    ),
    Decoder("frame", _frame, [encode(_CHUNK, bytes(16)), encode(_OPEN)], (FrameError,)),
    Decoder("frame-stream", _stream, [_wired(_OPEN) + _wired(_CHUNK, bytes(16))], (FrameError,)),
    Decoder("text", _text, ["Größe \x1b[2J\u202e\n".encode()], ()),
    Decoder("event-line", _event, _LINES, (EventError,), mutated_json),
    Decoder("run-directory", _run_directory, [b"\n".join([_INFO, *_LINES, b""])], (), _lines_changed),
)
