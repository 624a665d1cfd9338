"""Weight decay as a part of the gradient: g ← g + λ·w, where w are the parameters at which g was computed.

An update rule adds λ·w once for each update. That is too little where an update is the sum of several gradients,
or where a worker makes local steps in between. Then the worker adds λ·w to each gradient, and the shards
apply the rule without it (`ServerStrategy.decays_gradients`).
"""

from __future__ import annotations

import dataclasses

from gradstream.optim.adagrad import Adagrad
from gradstream.optim.adam import Adam, AdamW
from gradstream.optim.base import Optimizer
from gradstream.optim.sgd import SGD


def l2_of(rule: Optimizer) -> float:
    """λ of the term λ·w that a rule adds to the gradient; 0 where it adds none.

    AdamW subtracts its decay from the parameters, not from the gradient, so it has no such term. A rule of the
    user's is taken to have none.
    """
    if isinstance(rule, SGD | Adagrad | Adam) and not isinstance(rule, AdamW):
        return rule.weight_decay
    return 0.0


def without_l2(rule: Optimizer) -> Optimizer:
    """The same rule for gradients that contain the term already."""
    if isinstance(rule, SGD | Adagrad | Adam) and l2_of(rule):
        return dataclasses.replace(rule, weight_decay=0.0)
    return rule
