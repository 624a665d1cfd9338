"""Files with which other engines run a job: `gradstream launch --emit`. The texts are in `cli/templates/launch`."""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from importlib import resources
from pathlib import Path

from gradstream.errors import ConfigError
from gradstream.job.sources import sources_of

ENGINES = {
    "torchrun": "sh",
    "slurm": "sbatch",
    "kubernetes": "yaml",
    "skypilot": "yaml",
    "gce": "sh",
    "compose": "yaml",
}
"""File name extension for each engine."""

MOST_SOURCE_BYTES = 900_000
"""A ConfigMap of Kubernetes has at most 1 MiB."""

MIN_DISK_GIB = 50
"""Of the disk of a cloud machine: system and packages take 10."""

NAME = re.compile(r"[a-z0-9]([a-z0-9-]{0,50}[a-z0-9])?")
_HOLE = re.compile(r"@(\w+)@")


@dataclass(frozen=True, slots=True, kw_only=True)
class LaunchFile:
    """The contents of a launch file.

    Args:
        job: the job file.
        name: name of the run: small letters, digits and dashes.
        nodes: number of machines, nodes, pods or containers, at least 2.
        least: number of pods with which training begins, if the Job may be made larger later; 0 for all.
        cpus: cores of each machine.
        memory: memory of each machine, in GiB.
        gpus: GPUs of each machine.
        hours: time limit, in hours.
        storage: disk for checkpoints and data, in GiB.
        image: container image that has gradstream.
        data: name of a data set to download first; "" for none.
        spot: whether to use machines that can be taken away.
        arguments: command-line arguments of the job file.
        command: the command line that asks for the file.
        file: its name; "" takes `name`.

    Raises:
        ConfigError: a value does not fit.
    """

    job: Path
    name: str
    nodes: int = 2
    least: int = 0
    cpus: int = 4
    memory: int = 8
    gpus: int = 0
    hours: int = 24
    storage: int = 20
    image: str = ""
    data: str = ""
    spot: bool = False
    arguments: Sequence[str] = ()
    command: str = "gradstream launch"
    file: str = ""

    def __post_init__(self) -> None:
        if not NAME.fullmatch(self.name):
            raise ConfigError(
                f"--name {self.name!r}: expected small letters, digits and dashes, at most 52, since engines make host "
                "names of it: --name mine"
            )
        if not re.fullmatch(r"[\w.-]+\.py", self.job.name):
            raise ConfigError(
                f"{self.job.name!r}: expected a job file NAME.py of letters, digits, dots and dashes"
            )
        for option in ("nodes", "cpus", "memory", "hours", "storage"):
            least = 2 if option == "nodes" else 1
            if getattr(self, option) < least:
                raise ConfigError(f"--{option} {getattr(self, option)}: expected at least {least}")
        if self.least and not 1 <= self.least <= self.nodes:
            raise ConfigError(f"--least {self.least}: expected a number from 1 to --nodes {self.nodes}")

    def render(self, engine: str) -> str:
        """The text of the file for an engine.

        Raises:
            ConfigError: the engine needs an image, and none is set; or the job file cannot be read, or is too long.
        """
        if engine in ("kubernetes", "compose") and not self.image:
            raise ConfigError(
                f"--emit {engine} needs --image, a container image with gradstream. No registry has one yet: "
                "deploy/Containerfile in the repository builds it"
            )
        if self.least and engine != "kubernetes":
            raise ConfigError(
                f"--emit {engine} --least: this engine starts all nodes at once; expected --emit kubernetes, or "
                "`gradstream launch --hosts A,B --room N`, or `gradstream train --engine 'ray?least=N'`"
            )
        if not self.job.is_file():
            raise ConfigError(f"there is no job file {self.job}; `gradstream new` writes one")
        text = resources.files("gradstream.cli").joinpath(f"templates/launch/{engine}.txt").read_text()
        values = self._values(engine)
        return _HOLE.sub(lambda hole: values[hole[1]] if hole[1] in values else hole[0], text)

    def _values(self, engine: str) -> dict[str, str]:
        options = ["--servers-on", "launcher"]
        fetch = f"gradstream data get {self.data}" if self.data else ""
        arguments = ["--", *self.arguments] if self.arguments else []
        return {
            "job": self.job.name,
            "name": self.name,
            "file": self.file or f"{self.name}.{ENGINES[engine]}",
            "nodes": str(self.nodes),
            "pods": str(self.least or self.nodes),
            "elastic": _ELASTIC.format(name=self.name, nodes=self.nodes) if self.least else "",
            "least": _LEAST.format(least=self.least) if self.least else "",
            "cpus": str(self.cpus),
            "memory": str(self.memory),
            "storage": str(self.storage),
            "time": f"{self.hours}:00:00",
            "image": json.dumps(self.image),
            "command": self.command,
            "options": shlex.join(options),
            "arguments": "".join(f" {shlex.quote(word)}" for word in arguments),
            "option_list": ", ".join(options),
            "argument_list": "".join(f", {json.dumps(word)}" for word in arguments),
            "stage_sh": fetch
            and f"{fetch}  # into GRADSTREAM_DATA, or ~/.cache/gradstream; once a machine\n",
            "stage_srun": fetch and f"srun --ntasks-per-node=1 {fetch}  # once a node\n",
            "stage_init": _INIT.format(image=json.dumps(self.image), data=self.data) if fetch else "",
            "fetch": fetch and f"{fetch}\n{'  ' * (engine == 'skypilot')}",
            "disk": str(max(self.storage, MIN_DISK_GIB)),
            "machine": f"{'n1' if self.gpus else 'n2'}-custom-{max(2, self.cpus + self.cpus % 2)}-{1024 * self.memory}",
            "gpus_sky": _GPUS_SKY.format(gpus=self.gpus) if self.gpus else "",
            "gpus_gce": _GPUS_GCE.format(gpus=self.gpus) if self.gpus else "",
            "spot_sky": "  use_spot: true\n" if self.spot else "",
            "spot_gce": "--provisioning-model=SPOT --instance-termination-action=STOP " if self.spot else "",
            "spot_word": " that can be taken away" if self.spot else "",
            "gpus_slurm": f"#SBATCH --gpus-per-task={self.gpus}\n" if self.gpus else "",
            "gpus_kubernetes": f'              nvidia.com/gpu: "{self.gpus}"\n' if self.gpus else "",
            "spot": _SPOT if self.spot else "",
            "sources": self._sources() if engine == "kubernetes" else "",
            "services": "".join(_SERVICE.format(number=number) for number in range(self.nodes)),
        }

    def _sources(self) -> str:
        """The job file, and the modules beside it that it imports, as blocks of YAML."""
        text = ""
        for name, path in sources_of(self.job).items():
            if "/" in name:
                raise ConfigError(
                    f"{self.job} imports {name}, and a ConfigMap has no folders: put the job into an image, or the "
                    "module beside the job file"
                )
            text += f"  {name}: |\n"
            text += "".join(f"    {line}\n" if line else "\n" for line in path.read_text().splitlines())
        if len(text.encode()) > MOST_SOURCE_BYTES:
            raise ConfigError(
                f"{self.job} has {len(text):,} characters with its modules, and a ConfigMap at most 1 MiB: put the "
                "job into an image"
            )
        return text


