"""Damaged files of a run directory: named, passed over or refused, and never deleted."""

from __future__ import annotations

import hashlib
import os
import shutil
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

import gradstream as gs
from gradstream._simulate import simulate
from gradstream.checkpoint import Manifest, Policy, newest, prune, to_resume
from gradstream.checkpoint.manifest import STATE
from gradstream.cli import main
from gradstream.errors import DataError
from gradstream.recording import read_log
from gradstream.run.result import Run
from gradstream.runtime.storage import DiskStorage, MemoryStorage
from gradstream.testing.runs import QUICK, least_squares
from small_checkpoints import WORLD, write
from whole_runs import unexpected


def two_checkpoints() -> MemoryStorage:
    storage = MemoryStorage()
    for step in (10, 20):
        write(storage, step)
    return storage


NEW, OLD = "checkpoints/step-00000020", "checkpoints/step-00000010"


def test_of_all_single_bits_of_state_json_none_can_be_flipped() -> None:
    storage = two_checkpoints()
    good = storage.read(f"{NEW}/{STATE}")
    assert Manifest.decode(good).step == 20
    accepted = []
    for bit in range(8 * len(good)):
        data = bytearray(good)
        data[bit // 8] ^= 1 << bit % 8
        try:
            Manifest.decode(bytes(data))
        except DataError:
            continue
        accepted.append(bit)
    assert accepted == []


def test_the_flips_are_noticed_by_the_hash_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """The checker can fail: without the comparison a flipped digit of a count is accepted."""
    storage = two_checkpoints()
    good = storage.read(f"{NEW}/{STATE}")
    altered = good.replace(b'"step": 20', b'"step": 21')
    with pytest.raises(DataError, match=r"was altered or cut short: it is not what its own SHA-256 says"):
        Manifest.decode(altered)
    monkeypatch.setattr("gradstream.checkpoint.manifest.seal_of", lambda body: altered[: -len(body)])
    assert Manifest.decode(altered).step == 21


@pytest.mark.parametrize("name", [STATE, "worker-0.safetensors", "model.safetensors"])
def test_at_every_length_a_file_that_was_cut_short_is_named_and_the_one_before_used(name: str) -> None:
    storage = two_checkpoints()
    good = storage.read(f"{NEW}/{name}")
    for length in range(len(good)):
        storage.files[f"{NEW}/{name}"] = good[:length]
        refused: list[DataError] = []
        found = newest(storage, refused.append)
        assert found is not None
        assert found[0] == OLD
        assert name in str(refused[0])


@pytest.mark.parametrize("name", [STATE, "model.safetensors", "optimizer-momentum.safetensors"])
def test_files_of_two_checkpoints_that_were_exchanged_are_refused(name: str) -> None:
    storage = two_checkpoints()
    ours, theirs = f"{NEW}/{name}", f"{OLD}/{name}"
    storage.files[ours], storage.files[theirs] = storage.files[theirs], storage.files[ours]
    with pytest.raises(DataError, match="every checkpoint of this run is damaged") as refused:
        to_resume(storage, unexpected)
    assert f"{OLD}/{name}" in str(refused.value)
    assert f"{NEW}/{name}" in str(refused.value)


def test_a_state_of_another_step_is_refused_though_all_files_are_what_it_says() -> None:
    storage = two_checkpoints()
    for path in [path for path in storage.files if path.startswith(OLD)]:
        storage.files[path.replace("10", "30")] = storage.files[path]
    refused: list[DataError] = []
    found = newest(storage, refused.append)
    assert found is not None
    assert found[0] == NEW
    assert "state.json is of step 10: it belongs to another checkpoint" in str(refused[0])


def sealed(body: bytes) -> bytes:
    return b'{"sha256": "%s",\n' % hashlib.sha256(body).hexdigest().encode() + body


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (
            b'{\n "format": 1,\n "step": 20\n}\n',
            "another version of gradstream wrote it; resume from another",
        ),
        (b"[" * 100_000, "does not begin with the SHA-256"),
        (sealed(b' "x": ' + b"[" * 100_000), "cannot be read: "),
        (sealed(b' "format": 2}\n'), "cannot be read"),
        (sealed(b' "format": 1}\n'), "has format 1, but this version of gradstream reads format 2"),
        (sealed(b"[]"), "cannot be read"),
    ],
)
def test_what_is_no_state_is_refused_in_words(data: bytes, message: str) -> None:
    with pytest.raises(DataError, match=message):
        Manifest.decode(data)


def test_a_state_cannot_tell_of_files_elsewhere() -> None:
    good = two_checkpoints().read(f"{NEW}/{STATE}")
    body = good.split(b"\n", 1)[1].replace(b'"worker-0.safetensors"', b'"../../../elsewhere"')
    with pytest.raises(DataError, match=r"a file '../../../elsewhere', expected a plain name"):
        Manifest.decode(sealed(body))


