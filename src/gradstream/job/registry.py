"""Finds strategies, update rules and data sets by name: only this module lists the concrete classes.

A new method is one new file, one line here, and the lists that CONTRIBUTING names. A user's own class needs no line:
it is named by its place, "file.py:Class" or "module:Class". An installed package registers a name (see `plugins`).
"""

from __future__ import annotations

import dataclasses
import hashlib
import importlib
import importlib.util
import inspect
import json
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any, cast

from gradstream.codec.base import Codec
from gradstream.codec.low_rank import PowerSGD
from gradstream.data.base import Dataset
from gradstream.errors import ConfigError, UnknownNameError
from gradstream.job.plugins import BUILT_IN, GROUPS, Plugin, choose, installed
from gradstream.optim.base import ByShape, Optimizer
from gradstream.optim.groups import GroupedRule, groups_of
from gradstream.strategies.base import (
    GroupStrategy,
    PeerStrategy,
    ServerStrategy,
    SharedMemoryStrategy,
    Strategy,
)
from gradstream.untrusted import check_record, parse_json

STRATEGIES = {
    "allreduce": "gradstream.strategies.allreduce:AllReduce",
    "asysg": "gradstream.strategies.asysg:AsySG",
    "conjugate-gradient": "gradstream.strategies.conjugate_gradient:ConjugateGradient",
    "dc-asgd": "gradstream.strategies.dc_asgd:DCASGD",
    "async-diloco": "gradstream.strategies.async_diloco:AsyncDiLoCo",
    "diloco": "gradstream.strategies.diloco:DiLoCo",
    "downpour": "gradstream.strategies.downpour:Downpour",
    "eamsgd": "gradstream.strategies.elastic:EAMSGD",
    "elastic-averaging": "gradstream.strategies.elastic:ElasticAveraging",
    "gossip": "gradstream.strategies.gossip:Gossip",
    "gradient-descent": "gradstream.strategies.gradient_descent:GradientDescent",
    "hogwild": "gradstream.strategies.hogwild:Hogwild",
    "lbfgs": "gradstream.strategies.lbfgs:LBFGS",
    "local-sgd": "gradstream.strategies.local_sgd:LocalSGD",
    "noloco": "gradstream.strategies.noloco:NoLoCo",
    "parameter-averaging": "gradstream.strategies.averaging:ParameterAveraging",
    "push-sum": "gradstream.strategies.push_sum:PushSum",
    "softsync": "gradstream.strategies.softsync:Softsync",
    "ssp": "gradstream.strategies.ssp:SSP",
    "staleness-aware": "gradstream.strategies.staleness_aware:StalenessAware",
    "streaming-diloco": "gradstream.strategies.streaming_diloco:StreamingDiLoCo",
    "synchronous": "gradstream.strategies.synchronous:Synchronous",
}

OPTIMIZERS = {
    "adagrad": "gradstream.optim.adagrad:Adagrad",
    "adam": "gradstream.optim.adam:Adam",
    "adamw": "gradstream.optim.adam:AdamW",
    "lamb": "gradstream.optim.lamb:LAMB",
    "lars": "gradstream.optim.lars:LARS",
    "momentum": "gradstream.optim.sgd:Momentum",
    "muon": "gradstream.optim.muon:Muon",
    "nesterov": "gradstream.optim.sgd:Nesterov",
    "sgd": "gradstream.optim.sgd:SGD",
}

CODECS = {
    "bfloat16": "gradstream.codec.named:bfloat16",
    "chunk-top-k": "gradstream.codec.named:chunk_top_k",
    "dct": "gradstream.codec.named:dct",
    "dgc": "gradstream.codec.dgc:DGC",
    "float16": "gradstream.codec.named:float16",
    "float4": "gradstream.codec.named:float4",
    "int4": "gradstream.codec.named:int4",
    "int8": "gradstream.codec.named:int8",
    "one-bit": "gradstream.codec.named:one_bit",
    "powersgd": "gradstream.codec.low_rank:PowerSGD",
    "qsgd": "gradstream.codec.named:qsgd",
    "random-k": "gradstream.codec.named:random_k",
    "sign": "gradstream.codec.named:sign",
    "top-k": "gradstream.codec.named:top_k",
}

DATASETS = {
    "caltech101": "gradstream.data.caltech:caltech101",
    "fashion-mnist": "gradstream.data.fashion:fashion_mnist",
}

MAX_RULE_BYTES = 1 << 20

FAMILIES: Mapping[str, Mapping[str, str]] = {
    "strategy": STRATEGIES,
    "optimizer": OPTIMIZERS,
    "codec": CODECS,
    "data set": DATASETS,
}
"""Places of the built-in members of each family, by name."""


