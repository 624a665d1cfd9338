"""Text is escaped, reports are throttled, documents are bounded, and values have their types."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Literal

import pytest

from gradstream.runtime.tasks import Throttle
from gradstream.runtime.virtual import VirtualCluster
from gradstream.untrusted import (
    DocumentError,
    MismatchError,
    check_record,
    counted,
    escaped,
    parse_json,
    parse_toml,
)


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("Größe 統計 5 %", "Größe 統計 5 %"),
        ("a\x1b[2Jb", "a\\x1b[2Jb"),
        ("a\nb\tc\r\x00", "a\\nb\\tc\\r\\x00"),
        ("abc\u202edef", "abc\\u202edef"),  # writes what follows from right to left
        ("a\u200bb\u2028", "a\\u200bb\\u2028"),
        ("\x85\x9b", "\\x85\\x9b"),  # C1: 0x9b begins an escape, too
        ("\ud800", "\\ud800"),
        ("\U000e0041", "\\U000e0041"),
    ],
)
def test_nothing_that_acts_on_a_terminal_is_left(text: str, shown: str) -> None:
    assert escaped(text, 100) == shown


def test_a_traceback_keeps_its_newlines_and_nothing_else() -> None:
    assert escaped("a\n  b\x1b\n", 100, newlines=True) == "a\n  b\\x1b\n"


@pytest.mark.parametrize("limit_bytes", [3, 4, 9, 10, 11, 255])
def test_no_text_is_longer_than_its_limit(limit_bytes: int) -> None:
    for text in ("x" * 300, "é" * 300, "\x1b" * 300, "𝄞" * 300):
        shown = escaped(text, limit_bytes)
        assert len(shown.encode()) <= limit_bytes
        assert shown.endswith("…")
    assert escaped("x" * limit_bytes, limit_bytes) == "x" * limit_bytes


def test_the_count_is_never_cut() -> None:
    assert counted("no", 0) == "no"
    assert counted("no", 3211) == "no (and 3,211 more)"
    shown = counted("y" * 1000, 3211, 64)
    assert len(shown.encode()) <= 64
    assert shown.endswith("… (and 3,211 more)")


def test_a_throttle_passes_one_report_a_second_and_counts_the_others() -> None:
    virtual = VirtualCluster(seed=1)
    runtime = virtual.runtime("node")
    passed: list[tuple[float, str, int]] = []

    async def main() -> None:
        throttle: Throttle[str] = Throttle(
            runtime, lambda report, more: passed.append((runtime.now() / 1e9, report, more))
        )
        for number in range(1000):
            throttle.tell(f"r{number}")
            await runtime.sleep(0.01)
        await runtime.sleep(60.0)
        throttle.tell("late")
        throttle.tell("last")
        throttle.close()
        throttle.close()

    virtual.run(main())
    times = [time_s for time_s, _, _ in passed]
    assert all(later - before >= 0.999 for before, later in pairwise(times[:-1]))
    assert passed[0][1:] == ("r0", 0)
    assert passed[1][2] > 90
    assert [report for _, report, _ in passed[-2:]] == ["late", "last"]
    assert sum(1 + more for _, _, more in passed) == 1002  # none is lost


# ---- documents ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    "data",
    [
        b"", b"{", b"\xff", b"NaN", b"[Infinity]", b"1" * 5000, b"[" * 100_000, b'{"a":' * 100_000,
        b"[" * 11 + b"]" * 11, b'{"a":1,"a":2}', rb'"\ud800"', b" " * (1 << 21),
        b"[" + b"1," * 1_000_001 + b"1]",
    ],
)  # fmt: skip
def test_json_that_is_invalid_or_too_large_is_refused(data: bytes) -> None:
    with pytest.raises(DocumentError):
        parse_json(data)


def test_json_within_its_bounds() -> None:
    assert parse_json(b"[" * 10 + b"]" * 10) == [[[[[[[[[[]]]]]]]]]]
    assert parse_json(rb'"\ud834\udd1e"') == "\U0001d11e"
    assert parse_json('{"a": [1, 2.5, null]}') == {"a": [1, 2.5, None]}


@pytest.mark.parametrize(
    "text",
    [
        "a", "a=[" * 50_000, "a = " + "[" * 2000 + "]" * 2000, "a" + ".a" * 20_000 + "=1",
        "a" + " . 'b'" * 2000 + "=1", "a = " + "[" * 11 + "]" * 11, "#" * 100_000, "a=" + "9" * 5000,
        "a = 0000-13-41",
    ],
)  # fmt: skip
def test_toml_that_is_invalid_or_too_large_is_refused(text: str) -> None:
    with pytest.raises(DocumentError):
        parse_toml(text)


# ---- types --------------------------------------------------------------------------------


@dataclass
class Inner:
    pair: tuple[int, str]


@dataclass
class Outer:
    name: str
    kind: Literal["a", "b"]
    rate: float | None = None
    counts: Mapping[str, int] = field(default_factory=dict)
    inner: list[Inner] = field(default_factory=list)


def test_a_record_that_fits() -> None:
    check_record(Outer, {"name": "n", "kind": "a"})
    record = {"name": "n", "kind": "b", "rate": 1, "counts": {"x": 2}, "inner": [{"pair": [1, "y"]}]}
    check_record(Outer, record)


@pytest.mark.parametrize(
    ("changed", "part"),
    [
        ({"name": 1}, "name: 1, expected text"),
        ({"kind": "c"}, "kind: 'c', expected one of"),
        ({"rate": float("nan")}, "rate: nan, expected a finite number"),
        ({"rate": True}, "rate: True, expected a number"),
        ({"counts": {"x": 1.5}}, "counts: 'x': 1.5, expected a whole number"),
        ({"counts": {"x": 1 << 64}}, "a number of more than 64 bits"),
        ({"inner": [{"pair": [1]}]}, "expected a list of 2"),
        ({"inner": [{}]}, "pair is missing"),
        ({"other": 1}, "'other' is no field"),
    ],
)
def test_a_record_that_does_not_fit_says_where(changed: dict[str, object], part: str) -> None:
    with pytest.raises(MismatchError) as caught:
        check_record(Outer, {"name": "n", "kind": "a", **changed})
    assert part in str(caught.value)
