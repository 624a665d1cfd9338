"""The properties that every strategy must have, each with its check, on virtual time and with seeds.

A check is a function of a strategy. It returns its figures in one line, and raises `BrokenPropertyError`
if the property does not hold. The first line of its docstring is the property.
"""

from __future__ import annotations

import dataclasses
import itertools
import json
import random
from collections.abc import Callable, Iterator, Mapping
from typing import Any, cast, get_args

import numpy as np

from gradstream.data import from_arrays
from gradstream.data.arrays import ArrayDataset
from gradstream.data.base import Partitioning
from gradstream.data.plan import epoch_order
from gradstream.errors import ConfigError, PeerLostError
from gradstream.job.descriptions import describe
from gradstream.job.registry import find_strategy
from gradstream.model.base import Reduction
from gradstream.optim import SGD
from gradstream.run.result import Run
from gradstream.strategies.base import GroupStrategy, PeerStrategy, ServerStrategy, Strategy
from gradstream.testing.runs import NUM_SAMPLES, QUICK, least_squares, token_counts
from gradstream.testing.trials import TrialOutcome, bad_world, token_run, trial

SEEDS = 6
SHARDS = (1, 2, 7)
"""How many, where a strategy has any, in runs that must come to their end."""
EPOCHS = 2
FEATURES = 200  # four chunks of 64 elements
LR, GRID = 2.0**-7, 2.0**-10


class BrokenPropertyError(AssertionError):
    """A strategy lacks a property; the message says how, with the figures."""


_PLAIN = "expected numbers, texts, None, and lists or dicts of these"

Property = Callable[[Strategy], str]


# ---- checks without a run ---------------------------------------------------------


def documented(strategy: Strategy) -> str:
    """Its class says what it is."""
    cls = type(strategy)
    text = (cls.__dict__.get("__doc__") or "").strip()
    if not text or text.startswith(f"{cls.__name__}("):  # the default of dataclass
        raise BrokenPropertyError(
            f"class {cls.__name__} has no docstring: say what it does, formula and paper"
        )
    return f"{text.splitlines()[0]!r}"


def travels(strategy: Strategy) -> str:
    """It is a frozen dataclass whose options JSON holds, and says how it divides data and whether a worker may die."""
    cls = type(strategy)
    parameters = getattr(cls, "__dataclass_params__", None)
    if parameters is None or not parameters.frozen or "__dataclass_params__" not in cls.__dict__:
        raise BrokenPropertyError(
            f"class {cls.__name__} is no frozen dataclass: put @dataclass(frozen=True) above it"
        )
    fields = describe(strategy)["fields"]
    try:
        again = cls(**json.loads(json.dumps(fields)))
    except TypeError as error:
        raise BrokenPropertyError(f"its options {fields} do not survive JSON: {error}; {_PLAIN}") from error
    if again != strategy:
        raise BrokenPropertyError(
            f"its options {fields} come out of JSON as {describe(again)['fields']}; {_PLAIN}"
        )
    _check_place(strategy)
    if getattr(strategy, "partitioning", None) not in get_args(Partitioning):
        raise BrokenPropertyError(
            f"{cls.__name__}.partitioning is {getattr(strategy, 'partitioning', None)!r}; expected one of "
            f"{get_args(Partitioning)}"
        )
    if not isinstance(getattr(strategy, "survives_worker_loss", None), bool):
        raise BrokenPropertyError(
            f"{cls.__name__}.survives_worker_loss is {getattr(strategy, 'survives_worker_loss', None)!r}; "
            "expected True or False"
        )
    return f"number of options: {len(fields)}; partitioning: {strategy.partitioning}"


def _check_place(strategy: Strategy) -> None:
    """Raises unless other processes find the class by its place. A class of the job file itself has none."""
    described = describe(strategy)
    if not described["class"]:
        return
    if "<locals>" in described["class"]:
        raise BrokenPropertyError(
            f"other processes do not find {described['class']}: define it at the top of a file"
        )
    try:
        revived = find_strategy(described["class"], described["fields"])
    except ConfigError as error:
        raise BrokenPropertyError(f"other processes do not find it: {error}") from error
    if revived != strategy:
        raise BrokenPropertyError(f"other processes find {revived!r} at {described['class']}")


# ---- arithmetic -----------------------------------------------------------------------------


def plain(strategy: Strategy) -> str:
    """At its plainest options, one worker is SGD by one node, bit for bit."""
    tried, nearest = 0, (np.inf, strategy)
    for candidate in _plainest(strategy):
        tried += 1
        distance = max(_distance_from_sgd(candidate, reduction) for reduction in ("sum", "mean"))
        if distance == 0:
            return f"{candidate!r}"
        nearest = min(nearest, (distance, candidate), key=lambda pair: pair[0])
    away = "does not come to its end" if np.isinf(nearest[0]) else f"ends {nearest[0]:.3g} away from it"
    raise BrokenPropertyError(
        f"none of {tried} settings is plain SGD with one worker; {nearest[1]!r} {away}. "
        "Declare the one that should be: plain = {'push_every': 1}, for example"
    )


