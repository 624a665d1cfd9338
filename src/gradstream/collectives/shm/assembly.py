"""The innermost loops of an allreduce inside a host, in LLVM's own language.

`come` is the barrier, `look` what it waits with; `sum.f32` adds up vectors; `small.f32` is all of an
allreduce of a small vector; `.f64` does the same for double precision. A sum is p₀·w₀ first, and then one
fused multiply-add for each further rank, as torch's kernels do it, so that the bits are the same.
"""

from __future__ import annotations

from collections.abc import Mapping

from gradstream.collectives.shm.control_block import (
    ARRIVED,
    ASLEEP,
    CALL_BYTES,
    CALLS_AT,
    CORE,
    SLOT_BYTES,
    SLOTS_AT,
    OperationCode,
)

__all__ = [
    "BOARDS",
    "COUNT",
    "DONE",
    "LOOKS",
    "LOOKS_NS",
    "NOT_DONE",
    "PATIENT",
    "RANK",
    "RANKS",
    "RING",
    "SHARE",
    "SPREAD",
    "TURN",
    "YIELDS",
    "assembly",
]

DONE = 0
NOT_DONE = 1
"""Somebody has not come in time, or asks for something else: see to it."""
RING = 2
"""Done; this rank came last, and others sleep: ring for them."""
SPREAD = 3
"""Done; but more ranks are on this core than have to be: go to another."""

COUNT, TURN, PATIENT, RANK, RANKS, LOOKS, LOOKS_NS, YIELDS, SHARE = range(9)
"""Words of a rank's state: how often it came, whose turn the next call is, whether it is worth while to
look longer for others; and what does not change."""
BOARDS = 9
"""From this word on: addresses of all boards, then as many of parts, then as many weights."""

AHEAD_BYTES = 1024
"""How far ahead of a sum its parts are asked for: the processor itself stops at the end of a page."""

