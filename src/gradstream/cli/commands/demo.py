"""`gradstream demo`."""

from __future__ import annotations

import click

from gradstream.cli.options import json_option
from gradstream.cli.running import run_and_show

JOB = "gradstream.cli.demo_job:job"


@click.command()
@json_option
@click.option(
    "--faults", is_flag=True, help="Kill processes by SIGKILL meanwhile, and show that nothing is lost."
)
@click.option("--seed", default=0, show_default=True, help="Of --faults: draws who is killed, and when.")
@click.pass_context
def demo(context: click.Context, as_json: bool, faults: bool, seed: int) -> None:
    """Trains a small CNN on embedded images with 2 workers and 1 parameter server.

    With --faults, 3 workers and 2 shards train it twice: undisturbed, and while workers, a shard and the coordinator
    are killed. The status is 1 if a sample is lost or counts twice.

    \b
    Examples:
      gradstream demo
      gradstream demo --json
      gradstream demo --faults
    """
    if faults and as_json:
        raise click.UsageError("--faults prints a table and draws a picture: leave out --json")
    if faults:
        from gradstream.cli.demo_faults import run_with_faults

        context.exit(0 if run_with_faults(seed) else 1)
    from gradstream._train import train as run_job
    from gradstream.job.files import load_job

    click.echo(
        "A CNN on 5,000 images of Fashion-MNIST, 16 epochs: 2 workers, 1 parameter server, strategy downpour.",
        err=True,
    )
    job = load_job(JOB)
    run_and_show(lambda on_event: run_job(job, on_event=on_event), as_json)
