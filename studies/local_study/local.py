"""The methods for slow links that are compared: how many workers, how many minibatches between two exchanges.

All have minibatches of 4 samples. With W workers an epoch has 4,500 / 4W minibatches of each.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from itertools import pairwise
from pathlib import Path
from typing import Any

sys.path.append(str(Path(__file__).resolve().parents[2] / "bench"))
sys.path.append(str(Path(__file__).resolve().parents[1] / "async_study"))
from study.methods import BATCH, SAMPLES, Method
from study.scenes import Scene

COUNTS = (4, 8, 32)
PERIODS = (1, 5, 20, 80, 500)
CODECS = ("int8", "one-bit", "powersgd", "top-k", "dgc")
"""Of gradients, by allreduce."""
GROUPS = ("local-sgd", "gossip", "noloco")
"""Strategies that count a round as one step."""
OUTER = {"outer_lr": 0.7, "outer_momentum": 0.9}

KINDS: dict[str, tuple[str, str, str, Mapping[str, Any]]] = {
    "local-sgd": ("local SGD", "local-sgd", "", {}),
    "local-sgd-float4": ("local SGD, `float4`", "local-sgd", "float4", {}),
    "local-sgd-one-bit": ("local SGD, `one-bit`", "local-sgd", "one-bit", {}),
    "local-sgd-chunks": ("local SGD, `chunk-top-k`", "local-sgd", "chunk-top-k", {}),
    "local-sgd-momentum": ("local SGD, outer momentum 0.5", "local-sgd", "", {"outer_momentum": 0.5}),
    "local-sgd-chunks-momentum": (
        "local SGD, `chunk-top-k`, outer momentum 0.5",
        "local-sgd",
        "chunk-top-k",
        {"outer_momentum": 0.5},
    ),
    "diloco": ("DiLoCo", "diloco", "", OUTER),
    "diloco-float4": ("DiLoCo, `float4`", "diloco", "float4", OUTER),
    "streaming": ("streaming DiLoCo, `float4`", "streaming-diloco", "float4", OUTER),
    "async-diloco": ("asynchronous DiLoCo, `int8`", "async-diloco", "int8", OUTER),
    "gossip": ("gossip", "gossip", "", {}),
    "noloco": ("NoLoCo", "noloco", "", {}),
}
"""By name: title, strategy, codec, options."""


def local(kind: str, workers: int, period: int) -> Method:
    """A method that exchanges every `period` minibatches."""
    title, strategy, codec, options = KINDS[kind]
    return Method(
        f"{kind}-{workers}-{period}",
        title,
        strategy,
        {"every": period, **options},
        workers=workers,
        codec=codec,
        period=period if strategy in GROUPS else 1,
    )


def joined(workers: int, codec: str = "") -> Method:
    """Synchronous, by allreduce."""
    title = f"synchronous{f', `{codec}`' if codec else ''}"
    return Method(f"allreduce-{codec or 'none'}-{workers}", title, "allreduce", workers=workers, codec=codec)


def most_minibatches(workers: int) -> int:
    """Of each worker, in an epoch."""
    return SAMPLES // (workers * BATCH)


def _methods(workers: int) -> tuple[Method, ...]:
    found = [joined(workers), *(joined(workers, codec) for codec in CODECS)]
    for before, period in reversed(list(pairwise((0, *PERIODS)))):  # the quickest to simulate come first
        for kind in KINDS:
            if kind == "streaming" and period < 5:  # has four fragments
                continue
            if KINDS[kind][1] in GROUPS and before >= most_minibatches(workers):  # rounds end with the epoch
                continue
            found.append(local(kind, workers, period))
    return tuple(found)


SCENES = tuple(
    Scene(f"local-{workers}", f"{workers} workers", _methods(workers), epochs=5.0, looks=8)
    for workers in COUNTS
)
