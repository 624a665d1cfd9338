"""`gradstream train`."""

from __future__ import annotations

import sys
from typing import Any

import click

from gradstream.cli.machines import listen_options, listening_of, together_of
from gradstream.cli.options import (
    JobCommand,
    arguments_of_job,
    detach_option,
    job_options,
    load_job_with,
    words_beside,
    words_given,
)
from gradstream.cli.running import run_and_show, show_detached, show_dry_run


@click.command(cls=JobCommand)
@job_options
@listen_options
@click.option(
    "--engine", metavar="ENGINE", help="Run the nodes in a Ray cluster: ray, ray?cpus=4, ray://HOST:10001."
)
@click.option("--dry-run", is_flag=True, help="Check the job with a few minibatches, and keep nothing.")
@detach_option
def train(job: str, as_json: bool, engine: str | None, dry_run: bool, detach: bool, **given: Any) -> None:
    """Trains with worker and server processes, on this machine or on several.

    With --listen it prints the line that joins another machine, and begins when N machines have
    joined. --workers is the number of workers on all machines together.

    With --dry-run it checks the job and keeps nothing: it builds the model, checks memory and disk,
    then starts processes on this machine that push, fetch, make a checkpoint and evaluate it. Exit
    status 0, or 3 if a check fails.

    Where torchrun, srun or Kubernetes has started this command once on each machine, the first process
    trains and the others join it, with the token of GRADSTREAM_TOKEN_FILE; a job that is started again
    goes on from its newest checkpoint.

    With --engine ray, or ray://HOST:PORT, the nodes are actors of a Ray cluster, which places them and
    starts them again elsewhere. Its options are those of gradstream.run.ray.engine.RayEngine.

    Progress goes to stderr, figures to stdout. With --detach it returns at once; the run goes on without
    this terminal, and `gradstream attach` shows its progress.

    \b
    Examples:
      gradstream train JOB.py
      gradstream train JOB.py --dry-run
      gradstream train JOB.py --detach
      gradstream train JOB.py --strategy downpour --set push_every=10 --workers 4
      gradstream train JOB.py --workers 4 -- --hidden 64    # JOB.py finds --hidden 64 in sys.argv
      gradstream train JOB.py --listen 10.0.0.1 --wait 4
      gradstream train JOB.py --workers 4 --engine 'ray?cpus=2'
      gradstream train JOB.py --config slow-network.toml --json > figures.json
    """
    from gradstream._train import train as run_job

    names = ("listen", "wait", "workers_per_machine", "servers_on", "wait_s", "insecure", "token_file")
    machines = {name: given.pop(name) for name in names}
    config = given["config"]
    chosen = load_job_with(job, **given)
    if engine is not None:
        from gradstream._train import train_by_engine

        words = words_beside(job, config) + words_given(
            without=("engine", "run_dir", "as_json", "config"),
            not_with="--engine",
            refused=(*names, "dry_run", "detach"),
        )
        run_and_show(lambda on_event: train_by_engine(chosen, engine, words, on_event=on_event), as_json)
        return
    # The number in a job file is for one machine.
    workers = chosen.workers * chosen.split if "workers" in chosen.origins else None
    together = None if machines["listen"] or dry_run else together_of(detach=detach, **machines)
    if together is not None:
        from gradstream.untrusted import say

        if together.place.rank:
            place = together.place  # Ray names no job, but a folder for each process
            own = chosen.run_dir if place.least and not place.job else None
            sys.exit(together.follow(job, arguments_of_job(), say, own))
        run_and_show(lambda on_event: together.lead(chosen, workers=workers, on_event=on_event), as_json)
        return
    listening = listening_of(**machines, workers=workers)
    if dry_run:
        show_dry_run(chosen, as_json)
        return
    if detach:
        show_detached(run_job(chosen, listen=listening, detach=True), as_json)
        return
    run_and_show(lambda on_event: run_job(chosen, on_event=on_event, listen=listening), as_json)
