"""`gradstream check`."""

from __future__ import annotations

import json

import click

from gradstream.cli.options import json_option

__all__ = ["check"]


@click.command()
@click.argument("strategy")
@json_option
def check(strategy: str, as_json: bool) -> None:
    """Says which laws a STRATEGY obeys: a name, or FILE.py:Class.

    Some hundred small runs on virtual time; takes seconds. Exit status 1 if a law is broken.

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
        verdicts = [
            {"law": one.law, "says": one.says, "holds": one.holds, "seen": one.seen}
            for one in report.verdicts
        ]
        click.echo(json.dumps({"strategy": report.strategy, "verdicts": verdicts}))
    else:
        click.echo(str(report))
        for one in report.broken:
            click.echo(f"{one.law}: {one.says}", err=True)
    raise SystemExit(1 if report.broken else 0)
