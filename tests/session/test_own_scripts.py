"""Scripts that somebody would have, of examples/own_loop, on several workers: torch's own numbers.

Where a loss is a mean over samples, W workers are one process with W times the batch. Where it sees the
samples of a worker together (BatchNorm), or a worker draws random numbers of its own, they are torch's
DistributedDataParallel, over gloo, of the same script with the same minibatches.
"""

from __future__ import annotations

import difflib
import json
import logging
import multiprocessing
import os
import shlex
import subprocess
import sys
import threading
import types
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import nn
from torch._dynamo.testing import CompileCounterWithBackend
from torch.multiprocessing.spawn import start_processes
from torch.nn.parallel import DistributedDataParallel

import gradstream as gs
from gradstream.session.loaders import part_of
from gradstream.session.loaders_part import LoaderPart
from gradstream.session.samples import BeforeForward, SampleCount
from gradstream.testing.sessions import loop_in_threads

SCRIPTS = Path(__file__).resolve().parents[2] / "examples" / "own_loop"
NAMES = ["gpt", "resnet", "gan", "dqn", "ema", "train_pictures", "train_names"]
State = dict[str, torch.Tensor]

making = threading.Lock()
"""Held from a script's begin to its `wrap`: workers that are threads share torch's global generator."""


class Watched:
    """A session that keeps what the script trains, and what it prints."""

    def __init__(self, session: Any) -> None:
        self._session = session
        self.modules: list[nn.Module] = []
        self.said: list[str] = []

    def wrap(self, model: Any, optimizer: Any) -> Any:
        making.release()
        wrapped = self._session.wrap(model, optimizer)
        self.modules = list(wrapped[0]) if isinstance(model, tuple) else [wrapped[0]]
        return wrapped

    def __getattr__(self, name: str) -> Any:
        return getattr(self._session, name)

    def say(self, *words: object, sep: str = " ") -> None:
        self.said.append(sep.join(map(str, words)))

    def state(self) -> State:
        return {
            f"{number}.{name}": value.detach().clone()
            for number, module in enumerate(self.modules)
            for name, value in module.state_dict().items()
        }


def play(name: str, session: Any) -> Watched:
    """Runs a script with five lines more, in this thread; its arguments are in `sys.argv`."""
    torch.set_num_threads(1)
    watched = Watched(session)
    body = (SCRIPTS / f"{name}.py").read_text().replace("gradstream.join()", "joined")
    module = types.ModuleType(f"own_script_{watched.rank}")  # to be found by what compiles its functions
    sys.modules[module.__name__] = module
    names = vars(module)
    names |= {"joined": watched, "print": watched.say}
    if "__main__" in body:
        names["__name__"] = "__main__"
    making.acquire()
    try:
        exec(compile(body, f"{name}.py", "exec"), names)
    finally:
        if not watched.modules and making.locked():
            making.release()
    watched.close()
    return watched


@contextmanager
def called(words: str, dtype: torch.dtype = torch.float64) -> Iterator[None]:
    """Numbers are of `dtype` inside; `sys.argv` is what a shell would make of the words."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("sys.argv", ["script.py", *shlex.split(words)])
        torch.set_default_dtype(dtype)
        try:
            yield
        finally:
            torch.set_default_dtype(torch.float32)


@pytest.fixture(autouse=True)
def _elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Scripts write where they are called, and set up logging."""
    monkeypatch.chdir(tmp_path)
    handlers, level = logging.root.handlers[:], logging.root.level
    yield
    logging.root.handlers[:] = handlers
    logging.root.setLevel(level)


def check(got: State, expected: State, tolerance: float) -> None:
    assert got.keys() == expected.keys()
    for name, value in expected.items():
        torch.testing.assert_close(got[name], value, rtol=tolerance, atol=tolerance)


# ---- five lines --------------------------------------------------------------------------


@pytest.mark.parametrize("name", NAMES)
def test_a_script_differs_by_five_lines(name: str) -> None:
    before, after = ((SCRIPTS / f"{name}{end}.py").read_text().splitlines() for end in ("_before", ""))
    lines = [line for line in difflib.ndiff(before, after) if line[2:].strip()]
    added = [line for line in lines if line.startswith("+ ")]
    removed = [line for line in lines if line.startswith("- ")]
    assert len(added) == 5
    assert len(removed) <= 2  # those that two of the five stand for
    assert all("gradstream" in line or "session" in line for line in added)


