"""Runs drawn training loops on several workers and by plain torch. Exit status 1 where they differ.

    python tools/try_loops.py --loops 2000
    python tools/try_loops.py --loops 500 --seed 80 --record bench/results/drawn-loops.json

Each loop ends with the parameters, the gradients and the optimizers' state that plain torch has on the
minibatches of all workers together, or gradstream refuses it and says what to do. Anything else is a fault,
which is printed with its loop. A record that is there already is added to.

All loops of a run have modules and optimizers of their own, and are wrapped together: so every round carries
the gradients of all, and a loop that touches another's is found out.
"""

from __future__ import annotations

import argparse
import contextlib
import datetime
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from unittest import mock

import torch

from drawn.loop import ENDINGS, Loop, draw, draw_ending
from drawn.text import State, Text
from gradstream import Deadlines
from gradstream.errors import GradientError, GradstreamError
from gradstream.machine.description import describe_machine, git_commit
from gradstream.session.agreement import Digest
from gradstream.session.session import Session, SingleProcessSession
from gradstream.testing.sessions import loop_in_threads

DEADLINES = Deadlines(join_s=60, silence_s=20, lease_s=5, retry_s=10)
TOLERANCES = {"float64": (1e-8, 1e-11), "float32": (1e-4, 1e-5), "bfloat16": (0.1, 0.05)}
REMEDIES = ("use ", "lower ", "call ", "take ", "make ", "look for ", "leave ", "resume ")
WAYS = (("allreduce", 2), ("allreduce", 3))

Outcomes = list[tuple[Loop, str, str]]
"""Loops; what came of each: equal, refused, refused by torch, or differs; and what is wrong with it."""


def program(seed: int, workers: int, length: int) -> list[Loop]:
    """So many loops; the last one ends the session in a way of its own."""
    first = seed * length
    return [*(draw(first + number, workers) for number in range(length - 1)), draw_ending(first, workers)]


def run_loops(loops: Sequence[Loop], strategy: str, workers: int) -> Outcomes:
    """Runs loops on workers, one after the other, and again what comes behind one that ends with an error."""
    outcomes: Outcomes = []
    while loops:
        run = _Run(loops, strategy, workers)
        for number in range(min(run.reached + 1, len(loops))):
            loop, error = loops[number], run.errors.get(number)
            fault = run.fault(number) if error is None else _fault_of_error(loop, error)
            outcome = "refused" if isinstance(error, GradstreamError) else "refused by torch"
            outcomes.append((loop, "differs" if fault else outcome if error else "equal", fault))
        loops = loops[run.reached + 1 :]
    return outcomes


class _Run:
    """One run of loops.

    Attributes:
        reached: the loop that the run was ended by, or how many there were.
        errors: what loops were ended with, by number.
    """

    def __init__(self, loops: Sequence[Loop], strategy: str, workers: int) -> None:
        self._loops = loops
        self._ends: list[dict[int, State]] = [{} for _ in range(workers)]
        self._after: list[dict[int, State]] = [{} for _ in range(workers)]
        self._at = [0] * workers
        self.reached, self.errors = len(loops), dict[int, BaseException]()
        try:
            with mock.patch.object(
                Digest, "PIECE_ELEMS", 1 << 20
            ):  # loops are too short for one piece a round
                loop_in_threads(self._script, workers, strategy=strategy, deadlines=DEADLINES)
        except BaseException as error:
            self.reached = max(self._at)
            self.errors[self.reached] = error

    def _script(self, session: Session) -> None:
        if any(loop.model == "wide" for loop in self._loops):
            torch.set_num_threads(1 + session.rank)  # of this thread: its sums are rounded in another way
        texts = [Text(loop, session) for loop in self._loops]
        session.wrap([text.model for text in texts], [one for text in texts for one in text.optimizers])
        rank = session.rank
        for self._at[rank], text in enumerate(texts):
            try:
                self._ends[rank][self._at[rank]] = text.train()
            except GradientError as error:  # nothing was applied, on any worker: the next loop can begin
                if text.loop.model.startswith("sparse"):
                    raise  # within a round
                self.errors[self._at[rank]] = error
        session.close()
        self._after[rank] = {i: text.state() for i, text in enumerate(texts) if i not in self.errors}

    def fault(self, number: int) -> str:
        """What is wrong with how a loop has ended; "" where nothing is."""
        loop = self._loops[number]
        expected = Text(loop, SingleProcessSession()).train()
        for rank, (ends, after) in enumerate(zip(self._ends, self._after, strict=True)):
            told = after if loop.ending == "uneven" else ends
            if number not in told:
                return f"worker {rank} has not ended it, and nobody was told"
            if found := _difference(told[number], expected, *TOLERANCES[loop.dtype]):
                return f"worker {rank}: {found}"
            if number in after and (
                found := _difference(after[number], told[number], *TOLERANCES[loop.dtype])
            ):
                return f"worker {rank}, changed by what came after the loop: {found}"
        refused = ENDINGS.get(loop.ending) and loop.ending != "bounded embedding"
        return "it should have been refused" if refused else ""


