"""Chooses how a part computes its gradients, by the `pipeline` of its run."""

from __future__ import annotations

from gradstream.data.base import Feed
from gradstream.pipeline.hybrid import Hybrid
from gradstream.pipeline.schedule import STREAMING
from gradstream.pipeline.synthetic import SyntheticGradients
from gradstream.runtime.base import Runtime
from gradstream.split.part_model import PartModel
from gradstream.worker.config import WorkerConfig
from gradstream.worker.parts.agreement import Agreement
from gradstream.worker.parts.channel import PartChannel
from gradstream.worker.parts.decoupled import DecoupledGradients
from gradstream.worker.parts.gradients import AgreedSource, PartSource
from gradstream.worker.parts.hybrid import HybridGradients
from gradstream.worker.parts.pipelined import PartGradients
from gradstream.worker.parts.redone import RedoneGradients
from gradstream.worker.parts.stream import StreamedGradients


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
