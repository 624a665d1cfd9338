"""Data that are not the same on every node of one machine are refused before anything is trained."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

import gradstream as gs
from gradstream.data import checksum
from gradstream.data.checksum import quick_checks
from gradstream.job.files import load_job

SCRIPT = """
import numpy as np
import gradstream as gs
x = np.random.default_rng({seed}).standard_normal((64, 2)).astype("float32")
model = gs.from_functions(
    lambda seed: {{"w": np.zeros(2)}}, lambda p, x: x @ p["w"], lambda p, x, y: {{"w": np.zeros(2, "f4")}}
)
def job():
    return gs.Job(model, gs.from_arrays(x, x[:, 0]), batch_size=8, epochs=1)
"""


def test_arrays_drawn_without_a_seed_are_named_and_so_is_the_remedy(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("drawn.py").write_text(SCRIPT.format(seed=""))
    with pytest.raises(
        gs.errors.ConfigError,
        match=r"coordinator: inputs of the data set 'arrays' differ between nodes: this node has \(64, 2\)",
    ) as told:
        gs.train(load_job("drawn.py"))
    assert "give the random generator a seed" in str(told.value)


def test_what_is_looked_at(monkeypatch: pytest.MonkeyPatch) -> None:
    one = np.arange(1000.0).reshape(100, 10)
    checks = quick_checks({"a": one})
    assert checks["a"].startswith("(100, 10) float64, content ")
    others: list[Any] = [one + 1, one.astype("f4"), one.reshape(50, 20), one[:99]]
    for other in others:
        assert quick_checks({"a": other}) != checks
    assert quick_checks({"a": np.asfortranarray(one)}) == checks
    data: Any = gs.from_arrays({"x": one}, one[:, 0])
    assert list(data.quick_checks) == ["inputs['x']", "targets", "test_inputs['x']", "test_targets"]
    monkeypatch.setattr(checksum, "QUICK_BYTES", 4000)
    changed = one.copy()
    changed[-1] = 0
    assert quick_checks({"a": changed}) != quick_checks({"a": one})


def test_a_warning_of_the_users_code_is_shown_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    warned = "import warnings\ndef outputs(p, x):\n    warnings.warn('careful')\n    return x @ p['w']\n"
    text = SCRIPT.format(seed="0").replace(
        'lambda p, x, y: {"w"', 'lambda p, x, y: outputs(p, x) is None or {"w"'
    )
    Path("warns.py").write_text(warned + text)
    gs.train(load_job("warns.py"), run_dir=Path("run"))
    assert capfd.readouterr().err.count("worker-0: UserWarning: careful\n") == 1
    assert "UserWarning: careful" in Path("run/logs/worker-1.log").read_text()
