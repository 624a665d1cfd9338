"""Sharpness and surfaces: known values, Keskar's acceptance check, and real processes."""

import json
import os
import subprocess
import sys
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from click.testing import CliRunner

import gradstream as gs
from gradstream.cli import main
from gradstream.errors import ConfigError
from gradstream.ext.analysis import FullLoss, sharpness, surface
from gradstream.ext.analysis import sharpness as sharpness_of

H = np.array([0.5, 1.0, 2.0, 4.0, 8.0, 16.0])


def quadratic(y: Any, h: Any = H) -> tuple[float, Any]:
    """½ yᵀ diag(h) y, and its gradient."""
    return float(0.5 * y @ (h * y)), h * y


@pytest.mark.parametrize("epsilon", [1e-3, 5e-4, 0.1])
def test_a_quadratic_has_the_sharpness_of_its_trace(epsilon: float) -> None:
    found = sharpness(quadratic, np.zeros(6), epsilon=epsilon)
    assert found.value == pytest.approx(100 * 0.5 * epsilon**2 * H.sum(), rel=0.01)
    assert found.loss == 0.0 and found.passes <= 25


def test_the_box_is_wider_where_parameters_are_larger() -> None:
    x = np.array([3.0, 0.0])
    found = sharpness(lambda y: quadratic(y - x, np.ones(2)), x, epsilon=0.01)
    assert found.value == pytest.approx(100 * 0.5 * 0.01**2 * (4.0**2 + 1.0), rel=0.01)


def test_a_subspace_has_the_sharpness_of_its_corners() -> None:
    x, p, seed = np.zeros(6), 2, 3
    found = sharpness(quadratic, x, epsilon=0.1, subspace=p, seed=seed)
    directions = np.random.default_rng(seed).standard_normal((6, p))
    corners = [0.1 * np.array([a, b]) for a in (-1, 1) for b in (-1, 1)]
    assert found.value == pytest.approx(100 * max(quadratic(directions @ c)[0] for c in corners), rel=1e-6)


def test_a_sharper_minimum_has_more() -> None:
    flat, sharp = (sharpness(partial(quadratic, h=by * H), np.zeros(6)) for by in (1.0, 100.0))
    assert sharp.value == pytest.approx(100 * flat.value, rel=0.02)


def test_a_search_from_the_minimum_itself_would_find_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """The gradient is 0 there: a planted fault that the check by the trace finds."""

    class Still:
        def uniform(self, low: Any, high: Any) -> Any:
            return np.zeros_like(high)

    monkeypatch.setattr(np.random, "default_rng", lambda seed: Still())
    assert sharpness(quadratic, np.zeros(6)).value == 0.0


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"epsilon": 0.0}, "epsilon is a size of a box, > 0; got 0.0"),
        ({"subspace": 7}, r"1 to 6 directions \(the model's parameters\); got 7"),
    ],
)
def test_bad_arguments_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        sharpness(quadratic, np.zeros(6), **options)


def test_too_little_memory_is_refused_with_a_number_that_fits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys.modules[sharpness_of.__module__], "free_memory_bytes", lambda: 8 * 6 * 9)
    with pytest.raises(ConfigError, match=r"take 5 directions \(subspace\)"):
        sharpness(quadratic, np.zeros(6))
    assert sharpness(quadratic, np.zeros(6), subspace=5).value > 0


def trained() -> tuple[Any, Any]:
    torch.manual_seed(1)
    model = gs.from_torch(
        lambda: torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.BatchNorm1d(4), torch.nn.Linear(4, 2)),
        torch.nn.functional.cross_entropy,
    )
    inputs = torch.randn(600, 3)
    return model, gs.from_arrays(inputs.numpy(), (inputs.sum(1) > 0).long().numpy())


def test_the_full_loss_is_the_mean_over_all_samples_and_leaves_the_model_as_it_is() -> None:
    model, data = trained()
    flat = torch.empty(model.layout.elems)
    model.init(0, flat)
    buffers = {name: value.copy() for name, value in model.buffers().items()}
    x = flat.double().numpy()
    value, gradient = FullLoss(model, data, batch_size=250)(x)
    expected, losses = torch.zeros(x.size, dtype=torch.float64), []
    for ids in np.array_split(np.arange(600), 3):
        part = torch.empty_like(flat)
        losses.append(model.gradient(flat, data.batch(ids), part, seed=0, report=lambda n: None))
        expected += part.double() / 3
    assert value == pytest.approx(np.mean(losses), rel=1e-6)
    np.testing.assert_allclose(gradient, expected.numpy(), atol=1e-7)
    model.load_buffers(buffers)
    again = FullLoss(model, data, batch_size=250)
    assert again(x)[0] == value
    assert all(np.array_equal(model.buffers()[name], kept) for name, kept in buffers.items())


def test_a_stream_is_refused() -> None:
    model, _ = trained()

    class Stream:
        name, num_samples = "endless", None

    with pytest.raises(ConfigError, match="endless has no samples that can be read again by their ids"):
        FullLoss(model, Stream())  # type: ignore[arg-type]


def test_the_line_goes_through_both_runs() -> None:
    a, b = np.zeros(6), np.ones(6)
    found = surface(quadratic, [a, b], points=7)
    np.testing.assert_allclose(found.losses, found.axes[0] ** 2 * quadratic(b)[0])


