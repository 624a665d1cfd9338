"""Decoders of files, texts and frames."""

from __future__ import annotations

import dataclasses
import json
import random
import tempfile
import zlib
from pathlib import Path
from typing import Any

import numpy as np

import gradstream as gs
from fuzzing.harness import Decoder
from fuzzing.mutator import mutated_json
from gradstream import events as kinds
from gradstream.checkpoint.format import TensorSpec, header_of, parse
from gradstream.checkpoint.manifest import Evaluated, FileEntry, Manifest, Resume
from gradstream.checkpoint.own_state import OwnState
from gradstream.cli.progress import Progress
from gradstream.config import Job
from gradstream.data.base import BatchRef
from gradstream.data.done import Done
from gradstream.errors import ConfigError, DataError
from gradstream.node import NodeSpec
from gradstream.overrides import overrides, with_overrides
from gradstream.recording import entries, log
from gradstream.registry import describe, optimizer_of_text, text_of_optimizer
from gradstream.remote.address import Address
from gradstream.report.page import Source, page
from gradstream.report.staleness import staleness_by
from gradstream.report.tensorboard import Scalars
from gradstream.report.trace import trace_json
from gradstream.run import check_info
from gradstream.settings import apply, from_texts
from gradstream.settings.sources import from_toml_text
from gradstream.sparse.data import from_csr
from gradstream.sparse.svmlight import from_svmlight
from gradstream.strategies.downpour import Downpour
from gradstream.summary import evaluations_of, history_of, summary_of
from gradstream.transport.addresses import host_and_port, is_loopback
from gradstream.transport.framing import Inbox, Place
from gradstream.transport.offers import Offer, choose
from gradstream.untrusted import escaped, parse_json
from gradstream.untrusted.event_lines import EventError, EventLines, parse_event
from gradstream.wire import v1
from gradstream.wire.frames import FrameError, check_chunk, decode, encode

__all__ = ["DECODERS"]


def _json(value: Any) -> bytes:
    return json.dumps(value).encode()


# ---- checkpoints, recordings --------------------------------------------------------------

_MANIFEST = Manifest(
    step=12,
    rounds=6,
    steps={"worker-0": 6, "worker-1": 6},
    done=Done(1, {1: ((0, 8), (16, 24))}),
    versions=[6, 6],
    model={"fingerprint": 7, "elems": 100, "dtype": 1, "chunk_elems": 64, "optimizer": ""},
    optimizer="sgd",
    strategy="downpour",
    seed=1,
    workers=2,
    servers=1,
    num_samples=64,
    software="0.1.0",
    evaluated=Evaluated(10, 0.5, None),
    files={"model.safetensors": FileEntry(100, "ab" * 32)},
    dropped={"0": 3},
)
_HEADER = header_of(
    [TensorSpec("a.weight", (2, 3), "F32"), TensorSpec("b", (), "F64"), TensorSpec("c", (0, 4), "BOOL")]
)


def _manifest(data: bytes) -> None:
    manifest = Manifest.decode(data)
    manifest.encode()
    json.dumps(Resume.at("checkpoints/x", manifest).as_json())
    assert all("/" not in name for name in manifest.files)


def _header(data: bytes) -> None:
    offset_bytes, tensors = parse(data)
    end = sum(spec.size_bytes for spec, _ in tensors.values())
    assert 8 < offset_bytes <= len(data) and all(0 <= start <= end for _, start in tensors.values())


def _header_json(data: bytes, rng: random.Random) -> bytes:
    text = mutated_json(data[8:], rng)
    return len(text).to_bytes(8, "little") + text


_ENTRIES = b"".join(
    entries.encode(one)
    for one in (
        entries.Pushed(3, 1, 9, 4, 1, 2),
        entries.Asked(1, 0, 2, 3),
        entries.Read(1, 0, 2, 0, 3, 7),
        entries.Summed(1, 2, 1 << 31),
        entries.Orphans((BatchRef(0, 1, 2),), True, 3),
        entries.Stood(4, False),
        entries.Changed("keep", (0, 1), 3, 4, ((0, 1), (2, 3))),
        entries.Turned(1, 2, 3, "warm"),
        entries.Decided(5, (0, 2), ((0, 1),)),
        entries.Closed(),
    )
)


def _block(content: bytes) -> bytes:
    packed = zlib.compress(content, 1)
    return len(packed).to_bytes(4, "little") + zlib.crc32(packed).to_bytes(4, "little") + packed


_LOG_HEAD = _json({"format": 1, "node": "shard-0", "job": "j", "threads": 1})


def _log_blocks(data: bytes, rng: random.Random) -> bytes:
    """Blocks whose sums are right, of content that is not."""
    head = mutated_json(_LOG_HEAD, rng) if rng.random() < 0.5 else _LOG_HEAD
    content = bytearray(_ENTRIES)
    content[rng.randrange(len(content))] ^= 1 << rng.randrange(8)
    bomb = _block(bytes(1 << 24)) if rng.random() < 0.001 else b""
    return _block(head) + _block(bytes(content)) + bomb


# ---- jobs and settings --------------------------------------------------------------------

