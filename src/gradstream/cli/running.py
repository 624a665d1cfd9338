"""Runs a job under a progress display, then says what came of it."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import click

if TYPE_CHECKING:
    from gradstream.run import Run
    from gradstream.summary import EventDict

__all__ = ["OnEvent", "run_and_show"]

OnEvent = Callable[["EventDict"], None]


def run_and_show(run_job: Callable[[OnEvent], Run], as_json: bool) -> None:
    """Progress goes to stderr; figures to stdout, as a table or as one JSON object."""
    from gradstream.cli.display import Display
    from gradstream.cli.report import evaluate, json_text, show

    with Display() as display:
        run = run_job(display.on_event)
    evaluation = evaluate(run)
    if as_json:
        click.echo(json_text(run, evaluation))
    else:
        show(run, evaluation)