# ---- the joined batch --------------------------------------------------------------------

PICTURES = "--train-samples 100 --test-samples 50 --dropout 0"
JOINED = {
    "gpt": ("gpt", "--precision full --batch-size {}", 4, torch.float64, 1e-12),
    "ema": ("ema", "--epochs 2 --batch-size {}", 8, torch.float64, 1e-12),
    "ema-32": ("ema", "--epochs 2 --batch-size {}", 8, torch.float32, 1e-6),
    "pictures": ("train_pictures", PICTURES + " --batch-size {}", 8, torch.float64, 1e-12),
    "names": ("train_names", "--words 120 --dropout 0 --layers 1 --batch-size {}", 8, torch.float64, 1e-12),
}


@pytest.mark.parametrize(
    ("case", "workers", "strategy"),
    [
        ("gpt", 2, "allreduce"),
        ("ema", 3, "allreduce"),
        ("ema-32", 2, "synchronous"),
        ("pictures", 2, "synchronous"),
        ("names", 3, "synchronous"),
    ],
)
def test_workers_are_one_process_with_their_batches_joined(case: str, workers: int, strategy: str) -> None:
    name, words, batch, dtype, tolerance = JOINED[case]
    with called(words.format(workers * batch), dtype):
        alone = play(name, gs.Session())
    with called(words.format(batch), dtype):
        all_of = loop_in_threads(partial(play, name), workers, strategy=strategy)
    for watched in all_of:
        check(watched.state(), alone.state(), tolerance)
        check(watched.state(), all_of[0].state(), 0.0)


def test_a_scripts_own_checkpoint_is_gone_on_from() -> None:
    def run(words: str) -> State:
        with called(f"{PICTURES} {words}"):
            first, second = loop_in_threads(partial(play, "train_pictures"))
        check(first.state(), second.state(), 0.0)
        return first.state()

    whole = run("--epochs 3 --output whole")
    run("--epochs 2 --output cut")
    check(run("--epochs 3 --output rest --resume cut/0/checkpoint.pt"), whole, 0.0)


# ---- DistributedDataParallel -------------------------------------------------------------

UNCOMPILED = "--backend aot_eager", "--no-compile"
DROPOUT = "--train-samples 96 --test-samples 50 --batch-size 16"
DDP = {  # arguments, dtype, and how far three workers are off, where a third is rounded
    "resnet": ("--samples 96 --epochs 1 --backend aot_eager", torch.float64, 1e-12),
    "gan": ("", torch.float64, 1e-12),
    "dqn": ("--steps 80 --learning-starts 40 --target-every 15", torch.float64, 1e-12),
    "dqn --target-every 0": ("--steps 60 --learning-starts 40", torch.float64, 1e-12),
    "gpt --precision autocast": ("", torch.float32, 1e-3),
    "gpt --precision bfloat16": ("", torch.float32, 2e-2),
    "train_pictures": (DROPOUT, torch.float32, 1e-5),
}
GROUPS = [*((case, 2) for case in DDP), ("resnet", 3), ("gan", 3)]
"""What torch trains, and by how many workers. By three, what is cheap, and normalised over the samples."""


class Parallel(DistributedDataParallel):
    """Has the names of what it wraps, as the scripts expect."""

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        return self.module.state_dict(*args, **kwargs)


class TorchSession:
    """What a session is to a script, by torch's own means. Deals the same minibatches."""

    def __init__(self, rank: int, world_size: int, group: Any) -> None:
        self.rank = rank
        self._world_size = world_size
        self._group = group

    def shard(self, data: Any) -> Any:
        return part_of(data, LoaderPart(self.rank, self._world_size, 0, False, lambda _: None, aligned=True))

    def wrap(self, model: Any, optimizer: Any) -> Any:
        if isinstance(model, tuple):
            return tuple(self.wrap(one, None)[0] for one in model), optimizer
        return Parallel(model, process_group=self._group, broadcast_buffers=False), optimizer

    def close(self) -> None:
        pass


