"""`gradstream evaluate`."""

from __future__ import annotations

from pathlib import Path

import click

from gradstream.cli.options import json_option


@click.command()
@click.argument("run", type=click.Path(path_type=Path))
@click.option(
    "--checkpoint",
    metavar="NAME",
    help="step-…, best or final. By default the final parameters, or else the newest checkpoint.",
)
@click.option("--data", metavar="DATA", help="Another data set: a name, or file.py:function.")
@json_option
def evaluate(run: Path, checkpoint: str | None, data: str | None, as_json: bool) -> None:
    """Evaluates the parameters of a run on the held-out samples of its data.

    RUN is a run directory. The command reads the job again from its file, which must not have changed.
    For a run that has failed, it evaluates the newest checkpoint.

    \b
    Examples:
      gradstream evaluate runs/20261120-120000-mine
      gradstream evaluate runs/20261120-120000-mine --checkpoint step-00000400
      gradstream evaluate runs/20261120-120000-mine --data other.py:holdout
    """
    import dataclasses
    import json

    from gradstream.cli.report import evaluation_rows, print_rows
    from gradstream.job.registry import find_dataset
    from gradstream.run.final_evaluation import keep_evaluation
    from gradstream.run.reopen import reopen
    from gradstream.run.result import FINAL_MODEL

    opened, file = reopen(run, checkpoint=checkpoint, data=None if data is None else find_dataset(data))
    evaluation = opened.evaluate()
    if data is None and file == run / FINAL_MODEL:
        keep_evaluation(opened, evaluation)
    if as_json:
        record = {"parameters": str(file), "evaluation": dataclasses.asdict(evaluation)}
        click.echo(json.dumps(record))
    else:
        print_rows([*evaluation_rows(evaluation), ("parameters", str(file))])
