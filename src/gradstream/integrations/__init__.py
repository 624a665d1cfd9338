"""Runs trainers of other libraries as the training loops of a session. One module for each library.

Each module needs its library: `pip install 'gradstream[transformers]'`, `gradstream[lightning]` or
`gradstream[accelerate]`. The library's own optimizer makes the steps, so the strategy must be one whose workers can do
that: those that average gradients, those that train locally, and others as far as `Session.wrap(fused=False)` goes.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeGuard

import torch
from torch import nn

from gradstream.session.session import Session, SingleProcessSession
from gradstream.session.worker_session import WorkerSession

__all__ = ["is_joined", "process_index", "wrap"]

MANY = 1 << 40
"""More epochs than any trainer has: it says itself which is the last one."""


def is_joined(session: Session) -> TypeGuard[WorkerSession]:
    """Whether the session has joined a run, of several workers or of one to which others may come."""
    return not isinstance(session, SingleProcessSession)


def process_index(session: Session) -> int:
    """The worker's number for a library whose process 0 saves and logs: 0 for the main worker, which may change."""
    return 0 if session.is_main else session.rank or session.world_size


def wrap(
    session: WorkerSession,
    model: Sequence[nn.Module],
    optimizers: Sequence[torch.optim.Optimizer],
    **registered: Any,
) -> None:
    """Calls `Session.wrap` for a library that keeps its own model and optimizers.

    Args:
        session: session of this worker.
        model: modules to train.
        optimizers: optimizers that the library steps.
        registered: what else the trainer changes, by name: see `Session.register`.

    Raises:
        ConfigError: see `Session.wrap`.
    """
    session.wrap(list(model), list(optimizers), fused=False)
    session.register(**registered)
