"""The GPT-2 of examples/own_loop on three machines at 100 Mbit/s: one is killed, and one joins, while it trains.

Machines are network namespaces; skipped with the reason where none can be made.
"""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from kit.machines import Machine, Machines, unavailable

ROOT = Path(__file__).resolve().parents[2]
EXAMPLE = ROOT / "examples" / "own_loop" / "trainer_gpt2.py"
SAMPLES, EPOCHS, BYTES = 1600, 2, 64

# What the script waits for, so that a machine comes and goes while it trains.
WAITS = """
import time
from transformers import TrainerCallback


class Waits(TrainerCallback):
    def on_step_end(self, args, state, control, **kwargs):
        for step, file in ((30, "comes"), (90, "killed")):
            while state.global_step == step and not (Path(args.output_dir) / file).exists():
                time.sleep(0.05)


if session.rank == 2:
    (Path(args.saved) / "comes").touch()
trainer.add_callback(Waits())
trainer.train()
"""


@pytest.fixture
def machines() -> Iterator[Machines]:
    if reason := unavailable():
        pytest.skip(reason)
    with Machines(3, rate="100mbit") as made:
        yield made


def start(machine: Machine, folder: Path, *words: str) -> subprocess.Popen[str]:
    """Starts a command of gradstream on a machine, with a copy of the script beside it."""
    folder.mkdir()
    text = EXAMPLE.read_text().replace("trainer.train()", WAITS)
    text = text.replace("Path(__file__).resolve().parents[2]", f"Path({str(ROOT)!r})")
    (folder / "script.py").write_text(text)
    environment = {"PYTHONPATH": str(ROOT / "src"), "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    command = [sys.executable, "-m", "gradstream", *words]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
    return machine.start(command, cwd=folder, env=environment, **pipes)


def until(process: subprocess.Popen[str], pattern: str, said: list[str]) -> re.Match[str]:
    """The next line in which the pattern is found."""
    assert process.stdout is not None
    for line in process.stdout:
        said.append(line)
        if found := re.search(pattern, line):
            return found
    raise AssertionError("".join(said))


@pytest.mark.limit_s(600)
def test_a_trainer_goes_on_while_a_machine_is_killed_and_one_joins(
    machines: Machines, tmp_path: Path
) -> None:
    pytest.importorskip("transformers", reason="needs pip install 'gradstream[transformers]'")
    saved, said = tmp_path / "saved", list[str]()
    saved.mkdir()
    options = ("--samples", str(SAMPLES), "--epochs", str(EPOCHS), "--width", "64", "--saved", str(saved))
    listen = ("--listen", machines[0].address, "--wait", "2", "--run-dir", "run")
    first = start(machines[0], tmp_path / "a", "train", "script.py", *listen, "--", *options)
    words = shlex.split(until(first, "(gradstream join .*)", said)[1])[1:]
    start(machines[1], tmp_path / "b", *words)
    begun = float(until(first, "'loss': '([0-9.]+)'", said)[1])
    joined = start(machines[2], tmp_path / "c", *words)
    for _ in range(3):  # of 20 steps each: the joined machine trains too
        until(first, "'loss'", said)
    machines[1].kill()
    (saved / "killed").touch()
    until(first, "the others have taken over all that it had left", said)
    step, loss = until(first, r"worker \d: step (\d+), loss ([0-9.]+)", said).groups()
    assert float(loss) < begun - 1
    until(first, f"in the model +{SAMPLES * EPOCHS * BYTES:,} samples", said)  # each is one for each token
    assert first.wait() == 0, said
    assert joined.wait() == 0
    (log,) = (tmp_path / "c").glob("runs/*/logs/worker-2.log")
    assert f"worker 2: step {step}, loss {loss} " in log.read_text()
