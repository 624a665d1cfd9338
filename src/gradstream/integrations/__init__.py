"""Runs trainers of other libraries as the training loops of a session. One module for each library.

Each module needs its library: `pip install 'gradstream[transformers]'`, `gradstream[lightning]` or
`gradstream[accelerate]`. The strategy must average gradients: `allreduce`, the default, or `synchronous`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from gradstream.errors import ConfigError
from gradstream.session.session import Session

__all__ = ["wrap"]


def wrap(session: Session, model: Sequence[nn.Module], optimizers: Sequence[torch.optim.Optimizer]) -> None:
    """Calls `Session.wrap` for a library that keeps its own model and optimizers.

    Args:
        session: session of this worker.
        model: modules to train.
        optimizers: optimizers that the library steps.

    Raises:
        ConfigError: the strategy needs other optimizers in their place.
    """
    wrapped: Any = list(optimizers)
    if session.wrap(list(model), wrapped)[1] is not wrapped:
        raise ConfigError(
            "integrations: the session's strategy makes updates on the servers, but the library steps its "
            'own optimizer. Use a strategy that averages gradients: "synchronous" or "allreduce"'
        )
