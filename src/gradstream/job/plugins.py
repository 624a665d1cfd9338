"""Plugins: members of a family that installed packages offer, found by entry point.

A package offers a strategy, say, by two lines of its `pyproject.toml`:

    [project.entry-points."gradstream.strategies"]
    patient = "acme.sgd:Patient"

Looking for offers reads metadata only: no code of a package runs until its member is asked for.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import traceback
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from gradstream.errors import ConfigError

__all__ = ["GROUPS", "HOUSE", "Plugin", "choose", "installed", "key_of"]

GROUPS = {
    "strategy": "gradstream.strategies",
    "optimizer": "gradstream.optimizers",
    "codec": "gradstream.codecs",
    "data set": "gradstream.datasets",
    "transport": "gradstream.transports",
}
"""Entry-point group of each family."""

HOUSE = "gradstream"
"""Origin of the house's own members."""


@dataclass(frozen=True, slots=True)
class Plugin:
    """One member of a family, by name.

    Args:
        kind: the family, a key of `GROUPS`.
        name: short name.
        place: "module:attribute".
        origin: the package that offers it, with its version.
    """

    kind: str
    name: str
    place: str
    origin: str

    def __str__(self) -> str:
        return f"{self.place} ({self.origin})"

    def load(self) -> Any:
        """The member itself; imports its module.

        Raises:
            ConfigError: that failed; says with what. Nothing else is affected.
        """
        module, _, name = self.place.partition(":")
        try:
            found = importlib.import_module(module)
            for part in name.split("."):
                found = getattr(found, part)
        except (Exception, SystemExit) as error:  # code of others: it may raise what it likes
            last = traceback.format_exception_only(error)[-1].strip()
            raise ConfigError(
                f"{self.kind} {self.name!r} of {self.origin} cannot be loaded from {self.place}: {last}; "
                "mend or uninstall that package"
            ) from error
        return found


def installed(kind: str) -> list[Plugin]:
    """What installed packages offer of a family, sorted by name and place."""
    offers = []
    for entry in importlib.metadata.entry_points(group=GROUPS[kind]):
        package = entry.dist
        origin = f"{package.name} {package.version}" if package is not None else "an unnamed package"
        place = entry.value.partition("[")[0].strip().replace(" ", "")
        offers.append(Plugin(kind, entry.name, place, origin))
    return sorted(offers, key=lambda offer: (key_of(offer.name), offer.place, offer.origin))


def choose(kind: str, house: Mapping[str, str], name: str) -> Plugin | None:
    """The member of this name: the house's own, or a plugin; None if there is none.

    Args:
        kind: the family.
        house: the house's own members, place by name.
        name: however it is spelt: case does not count, and _ is -.

    Raises:
        ConfigError: several have this name; says which, and how to name each of them.
    """
    own = [Plugin(kind, key, place, HOUSE) for key, place in house.items()]
    found = [offer for offer in (*own, *installed(kind)) if key_of(offer.name) == key_of(name)]
    if len(found) > 1:
        both = " and ".join(map(str, found))
        raise ConfigError(
            f"{kind} {name!r} is the name of {both}; uninstall one, or name the place instead: "
            f"{found[-1].place}"
        )
    return found[0] if found else None


def key_of(name: str) -> str:
    """What two names that count as one have in common."""
    return name.lower().replace("_", "-")
