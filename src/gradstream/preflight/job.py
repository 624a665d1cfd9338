"""The dry run of a job: starts no process where estimates of memory and disk exceed what is free."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from functools import cached_property

from typing_extensions import override

from gradstream.checkpoint.format import load_file
from gradstream.data.base import Dataset, Ids
from gradstream.errors import PreflightError
from gradstream.job.job import Job, build_model
from gradstream.machine.resources import free_memory_bytes
from gradstream.model.base import Batch, Model
from gradstream.preflight.base import Check, DryRun, by_role, count, estimate
from gradstream.report.charts import size_text, time_text
from gradstream.run.planning import metrics_of
from gradstream.run.result import Run

TEST_SAMPLES = 64
"""Number of held-out samples that are evaluated."""

PROCESS_BYTES = 200_000_000
"""Memory of Python, torch and gRPC in each process, without its vectors."""


class JobDryRun(DryRun):
    """See `DryRun`."""

    @property
    @override
    def checks(self) -> Mapping[str, Check]:
        return {
            "configuration": self.configuration,
            "model": self._look_at_model,
            "data": self._data,
            "memory": self._memory,
            "disk": lambda: self.disk(
                self._vector_bytes, (1 + len(self.plan.shards_optimizer.state_names)) * self._vector_bytes
            ),
            "processes": self.processes,
            "checkpoint": self.checkpoint,
            "evaluation": self._evaluation,
            "time per epoch": self._time,
        }

    @cached_property
    def _model(self) -> Model:
        return build_model(self.job)

    @property
    def _chunk_elems(self) -> int:
        return self.plan.chunk_elems_of(self._model.layout)

    @override
    def tried(self) -> Job:
        return dataclasses.replace(super().tried(), model=self._model)

    def _look_at_model(self) -> str:
        layout = self._model.layout
        tensors = count(len(layout.slots), "tensor")
        chunks = f", exchanged in chunks of {self._chunk_elems:,}" if self.plan.servers else ""
        return f"{layout.elems:,} parameters in {tensors}, {size_text(self._vector_bytes)}{chunks}"

    def _data(self) -> str:
        data = self.job.data
        samples = "an unknown number of" if data.num_samples is None else f"{data.num_samples:,}"
        return f"{data.name}: {samples} samples, {data.num_test_samples:,} held out"

    def _memory(self) -> str:
        job = dataclasses.replace(self.job, chunk_elems=self._chunk_elems)
        need, num_processes = estimate(job, self._model), len(self.plan.node_names)
        total = sum(sum(vectors.values()) for vectors in need.values()) + num_processes * PROCESS_BYTES
        parts = [f"{role}: {_formula(vectors)}" for role, vectors in by_role(need).items()]
        text = (
            f"{size_text(total)} = {num_processes} processes of {size_text(PROCESS_BYTES)} and their vectors "
            f"({'; '.join(parts)}), without what a gradient needs on its way"
        )
        free = free_memory_bytes()
        if free is None:
            return f"{text}; this system does not say what is free"
        if total > free:
            raise PreflightError(
                f"{size_text(free)} free, too little: {text}. Fewer workers, or a smaller model"
            )
        return f"{size_text(free)} free; {text}"

    def _evaluation(self) -> str:
        data = self.job.data
        if not data.num_test_samples:
            return "no samples are held out"
        parameters = load_file(self.kept)
        run = Run(parameters=parameters, model=self._model, data=data, metrics=metrics_of(self.job))
        evaluation = run.evaluate(_Few(data, TEST_SAMPLES))
        what = ", ".join(
            f"{name} {value:{form}}"
            for name, value, form in (
                ("accuracy", evaluation.accuracy, ".1%"),
                ("loss", evaluation.loss, ".4g"),
            )
            if value is not None
        )
        return f"{what or 'outputs'} of {evaluation.num_samples:,} held-out samples"

    def _time(self) -> str:
        pace = self.pace()
        if pace is None:
            return "too little data to say"
        rate, text = pace
        samples = self.job.data.num_samples
        return text if samples is None else f"{time_text(samples / rate)}: {text}"

    @property
    def _vector_bytes(self) -> int:
        return self._model.layout.elems * self._model.layout.dtype.itemsize


class _Few:
    """Held-out samples of a data set at equal distances, since they may be sorted."""

    def __init__(self, data: Dataset, num_samples: int) -> None:
        self._data = data
        self.name = data.name
        self.num_samples = data.num_samples
        self.num_test_samples = min(num_samples, data.num_test_samples)

    def batch(self, ids: Ids) -> Batch:
        return self._data.batch(ids)

    def test_batch(self, ids: Ids) -> Batch:
        return self._data.test_batch(ids * (self._data.num_test_samples // self.num_test_samples))


def _formula(vectors: Mapping[str, int]) -> str:
    parts = " + ".join(f"{name} {size_text(size)}" for name, size in vectors.items())
    return f"{size_text(sum(vectors.values()))} = {parts}"
