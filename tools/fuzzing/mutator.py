"""Makes odd inputs of valid ones, by seed: bytes are damaged, or the structure in them is."""

from __future__ import annotations

import json
import random
import re
from collections.abc import Callable, Sequence
from typing import Any

from google.protobuf.message import Message

MAX_INPUT_BYTES = 1 << 16
NUMBERS = [
    0,
    1,
    -1,
    2,
    7,
    8,
    127,
    128,
    255,
    256,
    65535,
    65536,
    1 << 20,
    (1 << 31) - 1,
    1 << 31,
    (1 << 32) - 1,
]
NUMBERS += [1 << 32, 1 << 53, (1 << 63) - 1, 1 << 63, (1 << 64) - 1, 1 << 64, -(1 << 31), -(1 << 63)]
FLOATS = [
    0.0,
    -0.0,
    1.5,
    -1.0,
    1e-320,
    1e38,
    1e100,
    1e300,
    1e308,
    -1e308,
    float("nan"),
    float("inf"),
    float("-inf"),
]
TEXTS = [
    "",
    "a",
    "worker-0",
    "worker-1",
    "shard-0",
    "worker-999999999",
    "worker--1",
    "worker-",
    "coordinator",
]
TEXTS += [
    "\x1b[2J",
    "\u202e",
    "\x00",
    "é" * 40,
    "9" * 5000,
    "../../etc",
    "[/red]",
    "%s%n",
    "\ud800",
    "٣",
    "²",
]
WORDS = [
    b"null",
    b"NaN",
    b"Infinity",
    b"-Infinity",
    b"true",
    b"{}",
    b"[]",
    b'""',
    b"1e999",
    b"-0",
    b"\\ud800",
    b"\x00",
]
WORDS += [
    b"\xff\xff\xff\xff",
    b"\x80" * 12,
    b"=",
    b".",
    b":",
    b"#",
    b"\n",
    b"[[",
    b"]]",
    b'"',
    b"'''",
    b"\\",
    b"\r\n",
]
KEYS = ["event", "node", "time_s", "class", "fields", "format", "", "a.b", "__class__", "steps", "rank"]
_DIGITS = re.compile(rb"[0-9]+")


class Mutator:
    """Makes inputs.

    Args:
        seeds: valid inputs.
        rng: decides all.
        structured: makes an input of a seed by its structure; None where there is none beside bytes.
        words: that the format has, to be put in.
    """

    def __init__(
        self,
        seeds: Sequence[bytes],
        rng: random.Random,
        structured: Callable[[bytes, random.Random], bytes] | None = None,
        words: Sequence[bytes] = (),
    ) -> None:
        self._seeds = seeds
        self._rng = rng
        self._structured = structured
        self._words = [*WORDS, *words]
        self._damages = [
            self._flip,
            self._overwrite,
            self._cut,
            self._insert,
            self._repeat,
            self._splice,
            self._number,
            self._nest,
        ]

    def input(self) -> bytes:
        """The next input: now and then a seed as it is, else one that was changed once or several times."""
        rng = self._rng
        data = rng.choice(self._seeds)
        chance = rng.random()
        if chance < 0.02:
            return data
        if self._structured is not None and chance < 0.6:
            data = self._structured(data, rng)
            if chance < 0.5:
                return data[:MAX_INPUT_BYTES]
        for _ in range(rng.choice((1, 1, 1, 2, 3, 6))):
            # Cut each time: six repetitions make it 20 ** 6 times as long, told as the decoder's memory.
            data = rng.choice(self._damages)(data)[:MAX_INPUT_BYTES]
        return data

    def _place(self, data: bytes) -> int:
        return int(self._rng.random() * (len(data) + 1))

    def _flip(self, data: bytes) -> bytes:
        if not data:
            return data
        out = bytearray(data)
        out[int(self._rng.random() * len(out))] ^= 1 << self._rng.randrange(8)
        return bytes(out)

    def _overwrite(self, data: bytes) -> bytes:
        at = self._place(data)
        if self._rng.random() < 0.5:
            new = bytes([self._rng.choice((0, 1, 0x7F, 0x80, 0xFF, 0x1B, 0x22, 0x2D, 0x30))])
        else:
            new = (self._rng.choice(NUMBERS) & ((1 << 64) - 1)).to_bytes(8, "little")[
                : self._rng.choice((1, 4, 8))
            ]
        return data[:at] + new + data[at + len(new) :]

    def _cut(self, data: bytes) -> bytes:
        first, last = sorted((self._place(data), self._place(data)))
        return data[:first] if self._rng.random() < 0.3 else data[:first] + data[last:]

    def _insert(self, data: bytes) -> bytes:
        at = self._place(data)
        return data[:at] + self._rng.choice(self._words) + data[at:]

    def _repeat(self, data: bytes) -> bytes:
        first, last = sorted((self._place(data), self._place(data)))
        return data[:last] + data[first:last] * self._rng.choice((1, 2, 20)) + data[last:]

    def _splice(self, data: bytes) -> bytes:
        other = self._rng.choice(self._seeds)
        return data[: self._place(data)] + other[self._place(other) :]

    def _number(self, data: bytes) -> bytes:
        found = list(_DIGITS.finditer(data[:4096]))
        if not found:
            return self._overwrite(data)
        one = self._rng.choice(found)
        new = self._rng.choice((str(self._rng.choice(NUMBERS)), "1e400", "9" * 400, "-1", "0.5", "1_0"))
        return data[: one.start()] + new.encode() + data[one.end() :]

    def _nest(self, data: bytes) -> bytes:
        opened, closed = self._rng.choice(((b"[", b"]"), (b'{"a":', b"}"), (b"{a=", b"}")))
        count, at = self._rng.choice((3, 12, 200, 5000)), self._place(data)
        return data[:at] + opened * count + b"1" + closed * count + data[at:]


