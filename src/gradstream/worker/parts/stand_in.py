"""`PartStandIn`: the processes of a split replica compute the parts of lost workers together.

    worker: own gradient ── tells its parts: rank r, round m ──▶ all compute r's minibatch ──▶ each pushes its part as r
    a process has the next version ──▶ waits until all have theirs ──▶ all go on to it

A stand-in needs the parameters of the present round. So no process of a replica leaves a round before it is over on
the shards of all parts.
"""

from __future__ import annotations

import asyncio
from typing import Any

from gradstream.server.update import Update
from gradstream.wire import v1
from gradstream.worker.parts.agreement import Agreement
from gradstream.worker.parts.messages import PartStandsIn
from gradstream.worker.replica.stand_in import PresentRound, StandIn


class PartStandIn(StandIn):
    """See `StandIn`.

    Args:
        args: of a `StandIn`.
        agreement: with the other processes of the replica.
    """

    def __init__(self, *args: Any, agreement: Agreement) -> None:
        super().__init__(*args)
        self._agreement = agreement
        self._turn = asyncio.Lock()
        self._due: list[PartStandsIn] = []  # asked of this part for a round that it has not begun
        agreement.on_stand_in = self._let

    def hear(self, notice: v1.Notice) -> None:
        """See `StandIn`: the worker alone hears for whom; the others hear of it from the worker."""
        if self._agreement.leads:
            super().hear(notice)

    def _let(self, asked: PartStandsIn) -> None:
        self._due.append(asked)
        self._compute_due()

    def begin(self, present: PresentRound) -> None:
        """See `StandIn`."""
        super().begin(present)
        self._compute_due()

    def _compute_due(self) -> None:
        present = self._round
        for asked in list(self._due):
            if present is not None and asked.round == present.version:
                self._due.remove(asked)
                self._spawn(present, asked.rank)

    async def settled(self) -> None:
        """Returns when all processes of the replica have the next version, and none needs the parameters any more."""
        if self._round is not None:
            await self._agreement.all_ready(True, last=super().settled)

    async def _gradient(self, present: PresentRound, rank: int) -> Update:
        await present.own.done()  # the processes compute one gradient at a time, in one order
        async with self._turn:
            self._agreement.let_stand_in(rank, present.version)
            return await super()._gradient(present, rank)
