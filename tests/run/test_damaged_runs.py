"""Real processes over plain TCP on a wire that flips a bit: the model has the bits of a run without."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

import gradstream as gs
from gradstream.job.files import load_job

JOB = """
import os
import socket
from pathlib import Path
import numpy as np
import gradstream as gs
from gradstream.transport.endpoint import EndpointCore

rng = np.random.default_rng(0)
X = rng.standard_normal((240, 300)).astype("float32")
Y = X @ rng.standard_normal(300).astype("float32")
FLIP, sent = Path(__file__).with_name("flip"), 0

class Flipping(socket.socket):
    # Whichever process is the first to send this number of payloads damages one, behind its checksum.
    def sendmsg(self, buffers, *more):
        global sent
        buffers = list(buffers)
        if self.family == socket.AF_INET and len(buffers[-1]) > 400:
            sent += 1
            if sent > 20 and FLIP.exists():
                try:
                    FLIP.unlink()
                except OSError:
                    return super().sendmsg(buffers, *more)
                damaged = bytearray(buffers[-1])
                damaged[100] ^= 4
                buffers[-1] = bytes(damaged)
        return super().sendmsg(buffers, *more)

if os.getpid() != {test}:  # in nodes alone
    EndpointCore.leaves_machine = staticmethod(lambda own, peer: True)  # so that loopback has checksums
    socket.socket = Flipping

def job():
    model = gs.from_functions(
        init=lambda seed: {{"w": np.zeros(300)}},
        outputs=lambda p, x: x @ p["w"],
        gradients=lambda p, x, y: {{"w": 2 / len(y) * (x @ p["w"] - y) @ x}},
    )
    return gs.Job(
        model, gs.from_arrays(X, Y), strategy={strategy}, workers=2, batch_size=8, steps=40, carrier="tcp",
        chunk_elems=128, optimizer=gs.optim.SGD(lr=0.01), deadlines=gs.Deadlines(lease_s=1.5, silence_s=3.0),
        checkpoint_every=None,
    )
"""


@pytest.mark.parametrize("strategy", ["gs.Synchronous()", 'gs.AllReduce(algorithm="ring")'])
def test_a_bit_that_is_flipped_changes_no_bit_of_the_model(strategy: str, tmp_path: Path) -> None:
    """A push, or a fetch, is sent again. A group ends the operation, forms again, and does the round again."""
    path, flip = tmp_path / "linear.py", tmp_path / "flip"
    path.write_text(JOB.format(strategy=strategy, test=os.getpid()))
    found: list[tuple[bytes, list[Any]]] = []
    for is_damaged in (False, True):
        if is_damaged:
            flip.touch()
        damages: list[Any] = []

        def note(event: Any, damages: list[Any] = damages) -> None:
            if event["event"] == "damaged":
                damages.append(event)

        run = gs.train(load_job(f"{path}:job"), run_dir=tmp_path / f"run-{is_damaged}", on_event=note)
        assert not run.summary["workers_lost"]
        found.append((run.parameters["w"].tobytes(), damages))
    (expected, none), (got, damages) = found
    assert not flip.exists() and not none
    assert [event["size_bytes"] >= 400 for event in damages] == [True], damages
    assert got == expected