@pytest.mark.parametrize("name", [STATE, "model.safetensors"])
def test_a_damaged_checkpoint_is_not_deleted_and_is_none_of_those_kept(name: str) -> None:
    storage = two_checkpoints()
    data = bytearray(storage.read(f"{OLD}/{name}"))
    data[-3] ^= 1
    storage.files[f"{OLD}/{name}"] = bytes(data)
    for step in (30, 40, 50):
        write(storage, step, Policy(keep_last=2))
    assert storage.names("checkpoints") == ["step-00000010", "step-00000040", "step-00000050"]
    data = bytearray(storage.read("checkpoints/step-00000040/" + name))
    data[-3] ^= 1
    storage.files["checkpoints/step-00000040/" + name] = bytes(data)
    write(storage, 60, Policy(keep_last=2))
    there = ["step-00000010", "step-00000040", "step-00000050", "step-00000060"]
    assert storage.names("checkpoints") == there
    prune(storage, Policy(keep_last=2))
    assert storage.names("checkpoints") == there


MODEL, DATA = least_squares(60, 200, whole=False, dtype="float32", reduction="mean")
JOB: dict[str, Any] = {
    "optimizer": gs.optim.SGD(lr=0.05), "workers": 2, "servers": 1, "batch_size": 4, "epochs": 20,
    "chunk_elems": 64, "deadlines": QUICK, "checkpoint_every": 4, "strategy": "synchronous", "config": WORLD,
}  # fmt: skip


def test_over_damaged_checkpoints_a_simulation_does_not_begin_anew() -> None:
    storage = MemoryStorage()
    simulate(MODEL, DATA, storage=storage, **JOB)
    folders = storage.names("checkpoints")
    kept = [name for name in folders if name.startswith("step-")]
    assert kept
    for name in kept:
        storage.files[f"checkpoints/{name}/model.safetensors"] += b"x"
    before = dict(storage.files)
    with pytest.raises(DataError, match="it has grown") as refused:
        simulate(MODEL, DATA, storage=storage, resume=True, **JOB)
    assert all(f"checkpoints/{name}/model.safetensors" in str(refused.value) for name in kept)
    assert storage.files == before


def test_a_checkpoint_of_a_run_with_another_seed_is_refused() -> None:
    storage = MemoryStorage()
    simulate(MODEL, DATA, storage=storage, **JOB)
    with pytest.raises(gs.errors.ConfigError, match="seed"):
        simulate(MODEL, DATA, storage=storage, resume=True, **{**JOB, "seed": 7, "epochs": 30})


# ---- a run directory ------------------------------------------------------------------------

