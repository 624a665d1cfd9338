"""Checks each request before the shard uses it: the sender, then sizes, types, rows, and that every number is finite.

Each check raises a RefusedError, which goes to the sender, and changes nothing.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Collection, Mapping

import torch

from gradstream.codec.base import Encoder, got_words
from gradstream.errors import ConfigError, DataError, RefusedError
from gradstream.model.base import length
from gradstream.server.aggregation import rank_of
from gradstream.server.procedure import names_of
from gradstream.server.rows import Part, RowPart, elements_of, unpack
from gradstream.server.shard.config import ShardConfig
from gradstream.server.shard.state import MAX_COUNT, Sender
from gradstream.server.shard.store import ShardStore
from gradstream.transport.base import Identity, Received
from gradstream.wire import v1
from gradstream.wire.chunks import part_of
from gradstream.wire.frames import ABSENT, CODED

_SAME_FILE = "; every node must run the same job file"
_NO_CLOCKS = ", where workers have no clocks; the strategy's rule says `clocked = True` if they have"

MAX_COMMANDS = 4096
"""Commands of a step of a procedure."""

MOST_PUSHES = 4
"""The chunks of this many pushes of a worker may wait here at the same time, besides those for lost workers."""

CLOCKED = frozenset((v1.Command.LEAVE, v1.Command.ENTER))
STEP_KINDS = frozenset(
    (
        v1.Command.ZERO,
        v1.Command.COPY,
        v1.Command.SCALE,
        v1.Command.ADD,
        v1.Command.DOT,
        v1.Command.MULTIPLY,
    )
)


class Inspection:
    """Compares requests with the registered model, the members of the run, and what its strategy uses.

    A shard takes no field and no command that the workers of this run never send: clocks where the rule has none,
    steps and portions if there are no passes, state of the update rule where workers do not carry it out.

    Args:
        identity: identity of the shard, with the model's fingerprint and the membership epoch.
        store: vectors of the shard, which have the sizes of the registered model.
        counters: counts the requests that do not fit, as "refused".
        config: the shard's part of the run.

    Attributes:
        members: the members of the run; None: every node is one.
        stand_ins: who may push for which lost worker, by rank.
        first: the highest rank whose worker may bring initial parameters.

    Raises:
        ConfigError: the codec does not know the elements of the model.
    """

    def __init__(
        self, identity: Identity, store: ShardStore, counters: Counter[str], config: ShardConfig
    ) -> None:
        self._identity = identity
        self._store = store
        self._counters = counters
        self._workers = 0 if config.grows else config.workers
        self._part = config.part
        self._encoder = None if config.codec is None else Encoder(config.codec, store.dtype)
        self._in_passes = config.in_passes
        self._clocked = config.rule.clocked
        self.members: Collection[Sender] | None = None
        self.stand_ins: Mapping[int, str] = {}
        self.first = MAX_COUNT

    # ---- senders ------------------------------------------------------------------------

    def check_model(self, opened: v1.Open) -> None:
        """Refuses a sender that has another model."""
        mine = self._identity
        if opened.fingerprint != mine.fingerprint:
            raise RefusedError(
                mine.name,
                "BAD_FINGERPRINT",
                f"{opened.sender} has model {opened.fingerprint:016x}, this shard holds "
                f"{mine.fingerprint:016x}{_SAME_FILE}",
            )

    def check_member(self, opened: v1.Open) -> None:
        """Refuses a sender that has left the run.

        The shard has freed the sender's sequence numbers, so a retry would count as new. Therefore the shard checks
        again whenever it takes something from an open stream. A sender of a later epoch is accepted: it may have
        joined before this shard was told.
        """
        mine, sender = self._identity, (opened.sender, opened.incarnation)
        if self.members is None or sender in self.members or opened.epoch > mine.epoch:
            return
        name = f"{opened.sender} (incarnation {opened.incarnation:x})"
        text = f"{name} has left the run: its {opened.method} is not taken at epoch {mine.epoch}; join again"
        raise RefusedError(mine.name, "NOT_MEMBER", text)

    def rank(self, sender: str) -> int:
        """The rank of a sender. Raises RefusedError for a sender that is not a worker of this run."""
        try:
            rank = rank_of(sender)
        except ConfigError as error:
            raise self.bad(sender, str(error)) from None
        if self._workers and not rank < self._workers:
            raise self.bad(sender, f"expected a worker of rank 0 to {self._workers - 1}{_SAME_FILE}")
        if part_of(sender) != self._part:
            raise self.bad(
                sender, f"this shard holds part {self._part} of the model; ask one of part {part_of(sender)}"
            )
        return rank

    # ---- requests -----------------------------------------------------------------------

    def check_push(self, opened: v1.Open, request: v1.Push) -> None:
        """Refuses a push whose header has impossible values.

        Who stands in for a lost worker may know it before this shard: it is told to try again.
        """
        sender, mine = opened.sender, self._identity
        self.rank(sender)
        if request.command not in (v1.Push.APPLY, v1.Push.ASSIGN):
            raise self.bad(sender, f"push command {request.command}; expected APPLY or ASSIGN")
        if request.HasField("stands_for") and self.stand_ins.get(request.stands_for) != sender:
            what = (
                f"{sender} pushes for worker-{request.stands_for}, for which another worker or none stands in"
            )
            if opened.epoch > mine.epoch:
                known = f"as far as this shard knows at epoch {mine.epoch}"
                raise RefusedError(mine.name, "STALE_EPOCH", f"{what}, {known}; try again")
            raise self.bad(sender, what)
        self._check_used(sender, request)
        if request.command == v1.Push.ASSIGN:
            self._check_first(opened)
        if not 0 < request.sequence < MAX_COUNT:
            raise self.bad(sender, f"push number {request.sequence}; expected 1 or more")
        counts = request.samples, request.round, request.clock, request.base_version, request.portion
        if max(counts) > MAX_COUNT:
            raise self.bad(sender, "it sends a count above 2^53")
        if not abs(request.lr) <= torch.finfo(self._store.dtype).max or math.isinf(request.loss):
            raise self._refused(
                "NON_FINITE",
                f"request of {sender}: learning rate {request.lr}, loss {request.loss}; expected "
                f"finite numbers of {self._store.dtype}",
            )

    def _check_used(self, sender: str, request: v1.Push) -> None:
        """Refuses fields of a push that no worker of this run uses."""
        pushed = self._store.pushed_state
        if request.vector and request.vector not in pushed:
            got = f"a push to {request.vector[:64]!r}"
            raise self.bad(sender, f"{got}; expected one to the parameters{_or_to(pushed)}")
        if request.portion and not self._in_passes:
            raise self.bad(
                sender, f"portion {request.portion} of a pass, where there are no passes{_SAME_FILE}"
            )
        if request.clock and not self._clocked:
            raise self.bad(sender, f"clock {request.clock}{_NO_CLOCKS}")
        if request.rows and self._store.changed is None:
            raise self.bad(sender, f"some rows of arrays, where workers push whole chunks{_SAME_FILE}")

    def _check_first(self, opened: v1.Open) -> None:
        """Refuses initial parameters of a worker as long as one of a lower rank is there that may bring them."""
        if rank_of(opened.sender) <= self.first:
            return
        text = f"initial parameters of {opened.sender}; expected them of rank {self.first}"
        if opened.epoch > self._identity.epoch:
            raise RefusedError(
                self._identity.name, "STALE_EPOCH", f"{text}, as far as this shard knows; try again"
            )
        raise self.bad(opened.sender, text)

    def check_base_version(
        self, sender: str, chunk: int, request: v1.Push, base_version: int, version: int
    ) -> None:
        """Refuses a gradient that was computed on a version, or is for a round, which the chunk has not reached."""
        if base_version > max(version, 0):
            raise self.bad(
                sender,
                f"chunk {chunk}: the gradient was computed on version {base_version}; expected at most {version}, "
                "the version here",
            )
        if request.round > max(version, 0) and not request.portion:
            raise self.bad(
                sender,
                f"chunk {chunk}: a push for round {request.round}; expected at most {version}, the round here",
            )

    def check_waiting(self, sender: str, chunks: int) -> None:
        """Refuses one more chunk of a sender of which this many wait here: they are in memory."""
        pushes = MOST_PUSHES + sum(stand_in == sender for stand_in in self.stand_ins.values())
        if chunks >= (most := pushes * len(self._store.here)):
            text = f"request of {sender}: {chunks} chunks of its pushes wait; expected {most} at most"
            raise self._refused("OVER_LIMIT", text)

    def check_fetch(self, sender: str, request: v1.Fetch) -> None:
        """Refuses a fetch of chunks that are not on this shard."""
        self.rank(sender)
        chunks = list(request.chunks)
        if not all(chunk in self._store.here for chunk in chunks):
            raise self.bad(sender, f"asks for chunks {chunks[:8]}..., of which some are on other shards")
        if len(set(chunks)) < len(chunks):
            raise self.bad(sender, f"it asks for a chunk twice, among {chunks[:8]}...")
        if request.known and self._store.changed is None:
            raise self.bad(
                sender, f"asks for changed rows of arrays; expected a request for whole chunks{_SAME_FILE}"
            )
        if request.min_clock and not self._clocked:
            raise self.bad(sender, f"asks for parameters of clock {request.min_clock}{_NO_CLOCKS}")
        if request.vector and request.vector not in self._store.state:
            raise self.bad(sender, f"asks for {request.vector[:64]!r}, which is no vector of the update rule")
        if len(request.known) not in (0, len(chunks)) or max(request.known, default=0) > MAX_COUNT:
            raise self.bad(
                sender,
                f"knows versions of {len(request.known)} of {len(chunks)} chunks; expected 0 or all, up to 2^53",
            )

    def check_command(self, sender: str, request: v1.Command) -> None:
        """Refuses a command that no worker of this run sends, and one with impossible values."""
        self.rank(sender)
        if request.kind not in {*CLOCKED, v1.Command.STEP}:
            raise self.bad(sender, f"command {request.kind}; expected LEAVE, ENTER or STEP")
        if request.kind in CLOCKED and not self._clocked:
            raise self.bad(sender, f"{v1.Command.Kind.Name(request.kind)}{_NO_CLOCKS}")
        if not 0 < request.sequence < MAX_COUNT or request.clock > MAX_COUNT:
            raise self.bad(
                sender, f"command number {request.sequence} at clock {request.clock}; expected 1 to 2^53"
            )
        if request.kind == v1.Command.STEP:
            self._check_step(sender, request)

    def _check_step(self, sender: str, request: v1.Command) -> None:
        """Refuses a step with commands that have no place in one."""
        step = request.step
        if not self._in_passes:
            raise self.bad(sender, f"a step of a procedure; the strategy of this run has none{_SAME_FILE}")
        if step.number > MAX_COUNT or step.pass_number > MAX_COUNT:
            raise self.bad(sender, f"step {step.number} of a procedure; expected less than 2^53")
        if len(request.commands) > MAX_COMMANDS:
            raise self.bad(
                sender, f"a step of {len(request.commands)} commands; expected at most {MAX_COMMANDS}"
            )
        for command in request.commands:
            if command.kind not in STEP_KINDS:
                raise self.bad(sender, f"command {command.kind} in a step; expected arithmetic on vectors")
            if not math.isfinite(command.alpha):
                raise self.bad(sender, f"a command with alpha = {command.alpha}; expected a finite number")
        if unknown := set(names_of(request.commands)) - {"", *self._store.state}:
            known = ", ".join(self._store.state)
            raise self.bad(
                sender, f"a step on {min(unknown)[:64]!r}; expected the parameters, or one of {known}"
            )

    def part(self, sender: str, received: Received) -> tuple[Part | None, float]:
        """The content of a chunk of a push, and the length of its elements; None if the chunk is flagged absent.

        Raises:
            RefusedError: BAD_REQUEST where the chunk does not fit the model, NON_FINITE where it has a NaN or an
                infinity.
        """
        chunk, elements, dtype = received.frame.chunk, received.payload, self._store.dtype
        if chunk.index not in self._store.here:
            raise self.bad(sender, f"chunk {chunk.index} is on another shard")
        if chunk.flags & ABSENT:
            return None, 0.0
        start, stop = self._store.chunks.bounds(chunk.index)
        if chunk.flags & CODED:
            elements = self._decoded(sender, chunk, elements, stop - start)
        if elements is not None and elements.dtype == dtype and (chunk.rows or len(elements) == stop - start):
            part = self._rows(sender, chunk, elements) if chunk.rows else elements
        else:
            got = "nothing" if elements is None else f"{len(elements)} elements of {elements.dtype}"
            raise self.bad(
                sender,
                f"chunk {chunk.index}: got {got}, expected {stop - start} of {dtype}{_SAME_FILE}",
            )
        elements = elements_of(part)
        size = math.inf if elements.is_meta else length(elements)
        if not (elements.is_meta or math.isfinite(size)):
            raise self._refused(
                "NON_FINITE",
                f"chunk {chunk.index} of {sender} holds a NaN, an infinity, or elements whose squares overflow; "
                "lower the learning rate or clip the gradient",
            )
        return part, size

    def _decoded(
        self, sender: str, chunk: v1.Chunk, payload: torch.Tensor | None, elems: int
    ) -> torch.Tensor:
        """The elements of a chunk that the sender has encoded."""
        encoder, what = self._encoder, f"chunk {chunk.index}, encoded: got"
        if encoder is None:
            raise self.bad(sender, f"{what} {got_words(payload)}, expected no codec{_SAME_FILE}")
        if misfit := encoder.misfit(payload, elems):
            raise self.bad(sender, f"{what} {misfit}, by codec={encoder.codec}{_SAME_FILE}")
        assert payload is not None
        elements = payload.new_empty(elems)
        try:
            encoder.decode(payload, elements)
        except DataError as error:
            raise self.bad(sender, f"{what} {error}") from error
        return elements

    def _rows(self, sender: str, chunk: v1.Chunk, payload: torch.Tensor) -> RowPart:
        """The rows in a payload, which must be rows of the chunk, each at most once."""
        changed = self._store.changed
        if changed is None:
            raise self.bad(
                sender, f"chunk {chunk.index}: got some rows of its arrays, expected all elements{_SAME_FILE}"
            )
        try:
            return unpack(changed.rows, chunk.index, chunk.rows, payload)
        except ValueError as error:
            raise self.bad(sender, f"chunk {chunk.index}: got {error}") from error

    def bad(self, sender: str, message: str) -> RefusedError:
        """The error for a request that does not fit."""
        return self._refused("BAD_REQUEST", f"request of {sender}: {message}")

    def _refused(self, code: str, message: str) -> RefusedError:
        self._counters["refused"] += 1
        return RefusedError(self._identity.name, code, message)


def _or_to(names: Collection[str]) -> str:
    return f", or to {', '.join(names)}" if names else ""
