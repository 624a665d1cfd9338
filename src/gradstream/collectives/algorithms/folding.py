"""Lets any number of ranks use an algorithm that needs a power of two, as MPICH does.

Of p = p' + r ranks, with p' the power of two below p, the first 2r pair up. The even rank of a pair sends its vector
to the odd one, takes no part, and gets the result at the end. The p' ranks that are left get new numbers.

    0 ─▶ 1   2 ─▶ 3   4   5            p = 6: 1, 3, 4 and 5 continue as 0, 1, 2 and 3

Reference: Thakur, Rabenseifner, Gropp, 2005, section 4.5.
"""

from __future__ import annotations

from dataclasses import dataclass

from gradstream.collectives.schedule import Recv, Send, Step


@dataclass(frozen=True, slots=True)
class Fold:
    """Tells a rank its steps before and after the algorithm, and its number among those that carry the algorithm out.

    Args:
        core: p', the number of ranks that take part.
        extra: r, the number of ranks that take no part.
        place: this rank's number among those that take part; None if it takes no part.
        before, after: its steps before and after the algorithm.
    """

    core: int
    extra: int
    place: int | None
    before: tuple[Step, ...] = ()
    after: tuple[Step, ...] = ()

    @classmethod
    def of(cls, rank: int, size: int, elems: int) -> Fold:
        """The fold of one of `size` ranks, for vectors of `elems`."""
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
        """The rank that has the number `place` among those that take part."""
        return 2 * place + 1 if place < self.extra else place + self.extra
