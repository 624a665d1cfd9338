"""Codecs compress gradients, activations and parameters that are sent between processes.

Cast                        two bytes a number
Blocks, QSGD, Sign          a few bits a number, and a scale for a block of them
TopK, RandomK, DGC          a few of the numbers
ChunkTopK, DCT              a few of each chunk, or of its cosine transform
ErrorFeedback, EF21         around another codec: nothing that it leaves out is lost
"""

from gradstream.codec.base import Codec
from gradstream.codec.blocks import Blocks
from gradstream.codec.casts import Cast
from gradstream.codec.chunked import ChunkTopK
from gradstream.codec.dct import DCT
from gradstream.codec.feedback import EF21, ErrorFeedback
from gradstream.codec.low_rank import PowerSGD
from gradstream.codec.qsgd import QSGD
from gradstream.codec.sign import Sign
from gradstream.codec.sparse import DGC, RandomK, TopK

__all__ = [
    "DCT",
    "DGC",
    "EF21",
    "QSGD",
    "Blocks",
    "Cast",
    "ChunkTopK",
    "Codec",
    "ErrorFeedback",
    "PowerSGD",
    "RandomK",
    "Sign",
    "TopK",
]
