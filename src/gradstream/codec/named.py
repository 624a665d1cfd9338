"""Codecs by name, as in `codec="top-k"`: lossy ones are wrapped in error feedback."""

from __future__ import annotations

from gradstream.codec.base import Codec
from gradstream.codec.blocks import Blocks
from gradstream.codec.casts import DTYPES, Cast
from gradstream.codec.chunked import ChunkTopK
from gradstream.codec.dct import DCT
from gradstream.codec.feedback import ErrorFeedback
from gradstream.codec.qsgd import QSGD
from gradstream.codec.sign import Sign
from gradstream.codec.sparse import RandomK, TopK

PARAMETER_CODECS = ("float16", "bfloat16", "int8", "int4")


def of_parameters(name: str) -> Codec:
    """The codec of `PARAMETER_CODECS` by which shards send parameters: it has a small error, and keeps nothing."""
    return Cast(name) if name in DTYPES else Blocks(name)  # type: ignore[arg-type]  # checked by the caller


def _with(codec: Codec, feedback: bool) -> Codec:
    return ErrorFeedback(codec) if feedback else codec


def bfloat16(feedback: bool = False) -> Codec:
    """`Cast("bfloat16")`: 2 bytes a number."""
    return _with(Cast("bfloat16"), feedback)


def float16(feedback: bool = False) -> Codec:
    """`Cast("float16")`: 2 bytes a number."""
    return _with(Cast("float16"), feedback)


def int8(block: int = 256, feedback: bool = True) -> Codec:
    """`Blocks("int8")`: about 1 byte a number."""
    return _with(Blocks("int8", block), feedback)


def int4(block: int = 256, feedback: bool = True) -> Codec:
    """`Blocks("int4")`: about half a byte a number."""
    return _with(Blocks("int4", block), feedback)


def float4(block: int = 256, feedback: bool = True) -> Codec:
    """`Blocks("float4")`: about half a byte a number."""
    return _with(Blocks("float4", block), feedback)


def top_k(density: float = 0.01, feedback: bool = True) -> Codec:
    """`TopK`: 8 bytes for each of the largest numbers."""
    return _with(TopK(density), feedback)


def random_k(density: float = 0.01, feedback: bool = True) -> Codec:
    """`RandomK`: 4 bytes for each of a few numbers."""
    return _with(RandomK(density, scaled=not feedback), feedback)


def chunk_top_k(k: int = 64, chunk: int = 4096, feedback: bool = True, decay: float = 0.95) -> Codec:
    """`ChunkTopK`: about 1.3 bytes for each of the largest numbers of a chunk; SparseLoCo's, with its feedback."""
    return ErrorFeedback(ChunkTopK(k, chunk), decay) if feedback else ChunkTopK(k, chunk)


def dct(k: int = 4, chunk: int = 64, feedback: bool = True) -> Codec:
    """`DCT`: 5 bytes for each of the largest coefficients of a chunk."""
    return _with(DCT(k, chunk), feedback)


def qsgd(bits: int = 4, bucket: int = 512) -> Codec:
    """`QSGD`, which is unbiased, and so has no feedback."""
    return QSGD(bits, bucket)


def sign(block: int | None = None, feedback: bool = True) -> Codec:
    """`Sign`: 1 bit a number."""
    return _with(Sign(block), feedback)


def one_bit(block: int = 512, feedback: bool = True) -> Codec:
    """`Sign` with two means: 1 bit a number, and 8 bytes a block."""
    return _with(Sign(block, two_means=True), feedback)
