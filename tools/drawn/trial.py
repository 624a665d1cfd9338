"""Many drawn loops in one run, and what came of each of them.

All loops of a program have modules and optimizers of their own, and are wrapped together; so every round
carries the gradients of all, and a loop that touches another's is found out.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from drawn.loop import ENDINGS, Loop, draw, draw_ending
from drawn.text import State, Text
from gradstream import Deadlines
from gradstream.errors import GradientError, GradstreamError
from gradstream.session.session import LoneSession, Session
from gradstream.testing.sessions import loop_in_threads

__all__ = ["Record", "program", "run", "try_loops"]

DEADLINES = Deadlines(join_s=60, silence_s=20, lease_s=5, retry_s=10)
LIMIT_S = 90.0
"""A run that takes longer hangs."""
RTOL, ATOL = 1e-8, 1e-11
REMEDIES = ("use ", "lower ", "let ", "deal ", "make ", "look for ", "leave ", "Resume ")


@dataclass(slots=True)
class Record:
    """What came of loops.

    Args:
        loops: how many there were.
        equal: those that ended as plain torch does, on every worker.
        refused: how many an error of gradstream's has ended, by what was wrong with them.
        faults: (loop, what was wrong).
    """

    loops: int = 0
    equal: int = 0
    refused: Counter[str] = field(default_factory=Counter)
    faults: list[tuple[Loop, str]] = field(default_factory=list)

    def add(self, loop: Loop, fault: str, *, refused: bool) -> None:
        """Notes what came of a loop."""
        self.loops += 1
        if fault:
            self.faults.append((loop, fault))
        elif refused:
            self.refused[loop.ending or "refused by torch"] += 1
        else:
            self.equal += 1

    def add_all(self, other: Record) -> None:
        """Adds what came of others."""
        self.loops += other.loops
        self.equal += other.equal
        self.refused += other.refused
        self.faults += other.faults


def program(seed: int, workers: int, length: int) -> list[Loop]:
    """So many loops; the last one ends the session in a way of its own."""
    first = seed * length
    return [draw(first + number, workers) for number in range(length - 1)] + [draw_ending(first, workers)]


def try_loops(seed: int, loops: int, length: int = 25) -> Iterator[tuple[str, int, Record]]:
    """Runs programs until there were so many loops: (strategy, workers, what came of them)."""
    for number in range(-(-loops // length)):
        strategy, workers = ("allreduce", "synchronous")[number % 2], 2 + number // 2 % 2
        record = Record()
        run(program(seed + number, workers, length), strategy, workers, record)
        yield strategy, workers, record


def run(loops: Sequence[Loop], strategy: str, workers: int, record: Record) -> None:
    """Runs a program, and again what comes behind a loop that was ended with an error."""
    while loops:
        done = _Run(loops, strategy, workers)
        error = done.error
        for number, loop in enumerate(loops[: done.reached + (error is not None)]):
            ended = error if number == done.reached else done.refused.get(number)
            if ended is not None:
                record.add(loop, _fault_of_error(loop, ended), refused=True)
            else:
                record.add(loop, done.fault(number), refused=False)
        loops = loops[done.reached + 1 :] if error is not None else []


def _fault_of_error(loop: Loop, error: BaseException) -> str:
    expected = ENDINGS.get(loop.ending, "")
    if not isinstance(error, GradstreamError) and _torch_refuses(loop, type(error)):
        return ""
    if not isinstance(error, GradstreamError) or not any(word in str(error) for word in REMEDIES):
        return f"it ended with {type(error).__name__} and no remedy: {error}"
    if type(error).__name__ != expected:
        return f"it was refused with {type(error).__name__}, expected {expected or 'no error'}: {error}"
    return ""


def _torch_refuses(loop: Loop, kind: type[BaseException]) -> bool:
    try:
        Text(loop, LoneSession()).train()
    except kind:
        return True
    return False


class _Run:
    """One run of a program.

    Attributes:
        reached: the loop that the run was ended by, or how many there were.
        error: what has ended it; None where all loops were gone through.
        refused: errors that ended a loop and not the run.
    """

    def __init__(self, loops: Sequence[Loop], strategy: str, workers: int) -> None:
        self._loops = loops
        self._ends: list[dict[int, State]] = [{} for _ in range(workers)]
        self._after: list[dict[int, State]] = [{} for _ in range(workers)]
        self._at = [0] * workers
        self.refused: dict[int, GradientError] = {}
        self.error: BaseException | None = None
        thread = threading.Thread(target=self._play, args=(strategy, workers), daemon=True)
        thread.start()
        thread.join(LIMIT_S)
        if thread.is_alive():
            self.error = TimeoutError(f"the run was not over after {LIMIT_S:g} s: it hangs")
        self.reached = max(self._at) if self.error is not None else len(loops)

    def _play(self, strategy: str, workers: int) -> None:
        try:
            loop_in_threads(self._script, workers, strategy=strategy, deadlines=DEADLINES)
        except BaseException as error:
            self.error = error

    def _script(self, session: Session) -> None:
        texts = [Text(loop, session) for loop in self._loops]
        session.wrap(
            [module for text in texts for module in text.modules],
            [optimizer for text in texts for optimizer in text.optimizers],
        )
        for self._at[session.rank], text in enumerate(texts):
            try:
                self._ends[session.rank][self._at[session.rank]] = text.train()
            except GradientError as error:  # nothing was applied, on any worker: the next loop can begin
                if text.loop.model.startswith("sparse"):
                    raise  # within a round
                self.refused[self._at[session.rank]] = error
        session.close()
        for number, text in enumerate(texts):
            if number not in self.refused:
                self._after[session.rank][number] = text.state()

    def fault(self, number: int) -> str:
        """What is wrong with how a loop has ended; "" where nothing is."""
        text = Text(self._loops[number], LoneSession())
        expected = text.train()
        for rank, (ends, after) in enumerate(zip(self._ends, self._after, strict=True)):
            told = after if self._loops[number].ending == "uneven" else ends
            if number not in told:
                return f"worker {rank} has not ended it, and nobody was told"
            found = _difference(told[number], expected)
            if found:
                return f"worker {rank}: {found}"
            if number in after and (found := _difference(after[number], told[number])):
                return f"worker {rank}, changed by what came after the loop: {found}"
        return "" if self._loops[number].ending in ("", "uneven") else "it should have been refused"


def _difference(got: State, expected: State) -> str:
    if got.keys() != expected.keys():
        return f"has {sorted(got.keys() - expected.keys())}, not {sorted(expected.keys() - got.keys())}"
    for name, value in expected.items():
        if not isinstance(value, torch.Tensor) or not isinstance(got[name], torch.Tensor):
            if not _alike(got[name], value):
                return f"{name} is {got[name]!r}, expected {value!r}"
        elif not torch.allclose(got[name].double(), value.double(), rtol=RTOL, atol=ATOL, equal_nan=True):
            return f"{name} is off by {(got[name] - value).abs().max():.3g}, of {value.abs().max():.3g}"
    return ""


def _alike(got: Any, expected: Any) -> bool:
    if isinstance(expected, float) and isinstance(got, float):
        return abs(got - expected) <= ATOL + RTOL * abs(expected)
    return bool(type(got) is type(expected) and (isinstance(got, torch.Tensor) or got == expected))
