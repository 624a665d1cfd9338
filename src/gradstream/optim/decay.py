"""Weight decay as a part of the gradient: g ← g + λ·w, at the parameters w that the gradient is of.

An update rule adds λ·w once an update. Where an update is the sum of several gradients, or a worker makes
steps of its own in between, that is too little: each gradient must bring its own. Then the worker adds it,
and the shards carry out the rule without it (`Strategy.decays_gradients`).
"""

from __future__ import annotations

import dataclasses

from gradstream.optim.adagrad import Adagrad
from gradstream.optim.adam import Adam, AdamW
from gradstream.optim.base import Optimizer
from gradstream.optim.sgd import SGD

__all__ = ["l2_of", "without_l2"]


def l2_of(rule: Optimizer) -> float:
    """λ of the term λ·w that a rule adds to the gradient; 0 where it adds none.

    AdamW takes its decay off the parameters and not off the gradient, once an update: that is no such term.
    Neither is anything that a rule of the user's does.
    """
    if isinstance(rule, SGD | Adagrad | Adam) and not isinstance(rule, AdamW):
        return rule.weight_decay
    return 0.0


def without_l2(rule: Optimizer) -> Optimizer:
    """The same rule, for gradients that have the term already."""
    if isinstance(rule, SGD | Adagrad | Adam) and l2_of(rule):
        return dataclasses.replace(rule, weight_decay=0.0)
    return rule
