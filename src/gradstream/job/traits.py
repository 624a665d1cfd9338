"""The traits of a job and of the members that it names, which the rules of `traits.txt` relate.

A member declares what it has by its own attributes, options and methods, such as `Strategy.partitioning`; only this
module gives these the names that the rules use.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from gradstream.codec.base import Codec
from gradstream.codec.feedback import EF21
from gradstream.codec.low_rank import PowerSGD
from gradstream.codec.sparse import DGC
from gradstream.data.shares import MEASURED
from gradstream.job.job import Job, is_open_ended
from gradstream.model.torch_module import TorchModel
from gradstream.optim import SGD
from gradstream.optim.base import ByShape, Optimizer, PerMatrix, PerTensor
from gradstream.pipeline.hybrid import Hybrid
from gradstream.pipeline.schedule import FLUSHING, STREAMING
from gradstream.pipeline.synthetic import SyntheticGradients
from gradstream.strategies.base import (
    GroupStrategy,
    PeerStrategy,
    ServerStrategy,
    SharedMemoryStrategy,
    Strategy,
)
from gradstream.traits import STRATEGY

OPTIONS = (
    *("record", "noise_scale", "accumulate", "codec", "fetch_codec", "groups", "assignment", "acknowledge"),
    *("evaluate_every", "split", "micro_batches", "recompute", "pipeline", "pipeline_dtype", "device"),
    *("clip_norm", "clip_value", "epochs", "steps", "phases", "strategy_options"),
)
"""Fields of a job that are traits if they differ from the default."""

_Found = Iterable[tuple[str, object, str]]
"""Name, whether it is there, and the text of each trait."""


def traits_of(
    job: Job, strategy: Strategy, optimizer: Optimizer, codec: Codec | PowerSGD | None = None
) -> dict[str, str]:
    """The traits of a job without phases, or of one of them, with the members that it names."""
    traits = {
        **traits_of_job(job),
        **traits_of_strategy(strategy, job.workers),
        **_there(_of_rule(optimizer, strategy)),
        **traits_of_codec(codec, f"codec={job.codec!r}"),
    }
    if job.servers == 0 and "servers" in traits:
        traits["servers=0"] = "servers=0"
    if "own loop" in traits:
        traits.pop("momentum", None)  # the rule is that of the script, which the session knows
    elif "local steps" in traits:
        traits["inner rule"] = traits[STRATEGY]
    return traits


def traits_of_job(job: Job) -> dict[str, str]:
    """What a job asks for, whatever its strategy."""
    return _there(_of_options(job))


def traits_of_strategy(strategy: Strategy, workers: int) -> dict[str, str]:
    """What a strategy with its options has, for this number of workers."""
    return _there(_of_strategy(strategy, workers))


def traits_of_codec(codec: Codec | PowerSGD | None, named: str) -> dict[str, str]:
    """What a codec has, by the words with which the user has asked for it."""
    return _there(_of_codec(codec, named))


def _there(candidates: _Found) -> dict[str, str]:
    return {name: text for name, there, text in candidates if there}


def _of_options(job: Job) -> _Found:
    for name in OPTIONS:
        value = getattr(job, name)
        short = name in ("groups", "phases", "clip_norm", "clip_value", "strategy_options")
        is_set = bool(value) and value not in (getattr(Job, name, None), "applied")
        yield name, is_set, name if short else f"{name}={value!r}"
    loop, pipeline = is_open_ended(job), job.pipeline
    named = f"pipeline={pipeline!r}"
    yield "own loop", loop, "a training loop of your own"
    yield "stream", not loop and job.data.num_samples is None, f"the stream {job.data.name!r}"
    yield "held-out samples", job.data.num_test_samples, "held-out samples"
    for name, value in job.until.evaluated.items() if job.until is not None else ():
        yield "until a figure", True, f"until({name}={value})"
    yield "clip", job.clip_norm or job.clip_value, "clip_value" if job.clip_norm is None else "clip_norm"
    yield "servers=", job.servers, f"servers={job.servers}"
    yield "one server", job.servers == 1, f"servers={job.servers}"
    yield "replicated", job.acknowledge == "replicated", "acknowledge='replicated'"
    yield "measured", isinstance(job.shares, str) and job.shares == MEASURED, f"shares={MEASURED!r}"
    for name, amounts in (("batch_size", job.batch_size), ("shares", job.shares)):
        if isinstance(amounts, Sequence) and not isinstance(amounts, str):
            yield "no samples", 0 in amounts, f"{name}={list(amounts)}"
    yield "assigned partitions", job.assignment == "partitions", "assignment='partitions'"
    yield "one epoch", job.epochs == 1, "epochs=1"
    yield "checkpoint each epoch", job.checkpoint_every == "epoch", "checkpoint_every='epoch'"
    yield "no schedule", not isinstance(pipeline, str), named
    yield "hybrid", isinstance(pipeline, Hybrid), named
    yield "parts apart", isinstance(pipeline, SyntheticGradients), named
    yield "delayed", pipeline == "delayed", named
    yield "stream of parts", job.split != 1 and pipeline in STREAMING, named
    remembers = job.split != 1 and pipeline not in FLUSHING and not isinstance(pipeline, Hybrid)
    yield "parts with a memory", remembers, named
    undivided = not isinstance(job.model, TorchModel) and not callable(job.model)
    yield "undivided model", undivided, f"a {type(job.model).__name__}"
    inside = any(
        phase.steps or phase.until or phase.variance_test or phase.noise_multiple for phase in job.phases
    )
    yield "phase inside of an epoch", inside, "phases"


def _of_strategy(strategy: Strategy, workers: int) -> _Found:
    named = f"strategy={strategy.title or type(strategy).__name__}"
    yield STRATEGY, True, named
    rounds = strategy.partitioning == "rounds"
    yield "rounds", rounds, named
    yield "passes", strategy.in_passes, named
    yield "local steps", strategy.local_rounds, named
    yield "stale weights", not strategy.pipelined, named
    yield "stand-ins", strategy.stands_in, named
    yield "survivors", rounds or strategy.survives_worker_loss, named
    momentum = getattr(strategy, "worker_momentum", 0)
    yield "worker momentum", momentum, f"worker_momentum={momentum}"
    yield "common mean", strategy.gives_mean, named
    if isinstance(strategy, SharedMemoryStrategy):
        yield "shared memory", True, named
        yield "way", True, "through shared memory"
    if isinstance(strategy, GroupStrategy):
        yield "group", True, named
        yield "way", True, "in a group"
        yield "common rounds", True, named
        yield "delay", strategy.delay, f"delay={strategy.delay}"
        yield "sharded", strategy.sharded, "sharded=True"
        yield "torch", strategy.exchange != "auto", f"exchange={strategy.exchange!r}"
    if isinstance(strategy, PeerStrategy):
        yield "pairs", True, named
        yield "way", True, "in pairs"
        yield "differences", strategy.encodes, named
    if isinstance(strategy, ServerStrategy):
        yield from _of_servers(strategy, workers, named)


def _of_servers(strategy: ServerStrategy, workers: int, named: str) -> _Found:
    yield "servers", True, named
    aggregate, backup = getattr(strategy, "aggregate", "mean"), getattr(strategy, "backup", None)
    quorum, whole = strategy.quorum(workers) is not None, f"aggregate={aggregate!r}"
    yield "quorum", quorum, named
    yield "aggregate", aggregate != "mean", whole
    yield "whole contributions", quorum and aggregate != "mean", whole
    yield "backup", quorum and aggregate == "mean", f"backup={backup}" if backup else named
    updates = strategy.pushes == "gradients"
    by_round = getattr(strategy.rule(workers, "mean"), "by_round", False)
    yield "common rounds", by_round, named
    yield "updates on shards", updates, named
    yield "single pushes", updates and not by_round, named
    yield "pushed parameters", strategy.pushes == "parameters", named
    yield "correction", strategy.correction() is not None, named
    yield "significance", strategy.rows(False) is not None, f"the rows of {named}"
    yield "touched rows", strategy.rows(True) is not None, named
    yield "fragments", strategy.fewest_chunks > 1, f"{strategy.fewest_chunks} fragments of {named}"


def _of_rule(optimizer: Optimizer, strategy: Strategy) -> _Found:
    named = f"optimizer={type(optimizer).__name__}"
    yield "by tensor", isinstance(optimizer, ByShape), named
    yield "by matrix", isinstance(optimizer, PerMatrix), named
    yield "norms", isinstance(optimizer, PerTensor), named
    yield "momentum", getattr(optimizer, "momentum", False), f"{named} with momentum"
    plain = isinstance(optimizer, SGD) and not optimizer.state_names and not optimizer.weight_decay
    yield "rule with state", not plain, f"optimizer={optimizer}"
    own = strategy.optimizer() if strategy.in_passes else optimizer
    text = f"lr={optimizer.lr}" if type(optimizer) is type(own) else f"optimizer={optimizer}"
    yield "optimizer", optimizer != own, text


def _of_codec(codec: Codec | PowerSGD | None, named: str) -> _Found:
    yield "codec with a memory of senders", isinstance(codec, EF21), named
    yield "codec with momentum", isinstance(codec, DGC), named
    yield "codec of matrices", isinstance(codec, PowerSGD), named