def _plainest(strategy: Strategy) -> Iterator[Strategy]:
    """The declared setting; otherwise settings made of the simplest values of each option."""
    declared: Mapping[str, Any] | None = strategy.plain
    if declared is not None:
        yield dataclasses.replace(cast(Any, strategy), **declared)
        return
    simple: dict[str, list[float]] = {}
    for entry in dataclasses.fields(cast(Any, strategy)):
        value = getattr(strategy, entry.name)
        if isinstance(value, bool):
            simple[entry.name] = [value, not value]
        elif isinstance(value, int | float):
            simple[entry.name] = list(dict.fromkeys([value, type(value)(1), type(value)(0)]))
    for values in itertools.islice(itertools.product(*simple.values()), 64):
        try:
            yield dataclasses.replace(cast(Any, strategy), **dict(zip(simple, values, strict=True)))
        except ValueError:
            continue  # it refuses this setting


def _distance_from_sgd(strategy: Strategy, reduction: Reduction) -> float:
    """The largest |w - w'| after 12 minibatches of 4; sums are exact in any order."""
    model, data = least_squares(32, FEATURES, grid=GRID, reduction=reduction)
    options: dict[str, Any] = {"optimizer": SGD(lr=LR), "batch_size": 4, "steps": 12, "seed": 3}
    outcome = trial(strategy, model, data, workers=1, servers=2, **options)
    if outcome.run is None:
        return np.inf
    distance = np.abs(outcome.run.parameters["w"] - _sgd(data)).max()
    return float(distance)


def _sgd(data: ArrayDataset) -> np.ndarray[Any, Any]:
    w = np.zeros(FEATURES)
    for step in range(12):
        epoch, batch = divmod(step, 8)
        ids = epoch_order(32, 3, epoch)[4 * batch : 4 * batch + 4]
        x, y = data.inputs[ids], data.targets[ids]
        at = np.round(w / GRID) * GRID
        w -= LR * ((x @ at - y) @ x) / 4
    return w


def converges(strategy: Strategy) -> str:
    """It learns a linear function: with SGD of rate 0.01 the loss halves, with its own rule it falls."""
    model, _ = least_squares(1, 8, reduction="mean")
    inputs = np.random.default_rng(5).standard_normal((240, 8))
    truth = np.arange(1, 9) / 4
    data = from_arrays(inputs, inputs @ truth)
    before, figures = float(np.mean((inputs @ truth) ** 2)), []
    for optimizer, share in ((SGD(lr=0.01), 0.5), (strategy.optimizer(), 1.0)):
        outcome = trial(
            strategy, model, data, workers=3, servers=2, batch_size=8, epochs=8, optimizer=optimizer
        )
        run = _ended(outcome, f"with {optimizer}")
        loss = float(np.mean((inputs @ (run.parameters["w"] - truth)) ** 2))
        if not loss < share * before:  # NaN is not
            raise BrokenPropertyError(
                f"with {optimizer} the loss goes from {before:.3g} to {loss:.3g}; "
                f"expected below {share * before:.3g}"
            )
        figures.append(f"{loss / before:.3g}")
    return f"loss × {figures[0]} by SGD(lr=0.01), × {figures[1]} by its own rule"


# ---- nothing lost, nothing twice --------------------------------------------------------------


def complete(strategy: Strategy) -> str:
    """Every sample of every epoch is in the model once: each push is applied, or dropped and reported."""
    samples = dropped = 0
    for seed in range(SEEDS):
        outcome = token_run(strategy, epochs=EPOCHS, seed=seed)
        _counted(outcome, f"seed {seed}")
        samples += NUM_SAMPLES * EPOCHS
        dropped += outcome.record.dropped_samples
    return f"{samples:,} samples × 4 chunks counted" + (f", {dropped:,} dropped" if dropped else "")


def exactly_once(strategy: Strategy) -> str:
    """Every push counts once, also where frames are lost, doubled and overtaken."""
    retries = duplicates = 0
    for seed in range(SEEDS):
        config = bad_world(2, 2 if isinstance(strategy, ServerStrategy) else 0)
        outcome = token_run(strategy, workers=2, epochs=EPOCHS, seed=seed, config=config)
        _counted(outcome, f"seed {seed}, on a bad network")
        retries += outcome.total("exchange", "retries")
        duplicates += outcome.total("applied", "duplicates")
    return f"{SEEDS} seeds, {retries} retries, {duplicates} duplicates"


