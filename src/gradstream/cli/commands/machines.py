"""Commands for several machines: start a job on them, join or leave it, and find out why a machine cannot join."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Iterable
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from gradstream.cli.launch_files import ENGINES, NAME, LaunchFile
from gradstream.cli.options import JobCommand, arguments_of_job, run_argument, token_of, token_options
from gradstream.errors import ConfigError
from gradstream.run.place import DEFAULT_PORT

if TYPE_CHECKING:
    from gradstream.machine.doctor import DoctorResult


@click.command(cls=JobCommand, context_settings={"ignore_unknown_options": True})
@click.argument("job", metavar="JOB.py[:FUNCTION]")
@click.argument("words", metavar="[OPTIONS OF TRAIN]", nargs=-1, type=click.UNPROCESSED)
@click.option(
    "--hosts", metavar="A,B,…", help="Machines that ssh reaches: run the job there. The first one trains."
)
@click.option(
    "--emit",
    "engine",
    type=click.Choice(list(ENGINES)),
    help="Print a file for this engine, which is to run the job.",
)
@click.option("--name", help="Name of the run; by default that of the file.")
@click.option(
    "--data", default="", metavar="NAME", help="Data set to fetch before; with --hosts, a folder to bring."
)
@click.option(
    "--with", "more", multiple=True, metavar="PATH", help="--hosts: bring this along: modules are found."
)
@click.option(
    "--python", default="python3", show_default=True, help="--hosts: program there that has gradstream."
)
@click.option(
    "--folder", default="~/.cache/gradstream/launch", show_default=True, help="--hosts: folder there."
)
@click.option("--port", type=int, default=DEFAULT_PORT, show_default=True, help="--hosts: where they meet.")
@click.option("--ssh", default="ssh", help='--hosts: the client and its options: "ssh -p 2222".')
@click.option(
    "--room",
    type=click.IntRange(min=0),
    default=0,
    metavar="N",
    help="--hosts: places for N machines more, which `gradstream add` has join while the others train.",
)
@click.option("--detach", is_flag=True, help="--hosts: return when the run has started.")
@click.option(
    "--nodes", type=int, default=2, show_default=True, help="--emit: machines, nodes, pods or containers."
)
@click.option(
    "--least",
    type=int,
    default=0,
    metavar="N",
    help="--emit kubernetes: begin with N of them; the Job is made larger and smaller meanwhile.",
)
@click.option("--cpus", type=int, default=4, show_default=True, help="--emit: cores of each.")
@click.option("--memory", type=int, default=8, show_default=True, help="--emit: memory of each, in GiB.")
@click.option("--gpus", type=int, default=0, show_default=True, help="--emit: GPUs of each.")
@click.option(
    "--hours", type=int, default=24, show_default=True, help="--emit: longest time of a job of Slurm."
)
@click.option(
    "--storage",
    type=int,
    default=20,
    show_default=True,
    help="--emit: disk for checkpoints and data, in GiB.",
)
@click.option("--image", default="", help="--emit: container image that has gradstream.")
@click.option("--spot", is_flag=True, help="--emit kubernetes: on nodes, too, that can be taken away.")
@click.option(
    "--output",
    type=click.Path(path_type=Path, dir_okay=False),
    help="--emit: file to write, in place of the terminal.",
)
def launch(
    job: str, words: tuple[str, ...], hosts: str | None, engine: str | None, name: str | None, **options: Any
) -> None:
    """Runs a job on machines that ssh reaches, or prints a file with which another engine runs it.

    With --hosts it checks every machine, brings the job's files, starts the run, shows it until its end, and
    brings logs and checkpoints back; options of `gradstream train` may follow the job. Ctrl-C leaves the run
    alone: `gradstream status`, `logs`, `attach` and `stop` take its local folder.

    With --emit the file is complete: token as a secret, TLS, resources, preemption, and data. Look at it, change
    it, keep it beside the job.

    \b
    Examples:
      gradstream launch --hosts a,b,c JOB.py
      gradstream launch --hosts a,b JOB.py --data ~/data --strategy local-sgd --epochs 3
      gradstream launch --emit torchrun JOB.py --output job.sh
      gradstream launch --emit slurm JOB.py --nodes 8 --cpus 16 --output job.sbatch
      gradstream launch --emit kubernetes JOB.py --image registry.example/gradstream
      gradstream launch --emit compose JOB.py --image gradstream
    """
    if (hosts is None) is (engine is None):
        raise ConfigError(
            "expected --hosts A,B,… to run the job on these machines, or --emit ENGINE to print a file"
        )
    file, _, function = job.partition(":")
    name = name or (function or Path(job).stem).lower().replace("_", "-")
    if hosts is not None:
        _on_hosts(Path(file), function, words, hosts, name, **options)
    elif words:
        raise ConfigError(f"--emit: unknown option {words[0]}; arguments of the job file follow after --")
    else:
        _emit(Path(job), str(engine), name, **options)


def _on_hosts(
    job: Path, function: str, words: tuple[str, ...], hosts: str, name: str, **options: Any
) -> None:
    from gradstream.cli.commands.jobs import train
    from gradstream.cli.hosts import launch_on
    from gradstream.ext.ssh.fleet import Fleet

    names = [host.strip() for host in hosts.split(",") if host.strip()]
    if len(names) < 2 or len(set(names)) < len(names):
        raise ConfigError(f"--hosts {hosts}: expected two machines or more, each one once: --hosts a,b")
    if any(name.startswith("-") for name in names):
        raise ConfigError(f"--hosts {hosts}: a name that begins with - would be an option of ssh")
    if not NAME.fullmatch(name):
        raise ConfigError(f"--name {name!r}: expected small letters, digits and dashes: --name mine")
    if not job.is_file():
        raise ConfigError(f"there is no job file {job}; `gradstream new` writes one")
    data = Path(options["data"]).expanduser() if options["data"] else None
    if data is not None and not data.is_dir():
        raise ConfigError(f"--data {data}: expected a folder; GRADSTREAM_DATA names its copy on the machines")
    train.make_context("train", [job.name, *words], resilient_parsing=False).close()
    arguments = arguments_of_job()
    fleet = Fleet(
        name=name,
        hosts=[*names, *[""] * options["room"]],
        least=len(names) if options["room"] else 0,
        ssh=shlex.split(options["ssh"]),
        python=options["python"],
        folder=options["folder"].rstrip("/"),
        port=options["port"],
        job=f"{job.name}:{function}" if function else job.name,
        arguments=[*words, *(["--", *arguments] if arguments else [])],
        data=_place_there(data) if data else "",
    )
    launch_on(
        fleet,
        Path("runs") / name,
        job,
        [Path(path) for path in options["more"]],
        data,
        detach=options["detach"],
    )


def _place_there(data: Path) -> str:
    """Where the machines may have the data already: at the same path, below their home folder if it is in ours."""
    try:
        return f"~/{data.resolve().relative_to(Path.home().resolve())}"
    except ValueError:
        return str(data.resolve())


def _emit(job: Path, engine: str, name: str, output: Path | None, **options: Any) -> None:
    words = [
        "gradstream",
        *(" ".join(word.split()) for word in sys.argv[1:]),
    ]  # goes into a one-line comment
    kept = ("nodes", "least", "cpus", "memory", "gpus", "hours", "storage", "image", "data", "spot")
    file = LaunchFile(
        job=job,
        name=name,
        arguments=arguments_of_job(),
        command=shlex.join(words),
        file="" if output is None else output.name,
        **{key: options[key] for key in kept},
    )
    text = file.render(engine)
    if output is None:
        click.echo(text, nl=False)
        return
    try:
        with open(output, "x", encoding="utf-8") as made:
            made.write(text)
    except OSError as error:
        raise ConfigError(f"{output} is not written: {error.strerror}") from error
    click.echo(f"{output} is written; its first lines say how it is used")


@click.command(cls=JobCommand)
@click.argument("address", metavar="ADDR:PORT")
@click.argument("job", metavar="JOB")
@token_options
@click.option("--fingerprint", metavar="sha256:…", help="Fingerprint of the launcher's certificate.")
@click.option("--name", help="Name of this machine; by default its host name.")
@click.option("--insecure", is_flag=True, help="Send plain text; the launcher must have --insecure too.")
@click.option("--run-dir", type=click.Path(path_type=Path, file_okay=False), help="Folder for logs.")
def join(
    address: str,
    job: str,
    token: str | None,
    token_file: Path | None,
    fingerprint: str | None,
    name: str | None,
    insecure: bool,
    run_dir: Path | None,
) -> None:
    """Takes part in a run that `gradstream train JOB --listen` has started on another machine.

    That command prints the line to run here. JOB is this machine's copy of the job file, with this
    machine's copy of the data; if either differs from the launcher's, the launcher refuses this
    machine. The exit status is that of the run.

    \b
    Examples:
      gradstream join 10.0.0.1:41873 JOB.py --token 0123… --fingerprint sha256:4567…
      GRADSTREAM_TOKEN=0123… gradstream join 10.0.0.1:41873 JOB.py --fingerprint sha256:4567…
    """
    from gradstream.run.remote.address import Address
    from gradstream.run.remote.join import Joining
    from gradstream.run.remote.join import join as take_part
    from gradstream.untrusted import say

    known = token_of(token, token_file)
    if not known:
        raise ConfigError("join needs the token that the launcher has printed: --token, or GRADSTREAM_TOKEN")
    where = Address.parse(address, "ADDR:PORT")
    if not where.port:
        raise ConfigError(f"{address}: the port is missing; the launcher has printed host:port")
    joining = Joining(
        address=where,
        job=job,
        arguments=arguments_of_job(),
        token=known,
        fingerprint=fingerprint,
        machine=name,
        insecure=insecure,
        run_dir=run_dir,
    )
    sys.exit(take_part(joining, say))


TEXT_BYTES = 4096
MARKS = {"ok": " ", "warning": "!", "failed": "✗"}


@click.command()
@click.argument("address", metavar="[ADDR:PORT]", required=False)
@token_options
@click.option(
    "--fingerprint", metavar="sha256:…", help="Fingerprint of the launcher's certificate, as printed."
)
@click.option(
    "--folder",
    type=click.Path(path_type=Path, file_okay=False),
    default=Path(),
    help="Folder for runs; the current one by default.",
)
def doctor(
    address: str | None, token: str | None, token_file: Path | None, fingerprint: str | None, folder: Path
) -> None:
    """Checks whether this machine can train, alone or with the launcher at ADDR:PORT.

    Without an address, it checks versions, memory, disk, limits and addresses. With the address of a
    waiting or training launcher, it also checks its name, TCP and TLS; with the token, gRPC, round
    trip, clock, the speed each way and the launcher's versions. Exit status 3 if a check fails.

    \b
    Examples:
      gradstream doctor
      gradstream doctor 10.0.0.1:41873 --token 0123… --fingerprint sha256:4567…
    """
    from gradstream.errors import ConfigError
    from gradstream.machine.doctor import look_here
    from gradstream.untrusted.text import escaped

    findings: Iterable[DoctorResult] = look_here(folder.resolve())
    if address is not None:
        from gradstream.run.remote.address import Address
        from gradstream.run.remote.reach import look_there

        where = Address.parse(address, "ADDR:PORT")
        if not where.port:
            raise ConfigError(f"{address}: the port is missing; the launcher has printed host:port")
        findings = chain(findings, look_there(where, token_of(token, token_file), fingerprint))
    failed = False
    for finding in findings:
        failed |= finding.state == "failed"
        text = escaped(f"{finding.what:<12}{finding.text}", TEXT_BYTES, newlines=True)
        click.echo(f"{MARKS[finding.state]} {text}")
    sys.exit(3 if failed else 0)


@click.command()
@run_argument
@click.argument("host")
def add(run: Path, host: str) -> None:
    """Makes HOST join a run of `gradstream launch --hosts` that has a free place.

    RUN is the local folder of the run. `--room N` made N more places than there were machines, and each machine
    that `gradstream remove` takes out leaves one. The others keep training meanwhile.

    \b
    Examples:
      gradstream launch --hosts a,b --room 2 --detach JOB.py
      gradstream add runs/job c
    """
    from gradstream.cli.hosts import fleet_of
    from gradstream.ext.ssh.places import add_machine
    from gradstream.untrusted import say, show

    add_machine(fleet_of(run), host, run, say)
    show(f"{host} joins; gradstream status {run}")


@click.command()
@run_argument
@click.argument("host")
def remove(run: Path, host: str) -> None:
    """Makes HOST leave a run of `gradstream launch --hosts`: it hands in what it has computed, and is cleaned up.

    RUN is the local folder of the run. HOST must not be its first machine, which has the parameters. The others keep
    training, and the place is free for another machine (`gradstream add`).

    \b
    Examples:
      gradstream remove runs/job c
    """
    from gradstream.cli.hosts import fleet_of
    from gradstream.ext.ssh.places import remove_machine
    from gradstream.untrusted import say, show

    remove_machine(fleet_of(run), host, run, say)
    show(f"{host} has left, and nothing of the run is on it; gradstream status {run}")


@click.command()
@run_argument
@click.argument("gone")
@click.argument("host")
def replace(run: Path, gone: str, host: str) -> None:
    """Makes HOST take the place of a machine that is GONE, in a run of `gradstream launch --hosts`.

    RUN is the local folder of the run. HOST may be a new machine, or the same machine again. The others keep
    training meanwhile; job, data and token come from the first machine.

    \b
    Examples:
      gradstream replace runs/mine c i
      gradstream replace runs/mine b b
    """
    from gradstream.cli.hosts import fleet_of
    from gradstream.ext.ssh.places import replace_machine
    from gradstream.untrusted import say, show

    replace_machine(fleet_of(run), gone, host, run, say)
    show(f"{host} joins in the place of {gone}; gradstream status {run}")
