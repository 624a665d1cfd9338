"""A job whose model holds how often each sample was used, slow until told to hurry; events of a run as they come."""

from __future__ import annotations

import json
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

SAMPLES = 128
JOB = f"""
import sys
import time
from pathlib import Path
import gradstream as gs
from gradstream.testing import Tokens, numbered

class Slow(Tokens):
    def gradient(self, *given, **options):
        if not Path(sys.argv[1]).exists():
            time.sleep(0.2)  # so that the run goes on until all that is to happen has happened
        return super().gradient(*given, **options)

def job(workers=WORKERS, epochs=EPOCHS):
    return gs.Job(
        Slow(4, {SAMPLES}), numbered({SAMPLES}), strategy="downpour", optimizer=gs.optim.SGD(lr=1.0),
        workers=workers, batch_size=2, epochs=epochs, chunk_elems={SAMPLES}, deadlines=gs.Deadlines(lease_s=4.0),
    )

def broken():
    raise RuntimeError("no such thing")
"""


def job_text(workers: int, epochs: int) -> str:
    """The job file. Its first argument names the file that makes it hurry."""
    return JOB.replace("WORKERS", str(workers)).replace("EPOCHS", str(epochs))


def events(file: Path, process: subprocess.Popen[Any]) -> Iterator[dict[str, Any]]:
    """The events of a run as they come, until a process of it has ended."""
    read = 0
    while True:
        ended = process.poll() is not None
        lines = file.read_text().splitlines(keepends=True) if file.exists() else []
        for line in lines[read:]:
            if line.endswith("\n"):
                read += 1
                yield json.loads(line)
        if ended:
            return
        time.sleep(0.05)
