"""A drawn training loop: what it does, written down before anything is made of it."""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from drawn.parts import OPTIMIZERS, options_of

__all__ = ["BY_HAND", "ENDINGS", "Loop", "draw", "draw_ending"]

BACKWARDS = (
    *("plain",) * 4,
    "two losses",
    "sum of losses",
    "retained graph",
    "both at once",
    "of some parameters",
    "accumulate",
    "accumulate apart",
    "apart, joined by the step",
    "apart and thrown away",
    "by hand",
    "by hand, in place",
    "checkpointed",
    "checkpointed, reentrant",
    "penalty",
    "scaler",
    "closure",
    "closure by hand",
    "steps within backward",
    "rivals",
)
"""How gradients are made."""

BY_HAND = ("apart, joined by the step", "by hand", "by hand, in place", "closure by hand")
"""They are joined when the step is made: what changes them before is this worker's own."""

CLIPS = (
    *("none",) * 3,
    "norm",
    "largest",
    "value",
    "halve",
    "replace",
    "drop one",
    "noise",
    "centre",
    "each group",
)
EDITS = (*("none",) * 3, "clamp", "normalise", "shrink", "data", "pointed", "average", "as a vector")
ZEROINGS = (*("none first",) * 3, "zeros first", "none last", "zeros last", "by hand", "module", "never")
SCHEDULERS = (*("none",) * 3, "step", "one cycle", "by group", "cosine")
EVENTS = (
    *("freeze", "unfreeze", "reload optimizer", "restore", "new optimizer", "evaluate", "copy", "slower"),
    *("skip", "only the first"),
)