def _fault_of_error(loop: Loop, error: BaseException) -> str:
    if not isinstance(error, GradstreamError):
        with contextlib.suppress(type(error)):  # as plain torch does
            Text(loop, SingleProcessSession()).train()
            return f"it ended with {type(error).__name__}: {error}"
        return ""
    expected = ENDINGS.get(loop.ending, "")
    if type(error).__name__ != expected or not any(word in str(error).lower() for word in REMEDIES):
        return f"refused with {type(error).__name__}, expected {expected or 'no error'}: {error}"
    return ""


def _difference(got: State, expected: State, rtol: float, atol: float) -> str:
    if got.keys() != expected.keys():
        return f"has {sorted(got.keys() - expected.keys())}, not {sorted(expected.keys() - got.keys())}"
    for name, value in expected.items():
        try:
            if isinstance(value, torch.Tensor | float):
                torch.testing.assert_close(got[name], value, rtol=rtol, atol=atol, equal_nan=True)
            elif got[name] != value:
                return f"{name} is {got[name]!r}, expected {value!r}"
        except AssertionError as error:
            return f"{name}: {' '.join(str(error).split())}"
    return ""


def main(argv: Sequence[str] | None = None) -> int:
    """Tries as many loops as are asked for; returns the exit status."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--loops", type=int, default=2000)
    parser.add_argument("--length", type=int, default=25, help="loops of one run")
    parser.add_argument("--seed", type=int, default=0, help="of the first run of loops")
    parser.add_argument("--record", type=Path, help="JSON file, which is added to")
    given = parser.parse_args(argv)
    torch.set_num_threads(1)
    record: dict[str, Any] = {"total": {"differs": 0}, "by strategy": {}, "by kind": {}, "seeds": []}
    if given.record is not None and given.record.exists():
        record = json.loads(given.record.read_text())
    faults = 0
    for number in range(-(-given.loops // given.length)):
        strategy, workers = WAYS[number % len(WAYS)]
        seed = given.seed + number
        for loop, outcome, fault in run_loops(program(seed, workers, given.length), strategy, workers):
            kind = f"ends: {loop.ending}" if loop.ending else loop.backward
            way = record["by strategy"].setdefault(f"{strategy}, {workers} workers", {})
            for counts in (record["total"], way, record["by kind"].setdefault(kind, {})):
                counts[outcome] = counts.get(outcome, 0) + 1
            if fault:
                faults += 1
                print(f"{strategy}, {workers} workers: {fault}\n  {loop}", flush=True)
    record["seeds"].append([given.seed, seed])
    print(record["total"])
    if given.record is not None:
        told = {
            **record,
            **describe_machine({}),
            "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
            "commit": git_commit(Path.cwd()),
        }
        given.record.write_text(json.dumps(told, indent=1, sort_keys=True) + "\n")
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main())
