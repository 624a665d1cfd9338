"""docs/protocol.md, the schema, the table of methods and the worker in JavaScript agree with one another."""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path

import pytest
from google.protobuf.descriptor import Descriptor

import gradstream as gs
from gradstream.transport.limits import LIMITS, METHODS
from gradstream.wire import v1

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs/protocol.md").read_text()
CODE = set(re.findall(r"`([^`\n]+)`", PAGE))
EXAMPLE = "".join(path.read_text() for path in sorted((ROOT / "examples/javascript").glob("*.mjs")))
MESSAGES = v1.DESCRIPTOR.message_types_by_name
NOT_MESSAGES = {"Stream", "Session", "Peer", "Code"}
"""Capitalised names on the page that are the service, its rpcs and an enumeration."""


def used_by_the_example() -> tuple[set[str], set[str]]:
    """Methods that the worker in JavaScript opens, and messages that it makes or reads."""
    methods = re.findall(r'(?:\.open\(|#exchange\()"([\w-]+)"', EXAMPLE)
    messages = re.findall(r'(?:encode|decode)\("(\w+)"', EXAMPLE)
    return set(methods), set(messages)


def part(heading: str) -> str:
    return PAGE.partition(f"\n## {heading}\n")[2].partition("\n## ")[0]


def test_every_message_on_the_page_is_in_the_schema() -> None:
    named = {word for word in CODE if re.fullmatch(r"[A-Z][a-z]\w*(\.\w+)?", word)}
    assert len(named) > 40
    for word in named - NOT_MESSAGES:
        message, _, field = word.partition(".")
        found: Descriptor | None = MESSAGES.get(message)
        assert found is not None, word
        assert not field or field in found.fields_by_name, word


def test_every_rpc_is_on_the_page() -> None:
    (service,) = v1.DESCRIPTOR.services_by_name.values()
    assert {service.name, *(rpc.name for rpc in service.methods)} <= CODE


def test_every_method_is_on_the_page_and_used_ones_are_explained() -> None:
    methods, _ = used_by_the_example()
    assert methods == {"enrol", "join", "resume", "assign", "fetch", "push"}
    unneeded = set(re.findall(r"`([\w-]+)`", part("What this worker does not need")))
    assert unneeded <= METHODS.keys()
    assert not methods & unneeded
    assert METHODS.keys() - unneeded == methods | {"hello", "measure", "alive"}
    for method in METHODS.keys() - unneeded:
        assert f"`{method}`" in part("Who calls whom")
        assert METHODS[method].callers & {"worker", "machine"}


def test_every_message_of_the_example_is_on_the_page() -> None:
    _, messages = used_by_the_example()
    assert {"Frame", "Greeting", "Pass", "Enrol", "Join", "Beat", "Push"} <= messages
    assert messages <= {word.partition(".")[0] for word in CODE}


def test_every_code_of_a_refusal_has_its_remedy() -> None:
    table = part("Errors, and what is safe to repeat").partition("\n|---")[2]
    listed = [code for row in table.splitlines() for code in re.findall(r"`(\w+)`", row.partition(" | ")[0])]
    assert sorted(listed) == sorted(v1.Code.keys())


@pytest.mark.parametrize(
    "row", re.findall(r"^\| `(\w+)` \| (\d+) ", part("Limits"), re.MULTILINE), ids=lambda row: str(row[0])
)
def test_limits_are_those_of_every_node(row: tuple[str, str]) -> None:
    assert getattr(LIMITS, row[0]) == int(row[1])


def test_the_lines_of_the_worker_are_counted() -> None:
    assert len((ROOT / "examples/javascript/worker.mjs").read_text().splitlines()) < 150


def test_the_worker_in_javascript_asks_for_options_that_downpour_has() -> None:
    can = re.search(r"const can = \{(.*?)\}", EXAMPLE, re.DOTALL)
    assert can is not None
    assert set(re.findall(r"(\w+):", can[1])) <= {field.name for field in dataclasses.fields(gs.Downpour)}