_COMMON = f"""
declare i32 @sched_yield()
declare void @llvm.prefetch.p0(ptr, i32, i32, i32)
declare i32 @sched_getcpu()
declare i32 @clock_gettime(i32, ptr)
declare void @llvm.x86.sse.sfence()
declare void @llvm.memcpy.p0.p0.i64(ptr, ptr, i64, i1)

define i64 @come(ptr %state) {{  ; arrives, and looks for a moment whether the others have
  %old = load i64, ptr %state
  %count = add i64 %old, 1
  store i64 %count, ptr %state
  %rank.at = getelementptr i64, ptr %state, i64 {RANK}
  %rank = load i64, ptr %rank.at
  %boards = getelementptr i64, ptr %state, i64 {BOARDS}
  %mine.at = getelementptr ptr, ptr %boards, i64 %rank
  %mine = load ptr, ptr %mine.at
  %arrived = getelementptr i64, ptr %mine, i64 {ARRIVED}
  %core.number = call i32 @sched_getcpu()
  %core.word = zext i32 %core.number to i64
  %core = getelementptr i64, ptr %mine, i64 {CORE}
  store i64 %core.word, ptr %core
  store atomic i64 %count, ptr %arrived release, align 8
  fence seq_cst
  %looks.at = getelementptr i64, ptr %state, i64 {LOOKS}
  %looks = load i64, ptr %looks.at
  %ns.at = getelementptr i64, ptr %state, i64 {LOOKS_NS}
  %ns = load i64, ptr %ns.at
  %yields.at = getelementptr i64, ptr %state, i64 {YIELDS}
  %yields = load i64, ptr %yields.at
  %status = call i64 @look(ptr %state, i64 %looks, i64 %ns, i64 %yields)
  ret i64 %status
}}

; At most so often, and for so long. The clock paces it, or the system where looks yield the core. No PAUSE: a
; hypervisor takes some in a row for a lock that nobody opens, and takes the core away for microseconds.
; Whoever is waited for and came last on this very core needs it, too, though others may be idle.
define i64 @look(ptr %state, i64 %looks, i64 %ns, i64 %yields) {{
entry:
  %count = load i64, ptr %state
  %ranks.at = getelementptr i64, ptr %state, i64 {RANKS}
  %ranks = load i64, ptr %ranks.at
  %boards = getelementptr i64, ptr %state, i64 {BOARDS}
  %rank.at = getelementptr i64, ptr %state, i64 {RANK}
  %rank = load i64, ptr %rank.at
  %mine.at = getelementptr ptr, ptr %boards, i64 %rank
  %mine = load ptr, ptr %mine.at
  %core.at = getelementptr i64, ptr %mine, i64 {CORE}
  %core = load i64, ptr %core.at
  br label %other

other:  ; has everybody come?
  %o = phi i64 [ 0, %entry ], [ %o.next, %come ]
  %left = phi i64 [ %looks, %entry ], [ %left.now, %come ]
  %until = phi i64 [ 0, %entry ], [ %until.now, %come ]
  %o.at = getelementptr ptr, ptr %boards, i64 %o
  %o.board = load ptr, ptr %o.at
  %o.arrived = getelementptr i64, ptr %o.board, i64 {ARRIVED}
  %o.core.at = getelementptr i64, ptr %o.board, i64 {CORE}
  br label %again
again:
  %left.now = phi i64 [ %left, %other ], [ %left.less, %wait ], [ %left.less, %yield ]
  %until.now = phi i64 [ %until, %other ], [ %until.set, %wait ], [ %until.set, %yield ]
  %o.count = load atomic i64, ptr %o.arrived acquire, align 8
  %o.is = icmp uge i64 %o.count, %count
  br i1 %o.is, label %come, label %not.yet
not.yet:  ; the clock begins with the first look that is in vain
  %now = call i64 @now()
  %first = icmp eq i64 %until.now, 0
  %end = add i64 %now, %ns
  %until.set = select i1 %first, i64 %end, i64 %until.now
  %late = icmp ugt i64 %now, %until.set
  %left.less = sub i64 %left.now, 1
  %tired = icmp eq i64 %left.now, 0
  %over = or i1 %late, %tired
  br i1 %over, label %missing, label %wait
wait:
  %o.core = load atomic i64, ptr %o.core.at monotonic, align 8
  %same = icmp eq i64 %o.core, %core
  %always = icmp ne i64 %yields, 0
  %gives = or i1 %same, %always
  br i1 %gives, label %yield, label %again
yield:
  %ignored = call i32 @sched_yield()
  br label %again
come:
  %o.next = add i64 %o, 1
  %o.more = icmp ult i64 %o.next, %ranks
  br i1 %o.more, label %other, label %sleeper

sleeper:  ; does anybody sleep? how many ranks below this one are on its core?
  %s = phi i64 [ 0, %come ], [ %s.next, %sleeper ]
  %some = phi i64 [ 0, %come ], [ %some.now, %sleeper ]
  %below = phi i64 [ 0, %come ], [ %below.now, %sleeper ]
  %s.at = getelementptr ptr, ptr %boards, i64 %s
  %s.board = load ptr, ptr %s.at
  %s.asleep = getelementptr i64, ptr %s.board, i64 {ASLEEP}
  %s.word = load atomic i64, ptr %s.asleep monotonic, align 8
  %some.now = or i64 %some, %s.word
  %s.core.at = getelementptr i64, ptr %s.board, i64 {CORE}
  %s.core = load atomic i64, ptr %s.core.at monotonic, align 8
  %s.same = icmp eq i64 %s.core, %core
  %s.lower = icmp ult i64 %s, %rank
  %s.below = and i1 %s.same, %s.lower
  %s.one = zext i1 %s.below to i64
  %below.now = add i64 %below, %s.one
  %s.next = add i64 %s, 1
  %s.more = icmp ult i64 %s.next, %ranks
  br i1 %s.more, label %sleeper, label %passed
passed:  ; who comes last, and so has waited for nobody, rings
  %patient.at = getelementptr i64, ptr %state, i64 {PATIENT}
  %patient.old = load i64, ptr %patient.at
  %patient = or i64 %patient.old, %some.now
  store i64 %patient, ptr %patient.at
  %last = icmp eq i64 %until.now, 0
  %some.sleep = icmp ne i64 %some.now, 0
  %rings = and i1 %last, %some.sleep
  %share.at = getelementptr i64, ptr %state, i64 {SHARE}
  %share = load i64, ptr %share.at
  %crowded = icmp uge i64 %below.now, %share
  %passed.status = select i1 %crowded, i64 {SPREAD}, i64 {DONE}
  %status = select i1 %rings, i64 {RING}, i64 %passed.status
  ret i64 %status
missing:
  ret i64 {NOT_DONE}
}}

define internal i64 @now() {{  ; ns of the monotonic clock
  %time = alloca [2 x i64]
  %ignored = call i32 @clock_gettime(i32 1, ptr %time)
  %s = load i64, ptr %time
  %ns.at = getelementptr i64, ptr %time, i64 1
  %ns = load i64, ptr %ns.at
  %s.ns = mul i64 %s, 1000000000
  %sum = add i64 %s.ns, %ns
  ret i64 %sum
}}
"""

