"""Inputs that decoders once took for something else, or raised what nobody caught: kept."""

from __future__ import annotations

import json
import zlib
from pathlib import Path
from typing import Any

import pytest

import gradstream as gs
from gradstream.checkpoint.folder import data_offset
from gradstream.checkpoint.format import TensorSpec, header_of, parse
from gradstream.checkpoint.manifest import Manifest, Resume, seal_of
from gradstream.data.base import DataProgress
from gradstream.errors import ConfigError, DataError
from gradstream.job.overrides import optimizer_of_text
from gradstream.job.settings import apply, from_texts, from_toml
from gradstream.recording.entries import decode
from gradstream.recording.log import read_log
from gradstream.report.page import PageSource, page
from gradstream.run.node_spec import NodeSpec
from gradstream.run.remote.address import Address
from gradstream.runtime.storage import DiskStorage
from gradstream.sparse.data import from_csr
from gradstream.sparse.random_data import from_svmlight
from gradstream.telemetry.event_lines import parse_event
from gradstream.transport.offers import host_and_port

MANIFEST: dict[str, Any] = {
    "format": 2, "step": 1, "rounds": 1, "steps": {"worker-0": 1}, "versions": [1], "model": {"elems": 1},
    "done": {"epochs": 1, "parts": {}}, "optimizer": "sgd", "strategy": "downpour", "seed": 1, "workers": 1,
    "servers": 1, "num_samples": 8, "software": "1", "evaluated": None, "samples": {}, "files": {},
    "shares": [], "dropped": {},
}  # fmt: skip


def sealed(record: dict[str, Any]) -> bytes:
    """As a `state.json` with the SHA-256 that belongs to it."""
    body = json.dumps(record).encode()[1:]
    return seal_of(body) + body


@pytest.mark.parametrize(
    "changes",
    [
        {"step": "1"},
        {"steps": {"worker-0": None}},
        {"versions": [0.5]},
        {"files": {"../../other": {"size_bytes": 1, "sha256": "a"}}},
        {"files": {"a": {"size_bytes": "1", "sha256": "a"}}},
        {"done": {"epochs": 1, "parts": {"1": [[0]]}}},
        {"done": {"epochs": -1, "parts": {}}},
        {"evaluated": {"step": 1, "accuracy": "best", "loss": None}},
        {"model": json.loads("[" * 20 + "]" * 20)},
        {"other": 1},
    ],
    ids=lambda changes: str(changes)[:40],
)
def test_manifests(changes: dict[str, Any]) -> None:
    assert Manifest.decode(sealed(MANIFEST)).step == 1
    with pytest.raises(DataError):
        Manifest.decode(sealed({**MANIFEST, **changes}))


def test_where_a_run_goes_on() -> None:
    record = Resume.at("f", Manifest.decode(sealed(MANIFEST))).as_json()
    assert Resume.of_json(record).done == DataProgress(1, {})
    changes: dict[str, Any]
    for changes in (
        {"step": None},
        {"done": []},
        {"other": 1},
        {"done": {"epochs": "9" * 5000, "parts": {}}},
    ):
        with pytest.raises(ConfigError):
            Resume.of_json({**record, **changes})


def header(**entries: Any) -> bytes:
    text = json.dumps(entries).encode()
    return len(text).to_bytes(8, "little") + text


GOOD = {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}


@pytest.mark.parametrize(
    "data",
    [
        header(a=GOOD, b={**GOOD, "dtype": "F32"}),  # over one another
        header(a={**GOOD, "data_offsets": [8, 16]}),  # a gap
        header(a={**GOOD, "shape": [1 << 40, 1 << 40, 0, -1]}),
        header(a={**GOOD, "shape": [1 << 62] * 4, "data_offsets": [0, 1 << 250]}),
        header(a={**GOOD, "shape": "22"}),
        header(a={**GOOD, "shape": [True, 2]}),
        header(a={**GOOD, "dtype": ["F32"]}),
        header(a={**GOOD, "data_offsets": [0.0, 8]}),
        header(a=[]),
        header(a=GOOD)[:8] + header(a=GOOD)[8:].replace(b'{"a"', b'{"a": 1, "a"'),
        (1 << 63).to_bytes(8, "little") + b"{}",
        (200_001).to_bytes(8, "little") + b"[" * 200_001,
    ],
)
def test_safetensors_headers(data: bytes) -> None:
    assert parse(header_of([TensorSpec("a", (2,), "F32")]))[1]["a"][1] == 0
    with pytest.raises(DataError):
        parse(data)


