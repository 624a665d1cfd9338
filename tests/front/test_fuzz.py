"""The fuzzer itself: it finds what was planted, and every decoder stands a moment of it."""

from __future__ import annotations

import importlib
import random
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

REPOSITORY = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(REPOSITORY / "tools"))
harness: Any = importlib.import_module("fuzzing.harness")
mutator: Any = importlib.import_module("fuzzing.mutator")
script: Any = importlib.import_module("fuzz")
sys.path.remove(str(REPOSITORY / "tools"))


@pytest.mark.parametrize("name", sorted(script.DECODERS))
def test_no_decoder_has_a_fault_in_some_hundred_inputs(name: str) -> None:
    outcome = harness.fuzz(script.DECODERS[name], seed=11, inputs=300, seconds=2.0)
    assert not outcome.findings, [(one.what, one.data[:200], one.trace) for one in outcome.findings]
    assert outcome.inputs > len(script.DECODERS[name].seeds)


def planted(kind: str) -> Any:
    hoard: list[bytes] = []

    def decode(data: bytes) -> None:
        if not data.startswith(b"{"):
            raise ValueError("no table")
        if b"worker-999999999" not in data:
            return
        if kind == "error":
            raise KeyError("a")
        if kind == "memory":
            hoard.clear()
            hoard.append(b"\1" * (300 << 20))
        while kind == "hang":
            time.process_time()

    return harness.Decoder("planted", decode, [b'{"who": "worker-0"}'], (ValueError,), mutator.mutated_json)


@pytest.mark.parametrize(
    ("kind", "what"),
    [("error", "KeyError: 'a'"), ("hang", "took longer than 1 s"), ("memory", "memory has grown by")],
)
def test_a_planted_fault_is_found_and_its_input_saved(
    kind: str, what: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(harness, "MAX_FINDINGS", 1)
    before = (
        bytearray(b"\1") * (400 << 20) if kind == "memory" else b""
    )  # a peak that is higher than what is found
    del before
    decoder = planted(kind)
    outcome = harness.fuzz(decoder, seed=1, inputs=3000 if kind == "error" else 200)
    assert what in outcome.findings[0].what
    saved = outcome.findings[0].save(tmp_path)
    assert b"worker-999999999" in saved.read_bytes()
    assert what in saved.with_suffix(".txt").read_text()


def test_a_decoder_without_a_fault_has_none() -> None:
    outcome = harness.fuzz(planted("none"), seed=1, inputs=3000)
    assert not outcome.findings
    assert outcome.accepted > 500
    assert outcome.refused > 500


def test_one_seed_makes_the_same_inputs() -> None:
    decoder = script.DECODERS["manifest"]
    first, second = (harness.fuzz(decoder, seed=3, inputs=200) for _ in range(2))
    assert (first.accepted, first.refused) == (second.accepted, second.refused)


def test_an_input_is_within_its_bound_after_each_change_of_it(monkeypatch: pytest.MonkeyPatch) -> None:
    # What the mutator takes for itself would be told as the decoder's memory.
    one, longest = mutator.Mutator([b"0" * 1000], random.Random(0)), 0

    def repeat(data: bytes) -> bytes:
        nonlocal longest
        longest = max(longest, len(data))
        return data * 20

    monkeypatch.setattr(one, "_damages", [repeat])
    for _ in range(50):
        one.input()
    assert longest == mutator.MAX_INPUT_BYTES


def test_the_script_prints_a_table_and_says_by_its_status_that_all_is_well(tmp_path: Path) -> None:
    command = [
        sys.executable,
        "tools/fuzz.py",
        "--decoder",
        "frame",
        "--decoder",
        "address",
        "--inputs",
        "200",
    ]
    command += ["--into", str(tmp_path / "fuzz.json"), "--save", str(tmp_path)]
    done = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "frame" in done.stdout
    assert '"decoder": "address"' in (tmp_path / "fuzz.json").read_text()
