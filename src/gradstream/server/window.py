"""Which sequence numbers of a sender have been applied: a low-water mark and a bitmap above it.

Remembering only the last number seen would refuse legitimate pushes that overtook one another;
remembering all would grow for ever.
"""

from __future__ import annotations

__all__ = ["SequenceWindow"]


class SequenceWindow:
    """A set of positive integers that mostly grows at its upper end.

    Everything up to the low-water mark is in the set. Numbers more than `WIDTH` below the highest
    count as in the set too: their senders have long given up on them.
    """

    WIDTH = 4096

    __slots__ = ("_above", "low")

    def __init__(self) -> None:
        self.low = 0
        self._above = 0  # bit i: low + 1 + i is in the set; bit 0 is never set

    def __contains__(self, number: int) -> bool:
        if number <= self.low:
            return True
        return bool(self._above >> (number - self.low - 1) & 1)

    def add(self, number: int) -> None:
        """Puts a number in. Adding it again changes nothing."""
        if number <= self.low:
            return
        excess = number - self.low - self.WIDTH
        if excess > 0:  # first, so that no number from outside decides how long the integer gets
            self._raise_low(excess)
        self._above |= 1 << (number - self.low - 1)
        self._raise_low((self._above ^ (self._above + 1)).bit_length() - 1)  # trailing ones

    def _raise_low(self, count: int) -> None:
        self.low += count
        self._above >>= count
