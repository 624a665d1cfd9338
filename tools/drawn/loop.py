"""A drawn training loop: what it does, written down before anything is made of it."""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from drawn.parts import OPTIMIZERS, options_of

BACKWARDS = (
    *("plain", "plain", "plain", "two losses", "sum of losses", "retained graph", "of some parameters"),
    *("accumulate", "accumulate apart", "join by step", "throw away", "by hand", "by hand in place"),
    *("by hand, detached", "by hand, summed", "keeps the graph", "second derivatives"),
    *("checkpointed", "reentrant", "penalty", "scaler", "closure", "closure by hand"),
    "steps within backward",
)
"""How gradients are made."""

BY_HAND = (
    *("join by step", "by hand", "by hand in place", "by hand, detached", "by hand, summed"),
    "closure by hand",
)
"""They are joined when the step is made: what changes them before is this worker's own."""

MODELS = ("mlp", "tied", "branches", "residual", "embedding", "convolution", "batch norm", "sync batch norm")
CLIPS = ("none", "none", "norm", "largest", "value", "replace", "centre", "drop one")
EDITS = ("none", "none", "none", "clamp", "normalise", "data", "pointed")
ZEROINGS = (*("none first",) * 3, "zeros first", "none last", "zeros last", "module", "never")
SCHEDULERS = ("none", "none", "step", "by group")
EVENTS = (
    *("freeze", "unfreeze", "reload optimizer", "restore", "new optimizer", "evaluate", "copy", "slower"),
    *("skip", "only the first", "discard"),
)

ENDINGS: Mapping[str, str] = {
    "uneven": "",
    "sparse": "GradientError",
    "not a number": "GradientError",
    "new parameter": "ConfigError",
    "clipped too early": "ConfigError",
    "replaced too early": "ConfigError",
    "clipped by hand": "ConfigError",
    "hessian": "ConfigError",
    "sync batch norm": "ConfigError",
    "own rate": "ReplicasDifferError",
    "own noise": "ReplicasDifferError",
    "own gradient": "ReplicasDifferError",
    "bounded embedding": "ReplicasDifferError",
}
"""Loops that are the last ones of a run, and what they are refused with; "" where they are not.

A bounded embedding is refused where a worker looks up a row that others do not, and so shortens it alone.
"""