_JOB = Job(model=None, data=None, strategy="downpour", workers=2, epochs=1, batch_size=8, spec="job.py")  # type: ignore[arg-type]
_SPEC = NodeSpec(
    id="ab",
    job="job.py",
    earlier=(),
    run_dir="runs/x",
    plain=overrides(_JOB),
    strategy=describe(Downpour()),
    optimizer=describe(gs.SGD(lr=0.1)),
    resume=Resume.at("checkpoints/x", _MANIFEST).as_json(),
)
_TOML = b"""workers = 4
batch_size = [8, 16]
epochs = 3
run_dir = "runs"
deadlines = {join_s = 3.0}
until = {accuracy = 0.5}

[strategy]
name = "downpour"
push_every = 10  # comment
"""


def _spec(data: bytes) -> None:
    spec = NodeSpec.of_text(data.decode(errors="replace"), "nodes.json")
    with_overrides(_JOB, spec.plain)
    if spec.resume is not None:
        Resume.of_json(spec.resume)


def _csr(data: bytes) -> None:
    try:
        given = json.loads(data)
    except (ValueError, RecursionError):
        raise DataError("no JSON") from None
    if not isinstance(given, list) or len(given) != 5:
        raise DataError("not five")
    num = given[4] if isinstance(given[4], int) and given[4] < 1 << 20 else None
    from_csr(*given[:4], num_features=num)


_FOLDER = tempfile.TemporaryDirectory(prefix="fuzz-", dir="/dev/shm" if Path("/dev/shm").is_dir() else None)


def _svmlight(data: bytes) -> None:
    path = Path(_FOLDER.name) / "data.svm"
    path.write_bytes(data)
    from_svmlight(path)


# ---- addresses, frames, text --------------------------------------------------------------


def _address(data: bytes) -> None:
    text = data.decode(errors="replace")
    for read in (
        lambda: Address.parse(text, "--join").check_listen(),
        lambda: is_loopback(host_and_port(text)[0]),
    ):
        read()


def _offer(data: bytes) -> None:
    offer = Offer.parse(data.decode(errors="surrogateescape"))
    str(offer)
    choose(offer, Offer({"tcp": "127.0.0.1:1", "grpc": "127.0.0.1:2"}, "h"))


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

    def place(self, stream: int, frame: v1.Frame, payload_bytes: int) -> Place | None:
        return None

    def arrived(self, stream: int, number: int, frame: v1.Frame, place: Place | None) -> None:
        pass


def _stream(data: bytes) -> None:
    inbox, at, piece = Inbox(_Sink()), 0, 1 + len(data) % 977
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
        "Mapping[str, int]": {"1": 4},
        "Mapping[str, float | None]": {"top5": 0.5},
    }
    found = []
    for name in kinds.__all__:
        cls = getattr(kinds, name)
        if isinstance(cls, type) and issubclass(cls, kinds.Event) and cls is not kinds.Event:
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
    progress, scalars = Progress(), Scalars()
    for event in events:
        progress.update(event)
        scalars.update(event)
        assert progress.news(event).isprintable() and progress.line().isprintable()
    staleness_by(events, "link")
    trace_json(events)
    page(Source(events=events, title="title", info=info)).encode()


_BOARD = (DataError, ConfigError)
DECODERS = (
    Decoder("manifest", _manifest, [_MANIFEST.encode()], (DataError,), mutated_json),
    Decoder("safetensors", _header, [_HEADER, header_of([])], (DataError,), _header_json),
    Decoder(
        "own-state",
        OwnState.decode,
        [OwnState(3, {"mean": np.ones(3, np.float32)}, 2).encode()],
        (DataError,),
        _header_json,
    ),
    Decoder("recording-entries", lambda data: list(entries.decode(data)), [_ENTRIES], (DataError,)),
    Decoder(
        "recording-log",
        lambda data: log.read_log(data, "x"),
        [_block(_LOG_HEAD) + _block(_ENTRIES)],
        (DataError,),
        _log_blocks,
    ),
    Decoder(
        "settings-toml",
        lambda data: apply(_JOB, [from_toml_text(data.decode(errors="replace"), Path("job.toml"))]),
        [_TOML],
        (ConfigError,),
        None,
        [b"[strategy]\n", b"a.b.c = 1\n", b"strategy.push_every = 1\n", b"1979-05-27", b"inf"],
    ),
    Decoder(
        "settings-words",
        lambda data: apply(_JOB, [from_texts(data.decode(errors="replace").splitlines())]),
        [
            b'workers=4\nstrategy.push_every=10\nuntil={"accuracy": 0.5}',
            b"batch_size=8,16\ndeadlines.join_s=3",
        ],
        (ConfigError,),
    ),
    Decoder("node-spec", _spec, [_json(dataclasses.asdict(_SPEC))], (ConfigError,), mutated_json),
    Decoder(
        "update-rule",
        lambda data: optimizer_of_text(data.decode(errors="replace")),
        [
            text_of_optimizer(gs.Adagrad(lr=0.1)).encode(),
            text_of_optimizer(gs.SGD(lr=0.1), [{"match": "0", "lr_scale": 0.5}], [("0", 0, 64)]).encode(),
        ],
        (ConfigError,),
        mutated_json,
        [b'{"class": "os:system", "fields": {}}', b'{"function": "os:getcwd"}'],
    ),
    Decoder(
        "svmlight",
        _svmlight,
        [b"1 1:0.5 7:2 # x\n-1 qid:3 2:1\n"],
        _BOARD,
        None,
        [b"qid:", b"1e39", b"nan:nan", b"9" * 30],
    ),
    Decoder(
        "csr", _csr, [_json([[0, 2, 3], [0, 5, 2], [1.0, 2.0, 1.0], [0, 1], None])], _BOARD, mutated_json
    ),
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
