"""The demo learns, without network and data of one's own."""

from __future__ import annotations

import numpy as np

import gradstream as gs
from gradstream.job.files import load_job


def test_the_loss_of_the_demo_falls() -> None:
    run = gs.simulate(load_job("gradstream.cli.demo_job:job"), epochs=None, steps=60)
    losses = [row["loss"] for row in run.history]
    assert np.mean(losses[-20:]) < 0.7 * np.mean(losses[:20])  # 1.07 and 2.13
