"""Question: does a training script of one's own end on two machines with the bits that it ends with on one?

Runs each script of examples/own_loop with two workers on this machine, and with one worker on each of two
machines (network namespaces, certificates of the run, TLS), and compares what it has trained, byte by byte.

    python studies/own_scripts_apart/own_scripts_apart.py  # all, some minutes; needs root
    python studies/own_scripts_apart/own_scripts_apart.py --only gpt dqn

Keeps what it finds with machine, commit and date in record.json.
"""

from __future__ import annotations

import json
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import load_file

from gradstream.run.result import FINAL_MODEL, Run

sys.path.append(str(Path(__file__).resolve().parents[2] / "bench"))
from common import ROOT, command_line, keep, origin
from kit.machines import Machine, Machines, unavailable

RESULT = Path(__file__).with_name("record.json")
SCRIPTS = {
    "gpt": "--precision full",
    "ema": "",
    "gan": "",
    "dqn": "--steps 200",
    "resnet": "--samples 192 --epochs 1 --no-compile",
    "train_names": "--words 300",
    "train_pictures": "--train-samples 200 --test-samples 100",
}
STRATEGIES = {  # of allreduce the same algorithm: inside a host it would be another, which rounds otherwise
    "synchronous": "--strategy synchronous",
    "allreduce": "--strategy allreduce --algorithm messages",
    "allreduce, auto": "--strategy allreduce",
}
LIMIT_S = 240.0


def environment() -> dict[str, str]:
    """Of all programs here: one thread of arithmetic, so that sums have one order."""
    return {"PYTHONPATH": str(ROOT / "src"), "COLUMNS": "200", "OMP_NUM_THREADS": "1"}


def start(machine: Machine, folder: Path, script: Path, *arguments: str) -> subprocess.Popen[str]:
    """`gradstream` with these arguments, on a machine, in a folder that has the script."""
    folder.mkdir()
    shutil.copy(script, folder)
    words = [sys.executable, "-m", "gradstream", *arguments]
    return machine.start(
        words, cwd=folder, env=environment(), stdout=subprocess.PIPE, stderr=subprocess.STDOUT
    )


def ended(process: subprocess.Popen[str], said: str = "") -> str:
    """All that it said. Raises RuntimeError with it unless it ended well."""
    text = said + process.communicate(timeout=LIMIT_S)[0]
    if process.returncode != 0:
        raise RuntimeError(f"{shlex.join(map(str, process.args))} ended with {process.returncode}:\n{text}")  # type: ignore[arg-type]
    return text


def on_one(machine: Machine, folder: Path, script: Path, words: list[str]) -> Path:
    """The run directory of two workers on one machine."""
    ended(start(machine, folder, script, "train", script.name, "--workers", "2", "--run-dir", "run", *words))
    return folder / "run"


def on_two(machines: Machines, folder: Path, script: Path, words: list[str]) -> Path:
    """The run directory of a worker on each of two machines."""
    folder.mkdir()
    one, other = machines[0], machines[1]
    listening = ("--listen", one.address, "--wait", "2", "--run-dir", "run")
    launcher = start(one, folder / "a", script, "train", script.name, *listening, *words)
    assert launcher.stdout is not None
    said = ""
    for line in launcher.stdout:
        said += line
        if found := re.search(r"(gradstream join .*)", line):
            break
    else:
        raise RuntimeError(said)
    join, target, *rest = shlex.split(found[1])[1:]
    ended(start(other, folder / "b", script, join, target, "--name", "b", *rest))
    ended(launcher, said)
    return folder / "a" / "run"


def compared(before: Path, after: Path) -> dict[str, Any]:
    """What differs between two runs: nothing, wherever a number is 0."""
    old, new = load_file(before / FINAL_MODEL), load_file(after / FINAL_MODEL)
    if old.keys() != new.keys():
        raise RuntimeError(f"other names: {sorted(old.keys() ^ new.keys())}")
    samples = [Run.load(path).summary["samples_accounted"] for path in (before, after)]
    return {
        "parameters": int(sum(value.size for value in old.values())),
        "bytes_that_differ": int(
            sum((old[n].view(np.uint8) != new[n].view(np.uint8)).sum() if old[n].ndim else 0 for n in old)
        ),
        "largest_difference": max(float(abs(old[n] - new[n]).max()) for n in old if old[n].size),
        "samples": samples[0],
        "samples_that_differ": samples[1] - samples[0],
    }


def main() -> None:
    """Runs all, and keeps what it finds."""
    parser = command_line(__doc__)
    parser.add_argument("--only", nargs="+", choices=SCRIPTS, default=list(SCRIPTS))
    parser.add_argument("--strategies", nargs="+", choices=STRATEGIES, default=list(STRATEGIES))
    given = parser.parse_args()
    if reason := unavailable():
        sys.exit(reason)
    rows = []
    with Machines(2) as machines, tempfile.TemporaryDirectory() as scratch:
        for name in given.only:
            script = ROOT / "examples" / "own_loop" / f"{name}.py"
            for strategy in given.strategies:
                tail = ["--", *shlex.split(SCRIPTS[name])] if SCRIPTS[name] else []
                words = [*shlex.split(STRATEGIES[strategy]), *tail]
                folder = Path(scratch) / f"{name}-{len(rows)}"
                folder.mkdir()
                found = compared(
                    on_one(machines[0], folder / "one", script, words),
                    on_two(machines, folder / "two", script, words),
                )
                rows.append({"script": name, "arguments": SCRIPTS[name], "strategy": strategy, **found})
                print(json.dumps(rows[-1]), flush=True)
    record = {
        "question": (__doc__ or "").splitlines()[0],
        **origin({**environment(), "PYTHONPATH": "src"}),  # no path of this machine
        "rows": rows,
    }
    if set(given.only) == set(SCRIPTS) and set(given.strategies) == set(STRATEGIES):
        keep(RESULT, record)
    if any(
        row["samples_that_differ"] or (row["bytes_that_differ"] and row["strategy"] != "allreduce, auto")
        for row in rows
    ):
        sys.exit("not the same")


if __name__ == "__main__":
    main()
