"""Update rules, one file per method, and schedules of their learning rate."""

from gradstream.optim.adagrad import Adagrad
from gradstream.optim.adam import Adam, AdamW
from gradstream.optim.base import Optimizer
from gradstream.optim.lamb import LAMB
from gradstream.optim.lars import LARS
from gradstream.optim.muon import Muon
from gradstream.optim.schedules import (
    BackOff,
    Chain,
    Constant,
    Cosine,
    InverseRoot,
    Linear,
    OneCycle,
    StepDecay,
    Warmup,
)
from gradstream.optim.sgd import SGD, Momentum, Nesterov

__all__ = [
    "LAMB",
    "LARS",
    "SGD",
    "Adagrad",
    "Adam",
    "AdamW",
    "BackOff",
    "Chain",
    "Constant",
    "Cosine",
    "InverseRoot",
    "Linear",
    "Momentum",
    "Muon",
    "Nesterov",
    "OneCycle",
    "Optimizer",
    "StepDecay",
    "Warmup",
]
