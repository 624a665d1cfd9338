"""Plugins: strategies, update rules and data sets of installed packages.

A package registers one by an entry point, in two lines of its `pyproject.toml`:

    [project.entry-points."gradstream.strategies"]
    patient = "acme.sgd:Patient"

Listing plugins reads metadata only: no code of a package runs until the plugin is loaded.
"""

from __future__ import annotations

import functools
import importlib
import importlib.metadata
import os
import sys
import traceback
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from gradstream.errors import ConfigError

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
            found = importlib.import_module(module)
            for part in name.split("."):
                found = getattr(found, part)
        except (Exception, SystemExit) as error:  # the package's code may raise anything
            last = traceback.format_exception_only(error)[-1].strip()
            raise ConfigError(
                f"{self.kind} {self.name!r} of {self.origin} cannot be loaded from {self.place}: {last}; "
                "mend or uninstall that package"
            ) from error
        return found


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
    """See `installed`. To read the metadata takes 2 ms, which a short simulation does not take: so it is done once."""
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
        name: the name; case does not matter, nor whether it has _ or -.

    Raises:
        ConfigError: several members have this name; the message lists them.
    """
    own = [Plugin(kind, key, place, BUILT_IN) for key, place in built_in.items()]
    found = [offer for offer in (*own, *installed(kind)) if key_of(offer.name) == key_of(name)]
    if len(found) > 1:
        both = " and ".join(map(str, found))
        raise ConfigError(
            f"{kind} {name!r} is the name of {both}: uninstall the plugin, or name the one that you mean by its place: "
            f"{found[-1].place}"
        )
    return found[0] if found else None


def key_of(name: str) -> str:
    """The name in lower case and with hyphens: names of equal form count as one."""
    return name.lower().replace("_", "-")