_SUM_HEAD = """
define void @sum.{name}(ptr %out, ptr %parts, ptr %weights, i64 %ranks, i64 %elems, i64 %past.cache) {{
entry:
  %first = load ptr, ptr %parts
  %first.weight = load double, ptr %weights
  {weight0}
  %streams = icmp ne i64 %past.cache, 0
  br label %w{widest}.head
"""

# One loop for each width in elements: a cache line, then single elements. Wider ones are slower: they load
# their lines from the last to the first, and the processor does not fetch ahead of that.
_SUM_LOOP = """
w{n}.head:
  %w{n}.i = phi i64 [ {begin}, %{before} ], [ %w{n}.next, %w{n}.kept ], [ %w{n}.next, %w{n}.past ]
  %w{n}.next = add i64 %w{n}.i, {n}
  %w{n}.fits = icmp ule i64 %w{n}.next, %elems
  br i1 %w{n}.fits, label %w{n}.first, label %{after}
w{n}.first:
  %w{n}.p0 = getelementptr {type}, ptr %first, i64 %w{n}.i
{ahead0}  %w{n}.x0 = load <{n} x {type}>, ptr %w{n}.p0, align {align}
  %w{n}.s0 = insertelement <{n} x {type}> poison, {type} %w0, i64 0
  %w{n}.v0 = shufflevector <{n} x {type}> %w{n}.s0, <{n} x {type}> poison, <{n} x i32> zeroinitializer
  %w{n}.a0 = fmul <{n} x {type}> %w{n}.x0, %w{n}.v0
  br label %w{n}.rank
w{n}.rank:
  %w{n}.r = phi i64 [ 1, %w{n}.first ], [ %w{n}.r1, %w{n}.add ]
  %w{n}.a = phi <{n} x {type}> [ %w{n}.a0, %w{n}.first ], [ %w{n}.a1, %w{n}.add ]
  %w{n}.more = icmp ult i64 %w{n}.r, %ranks
  br i1 %w{n}.more, label %w{n}.add, label %w{n}.store
w{n}.add:
  %w{n}.q.at = getelementptr ptr, ptr %parts, i64 %w{n}.r
  %w{n}.q = load ptr, ptr %w{n}.q.at
  %w{n}.p = getelementptr {type}, ptr %w{n}.q, i64 %w{n}.i
{ahead}  %w{n}.x = load <{n} x {type}>, ptr %w{n}.p, align {align}
  %w{n}.d.at = getelementptr double, ptr %weights, i64 %w{n}.r
  %w{n}.d = load double, ptr %w{n}.d.at
  {weight}
  %w{n}.s = insertelement <{n} x {type}> poison, {type} %w{n}.w, i64 0
  %w{n}.v = shufflevector <{n} x {type}> %w{n}.s, <{n} x {type}> poison, <{n} x i32> zeroinitializer
  %w{n}.a1 = call <{n} x {type}> @llvm.fma.v{n}{name}(
    <{n} x {type}> %w{n}.x, <{n} x {type}> %w{n}.v, <{n} x {type}> %w{n}.a)
  %w{n}.r1 = add i64 %w{n}.r, 1
  br label %w{n}.rank
w{n}.store:
  %w{n}.o = getelementptr {type}, ptr %out, i64 %w{n}.i
  br i1 {streams}, label %w{n}.past, label %w{n}.kept
w{n}.past:
  store <{n} x {type}> %w{n}.a, ptr %w{n}.o, align {past_align}, !nontemporal !0
  br label %w{n}.head
w{n}.kept:
  store <{n} x {type}> %w{n}.a, ptr %w{n}.o, align {align}
  br label %w{n}.head
"""

