"""Refuses SyncBatchNorm where it would see one worker's samples alone.

torch's layer sums its statistics in a process group, in the midst of a forward pass. Without a group it computes
those of its own minibatch, as BatchNorm does, without a word. A session's rounds carry gradients after a backward,
and cannot stand in for that.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch.distributed as dist
from torch import nn

from gradstream.errors import ConfigError
from gradstream.session.samples import BeforeForward


def refuse_sync_batch_norm(modules: Sequence[nn.Module], workers: int) -> None:
    """Refuses each SyncBatchNorm in training mode: now, and whenever it is called later.

    Args:
        modules: the modules that a script wraps.
        workers: number of workers. One has all samples.

    Raises:
        ConfigError: there is one, and no process group.
    """
    for module in modules if workers > 1 else ():
        for name, part in module.named_modules():
            if isinstance(part, nn.SyncBatchNorm):
                refusal = _Refusal(name)
                refusal(part, (), {})
                part.register_forward_pre_hook(BeforeForward(refusal), with_kwargs=True)


class _Refusal:
    def __init__(self, name: str) -> None:
        self._name = name

    def __call__(self, module: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        if module.training and not (dist.is_available() and dist.is_initialized()):
            raise ConfigError(
                f"session.wrap: {self._name or 'the model'!r} is a SyncBatchNorm in training mode, and "
                "torch.distributed has no process group in which it could join the workers' statistics: it would take "
                "those of each worker alone. Use BatchNorm, which is meant to do so (its running means are averaged at "
                "the end), or GroupNorm or LayerNorm, which look at one sample at a time; put it into eval() before "
                "session.wrap where it is not trained; or, on GPUs, call torch.distributed.init_process_group before "
                "gradstream.join"
            )