Sizes = list[list[int | None]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Loop:
    """What a loop does. What is not said here is in the tuples above.

    Args:
        seed: of everything that was drawn, its numbers included.
        model: key of `parts.MODELS`.
        dtype: of parameters and samples.
        optimizers: kind and options of each; with two, parameters are dealt to them in turn.
        groups: of parameters, in each.
        sizes: of the minibatch of each step, part of it, and worker. None where a worker has stopped before.
        counting: how samples become known: "forward", "said" or "loader".
        by_rank: workers take branches of their own.
        scale: of the loss.
        frozen: layers that are frozen at `wrap`, by number.
        held_back: the last layer comes into the optimizer at this step only.
        direct: the model is called past its hooks.
        events: at the beginning of a step.
        ending: key of `ENDINGS`, or "".
    """

    seed: int
    model: str = "mlp"
    dtype: str = "float64"
    optimizers: Sequence[tuple[str, Mapping[str, Any]]]
    groups: int = 1
    sizes: Sequence[Sizes]
    counting: str = "forward"
    by_rank: bool = False
    backward: str = "plain"
    clip: str = "none"
    edit: str = "none"
    zeroing: str = "none first"
    scheduler: str = "none"
    scale: float = 1.0
    frozen: Sequence[int] = ()
    held_back: int | None = None
    direct: bool = False
    events: Mapping[int, str] = dataclasses.field(default_factory=dict)
    ending: str = ""


def draw(seed: int, workers: int) -> Loop:
    """The loop of a seed, in which workers do alike. What plain torch refuses is not drawn."""
    rng = random.Random(f"loop {seed}")
    backward = rng.choice(BACKWARDS)
    by_hand, within = backward in BY_HAND, backward == "steps within backward"
    model = rng.choice(MODELS)
    if backward in ("checkpointed", "reentrant"):
        model = rng.choice(["mlp", "tied"])
    if backward in ("penalty", "second derivatives"):
        model = rng.choice(["mlp", "residual", "batch norm"])
    several = rng.random() < 0.25
    kinds = [rng.choice(list(OPTIMIZERS)) for _ in range(1 + several)]
    dtype = "float64"
    if model in ("mlp", "tied", "residual", "branches") and backward != "scaler" and rng.random() < 0.2:
        # Other rules divide by what is near zero: there a rounding becomes a step.
        dtype, kinds = rng.choice(["float32", "bfloat16"]), ["SGD"] * len(kinds)
    clip = rng.choice(CLIPS)
    if by_hand:
        clip = "none"
    if model == "residual" and (clip == "largest" or "Adafactor" in kinds):  # of a parameter without elements
        clip, kinds = "none", ["SGD"] * len(kinds)
    steps = rng.randint(2, 5)
    counting = rng.choice(["forward", "forward", "said", "loader"])
    apart = ("accumulate apart", "join by step", "throw away")
    parts = rng.randint(2, 3) if backward in ("accumulate", *apart) else 1
    # Within backward torch may go through a layer without samples in another order.
    nothing = counting != "said" and not within and rng.random() < 0.25
    frozen = [rng.randrange(3)] if rng.random() < 0.15 else []
    left_out = {"freeze"} if frozen else set()  # a worker's branch would have nothing to train
    if by_hand or (counting == "loader" and backward == "closure"):
        left_out |= {"skip", "only the first"}  # gradients, or samples that count, are left to the next step
    if by_hand or within:
        left_out |= {"new optimizer"}  # nobody has wrapped it
    if within or backward in ("by hand in place", "by hand, summed"):
        left_out |= {
            "discard"
        }  # steps would be made of it; what is written behind it is taken for a change of it
    events = {step: rng.choice(EVENTS) for step in range(1, steps) if rng.random() < 0.25}
    events = {step: event for step, event in events.items() if event not in left_out}
    held_back = rng.randint(1, steps) if rng.random() < 0.1 and not several and not by_hand else None
    if (
        backward == "throw away"
    ):  # two known limits: what no optimizer zeroes, and what only a worker without samples has
        held_back, nothing = None, nothing and model != "branches"
    if backward == "scaler":  # what no optimizer has would stay infinite, and clipping by it makes all NaN
        held_back = None
    anew = "new optimizer" in events.values() or within or held_back is not None
    loop = Loop(
        seed=seed,
        model=model,
        dtype=dtype,
        optimizers=[(kind, options_of(kind, rng, dtype)) for kind in kinds],
        groups=rng.choice([1, 1, 2]),
        sizes=[
            _sizes(rng, workers, parts, even=backward in apart[:2], nothing=nothing) for _ in range(steps)
        ],
        counting=counting,
        by_rank=model == "branches" and not within and rng.random() < 0.7,
        backward=backward,
        clip=clip,
        edit=rng.choice(EDITS),
        zeroing=rng.choice(ZEROINGS),
        scheduler="none" if anew else rng.choice(SCHEDULERS),
        scale=rng.choice([1.0, 1.0, 0.5, 3.0]),
        frozen=frozen,
        held_back=held_back,
        direct=counting != "forward" and rng.random() < 0.3,
        events=events,
    )
    return _with_odd_tensors(loop)


def _with_odd_tensors(loop: Loop) -> Loop:
    """The loop; some with parameters that share memory, odd buffers, or an optimizer that counts in its groups."""
    rng = random.Random(f"odd {loop.seed}")
    if loop.model in ("mlp", "tied") and rng.random() < 0.5:
        loop = dataclasses.replace(loop, model=rng.choice(["shared memory", "odd buffers"]))
    if loop.model == "mlp" and loop.dtype == "float64" and rng.random() < 0.2:
        loop = dataclasses.replace(loop, model="wide", clip="none" if loop.clip == "none" else "norm")
    if loop.dtype == "float64" and rng.random() < 0.2:
        loop = dataclasses.replace(loop, optimizers=[("Counting", {"lr": 0.1}) for _ in loop.optimizers])
    return loop


def draw_ending(seed: int, workers: int) -> Loop:
    """A loop that a session ends with: it is refused, or its workers do not end together."""
    rng = random.Random(f"ending {seed}")
    ending = rng.choice(list(ENDINGS))
    sgd = ("SGD", {"lr": 0.1, "momentum": rng.choice([0.0, 0.9]), "weight_decay": 0.01})
    sizes = [_sizes(rng, workers, 1, even=True, nothing=False) for _ in range(4)]
    loop = Loop(seed=seed, optimizers=[sgd], sizes=sizes, ending=ending)
    if ending == "uneven":  # each worker stops after another number of steps
        counts = [rng.randint(1, 5) for _ in range(workers)]
        kind = rng.choice(list(OPTIMIZERS))
        return dataclasses.replace(
            loop,
            optimizers=[(kind, options_of(kind, rng))],
            sizes=[
                [[rng.randint(1, 5) if step < count else None for count in counts]]
                for step in range(max(counts))
            ],
        )
    changes: dict[str, dict[str, Any]] = {
        "sparse": {"model": "sparse embedding", "optimizers": [("SGD", {"lr": 0.1})]},
        "clipped too early": {"backward": "join by step", "clip": "value"},
        "replaced too early": {"backward": "join by step", "clip": "replace"},
        "clipped by hand": {
            "backward": rng.choice(["by hand", "by hand, detached"]),
            "clip": rng.choice(["norm", "value", "centre"]),
        },
        "hessian": {"backward": "hessian"},
        "sync batch norm": {"model": "sync batch norm"},
        "bounded embedding": {"model": "bounded embedding"},
    }
    return dataclasses.replace(loop, **changes.get(ending, {}))


def _sizes(rng: random.Random, workers: int, parts: int, *, even: bool, nothing: bool) -> Sizes:
    """Of the parts of one minibatch. At least one worker has samples."""
    drawn: Sizes = []
    for _ in range(1 if even else parts):
        drawn.append([rng.randint(1, 5) for _ in range(workers)])
        if nothing:
            drawn[-1][rng.randrange(workers)] = 0
    return drawn * parts if even else drawn