_SUM_TAIL = """
end:  ; what was stored past the cache is not ordered by itself
  br i1 %streams, label %drain, label %over
drain:
  call void @llvm.x86.sse.sfence()
  br label %over
over:
  ret void
}}

define i64 @small.{name}(ptr %state, ptr %data, i64 %elems, double %weight) {{
entry:
  %turn.at = getelementptr i64, ptr %state, i64 {TURN}
  %turn = load i64, ptr %turn.at
  %turned = xor i64 %turn, 1
  store i64 %turned, ptr %turn.at
  %rank.at = getelementptr i64, ptr %state, i64 {RANK}
  %rank = load i64, ptr %rank.at
  %ranks.at = getelementptr i64, ptr %state, i64 {RANKS}
  %ranks = load i64, ptr %ranks.at
  %boards = getelementptr i64, ptr %state, i64 {BOARDS}
  %parts = getelementptr ptr, ptr %boards, i64 %ranks
  %weights = getelementptr ptr, ptr %parts, i64 %ranks
  %mine.at = getelementptr ptr, ptr %boards, i64 %rank
  %mine = load ptr, ptr %mine.at
  %call.bytes = mul i64 %turn, {CALL_BYTES}
  %call.at = add i64 %call.bytes, {CALLS_AT}
  %slot.bytes = mul i64 %turn, {SLOT_BYTES}
  %slot.at = add i64 %slot.bytes, {SLOTS_AT}
  %call = getelementptr i8, ptr %mine, i64 %call.at
  %slot = getelementptr i8, ptr %mine, i64 %slot.at
  store <4 x i64> <i64 {operation}, i64 {dtype}, i64 0, i64 0>, ptr %call, align 8
  %call.where = getelementptr i64, ptr %call, i64 4
  store <4 x i64> <i64 -1, i64 -1, i64 0, i64 0>, ptr %call.where, align 8
  %call.elems = getelementptr i64, ptr %call, i64 2
  store i64 %elems, ptr %call.elems
  %call.weight = getelementptr i64, ptr %call, i64 7
  store double %weight, ptr %call.weight
  %bytes = mul i64 %elems, {align}
  call void @llvm.memcpy.p0.p0.i64(ptr %slot, ptr %data, i64 %bytes, i1 false)
  %come = call i64 @come(ptr %state)
  %not.done = icmp eq i64 %come, {NOT_DONE}
  br i1 %not.done, label %late, label %other
other:
  %o = phi i64 [ 0, %entry ], [ %o.next, %equal ]
  %o.at = getelementptr ptr, ptr %boards, i64 %o
  %o.board = load ptr, ptr %o.at
  %o.call = getelementptr i8, ptr %o.board, i64 %call.at
  %o.matter = load <4 x i64>, ptr %o.call, align 8
  %matter = load <4 x i64>, ptr %call, align 8
  %differ = icmp ne <4 x i64> %o.matter, %matter
  %differ.bits = bitcast <4 x i1> %differ to i4
  %differs = icmp ne i4 %differ.bits, 0
  br i1 %differs, label %unequal, label %equal
equal:
  %o.part = getelementptr i8, ptr %o.board, i64 %slot.at
  %o.part.at = getelementptr ptr, ptr %parts, i64 %o
  store ptr %o.part, ptr %o.part.at
  %o.weight.at = getelementptr i64, ptr %o.call, i64 7
  %o.weight = load double, ptr %o.weight.at
  %o.weight.to = getelementptr double, ptr %weights, i64 %o
  store double %o.weight, ptr %o.weight.to
  %o.next = add i64 %o, 1
  %o.more = icmp ult i64 %o.next, %ranks
  br i1 %o.more, label %other, label %add
add:
  call void @sum.{name}(ptr %data, ptr %parts, ptr %weights, i64 %ranks, i64 %elems, i64 0)
  ret i64 %come
late:
  ret i64 {NOT_DONE}
unequal:
  ret i64 {NOT_DONE}
}}
"""


