"""Chooses how a part computes its gradients, by the `pipeline` of its run, and restores what they have of their own."""

from __future__ import annotations

from functools import partial

from gradstream.checkpoint.own_tensors import answering, read_own
from gradstream.data.base import Feed
from gradstream.errors import DataError
from gradstream.pipeline.hybrid import Hybrid
from gradstream.pipeline.schedule import STREAMING
from gradstream.pipeline.synthetic import SyntheticGradients
from gradstream.runtime.base import Runtime, Work
from gradstream.split.part_model import PartModel
from gradstream.transport.base import Endpoint
from gradstream.untrusted import say
from gradstream.worker.config import WorkerConfig
from gradstream.worker.parts.agreement import Agreement
from gradstream.worker.parts.channel import PartChannel
from gradstream.worker.parts.decoupled import DecoupledGradients
from gradstream.worker.parts.gradients import AgreedSource, PartSource
from gradstream.worker.parts.hybrid import HybridGradients
from gradstream.worker.parts.pipelined import PartGradients
from gradstream.worker.parts.redone import RedoneGradients
from gradstream.worker.parts.stream import StreamedGradients


async def begin_predictors(
    gradients: PartSource, config: WorkerConfig, runtime: Runtime, endpoint: Endpoint, *, late: bool
) -> None:
    """Restores the predictors of a part that trains apart from its checkpoint, and serves them to the next one.

    Args:
        gradients: of the part. Nothing is done for one that has no predictors.
        config, runtime, endpoint: of the process.
        late: it takes the place of a lost process. Its predictors begin at zero.

    Raises:
        DataError: the file in the checkpoint is of other predictors.
    """
    if not isinstance(gradients, DecoupledGradients):
        return
    endpoint.serve("predictors", answering(gradients.state), model=False)
    assert config.split is not None and isinstance(config.split.pipeline, SyntheticGradients)
    resume, node = config.resume, runtime.node
    if late or resume is None or resume.predictors != config.split.pipeline.of_parts(config.split.parts):
        return
    read = partial(read_own, runtime.storage, resume.folder, "predictors", node)
    found = await runtime.beside(read, work=Work("restore"))
    if found is None:
        say(f"{node}: its predictors begin at zero; {resume.folder} on this machine has none of them")
        return
    try:
        gradients.load(found)
    except (RuntimeError, KeyError) as error:
        raise DataError(
            f"{node}: the predictors in {resume.folder} do not fit this model: {error}; resume from another "
            "checkpoint, or under another split, where they begin at zero"
        ) from error


def gradients_of(
    config: WorkerConfig,
    runtime: Runtime,
    model: PartModel,
    channel: PartChannel,
    agreement: Agreement,
    feed: Feed | None,
) -> PartSource:
    """The gradients of one part. For the arguments, see `PartSource`."""
    assert config.split is not None
    kind: type[PartSource]
    match config.split.pipeline:
        case SyntheticGradients():
            kind = DecoupledGradients
        case Hybrid():
            kind = HybridGradients
        case name:
            kind = StreamedGradients if name in STREAMING else PartGradients
    channel = channel.encoded(config.split.pipeline_dtype)
    source = kind(config, runtime, model, channel, agreement, feed)
    if not isinstance(source, AgreedSource):
        source.redoing = RedoneGradients(config, runtime, model, channel.beside(), agreement, feed)
    return source
