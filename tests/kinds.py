"""What kind a test is, by what its code refers to.

    process   starts processes, or nodes as threads of this one, in real time
    sim       runs nodes, or ranks of a group, on virtual time
    unit      all others

What counts is what the test, its fixtures and its parameters refer to, and the helpers that these use.
"""

from __future__ import annotations

import dis
import functools
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from types import CodeType, FunctionType, ModuleType

KINDS = ("unit", "sim", "process")

PROCESS = (
    "subprocess", "multiprocessing", "torch.multiprocessing", "gradstream.run.local", "gradstream._train",
    "gradstream._resume", "gradstream.run.launcher", "gradstream.preflight", "gradstream.session.host",
)  # fmt: skip
SIM = (
    "gradstream._simulate",
    "gradstream.run.simulated",
    "gradstream.runtime.virtual",
    "gradstream.transport.simulated",
)
COMMANDS = {"train", "resume", "demo", "bench", "doctor"}
"""What the command line starts processes for, or real connections, where a test gives it these words."""
FOLDERS = [Path(__file__).parents[1] / name for name in ("tests", "tools", "bench", "studies", "examples")]


def kind_of(test: object, fixtures: Iterable[object] = (), parameters: Iterable[object] = ()) -> str:
    """The kind of a test: "unit", "sim" or "process".

    Args:
        test: its function.
        fixtures: their functions.
        parameters: what it is parametrized with.
    """
    found = [*map(reached, [test, *fixtures]), walked(parameters)]
    modules = frozenset().union(*(modules for modules, _ in found))
    words = frozenset().union(*(words for _, words in found))
    if any(within(module, PROCESS) for module in modules) or (
        "click.testing" in modules and words & COMMANDS
    ):
        return "process"
    return "sim" if any(within(module, SIM) for module in modules) else "unit"


@functools.cache  # a test has many parameters, and a fixture many tests
def reached(function: object) -> tuple[frozenset[str], frozenset[str]]:
    """See `walked`."""
    return walked([function])


def walked(roots: Iterable[object]) -> tuple[frozenset[str], frozenset[str]]:
    """Names of the modules that all these objects, and what they refer to, are of; and all strings."""
    modules: set[str] = set()
    words: set[str] = set()
    seen: dict[int, object] = {}  # by id; kept, so that no later object has the id of an earlier one
    waiting = list(roots)
    while waiting:
        found = waiting.pop()
        if id(found) not in seen:
            seen[id(found)] = found
            if isinstance(found, str):
                words.add(found)
            else:
                modules.add(module_of(found))
                waiting += parts_of(found)
    return frozenset(modules), frozenset(words)


def within(module: str, packages: Iterable[str]) -> bool:
    """Whether a module is one of these, or in one of them."""
    return any(module == package or module.startswith(f"{package}.") for package in packages)


def module_of(found: object) -> str:
    """The name of a module, or of the module where a function, a class or an object's class is defined."""
    name = found.__name__ if isinstance(found, ModuleType) else getattr(found, "__module__", None)
    return name if isinstance(name, str) else ""


def parts_of(found: object) -> Iterator[object]:
    """What an object refers to; of what is neither a container nor made for tests, nothing."""
    if isinstance(found, dict):
        yield from found.values()
    elif isinstance(found, list | tuple | set | frozenset):
        yield from found
    elif isinstance(found, functools.partial):
        yield from (found.func, found.args, found.keywords)
    elif isinstance(found, property | staticmethod | classmethod):
        yield found.fget if isinstance(found, property) else found.__func__
    elif not is_for_tests(module_of(found)) or isinstance(found, ModuleType):
        return
    elif isinstance(found, FunctionType):
        yield from references_of(found)
        yield from (cell.cell_contents for cell in found.__closure__ or () if cell != type(cell)())
        yield from (found.__defaults__, found.__kwdefaults__, vars(found))
    else:
        kind = found if isinstance(found, type) else type(found)
        yield from (kind.__bases__, list(vars(kind).values()))


@functools.cache
def is_for_tests(module: str) -> bool:
    """Whether a module is one of `gradstream.testing`, or of the repository's folders beside the source."""
    file = getattr(sys.modules.get(module), "__file__", None) or ""
    return within(module, ["gradstream.testing"]) or any(map(Path(file).is_relative_to, FOLDERS))


@functools.cache  # a helper is looked at for each of the tests that use it
def references_of(function: FunctionType) -> list[object]:
    """See `references`."""
    return list(references(function.__code__, function.__globals__))


def references(code: CodeType, names: dict[str, object]) -> Iterator[object]:
    """Globals that a function's code uses, with attributes of modules, what it imports, and its constants."""
    current: object = None
    for instruction in dis.get_instructions(code):
        operation, value = instruction.opname, instruction.argval
        if operation == "LOAD_GLOBAL":
            current = names.get(value)
        elif operation == "IMPORT_NAME":
            current = sys.modules.get(value)
        elif operation in ("LOAD_ATTR", "LOAD_METHOD", "IMPORT_FROM") and isinstance(current, ModuleType):
            found = getattr(current, value, None)
            yield found
            current = found if operation != "IMPORT_FROM" else current
            continue
        elif operation != "STORE_FAST":
            current = None
        yield current
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from references(constant, names)
        elif isinstance(constant, str | tuple):
            yield constant
