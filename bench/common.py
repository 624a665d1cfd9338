"""What benchmarks and studies share: options, records, the tables of pages, and machines.

A script of bench/ imports it as it is; one of studies/ first says where it is:

    sys.path.append(str(Path(__file__).resolve().parents[2] / "bench"))
    from common import command_line, keep
"""

from __future__ import annotations

import argparse
import datetime
import json
import math
import os
import re
import shlex
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from gradstream.machine.description import describe_machine, git_commit
from gradstream.run.result import Run

ROOT = Path(__file__).resolve().parents[1]
sys.path.append(str(ROOT / "tests"))  # the rigs of kit/
RESULTS = ROOT / "bench" / "results"
Record = Mapping[str, Any]
Places = dict[str, str]
"""By the name of a place on a page, what stands there."""
DIGITS = 6
"""Significant ones of a figure in a record: more than any page shows."""


def command_line(about: str | None) -> argparse.ArgumentParser:
    """A parser of options, whose help says what the benchmark is about, in the lines of its docstring."""
    return argparse.ArgumentParser(description=about, formatter_class=argparse.RawDescriptionHelpFormatter)


# ---- records -------------------------------------------------------------------------------------


def now() -> str:
    """The date and the time of a record, in UTC."""
    return datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")


def origin(environment: Mapping[str, str] | None = None) -> dict[str, Any]:
    """When, from which commit and on which machine a record was made.

    Args:
        environment: of the nodes. With one, the record also names the versions of packages.
    """
    machine = describe_machine(environment or {})
    return {
        "date": now(),
        "commit": git_commit(ROOT),
        "machine": machine["machine"] if environment is None else machine,
    }


def keep(path: Path, record: Mapping[str, Any]) -> None:
    """Writes a record as one line of JSON, whose figures have as many digits as anybody reads."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(_rounded(record), default=str, separators=(",", ":")) + "\n")


def kept(path: Path) -> dict[str, Any]:
    """The record in a file; an empty one if there is none."""
    found: dict[str, Any] = json.loads(path.read_text()) if path.is_file() else {}
    return found


def recorded(name: str) -> Record:
    """What a benchmark or a study has written; the part of a record behind a slash."""
    name, _, part = name.partition("/")
    study = ROOT / "studies" / name / "record.json"
    found = kept(study if study.is_file() else RESULTS / f"{name}.json")
    return found[part] if part else found


def where(record: Record) -> str:
    """The machine and the day of a record."""
    machine = record["machine"]
    machine = machine.get("machine", machine)
    return f"on {machine['cores']} cores of an {machine['processor']}, {record['date'][:10]}"


def keep_part(path: Path, part: str, record: Mapping[str, Any]) -> None:
    """Writes one part of a record that has several, and leaves the others."""
    keep(path, {**kept(path), part: record})


def _rounded(value: Any) -> Any:
    if isinstance(value, float) and math.isfinite(value) and not value.is_integer():
        return float(f"{value:.{DIGITS}g}")
    if isinstance(value, Mapping):
        return {key: _rounded(each) for key, each in value.items()}
    return [_rounded(each) for each in value] if isinstance(value, list | tuple) else value


def work_folder() -> Path:
    """Where a study that can be stopped and started again keeps the runs that it has made so far."""
    folder = ROOT / "build" / "studies"
    folder.mkdir(parents=True, exist_ok=True)
    return folder


# ---- tables of pages -----------------------------------------------------------------------------


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A Markdown table."""
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def filled(text: str, places: Mapping[str, str]) -> str:
    """The text of a page, with what stands between `<!-- begin: name -->` and `<!-- end: name -->` replaced.

    Raises:
        LookupError: the page has no such place, or has it twice.
    """
    for name, content in places.items():
        mark = re.compile(rf"(<!-- begin: {name} -->\n).*?(<!-- end: {name} -->)", re.DOTALL)
        text, found = mark.subn(lambda marks, content=content: f"{marks[1]}{content}\n{marks[2]}", text)
        if found != 1:
            raise LookupError(f"the page has {found} places {name!r}, expected one between two marks")
    return text


def put(page: Path, places: Mapping[str, str]) -> bool:
    """Fills the places of a page; whether that changed it. Raises LookupError as `filled` does."""
    before = page.read_text()
    after = filled(before, places)
    page.write_text(after)
    return after != before


# ---- pictures ------------------------------------------------------------------------------------


def axes_of(count: int, width: float = 11.0) -> Any:
    """A figure and so many axes beside each other. Needs matplotlib (extra `bench`)."""
    import matplotlib

    matplotlib.use("Agg")
    matplotlib.rcParams.update({"svg.hashsalt": "gradstream", "font.size": 9})
    from matplotlib import pyplot

    return pyplot.subplots(1, count, figsize=(width, 4.2))


def save(figure: Any, path: Path) -> None:
    """Writes a figure; the same record gives the same file."""
    from matplotlib import pyplot

    figure.tight_layout()
    figure.savefig(path, metadata={"Date": None})
    pyplot.close(figure)


# ---- runs on machines (network namespaces of this one) ---------------------------------------------

ONE_THREAD = dict.fromkeys(
    ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS", "VECLIB_MAXIMUM_THREADS"), "1"
)
"""The machines share the cores of this one; by itself each would take all of them."""
LIMIT_S = 1500.0


def run_on(machines: Any, folder: Path, job: str, *options: str) -> Run:
    """A run on all of some machines, from the launcher's first word to the last."""
    first = machines[0]
    listen = ("--listen", first.address, "--wait", str(len(machines.machines)))
    launcher = start(first, folder, "train", job, *listen, "--run-dir", str(folder / "run"), *options)
    words = shlex.split(invitation(launcher))
    others = []
    for machine in machines.machines[1:]:
        own = ["--name", machine.name, "--run-dir", str(folder / machine.name)]
        # The line is made to be typed beside the job file; here the file has a path.
        others.append(start(machine, folder, *words[:2], job, *words[3:], *own))
    for process in (*others, launcher):
        process.wait(LIMIT_S)
    statuses = [process.returncode for process in (launcher, *others)]
    if any(statuses):
        raise SystemExit(f"exit statuses {statuses}")
    return Run.load(folder / "run")


def start(machine: Any, folder: Path, *arguments: str) -> subprocess.Popen[str]:
    """A command line of gradstream on a machine; what it says on stderr is shown with its name."""
    process: subprocess.Popen[str] = machine.start(
        [sys.executable, "-m", "gradstream", *arguments],
        cwd=folder,
        env={
            "PYTHONPATH": os.pathsep.join([str(ROOT / "src"), os.environ.get("PYTHONPATH", "")]),
            **ONE_THREAD,
        },
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
    )
    if arguments[0] == "join":
        show(machine.name, process)
    return process


def invitation(launcher: subprocess.Popen[str]) -> str:
    """What the launcher prints to join it by; whatever it says afterwards is shown."""
    assert launcher.stderr is not None
    for line in launcher.stderr:
        if found := re.search(r"gradstream (join .*)", line):
            show("launcher", launcher)
            return found[1]
    raise SystemExit("the launcher has printed no line to join it by")


def show(name: str, process: subprocess.Popen[str]) -> None:
    """Passes on what a process says on stderr, with its name before each line."""

    def read() -> None:
        assert process.stderr is not None
        for line in process.stderr:
            print(f"{name}: {line.rstrip()}", file=sys.stderr, flush=True)

    threading.Thread(target=read, daemon=True).start()
