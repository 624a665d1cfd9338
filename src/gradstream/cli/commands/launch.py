"""`gradstream launch`."""

from __future__ import annotations

import shlex
import sys
from pathlib import Path
from typing import Any

import click

from gradstream.cli.launch_files import ENGINES, LaunchFile
from gradstream.cli.options import JobCommand, arguments_of_job
from gradstream.errors import ConfigError


@click.command(cls=JobCommand)
@click.argument("job", metavar="JOB.py", type=click.Path(path_type=Path, dir_okay=False))
@click.option(
    "--emit", "engine", type=click.Choice(ENGINES), required=True, help="The engine that is to run the job."
)
@click.option("--name", help="Name of the run; by default that of the file.")
@click.option("--nodes", type=int, default=2, show_default=True, help="Machines, nodes, pods or containers.")
@click.option("--cpus", type=int, default=4, show_default=True, help="Cores of each.")
@click.option("--memory", type=int, default=8, show_default=True, help="Memory of each, in GiB.")
@click.option("--gpus", type=int, default=0, show_default=True, help="GPUs of each.")
@click.option("--hours", type=int, default=24, show_default=True, help="Longest time of a job of Slurm.")
@click.option(
    "--storage", type=int, default=20, show_default=True, help="Disk for checkpoints and data, in GiB."
)
@click.option("--image", default="", help="Container image that has gradstream.")
@click.option("--data", default="", metavar="NAME", help="Data set to fetch before: `gradstream data info`.")
@click.option("--spot", is_flag=True, help="Kubernetes: on nodes, too, that can be taken away.")
@click.option(
    "--output",
    type=click.Path(path_type=Path, dir_okay=False),
    help="File to write, in place of the terminal.",
)
def launch(job: Path, engine: str, name: str | None, output: Path | None, **given: Any) -> None:
    """Prints a file with which another engine runs a job on several machines.

    The file is complete: token as a secret, TLS, resources, preemption, and data. Look at it, change it, keep
    it beside the job.

    \b
    Examples:
      gradstream launch --emit torchrun JOB.py --output job.sh
      gradstream launch --emit slurm JOB.py --nodes 8 --cpus 16 --output job.sbatch
      gradstream launch --emit kubernetes JOB.py --image registry.example/gradstream
      gradstream launch --emit compose JOB.py --image gradstream
    """
    words = [
        "gradstream",
        *(" ".join(word.split()) for word in sys.argv[1:]),
    ]  # it goes into a comment of one line
    file = LaunchFile(
        job=job,
        name=name or job.stem.lower().replace("_", "-"),
        arguments=arguments_of_job(),
        command=shlex.join(words),
        **given,
    )
    text = file.render(engine)
    if output is None:
        click.echo(text, nl=False)
        return
    try:
        with open(output, "x") as made:
            made.write(text)
    except OSError as error:
        raise ConfigError(f"{output} is not written: {error.strerror}") from error
    click.echo(f"{output} is written; its first lines say how it is used")
