"""Fixtures that all tests share, and a limit to how long any of them may take."""

from __future__ import annotations

import faulthandler
import gc
import os
import random
import signal
import sys
from collections import defaultdict
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from tempfile import TemporaryDirectory
from types import FrameType

import pytest
from hypothesis import HealthCheck, settings

from kinds import KINDS, kind_of
from warm_start import THREADS, Starter, warm

# A machine that is busy with other things makes examples slow, and is no fault of the code. Examples are the same in
# each run, so that a change fails by what it changes; `pytest --hypothesis-profile=search` draws others. Its parent is
# named, because hypothesis takes another one where the variable CI is set, which draws the same in each run.
settings.register_profile(
    "search", settings.get_profile("default"), deadline=None, suppress_health_check=[HealthCheck.too_slow]
)
settings.register_profile("same", settings.get_profile("search"), derandomize=True)
settings.load_profile("same")

if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    # Started in the background of a shell, which has Ctrl-C ignored, by programs started from here too.
    signal.signal(signal.SIGINT, signal.default_int_handler)

AT_THE_END = ExitStack()

# Processes of tests share the cores. Those that they start have the same number of threads.
for variable in THREADS:
    os.environ.setdefault(variable, "1")

# The command line starts anew without it.
os.environ.setdefault("PYTHONHASHSEED", "0")

# The key by which a run folder is known as this user's own.
os.environ["XDG_STATE_HOME"] = AT_THE_END.enter_context(TemporaryDirectory(prefix="gradstream-state-"))

os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")  # or JAX takes three quarters of a GPU

LIMIT_S = 120.0
REPOSITORY = Path(__file__).resolve().parents[1]
SLOW = REPOSITORY / "tests/slow.txt"
"""Seconds, cases and names of the slow tests: written by tools/slow_tests.py."""
LONG_S = 2.5
"""Tests whose cases take as long, or longer, are `long`."""
SHARE_S = 3.0
"""Of a test whose cases take longer together, so many are `long` that the others take this long."""
WHOLE = ("tests/front/test_docs.py", "tests/front/test_imports.py")
"""Of the tests of these files no case is left out: each looks at another page, or at all modules."""


STARTER: list[Starter] = []
"""Starts Python processes by a fork, from the first test on that starts any."""


def pytest_addoption(parser: pytest.Parser) -> None:
    """Adds `--cold`."""
    parser.addoption("--cold", action="store_true", help="start Python anew for every process of a test")


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    """Has the Python processes of this test and its fixtures forked, unless it is marked `cold`."""
    mark_kind(item)
    cold = item.get_closest_marker("cold") is not None
    if not STARTER and not cold and item.get_closest_marker("process") and sys.platform == "linux":
        if not item.config.getoption("--cold"):
            STARTER.append(AT_THE_END.enter_context(warm()))
    for starter in STARTER:
        starter.enabled = not cold


def pytest_collection_finish() -> None:
    """Leaves what is there before the first test, modules and tests, out of every later search for garbage."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(50_000, 20, 100)  # simulations make many objects that no cycle keeps


def pytest_unconfigure() -> None:
    """Ends the warm process."""
    AT_THE_END.close()


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Marks tests as `slow` and `long` by slow.txt, and each by its kind if `-m` chooses among them.

    Which cases of a test stay in `make test` is drawn by the name of the test: every process draws the same.
    Where several processes share the files, the file that takes longest comes first.
    """
    slow, of_files = dict[str, tuple[float, int]](), defaultdict[str, float](float)
    cases_of = defaultdict[str, list[pytest.Item]](list)
    for item in items:
        cases_of[item.nodeid.partition("[")[0]].append(item)
    for line in SLOW.read_text().splitlines():
        seconds, cases, name = line.split()
        share = 1.0 if name.startswith(WHOLE) else min(1.0, SHARE_S / (float(seconds) or SHARE_S))
        slow[name] = float(seconds) / int(cases), max(1, round(len(cases_of[name]) * share))
        of_files[name.partition("::")[0]] += float(seconds)
    if hasattr(config, "workerinput"):
        items.sort(key=lambda item: -of_files[item.nodeid.partition("::")[0]])
    by_kind = any(kind in config.option.markexpr for kind in KINDS)
    for name, its_cases in cases_of.items():
        if name in slow:
            seconds_a_case, num_drawn = slow[name]
            drawn = drawn_of(name, its_cases, num_drawn)
            for item in its_cases:
                item.add_marker("slow")
                if not item.get_closest_marker("kept") and (seconds_a_case >= LONG_S or item not in drawn):
                    item.add_marker("long")
        if by_kind:
            for item in its_cases:
                mark_kind(item)