def name_of(value: object) -> str:
    """The name of a built-in strategy or update rule; of other classes their own, in lower case."""
    if title := getattr(value, "title", ""):
        return str(title)
    place = f"{type(value).__module__}:{type(value).__qualname__}"
    known = {there: name for family in FAMILIES.values() for name, there in family.items()}
    return known.get(place, type(value).__name__.lower())


def find_strategy(spec: str | Strategy, options: Mapping[str, Any] | None = None) -> Strategy:
    """Finds a strategy by name or place ("mine.py:Mine"), or takes an object; sets these fields of it.

    Raises:
        UnknownNameError: there is no such strategy or option; the message names the nearest one.
        ConfigError: the file or the class in it cannot be loaded.
    """
    found = _find("strategy", spec, options or {})
    if not isinstance(found, ServerStrategy | GroupStrategy | PeerStrategy | SharedMemoryStrategy):
        raise ConfigError(
            f"strategy {spec!r} makes an object of class {type(found).__name__}; expected a strategy: derive the "
            "class from gradstream.strategies.ServerStrategy, GroupStrategy, PeerStrategy or SharedMemoryStrategy"
        )
    return found


def find_optimizer(spec: str | Optimizer, options: Mapping[str, Any] | None = None) -> Optimizer:
    """Finds an update rule in the same way as `find_strategy`, with the same errors."""
    _check_ours(spec)
    found = _find("optimizer", spec, options or {})
    missing = [name for name in ("lr", "state_names", "apply") if not hasattr(found, name)]
    if missing:
        raise ConfigError(
            f"optimizer {spec!r} is a {type(found).__name__} without {', '.join(missing)}; "
            "expected an update rule: see gradstream.optim.base"
        )
    return cast(Optimizer, found)


def find_codec(spec: str | Codec | PowerSGD, options: Mapping[str, Any] | None = None) -> Codec | PowerSGD:
    """Finds a codec in the same way as `find_strategy`, with the same errors."""
    if isinstance(spec, type):
        raise ConfigError(
            f"codec is the class {spec.__name__}; expected an object, {spec.__name__}(), or a name"
        )
    if spec in ("", "none", "None"):
        raise ConfigError(f"codec {spec!r} is no codec; leave codec out to send numbers as they are")
    found = _find("codec", spec, options or {})
    if isinstance(found, PowerSGD):
        return found
    missing = [
        name for name in ("encoded_bytes", "encode", "decode", "state_names") if not hasattr(found, name)
    ]
    if missing:
        raise ConfigError(
            f"codec {spec!r} is a {type(found).__name__} without {', '.join(missing)}; expected a name "
            f"({', '.join(sorted(CODECS))}), or a codec: see gradstream.codec.base"
        )
    return cast(Codec, found)


def _check_ours(spec: object) -> None:
    """Raises ConfigError for an optimizer of torch, or for its class."""
    cls = spec if isinstance(spec, type) else type(spec)
    if any(base.__module__ == "torch.optim.optimizer" for base in cls.__mro__):
        own = cls.__name__ if cls.__name__.lower() in OPTIMIZERS else "SGD"
        raise ConfigError(
            f"optimizer is {'' if cls is spec else 'a '}torch.optim.{cls.__name__}, which updates tensors of "
            f"its own; expected an update rule of gradstream: gradstream.optim.{own}(lr=0.01), for example. "
            "A training loop of your own keeps torch's: gradstream.join()"
        )


def find_dataset(spec: str, options: Mapping[str, Any] | None = None) -> Dataset:
    """Finds a data set by name or place, and makes it with these arguments.

    Raises:
        UnknownNameError, ConfigError: as `find_strategy`; or the function does not return a data set.
        DataError: the data cannot be read.
    """
    found = _find("data set", spec, options or {})
    if not (hasattr(found, "batch") or hasattr(found, "feed")) or not hasattr(found, "num_samples"):
        raise ConfigError(
            f"data set {spec!r} makes a {type(found).__name__}; expected a Dataset: see gradstream.data.base"
        )
    return cast(Dataset, found)


def catalogue(kind: str) -> list[Plugin]:
    """All members of a family that have a name: the built-in ones, then those of installed packages."""
    own = [Plugin(kind, name, place, BUILT_IN) for name, place in FAMILIES[kind].items()]
    return [*own, *installed(kind)]


def class_of(kind: str, spec: Any) -> Callable[..., Any]:
    """The class of a member of a family; a function for data sets and some built-in names.

    Args:
        kind: a key of `plugins.GROUPS`, such as "strategy" or "optimizer".
        spec: name, place, class, or the member itself.

    Raises:
        ConfigError, UnknownNameError: as `find_strategy`.
    """
    if isinstance(spec, str):
        return _class(kind, spec)
    return spec if isinstance(spec, type) else type(spec)