def _counted(outcome: TrialOutcome, where: str) -> None:
    """Raises unless Σ applied + Σ dropped = Σ pushed, sample by sample where nothing was dropped."""
    counts = _counts(_ended(outcome, where), outcome, where)
    missing = int((EPOCHS - counts).sum())
    dropped = outcome.record.dropped_samples
    if missing != dropped:
        raise BrokenPropertyError(
            f"{where}: {counts.size * EPOCHS} samples went in, {int(counts.sum())} were applied and "
            f"{dropped} dropped, over all chunks: {abs(missing - dropped)} "
            f"{'lost' if missing > dropped else 'too many'}"
        )
    wrong = np.argwhere(counts > EPOCHS) if dropped else np.argwhere(counts != EPOCHS)
    for chunk, sample in wrong:
        raise BrokenPropertyError(
            f"{where}: sample {sample} is {counts[chunk, sample]} times in chunk {chunk}; expected {EPOCHS}"
        )


def _counts(run: Run, outcome: TrialOutcome, where: str) -> np.ndarray[Any, Any]:
    """How often each sample is in the model or in the workers' own parameters: shape (chunks, samples).

    An exchange of differences moves shares of a count between a worker and the server: the sum of x̃ and of the
    distances that all x_i have moved is the whole count.
    """
    if not outcome.record.own:
        return token_counts(run, NUM_SAMPLES)
    total = _with_own(run, outcome)
    counts: np.ndarray[Any, Any] = np.rint(total).astype(np.int64)
    for chunk, sample in np.argwhere(np.abs(total - counts) > 1e-3):
        raise BrokenPropertyError(
            f"{where}: sample {sample} is {total[chunk, sample]:.3f} times in chunk {chunk} of the server "
            "and all workers together; expected a whole number: what an exchange takes from a worker it must add to "
            "the server"
        )
    return counts


def _with_own(run: Run, outcome: TrialOutcome) -> np.ndarray[Any, Any]:
    shape = run.parameters["tokens"].shape
    moved = (own.reshape(shape) for own in outcome.record.own.values() if len(own) > 1)
    total = sum(moved, run.parameters["tokens"])
    return np.asarray(total, np.float64)[:, :NUM_SAMPLES]


def pure_rule(strategy: Strategy) -> str:
    """Its rule answers the same to the same question, and gives each contribution a finite weight."""
    outcome = token_run(strategy, epochs=EPOCHS)
    if outcome.record.faults:
        raise BrokenPropertyError("; ".join(outcome.record.faults[:3]))
    _ended(outcome, "")
    return f"{len(outcome.record.arrivals)} contributions"


# ---- histories --------------------------------------------------------------------------------


def repeatable(strategy: Strategy) -> str:
    """In a simulation the same seed gives the same bytes and the same events."""
    for seed in range(2):
        first, other = (_learnt(strategy, seed) for _ in range(2))
        if _bytes_of(first) != _bytes_of(other):
            raise BrokenPropertyError(
                f"two runs of seed {seed} end with different parameters: take time, tasks and randomness "
                "from the worker's operations only"
            )
        differing = next(
            (a or b for a, b in itertools.zip_longest(first.events, other.events) if a != b), None
        )
        if differing is not None:
            raise BrokenPropertyError(
                f"two runs of seed {seed} have different events: {differing}; take time, tasks and randomness from "
                "the worker's operations only"
            )
    return f"{len(first.events)} events"


def seeded(strategy: Strategy) -> str:
    """Another seed gives another history: another order of contributions, or other parameters."""
    outcomes = [_learnt(strategy, seed) for seed in range(4)]
    orders = {tuple(outcome.record.arrivals) for outcome in outcomes}
    ends = {_bytes_of(outcome) for outcome in outcomes}
    if len(orders) == 1 and len(ends) == 1:
        raise BrokenPropertyError(
            "4 seeds give one and the same history, expected several: compute gradients on the minibatches that the "
            "worker gets"
        )
    return f"4 seeds, {len(orders)} orders of contributions, {len(ends)} ends"


def _learnt(strategy: Strategy, seed: int, stop: float | None = None) -> TrialOutcome:
    model, data = least_squares(32, FEATURES, whole=False)
    options: dict[str, Any] = {"optimizer": SGD(lr=LR), "batch_size": 4, "epochs": 2, "seed": seed}
    return trial(strategy, model, data, workers=3, servers=2, stop=stop, **options)


def _bytes_of(outcome: TrialOutcome) -> bytes:
    parameters: bytes = _ended(outcome, "").parameters["w"].tobytes()
    return parameters


# ---- endings --------------------------------------------------------------------------------


