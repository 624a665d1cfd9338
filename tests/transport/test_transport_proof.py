"""Proofs of the run's secret and sessions of gRPC, without a connection: each changed bit is refused."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace

import pytest

from gradstream.errors import ConfigError, RefusedError
from gradstream.testing.pairs import SECRET
from gradstream.transport import proof
from gradstream.transport.base import Identity
from gradstream.transport.grpc.connection import CallerSession, PeerSession, Sessions, proved
from gradstream.transport.limits import LIMITS
from gradstream.wire import v1
from gradstream.wire.frames import PROTOCOL, SequenceWindow
from kit.bare import Bare

SHARD = Identity("job", "shard-0", 1, secret=SECRET)
WORKER = Identity("job", "worker-0", 7, secret=SECRET)
BARE = Bare(WORKER, called="shard-0")
SECOND_NS = 10**9
EXPIRES_NS = round(LIMITS.handshake_s * 1e9)
FULL = {
    "sender": "worker-0",
    "incarnation": 7,
    "link": 3,
    "index": 1,
    "count": 4,
    "line": "a line",
    "checked": True,
}
"""A greeting that leaves no field empty."""


def challenge() -> v1.Challenge:
    return v1.Challenge(protocol=PROTOCOL, nonce=proof.new_nonce())


def knows(greeting: v1.Greeting, nonce: bytes, called: Identity = SHARD) -> bool:
    return proof.knows(called.secret, nonce, greeting, job=called.job, called=called.name)


def test_nobody_in_between_can_switch_checksums_off() -> None:
    """Either side may want them; a called side that does refuses a caller that was not told."""
    for mine, theirs in ((False, False), (False, True), (True, False)):
        asked = v1.Challenge(protocol=PROTOCOL, nonce=proof.new_nonce(), checked=theirs)
        greeting = v1.Greeting(sender="worker-0", incarnation=7, checked=mine)
        proof.answer_challenge(BARE.identity, BARE.called, asked, greeting)
        assert greeting.checked == (mine or theirs)
        assert proof.objection(SHARD, asked.nonce, greeting, checked=theirs) is None
        refuse = proof.objection(SHARD, asked.nonce, greeting, checked=True)
        assert (refuse is None) == greeting.checked
        greeting.checked = not greeting.checked
        refuse = proof.objection(SHARD, asked.nonce, greeting, checked=False)
        assert refuse is not None and refuse.code == v1.BAD_SECRET


def changed_by_a_bit(message: v1.Greeting) -> Iterator[tuple[str, v1.Greeting]]:
    """A message with each bit of each of its fields changed, by the field's name."""
    for field, value in message.ListFields():
        raw = value.encode() if isinstance(value, str) else value
        num_bits = 8 * len(raw) if isinstance(raw, bytes) else 1 if isinstance(raw, bool) else 32
        for bit in range(num_bits):
            other = v1.Greeting()
            other.CopyFrom(message)
            if isinstance(raw, bytes):
                flipped = bytearray(raw)
                flipped[bit // 8] ^= 1 << bit % 8
                try:
                    setattr(other, field.name, flipped.decode() if isinstance(value, str) else bytes(flipped))
                except UnicodeDecodeError:
                    continue  # protobuf has no such text: it is not read at all
            else:
                setattr(other, field.name, value ^ 1 << bit)
            yield field.name, other


def test_each_bit_of_a_greeting_counts() -> None:
    made = challenge()
    greeting = BARE.greeting(made, **FULL)
    assert knows(greeting, made.nonce)
    tried = set()
    for name, other in changed_by_a_bit(greeting):
        assert not knows(other, made.nonce), name
        tried.add(name)
    assert tried == {field.name for field in v1.Greeting.DESCRIPTOR.fields}


def test_fields_do_not_run_into_one_another() -> None:
    """The same bytes, divided otherwise among sender, line and job, are another greeting."""
    made = challenge()
    greeting = BARE.greeting(made, sender="ab", line="c")
    greeting.sender, greeting.line = "a", "bc"
    assert not knows(greeting, made.nonce)
    moved = replace(SHARD, job="jobs", name="hard-0")
    assert not knows(BARE.greeting(made), made.nonce, moved)


@pytest.mark.parametrize(
    "called",
    [
        replace(SHARD, secret=SECRET + b"x"),
        replace(SHARD, job="another"),
        replace(SHARD, name="shard-1"),
        replace(SHARD, name="worker-0"),  # a greeting that is thrown back at its sender
    ],
)
def test_a_proof_is_for_one_secret_job_and_node(called: Identity) -> None:
    made = challenge()
    assert not knows(BARE.greeting(made), made.nonce, called)


def test_neither_proof_is_good_as_the_other() -> None:
    made = challenge()
    greeting = BARE.greeting(made)
    mine, theirs = greeting.proof, proof.called_proof(SECRET, greeting, job="job", called="shard-0")
    key = proof.session_key(SECRET, greeting, job="job", called="shard-0")
    assert len({mine, theirs, key}) == 3
    assert not BARE.knows(greeting, v1.Proven(proof=mine))
    greeting.proof = theirs
    assert not knows(greeting, made.nonce)


@pytest.mark.parametrize("nonce", [b"", b"short", bytes(proof.NONCE_BYTES - 1), bytes(proof.NONCE_BYTES + 1)])
def test_a_nonce_of_the_caller_is_whole(nonce: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    made = challenge()
    monkeypatch.setattr(proof, "new_nonce", lambda: nonce)
    assert not knows(BARE.greeting(made), made.nonce)


def test_nonces_and_secrets_are_new_each_time() -> None:
    assert len({proof.new_nonce() for _ in range(100)} | {proof.new_secret() for _ in range(100)}) == 200


@pytest.mark.parametrize("secret", [b"", b"fifteen bytes.."])
def test_a_short_secret_is_no_secret(secret: bytes) -> None:
    with pytest.raises(
        ConfigError, match=f"shard-0 has a secret of {len(secret)} bytes: expected at least 16"
    ):
        proof.check_secret(secret, "shard-0")


# ---- sessions ---------------------------------------------------------------------------


def begin(
    sessions: Sessions, bare: Bare = BARE, now_ns: int = 0
) -> tuple[v1.Greeting, tuple[PeerSession, v1.Proven] | v1.Refuse]:
    greeting = bare.greeting(sessions.challenge(now_ns))
    return greeting, sessions.greeted(greeting.SerializeToString(), now_ns)


def opened(sessions: Sessions, bare: Bare = BARE, now_ns: int = 0) -> tuple[PeerSession, CallerSession]:
    """A session, as both sides know it."""
    greeting, answer = begin(sessions, bare, now_ns)
    assert isinstance(answer, tuple), answer
    return answer[0], proved(bare.identity, bare.called, greeting, answer[1])


def refused(sessions: Sessions, raw: bytes, now_ns: int = 0) -> v1.Code:
    answer = sessions.greeted(raw, now_ns)
    assert isinstance(answer, v1.Refuse), answer
    assert "worker" not in answer.message and "job" not in answer.message
    return answer.code


def test_a_session_is_the_callers() -> None:
    sessions = Sessions(SHARD)
    session, caller = opened(sessions)
    assert (session.sender, session.incarnation) == ("worker-0", 7)
    assert sessions.passes(caller.pass_of(1)) == (session, 1)


def test_each_bit_of_a_greeting_of_a_session_counts() -> None:
    sessions = Sessions(SHARD)
    greeting = BARE.greeting(sessions.challenge(0), **FULL)
    for name, other in changed_by_a_bit(greeting):
        expected = v1.BAD_PROTOCOL if name == "protocol" else v1.BAD_SECRET
        assert refused(sessions, other.SerializeToString()) == expected, name
    assert isinstance(sessions.greeted(greeting.SerializeToString(), 0), tuple)  # none of them has used it up


@pytest.mark.parametrize("raw", [b"", b"\xff" * 40, bytes(LIMITS.greeting_bytes + 1)])
def test_what_is_no_greeting(raw: bytes) -> None:
    assert refused(Sessions(SHARD), raw) in (v1.BAD_SECRET, v1.BAD_PROTOCOL)


def test_a_caller_has_a_name() -> None:
    sessions = Sessions(SHARD)
    nobody = BARE.greeting(sessions.challenge(0), sender="")
    assert refused(sessions, nobody.SerializeToString()) == v1.BAD_SECRET


def test_a_greeting_is_good_once() -> None:
    sessions = Sessions(SHARD)
    greeting, answer = begin(sessions)
    assert isinstance(answer, tuple)
    assert refused(sessions, greeting.SerializeToString()) == v1.TOO_OLD
    again = BARE.greeting(v1.Challenge(nonce=greeting.challenge))  # another greeting for the same challenge
    assert refused(sessions, again.SerializeToString()) == v1.TOO_OLD
    late_ns = 2 * EXPIRES_NS  # not even when nobody remembers that it was answered
    begin(sessions, now_ns=late_ns)
    assert refused(sessions, greeting.SerializeToString(), late_ns) == v1.TOO_OLD


@pytest.mark.parametrize(("age_ns", "is_good"), [(0, True), (EXPIRES_NS - 1, True), (EXPIRES_NS, False)])
def test_a_challenge_expires(age_ns: int, is_good: bool) -> None:
    sessions = Sessions(SHARD)
    raw = BARE.greeting(sessions.challenge(5 * SECOND_NS)).SerializeToString()
    assert isinstance(sessions.greeted(raw, 5 * SECOND_NS + age_ns), tuple) == is_good


def test_a_challenge_is_of_the_node_that_looks_at_it() -> None:
    sessions, elsewhere = Sessions(SHARD), Sessions(SHARD)  # as after a restart, under the same name
    foreign = BARE.greeting(elsewhere.challenge(0))
    made_up = BARE.greeting(challenge())
    ahead = BARE.greeting(sessions.challenge(SECOND_NS))  # of a time that has not come
    empty = BARE.greeting(v1.Challenge())
    for greeting in (foreign, made_up, ahead, empty):
        assert refused(sessions, greeting.SerializeToString()) == v1.TOO_OLD


def test_what_was_answered_is_not_remembered_for_ever() -> None:
    sessions = Sessions(SHARD)
    for index in range(100):
        session, _ = opened(sessions, now_ns=index * SECOND_NS)
        sessions.over(session)
    assert len(sessions._answered) <= LIMITS.handshake_s + 1
    assert not sessions._sessions and not sessions._of


def test_passes_are_good_once_each_in_any_order() -> None:
    sessions = Sessions(SHARD)
    session, caller = opened(sessions)
    passes = [caller.pass_of(1 + number) for number in range(20)]
    for raw in [*passes[10:], *reversed(passes[:10])]:
        assert sessions.passes(raw) == (session, 1 + passes.index(raw))
    for raw in passes:
        assert sessions.passes(raw) is None


def forged(**fields: object) -> Callable[[v1.Pass], None]:
    def forge(shown: v1.Pass) -> None:
        for name, value in fields.items():
            setattr(shown, name, value)

    return forge


@pytest.mark.parametrize(
    "forge",
    [
        forged(number=2),
        forged(number=0),
        forged(number=2**64 - 1),
        forged(session=1),
        forged(proof=b""),
        forged(proof=bytes(32)),
        forged(proof=bytes(4096)),
    ],
)
def test_forged_passes(forge: Callable[[v1.Pass], None]) -> None:
    sessions = Sessions(SHARD)
    session, caller = opened(sessions)
    other, _ = opened(sessions)
    raw = caller.pass_of(1)
    shown = v1.Pass.FromString(raw)
    forge(shown)
    assert sessions.passes(shown.SerializeToString()) is None
    stolen = v1.Pass(session=other.number, number=shown.number, proof=v1.Pass.FromString(raw).proof)
    assert sessions.passes(stolen.SerializeToString()) is None
    for garbage in (b"", b"\xff\xff", bytes(1 << 16)):
        assert sessions.passes(garbage) is None
    assert sessions.passes(raw) == (session, 1)  # the true one is still good


def test_passes_end_with_their_session_and_are_nobody_elses() -> None:
    sessions, elsewhere = Sessions(SHARD), Sessions(SHARD)
    session, caller = opened(sessions)
    opened(elsewhere)
    assert elsewhere.passes(caller.pass_of(1)) is None
    sessions.over(session)
    sessions.over(session)
    assert sessions.passes(caller.pass_of(2)) is None


def test_a_member_that_counts_in_leaps_costs_no_memory() -> None:
    """A number of 64 bits must not be the length of a bitmap."""
    sessions = Sessions(SHARD)
    session, caller = opened(sessions)
    for number in (1, 2**40, 2**64 - 1):
        assert sessions.passes(caller.pass_of(number)) == (session, number)
    window = session.used
    assert window._above.bit_length() <= SequenceWindow.WIDTH
    assert 2**64 - 1 in window and 2**64 - 2 not in window and 2**64 - 1 - SequenceWindow.WIDTH in window


def test_sessions_of_one_caller_are_bounded() -> None:
    sessions = Sessions(SHARD)
    first, _ = opened(sessions)
    for _ in range(LIMITS.sessions - 1):
        opened(sessions)
    _, answer = begin(sessions)
    assert isinstance(answer, v1.Refuse)
    assert answer.code == v1.OVER_LIMIT
    opened(sessions, Bare(replace(WORKER, name="worker-1"), "shard-0"))  # somebody else's are not counted
    sessions.over(first)
    opened(sessions)


def test_a_called_side_that_does_not_know_the_secret_is_found_out() -> None:
    greeting, answer = begin(Sessions(SHARD))
    assert isinstance(answer, tuple)
    proved(WORKER, "shard-0", greeting, answer[1])
    for shown in (b"", greeting.proof, bytes(32), answer[1].proof[:-1]):
        with pytest.raises(RefusedError, match="BAD_SECRET"):
            proved(WORKER, "shard-0", greeting, v1.Proven(proof=shown, session=1))


def test_a_caller_believes_no_other_greetings_proof() -> None:
    sessions = Sessions(SHARD)
    _, answer = begin(sessions)
    assert isinstance(answer, tuple)
    second = BARE.greeting(sessions.challenge(0))
    with pytest.raises(RefusedError, match="BAD_SECRET"):
        proved(WORKER, "shard-0", second, answer[1])
