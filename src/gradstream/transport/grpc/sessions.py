"""Sessions of gRPC: callers that have proved to know the run's secret, and the passes of their streams.

gRPC does not tell on which connection a call has come. So a caller proves once for each connection that it
knows the secret (`proof`), and each of its streams carries a pass: a number that counts up, and its HMAC
under a key that only the two nodes have. A pass is valid once, so a recorded pass opens no stream.

A node keeps nothing for strangers: a challenge carries its own date, and a signature of the node that made
it. Nothing in this module waits or sends.
"""

from __future__ import annotations

import hmac
import secrets
import struct
from collections import Counter
from dataclasses import dataclass, field

from google.protobuf.message import DecodeError

from gradstream.transport import proof
from gradstream.transport.base import Identity
from gradstream.transport.limits import LIMITS
from gradstream.wire import v1
from gradstream.wire.frames import PROTOCOL, DamagedError, unseal
from gradstream.wire.window import SequenceWindow

NO_CHALLENGE = "the challenge is not of this node, is too old, or was answered before: ask for another one"
"""The answer to a greeting that knows the secret, but was recorded or came too late."""

PASS_BYTES = 64
_STAMP = struct.Struct("<Q16s")  # when a challenge was made, in ns, and random bytes
_NUMBER = struct.Struct("<Q")


@dataclass(slots=True)
class PeerSession:
    """The session of one caller, as the called side knows it."""

    number: int
    key: bytes
    sender: str
    incarnation: int
    checked: bool  # its messages have checksums
    used: SequenceWindow = field(default_factory=SequenceWindow)


class Sessions:
    """The sessions of peers that connect to this node: makes challenges, and checks the peers' answers and frames.

    Args:
        identity: identity of this node.
    """

    def __init__(self, identity: Identity) -> None:
        self._identity = identity
        self._challenge_key = secrets.token_bytes(32)
        self._answered: dict[bytes, int] = {}  # challenges and when they expire, in ns: each is valid once
        self._sessions: dict[int, PeerSession] = {}
        self._of = Counter[str]()

    def challenge(self, now_ns: int, *, checked: bool = False) -> v1.Challenge:
        """A new challenge for a stranger; `checked` says that its connection needs checksums."""
        stamp = _STAMP.pack(now_ns, secrets.token_bytes(16))
        return v1.Challenge(protocol=PROTOCOL, nonce=stamp + self._sign(stamp), checked=checked)

    def greeted(
        self, raw: bytes, now_ns: int, *, checked: bool = False
    ) -> tuple[PeerSession, v1.Proven] | v1.Refuse:
        """Checks a stranger's greeting: returns its session and our answer, or a refusal without details.

        Args:
            raw: the greeting.
            now_ns: the time.
            checked: the connection needs checksums.
        """
        refused = v1.Refuse(code=v1.BAD_SECRET, message=proof.BAD_SECRET)
        damaged = v1.Refuse(code=v1.TOO_OLD, message="the greeting was damaged on its way: try again")
        if checked and not raw:  # its name in the metadata was
            return damaged
        if len(raw) > LIMITS.greeting_bytes:
            return refused
        try:
            greeting = v1.Greeting.FromString(raw[unseal(raw, seed=0) :])
        except DamagedError:
            return damaged
        except DecodeError:
            return refused
        mine = self._identity
        if (refuse := proof.objection(mine, greeting.challenge, greeting, checked=checked)) is not None:
            return refuse
        if not greeting.sender:
            return refused
        if not self._is_fresh(greeting.challenge, now_ns):
            return v1.Refuse(code=v1.TOO_OLD, message=NO_CHALLENGE)
        self._answered[greeting.challenge] = now_ns + round(LIMITS.handshake_s * 1e9)
        if self._of[greeting.sender] >= LIMITS.sessions:
            text = f"{greeting.sender} has {LIMITS.sessions} connections to {mine.name} already: close some"
            return v1.Refuse(code=v1.OVER_LIMIT, message=text)
        key = proof.session_key(mine.secret, greeting, job=mine.job, called=mine.name)
        number = secrets.randbits(63) | 1
        session = PeerSession(number, key, greeting.sender, greeting.incarnation, greeting.checked)
        self._sessions[session.number] = session
        self._of[session.sender] += 1
        answer = proof.called_proof(mine.secret, greeting, job=mine.job, called=mine.name)
        return session, v1.Proven(proof=answer, session=session.number)

    def passes(self, raw: bytes) -> tuple[PeerSession, int] | None:
        """The session and number of a pass; None if the pass is invalid, or was used before."""
        if len(raw) > PASS_BYTES:
            return None
        try:
            shown = v1.Pass.FromString(raw)
        except DecodeError:
            return None
        session = self._sessions.get(shown.session)
        if session is None or not hmac.compare_digest(shown.proof, _sign(session.key, shown.number)):
            return None
        return (session, shown.number) if session.used.add(shown.number) else None

    def over(self, session: PeerSession) -> None:
        """Forgets a session whose connection is gone. Idempotent."""
        if self._sessions.pop(session.number, None) is not None:
            self._of[session.sender] -= 1
            self._of += Counter()  # removes zeros

    def _is_fresh(self, challenge: bytes, now_ns: int) -> bool:
        """Whether this node made the challenge, not long ago, and nobody has answered it before."""
        stamp, signature = challenge[: _STAMP.size], challenge[_STAMP.size :]
        if len(stamp) != _STAMP.size or not hmac.compare_digest(signature, self._sign(stamp)):
            return False
        self._answered = {known: expires for known, expires in self._answered.items() if expires > now_ns}
        age_ns = now_ns - _STAMP.unpack(stamp)[0]
        return challenge not in self._answered and 0 <= age_ns < LIMITS.handshake_s * 1e9

    def _sign(self, stamp: bytes) -> bytes:
        return hmac.digest(self._challenge_key, stamp, "sha256")


class CallerSession:
    """The caller's side: makes the passes of its streams.

    Args:
        session: number of the session, chosen by the called side.
        key: key that both sides have.
        checked: messages have checksums.
    """

    def __init__(self, session: int, key: bytes, *, checked: bool = False) -> None:
        self.checked = checked
        self._session = session
        self._key = key

    def pass_of(self, number: int) -> bytes:
        """The pass of the stream of this number, which no other stream of the session has."""
        signature = _sign(self._key, number)
        return v1.Pass(session=self._session, number=number, proof=signature).SerializeToString()


def proved(identity: Identity, called: str, greeting: v1.Greeting, proven: v1.Proven) -> CallerSession:
    """The session that answers a greeting. Raises RefusedError if the called side does not know the secret."""
    proof.check_called(identity, called, greeting, proven)
    key = proof.session_key(identity.secret, greeting, job=identity.job, called=called)
    return CallerSession(proven.session, key, checked=greeting.checked)


def _sign(key: bytes, number: int) -> bytes:
    return hmac.digest(key, _NUMBER.pack(number), "sha256")
