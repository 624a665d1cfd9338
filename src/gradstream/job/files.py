"""Loads job files: every node of a run makes the job from them, and nothing is pickled.

A spec names a job: "module:function", "file.py:function", or "file.py". A file of the last kind defines
`job()`, or is a script that calls `gradstream.train(...)`. Such a script runs under another name, and the
first call that would start a run yields the job instead. If the script guards that call with
`if __name__ == "__main__"`, it runs once more under that name.

A script may start several runs, one after the other. Nodes of a later run get the run directories of the
earlier ones, and the calls that made those return them.
"""

from __future__ import annotations

import dataclasses
import importlib
import inspect
import os
import sys
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import TypeAlias, cast

from gradstream.errors import ConfigError, GradstreamError, UnknownNameError, UserCodeError
from gradstream.job.code import load_module, where_it_lies
from gradstream.job.job import Job
from gradstream.job.sources import file_of, sha256_of, working_directory
from gradstream.model.base import Model

Asked: TypeAlias = Model | Callable[[], Model] | Job | Callable[[], Job]
"""The first argument of `train` and `simulate`."""

JOB_MODULE = "__gradstream_job__"
"""The `__name__` under which a node runs a job file."""


class _Captured(BaseException):
    """Raised by `train` in a script that is only read for its job: ends the script, and carries the job.

    It derives from BaseException, so that an `except Exception` in the script does not catch it.

    Args:
        job: the job that the script passed to `train`.
    """

    def __init__(self, job: Job) -> None:
        super().__init__()
        self.job = job


@dataclasses.dataclass(slots=True)
class _Reading:
    """State while a job file is read up to the call that starts its run."""

    earlier: list[Path]  # directories of runs that are over
    simulated: bool  # whether to stop at a simulation, too


_reading: _Reading | None = None


def intercept(job: Job, *, simulated: bool = False) -> Path | None:
    """Called first by every function that starts runs: ends the job file if it is only read for its job.

    Args:
        job: the job of the call.
        simulated: whether the run is a simulation. A node of a real run does not stop reading at a
            simulation, but repeats it.

    Returns:
        None to start the run; or the directory of this call's run, to be loaded instead.

    Raises:
        BaseException: a private one, if the file is only read for its job.
    """
    if _reading is None or (simulated and not _reading.simulated):
        return None
    if _reading.earlier:
        return _reading.earlier.pop(0)
    raise _Captured(job)


@contextmanager
def _capturing(earlier: Sequence[Path] | None) -> Iterator[None]:
    global _reading
    before, _reading = _reading, _Reading(list(earlier or ()), simulated=earlier is None)
    try:
        yield
    finally:
        _reading = before


@contextmanager
def _command_line(argv: Sequence[str]) -> Iterator[None]:
    before, sys.argv = sys.argv, list(argv)
    try:
        yield
    finally:
        sys.argv = before


def load_job(spec: str, *, earlier: Sequence[Path] | None = None, argv: Sequence[str] | None = None) -> Job:
    """Loads the job that a spec names.

    Args:
        spec: "file.py", "file.py:function" or "module:function".
        earlier: run directories of the runs that the script makes before this one; passed by nodes.
        argv: `sys.argv` for the file, here and on the nodes of its run; None takes that of this process.

    Raises:
        ConfigError: there is no such file or function, or it does not make a job.
        UserCodeError: the file raised an error.
    """
    argv, cwd = tuple(sys.argv if argv is None else argv), working_directory()
    place, colon, function = spec.rpartition(":")
    if not colon:
        place, function = spec, ""
    with _command_line(argv):
        if place.endswith(".py"):
            path = Path(place).resolve()
            place = str(path)
            job = _from_file(path, function, earlier)
        else:
            job = _from_module(spec, place, function)
    return dataclasses.replace(job, spec=f"{place}:{function}" if function else place, argv=argv, cwd=cwd)


def digest_of(spec: str) -> str:
    """SHA-256 of the file that a job's spec names, without the modules it imports; "" if there is none."""
    try:
        file = file_of(spec)
        return "" if file is None else sha256_of(file)
    except (OSError, ImportError):
        return ""


def _from_module(spec: str, place: str, function: str) -> Job:
    if not function:
        raise ConfigError(f"job {spec!r}: expected file.py, file.py:function or module:function")
    try:
        module = importlib.import_module(place)
    except ModuleNotFoundError as error:
        raise ConfigError(f"job {spec!r}: {error}{where_it_lies(spec, place, error)}") from error
    return _call(module, function, spec)


def _from_file(path: Path, function: str, earlier: Sequence[Path] | None) -> Job:
    sys.modules.pop(JOB_MODULE, None)
    try:
        with _capturing(earlier):
            module = _read(path, JOB_MODULE)
    except _Captured as captured:
        return captured.job
    if function:
        return _call(module, function, f"{path}:{function}")
    if hasattr(module, "job"):
        return _call(module, "job", str(path))
    if "__main__" in path.read_text(encoding="utf-8", errors="replace"):
        return _from_guarded(path, earlier)
    raise _no_job(path)


