"""`gradstream check`."""

from __future__ import annotations

import json

import click

from gradstream.cli.options import json_option


@click.command()
@click.argument("strategy")
@json_option
def check(strategy: str, as_json: bool) -> None:
    """Checks the properties of a STRATEGY: a name, or FILE.py:Class.

    It makes about a hundred small runs on virtual time, in seconds. Exit status 1 if a property does
    not hold.

    \b
    Examples:
      gradstream check mine.py:Mine
    """
    from gradstream.testing import BrokenPropertiesError, check_strategy

    try:
        report = check_strategy(strategy)
    except BrokenPropertiesError as broken:
        report = broken.report
    if as_json:
        results = [
            {"property": one.name, "says": one.says, "holds": one.holds, "seen": one.seen}
            for one in report.results
        ]
        click.echo(json.dumps({"strategy": report.strategy, "results": results}))
    else:
        click.echo(str(report))
        for one in report.broken:
            click.echo(f"{one.name}: {one.says}", err=True)
    raise SystemExit(1 if report.broken else 0)