def mutated_json(data: bytes, rng: random.Random) -> bytes:
    """A JSON document with one to three of its values, keys or levels changed; JSON still, more or less."""
    try:
        value = json.loads(data)
    except (ValueError, RecursionError):
        return data
    for _ in range(rng.choice((1, 1, 2, 3))):
        value = _changed(value, rng)
    try:
        return json.dumps(value, ensure_ascii=rng.random() < 0.8).encode(errors="surrogatepass")
    except (ValueError, RecursionError):
        return data


def _changed(value: Any, rng: random.Random) -> Any:
    """The value with something in it changed: the deeper, the likelier."""
    if isinstance(value, dict) and value and rng.random() < 0.9:
        key = rng.choice(list(value))
        out = dict(value)
        chance = rng.random()
        if chance < 0.1:
            del out[key]
        elif chance < 0.2:
            out[rng.choice(KEYS)] = out.pop(key)
        elif chance < 0.25:
            out[rng.choice(KEYS)] = _odd(rng)
        else:
            out[key] = _changed(value[key], rng)
        return out
    if isinstance(value, list) and value and rng.random() < 0.8:
        at = rng.randrange(len(value))
        chance = rng.random()
        if chance < 0.15:
            return value[:at] + value[at + 1 :]
        if chance < 0.25:
            return value + [value[at]] * rng.choice((1, 3, 100))
        return [*value[:at], _changed(value[at], rng), *value[at + 1 :]]
    return _odd(rng, like=value)


def _odd(rng: random.Random, like: Any = None) -> Any:
    chance = rng.random()
    if isinstance(like, int | float) and chance < 0.6:
        return rng.choice((rng.choice(NUMBERS), rng.choice(FLOATS), like + 1, -like))
    if isinstance(like, str) and chance < 0.6:
        return rng.choice((rng.choice(TEXTS), like + rng.choice(TEXTS), like[:-1], like[1:]))
    deep: Any = 1
    if chance > 0.95:
        for _ in range(rng.choice((8, 11, 50))):
            deep = [deep] if rng.random() < 0.5 else {"a": deep}
    return rng.choice(
        (None, True, False, rng.choice(NUMBERS), rng.choice(FLOATS), rng.choice(TEXTS), [], {}, deep)
    )


def mutated_message(message: Message, rng: random.Random) -> None:
    """Changes one to four fields of a protobuf message, in place, within what its types can hold."""
    for _ in range(rng.choice((1, 1, 2, 4))):
        target = message
        while True:
            field = rng.choice(target.DESCRIPTOR.fields)
            inner = _inner(target, field, rng)
            if inner is None or rng.random() < 0.2:
                break
            target = inner
        _set(target, field, rng)


def _inner(message: Message, field: Any, rng: random.Random) -> Message | None:
    if field.type != field.TYPE_MESSAGE or field.message_type.GetOptions().map_entry:
        return None
    value = getattr(message, field.name)
    if not field.is_repeated:
        return value  # type: ignore[no-any-return]
    return rng.choice(value) if len(value) else value.add()  # type: ignore[no-any-return]


def _set(message: Message, field: Any, rng: random.Random) -> None:
    if rng.random() < 0.1:
        message.ClearField(field.name)
        return
    if field.type == field.TYPE_MESSAGE:
        return
    values = [_scalar(field, rng) for _ in range(rng.choice((0, 1, 2, 9)) if field.is_repeated else 1)]
    try:
        if field.is_repeated:
            message.ClearField(field.name)
            getattr(message, field.name).extend(values)
        else:
            setattr(message, field.name, values[0])
    except (ValueError, TypeError):
        pass  # out of what the type holds: nothing on the wire could say it


def _scalar(field: Any, rng: random.Random) -> Any:
    if field.type in (field.TYPE_DOUBLE, field.TYPE_FLOAT):
        return rng.choice(FLOATS)
    if field.type == field.TYPE_BOOL:
        return rng.random() < 0.5
    if field.type == field.TYPE_STRING:
        return rng.choice([text for text in TEXTS if text != "\ud800"])
    if field.type == field.TYPE_BYTES:
        return rng.choice(WORDS)
    if field.type == field.TYPE_ENUM:
        return rng.choice((0, 1, 2, 3, 4, 5, 6, 11, 12, 99, -1))
    return rng.choice(NUMBERS) if rng.random() < 0.7 else rng.randrange(12)
