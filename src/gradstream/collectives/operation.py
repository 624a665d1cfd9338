"""An operation of a group, as all its ranks describe it."""

from __future__ import annotations

from dataclasses import dataclass

from gradstream.errors import ConfigError

__all__ = ["Operation"]


@dataclass(frozen=True, slots=True)
class Operation:
    """Identifies one operation, so that a rank refuses chunks of another one.

    Args:
        number: number of the operation in its group.
        digest: checksum of `text`.
        text: what the ranks do, for messages.
    """

    number: int
    digest: int
    text: str

    def mismatch(self, peer: str, number: int) -> ConfigError:
        """The error to raise if a peer is in another operation, the one with its number `number`."""
        return ConfigError(
            f"{self.text} is this rank's operation {self.number} of the group, but {peer} does another "
            f"(its number {number}): all ranks must call the same operations in the same order, with as "
            "many elements"
        )