_NUMBERS = {
    "TURN": TURN,
    "RANK": RANK,
    "RANKS": RANKS,
    "BOARDS": BOARDS,
    "CALL_BYTES": CALL_BYTES,
    "CALLS_AT": CALLS_AT,
    "SLOT_BYTES": SLOT_BYTES,
    "SLOTS_AT": SLOTS_AT,
    "DONE": DONE,
    "NOT_DONE": NOT_DONE,
    "RING": RING,
}


def assembly(types: Mapping[int, tuple[str, str]]) -> str:
    """The whole module.

    Args:
        types: by the number of a dtype on boards: LLVM's suffix and its name for it, ("f32", "float").
    """
    codes = [
        _code_for(name, type_, 4 if type_ == "float" else 8, dtype) for dtype, (name, type_) in types.items()
    ]
    return "\n".join(["!0 = !{i32 1}", _COMMON, *codes])


def _ahead(at: str) -> str:
    """Asks for what will be read soon; beyond a vector's end that is nothing."""
    return (
        f"  %{at}.ahead = getelementptr i8, ptr %{at}, i64 {AHEAD_BYTES}\n"
        f"  call void @llvm.prefetch.p0(ptr %{at}.ahead, i32 0, i32 3, i32 1)\n"
    )


def _code_for(name: str, type_: str, itemsize_bytes: int, dtype: int) -> str:
    """The weighted sum and the small allreduce of one type; `dtype` is its number on boards."""
    line = 64 // itemsize_bytes
    widths = (line, 1)
    narrow = "fptrunc double {} to float" if itemsize_bytes == 4 else "fadd double {}, -0.0"
    text = _SUM_HEAD.format(name=name, widest=widths[0], weight0=f"%w0 = {narrow.format('%first.weight')}")
    for at, n in enumerate(widths):
        text += _SUM_LOOP.format(
            n=n,
            type=type_,
            name=name,
            align=itemsize_bytes,
            past_align=64 if n == widths[0] else itemsize_bytes,
            ahead0=_ahead(f"w{n}.p0") if n == widths[0] else "",
            ahead=_ahead(f"w{n}.p") if n == widths[0] else "",
            streams="%streams" if n == widths[0] else "false",
            weight=f"%w{n}.w = {narrow.format(f'%w{n}.d')}",
            begin="0" if at == 0 else f"%w{widths[at - 1]}.i",
            before="entry" if at == 0 else f"w{widths[at - 1]}.head",
            after="end" if n == 1 else f"w{widths[at + 1]}.head",
        )
    text += _SUM_TAIL.format(
        name=name,
        align=itemsize_bytes,
        dtype=dtype,
        operation=int(OperationCode.ALLREDUCE),
        **_NUMBERS,
    )
    declared = "\n".join(
        f"declare <{n} x {type_}> @llvm.fma.v{n}{name}(<{n} x {type_}>, <{n} x {type_}>, <{n} x {type_}>)"
        for n in widths
    )
    return declared + text
