"""`gradstream new`: each template runs as it is written."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

import gradstream as gs
from gradstream.cli import main
from gradstream.job.files import load_job


def call(*arguments: str) -> Result:
    return CliRunner().invoke(main, arguments)


@pytest.mark.parametrize("kind", ["numpy", "torch", "jax"])
def test_a_template_runs_as_it_is(kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if kind == "jax" and importlib.util.find_spec("jax") is None:
        pytest.skip("jax is not installed (extra `jax`)")
    monkeypatch.chdir(tmp_path)
    result = call("new", "mine", f"--{kind}")
    assert result.exit_code == 0, result.output
    assert result.stdout == "mine.py is written. Now: gradstream train mine.py\n"
    text = Path("mine.py").read_text()
    assert "{" not in text.split("import gradstream")[0]
    job = load_job("mine.py")
    assert job.spec == str(tmp_path / "mine.py")
    evaluation = gs.simulate(job, epochs=1).evaluate()
    assert evaluation.accuracy is not None
    assert evaluation.accuracy > 0.7, f"{evaluation.accuracy:.0%} of 1,000 test images after one epoch"


def test_nothing_is_overwritten(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("mine.py").write_text("precious")
    result = call("new", "mine.py")
    assert result.exit_code == 2
    assert result.stderr == "error: mine.py is not written: File exists\n"
    assert Path("mine.py").read_text() == "precious"
    result = call("new", "not-a-name")
    assert result.exit_code == 2
    assert "letters, digits and _" in result.stderr
