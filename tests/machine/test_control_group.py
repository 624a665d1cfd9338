from __future__ import annotations

import signal
from pathlib import Path

import pytest

from gradstream.machine.resources import MemoryKills, free_memory_bytes, limit_bytes, own_groups
from gradstream.run.failures import EndedNodes, how_ended


def test_both_versions_say_where_the_groups_of_a_process_are(tmp_path: Path) -> None:
    listing = tmp_path / "cgroup"
    listing.write_text("9:cpu:/a\n4:hugetlb,memory:/job\n0::/user/b\n")
    assert own_groups(listing, tmp_path) == [tmp_path / "memory/job", tmp_path / "user/b"]
    assert own_groups(tmp_path / "none", tmp_path) == [tmp_path]


def test_limits_of_version_1_count_and_no_limit_is_none(tmp_path: Path) -> None:
    inner = tmp_path / "memory" / "job"
    inner.mkdir(parents=True)
    (inner / "memory.limit_in_bytes").write_text(f"{(1 << 63) - 4096}\n")
    (inner / "memory.usage_in_bytes").write_text("7\n")
    assert free_memory_bytes(tmp_path / "none", inner) is None
    (inner.parent / "memory.limit_in_bytes").write_text("40000\n")
    (inner.parent / "memory.usage_in_bytes").write_text("30000\n")
    (inner.parent / "memory.stat").write_text("inactive_file 1\ntotal_inactive_file 5000\n")
    assert free_memory_bytes(tmp_path / "none", inner) == 15_000
    assert limit_bytes([inner]) == 40_000


@pytest.mark.parametrize(
    ("counts", "limit", "line"),
    [
        ("memory.events", "memory.max", "oom 9"),
        ("memory.oom_control", "memory.limit_in_bytes", "under_oom 0"),
    ],
)
def test_a_kill_for_memory_is_told_with_the_limit(tmp_path: Path, counts: str, limit: str, line: str) -> None:
    group = tmp_path / "outer"
    group.mkdir()
    (group / counts).write_text(f"{line}\noom_kill 3\n")
    kills = MemoryKills([group / "seen-outside-only"])
    assert kills.cause() == ""  # killed by somebody else
    (group / counts).write_text(f"{line}\noom_kill 5\n")
    assert "memory of this machine ran out" in kills.cause()
    (group / limit).write_text(f"{3 << 29}\n")
    cause = kills.cause()
    assert "1.50 GiB" in cause and "raise that limit" in cause
    assert kills.cause() == ""  # two were killed
    ended = EndedNodes()
    ended.note("worker-1", -signal.SIGKILL, cause)
    assert "killed by signal 9 (Linux killed it for memory" in ended.how("worker-1")
    ended.forget("worker-1")
    ended.note("worker-1", -signal.SIGKILL, "")
    assert "see dmesg" in ended.how("worker-1")


def test_any_signal_has_its_name() -> None:
    assert how_ended(-signal.SIGSEGV) == "was killed by signal 11 (SIGSEGV)"
    assert how_ended(-40) == "was killed by signal 40"  # a real-time signal
    assert how_ended(3) == "ended with status 3"
