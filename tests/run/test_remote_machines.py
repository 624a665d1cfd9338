"""Four machines, as network namespaces: joined by the printed line, TLS on, 1 Gbit/s each.

Skipped with the reason where namespaces cannot be made.
"""

from __future__ import annotations

import re
import shlex
import signal
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import safetensors.numpy

import gradstream as gs
from gradstream.run.result import FINAL_MODEL
from kit.machines import Machines, unavailable
from machine_command import JOB, Command


@pytest.fixture
def machines() -> Iterator[Machines]:
    reason = unavailable()
    if reason:
        pytest.skip(reason)
    with Machines(4) as made:
        yield made


@pytest.mark.limit_s(300)
def test_four_machines_and_everybody_who_is_refused(machines: Machines, tmp_path: Path) -> None:
    a = machines[0]
    launcher = Command(
        a, tmp_path / "a", "train", "job.py", "--listen", a.address, "--wait", "4", "--run-dir", "run"
    )
    words = shlex.split(launcher.line(r"gradstream (join .*)")[1])
    token, fingerprint = words[words.index("--token") + 1], words[words.index("--fingerprint") + 1]
    assert words[1].startswith("10.77.0.1:")

    # Those who are not let in, each with its word. They run beside one another.
    wrong_token = [word.replace(token, "0" * 32) for word in words]
    wrong_certificate = [word.replace(fingerprint, "sha256:" + "0" * 64) for word in words]
    refused = {
        "BAD_SECRET": Command(machines[1], tmp_path / "token", *wrong_token),
        "BAD_JOB_FILE": Command(machines[2], tmp_path / "file", *words, job=JOB + "\n# changed\n"),
        "BAD_CERTIFICATE": Command(machines[3], tmp_path / "certificate", *wrong_certificate),
        "TLS": Command(machines[3], tmp_path / "plain", *words[:5], "--insecure"),
    }
    for word, command in refused.items():
        status, said = command.end()
        assert status == 2, said
        assert f"refused ({word})" in said, said

    joined = {
        name: Command(machines[index], tmp_path / name, *words, "--name", name)
        for index, name in ((1, "b"), (2, "c"), (3, "d"))
    }
    for name, command in joined.items():
        status, said = command.end()
        assert status == 0, said
        assert f"in as {name}, with shard-" in said
        assert "the run has finished" in said
    status, said = launcher.end()
    assert status == 0, said
    for name, address in (("b", "10.77.0.2"), ("c", "10.77.0.3"), ("d", "10.77.0.4")):
        assert re.search(
            rf"machine {name} \({re.escape(address)}\) has joined with shard-\d, worker-\d", said
        )
    assert "4/4 workers on 4 machines" in said
    summary = gs.Run.load(tmp_path / "a" / "run").summary
    assert summary["samples_accounted"] == 3 * 800
    assert summary["workers_lost"] == []
    # Running means are each worker's own: one has asked the others for theirs, from machine to machine.
    final = safetensors.numpy.load_file(tmp_path / "a" / "run" / FINAL_MODEL)
    assert int(final["1.num_batches_tracked"]) > 30
    np.testing.assert_allclose(final["1.running_var"], 1, atol=0.2)


@pytest.mark.limit_s(300)
def test_kill_9_of_a_joined_machine_with_a_shard_ends_the_run_and_names_it(
    machines: Machines, tmp_path: Path
) -> None:
    a, b = machines[0], machines[1]
    arguments = ("train", "job.py", "--listen", a.address, "--wait", "2", "--run-dir", "run")
    launcher = Command(a, tmp_path / "a", *arguments, "--acknowledge", "applied")
    words = shlex.split(launcher.line(r"gradstream (join .*)")[1])
    joined = Command(b, tmp_path / "b", *words, "--name", "b")
    launcher.line(r"^step \d+/")
    assert b.kill() >= 4  # join, its forkserver, its shard, its worker
    assert joined.end()[0] == -signal.SIGKILL
    status, said = launcher.end()
    assert status == 4, said
    assert "shard-1 was on machine b (10.77.0.2)" in said