ALONE = {
    "RANK": "0",
    "LOCAL_RANK": "0",
    "WORLD_SIZE": "1",
    "LOCAL_WORLD_SIZE": "1",
    "MASTER_ADDR": "127.0.0.1",
    "MASTER_PORT": "0",
}


@contextmanager
def _as_lone_rank() -> Iterator[None]:
    """Lets a script that makes a process group before it calls `train` be the only rank of that group."""
    if "RANK" in os.environ:
        yield
        return
    before = {name: os.environ.get(name) for name in ALONE}
    os.environ.update(ALONE)
    try:
        yield
    finally:
        for name, value in before.items():
            os.environ.pop(name, None)
            if value is not None:
                os.environ[name] = value
        made = sys.modules.get("torch.distributed")
        if made is not None and made.is_available() and made.is_initialized():
            made.destroy_process_group()


def _read(path: Path, name: str) -> ModuleType:
    """Runs a job file. If it fails, raises UserCodeError with the user's part of the traceback."""
    try:
        with _as_lone_rank():
            return load_module(path, name)
    except GradstreamError:
        raise
    except Exception as error:
        raise UserCodeError(f"{path}: {type(error).__name__}: {error}", traceback_in(path, error)) from error


def traceback_in(path: Path, error: BaseException) -> str:
    """The traceback of an error, beginning at the first line of this file."""
    trace = error.__traceback__
    while trace is not None and trace.tb_frame.f_code.co_filename != str(path):
        trace = trace.tb_next
    return "".join(traceback.format_exception(type(error), error, trace))


def _from_guarded(path: Path, earlier: Sequence[Path] | None) -> Job:
    main = sys.modules.get("__main__")
    sys.modules.pop("__main__", None)
    try:
        with _capturing(earlier):
            _read(path, "__main__")
    except _Captured as captured:
        # The job keeps the module alive that defines its classes.
        return captured.job
    finally:
        if main is not None:
            sys.modules["__main__"] = main
    raise _no_job(path)


def _no_job(path: Path) -> ConfigError:
    return ConfigError(
        f"{path}: expected a function job(), a call of gradstream.train(...), or a training loop that calls "
        "gradstream.join(); found none of them. The script has run to its end, on this machine alone"
    )


def _call(module: ModuleType, function: str, spec: str) -> Job:
    maker = getattr(module, function, None)
    if not callable(maker):
        here = [name for name, value in vars(module).items() if inspect.isfunction(value)]
        raise UnknownNameError(f"function of {module.__file__ or module.__name__}", function, here)
    try:
        job = maker()
    except GradstreamError:
        raise
    except Exception as error:
        text = traceback_in(Path(str(module.__file__)), error)
        raise UserCodeError(f"{spec}: {type(error).__name__}: {error}", text) from error
    if not isinstance(job, Job):
        raise ConfigError(
            f"job {spec!r}: {function}() returned {type(job).__name__}; expected a gradstream.Job"
        )
    return job


def job_of(model: Asked, data: object) -> Model | Callable[[], Model] | Job:
    """The job that `model` returns if it is a function of a job and there is no data; otherwise `model` itself.

    If `model` is a function of a module, other processes find it too, even if a notebook imported it.

    Raises:
        ConfigError: the function does not return a job.
    """
    if data is not None or not inspect.isfunction(model):
        return cast("Model | Job", model)
    name, module = model.__qualname__, sys.modules.get(model.__module__)
    job = model()
    if not isinstance(job, Job):
        raise ConfigError(
            f"{name}() returned {type(job).__name__}; expected a gradstream.Job, or give data too"
        )
    if module is None or module.__name__.startswith("__") or getattr(module, name, None) is not model:
        return job
    place = str(module.__file__) if module.__name__.startswith("_gradstream_") else module.__name__
    return dataclasses.replace(job, spec=f"{place}:{name}")


def script_of_caller() -> str:
    """The file of the running script, which its nodes read.

    Raises:
        ConfigError: there is none, as in a notebook or at a prompt.
    """
    main = sys.modules.get("__main__")
    file = getattr(main, "__file__", None)
    package = getattr(getattr(main, "__spec__", None), "name", "").endswith("__main__")  # python -m pytest
    if file is None or package or not str(file).endswith(".py") or not Path(file).is_file():
        raise ConfigError(
            "train() was not called from a script, so other processes cannot find the code of the job: "
            "put the job into a file, with a function job() that returns a gradstream.Job, and call "
            'train(load_job("that_file.py")), or run: gradstream train that_file.py; or take processes=False'
        )
    return str(Path(file).resolve())
