"""Where nodes find the job file; and `RunFiles`, the files of a run on the machine of its first node."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from gradstream.errors import ConfigError
from gradstream.machine.resources import free_disk_bytes
from gradstream.run.ray.actor import digest_of_file
from gradstream.run.ray.cluster import RayCluster
from gradstream.run.ssh.run_files import FREE_PART, MAX_FILES
from gradstream.untrusted import escaped

ANSWER_S = 60.0
"""Longest wait for an answer of the first node while it runs."""


def folder_of(job: str) -> Path:
    """The folder that nodes get as their working directory: that of the job file, or of a module the present one."""
    return Path(job.partition(":")[0]).parent if ".py" in job else Path.cwd()


def job_files(job: str) -> tuple[list[str], str, str]:
    """Where nodes may find the job file, its SHA-256, and ":function" after it; no places for a module."""
    place, colon, function = job.partition(":")
    file = Path(place)
    if file.suffix != ".py":
        return [], "", ""
    near = [str(file.relative_to(Path.cwd()))] if file.is_relative_to(Path.cwd()) else []
    return [*near, file.name, str(file)], digest_of_file(file), colon + function


NAME_BYTES = 256
"""Longest name of a file in a message."""


class RunFiles:
    """The files of a run, which come in pieces that are too small for Ray's object store.

    Args:
        cluster: the cluster.
        actor: the actor of the first node.
        events_bytes: size of the events that the driver does not ask for.
    """

    def __init__(self, cluster: RayCluster, actor: Any, events_bytes: int) -> None:
        self._cluster = cluster
        self._actor = actor
        self._read_bytes = events_bytes
        self._rest = b""

    def events(self) -> Iterator[dict[str, Any]]:
        """The events since the last call; none where the actor is gone: the end of its call tells why.

        Raises:
            DeadlineError: the actor does not answer.
        """
        while True:
            asked = self._actor.events.remote(self._read_bytes)
            try:
                data = self._cluster.answer(asked, "node 0", ANSWER_S)
            except self._cluster.ray.exceptions.RayError:
                return
            if not data:
                return
            self._read_bytes += len(data)
            *lines, self._rest = (self._rest + data).split(b"\n")
            yield from map(json.loads, lines)

    def bring(self, run_dir: Path) -> None:
        """Writes all files into a folder here.

        Raises:
            ConfigError: the node names a file that would be elsewhere, or sends more than the disk has room for.
            DeadlineError: the actor does not answer.
        """
        left = int(FREE_PART * free_disk_bytes(run_dir))
        names = self._cluster.answer(self._actor.files.remote(), "node 0", ANSWER_S)
        if len(names) > MAX_FILES:
            raise ConfigError(f"node 0 names {len(names):,} files of its run, expected at most {MAX_FILES:,}")
        for name in names:
            path = (run_dir / name).resolve()
            if not path.is_relative_to(run_dir.resolve()):
                raise ConfigError(f"node 0 names a file outside of its run: {escaped(name, NAME_BYTES)}")
            path.parent.mkdir(parents=True, exist_ok=True)
            with path.open("wb") as file:
                while data := self._cluster.answer(
                    self._actor.piece.remote(name, file.tell()), "node 0", ANSWER_S
                ):
                    left -= len(data)
                    if left < 0:
                        raise ConfigError(f"node 0 sends a run that fills the disk of {run_dir}: make room")
                    file.write(data)
