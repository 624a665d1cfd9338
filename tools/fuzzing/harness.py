"""Lets a mutator at one decoder, and notes what must not happen: another error, a hang, memory that grows."""

from __future__ import annotations

import hashlib
import random
import resource
import signal
import time
import traceback
from collections.abc import Callable, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import Any

from fuzzing.mutator import Mutator

HANG_S = 1.0
MEMORY_BYTES = 256 << 20
"""A process may grow by so much while it decodes inputs of 64 KiB at most."""

MAX_FINDINGS = 20


@dataclass(frozen=True, slots=True)
class Decoder:
    """What is fuzzed.

    Args:
        name: for the table.
        decode: takes an input; raises only `errors`, or AssertionError where an invariant does not hold.
        seeds: valid inputs.
        errors: documented exceptions.
        structured: see `Mutator`.
        words: see `Mutator`.
    """

    name: str
    decode: Callable[[bytes], object]
    seeds: Sequence[bytes]
    errors: tuple[type[Exception], ...]
    structured: Callable[[bytes, random.Random], bytes] | None = None
    words: Sequence[bytes] = ()


@dataclass(frozen=True, slots=True)
class Finding:
    """An input that did what must not happen."""

    decoder: str
    what: str
    data: bytes
    trace: str = ""

    def save(self, folder: Path) -> Path:
        """Writes the input, and beside it what happened."""
        folder.mkdir(parents=True, exist_ok=True)
        path = folder / f"{self.decoder}-{hashlib.sha256(self.data).hexdigest()[:12]}"
        path.write_bytes(self.data)
        path.with_suffix(".txt").write_text(f"{self.what}\n{self.trace}", errors="backslashreplace")
        return path


@dataclass(slots=True)
class Outcome:
    """What came of one decoder's inputs."""

    decoder: str
    inputs: int = 0
    accepted: int = 0
    refused: int = 0
    seconds: float = 0.0
    cpu_s: float = 0.0
    slowest_s: float = 0.0
    grown_bytes: int = 0
    findings: list[Finding] = field(default_factory=list)

    @property
    def per_s(self) -> float:
        """Inputs a second of CPU time: other processes may keep this one waiting."""
        return self.inputs / self.cpu_s if self.cpu_s else 0.0


class _HangError(BaseException):
    """Raised by the alarm, so that no decoder takes it for an error of its own."""


def fuzz(decoder: Decoder, *, seed: int, inputs: int | None = None, seconds: float | None = None) -> Outcome:
    """Decodes inputs until there were so many, or so much time has passed; whichever comes first."""
    rng = random.Random(f"{seed} {decoder.name}")
    mutator = Mutator(decoder.seeds, rng, decoder.structured, decoder.words)
    outcome, seen = Outcome(decoder.name), set[str]()
    for data in decoder.seeds:  # a seed that is refused tests nothing
        _one(decoder, data, outcome, seen)
    if outcome.refused:
        outcome.findings.append(Finding(decoder.name, "a seed is refused", decoder.seeds[0]))
    _forget_peak()
    before_bytes = _peak_bytes()
    began_s, began_cpu_s = time.perf_counter(), time.process_time()
    while inputs is None or outcome.inputs < inputs:
        data = mutator.input()
        _one(decoder, data, outcome, seen)
        grown_bytes = _peak_bytes() - before_bytes
        if grown_bytes > outcome.grown_bytes:
            if grown_bytes > MEMORY_BYTES and outcome.grown_bytes <= MEMORY_BYTES:
                what = f"memory has grown by {grown_bytes:,} bytes"
                outcome.findings.append(Finding(decoder.name, what, data))
            outcome.grown_bytes = grown_bytes
        outcome.seconds = time.perf_counter() - began_s
        outcome.cpu_s = time.process_time() - began_cpu_s
        if (seconds is not None and outcome.seconds > seconds) or len(outcome.findings) >= MAX_FINDINGS:
            break
    return outcome


def _one(decoder: Decoder, data: bytes, outcome: Outcome, seen: set[str]) -> None:
    outcome.inputs += 1
    began_s = time.process_time()
    try:
        with _alarm():
            decoder.decode(data)
        outcome.accepted += 1
    except decoder.errors:
        outcome.refused += 1
    except _HangError:
        outcome.findings.append(Finding(decoder.name, f"took longer than {HANG_S:g} s", data))
    except (Exception, MemoryError) as error:
        where = traceback.extract_tb(error.__traceback__)[-1]
        key = f"{type(error).__name__} {where.filename}:{where.lineno}"
        if key not in seen:  # each fault once
            seen.add(key)
            outcome.findings.append(
                Finding(decoder.name, f"{type(error).__name__}: {error}"[:300], data, traceback.format_exc())
            )
    outcome.slowest_s = max(outcome.slowest_s, time.process_time() - began_s)


def _forget_peak() -> None:
    """Lets the peak start at what the process holds now: one from before would hide what a decoder takes."""
    with suppress(OSError):  # not Linux, or not allowed here: growth shows only beyond the old peak
        Path("/proc/self/clear_refs").write_text("5")


def _peak_bytes() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss << 10


@contextmanager
def _alarm() -> Any:
    """Raises _HangError after a second of this process's own CPU time: a loaded machine is no hang."""
    signal.setitimer(signal.ITIMER_VIRTUAL, HANG_S)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_VIRTUAL, 0)


def _hangs(signum: int, frame: FrameType | None) -> None:
    raise _HangError


signal.signal(signal.SIGVTALRM, _hangs)