def text_of_optimizer(
    optimizer: Optimizer,
    groups: Sequence[Mapping[str, Any]] = (),
    ranges: Sequence[tuple[str, int, int]] = (),
) -> str:
    """Writes a built-in update rule as text, the same for equal rules; `optimizer_of_text` reads it.

    Args:
        optimizer: the update rule.
        groups: parameter groups as in `Job.groups`, by the names in `ranges`.
        ranges: (name, start, stop) of parts of the flat vector, where there are groups.
    """
    described = describe(optimizer)
    text = {key: described[key] for key in ("class", "fields")}
    if groups:
        text |= {"groups": list(groups), "ranges": list(ranges)}
    return json.dumps(text, sort_keys=True)


@dataclasses.dataclass(frozen=True, slots=True)
class _Rule:
    """An update rule as a text has it; the text calls `place` "class"."""

    place: str
    fields: Mapping[str, Any]
    groups: Sequence[Mapping[str, Any]] = ()
    ranges: Sequence[tuple[str, int, int]] = ()


def _check_plain(fields: Mapping[str, Any]) -> None:
    """Raises ValueError for a field that is a table: it would be made into an object of a class that it names."""
    for name, value in fields.items():
        if isinstance(value, Mapping) or (
            isinstance(value, list | tuple) and any(isinstance(one, Mapping | list) for one in value)
        ):
            raise ValueError(f"{name[:80]!r} is a table: no peer may name a place of code")


def optimizer_of_text(text: str) -> tuple[Optimizer, GroupedRule | None]:
    """Reads the update rule of a worker; the second value also has the settings of groups, or is None.

    Raises:
        ConfigError: the rule is not built in: no code is loaded because a peer names it.
    """
    try:
        described = parse_json(text, max_bytes=MAX_RULE_BYTES)
        described["place"] = described.pop("class")
        check_record(_Rule, described)
        rule = _Rule(**described)
        _check_plain(rule.fields)
        for group in rule.groups:
            _check_plain(group)
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ConfigError(
            f"this node cannot read the update rule that another one has sent: {text[:80]!r}: {error}"
        ) from error
    if rule.place not in OPTIMIZERS.values():
        raise ConfigError(
            f"update rule {rule.place[:80]!r} is not built in; expected one of {', '.join(sorted(OPTIMIZERS))}"
        )
    try:
        optimizer = find_optimizer(rule.place, rule.fields)
        if not rule.groups and not isinstance(optimizer, ByShape):
            return optimizer, None
        return optimizer, GroupedRule(optimizer, groups_of(rule.groups, optimizer), rule.ranges)
    except (ValueError, TypeError, KeyError, AttributeError, ArithmeticError) as error:
        if isinstance(error, ConfigError):
            raise
        raise ConfigError(
            f"this node cannot make the update rule that another one has sent: {text[:80]!r}: {error}"
        ) from error


def describe(value: Any) -> dict[str, Any]:
    """Describes an object as JSON, from which `find_…` makes it again in another process.

    Returns:
        {"class": ..., "fields": {...}, "defaults": {...}}. The class is "module:Class", or
        "file.py:Class", or "" if it is defined in the job file itself, which every node runs.
        A field that is such an object itself (a schedule) becomes {"class": ..., "fields": ...}, a
        function {"function": place}; the place is "" if there is none (see `check_places`).
    """
    cls = type(value)
    entries = dataclasses.fields(value) if dataclasses.is_dataclass(value) else ()
    return {
        "class": f"{place}:{cls.__qualname__}" if (place := _place(cls)) else "",
        "fields": {entry.name: described(getattr(value, entry.name)) for entry in entries if entry.init},
        "defaults": {
            e.name: e.default
            for e in entries
            if not isinstance(e.default, property) and e.default is not dataclasses.MISSING  # of a protocol
        },
    }


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
        module = _import("function", place, file)
    function = getattr(module, name, None)
    if not callable(function):
        functions = [key for key, value in vars(module).items() if inspect.isfunction(value)]
        raise UnknownNameError(f"function in {file}", name, functions)
    return cast(Callable[..., Any], function)


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


