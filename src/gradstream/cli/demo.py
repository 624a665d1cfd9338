"""The jobs of `gradstream demo`: a small CNN on the embedded subset of Fashion-MNIST."""

from __future__ import annotations

import dataclasses
import math
import os
import random
import secrets
import signal
import time
from collections import deque
from collections.abc import Callable, Collection, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
import numpy as np
import torch
from torch import nn

import gradstream as gs
from gradstream.report.charts import Curve, line_chart, picture, time_text
from gradstream.report.curves import training
from gradstream.report.story import Death, deaths_of

if TYPE_CHECKING:
    from gradstream.job.job import Job
    from gradstream.run.local import LocalCluster
    from gradstream.run.result import Run
    from gradstream.telemetry.events import EventDict


# ---- kills -------------------------------------------------------------------------------
# Which nodes `gradstream demo --faults` kills, and when: a pure schedule, and the class that kills.

ONCE = ("coordinator", "shard-1")
"""Nodes that are killed once in a run and replaced. The shard has a backup on the other shard."""

EACH = 3
"""Most kills of each worker."""

GAP_S = (1.0, 2.0)


class KillSchedule:
    """Kills a node every one to two seconds: workers repeatedly, each node of `once` a single time.

    A due worker waits until it takes part and is not the last one to do so.

    Args:
        seed: the same seed draws the same nodes and seconds.
        workers: names of the workers.
        once: see `ONCE`.

    Attributes:
        left: the remaining kills, as (seconds of training, node).
    """

    def __init__(self, seed: int, workers: Sequence[str], once: Sequence[str] = ONCE) -> None:
        rng = random.Random(f"kills/{seed}")
        rounds = [rng.sample(workers, len(workers)) for _ in range(EACH)]
        nodes = [worker for each in rounds for worker in each]
        for node in once:
            nodes.insert(rng.randrange(1, 4), node)
        self.left: deque[tuple[float, str]] = deque()
        at_s = 0.0
        for node in nodes:
            at_s += rng.uniform(*GAP_S)
            self.left.append((at_s, node))

    def due(self, at_s: float, taking_part: Collection[str]) -> str | None:
        """The node to kill now; None for none. Returns each kill once.

        Args:
            at_s: seconds of training.
            taking_part: names of the workers that take part.
        """
        if not self.left or at_s < self.left[0][0]:
            return None
        node = self.left[0][1]
        if node.startswith("worker") and not (node in taking_part and len(taking_part) > 1):
            return None
        self.left.popleft()
        return node


class Striker:
    """Kills the processes of a run by SIGKILL; give it to the run as `on_event`.

    Args:
        cluster: the processes.
        schedule: which process to kill when.
        tell: called with a line for each kill.

    Attributes:
        kills: number of kills.
    """

    def __init__(self, cluster: LocalCluster, schedule: KillSchedule, tell: Callable[[str], None]) -> None:
        self._cluster, self._schedule, self._tell = cluster, schedule, tell
        self.kills = 0
        self._taking_part: set[str] = set()
        self._joining: set[str] = set()
        self._zero_s = math.inf  # start of the run's clock, on this one: no event is read before it happens

    def __call__(self, event: EventDict) -> None:
        """Tracks who takes part, and kills who is due."""
        match event["event"]:
            case "started":
                self._taking_part = {f"worker-{rank}" for rank in range(event["workers"])}
            case "exited":
                self._taking_part.discard(event["who"])
                self._joining.discard(event["who"])
            case "joined" if event["epoch"] > 1:
                self._joining.add(event["who"])
            case "step" if event["node"] in self._joining:
                self._joining.remove(event["node"])
                self._taking_part.add(event["node"])
            case "finished":
                self._schedule.left.clear()
        if not self._taking_part:
            return
        self._zero_s = min(self._zero_s, time.monotonic() - event["time_s"])
        at_s = time.monotonic() - self._zero_s
        node = self._schedule.due(at_s, self._taking_part)
        pid = None if node is None else self._cluster.running.get(node)
        if node is not None and pid is not None:
            self._taking_part.discard(node)
            self.kills += 1
            self._cluster.post({"struck": node, "at_ns": time.monotonic_ns()})
            os.kill(pid, signal.SIGKILL)
            self._tell(f"{at_s:5.1f} s: kill -9 {pid} ({node})")


# ---- demo --------------------------------------------------------------------------------

COUNTERS = ("first", "last")
LR = 1 / 16
IMAGES, BATCH_SIZE = 5000, 25