def torchs(rank: int, folder: str) -> None:
    """One of three processes; the first two make the runs of two workers."""
    os.chdir(folder)
    dist = torch.distributed
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=3)
    for size in (2, 3):
        group = dist.new_group(list(range(size)))
        for case, (words, dtype, _) in DDP.items():
            if rank < size and (case, size) in GROUPS:
                name, _, option = case.partition(" ")
                with called(f"{option} {words}".replace(*UNCOMPILED), dtype):
                    watched = play(name, TorchSession(rank, size, group))
                said = {"said": json.dumps(watched.said)}
                save_file(watched.state(), f"{case}-{size}-{rank}.safetensors", said)
    dist.barrier()
    dist.destroy_process_group()


@pytest.fixture(scope="module")
def ddp(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str, int], tuple[State, list[list[str]]]]:
    """Gives what DistributedDataParallel trains, and what each worker says; of buffers the workers' mean."""
    folder = tmp_path_factory.mktemp("ddp")
    multiprocessing.set_forkserver_preload(["torch._dynamo", "gradstream.testing.sessions"])  # read in once
    start_processes(torchs, (str(folder),), nprocs=3, start_method="forkserver")  # type: ignore[no-untyped-call]

    def given(case: str, size: int) -> tuple[State, list[list[str]]]:
        files: list[Any] = [
            safe_open(folder / f"{case}-{size}-{rank}.safetensors", "pt") for rank in range(size)
        ]
        said = [json.loads(file.metadata()["said"]) for file in files]
        state = {}
        for name in files[0].keys():  # noqa: SIM118  # no mapping
            values = torch.stack([file.get_tensor(name) for file in files])
            state[name] = values.double().mean(0).to(values.dtype)
        return state, said

    return given


@pytest.mark.parametrize(("case", "workers"), [one for one in GROUPS if one[0] != "train_pictures"])
def test_workers_are_those_of_torchs_own(case: str, workers: int, ddp: Any) -> None:
    (words, dtype, tolerance), (name, _, option) = DDP[case], case.partition(" ")
    if workers == 3:
        words = words.replace(*UNCOMPILED)  # compiling takes long
    with called(f"{option} {words}", dtype):
        all_of = loop_in_threads(partial(play, name), workers)
    expected, said = ddp(case, workers)
    for watched in all_of:
        check(watched.state(), expected, tolerance if workers == 3 else 1e-12)
        check(watched.state(), all_of[0].state(), 0.0)
    if dtype == torch.float64:
        assert [watched.said for watched in all_of] == said


def test_processes_draw_the_random_numbers_that_they_would_draw(ddp: Any, tmp_path: Path) -> None:
    """Dropout, from torch's global generator."""
    body = (SCRIPTS / "train_pictures.py").read_text()
    script = tmp_path / "script.py"
    script.write_text(body.replace("parse_args()", f"parse_args({shlex.split(DROPOUT)})"))
    words = [sys.executable, "-m", "gradstream", "train", str(script), "--strategy", "synchronous"]
    environment = {**os.environ, "PYTHONPATH": str(SCRIPTS.parents[1] / "src"), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [*words, "--workers", "2"], env=environment, capture_output=True, text=True, check=False, timeout=100
    )
    assert done.returncode == 0, done.stderr[-3000:]
    for rank in range(2):
        path = tmp_path / "pictures" / str(rank) / "checkpoint.pt"
        state = torch.load(path, weights_only=True)["model"]
        check({f"0.{name}": value for name, value in state.items()}, ddp("train_pictures", 2)[0], 1e-12)


def test_a_compiled_model_is_compiled_once_whatever_a_session_counts() -> None:
    seen, graphs = SampleCount(), CompileCounterWithBackend("eager")
    model = nn.Linear(4, 2)
    model.register_forward_pre_hook(BeforeForward(seen.forward), with_kwargs=True)
    compiled = torch.compile(model, backend=graphs)
    counted = []
    for number in range(10):
        for _ in range(1 + number % 2):
            compiled(torch.ones(5, 4))
        counted.append(seen.take())
    assert counted == [5, 10] * 5
    assert graphs.frame_count == 1
