"""Any number of ranks for algorithms that need a power of two: the treatment of MPICH.

Of p = p' + r ranks, p' the power of two below, the first 2r pair up: the even one sends its vector to the
odd one and sits out, and gets the result at the end. The p' that are left are renumbered.

    0 ─▶ 1   2 ─▶ 3   4   5            p = 6: 1, 3, 4 and 5 go on as 0, 1, 2 and 3

Reference: Thakur, Rabenseifner, Gropp, 2005, section 4.5.
"""

from __future__ import annotations

from dataclasses import dataclass

from gradstream.collectives.schedule import Recv, Send, Step

__all__ = ["Fold"]


@dataclass(frozen=True, slots=True)
class Fold:
    """What one rank does before and after, and who it is in between.

    Args:
        core: p', how many ranks are left in between.
        extra: r, how many sit out.
        place: this rank's number among those left; None if it sits out.
        before, after: its steps.
    """

    core: int
    extra: int
    place: int | None
    before: tuple[Step, ...] = ()
    after: tuple[Step, ...] = ()

    @classmethod
    def of(cls, rank: int, size: int, elems: int) -> Fold:
        """For one of `size` ranks, with vectors of `elems`."""
        core = 1 << (size.bit_length() - 1)
        extra = size - core
        if rank >= 2 * extra:
            return cls(core, extra, rank - extra)
        if rank % 2:
            partner = rank - 1
            return cls(
                core,
                extra,
                rank // 2,
                before=(Recv(partner, 0, elems, add=True),),
                after=(Send(partner, 0, elems),),
            )
        partner = rank + 1
        return cls(core, extra, None, before=(Send(partner, 0, elems), Recv(partner, 0, elems)))

    def rank_of(self, place: int) -> int:
        """The rank behind a number among those left."""
        return 2 * place + 1 if place < self.extra else place + self.extra