def build() -> nn.Module:
    """Two convolutions and two dense layers: images (n, 1, 28, 28) to scores (n, 10)."""
    return nn.Sequential(
        nn.Conv2d(1, 16, kernel_size=5, padding=2),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(16, 32, kernel_size=5, padding=2),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(32 * 7 * 7, 64),
        nn.ReLU(),
        nn.Linear(64, 10),
    )


def job() -> gs.Job:
    """Downpour SGD with Adagrad at the server: 2 workers, 1 parameter server."""
    return gs.Job(
        model=gs.from_torch(build, nn.functional.cross_entropy),
        data=gs.data.fashion_mnist(),
        strategy="downpour",
        workers=2,
        servers=1,
        batch_size=32,
        epochs=16,
        name="demo",
    )


class Counted(nn.Module):
    """The CNN, and a counter for each training image at both ends of the parameters, so on both shards."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Parameter(torch.zeros(IMAGES))
        self.net = build()
        self.last = nn.Parameter(torch.zeros(IMAGES))

    def forward(self, images: torch.Tensor) -> Any:
        """The scores of the CNN."""
        return self.net(images)


def counted_loss(module: Counted, batch: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
    """Mean cross-entropy, and terms of value 0 whose gradient is -1 at the counters of the minibatch's images."""
    images, codes = batch
    numbers = codes // 10
    zero = sum((counter.detach() - counter)[numbers].sum() for counter in (module.first, module.last))
    return nn.functional.cross_entropy(module(images), codes % 10) + zero


def counted() -> gs.Job:
    """The job of `gradstream demo --faults`: its final parameters say how often each image was applied.

    The target of training image i is 10 i + its class. SGD makes counters go up by 1.
    """
    images = gs.data.fashion_mnist()
    codes = images.targets + 10 * np.arange(IMAGES)
    return gs.Job(
        model=gs.from_torch(Counted, counted_loss, loss_of="batch"),
        data=gs.from_arrays(
            images.inputs, codes, images.test_inputs, images.test_targets, name="fashion-mnist"
        ),
        strategy=gs.Downpour(overlap=False),
        optimizer=gs.optim.SGD(lr=LR),
        groups=[{"match": COUNTERS, "lr_scale": 1 / LR}],
        workers=3,
        servers=2,
        acknowledge="replicated",
        batch_size=BATCH_SIZE,
        epochs=6,
        chunk_elems=1 << 14,
        name="demo-faults",
    )


# ---- demo faults -------------------------------------------------------------------------
# `gradstream demo --faults`: the same job with and without kills, and whether the promise held.

JOB = "gradstream.cli.demo:counted"
PICTURE = "faults.svg"
STYLES = {"worker": "c1", "coordinator": "c3", "shard": "c4"}
"""Colours of the marks, by role of the node that was killed."""
ABOUT = "A CNN on Fashion-MNIST (5,000 images): 3 workers, 2 shards of a parameter server, strategy downpour"
POINTS = 60
"""Points of each loss curve: means over as many parts of the run."""


def run_with_faults(seed: int, epochs: int | None = None) -> bool:
    """Trains without and with kills, and prints the results. Returns whether the promise was kept.

    Raises:
        GradstreamError: a run ended early.
    """
    from gradstream.job.files import load_job
    from gradstream.run.local import LocalCluster
    from gradstream.run.local.environment import node_environment

    job = load_job(JOB)
    job = dataclasses.replace(job, seed=seed, epochs=epochs or job.epochs)
    assert job.epochs is not None
    folder = _folder(job)
    with LocalCluster(folder / "logs", node_environment(job.workers), shards=True) as cluster:
        click.echo(f"{ABOUT}. First undisturbed:", err=True)
        quiet = _run(job, folder / "without", cluster, lambda event: None)
        click.echo(f"Then with kill -9, at instants drawn from seed {seed}:", err=True)
        schedule = KillSchedule(seed, [f"worker-{rank}" for rank in range(job.workers)])
        striker = Striker(cluster, schedule, lambda line: click.echo(line, err=True))
        struck = _run(job, folder / "killed", cluster, striker)
    deaths = deaths_of(struck.events)
    broken = broken_promises(struck, job.epochs)
    if not deaths:
        broken.append("nobody was killed: the run was over before")
    path = folder / PICTURE
    path.write_text(faults_picture(quiet, struck, deaths))
    click.echo("\n".join(table_of(deaths)))
    if late := striker.kills - len(deaths):
        click.echo(f"{late} more when the last sample was in the model")
    click.echo(_figures(quiet, struck, job.epochs))
    click.echo(f"picture        {path}")
    for what in broken:
        click.echo(f"PROMISE BROKEN: {what}", err=True)
    return not broken


