"""What a model's state has besides trained parameters and buffers, and no run changes.

Frozen parameters, and second names of tied ones. Whoever loads a file of parameters into the module
expects them there: `module.load_state_dict(tensors)` is strict.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

__all__ = ["Fixed", "extra_of", "fixed_of", "load_fixed"]


@dataclass(frozen=True, slots=True)
class Fixed:
    """Tensors of a model that nobody trains.

    Args:
        frozen: parameters that require no gradient, by every name that they have.
        second: further names of trained parameters, each with the one in the layout.
    """

    frozen: Mapping[str, np.ndarray[Any, Any]] = field(default_factory=dict)
    second: Mapping[str, str] = field(default_factory=dict)


def fixed_of(model: object) -> Fixed:
    """A model's fixed tensors; none of one that knows no such thing."""
    give = getattr(model, "fixed", None)
    return Fixed() if give is None else give()


def extra_of(model: object) -> Mapping[str, np.ndarray[Any, Any]]:
    """What a loop of the user's own has to go on with besides its model: what its optimizer remembers.

    Names begin with `checkpoint.own_state.EXTRA`. {} of a model that knows no such thing.
    """
    give = getattr(model, "extra", None)
    return {} if give is None else give()


def load_fixed(model: object, frozen: Mapping[str, np.ndarray[Any, Any]]) -> None:
    """Sets frozen parameters, and what `extra_of` has given, where a model lets them be set.

    Names that it does not know are passed over.
    """
    take = getattr(model, "load_fixed", None)
    if take is not None:
        take(frozen)
