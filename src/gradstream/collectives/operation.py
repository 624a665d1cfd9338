"""An operation of a group, as its ranks agree on it."""

from __future__ import annotations

from dataclasses import dataclass

from gradstream.errors import ConfigError

__all__ = ["Operation"]


@dataclass(frozen=True, slots=True)
class Operation:
    """What the ranks do together, for all of them to agree on.

    Args:
        number: of the operation in its group.
        digest: of what it is; chunks of another one are refused.
        text: the same for people.
    """

    number: int
    digest: int
    text: str

    def mismatch(self, peer: str, number: int) -> ConfigError:
        """The error where a peer is in another operation, which is its `number`."""
        return ConfigError(
            f"{self.text} is this rank's operation {self.number} of the group, but {peer} does another "
            f"(its number {number}): all ranks must call the same operations in the same order, with as "
            "many elements"
        )