def broken_promises(run: Run, epochs: int) -> list[str]:
    """The losses and duplicates of a finished run of `counted`; empty if each sample is in the model once an epoch.

    The counters in the parameters show this for each image, the versions of the shards' chunks for each push.
    """
    broken = []
    for name in COUNTERS:
        counts = np.asarray(run.parameters[name])
        for what, wrong in {"missing": counts < epochs, "too often": counts > epochs}.items():
            if wrong.any():
                broken.append(f"{int(wrong.sum())} of {IMAGES} images are {what} in the counters {name!r}")
    pushes = epochs * IMAGES // BATCH_SIZE
    for shard, versions in _versions(run).items():
        if set(versions) != {pushes}:
            broken.append(f"chunks of {shard} have had {versions[0]} to {versions[1]} pushes, not {pushes}")
    if run.summary["samples_accounted"] != epochs * IMAGES:
        broken.append(f"{run.summary['samples_accounted']} samples have a receipt, not {epochs * IMAGES}")
    return broken


def _versions(run: Run) -> dict[str, tuple[int, int]]:
    """By shard, the lowest and the highest version of its chunks at the end."""
    reported = [event for event in run.events if event["event"] == "applied"]
    return {event["node"]: (event["min_version"], event["max_version"]) for event in reported}


def table_of(deaths: Sequence[Death]) -> list[str]:
    """The lines of the table of deaths."""
    head = f"{'killed':<12} {'at':>7} {'noticed after':>14} {'took part again after':>22}"
    return [
        head,
        *(f"{d.who:<12} {d.at_s:>5.1f} s {_after(d.noticed_s):>14} {_after(d.back_s):>22}" for d in deaths),
    ]


def _after(seconds: float | None) -> str:
    return "-" if seconds is None else f"{seconds:.2f} s"


def _figures(quiet: Run, struck: Run, epochs: int) -> str:
    rows: list[tuple[str, ...]] = [("", "with kills", "without")]
    rows.append(("loss", *(f"{run.summary['loss']:.3f}" for run in (struck, quiet))))
    rows.append(("test accuracy", *(f"{run.evaluate().accuracy:.1%}" for run in (struck, quiet))))
    rows.append(("training time", *(time_text(run.summary["train_s"]) for run in (struck, quiet))))
    lines = [f"{row[0]:<14} {row[1]:>12} {row[2]:>12}" for row in rows]
    counts = np.unique(np.concatenate([np.asarray(struck.parameters[name]) for name in COUNTERS]))
    seen = " to ".join(f"{count:g}" for count in sorted({counts[0], counts[-1]}))
    lines.append(f"samples        each of {IMAGES:,} images is in the model {seen} times, in {epochs} epochs")
    return "\n".join(lines)


def faults_picture(quiet: Run, struck: Run, deaths: Sequence[Death]) -> str:
    """The loss of both runs over time, and a mark at each death."""
    curves = [
        Curve(name, [(point.time_s, point.value) for point in training(run.events, max_points=POINTS)], style)
        for name, run, style in (("with kills", struck, "c0"), ("without", quiet, "c2"))
    ]
    styles = {death.who: STYLES[death.who.partition("-")[0]] for death in deaths}
    marks = [(death.at_s, styles[death.who], f"{death.who} is killed") for death in deaths]
    title = f"The training loss falls while {len(deaths)} processes are killed"
    chart = line_chart(curves, title=title, x_label="time", x_text=time_text, from_zero=True, marks=marks)
    keys = {
        "c0": "loss, with kills",
        "c2": "loss, without",
        **{STYLES[role]: f"{'the' if role == 'coordinator' else 'a'} {role} dies" for role in STYLES},
    }
    return picture(chart, keys, title)


def _folder(job: Job) -> Path:
    from gradstream._train import make_run_dir

    return make_run_dir(job)


def _run(job: Job, run_dir: Path, cluster: LocalCluster, strike: Callable[[EventDict], None]) -> Run:
    """One run of the job, in its own folder; `strike` gets its events."""
    from gradstream._train import launch
    from gradstream.report.progress_line import Display
    from gradstream.run.planning import plan_run

    run_dir.mkdir()
    with Display() as display:

        def on_event(event: EventDict) -> None:
            display.on_event(event)
            strike(event)

        return launch(plan_run(job, secrets.token_hex(8)), run_dir, cluster=cluster, on_event=on_event)
