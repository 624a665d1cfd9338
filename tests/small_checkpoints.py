"""A checkpoint of two shards, written as in a run."""

from __future__ import annotations

import zlib

import numpy as np

from gradstream.checkpoint import (
    DraftSnapshot,
    Manifest,
    Policy,
    TensorSpec,
    prune,
)
from gradstream.data.base import DataProgress
from gradstream.runtime.base import Storage
from gradstream.runtime.simulation import Cost, Exponential, SimulationConfig

TENSORS = [TensorSpec("layer.weight", (3, 40), "F32"), TensorSpec("layer.bias", (), "F32")]
OTHERS = [
    TensorSpec("tied.weight", (3, 40), "F32", same_as="layer.weight"),
    TensorSpec("norm.count", (), "I64"),
    TensorSpec("tied.bias", (), "F32", same_as="layer.bias"),
]

ELEMS, CHUNK = 121, 64
WORLD = SimulationConfig(costs={"gradient": Cost(base_s=0.03, jitter=Exponential())})


def write(storage: Storage, step: int, policy: Policy | None = None) -> str:
    """What coordinator and shards do to keep a checkpoint, one after the other."""
    vector = np.arange(ELEMS, dtype=np.float32) + step
    draft = DraftSnapshot(storage, step=step, token="t", tensors=TENSORS, others=OTHERS, states=["momentum"])
    draft.open()
    for place in draft.places:
        for start in range(0, ELEMS, CHUNK):  # two shards
            piece = vector[start : start + CHUNK].tobytes()
            storage.patch(place.path, [(place.offset_bytes + 4 * start, piece)])
    cuts = [(start, min(start + CHUNK, ELEMS)) for start in range(0, ELEMS, CHUNK)]
    sums = [(start, stop, zlib.crc32(vector[start:stop].tobytes())) for start, stop in cuts]
    manifest = Manifest(
        step=step, rounds=step, steps={"worker-0": step}, done=DataProgress(0, {0: ((0, step),)}),
        versions=[step, step],
        model={"fingerprint": 1, "elems": ELEMS, "dtype": 1, "chunk_elems": CHUNK}, optimizer="momentum",
        strategy="synchronous", seed=0, workers=1, servers=2, num_samples=1000, software="0",
    )  # fmt: skip
    folder = draft.commit(
        manifest,
        others={"norm.count": np.int64(step).tobytes()},
        own={"worker-0": b"own"},
        sums={"": sums, "momentum": sums},
        itemsize_bytes=4,
    )
    prune(storage, policy or Policy())
    return folder