def ends(strategy: Strategy) -> str:
    """It comes to its end with 1 to 5 workers and 1, 2 or 7 shards (or none), also where a share is short."""
    longest = 0.0
    sizes = list(itertools.product(range(1, 6), SHARDS if isinstance(strategy, ServerStrategy) else (0,)))
    for workers, servers in sizes:
        outcome = token_run(strategy, workers=workers, servers=servers, epochs=1, batch_size=3)
        run = _ended(outcome, f"with workers={workers}, servers={servers}")
        longest = max(longest, run.info["virtual_s"])
    return f"{len(sizes)} sizes, the longest in {longest:.2f} s of virtual time"


def resumes(strategy: Strategy) -> str:
    """Stopped and resumed, a run has every sample once; in rounds it ends with the bytes of an uninterrupted one."""
    stops, rng = 0, random.Random(2)
    if strategy.partitioning == "rounds":
        whole = _bytes_of(_learnt(strategy, 0))
        for seconds in (0.015, 0.03):
            outcome = _learnt(strategy, 0, stop=seconds)
            if _bytes_of(outcome) != whole:
                raise BrokenPropertyError(
                    f"a run that was stopped after {seconds:g} s and resumed ends with other parameters than a run "
                    "that was not stopped: a resumed run calls train() again, which loses its local variables"
                )
            stops += outcome.count("resumed")
    for seed in range(SEEDS):
        outcome = token_run(strategy, epochs=EPOCHS, seed=seed, stop=rng.uniform(0.01, 0.1))
        where = f"seed {seed}, stopped and resumed"
        if isinstance(strategy, ServerStrategy) and strategy.pushes in ("differences", "parameters"):
            _accounted(_ended(outcome, where), where)
        else:
            _counted(outcome, where)
        stops += outcome.count("resumed")
    return f"{stops} stops"


def _accounted(run: Run, where: str, *, epochs: int = EPOCHS) -> None:
    """Checks the receipts: workers with their own parameters exchange means, in which samples cannot be counted."""
    accounted, dropped = run.summary["samples_accounted"], run.summary["samples_dropped"]
    if accounted + dropped != NUM_SAMPLES * epochs:
        raise BrokenPropertyError(
            f"{where}: {accounted} samples were reported as applied, and {dropped} as dropped; expected "
            f"{NUM_SAMPLES * epochs}, {NUM_SAMPLES} in each of {epochs} epochs: a strategy must report each minibatch "
            "that it takes exactly once"
        )


def deaths(strategy: Strategy) -> str:
    """It survives a worker's death without a loss if it claims to; otherwise the death ends the run by name."""
    died, rng = 0, random.Random(1)
    reduction: Reduction = "sum" if isinstance(strategy, GroupStrategy) else "mean"
    survives = strategy.survives_worker_loss and (
        not isinstance(strategy, GroupStrategy) or strategy.stands_in
    )
    for seed in range(SEEDS):
        name = f"worker-{seed % 3}"
        kill = name, rng.uniform(0.01, 0.12)
        outcome = token_run(strategy, epochs=3, seed=seed, kill=kill, reduction=reduction)
        if isinstance(strategy, PeerStrategy):
            _accounted(_ended(outcome, f"{name} is killed"), f"{name} is killed", epochs=3)
            died += name in outcome.lost
        elif survives:
            _nothing_lost(_ended(outcome, f"{name} is killed"), outcome, name)
            died += name in outcome.lost
        elif outcome.run is None:
            _ends_by_name(outcome, name)
            died += 1
    word = "survived" if survives else "ended it by name"
    return f"{died} deaths, {word}"


def _nothing_lost(run: Run, outcome: TrialOutcome, name: str) -> None:
    if outcome.record.own:  # a dead worker loses a share of its own progress, never all of it
        missing = int((_with_own(run, outcome) <= 1e-6).sum())
    else:
        missing = int(np.maximum(3 - token_counts(run, NUM_SAMPLES), 0).sum())
    if missing > outcome.record.dropped_samples:
        raise BrokenPropertyError(
            f"after the death of {name} {missing} samples are missing, over all chunks, and "
            f"{outcome.record.dropped_samples} were reported as dropped; expected no more missing than dropped"
        )


def _ends_by_name(outcome: TrialOutcome, name: str) -> None:
    error = outcome.error
    if not isinstance(error, PeerLostError) or error.peer != name:
        raise BrokenPropertyError(
            f"{name} is killed, which it does not claim to survive: {outcome.ending}; expected "
            f"PeerLostError naming {name} within the lease of {QUICK.lease_s:g} s"
        )


def _ended(outcome: TrialOutcome, where: str) -> Run:
    """The run of an outcome. Raises if there is none."""
    if outcome.run is None:
        raise BrokenPropertyError(f"{where}: {outcome.ending}" if where else outcome.ending)
    return outcome.run


PROPERTIES: tuple[Property, ...] = (
    documented,
    travels,
    plain,
    converges,
    complete,
    exactly_once,
    pure_rule,
    repeatable,
    seeded,
    ends,
    resumes,
    deaths,
)
"""In the order in which they are checked."""
