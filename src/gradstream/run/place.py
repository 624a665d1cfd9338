"""`Place`: which of several processes this one is, according to the engine that started them. Pure.

    torchrun     RANK, WORLD_SIZE, MASTER_ADDR, MASTER_PORT
    Slurm        SLURM_PROCID, SLURM_STEP_NUM_TASKS, SLURM_STEP_NODELIST, SLURM_JOB_ID, SLURM_RESTART_COUNT  (by srun)
    Kubernetes   JOB_COMPLETION_INDEX; GRADSTREAM_NODES, GRADSTREAM_HOST, GRADSTREAM_RUN  (from the manifest)
    ssh, Ray     GRADSTREAM_NODE; the same  (from `gradstream launch --hosts` and `--engine ray`)

If GRADSTREAM_LEAST is set too, that many processes begin, and the engine may start the others later.

Process 0 starts the run, and the others join it. They meet at a port of its machine.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

from gradstream.errors import ConfigError

# ---- place -------------------------------------------------------------------------------

PORT, NODES, HOST, RUN = "GRADSTREAM_PORT", "GRADSTREAM_NODES", "GRADSTREAM_HOST", "GRADSTREAM_RUN"  # names
NODE, LEAST = "GRADSTREAM_NODE", "GRADSTREAM_LEAST"
DEFAULT_PORT = 29400
SLURM_PORTS = (20000, 10000)
"""First port, and number of ports, from which a Slurm job takes one by its number: jobs share machines."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """The place of this process.

    Args:
        engine: name of the program that started it: "torchrun", "Slurm", "Kubernetes", "gradstream".
        rank: its number, from 0.
        size: number of processes, at least 2.
        host: host name or address of process 0.
        port: port on that host at which the processes meet.
        job: the engine's name for this job, the same when the job is started again; "" if it has none.
        restarts: how often the engine started this job before.
        least: number of processes with which the run begins, if the engine may start others later, on any machine;
            0 if it starts all of them.
    """

    engine: str
    rank: int
    size: int
    host: str
    port: int
    job: str = ""
    restarts: int = 0
    least: int = 0


def place_of(environment: Mapping[str, str]) -> Place | None:
    """The place that an engine set in the environment; None if none did, or if it started only one process.

    Raises:
        ConfigError: variables contradict each other, are not numbers, or are missing.
    """
    for find in (_of_torchrun, _of_slurm, _of_nodes):
        place = find(environment)
        if place is None:
            continue
        if not 0 <= place.rank < place.size:
            raise ConfigError(
                f"environment: process {place.rank} of {place.size}, by {place.engine}; expected a number from 0 to "
                f"{place.size - 1}: start all processes by {place.engine}, or unset its variables"
            )
        return place if place.size > 1 else None
    return None


def first_host(hosts: str) -> str:
    """The first host of a list in Slurm's notation: "node07" of "node[07-09,12],login"."""
    match = re.match(r"(?:[^,\[]|\[[^\]]*\])+", hosts)
    return re.sub(r"\[([^\],-]*)[^\]]*\]", r"\1", match[0]) if match else ""


def _of_torchrun(environment: Mapping[str, str]) -> Place | None:
    if "RANK" not in environment or "WORLD_SIZE" not in environment:
        return None
    size = _number(environment, "WORLD_SIZE", "torchrun")
    run = environment.get("TORCHELASTIC_RUN_ID", "")
    return Place(
        engine="torchrun",
        rank=_number(environment, "RANK", "torchrun"),
        size=size,
        host=_text(environment, "MASTER_ADDR", "torchrun") if size > 1 else "",
        port=_number(environment, "MASTER_PORT", "torchrun") if size > 1 else 0,
        job="" if run == "none" else run,
        restarts=_number(environment, "TORCHELASTIC_RESTART_COUNT", "torchrun", "0"),
    )


def _of_slurm(environment: Mapping[str, str]) -> Place | None:
    """Reads the variables of a step that srun started: a batch script has those of the job, and is one process."""
    if "SLURM_STEP_NUM_TASKS" not in environment:
        return None
    job = _number(environment, "SLURM_JOB_ID", "srun")
    nodes = environment.get("SLURM_STEP_NODELIST") or _text(environment, "SLURM_JOB_NODELIST", "srun")
    first, count = SLURM_PORTS
    return Place(
        engine="Slurm",
        rank=_number(environment, "SLURM_PROCID", "srun"),
        size=_number(environment, "SLURM_STEP_NUM_TASKS", "srun"),
        host=first_host(nodes),
        port=_number(environment, PORT, "you", str(first + job % count)),
        job=f"slurm-{job}",
        restarts=_number(environment, "SLURM_RESTART_COUNT", "Slurm", "0"),
    )


def _of_nodes(environment: Mapping[str, str]) -> Place | None:
    """A place only if the number of processes is set: pods of an indexed Job may be separate runs."""
    if NODES not in environment:
        return None
    is_ours = NODE in environment
    rank = NODE if is_ours else "JOB_COMPLETION_INDEX"
    return Place(
        engine="gradstream" if is_ours else "Kubernetes",
        rank=_number(environment, rank, "Kubernetes, in the pods of an indexed Job"),
        size=_number(environment, NODES, "the manifest"),
        host=_text(environment, HOST, "the manifest: the name of the first pod, JOB-0.SERVICE"),
        port=_number(environment, PORT, "the manifest", str(DEFAULT_PORT)),
        job=environment.get(RUN, ""),
        least=_number(environment, LEAST, "the manifest", "0"),
    )


def _text(environment: Mapping[str, str], name: str, by: str) -> str:
    value = environment.get(name, "")
    if not value:
        raise ConfigError(
            f"environment: {name} is not set, but others of {by} are; expected it as set by {by}"
        )
    return value


def _number(environment: Mapping[str, str], name: str, by: str, default: str | None = None) -> int:
    value = _text(environment, name, by) if default is None else environment.get(name, default)
    if not (value.isascii() and value.isdigit()):
        raise ConfigError(f"environment: {name}={value!r}; expected a whole number, as set by {by}")
    return int(value)
