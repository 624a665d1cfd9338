"""Parts of a model's state that no run changes: frozen parameters, and second names of tied parameters.

A file of parameters must have them too, since `module.load_state_dict(tensors)` demands every name.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np


@dataclass(frozen=True, slots=True)
class Fixed:
    """Tensors of a model that are not trained.

    Args:
        frozen: parameters that require no gradient, under all of their names.
        second: further names of trained parameters, each with its name in the layout.
    """

    frozen: Mapping[str, np.ndarray[Any, Any]] = field(default_factory=dict)
    second: Mapping[str, str] = field(default_factory=dict)


def fixed_of(model: object) -> Fixed:
    """A model's fixed tensors; none for a model without such a method."""
    give = getattr(model, "fixed", None)
    return Fixed() if give is None else give()


def extra_of(model: object) -> Mapping[str, np.ndarray[Any, Any]]:
    """The further state of a user's own loop, such as its optimizer's, from which the loop resumes.

    Names begin with `checkpoint.own_state.EXTRA`. {} for a model without such a method.
    """
    give = getattr(model, "extra", None)
    return {} if give is None else give()


def load_fixed(model: object, frozen: Mapping[str, np.ndarray[Any, Any]]) -> None:
    """Sets frozen parameters, and the state that `extra_of` has returned, if the model has a method for it.

    Names that the model does not know are ignored.
    """
    take = getattr(model, "load_fixed", None)
    if take is not None:
        take(frozen)
