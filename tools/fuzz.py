"""Fuzzes every decoder of what comes from outside. Prints a table; exit status 1 where one has a fault.

    python tools/fuzz.py --seconds 10                         # each decoder
    python tools/fuzz.py --decoder manifest --inputs 1000000 --seed 7
    python tools/fuzz.py --processes 2 --inputs 1000000 --into bench/results/fuzz.json

A record is added to: `--inputs` counts those of earlier times, and each time has a seed of its own.

A fault is an error that the decoder does not document, more than a second of CPU time for one input,
memory that grows by more than 256 MiB, or an invariant that does not hold afterwards. Its input is saved.
"""

from __future__ import annotations

import argparse
import datetime
import json
import multiprocessing
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from fuzzing import files, messages, texts
from fuzzing.harness import Decoder, Outcome, fuzz
from gradstream.machine.description import describe_machine, git_commit

DECODERS: dict[str, Decoder] = {
    one.name: one for one in (*files.DECODERS, *texts.DECODERS, *messages.DECODERS)
}


def main(argv: Sequence[str] | None = None) -> int:
    """Fuzzes what is asked for; returns the exit status."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--decoder", action="append", choices=sorted(DECODERS), help="only this one; may be repeated"
    )
    parser.add_argument("--inputs", type=int, help="for each decoder")
    parser.add_argument("--seconds", type=float, help="for each decoder, at most")
    parser.add_argument("--seed", type=int, default=0, help="of the first time")
    parser.add_argument("--processes", type=int, default=1, help="decoders that are fuzzed side by side")
    parser.add_argument(
        "--save", type=Path, default=Path("fuzz-findings"), help="folder for inputs with faults"
    )
    parser.add_argument("--into", type=Path, help="JSON file for the record")
    given = parser.parse_args(argv)
    if given.inputs is None and given.seconds is None:
        given.seconds = 5.0
    record = _read(given.into)
    works = []
    for name in given.decoder or sorted(DECODERS):
        parts = record.get(name, [])
        left = None if given.inputs is None else given.inputs - sum(part["inputs"] for part in parts)
        if left is None or left > 0:
            works.append((name, given.seed + len(parts), left, given.seconds))
    # Asked before there are processes: one that is forked meanwhile would hold the pipe of the answer open.
    commit, machine = git_commit(Path.cwd()), describe_machine({})
    # A fresh process for each decoder: its memory is its own.
    context = multiprocessing.get_context("fork")  # what is imported takes long
    with context.Pool(given.processes, maxtasksperchild=1) as pool:
        outcomes = []
        for outcome in pool.imap_unordered(_work, works, chunksize=1):
            outcomes.append(outcome)
            sys.stderr.write(
                f"{outcome.decoder}: {outcome.inputs:,} inputs, {len(outcome.findings)} faults\n"
            )
            if given.into is not None:  # each time: a fuzzing that is cut off has taken hours, too
                seed = next(work[1] for work in works if work[0] == outcome.decoder)
                record.setdefault(outcome.decoder, []).append(_part(outcome, seed, commit))
                given.into.write_text(json.dumps(_whole(record, machine), indent=1) + "\n")
    outcomes.sort(key=lambda one: one.decoder)
    print(table(outcomes))
    for finding in (finding for one in outcomes for finding in one.findings):
        print(f"{finding.decoder}: {finding.what}\n  saved as {finding.save(given.save)}")
    return 1 if any(one.findings for one in outcomes) else 0


def _read(path: Path | None) -> dict[str, list[dict[str, Any]]]:
    """Of a record, what was done at each time, by decoder."""
    if path is None or not path.exists():
        return {}
    return {one["decoder"]: one["parts"] for one in json.loads(path.read_text())["decoders"]}


def _whole(record: Mapping[str, Sequence[Mapping[str, Any]]], machine: Mapping[str, Any]) -> dict[str, Any]:
    """The record: totals by decoder, and their parts."""
    summed = ("inputs", "accepted", "refused", "faults", "cpu_s")
    return {
        **machine,
        "decoders": [
            {
                "decoder": name,
                **{key: round(sum(part[key] for part in parts), 1) for key in summed},
                "parts": parts,
            }
            for name, parts in sorted(record.items())
        ],
    }


def _work(work: tuple[str, int, int | None, float | None]) -> Outcome:
    name, seed, inputs, seconds = work
    return fuzz(DECODERS[name], seed=seed, inputs=inputs, seconds=seconds)


def _part(one: Outcome, seed: int, commit: str | None) -> dict[str, Any]:
    return {
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
        "commit": commit,
        "seed": seed,
        "inputs": one.inputs,
        "accepted": one.accepted,
        "refused": one.refused,
        "faults": len(one.findings),
        "cpu_s": round(one.cpu_s, 1),
        "inputs_per_cpu_s": round(one.per_s),
        "slowest_cpu_s": round(one.slowest_s, 4),
        "grown_bytes": one.grown_bytes,
    }


def table(outcomes: Sequence[Outcome]) -> str:
    """One line for each decoder."""
    lines = [
        f"{'decoder':18} {'inputs':>10} {'accepted':>10} {'refused':>10} {'faults':>6} {'per s':>9} slowest"
    ]
    lines += [
        f"{one.decoder:18} {one.inputs:>10,} {one.accepted:>10,} {one.refused:>10,} {len(one.findings):>6} "
        f"{one.per_s:>9,.0f} {one.slowest_s * 1e3:6.0f} ms"
        for one in outcomes
    ]
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())
