"""Finds strategies, update rules and data sets by name: only this module lists the concrete classes.

A new method is one new file, one line here, and the lists that CONTRIBUTING names. A user's own class needs no line:
its place names it, "file.py:Class" or "module:Class". An installed package registers a name (see `plugins`).
"""

from __future__ import annotations

import dataclasses
import functools
import importlib
import importlib.metadata
import os
import sys
import traceback
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

from gradstream import strategies
from gradstream.codec.base import Codec
from gradstream.codec.low_rank import PowerSGD
from gradstream.data.base import Dataset
from gradstream.errors import ConfigError, UnknownNameError
from gradstream.job.code import import_module, load_module
from gradstream.job.descriptions import check_options, made, revived
from gradstream.optim.base import Optimizer
from gradstream.strategies.base import (
    GroupStrategy,
    PeerStrategy,
    ServerStrategy,
    SharedMemoryStrategy,
    Strategy,
)

# ---- plugins -----------------------------------------------------------------------------
# Plugins: strategies, update rules and data sets of installed packages.
#
# A package registers a member by an entry point, in two lines of its `pyproject.toml`:
#
#     [project.entry-points."gradstream.strategies"]
#     patient = "acme.sgd:Patient"
#
# Listing plugins reads metadata only: no code of a package runs until the plugin is loaded.

GROUPS = {
    "strategy": "gradstream.strategies",
    "optimizer": "gradstream.optimizers",
    "codec": "gradstream.codecs",
    "data set": "gradstream.datasets",
}
"""Entry-point group of each family."""

BUILT_IN = "gradstream"
"""Origin of the built-in members."""


@dataclass(frozen=True, slots=True)
class Plugin:
    """One member of a family, by name.

    Args:
        kind: the family, a key of `GROUPS`.
        name: short name.
        place: "module:attribute".
        origin: the package that registers it, with its version.
    """

    kind: str
    name: str
    place: str
    origin: str

    def __str__(self) -> str:
        return f"{self.place} ({self.origin})"

    def load(self) -> Any:
        """Imports the member.

        Raises:
            ConfigError: the import failed; the message has the error.
        """
        module, _, name = self.place.partition(":")
        try:
            member = importlib.import_module(module)
            for part in name.split("."):
                member = getattr(member, part)
        except (Exception, SystemExit) as error:  # the package's code may raise anything
            last = traceback.format_exception_only(error)[-1].strip()
            raise ConfigError(
                f"{self.kind} {self.name!r} of {self.origin} cannot be loaded from {self.place}: {last}; "
                "mend or uninstall that package"
            ) from error
        return member


def installed(kind: str) -> list[Plugin]:
    """The members of a family that installed packages register, sorted by name and place."""
    return list(_offers(kind, tuple((path, _changed_ns(path)) for path in sys.path)))


def _changed_ns(path: str) -> int:
    try:
        return os.stat(path or ".").st_mtime_ns
    except OSError:
        return 0


@functools.lru_cache(maxsize=len(GROUPS))
def _offers(kind: str, where: tuple[tuple[str, int], ...]) -> list[Plugin]:
    """See `installed`. Cached: reading the metadata takes 2 ms, which a short simulation should not pay twice."""
    offers = []
    for entry in importlib.metadata.entry_points(group=GROUPS[kind]):
        package = entry.dist
        origin = f"{package.name} {package.version}" if package is not None else "an unnamed package"
        place = entry.value.partition("[")[0].strip().replace(" ", "")
        offers.append(Plugin(kind, entry.name, place, origin))
    return sorted(offers, key=lambda offer: (key_of(offer.name), offer.place, offer.origin))


def choose(kind: str, built_in: Mapping[str, str], name: str) -> Plugin | None:
    """The built-in member or plugin of this name; None if there is none.

    Args:
        kind: the family.
        built_in: places of the built-in members, by name.
        name: case and the choice between _ and - do not matter.

    Raises:
        ConfigError: several members have this name; the message lists them.
    """
    own = [Plugin(kind, key, place, BUILT_IN) for key, place in built_in.items()]
    members = [offer for offer in (*own, *installed(kind)) if key_of(offer.name) == key_of(name)]
    if len(members) > 1:
        both = " and ".join(map(str, members))
        raise ConfigError(
            f"{kind} {name!r} is the name of {both}: uninstall the plugin, or name the one that you mean by its place: "
            f"{members[-1].place}"
        )
    return members[0] if members else None


