"""`GroupForming`: keeps a worker in a group with all present workers, under the newest membership epoch.

a notice names other workers ──▶ the group is abandoned, and another one formed at once, also while a gradient is
                                 computed: who is slow is there in time
it fails, and all are there ──▶  the coordinator raises the epoch, and the same workers form another one: a connection
                                 between two of them broke, or bytes were damaged
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import TypeVar

from gradstream.collectives.group import Group
from gradstream.coordinator.client.member import Member
from gradstream.errors import ClosedError, DeadlineError, PeerLostError
from gradstream.runtime.base import Runtime, awaited_later
from gradstream.wire import v1
from gradstream.worker.parts.agreement import Agreement, at_once

T = TypeVar("T")

MOST_AGAIN = 3
"""Number of groups of the same workers that may fail in a row before any completes its work."""

LOST = (PeerLostError, DeadlineError, ClosedError)
"""What operations of a group raise when a worker is lost."""


class GroupForming:
    """The group of one worker.

    Args:
        runtime: runtime of the worker's node.
        member: the node's membership; the run has begun.
        form: forms the group of the workers of a notice.
        survives: another group is formed when the workers change. Otherwise the loss of one ends the run.
        interrupt: called with an error when a group is abandoned.
        agreement: agreement with the other processes of a split replica; None if there are none.
        alone: the run has no other replica, so no process of this replica can lose its group.

    Attributes:
        notice: the notice that names the workers of the last group that the caller has used.
    """

    notice: v1.Notice

    def __init__(
        self,
        runtime: Runtime,
        member: Member,
        form: Callable[[v1.Notice], Awaitable[Group]],
        *,
        survives: bool,
        interrupt: Callable[[Exception], None],
        agreement: Agreement | None = None,
        alone: bool = False,
    ) -> None:
        self._alone = alone
        self.notice = member.notice
        self._agreement = agreement
        self.survives = survives
        self._runtime = runtime
        self._member = member
        self._form = form
        self._interrupt = interrupt
        self._workers: dict[str, int] = {}  # incarnations of the workers of the newest group, by name
        self._newest = 0  # its number
        self._num_again = 0
        self._announced = member.notice
        self._used = 0  # number of the last group that the caller has used
        self._forming: asyncio.Task[Group] | None = None
        if survives:
            member.listen(self._hear)
        self._hear(member.notice)

    @property
    def outdated(self) -> bool:
        """Whether the members have changed since the caller got its group."""
        return self._newest > self._used

    async def through(self, work: Callable[[Group], Awaitable[T]]) -> T:
        """Calls `work` with the group; again with the next one if a worker is lost meanwhile.

        Raises:
            PeerLostError, DeadlineError: a worker was lost, and the run does not survive that; or `MOST_AGAIN` groups
                have failed, while the coordinator counts all workers as present.
        """
        while True:
            try:
                done = await self.jointly(self._with_group(work))
                self._num_again = 0
                return done
            except LOST as error:
                await self.changed(error)

    async def _with_group(self, work: Callable[[Group], Awaitable[T]]) -> T:
        return await work(await self._group())

    async def jointly(self, work: Awaitable[T]) -> T:
        """Awaits work that counts only if all processes of this replica complete theirs, in groups of one epoch.

        Raises:
            PeerLostError, DeadlineError, ClosedError: a process fails because it has lost its group.
        """
        if self._agreement is None:
            return await work
        try:
            done = await work
        except LOST:
            await self._agreement.all_ready(False, self.notice.epoch)
            raise
        if not await self._agreement.all_ready(True, self.notice.epoch):
            raise ClosedError("another part of this replica has lost its group")
        return done

    async def whole(self) -> None:
        """Returns when all processes of this replica have the sums of a round. Raises as `jointly` does."""
        if not self._alone:
            await self.jointly(at_once())

    async def give_up(self) -> None:
        """Makes all processes of this replica give up their round."""
        if self._agreement is not None:
            await self._agreement.give_up(self.notice.epoch)

    async def changed(self, error: Exception, *, at_once: bool = False) -> None:
        """Returns once there is another group, since an operation of this one has raised `error`. Else raises it.

        Args:
            error: see above.
            at_once: asks for one without waiting for the news of a loss.
        """
        for again in (False, True)[at_once : 2 * self.survives]:
            if again and self._num_again < MOST_AGAIN:
                self._num_again += 1
                self._member.report(v1.BeatReport(broken=self._announced.epoch))
            # A coordinator that has just come back waits for a lease by itself.
            if await self._member.told(lambda: self.outdated):
                return
        raise error

    async def close(self) -> None:
        """Leaves the group."""
        self.survives, forming = False, self._forming
        if forming is not None:
            forming.cancel()  # changes nothing if it is formed
            await _ended(forming)
            if (group := _formed(forming)) is not None:
                await group.close()

    async def _group(self) -> Group:
        """The newest group. Raises what forming it has raised."""
        while True:
            self._used, forming = self._newest, self._forming
            assert forming is not None
            await _ended(forming)
            if not self.outdated:
                self.notice = self._announced
                return forming.result()

    def _hear(self, notice: v1.Notice) -> None:
        """Begins to form a new group if workers or epoch have changed, and abandons the previous one."""
        workers = {node.name: node.incarnation for node in notice.nodes if node.role == "worker"}
        same = workers == self._workers and notice.epoch == self._announced.epoch
        if notice.status != v1.Notice.TRAINING or (self._newest and same):
            return
        before, self._workers = self._workers, workers
        self._newest += 1
        self._announced = notice
        runtime, earlier = self._runtime, self._forming
        if earlier is not None:
            lost = next((name for name in before if workers.get(name) != before[name]), "")
            why = (
                "was lost, as the coordinator says"
                if lost
                else "forms its group again"
                if workers == before
                else "forms a group with a worker that has joined"
            )
            error = PeerLostError(lost or runtime.node, why)
            self._interrupt(error)
            earlier.cancel()
            if (group := _formed(earlier)) is not None:
                group.abandon(error)
                runtime.spawn(group.close(), name=f"{runtime.node}-leaves-group")
        forming = runtime.spawn(self._form_after(earlier, notice), name=f"{runtime.node}-forms-group")
        self._forming = awaited_later(forming)

    async def _form_after(self, earlier: asyncio.Task[Group] | None, notice: v1.Notice) -> Group:
        if earlier is not None:
            await _ended(earlier)  # an endpoint serves one group at a time
        return await self._form(notice)


def _formed(forming: asyncio.Task[Group]) -> Group | None:
    """The group that was formed, if it was."""
    if not forming.done() or forming.cancelled() or forming.exception() is not None:
        return None
    return forming.result()


async def _ended(task: asyncio.Task[Group]) -> None:
    """Waits until a task has ended in any way."""
    await asyncio.gather(asyncio.shield(task), return_exceptions=True)
