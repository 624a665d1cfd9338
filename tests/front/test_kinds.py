"""What a test refers to, near or far, makes it what it is."""

from __future__ import annotations

import re
import subprocess
from functools import partial
from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner

import gradstream as gs
from gradstream.cli import main
from gradstream.model import functions
from gradstream.testing import check_strategy
from gradstream.testing.sessions import loop_in_threads
from kinds import KINDS, kind_of


def plain() -> None:
    gs.from_functions(lambda seed: np.zeros(1), lambda p, x: x, lambda p, x, y: p)


def starts() -> None:
    subprocess.run(["true"])


def command(*words: str) -> None:
    CliRunner().invoke(main, words)


class Helper:
    def train(self, job: gs.Job) -> None:
        gs.train(job)


TABLE = {"a case": partial(starts)}


def test_nothing_special_is_a_unit_test() -> None:
    assert kind_of(plain) == "unit"
    assert kind_of(lambda: functions.FunctionsModel) == "unit"
    assert kind_of(lambda model: model.train()) == "unit", "torch's train, and anybody's"
    assert kind_of(lambda: command("runs")) == "unit"


def test_virtual_time_is_a_simulation() -> None:
    assert kind_of(lambda job: gs.simulate(job)) == "sim"
    assert kind_of(lambda: check_strategy("ssp")) == "sim", "what a helper of gradstream.testing does"


def test_what_starts_processes_is_found_however_far_away_it_is() -> None:
    def local() -> None:
        from gradstream._train import train  # noqa: F401

    def nested() -> None:
        def inner() -> None:
            starts()

        inner()

    for test in (
        starts,
        local,
        nested,
        Helper,
        lambda job: Helper().train(job),
        lambda: TABLE,
        lambda: command("train"),
    ):
        assert kind_of(test) == "process", test
    assert kind_of(lambda: loop_in_threads(lambda session: None)) == "process", "in real time"
    assert kind_of(lambda job: (gs.train(job), gs.simulate(job))) == "process", "the slower one counts"
    assert kind_of(plain, fixtures=[starts]) == "process"
    assert kind_of(plain, parameters=[["train"], {"by": starts}]) == "process"


def test_no_test_has_two_kinds(request: pytest.FixtureRequest) -> None:
    for item in request.session.items:
        assert sum(item.get_closest_marker(kind) is not None for kind in KINDS) <= 1, item.nodeid


def test_the_slow_tests_are_there(repository: Path) -> None:
    """Renamed or moved, one would come back into `make test-fast`."""
    names = [line.split()[2] for line in (repository / "tests/slow.txt").read_text().splitlines()]
    assert len(names) == len(set(names)) > 0
    assert [name for name in names if is_absent(repository, name)] == []
    assert is_absent(repository, "tests/front/test_kinds.py::test_that_nobody_has_written")
    assert is_absent(repository, "tests/test_that_nobody_has_written.py::test_the_slow_tests_are_there")


def is_absent(repository: Path, test: str) -> bool:
    file, _, name = test.partition("::")
    path = repository / file
    return not path.is_file() or re.search(rf"^(async )?def {name}\(", path.read_text(), re.MULTILINE) is None