ENDINGS: Mapping[str, str] = {
    "uneven": "",
    "sparse": "GradientError",
    "not a number": "GradientError",
    "new parameter": "ConfigError",
    "clipped too early": "ConfigError",
    "own rate": "ReplicasDifferError",
    "own noise": "ReplicasDifferError",
    "own gradient": "ReplicasDifferError",
    "bounded embedding": "ReplicasDifferError",
}
"""Loops that are the last ones of a run, and what they are refused with; "" where they are not."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Loop:
    """What a loop does.

    Args:
        seed: of everything that was drawn, its numbers included.
        model: key of `MODELS`.
        optimizers: kind and options of each; with two, layers are dealt to them in turn.
        groups: of parameters, in each.
        sizes: of the minibatch of each step, part of it, and worker. None where a worker has stopped before.
        counting: how samples become known: "forward", "said" or "loader".
        by_rank: workers take branches of their own.
        backward, clip, edit, zeroing, scheduler: see the tuples above.
        scale: of the loss.
        frozen: layers that are frozen at `wrap`, by number.
        held_back: the last layer comes into the optimizer at this step only.
        direct: the model is called past its hooks.
        events: at the beginning of a step.
        ending: key of `ENDINGS`, or "".
    """

    seed: int
    model: str
    optimizers: Sequence[tuple[str, Mapping[str, Any]]]
    groups: int
    sizes: Sequence[Sequence[Sequence[int | None]]]
    counting: str
    by_rank: bool
    backward: str
    clip: str
    edit: str
    zeroing: str
    scheduler: str
    scale: float
    frozen: Sequence[int]
    held_back: int | None
    direct: bool
    events: Mapping[int, str]
    ending: str = ""


def draw(seed: int, workers: int) -> Loop:
    """The loop of a seed, in which workers do alike."""
    rng = random.Random(f"loop {seed}")
    backward = rng.choice(BACKWARDS)
    model = rng.choice(
        ["mlp", "tied", "branches", "residual", "embedding", "convolution", "recurrent", "batch norm"]
    )
    model = rng.choice([model] * 7 + ["weight norm"])
    if backward in ("rivals", "checkpointed", "checkpointed, reentrant"):
        model = rng.choice(["mlp", "tied"])
    if backward == "penalty":
        model = rng.choice(["mlp", "residual", "batch norm"])
    kinds = [
        rng.choice(list(OPTIMIZERS)) for _ in range(2 if rng.random() < 0.25 or backward == "rivals" else 1)
    ]
    steps = rng.randint(2, 5)
    counting = rng.choice(["forward", "forward", "said", "loader"])
    parts = rng.randint(2, 3) if backward.startswith(("accumulate", "apart")) else 1
    apart = backward.startswith(("accumulate apart", "apart"))
    nothing = counting != "said" and model != "recurrent" and rng.random() < 0.25
    if backward == "steps within backward":  # torch may go through a layer without samples in another order
        nothing = False
    sizes = [_sizes(rng, workers, parts, even=apart, nothing=nothing) for _ in range(steps)]
    clip = rng.choice(CLIPS)
    if backward in BY_HAND:
        clip = rng.choice(["none", "drop one"]) if model != "branches" else "none"
    if model == "residual" and (clip == "largest" or "Adafactor" in kinds):
        model = "mlp"  # torch has no largest element, and no Adafactor, of a parameter without elements
    edit = rng.choice(EDITS)
    if model == "convolution" and edit == "as a vector":  # torch has no view of what lies in another order
        edit = "none"
    events = {step: rng.choice(EVENTS) for step in range(1, steps) if rng.random() < 0.25}
    held_back = rng.randint(1, steps) if rng.random() < 0.1 and len(kinds) == 1 else None
    frozen = [0] if rng.random() < 0.15 else []
    if backward in BY_HAND:  # a step that is left out leaves gradients, and counted samples, to the next one
        events = {step: event for step, event in events.items() if event not in ("skip", "only the first")}
        held_back = None
    scheduler = rng.choice(SCHEDULERS)
    if backward in BY_HAND or backward == "steps within backward":  # nobody has wrapped a new one
        events = {step: event for step, event in events.items() if event != "new optimizer"}
    if "new optimizer" in events.values() or backward == "steps within backward" or held_back is not None:
        scheduler = "none"
    return Loop(
        seed=seed,
        model=model,
        optimizers=[(kind, options_of(kind, rng)) for kind in kinds],
        groups=rng.choice([1, 1, 2]),
        sizes=sizes,
        counting=counting,
        by_rank=model == "branches" and backward != "steps within backward" and rng.random() < 0.7,
        backward=backward,
        clip=clip,
        edit=edit,
        zeroing=rng.choice(ZEROINGS),
        scheduler=scheduler,
        scale=rng.choice([1.0, 1.0, 0.5, 3.0]),
        frozen=frozen,
        held_back=held_back,
        direct=counting != "forward" and rng.random() < 0.3,
        events=events,
    )


def draw_ending(seed: int, workers: int) -> Loop:
    """A loop that a session ends with: it is refused, or its workers do not end together."""
    rng = random.Random(f"ending {seed}")
    loop = draw(seed, workers)
    ending = rng.choice(list(ENDINGS))
    plain = dataclasses.replace(
        loop,
        ending=ending,
        model="mlp",
        optimizers=[("SGD", {"lr": 0.1, "momentum": rng.choice([0.0, 0.9]), "weight_decay": 0.01})],
        groups=1,
        sizes=[_sizes(rng, workers, 1, even=True, nothing=False) for _ in range(4)],
        counting="forward",
        by_rank=False,
        backward="plain",
        clip="none",
        edit="none",
        zeroing="none first",
        scheduler="none",
        frozen=[],
        held_back=None,
        direct=False,
        events={},
    )
    changes: dict[str, dict[str, Any]] = {
        "uneven": {
            "optimizers": loop.optimizers[:1],
            "groups": loop.groups,
            "sizes": _ending_apart(rng, workers),
        },
        "sparse": {"model": "sparse embedding", "optimizers": [("SGD", {"lr": 0.1})]},
        "clipped too early": {"backward": "apart, joined by the step", "clip": "value"},
        "bounded embedding": {"model": "bounded embedding"},
    }
    return dataclasses.replace(plain, **changes.get(ending, {}))


def _sizes(
    rng: random.Random, workers: int, parts: int, *, even: bool, nothing: bool
) -> list[list[int | None]]:
    """Of the parts of one minibatch. At least one worker has samples."""

    def one() -> list[int | None]:
        sizes: list[int | None] = [rng.randint(1, 5) for _ in range(workers)]
        if nothing:
            sizes[rng.randrange(workers)] = 0
        return sizes

    if even:
        return [one()] * parts
    return [one() for _ in range(parts)]


def _ending_apart(rng: random.Random, workers: int) -> list[list[list[int | None]]]:
    """Each worker stops after another number of steps."""
    counts = [rng.randint(1, 5) for _ in range(workers)]
    return [
        [[rng.randint(1, 5) if step < count else None for count in counts]] for step in range(max(counts))
    ]
