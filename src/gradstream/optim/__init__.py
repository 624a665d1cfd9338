"""Update rules: one file per method, state in and state out, on any range of the flat vector."""

from gradstream.optim.adagrad import Adagrad
from gradstream.optim.adam import Adam, AdamW
from gradstream.optim.base import Optimizer
from gradstream.optim.sgd import SGD, Momentum, Nesterov

__all__ = ["SGD", "Adagrad", "Adam", "AdamW", "Momentum", "Nesterov", "Optimizer"]