def drawn_of(name: str, cases: list[pytest.Item], num: int) -> list[pytest.Item]:
    """The cases of a test that `make test` runs: all `kept`, and so many others, with as many values as can be."""
    if num >= len(cases):
        return cases
    kept = [item for item in cases if item.get_closest_marker("kept")]
    left: dict[pytest.Item, set[tuple[str, str]]] = {
        item: {(key, repr(value)) for key, value in item.callspec.params.items()}
        for item in random.Random(name).sample(cases, len(cases))
        if isinstance(item, pytest.Function)
    }
    seen = set[tuple[str, str]]().union(*(left.pop(item, set()) for item in kept))
    drawn = list[pytest.Item]()
    while left and len(drawn) < num:
        drawn.append(max(left, key=lambda item: len(left[item] - seen)))
        seen |= left.pop(drawn[-1])
    return kept + drawn


def mark_kind(item: pytest.Item) -> None:
    """Marks a test as `unit`, `sim` or `process`, unless it is marked so. Takes a millisecond or two."""
    if isinstance(item, pytest.Function) and not any(map(item.get_closest_marker, KINDS)):
        fixtures = [found[-1].func for found in item._fixtureinfo.name2fixturedefs.values()]
        parameters = item.callspec.params.values() if hasattr(item, "callspec") else ()
        item.add_marker(kind_of(item.function, fixtures, parameters))


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Iterator[None]:
    """Fails a test that hangs, after writing what every thread was doing."""
    marker = item.get_closest_marker("limit_s")
    limit_s = float(marker.args[0]) if marker else LIMIT_S

    def out_of_time(signum: int, frame: FrameType | None) -> None:
        faulthandler.dump_traceback(all_threads=True)
        pytest.fail(f"{item.nodeid} took longer than {limit_s:g} s", pytrace=False)

    before = signal.signal(signal.SIGALRM, out_of_time)
    signal.setitimer(signal.ITIMER_REAL, limit_s)
    # For a thread stuck in C, which no signal handler of Python's interrupts.
    faulthandler.dump_traceback_later(limit_s + 30, exit=True)
    try:
        return (yield)
    finally:
        faulthandler.cancel_dump_traceback_later()
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


@pytest.fixture(autouse=True)
def _own_import_path(monkeypatch: pytest.MonkeyPatch) -> None:
    """A job file's folder goes onto the import path, and no test is to find another's modules there."""
    monkeypatch.setattr(sys, "path", list(sys.path))


@pytest.fixture
def few_seeds(monkeypatch: pytest.MonkeyPatch) -> None:
    """Has `check_strategy` go through 2 seeds of 6; tests/testing/test_strategy_laws.py goes through all."""
    monkeypatch.setattr("gradstream.testing.properties.SEEDS", 2)


@pytest.fixture(scope="session")
def repository() -> Path:
    """The root of the checkout."""
    return REPOSITORY


@pytest.fixture(scope="session")
def data_root() -> Path:
    """Where the large data sets lie; a test that asks for them is skipped where they do not."""
    named = os.environ.get("GRADSTREAM_DATA")
    root = Path(named) if named else REPOSITORY.parent / "shared" / "data"
    if not root.is_dir():
        pytest.skip(f"no data at {root}: set GRADSTREAM_DATA to a folder that holds caltech101/")
    return root
