"""Compares values that must be the same on all machines of a run; each has a remedy for a difference."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

from gradstream._version import __version__
from gradstream.data.alike import checks_of, differences
from gradstream.errors import ConfigError
from gradstream.job.code import JOB_FILE, users_code
from gradstream.job.job import Job
from gradstream.job.sources import file_of, sha256_of
from gradstream.wire import v1


@dataclass(frozen=True, slots=True)
class _Fact:
    """One of the compared values.

    Args:
        code: code of the refusal if it differs.
        remedy: what the user can do.
        of_ports: whether a machine whose worker is written in another language has it, too.
    """

    code: v1.Code
    remedy: str
    of_ports: bool = True


FACTS: Mapping[str, _Fact] = {
    "gradstream": _Fact(v1.BAD_VERSION, "install the same version on both machines", of_ports=False),
    "torch": _Fact(v1.BAD_VERSION, "install the same version on both machines", of_ports=False),
    "job file": _Fact(v1.BAD_JOB_FILE, "copy the file from one machine to the other"),
    "job function": _Fact(v1.BAD_JOB_FILE, "name the same function of the job file on both machines"),
    "data set": _Fact(v1.BAD_DATA, "both machines must read the same data"),
    "data samples": _Fact(v1.BAD_DATA, "both machines must read the same data"),
    "data checksum": _Fact(
        v1.BAD_DATA, "the data differ in their bytes: copy them from one machine to the other"
    ),
}
"""In the order of comparison: a refusal names the first difference."""

MODULE = "module "
"""Begins the name of the fact about a user's module: the SHA-256 of its file."""

DATA = "data, "
"""Begins the name of the fact about a drawn sample: see `data.alike`."""

_OF_SAMPLES = _Fact(
    v1.BAD_DATA,
    "both machines must read the same data, in the same order: sort what comes from a set or from a folder, "
    "sorted(os.listdir(...))",
)
_OF_MODULE = _Fact(v1.BAD_JOB_FILE, "copy its file from one machine to the other")


def facts_of(job: Job) -> dict[str, str]:
    """This machine's facts about a job; a job with a spec has a job file.

    A user's module is compared if both machines have imported it, or may. A data set with an attribute
    `checksum`, a string, is compared by it; others by name and number of samples.
    """
    path, function = _source(job) if job.spec is not None else (None, "")
    code = users_code(job.spec)
    facts = {
        "gradstream": __version__,
        "torch": metadata.version("torch").partition("+")[0],  # builds for CPU and GPU are compatible
        "job file": "none" if path is None else f"{path.name} sha256:{file_hash(path)}",
        "job function": function,
        **{
            f"{MODULE}{name}": f"{file.path.name} sha256:{file.digest}"
            for name, file in code.items()
            if name != JOB_FILE
        },
        "data set": job.data.name,
        "data samples": f"{job.data.num_samples} and {job.data.num_test_samples} held out",
    }
    checksum = getattr(job.data, "checksum", None)
    if checksum is not None:
        return {**facts, "data checksum": str(checksum)}
    return facts | {f"{DATA}{name}": checksum for name, checksum in checks_of(job.data).items()}


def difference(launcher: Mapping[str, str], machine: Mapping[str, str], who: str) -> v1.Refuse | None:
    """The refusal of a machine, by the first fact in which it differs from the launcher; None if all are equal."""
    modules = {name: _OF_MODULE for name in launcher if name.startswith(MODULE) and name in machine}
    for name, fact in {**modules, **FACTS}.items():
        mine, expected = machine.get(name, "none"), launcher.get(name, "none")
        if name == "job file" and _hash_in(mine) == _hash_in(expected):
            continue  # the same file under another name
        if name not in machine and not fact.of_ports:
            continue  # the version of the protocol is compared instead, in every greeting
        if mine != expected:
            return _differs(name, mine, expected, who, fact)
    own, others = (
        {name: value for name, value in facts.items() if name.startswith(DATA)}
        for facts in (machine, launcher)
    )
    for name, mine, expected in differences(own, others) if own and others else ():
        return _differs(name, mine, expected, who, _OF_SAMPLES)
    return None


def _differs(name: str, mine: str, expected: str, who: str, fact: _Fact) -> v1.Refuse:
    text = f"{name} differs: {who} has {mine}, the launcher has {expected}. {fact.remedy.capitalize()}"
    return v1.Refuse(code=fact.code, message=text)


def file_hash(path: Path) -> str:
    """SHA-256 of a file, in hexadecimal. Raises ConfigError if it cannot be read."""
    try:
        return sha256_of(path)
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {error.strerror}") from None


def _hash_in(fact: str) -> str:
    return fact.rpartition(" ")[2]


def _source(job: Job) -> tuple[Path, str]:
    """The file that a job comes from, and the function, or ""."""
    assert job.spec is not None
    _, colon, function = job.spec.rpartition(":")
    file = file_of(job.spec)
    if file is None:
        raise ConfigError(
            f"job {job.spec!r}: its module has no file, and machines compare the job's file; give the path of a "
            ".py file"
        )
    return file, function if colon else ""
