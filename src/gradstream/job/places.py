"""Finds code by its place, "file.py:name" or "module:name", and says the place of code."""

from __future__ import annotations

import hashlib
import importlib
import importlib.util
import inspect
import os
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any, cast

from gradstream.errors import ConfigError, UnknownNameError
from gradstream.job.code import loader_of


def place_of(function: Callable[..., Any]) -> str:
    """The place at which every node finds a function or a class: "file.py:name" or "module:name".

    Raises:
        ConfigError: it has no place: it is a lambda, a method, or was defined inside another function.
    """
    name = getattr(function, "__qualname__", type(function).__name__)
    module = sys.modules.get(getattr(function, "__module__", ""))
    if module is None or getattr(module, name, None) is not function:
        raise ConfigError(
            f"other processes cannot import {name!r}: define it at the top level of a file, not inside a "
            "function or class"
        )
    if _is_script(module):
        return f"{Path(str(module.__file__)).resolve()}:{name}"
    return f"{module.__name__}:{name}"


def place_of_class(cls: type) -> str:
    """Module or file of a class; "" if it is defined in the script that runs."""
    module = sys.modules.get(cls.__module__)
    if module is None or cls.__module__.startswith("__"):
        return ""
    return str(module.__file__) if cls.__module__.startswith("_gradstream_") else cls.__module__


def find_function(place: str) -> Callable[..., Any]:
    """The function at a place. A file that this process has run already is not run again.

    Raises:
        ConfigError, UnknownNameError: no such file, module or function.
    """
    file, colon, name = place.rpartition(":")
    if not colon:
        raise ConfigError(f"function {place!r}: expected 'file.py:function' or 'module:function'")
    if file.endswith(".py"):
        path = Path(file).resolve()
        module = next((there for there in _scripts(path) if hasattr(there, name)), None) or load_module(path)
    else:
        module = import_module("function", place, file)
    function = getattr(module, name, None)
    if not callable(function):
        functions = [key for key, value in vars(module).items() if inspect.isfunction(value)]
        raise UnknownNameError(f"function in {file}", name, functions)
    return cast(Callable[..., Any], function)


def load_module(path: Path, name: str | None = None) -> ModuleType:
    """Runs a Python file as a module, once per name. Its folder becomes importable.

    Args:
        path: the file.
        name: its `__name__`; None makes one from the path.

    Raises:
        ConfigError: there is no such file. Errors that the file itself raises are passed on.
    """
    path = path.resolve()
    if not path.is_file():
        raise ConfigError(f"no such file: {path}")
    name = name or f"_gradstream_{path.stem}_{hashlib.sha256(str(path).encode()).hexdigest()[:8]}"
    if name in sys.modules and sys.modules[name].__file__ == str(path):
        return sys.modules[name]
    if str(path.parent) not in sys.path:
        sys.path.insert(0, str(path.parent))
    spec = importlib.util.spec_from_file_location(name, path, loader=loader_of(path, name))
    if spec is None or spec.loader is None:
        raise ConfigError(f"{path} is not a Python file; expected a name that ends in .py")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    try:
        spec.loader.exec_module(module)
    except Exception:
        del sys.modules[name]
        raise
    return module


def import_module(kind: str, spec: str, module: str) -> ModuleType:
    """Imports a module that a user names. Raises ConfigError if there is none."""
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        raise ConfigError(f"{kind} {spec!r}: {error}{where_it_lies(spec, module, error)}") from error
    except (ValueError, TypeError) as error:  # a name that no module has
        raise ConfigError(
            f"{kind} {spec!r}: there is no module {module!r}; name a file with .py: file.py:Class"
        ) from error


def where_it_lies(spec: str, place: str, error: ModuleNotFoundError) -> str:
    """How a module is found that could not be imported; "" where it was found, and lacks another one.

    Args:
        spec: what the user has named, "module:name".
        place: its module.
        error: of the import.
    """
    if error.name is None or not f"{place}.".startswith(f"{error.name}."):
        return ""
    here, own = Path(os.getcwd()), place.split(".")
    for folder in (here, *here.parents):
        for file in (folder.joinpath(*own).with_suffix(".py"), folder.joinpath(*own, "__init__.py")):
            if file.is_file():
                return (
                    f". It is in {folder}, where modules are not looked for by themselves: PYTHONPATH={folder} before "
                    f"the command, or name the file: {file}:{spec.rpartition(':')[2]}"
                )
    path = os.environ.get("PYTHONPATH", "")
    return (
        f". Looked in {f'PYTHONPATH={path}' if path else 'no folder of yours (PYTHONPATH is not set)'} and in the "
        f"installed packages; it is not in {here} either: `cd` to the folder that has it, or set PYTHONPATH to that "
        "folder, or name the file: FOLDER/file.py:function"
    )


def _scripts(path: Path) -> list[ModuleType]:
    """The modules of a file that this process has run as the main script, or under a name of ours."""
    return [
        module
        for module in list(sys.modules.values())
        if _is_script(module) and Path(str(module.__file__)) == path
    ]


def _is_script(module: ModuleType) -> bool:
    """Whether a module has no name by which another process could import it."""
    special = str(getattr(module, "__name__", "")).startswith(
        ("__", "_gradstream_")
    )  # modules may be any object
    return special and str(getattr(module, "__file__", "")).endswith(".py")