def test_the_plane_goes_through_all_three_runs() -> None:
    a, b, c = np.zeros(6), np.eye(6)[0] * 2, np.array([1.0, 0.0, 3.0, 0.0, 0.0, 0.0])
    found = surface(quadratic, [a, b, c], points=4)
    np.testing.assert_allclose(found.points, [[0, 0], [2, 0], [1, 3]])
    for i, u in enumerate(found.axes[0]):
        for j, v in enumerate(found.axes[1]):
            at = np.array([u, 0.0, v, 0.0, 0.0, 0.0])
            assert found.losses[i, j] == pytest.approx(quadratic(at)[0])


@pytest.mark.parametrize(
    ("runs", "message"),
    [
        ([np.zeros(2)], "a line takes 2 runs and a plane 3; got 1"),
        ([np.zeros(2), np.zeros(2)], "the same parameters"),
        ([np.zeros(2), np.zeros(3)], "runs of one model; got runs of 2, 3 parameters"),
        ([np.zeros(2), np.ones(2), 2 * np.ones(2)], "on one line"),
    ],
)
def test_runs_that_span_nothing_are_refused(runs: list[Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        surface(lambda y: (0.0, y), runs)


JOB = """
import numpy as np
import gradstream as gs


def job():
    rng = np.random.default_rng(0)
    x = rng.standard_normal((300, 3)).astype(np.float32)
    model = gs.from_torch(lambda: __import__("torch").nn.Linear(3, 1), __import__("torch").nn.functional.mse_loss)
    return gs.Job(model, gs.from_arrays(x, x.sum(1, keepdims=True)), workers=1, epochs=1, batch_size=32, **OPTIONS)
"""


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Two runs of one job, with different seeds."""
    folder = tmp_path_factory.mktemp("runs")
    for seed in (0, 1):
        file, run = folder / f"job{seed}.py", str(folder / f"run{seed}")
        file.write_text(JOB.replace("**OPTIONS", f"seed={seed}, run_dir={run!r}"))
        result = CliRunner().invoke(main, ["train", str(file)])
        assert result.exit_code == 0, result.output
    return [folder / "run0", folder / "run1"]


def test_two_processes_find_what_one_finds(runs: list[Path], capfd: pytest.CaptureFixture[str]) -> None:
    one, two = (
        CliRunner().invoke(main, ["sharpness", str(runs[0]), "--json", "--workers", number])
        for number in ("1", "2")
    )
    first, second = json.loads(one.output), json.loads(two.output)
    assert [found["epsilon"] for found in first] == [1e-3, 5e-4]
    for a, b in zip(first, second, strict=True):
        assert b["value"] == pytest.approx(a["value"], rel=1e-3) and a["value"] > 0
    assert (
        "terminate called" not in capfd.readouterr().err
    )  # of the second process, which ends beside the first


def test_the_command_draws_a_line(runs: list[Path], tmp_path: Path) -> None:
    output = tmp_path / "line.svg"
    words = ["surface", *map(str, runs), "--points", "4", "--output", str(output), "--json", "--workers", "2"]
    result = CliRunner().invoke(main, words)
    found = json.loads(result.output)
    assert found["axes"] == [[-1.0, 0.0, 1.0, 2.0]] and len(found["losses"]) == 4
    assert "<svg" in output.read_text()


@pytest.mark.parametrize(("output", "says"), [("line.foo", "ends with .png"), ("none/line.svg", "no folder")])
def test_a_plot_that_cannot_be_written_is_refused_before_any_pass(
    runs: list[Path], tmp_path: Path, output: str, says: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(FullLoss, "__call__", None)
    result = CliRunner().invoke(main, ["surface", *map(str, runs), "--output", str(tmp_path / output)])
    assert result.exit_code == 2 and says in result.stderr


def test_a_run_that_is_not_there_is_named(runs: list[Path], tmp_path: Path) -> None:
    result = CliRunner().invoke(
        main, ["surface", str(runs[0]), str(tmp_path), "--output", str(tmp_path / "a.png")]
    )
    assert f"{tmp_path} is not a run directory" in " ".join(result.stderr.split())


def test_a_lost_process_is_an_error_that_says_so(runs: list[Path], monkeypatch: pytest.MonkeyPatch) -> None:
    started: list[subprocess.Popen[bytes]] = []

    class Doomed(subprocess.Popen):  # type: ignore[type-arg]
        def __init__(self, *args: Any, **options: Any) -> None:
            super().__init__(*args, **options)
            started.append(self)

    monkeypatch.setattr(subprocess, "Popen", Doomed)

    def kill(loss: Any, x: Any, **options: Any) -> Any:
        started[0].kill()
        started[0].wait()
        return loss(x)

    monkeypatch.setattr(sys.modules["gradstream.ext.analysis.sharpness"], "sharpness", kill)
    result = CliRunner().invoke(main, ["sharpness", str(runs[0]), "--workers", "2"])
    assert result.exit_code == 4
    assert "a process of the evaluation" in result.stderr and "run the command again" in result.stderr


def test_torchruns_processes_are_the_workers(runs: list[Path]) -> None:
    command = ["-m", "torch.distributed.run", "--nproc-per-node", "2", "--master-port", "0", "--standalone"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    told = subprocess.run(
        [sys.executable, *command, "-m", "gradstream", "sharpness", str(runs[0]), "--json", "--epsilon", "1e-3"],
        capture_output=True, text=True, check=True, env=environment, timeout=120,
    )  # fmt: skip
    (found,) = json.loads(told.stdout)
    alone = CliRunner().invoke(main, ["sharpness", str(runs[0]), "--json", "--epsilon", "1e-3"])
    assert found["value"] == pytest.approx(json.loads(alone.output)[0]["value"], rel=1e-3)