_LEAST = """\
            - name: GRADSTREAM_LEAST
              value: "{least}"
"""
_GPUS_SKY = "  accelerators: {{L4: {gpus}, A10G: {gpus}, T4: {gpus}}}  # any of them\n"
_GPUS_GCE = "--accelerator=type=nvidia-tesla-t4,count={gpus} --maintenance-policy=TERMINATE "

_SERVICE = """\
  node-{number}:
    <<: *node
    environment:
      <<: *place
      JOB_COMPLETION_INDEX: "{number}"
"""

_ELASTIC = """\
#
# While it trains, completions and parallelism may change, together, up to {nodes}: new pods join, and those with the
# highest numbers hand in what they have, and leave. The others go on.
#
#     kubectl patch job {name} --type merge -p '{{"spec": {{"completions": {nodes}, "parallelism": {nodes}}}}}'
"""

_SPOT = """\
      tolerations:  # of nodes that can be taken away
        - key: cloud.google.com/gke-spot
          operator: Exists
        - key: kubernetes.azure.com/scalesetpriority
          operator: Exists
"""

_INIT = """\
      initContainers:
        - name: data
          image: {image}
          command: [gradstream, data, get, {data}]
          env:
            - name: GRADSTREAM_DATA
              value: /runs/data
          volumeMounts:
            - name: runs
              mountPath: /runs
"""