def key_of(name: str) -> str:
    """The name in lower case and with hyphens: names with equal keys count as one."""
    return name.lower().replace("_", "-")


# ---- registry ----------------------------------------------------------------------------

STRATEGIES = {name: f"gradstream.strategies.{place}" for name, place in strategies.BUILT_IN.items()}

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
    "dgc": "gradstream.codec.sparse:DGC",
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

FAMILIES: Mapping[str, Mapping[str, str]] = {
    "strategy": STRATEGIES,
    "optimizer": OPTIMIZERS,
    "codec": CODECS,
    "data set": DATASETS,
}
"""Places of the built-in members of each family, by name."""


def name_of(value: object) -> str:
    """The name of a built-in strategy or update rule; for other classes, the class name in lower case."""
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
    strategy = _find("strategy", spec, options or {})
    if not isinstance(strategy, ServerStrategy | GroupStrategy | PeerStrategy | SharedMemoryStrategy):
        raise ConfigError(
            f"strategy {spec!r} makes an object of class {type(strategy).__name__}; expected a strategy: derive the "
            "class from gradstream.strategies.ServerStrategy, GroupStrategy, PeerStrategy or SharedMemoryStrategy"
        )
    return strategy


def find_optimizer(spec: str | Optimizer, options: Mapping[str, Any] | None = None) -> Optimizer:
    """Finds an update rule like `find_strategy`, with the same errors."""
    _check_ours(spec)
    optimizer = _find("optimizer", spec, options or {})
    missing = [name for name in ("lr", "state_names", "apply") if not hasattr(optimizer, name)]
    if missing:
        raise ConfigError(
            f"optimizer {spec!r} is a {type(optimizer).__name__} without {', '.join(missing)}; "
            "expected an update rule: see gradstream.optim.base"
        )
    return cast(Optimizer, optimizer)


def find_codec(spec: str | Codec | PowerSGD, options: Mapping[str, Any] | None = None) -> Codec | PowerSGD:
    """Finds a codec like `find_strategy`, with the same errors."""
    if isinstance(spec, type):
        raise ConfigError(
            f"codec is the class {spec.__name__}; expected an object, {spec.__name__}(), or a name"
        )
    if spec in ("", "none", "None"):
        raise ConfigError(f"codec {spec!r} is no codec; leave codec out to send numbers as they are")
    codec = _find("codec", spec, options or {})
    if isinstance(codec, PowerSGD):
        return codec
    missing = [
        name for name in ("encoded_bytes", "encode", "decode", "state_names") if not hasattr(codec, name)
    ]
    if missing:
        raise ConfigError(
            f"codec {spec!r} is a {type(codec).__name__} without {', '.join(missing)}; expected a name "
            f"({', '.join(sorted(CODECS))}), or a codec: see gradstream.codec.base"
        )
    return cast(Codec, codec)


def find_dataset(spec: str, options: Mapping[str, Any] | None = None) -> Dataset:
    """Finds a data set by name or place, and makes it with these arguments.

    Raises:
        UnknownNameError, ConfigError: as `find_strategy`; or the function does not return a data set.
        DataError: the data cannot be read.
    """
    dataset = _find("data set", spec, options or {})
    if not (hasattr(dataset, "batch") or hasattr(dataset, "feed")) or not hasattr(dataset, "num_samples"):
        raise ConfigError(
            f"data set {spec!r} makes a {type(dataset).__name__}; expected a Dataset: see gradstream.data.base"
        )
    return cast(Dataset, dataset)


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


def _find(kind: str, spec: Any, options: Mapping[str, Any]) -> Any:
    options = {name: revived(value) for name, value in options.items()}
    if isinstance(spec, str):
        return made(kind, spec, _class(kind, spec), options)
    if isinstance(spec, type):
        return made(kind, spec.__name__, spec, options)
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
    module = load_module(Path(place)) if place.endswith(".py") else import_module(kind, spec, place)
    member = getattr(module, name, None)
    fits = callable if kind in ("data set", "codec") else _is_class
    if not fits(member):
        public = [key for key, value in vars(module).items() if fits(value) and not key.startswith("_")]
        raise UnknownNameError(f"{kind} in {place}", name, public)
    return cast(Callable[..., Any], member)


def _is_class(value: object) -> bool:
    return isinstance(value, type)


def _changed(kind: str, value: Any, options: Mapping[str, Any]) -> Any:
    if not options:
        return value
    check_options(kind, type(value).__name__, type(value), options)
    return dataclasses.replace(value, **options)


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
