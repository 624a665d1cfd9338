"""Machine code for the innermost loops of an allreduce inside a host, if `llvmlite` is there to make it.

With it an allreduce of a small vector takes two microseconds, most of which Python would take otherwise, and the
sum of a large one is stored past the cache, so that memory is not read only to be overwritten. Everything works
without it, with the same bits: the twins are `HostBarrier`, `SharedOperations` and `plain_sum`.

The code is written in LLVM's language (`barrier.ll`, `sum.ll`). A library compiles it within a fraction of a
second; no compiler has to be on the machine.
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from string import Template
from typing import Any

import torch

from gradstream.collectives.shm import rendezvous as block

DONE, NOT_DONE, WAKE, SPREAD = range(4)
"""How `arrive`, `look` and `small` end.

DONE: all ranks have arrived, and a small sum is complete.
NOT_DONE: a rank has not arrived in time, or asks for another operation. The caller has to see to it.
WAKE: done. This rank arrived last while others sleep, and has to wake them.
SPREAD: done. More ranks than necessary are on this core, and this one should go to another.
"""

COUNT, TURN, PATIENT, RANK, RANKS, LOOKS, LOOKS_NS, YIELDS, SHARE, BLOCKS = range(10)
"""Words of `State`: barriers that this rank has arrived at, which of two places the next call takes, whether it
is worthwhile to look longer for others, and constants. From word BLOCKS on there are the addresses of all control
blocks, then room for as many addresses of parts, then for as many weights."""

AHEAD_BYTES = 1024
"""Distance at which a sum prefetches its parts."""

_TYPES = {torch.float32: ("f32", "float"), torch.float64: ("f64", "double")}

_NUMBERS = {
    name: value
    for names in (globals(), vars(block))
    for name, value in dict(names).items()
    if name.isupper() and isinstance(value, int)
} | {"ALLREDUCE": int(block.OperationCode.ALLREDUCE)}
"""What the templates may name."""


class State:
    """64-bit words about a rank that machine code and Python both use.

    Args:
        blocks: addresses of the control blocks of all ranks.
        looks: the most looks that `arrive` takes whether others have arrived, and the most nanoseconds that it looks.
        yields: whether each look yields the core.
        share: ranks per core if they are spread evenly, rounded up.
    """

    def __init__(
        self, rank: int, blocks: list[int], looks: tuple[int, int], yields: bool, share: int
    ) -> None:
        words = (ctypes.c_int64 * (BLOCKS + 3 * len(blocks)))()
        words[RANK], words[RANKS], words[YIELDS] = rank, len(blocks), yields
        words[LOOKS], words[LOOKS_NS] = looks
        words[SHARE] = share
        for other, address in enumerate(blocks):
            words[BLOCKS + other] = address
        self._words = words
        self.address = ctypes.addressof(words)
        self.words: memoryview[int] = memoryview(words).cast("B").cast("q")


@dataclass(frozen=True, slots=True)
class Native:
    """The compiled functions.

    Args:
        arrive: (state) → DONE, NOT_DONE, WAKE or SPREAD. Keeps the GIL, since it is short.
        look: (state, times, nanoseconds, whether it yields the core) → the same, for a rank that has arrived
            already. Releases the GIL.
        small: by dtype: (state, data, elems, weight) → the same as `arrive`. Keeps the GIL.
        sum: by dtype: (out, parts, weights, ranks, elems, whether past the cache). Releases the GIL.
        engine: keeps the code alive.
    """

    arrive: Callable[[int], int]
    look: Callable[[int, int, int, int], int]
    small: dict[torch.dtype, Callable[[int, int, int, float], int]]
    sum: dict[torch.dtype, Callable[[int, Any, Any, int, int, int], None]]
    engine: object


def _source() -> str:
    """The whole module in LLVM's language."""
    folder = Path(__file__).parent
    barrier, sum_ = (Template((folder / name).read_text("utf-8")) for name in ("barrier.ll", "sum.ll"))
    return barrier.substitute(_NUMBERS) + "".join(
        sum_.substitute(
            _NUMBERS,
            suffix=suffix,
            type=type_,
            bytes=dtype.itemsize,
            line=64 // dtype.itemsize,
            narrow="fptrunc" if dtype is torch.float32 else "bitcast",
            dtype=block.DTYPES.index(dtype),
        )
        for dtype, (suffix, type_) in _TYPES.items()
    )


@functools.cache
def native() -> Native | None:
    """Compiles the code, once. None without `llvmlite`, or on a processor where torch's kernels do not fuse."""
    try:
        import llvmlite.binding as llvm
    except (ImportError, OSError):  # not installed, or not for this system
        return None
    llvm.initialize_native_target()
    llvm.initialize_native_asmprinter()
    features = llvm.get_host_cpu_features()
    if not (features.get("fma") and features.get("avx2")):
        return None
    module = llvm.parse_assembly(_source())
    module.verify()
    machine = llvm.Target.from_default_triple().create_target_machine(
        cpu=llvm.get_host_cpu_name(), features=features.flatten(), opt=3
    )
    engine = llvm.create_mcjit_compiler(module, machine)
    engine.finalize_object()
    word, address, real = ctypes.c_int64, ctypes.c_void_p, ctypes.c_double
    arrive = ctypes.PYFUNCTYPE(word, address)
    look = ctypes.CFUNCTYPE(word, address, word, word, word)
    small = ctypes.PYFUNCTYPE(word, address, address, word, real)
    sum_ = ctypes.CFUNCTYPE(None, address, address, address, word, word, word)
    at = engine.get_function_address
    return Native(
        arrive=arrive(at("arrive")),
        look=look(at("look")),
        small={dtype: small(at(f"small.{suffix}")) for dtype, (suffix, _) in _TYPES.items()},
        sum={dtype: sum_(at(f"sum.{suffix}")) for dtype, (suffix, _) in _TYPES.items()},
        engine=engine,
    )