JOB_FILE = """
import numpy as np
import gradstream as gs

def job():
    model = gs.from_functions(
        init=lambda seed: {"w": np.zeros(4)},
        outputs=lambda p, x: x @ p["w"],
        gradients=lambda p, x, y: {"w": 2 / len(x) * x.T @ (x @ p["w"] - y)},
    )
    x = np.random.default_rng(0).standard_normal((64, 4)).astype("float32")
    return gs.Job(model, gs.from_arrays(x, x.sum(1)), strategy="synchronous", workers=1, servers=1,
                  batch_size=8, epochs=2, record=True)
"""


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run that was begun and lost: it has checkpoints, and no final parameters."""
    from gradstream._train import train
    from gradstream.job.files import load_job

    folder = tmp_path_factory.mktemp("made")
    (folder / "job.py").write_text(JOB_FILE)
    train(load_job(str(folder / "job.py")), run_dir=folder / "run")
    shutil.rmtree(folder / "run/checkpoints/final")
    events = (folder / "run/events.jsonl").read_text().splitlines(keepends=True)
    (folder / "run/events.jsonl").write_text(
        "".join(one for one in events if '"event":"finished"' not in one)
    )
    for step in (10, 20):
        write(DiskStorage(folder / "run"), step)
    return folder / "run"


@pytest.fixture
def run(made: Path, tmp_path: Path) -> Path:
    """A copy of it that a test may damage."""
    shutil.copytree(made, tmp_path / "runs/mine")
    return tmp_path / "runs/mine"


def said(*argv: object) -> str:
    """What a command prints; it fails, and not by an exception that nobody has foreseen."""
    result = CliRunner().invoke(main, [str(word) for word in argv])
    assert result.exit_code in (1, 2), result.output
    assert "Traceback" not in result.output
    return result.output


def test_a_resumed_run_does_not_begin_anew_over_damaged_checkpoints(run: Path) -> None:
    folders = sorted((run / "checkpoints").iterdir())
    for folder in folders:
        (folder / STATE).write_text((folder / STATE).read_text().replace('"rounds": ', '"rounds": 1'))
    damaged = {path: path.read_bytes() for path in run.rglob("checkpoints/*/*")}
    text = said("resume", run)
    assert "every checkpoint of this run is damaged" in text
    assert "--from-start" in text
    assert all(f"checkpoints/{folder.name}: state.json was altered" in text for folder in folders)
    assert not (run / "checkpoints/final").exists()
    result = CliRunner().invoke(main, ["resume", str(run), "--from-start"])
    assert result.exit_code == 0, result.output
    assert {path: path.read_bytes() for path in damaged} == damaged  # nothing of it was deleted
    assert Run.load(run).summary["samples_accounted"] == 128


def test_from_start_is_refused_where_a_checkpoint_is_good(run: Path) -> None:
    assert "expected a run whose checkpoints are all damaged" in said("resume", run, "--from-start")


NESTED = "[" * 100_000


@pytest.mark.parametrize("content", ["", "{", "[1]", "\x00\xff", NESTED])
def test_a_damaged_run_json_is_named_with_what_to_do(run: Path, content: str) -> None:
    (run / "run.json").write_text(content)
    for text in (said("report", run), said("resume", run)):
        assert "run.json is damaged: " in text
        assert "write {} into it" in text
    result = CliRunner().invoke(main, ["runs", str(run.parent)])
    assert "run.json is damaged" in result.stderr
    assert "damaged" in result.stdout
    (run / "run.json").write_text("{}")  # what it says helps
    assert CliRunner().invoke(main, ["report", str(run)]).exit_code == 0


@pytest.mark.parametrize("content", ["", "{", "[1]", "{}", '{"id": 3}', NESTED])
def test_a_damaged_nodes_json_is_named_with_what_to_do(run: Path, content: str) -> None:
    (run / "nodes.json").write_text(content)
    for text in (said("resume", run), said("replay", run), said("evaluate", run)):
        assert "nodes.json is damaged" in text
        assert "put it back from a copy" in text.replace("\n", " ")


def test_a_damaged_config_is_named_with_what_to_do(run: Path) -> None:
    (run / "config.toml").write_bytes(b"workers = \xff\n")
    text = said("report", run)
    assert "config.toml is damaged" in text
    assert "remove it" in text
    (run / "config.toml").unlink()
    assert CliRunner().invoke(main, ["report", str(run)]).exit_code == 0


@pytest.mark.parametrize(
    "line", ["[]", "{", "\x00", NESTED, '{"event": 3}', '{"event":"step","node":"worker-0","time_s":1.0}']
)
def test_a_damaged_line_of_events_is_passed_over_and_said(run: Path, line: str) -> None:
    lines = (run / "events.jsonl").read_text().splitlines()
    (run / "events.jsonl").write_text("\n".join([*lines[:3], line, *lines[3:]]) + "\n")
    result = CliRunner().invoke(main, ["report", str(run)])
    assert result.exit_code == 0
    assert "events.jsonl: passed over 1 line" in result.stderr.replace("\n", " ")


def test_a_damaged_recording_is_named_with_what_to_do(run: Path) -> None:
    (part,) = run.rglob("shard-0.rec")
    data = bytearray(part.read_bytes())
    data[20] ^= 1
    part.write_bytes(data)
    text = said("replay", run)
    assert part.name in text
    assert "put the file back from a copy" in text.replace("\n", " ")
    (about,) = run.rglob("job.json")
    part.unlink()
    about.write_text("{")
    assert "job.json is damaged" in said("replay", run)


def test_every_flipped_bit_of_a_short_recording_is_noticed_or_cuts_it_off(run: Path) -> None:
    (part,) = run.rglob("shard-0.rec")
    good = part.read_bytes()[:400]
    whole = read_log(good, "x").header
    for bit in range(8 * len(good)):
        data = bytearray(good)
        data[bit // 8] ^= 1 << bit % 8
        try:
            found = read_log(bytes(data), "x.rec")
        except DataError:
            continue
        assert found.header == whole
        assert found.torn_bytes or bytes(data) == good


def test_final_parameters_that_cannot_be_read_are_named(run: Path) -> None:
    (run / "checkpoints/final").mkdir()
    (run / "checkpoints/final/model.safetensors").write_bytes(b"torn")
    assert "final/model.safetensors cannot be read" in said("report", run).replace("\n", "")


@pytest.mark.parametrize("damage", ["garbage", "fifo"])
def test_a_run_with_damaged_events_is_not_said_to_be_unfinished_without_a_word(
    run: Path, damage: str
) -> None:
    (run / "events.jsonl").unlink()
    if damage == "fifo":
        os.mkfifo(run / "events.jsonl")
    else:
        (run / "events.jsonl").write_bytes(b"garbage\n" * 9)
    with pytest.raises(gs.errors.PeerLostError) as found:
        gs.runs.attach(run)
    assert "events.jsonl, which is damaged" in found.value.__notes__[0]