def test_a_header_that_claims_a_huge_length_is_not_read(tmp_path: Path) -> None:
    (tmp_path / "x").write_bytes((1 << 60).to_bytes(8, "little") + bytes(1000))
    with pytest.raises(DataError):
        data_offset(DiskStorage(tmp_path), "x")


def block(content: bytes) -> bytes:
    packed = zlib.compress(content)
    return len(packed).to_bytes(4, "little") + zlib.crc32(packed).to_bytes(4, "little") + packed


@pytest.mark.parametrize(
    "data",
    [
        bytes([8, 0, 1, 1, 0, 3, 1, 1, 1]),  # chunk times that are no pairs
        bytes([1]) + b"\x80" * 100_000,  # one endless number
        bytes([9, 1, 1, 1, 200, 1]) + b"x",  # a phase that ends before its length
        bytes([9, 1, 1, 1, 1]) + b"\xff",
        bytes([8, 9, 0, 0, 0, 0]),
        bytes([5, 1]) + b"\xff" * 8 + b"\x01",
        bytes([15]),
    ],
)
def test_recordings(data: bytes) -> None:
    with pytest.raises(DataError):
        list(decode(data))


@pytest.mark.parametrize(
    "data",
    [
        block(b"[]"),
        block(b'{"format": 3}'),
        block(b'{"format": 3, "node": 3}'),
        block(b"[" * 100_000),
        block(b'{"format": 3, "node": "shard-0"}') + block(bytes(65 << 20)),
    ],
)
def test_files_of_recordings(data: bytes) -> None:
    with pytest.raises(DataError):
        read_log(data, "x")


@pytest.mark.parametrize(
    "text",
    [
        '{"class": "gradstream.optim.sgd:SGD", "fields": {"lr": {"class": "builtins:dict", "fields": {}}}}',
        '{"class": "gradstream.optim.sgd:SGD", "fields": {"lr": {"function": "os:getcwd"}}}',
        '{"class": "gradstream.optim.sgd:SGD", "fields": {"lr": [{"function": "os:getcwd"}]}}',
        '{"class": "gradstream.optim.sgd:SGD", "fields": []}',
        '{"class": "gradstream.optim.sgd:SGD", "fields": {"lr": "fast"}}',
        '{"class": "gradstream.optim.sgd:SGD", "fields": {}, "groups": [{"match": {"a": 1}}]}',
        '{"class": "gradstream.optim.sgd:SGD", "fields": {"lr": 0.1}, "ranges": [[0]]}',
        '{"class": "builtins:dict", "fields": {}}',
        "[]", "null", "[" * 100_000,
    ],
)  # fmt: skip
def test_update_rules_of_peers_name_no_code(text: str) -> None:
    with pytest.raises(ConfigError):
        optimizer_of_text(text)


@pytest.mark.parametrize("port", ["9" * 5000, "²", "٣", "65536", "70000", "-1", "+1", " 1"])
def test_ports(port: str) -> None:
    with pytest.raises(ConfigError):
        host_and_port(f"10.0.0.1:{port}")
    assert host_and_port("10.0.0.1:65535") == ("10.0.0.1", 65535)
    with pytest.raises(ConfigError):
        Address.parse(f"10.0.0.1:{port}", "--listen")


@pytest.mark.parametrize(
    "line",
    [
        b"1 99999999999999999999:1", b"1 99999999999:1", b"1 3000000000:1", b"\xff\xfe:1", b"1 1:1e39",
        b"1 1:nan", b"1e39 1:1",
    ],
)  # fmt: skip
def test_svmlight(line: bytes, tmp_path: Path) -> None:
    (tmp_path / "x").write_bytes(line + b"\n")
    with pytest.raises(DataError):
        from_svmlight(tmp_path / "x")


@pytest.mark.parametrize(
    "parts",
    [
        ([0, 1], [1.5], [1.0], [0]),
        ([0, 1], [0], [None], [0]),
        ([0, 1], [0], ["a"], [0]),
        ([[0, 1]], [0], [1.0], [0]),
        ([0, 1], [[0]], [1.0], [0]),
        ([0, 1], [0], [[1.0], [2.0, 3.0]], [0]),
        (None, None, None, None),
        ([0, 1], [1 << 40], [1.0], [0]),
        ([0, 1], [1 << 30], [1.0], [0]),
    ],
)
def test_csr(parts: tuple[Any, ...]) -> None:
    with pytest.raises(DataError):
        from_csr(*parts)


