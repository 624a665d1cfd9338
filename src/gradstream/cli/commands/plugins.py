"""`gradstream plugins`."""

from __future__ import annotations

import json
from collections import Counter
from typing import TYPE_CHECKING

import click

from gradstream.cli.options import json_option

if TYPE_CHECKING:
    from gradstream.job.plugins import Plugin


@click.command()
@json_option
def plugins(as_json: bool) -> None:
    """Lists strategies, optimizers and data sets by name, with the package that each comes from.

    It imports the plugins of installed packages to check them. A plugin that cannot be imported, or has
    the name of another one, cannot be used by that name: a warning on stderr says so.

    \b
    Examples:
      gradstream plugins
    """
    from gradstream.job.plugins import GROUPS
    from gradstream.job.registry import catalogue

    rows = [(offer, fault) for kind in GROUPS for offer, fault in examined(catalogue(kind))]
    for _, fault in rows:
        if fault:
            click.echo(f"warning: {fault}", err=True)
    if as_json:
        click.echo(json.dumps([_record(offer, fault) for offer, fault in rows]))
        return
    table = [(offer.kind, offer.name, offer.origin, "broken" if fault else "") for offer, fault in rows]
    widths = [max(len(row[column]) for row in table) for column in range(4)]
    for row in table:
        click.echo("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip())


def examined(offers: list[Plugin]) -> list[tuple[Plugin, str]]:
    """Each member of one family with its fault, or "". Built-in members are not loaded."""
    from gradstream.errors import ConfigError
    from gradstream.job.plugins import BUILT_IN, key_of

    times = Counter(key_of(offer.name) for offer in offers)
    rows = []
    for offer in offers:
        fault = ""
        if offer.origin != BUILT_IN:
            try:
                offer.load()
            except ConfigError as error:
                fault = str(error)
            if not fault and times[key_of(offer.name)] > 1:
                same = (other for other in offers if key_of(other.name) == key_of(offer.name))
                fault = f"{offer.kind} {offer.name!r} is the name of {' and '.join(map(str, same))}"
        rows.append((offer, fault))
    return rows


def _record(offer: Plugin, fault: str) -> dict[str, str | None]:
    return {
        "kind": offer.kind,
        "name": offer.name,
        "origin": offer.origin,
        "place": offer.place,
        "fault": fault or None,
    }
