"""How long a part of a run lasts, as a user writes it: a number of samples, or of data epochs."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass

from gradstream.errors import ConfigError

__all__ = ["Amount", "amount"]


@dataclass(frozen=True, slots=True)
class Amount:
    """So many samples, and so many data epochs besides."""

    samples: int = 0
    epochs: float = 0.0

    def of(self, num_samples: int) -> float:
        """In samples, where a data epoch has `num_samples`."""
        return self.samples + self.epochs * num_samples

    def __bool__(self) -> bool:
        return bool(self.samples or self.epochs)


def amount(what: str, value: int | str) -> Amount:
    """What a user has written: 5000 samples, "2epochs", "0.5 epochs", "epoch"; 0 for nothing.

    Args:
        what: the option's name, for the message.

    Raises:
        ConfigError: it is none of these.
    """
    if isinstance(value, int) and not isinstance(value, bool) and value >= 0:
        return Amount(samples=value)
    if value == "epoch":
        return Amount(epochs=1.0)
    found = re.fullmatch(r"(\d+(?:\.\d+)?) ?epochs?", value) if isinstance(value, str) else None
    if found is not None and math.isfinite(float(found[1])):
        return Amount(epochs=float(found[1]))
    raise ConfigError(
        f"{what}={value!r}: expected a number of samples of at least 0, or of data epochs, such as "
        "'2epochs' or '0.5epochs'"
    )
