"""Machine code for the innermost loops of an allreduce inside a host, where `llvmlite` is there to make it.

What it gains over Python and torch: an allreduce of a small vector takes two microseconds, of which Python's
were most; and the sum of a large one is stored past the cache, so that memory is not read only to be
overwritten. Everything works without it, with the same bits: it does what `HostBarrier`, `SharedCore` and
`plain_sum` do.

It is written down in LLVM's language, since that is compiled within a fraction of a second, by a library and
not by a compiler that would have to be on the machine.
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from gradstream.collectives.shm.assembly import (
    BOARDS,
    LOOKS,
    LOOKS_NS,
    RANK,
    RANKS,
    SHARE,
    YIELDS,
    assembly,
)
from gradstream.collectives.shm.control_block import DTYPES

__all__ = ["Native", "State", "native"]

_TYPES = {torch.float32: ("f32", "float"), torch.float64: ("f64", "double")}


class State:
    """What machine code and Python know in common about a rank: how often it came, and where the boards are.

    Args:
        rank: this one.
        boards: addresses of all ranks' boards.
        looks: how often `come` looks at most whether others have come, and for how many ns.
        yields: whether each look yields the core.
        share: ranks that there have to be on one core.
    """

    def __init__(
        self, rank: int, boards: list[int], looks: tuple[int, int], yields: bool, share: int
    ) -> None:
        words = (ctypes.c_int64 * (BOARDS + 3 * len(boards)))()
        words[RANK], words[RANKS], words[YIELDS] = rank, len(boards), yields
        words[LOOKS], words[LOOKS_NS] = looks
        words[SHARE] = share
        for other, address in enumerate(boards):
            words[BOARDS + other] = address
        self._words = words
        self.address = ctypes.addressof(words)
        self.words: memoryview[int] = memoryview(words).cast("B").cast("q")


@dataclass(frozen=True, slots=True)
class Native:
    """The functions.

    Args:
        come: (state) → DONE, NOT_DONE, RING or SPREAD; keeps the GIL, since it is short.
        look: (state, how often, for how many ns, whether it yields the core) → the same, for who has come
            already; lets the GIL go.
        small: by dtype: (state, data, elems, weight) → the same as `come`.
        sum: by dtype: (out, parts, weights, ranks, elems, whether past the cache); lets the GIL go.
        engine: keeps the code.
    """

    come: Callable[[int], int]
    look: Callable[[int, int, int, int], int]
    small: dict[torch.dtype, Callable[[int, int, int, float], int]]
    sum: dict[torch.dtype, Callable[[int, Any, Any, int, int, int], None]]
    engine: object


@functools.cache
def native() -> Native | None:
    """Makes the code, once; None without `llvmlite`, or where torch's kernels do not fuse either."""
    try:
        import llvmlite.binding as llvm
    except (ImportError, OSError):  # not there, or not for this system
        return None
    llvm.initialize_native_target()
    llvm.initialize_native_asmprinter()
    features = llvm.get_host_cpu_features()
    if not (features.get("fma") and features.get("avx2")):
        return None
    module = llvm.parse_assembly(assembly({DTYPES.index(dtype): names for dtype, names in _TYPES.items()}))
    module.verify()
    machine = llvm.Target.from_default_triple().create_target_machine(
        cpu=llvm.get_host_cpu_name(), features=features.flatten(), opt=3
    )
    engine = llvm.create_mcjit_compiler(module, machine)
    engine.finalize_object()
    word, address, real = ctypes.c_int64, ctypes.c_void_p, ctypes.c_double
    come = ctypes.PYFUNCTYPE(word, address)
    look = ctypes.CFUNCTYPE(word, address, word, word, word)
    small = ctypes.PYFUNCTYPE(word, address, address, word, real)
    sum_ = ctypes.CFUNCTYPE(None, address, address, address, word, word, word)
    return Native(
        come=come(engine.get_function_address("come")),
        look=look(engine.get_function_address("look")),
        small={
            dtype: small(engine.get_function_address(f"small.{name}")) for dtype, (name, _) in _TYPES.items()
        },
        sum={dtype: sum_(engine.get_function_address(f"sum.{name}")) for dtype, (name, _) in _TYPES.items()},
        engine=engine,
    )
