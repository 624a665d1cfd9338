"""`AccessControl`: which streams a node serves to whom, the same over all of its carriers."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

from gradstream.errors import RefusedError
from gradstream.runtime.base import Runtime
from gradstream.runtime.tasks import Broadcast
from gradstream.transport.base import Caller, Handler, Identity
from gradstream.transport.methods import COORDINATOR, LIMITS, METHODS, UNLISTED, Method, role_of
from gradstream.transport.receive_queue import Intakes
from gradstream.transport.stream import StreamCore
from gradstream.wire import v1
from gradstream.wire.frames import PROTOCOL


@dataclass(frozen=True, slots=True)
class Service:
    """A method that this node serves, as in gRPC: peers open streams to call it.

    Args:
        handler: serves each stream.
        model: whether the method reads or writes the model; see `Endpoint.serve`.
        method: row of `METHODS` that describes the method.
    """

    handler: Handler
    model: bool
    method: Method


class AccessControl:
    """Checks each Open against the node's identity, its members and its limits.

    Args:
        window: chunks that the node holds for each stream it is called on.
    """

    def __init__(self, identity: Identity, runtime: Runtime, window: int) -> None:
        self.services: dict[str, Service] = {}
        self.intakes = Intakes(identity, window)
        self._identity = identity
        self._runtime = runtime
        self._members_changed = Broadcast()

    def members_changed(self) -> None:
        """Wakes the streams that wait for news of their caller's membership."""
        self._members_changed.ring()

    def objection(
        self, opened: v1.Open, caller: Caller | None, *, closed: bool, protected: bool
    ) -> v1.Refuse | None:
        """Why this node does not serve an Open; None if it does.

        Args:
            caller: the node that made the connection; None if the carrier does not know.
            closed: whether the endpoint serves no more streams.
            protected: whether the connection is encrypted, and certificates name both sides.
        """
        mine, service = self._identity, self.services.get(opened.method)
        refuse = partial(v1.Refuse, epoch=mine.epoch)
        who = f"{opened.sender} (incarnation {opened.incarnation:x})"
        if opened.protocol != PROTOCOL:
            text = f"{who} speaks protocol {opened.protocol}, {mine.name} {PROTOCOL}: install one version"
            return refuse(code=v1.BAD_PROTOCOL, message=text)
        if opened.job != mine.job:
            text = f"{who} belongs to job {opened.job!r}, {mine.name} to {mine.job!r}: check the address"
            return refuse(code=v1.BAD_JOB, message=text)
        if caller is not None and caller != Caller.of(opened):
            return refuse(code=v1.BAD_REQUEST, message=f"a stream of {who} on a connection of {caller.name}")
        if service is None or closed:
            known = ", ".join(sorted(self.services))
            text = f"{mine.name} serves no method {opened.method!r}; it serves {known}"
            return refuse(code=v1.UNKNOWN_METHOD, message=text)
        method = service.method
        if len(opened.body) > method.request_bytes:
            most = method.request_bytes
            text = f"{opened.method}: a request of {len(opened.body)} bytes, expected at most {most}"
            return refuse(code=v1.BAD_REQUEST, message=text)
        intake = self.intakes.of(Caller.of(opened))
        most_streams = LIMITS.streams + intake.more_streams
        if intake.num_streams >= most_streams:
            text = f"{who} has {most_streams} streams to {mine.name} open already"
            return refuse(code=v1.OVER_LIMIT, message=text)
        if (mine.members is not None or protected) and role_of(opened.sender) not in method.callers:
            text = f"{opened.sender} may not call {opened.method!r}: it is a {role_of(opened.sender)}"
            return refuse(code=v1.FORBIDDEN, message=text)
        if service.model and mine.fingerprint and opened.fingerprint != mine.fingerprint:
            text = (
                f"{who} has model fingerprint {opened.fingerprint:016x}, {mine.name} has "
                f"{mine.fingerprint:016x} (0: none): all nodes must run the same model"
            )
            return refuse(code=v1.BAD_FINGERPRINT, message=text)
        if service.model and opened.epoch < mine.epoch:
            text = f"{who} is at membership epoch {opened.epoch}, {mine.name} at {mine.epoch}: join again"
            return refuse(code=v1.STALE_EPOCH, message=text)
        if method.members and not self.is_member(opened) and not self._may_become_member(opened):
            text = f"{who} is no member of this run, or no longer"
            return refuse(code=v1.NOT_MEMBER, message=text)
        return None

    def serves_at_other_times(self, method: str) -> bool:
        """Whether a node of this role serves a method, just not now: callers may be early, or late.

        In a group of hundreds, all ready ranks call one that is not ready, so such refusals are no misbehaviour.
        """
        known = METHODS.get(method, UNLISTED)
        return method not in self.services and role_of(self._identity.name) in known.served_by

    def is_member(self, opened: v1.Open) -> bool:
        """Whether the caller is a member, as far as this node knows; before it has joined, all callers are."""
        members = self._identity.members
        if members is None or opened.sender == COORDINATOR:
            return True
        return members.get(opened.sender) == opened.incarnation

    def _may_become_member(self, opened: v1.Open) -> bool:
        """Whether the caller knows a later membership epoch than this node."""
        return opened.epoch > self._identity.epoch

    async def await_member(self, stream: StreamCore) -> None:
        """Waits until this node knows that the caller of a stream is a member.

        Raises:
            RefusedError: the caller is not a member, or its membership did not become known in time.
        """
        opened, mine = stream.opened, self._identity

        async def known() -> None:
            while not self.is_member(opened) and self._may_become_member(opened) and not stream.failed:
                await self._members_changed.wait()

        stream.on_release(self._members_changed.ring)  # stops waiting for a caller that has given up
        try:
            await self._runtime.within(LIMITS.handshake_s, known())
        except TimeoutError:
            pass
        if not self.is_member(opened):
            text = f"{mine.name} has not heard that {opened.sender} is a member of this run"
            raise RefusedError(mine.name, "NOT_MEMBER", text)

    def count_stream(self, stream: StreamCore) -> None:
        """Counts a stream against its caller's limit until it is over."""
        intake = self.intakes.of(Caller.of(stream.opened))
        intake.num_streams += 1

        def over() -> None:
            intake.num_streams -= 1

        stream.on_release(over)

    def count_refusal(self, caller: Caller) -> bool:
        """Counts a refusal; True if the caller has had too many, and its connections must be closed."""
        return self.intakes.of(caller).refused(self._runtime.now())

    def block(self, caller: Caller) -> v1.Refuse | None:
        """Why connections of a caller that knows the secret are refused for now; None if they are not."""
        if not self.intakes.of(caller).is_closed(self._runtime.now()):
            return None
        again = f"it listens again within {LIMITS.refusals_s:g} s"
        text = f"{self._identity.name} has refused too much to {caller.name}: {again}"
        return v1.Refuse(code=v1.OVER_LIMIT, message=text)
