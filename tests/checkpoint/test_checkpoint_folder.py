"""Checkpoints as files: a crash at any instant, a full disk, or an altered file leaves one to go on from."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
import torch
from safetensors.numpy import load, load_file

import gradstream as gs
from broken_disks import CrashingStorage, FullStorage, PowerCutError
from gradstream._simulate import simulate
from gradstream.checkpoint import (
    Evaluated,
    Manifest,
    Policy,
    newest,
    parse_every,
)
from gradstream.checkpoint.folder import KeptCheckpoint, data_offset
from gradstream.checkpoint.format import header_of, parse, spec_of
from gradstream.coordinator.snapshot_rounds import LastAttempt
from gradstream.data.base import DataProgress, merged
from gradstream.errors import DataError
from gradstream.runtime.storage import DiskStorage, MemoryStorage
from gradstream.testing.runs import QUICK, least_squares
from small_checkpoints import ELEMS, TENSORS, WORLD, write
from whole_runs import unexpected


def usable_after(storage: CrashingStorage, expected: set[int]) -> None:
    """In whatever state the disk is found, one of the expected checkpoints is whole and is chosen."""
    for files in storage.survivors():
        found = MemoryStorage()
        found.files = files
        chosen = newest(found, unexpected)
        assert chosen is not None, sorted(files)
        assert chosen[1].step in expected
        arrays = load(found.read(f"{chosen[0]}/model.safetensors"))
        assert arrays["layer.weight"][0, 0] == chosen[1].step
        assert np.array_equal(arrays["tied.weight"], arrays["layer.weight"])
        assert arrays["tied.bias"] == arrays["layer.bias"] == chosen[1].step + 120
        assert arrays["norm.count"] == chosen[1].step


def crashes(commit: Callable[[CrashingStorage], object]) -> int:
    """Lets the power go in every operation of `commit`; returns how many there were."""
    before = CrashingStorage()
    write(before, 10)
    for crash_at in itertools.count():
        storage = CrashingStorage(before.files, crash_at)
        try:
            commit(storage)
        except PowerCutError:
            usable_after(storage, {10, 20})
            continue
        usable_after(storage, {20})  # once it says so, it is durable
        return crash_at
    raise AssertionError


@pytest.mark.parametrize("keep_last", [1, 2])
def test_a_crash_between_any_two_operations_leaves_the_old_or_the_new(keep_last: int) -> None:
    operations = crashes(lambda storage: write(storage, 20, Policy(keep_last=keep_last)))
    assert operations > 8


def test_checker_of_crashes_notices_an_old_one_that_goes_first() -> None:
    def hasty(storage: CrashingStorage) -> None:
        storage.remove("checkpoints/step-00000010")
        write(storage, 20)

    with pytest.raises(AssertionError):
        crashes(hasty)


def test_checker_of_crashes_notices_a_name_that_is_not_durable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(CrashingStorage, "sync", lambda self, folder: None)
    with pytest.raises(AssertionError):
        crashes(lambda storage: write(storage, 20))


def test_files_are_read_by_plain_safetensors_and_verified(tmp_path: Path) -> None:
    storage = DiskStorage(tmp_path)
    folder = write(storage, 7)
    arrays = load_file(tmp_path / folder / "model.safetensors")
    np.testing.assert_array_equal(arrays["layer.weight"].ravel(), np.arange(120, dtype=np.float32) + 7)
    assert arrays["layer.bias"].item() == 127
    assert arrays["norm.count"].item() == 7
    assert set(load_file(tmp_path / folder / "optimizer-momentum.safetensors")) == {
        "layer.weight",
        "layer.bias",
    }
    assert data_offset(storage, f"{folder}/model.safetensors") % 8 == 0
    found = newest(storage, unexpected)
    assert found is not None
    assert Manifest.decode(found[1].encode()) == found[1]


FILES = ["model.safetensors", "optimizer-momentum.safetensors", "worker-0.safetensors", "state.json"]


@pytest.mark.parametrize("name", FILES)
@pytest.mark.parametrize("fault", ["cut", "altered", "gone"])
def test_a_damaged_file_is_refused_by_name_and_the_one_before_is_used(
    tmp_path: Path, name: str, fault: str
) -> None:
    storage = DiskStorage(tmp_path)
    write(storage, 10)
    path = tmp_path / write(storage, 20) / name
    data = bytearray(path.read_bytes())
    if fault == "gone":
        path.unlink()
    elif fault == "cut":
        path.write_bytes(data[: len(data) // 2])
    else:
        data[len(data) // 2] ^= 1 if name != "state.json" else 0xFF
        path.write_bytes(data)
    refused: list[DataError] = []
    found = newest(storage, refused.append)
    assert found is not None
    assert found[1].step == 10
    assert "step-00000020" in str(refused[0])
    assert name in str(refused[0])


def test_a_shard_that_writes_elsewhere_is_noticed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    storage = DiskStorage(tmp_path)
    write(storage, 10)
    original = DiskStorage.patch

    def elsewhere(self: DiskStorage, path: str, pieces: Any) -> None:
        pieces = list(pieces)
        lost = len(pieces) == 1  # a shard's; the headers come to the right place
        original(self, path, [(offset, bytes(len(one)) if lost else one) for offset, one in pieces])

    monkeypatch.setattr(DiskStorage, "patch", elsewhere)
    with pytest.raises(DataError, match="differ from what their node had in memory"):
        write(storage, 20)
    found = newest(storage, unexpected)
    assert found is not None
    assert found[1].step == 10


def test_a_full_disk_is_said_and_training_goes_on_with_the_last_one_kept() -> None:
    model, data = least_squares(60, 200, whole=False, dtype="float32", reduction="mean")
    job: dict[str, Any] = {
        "optimizer": gs.optim.Adam(lr=0.05), "workers": 2, "servers": 2, "batch_size": 4, "epochs": 20,
        "chunk_elems": 64, "deadlines": QUICK, "checkpoint_every": 4, "config": WORLD,
    }  # fmt: skip
    whole = simulate(model, data, **job)
    storage = FullStorage(full_from=9)  # one checkpoint fits: 2 shards and the headers, of 3 files
    run = simulate(model, data, storage=storage, **job)
    np.testing.assert_array_equal(run.parameters["w"], whole.parameters["w"])
    made = [event for event in run.events if event["event"] == "checkpoint"]
    failed = [event for event in run.events if event["event"] == "checkpoint_failed"]
    assert len(made) >= 1
    assert failed
    assert "No space left" in failed[0]["message"]
    assert failed[-1]["kept"] == made[-1]["folder"]
    assert not [name for name in storage.names("checkpoints") if name.startswith(".")]
    found = newest(storage, unexpected)
    assert found is not None
    assert found[0] == made[-1]["folder"]


# ---- policy ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("value", "amount", "unit"),
    [(500, 500, "steps"), ("epoch", 1, "epochs"), ("90s", 90, "seconds"), ("10min", 600, "seconds"),
     ("2h", 7200, "seconds"), ("0.5 h", 1800, "seconds")],
)  # fmt: skip
def test_intervals(value: int | str, amount: float, unit: str) -> None:
    every = parse_every(value)
    assert every is not None
    assert (every.amount, every.unit) == (amount, unit)


@pytest.mark.parametrize("value", [0, -1, True, "often", "10 parsecs", "0s", 1.5])
def test_what_is_no_interval_is_refused(value: Any) -> None:
    with pytest.raises(gs.errors.ConfigError, match="checkpoint_every"):
        parse_every(value)


def test_a_simulation_that_keeps_no_checkpoint_refuses_it_too() -> None:
    model, data = least_squares(16, 2)
    with pytest.raises(gs.errors.ConfigError, match="checkpoint_every='often'"):
        gs.simulate(model, data, workers=1, batch_size=8, epochs=1, checkpoint_every="often")


def test_a_young_run_loses_half_of_its_time_at_most() -> None:
    """A cable pulled at minute 9 lost all: the first checkpoint came after ten."""
    progress = SimpleNamespace(step=0, ledger=SimpleNamespace(num_complete=0))
    last, policy, made = LastAttempt(cast("Any", progress)), Policy(every=parse_every("10min")), []
    last.begin(1000.0)  # it had waited for machines
    for second in range(1000, 5000):
        progress.step += 1
        if last.is_due(policy, float(second)):
            made.append(second - 1000)
            last.begun(float(second))
    assert made == [60, 120, 240, 480, 960, 1560, 2160, 2760, 3360, 3960]
    assert str(policy) == "the first checkpoint comes after 60 s, later ones at most 10 min apart"
    for value, words in (
        (500, "every 500 steps"),
        ("epoch", "every epoch"),
        ("30s", "every 30 s"),
        ("1.5h", "1.5 h"),
    ):
        assert words in str(Policy(every=parse_every(value)))
    assert Policy(every=parse_every("30s")).due(steps=1, epochs=0, seconds=30.0, before_s=0.0)
    assert not Policy(every=parse_every(5)).due(steps=4, epochs=9, seconds=1e9, before_s=0.0)


def test_the_newest_and_the_best_are_kept() -> None:
    def kept(step: int, accuracy: float | None) -> KeptCheckpoint:
        return KeptCheckpoint(
            f"step-{step}", step, None if accuracy is None else Evaluated(step, accuracy, None)
        )

    there = [kept(1, 0.5), kept(2, 0.9), kept(3, 0.9), kept(4, 0.7), kept(5, None)]
    assert [one.step for one in Policy(keep_last=2).superfluous(there)] == [1, 3]
    assert [one.step for one in Policy(keep_last=2, keep_best=False).superfluous(there)] == [1, 2, 3]
    assert [one.step for one in Policy(keep_last=1).superfluous(there[:1])] == []
    losses = [
        KeptCheckpoint("a", 1, Evaluated(1, None, 2.0)),
        KeptCheckpoint("b", 2, Evaluated(2, None, 3.0)),
        kept(3, None),
    ]
    assert [one.folder for one in Policy(keep_last=1).superfluous(losses)] == ["b"]


# ---- pieces ---------------------------------------------------------------------------------


def test_headers_describe_what_lies_behind_them() -> None:
    header = header_of(TENSORS)
    offset, tensors = parse(header + bytes(4 * ELEMS))
    assert offset == len(header)
    assert [start for _, start in tensors.values()] == [0, 480]
    with pytest.raises(gs.errors.ConfigError, match="two tensors"):
        header_of([TENSORS[0], TENSORS[0]])
    with pytest.raises(gs.errors.ConfigError, match="bfloat16"):
        spec_of("w", (1,), torch.bfloat16)
    for broken in (b"", b"\xff" * 8, header[:20]):
        with pytest.raises(DataError):
            parse(broken)


def test_what_is_left_of_an_epoch() -> None:
    done = DataProgress(2, {2: ((0, 10), (20, 30)), 3: ((5, 6),)})
    assert done.left(1, 40) == ()
    assert done.left(2, 40) == ((10, 20), (30, 40))
    assert done.left(4, 40) == ((0, 40),)
    assert (done.horizon, done.count(40)) == (4, 101)
    assert DataProgress.of_json(done.as_json()) == done
    assert merged([(5, 9), (0, 5), (20, 20), (8, 12)]) == ((0, 12),)
