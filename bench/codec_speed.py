"""Question: how fast are codecs, and over which links do they pay?

One core. Each codec encodes and decodes a gradient of normal numbers in chunks of 1 MiB, as it is pushed; beside it
what torch has for the same, and the bounds: reading the numbers, and copying them. Speeds are in GB/s of float32.
`powersgd` is no codec of vectors, and not among them. A codec pays where the bytes that it saves would take longer than
it does: below that many Mbit/s of a worker's link.
The median of `--repeats` rounds, in each of which all take a turn.

    python bench/codec_speed.py                # writes bench/results/codec-speed.json
    python bench/codec_speed.py --elems 1000000 --out ""
"""

from __future__ import annotations

import statistics
import time
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

import gradstream as gs
from common import RESULTS, command_line, keep, origin
from gradstream.codec.base import Codec
from gradstream.job.registry import CODECS, find_codec

CHUNK_ELEMS = 1 << 18


class Coding:
    """A codec, and memory for a gradient in chunks."""

    def __init__(self, codec: Codec, gradient: torch.Tensor) -> None:
        self.codec = codec
        self._chunks = torch.split(gradient, CHUNK_ELEMS)
        self._state = [{name: torch.zeros_like(one) for name in codec.state_names} for one in self._chunks]
        self._into = [
            torch.empty(-(-codec.encoded_bytes(len(one)) // 8) * 8, dtype=torch.uint8)[
                : codec.encoded_bytes(len(one))
            ]
            for one in self._chunks
        ]
        self._decoded = torch.empty(CHUNK_ELEMS)
        self.size_bytes = sum(map(len, self._into))

    def encode(self) -> None:
        """Encodes all chunks."""
        for seed, (chunk, into, state) in enumerate(zip(self._chunks, self._into, self._state, strict=True)):
            self.codec.encode(chunk, into, state, seed=seed)

    def decode(self) -> None:
        """Decodes all chunks."""
        for into, chunk in zip(self._into, self._chunks, strict=True):
            self.codec.decode(into, self._decoded[: len(chunk)])


def peers(gradient: torch.Tensor) -> dict[str, Callable[[], object]]:
    """What torch has, over the same chunks."""
    chunks = torch.split(gradient, CHUNK_ELEMS)
    half, room = torch.empty(CHUNK_ELEMS, dtype=torch.bfloat16), torch.empty(CHUNK_ELEMS)

    def each(work: Callable[[torch.Tensor], object]) -> Callable[[], object]:
        return lambda: [work(chunk) for chunk in chunks]

    scale = float(gradient.abs().max()) / 127
    return {
        "read": each(lambda one: one.sum()),
        "copy": each(lambda one: room[: len(one)].copy_(one)),
        "torch: to bfloat16": each(lambda one: half[: len(one)].copy_(one)),
        "torch: quantize_per_tensor": each(lambda one: torch.quantize_per_tensor(one, scale, 0, torch.qint8)),
        "torch: topk of 1 %": each(lambda one: torch.topk(one.abs(), len(one) // 100, sorted=False)),
    }


def measure(elems: int, repeats: int) -> dict[str, Any]:
    """Speeds of all codecs and of torch."""
    torch.set_num_threads(1)
    gradient = torch.randn(elems, generator=torch.Generator().manual_seed(0))
    found = {name: find_codec(name) for name in CODECS}
    codecs = {name: one for name, one in found.items() if not isinstance(one, gs.codecs.PowerSGD)} | {
        "int8, no feedback": gs.codecs.Blocks(),
        "top-k, no feedback": gs.codecs.TopK(),
    }
    codings = {name: Coding(codec, gradient) for name, codec in codecs.items()}
    work: dict[str, Callable[[], object]] = peers(gradient)
    for name, one in codings.items():
        work |= {f"{name}: encode": one.encode, f"{name}: decode": one.decode}
    times: defaultdict[str, list[float]] = defaultdict(list)
    for _ in range(1 + repeats):
        for name, function in work.items():
            begun = time.perf_counter()
            function()
            times[name].append(time.perf_counter() - begun)
    median_s = {name: statistics.median(one[1:]) for name, one in times.items()}
    bytes_ = 4 * elems
    rows = []
    for name, one in codings.items():
        encode_s, decode_s = median_s[f"{name}: encode"], median_s[f"{name}: decode"]
        saved = bytes_ - one.size_bytes
        rows.append(
            {
                "codec": name,
                "share": one.size_bytes / bytes_,
                "encode_gb_s": bytes_ / encode_s / 1e9,
                "decode_gb_s": bytes_ / decode_s / 1e9,
                "pays_below_mbit_s": 8e-6 * saved / (encode_s + decode_s),
            }
        )
    torch_gb_s = {name: bytes_ / median_s[name] / 1e9 for name in peers(gradient)}
    return {"elems": elems, "repeats": repeats, "codecs": rows, "torch_gb_s": torch_gb_s}


def main() -> None:
    parser = command_line(__doc__)
    parser.add_argument("--elems", type=int, default=10_805_651)
    parser.add_argument("--repeats", type=int, default=9)
    parser.add_argument(
        "--out", default=str(RESULTS / "codec-speed.json"), help='where to write the record; "" for nowhere'
    )
    options = parser.parse_args()
    record = {
        "question": (__doc__ or "").splitlines()[0],
        **origin(),
        **measure(options.elems, options.repeats),
    }
    for name, speed in record["torch_gb_s"].items():
        print(f"{name:28s} {speed:6.2f} GB/s")
    for row in record["codecs"]:
        print(
            f"{row['codec']:20s} {100 * row['share']:6.2f} % of the bytes, encode {row['encode_gb_s']:5.2f}, "
            f"decode {row['decode_gb_s']:5.2f} GB/s, pays below {row['pays_below_mbit_s']:7.0f} Mbit/s"
        )
    if options.out:
        keep(Path(options.out), record)


if __name__ == "__main__":
    main()