@pytest.mark.parametrize(
    "text",
    [
        "a" + ".a" * 20_000 + " = 1",
        "workers = " + "[" * 5000,
        'x = """\n' + "a." * 40 + "!\n",
        "epochs = 1" + "0" * 30,
    ],
)
def test_toml_files(text: str, tmp_path: Path) -> None:
    (tmp_path / "job.toml").write_text(text)
    job = gs.Job(model=None, data=None, strategy="downpour")  # type: ignore[arg-type]
    with pytest.raises(ConfigError):
        apply(job, [from_toml(tmp_path / "job.toml")])


def test_a_line_of_dots_in_a_toml_file_takes_no_time(tmp_path: Path) -> None:
    (tmp_path / "job.toml").write_text('name = """\n' + "a " * 15_000 + "\n" + "[" + " " * 15_000 + '\n"""\n')
    assert [one.key for one in from_toml(tmp_path / "job.toml")] == ["name"]


@pytest.mark.parametrize("word", ["workers=" + "9" * 400, "until={}", "until=[[[[1]]]]"])
def test_words(word: str) -> None:
    job = gs.Job(model=None, data=None, strategy="downpour")  # type: ignore[arg-type]
    with pytest.raises(ConfigError):
        apply(job, [from_texts([word])])


@pytest.mark.parametrize(
    "text", ["", "[]", "{}", "[" * 100_000, '{"id": 1}', '{"id": "a", "id": "b"}', "NaN"]
)
def test_specs_of_nodes(text: str, tmp_path: Path) -> None:
    path = tmp_path / "nodes.json"
    path.write_text(text)
    with pytest.raises(ConfigError, match=r"nodes\.json"):
        NodeSpec.read(path)


def test_a_report_of_events_that_say_nothing() -> None:
    # A staleness that no chunk had, and a run that took no time: the fuzzer's finds.
    exchange = (
        b'{"event":"exchange","node":"worker-0","time_s":0,"rank":0,"pushed_bytes":0,"fetched_bytes":0,'
    )
    exchange += b'"pushes":0,"fetches":0,"retries":0,"staleness":{"1":0}}'
    step = b'{"event":"step","node":"worker-0","time_s":0,"rank":0,"step":0,"epoch":0,"samples":1,"loss":1,'
    step += b'"compute_s":0,"wait_s":0}'
    finished = (
        b'{"event":"finished","node":"coordinator","time_s":0,"samples":null,"train_s":0}'  # a stream's
    )
    events = [parse_event(line) for line in (exchange, step, finished)]
    assert page(PageSource(events=events, title="t", info={"machine": {"cores": 2}}))


def test_a_list_that_is_null_where_it_may_be() -> None:
    line = b'{"event":"round","node":"coordinator","time_s":0,"round":0,"epoch":0,"batch":0,"accepted":[0],'
    assert parse_event(line + b'"left_out":[],"ids":null}')["ids"] is None


def test_a_section_whose_events_contradict_one_another_says_so_and_the_others_are_there() -> None:
    shares = '{"event":"shares","node":"coordinator","time_s":%d,"epoch":0,"batch":%d,"samples":%s,'
    shares += '"per_s":%s,"changed":true}'
    lines = [shares % (0, 0, "[8,8]", "[1.0,2.0]"), shares % (1, 4, "[8,8,8]", "[1.0,2.0,3.0]")]
    events = [parse_event(line.encode()) for line in lines]
    shown = page(PageSource(events=events, title="t"))
    assert "The events of this run do not fit" in shown
    assert shown.endswith("</html>\n")


@pytest.mark.parametrize("who", ["worker-²", "worker-" + "9" * 5000, "-", ""])
def test_names_without_a_rank_in_a_report(who: str) -> None:
    line = (
        f'{{"event":"left","node":"coordinator","time_s":0,"who":"{who}","lost":true,"reason":"","epoch":1}}'
    )
    node = who[:40] or "x"
    memory = f'{{"event":"memory","node":"{node}","time_s":0,"role":"a","peak_bytes":1,"peak_own_bytes":1}}'
    events = [parse_event(one.encode()) for one in (line, memory.replace("²", "2"))]
    assert page(PageSource(events=events, title="t"))
