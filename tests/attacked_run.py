"""A run for tests to attack: `python attacked_run.py FOLDER [plain | tls]` trains until it is told to stop.

Its last worker leaves in FOLDER/leak.json what a member knows (see `kit.insider`).
"""

from __future__ import annotations

import os
import sys
import time
from functools import partial
from pathlib import Path
from typing import Any

import gradstream as gs
from gradstream.job.files import load_job
from gradstream.run.remote.address import Address
from gradstream.run.remote.listening import Listening
from gradstream.testing.runs import least_squares
from kit.insider import Insider


def job() -> gs.Job:
    """Two workers that do next to nothing, for ever, and leave the machine to the tests."""
    model, data = least_squares(512, 2000)
    inner: Any = model.gradient

    def gradient(*given: Any, **options: Any) -> Any:
        time.sleep(0.05)
        return inner(*given, **options)

    model.gradient = gradient  # type: ignore[method-assign]
    return gs.Job(
        model,
        data,
        strategy=Insider(path=os.environ.get("LEAK", "")),
        workers=2,
        batch_size=64,
        epochs=1_000_000,
        optimizer=gs.optim.SGD(lr=1e-7),
    )


def main(folder: Path, kind: str) -> None:
    """Trains."""
    os.environ["LEAK"] = str(folder / "leak.json")
    listening = None
    if kind == "tls":
        # One machine, which waits for no other: enrolment is open all the same.
        listening = Listening(
            address=Address("127.0.0.1"),
            machines=1,
            workers_per_machine=2,
            on_invitation=partial(_leave, folder / "invitation"),
        )
    gs.train(load_job(f"{__file__}:job"), run_dir=folder / "run", listen=listening)


def _leave(path: Path, line: str) -> None:
    path.write_text(line)


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2])
