"""Decoders of checkpoints, recordings, jobs, settings and sparse data."""

from __future__ import annotations

import dataclasses
import io
import json
import random
import tarfile
import tempfile
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np

import gradstream as gs
from fuzzing.harness import Decoder
from fuzzing.mutator import mutated_json
from gradstream.checkpoint.format import TensorSpec, header_of, parse
from gradstream.checkpoint.manifest import Evaluated, FileEntry, Manifest, Resume, seal_of
from gradstream.checkpoint.own_state import OwnState
from gradstream.data.base import BatchRef, DataProgress
from gradstream.errors import ConfigError, DataError
from gradstream.ext.ssh.archives import Expected, FileList, unpacked
from gradstream.ext.ssh.fleet import Fleet
from gradstream.job import registry
from gradstream.job.descriptions import describe
from gradstream.job.job import Job
from gradstream.job.overrides import optimizer_of_text, overrides, text_of_optimizer, with_overrides
from gradstream.job.settings import apply, from_texts
from gradstream.job.settings.layers import from_toml_text
from gradstream.recording import entries, log
from gradstream.run.node_spec import NodeSpec
from gradstream.sparse.data import from_csr
from gradstream.sparse.random_data import from_svmlight
from gradstream.strategies.downpour import Downpour


def _json(value: Any) -> bytes:
    return json.dumps(value).encode()


# ---- checkpoints, recordings --------------------------------------------------------------

_MANIFEST = Manifest(
    step=12,
    rounds=6,
    steps={"worker-0": 6, "worker-1": 6},
    done=DataProgress(1, {1: ((0, 8), (16, 24))}),
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


def _sealed(data: bytes) -> bytes:
    """The same document with the SHA-256 that belongs to it: what is altered shall be looked at."""
    try:
        record = json.loads(data)
        record.pop("sha256", None)
        body = json.dumps(record).encode()[1:]
    except (ValueError, AttributeError, TypeError, RecursionError):
        return data
    return seal_of(body) + body


def _manifest(data: bytes) -> None:
    manifest = Manifest.decode(_sealed(data))
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
        entries.FetchAsked(1, 0, 2, 3),
        entries.Read(1, 0, 2, 0, 3, 7),
        entries.Summed(1, 2, 1 << 31),
        entries.BatchesAssigned((BatchRef(0, 1, 2),), True),
        entries.SnapshotReached(4, False),
        entries.Changed("keep", (0, 1), 3, 4, ((0, 1), (2, 3))),
        entries.Decided(5, (0, 2), ((0, 1),)),
        entries.Closed(),
    )
)


def _block(content: bytes) -> bytes:
    packed = zlib.compress(content, 1)
    return len(packed).to_bytes(4, "little") + zlib.crc32(packed).to_bytes(4, "little") + packed


_LOG_HEAD = _json({"format": log.FORMAT, "node": "shard-0", "job": "j", "threads": 1})


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
    optimizer=describe(gs.optim.SGD(lr=0.1)),
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


def _settings(texts: Callable[[str], Any]) -> Callable[[bytes], None]:
    """Without plugins: looking for them reads the metadata of all packages."""

    def decode(data: bytes) -> None:
        with patch.object(registry, "installed", _none):
            apply(_JOB, [texts(data.decode(errors="replace"))])

    return decode


def _none(kind: str) -> list[registry.Plugin]:
    del kind
    return []


_FOLDER = tempfile.TemporaryDirectory(prefix="fuzz-", dir="/dev/shm" if Path("/dev/shm").is_dir() else None)


def _spec(data: bytes) -> None:
    path = Path(_FOLDER.name) / "nodes.json"
    path.write_bytes(data)
    spec = NodeSpec.read(path)
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


def _svmlight(data: bytes) -> None:
    path = Path(_FOLDER.name) / "data.svm"
    path.write_bytes(data)
    from_svmlight(path)


_BOARD = (DataError, ConfigError)
# ---- what machines of a launch send --------------------------------------------------------