def described(value: Any) -> Any:
    """A field as JSON holds it."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        described = describe(value)
        return {"class": described["class"] or place_of(type(value)), "fields": described["fields"]}
    if callable(value):
        try:
            return {"function": place_of(value)}
        except ConfigError:
            return {"function": ""}
    return value


def check_places(value: Any) -> None:
    """Raises ConfigError if a field is a function that other processes cannot find."""
    for entry in dataclasses.fields(value) if dataclasses.is_dataclass(value) else ():
        field = getattr(value, entry.name)
        if callable(field) and not dataclasses.is_dataclass(field):
            place_of(field)
        else:
            check_places(field)


def revived(value: Any) -> Any:
    """Makes the object or function that `describe` has written as a table; returns other values unchanged."""
    if isinstance(value, Mapping) and value.keys() == {"function"}:
        return find_function(_text(value["function"]))
    if isinstance(value, Mapping) and value.keys() == {"class", "fields"}:
        if not isinstance(value["fields"], Mapping):
            raise ConfigError(f"the fields of {value['class']!r}: expected a table")
        _text(value["class"])
        fields = {name: revived(field) for name, field in value["fields"].items()}
        return _make("field", value["class"], find_function(value["class"]), fields)
    return value


def _text(place: object) -> str:
    if not isinstance(place, str):
        raise ConfigError(f"a place of type {type(place).__name__}: expected 'file.py:name' or 'module:name'")
    return place


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
    spec = importlib.util.spec_from_file_location(name, path)
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


def _find(kind: str, spec: Any, options: Mapping[str, Any]) -> Any:
    options = {name: revived(value) for name, value in options.items()}
    if isinstance(spec, str):
        return _make(kind, spec, _class(kind, spec), options)
    if isinstance(spec, type):
        return _make(kind, spec.__name__, spec, options)
    return _changed(kind, spec, options)


def _class(kind: str, spec: str) -> Callable[..., Any]:
    """The class of a member; a function for some names, and for data sets."""
    assert kind in GROUPS, kind
    place, colon, name = spec.rpartition(":")
    if not colon:
        offer = choose(kind, FAMILIES[kind], spec)
        if offer is None:
            raise UnknownNameError(kind, spec, {known.name for known in catalogue(kind)})
        made: Callable[..., Any] = offer.load()
        return made
    module = load_module(Path(place)) if place.endswith(".py") else _import(kind, spec, place)
    found = getattr(module, name, None)
    fits = callable if kind in ("data set", "codec") else _is_class
    if not fits(found):
        public = [key for key, value in vars(module).items() if fits(value) and not key.startswith("_")]
        raise UnknownNameError(f"{kind} in {place}", name, public)
    return cast(Callable[..., Any], found)


def _is_class(value: object) -> bool:
    return isinstance(value, type)


def _import(kind: str, spec: str, module: str) -> ModuleType:
    try:
        return importlib.import_module(module)
    except (ModuleNotFoundError, ValueError, TypeError) as error:  # or a name that no module has
        raise ConfigError(
            f"{kind} {spec!r}: there is no module {module!r}; name a file with .py: file.py:Class"
        ) from error


def _make(kind: str, name: str, cls: Callable[..., Any], options: Mapping[str, Any]) -> Any:
    _check_options(kind, name, cls, options)
    try:
        return cls(**options)
    except TypeError as error:
        _check_complete(kind, name, cls, options)
        raise ConfigError(f"{kind} {name!r}: {error}") from error


def _check_complete(kind: str, name: str, cls: Callable[..., Any], options: Mapping[str, Any]) -> None:
    """Raises ConfigError if an option without a default is missing."""
    missing = [
        entry.name
        for entry in inspect.signature(cls).parameters.values()
        if entry.default is entry.empty
        and entry.kind not in (entry.VAR_POSITIONAL, entry.VAR_KEYWORD)
        and entry.name not in options
    ]
    if missing:
        given = ", ".join(f"{option}=..." for option in missing)
        flag = ", or --lr on the command line" if kind == "optimizer" and "lr" in missing else ""
        raise ConfigError(
            f"{kind} {name!r} lacks {', '.join(missing)}; expected an object that has it: "
            f"{cls.__name__}({given}){flag}"
        )


def _changed(kind: str, value: Any, options: Mapping[str, Any]) -> Any:
    if not options:
        return value
    _check_options(kind, type(value).__name__, type(value), options)
    return dataclasses.replace(value, **options)


def _check_options(kind: str, name: str, cls: Callable[..., Any], options: Mapping[str, Any]) -> None:
    if not options:
        return
    fields = list(inspect.signature(cls).parameters)
    for option in options:
        if option not in fields:
            raise UnknownNameError(f"option of {kind} {name!r}", option, fields)


def _place(cls: type) -> str:
    module = sys.modules.get(cls.__module__)
    if module is None or cls.__module__.startswith("__"):
        return ""
    return str(module.__file__) if cls.__module__.startswith("_gradstream_") else cls.__module__


def plain(value: Any) -> Any:
    """The value of a field as JSON holds it."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return dataclasses.asdict(value)
    if isinstance(value, Path):
        return str(value)
    if isinstance(value, str) or value is None:
        return value
    if isinstance(value, Sequence):
        return list(value)
    return value