def _archive(data: bytes) -> None:
    """Whatever comes, it is inside of the folder, and regular; or nothing is there."""
    with tempfile.TemporaryDirectory() as folder:
        into = Path(folder) / "into"
        expected = Expected(admits=lambda name, length: True, max_members=50, max_bytes=1 << 20)
        try:
            names = unpacked(io.BytesIO(data), into, expected)
        except DataError:
            assert not list(Path(folder).iterdir())
            raise
        found = [path for path in into.rglob("*") if path.is_symlink() or not path.is_dir()]
        assert {str(path.relative_to(into)) for path in found} == names
        assert all(path.is_file() and not path.is_symlink() for path in found)
        assert [path.name for path in Path(folder).iterdir()] == ["into"]


def _archive_seed(form: int) -> bytes:
    made = io.BytesIO()
    with tarfile.open(fileobj=made, mode="w", format=form) as archive:
        for name in ("log", "deep/" + "p" * 90, "größe"):
            entry = tarfile.TarInfo(name)
            entry.size = 5
            archive.addfile(entry, io.BytesIO(b"1 2 3"))
        entry = tarfile.TarInfo("folder")
        entry.type = tarfile.DIRTYPE
        archive.addfile(entry)
    return made.getvalue()


def _archive_headers(data: bytes, rng: random.Random) -> bytes:
    """Blocks repeated and changed, with checksums that are right."""
    blocks = [
        bytearray(data[at : at + 512].ljust(512, b"\0")) for at in range(0, min(len(data), 1 << 15), 512)
    ]
    for _ in range(rng.choice((1, 2, 5)) if blocks else 0):
        block = rng.choice(blocks)
        chance = rng.randrange(4)
        if chance == 0:
            block[156] = rng.choice(b"0123567LKxgS")
        elif chance == 1:
            block[124:136] = rng.choice(
                [b"%011o\0" % rng.randrange(2000), b"\x80" + rng.randbytes(11), b"-1" * 6]
            )
        elif chance == 2:
            name = rng.choice(
                [b"../elsewhere", b"/elsewhere", b"log", b"deep", b"a/../b", b"\x1b[2J", b"log/log"]
            )
            block[: len(name) + 1] = name + b"\0"
        else:
            blocks.insert(rng.randrange(len(blocks)), bytearray(block))
    for block in blocks:
        if block[257:262] == b"ustar":
            block[148:156] = b" " * 8
            block[148:156] = b"%06o\0 " % sum(block)
    return b"".join(map(bytes, blocks))


_FLEET = Fleet(
    name="run",
    hosts=["a", "b", ""],
    ssh=["ssh"],
    python="p",
    folder="~/f",
    port=1,
    job="j.py",
    arguments=["--x"],
)


def _hosts(data: bytes) -> None:
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "hosts.json").write_bytes(data)
        fleet = Fleet.said_in(Path(folder))
    assert fleet.ssh and all(not one.startswith("-") for one in fleet.names)


DECODERS = (
    Decoder(
        "archive",
        _archive,
        [_archive_seed(form) for form in (tarfile.USTAR_FORMAT, tarfile.GNU_FORMAT, tarfile.PAX_FORMAT)],
        (DataError,),
        _archive_headers,
        [b"path=", b"size=", b"GNU.sparse.major=", b"../", b"ustar\00000"],
    ),
    Decoder("hosts", _hosts, [_json(dataclasses.asdict(_FLEET))], (ConfigError,), mutated_json),
    Decoder(
        "file-list", FileList.parse, [_json({"deep/numbers": [5, "0" * 64]})], (ConfigError,), mutated_json
    ),
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
        _settings(lambda text: from_toml_text(text, Path("job.toml"))),
        [_TOML],
        (ConfigError,),
        None,
        [b"[strategy]\n", b"a.b.c = 1\n", b"strategy.push_every = 1\n", b"1979-05-27", b"inf"],
    ),
    Decoder(
        "settings-words",
        _settings(lambda text: from_texts(text.splitlines())),
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
            text_of_optimizer(gs.optim.Adagrad(lr=0.1)).encode(),
            text_of_optimizer(
                gs.optim.SGD(lr=0.1), [{"match": "0", "lr_scale": 0.5}], [("0", 0, 64)]
            ).encode(),
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
)
