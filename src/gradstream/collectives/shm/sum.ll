; Sums of one element type: the twin of `plain_sum` in weighted_sum.py, and of `_allreduce_small` in operations.py.
;
; A template of Python's string.Template, filled in once for each type by `native.py`:
;   $suffix, $type     LLVM's two names of the type, "f32" and "float"
;   $bytes, $line      bytes of an element, elements of a cache line
;   $narrow            the instruction that turns a double into the type
;   $dtype             number of the type in a call

declare <${line} x $type> @llvm.fma.v${line}$suffix(<${line} x $type>, <${line} x $type>, <${line} x $type>)
declare <1 x $type> @llvm.fma.v1$suffix(<1 x $type>, <1 x $type>, <1 x $type>)

; out[i] = Σ_r weights[r] · parts[r][i]: p₀·w₀ first, and then one fused multiply-add for each further rank, as torch's
; kernels do it, so that the bits are the same. If %past.cache is not 0, the sum is stored past the cache.
define void @sum.$suffix(ptr %out, ptr %parts, ptr %weights, i64 %ranks, i64 %elems, i64 %past.cache) {
entry:
  %first = load ptr, ptr %parts
  %first.weight = load double, ptr %weights
  %w0 = $narrow double %first.weight to $type
  %streams = icmp ne i64 %past.cache, 0
  br label %wide.head

; A cache line at a time. Wider vectors are slower: they load their lines from the last to the first, and the
; processor does not fetch ahead of that. It also stops fetching at the end of a page: hence the prefetches.
wide.head:
  %wide.i = phi i64 [ 0, %entry ], [ %wide.next, %wide.kept ], [ %wide.next, %wide.past ]
  %wide.next = add i64 %wide.i, ${line}
  %wide.fits = icmp ule i64 %wide.next, %elems
  br i1 %wide.fits, label %wide.first, label %single.head
wide.first:
  %wide.p0 = getelementptr $type, ptr %first, i64 %wide.i
  %wide.p0.ahead = getelementptr i8, ptr %wide.p0, i64 $AHEAD_BYTES
  call void @llvm.prefetch.p0(ptr %wide.p0.ahead, i32 0, i32 3, i32 1)
  %wide.x0 = load <${line} x $type>, ptr %wide.p0, align $bytes
  %wide.s0 = insertelement <${line} x $type> poison, $type %w0, i64 0
  %wide.v0 = shufflevector <${line} x $type> %wide.s0, <${line} x $type> poison, <${line} x i32> zeroinitializer
  %wide.a0 = fmul <${line} x $type> %wide.x0, %wide.v0
  br label %wide.rank
wide.rank:
  %wide.r = phi i64 [ 1, %wide.first ], [ %wide.r1, %wide.add ]
  %wide.a = phi <${line} x $type> [ %wide.a0, %wide.first ], [ %wide.a1, %wide.add ]
  %wide.more = icmp ult i64 %wide.r, %ranks
  br i1 %wide.more, label %wide.add, label %wide.store
wide.add:
  %wide.q.at = getelementptr ptr, ptr %parts, i64 %wide.r
  %wide.q = load ptr, ptr %wide.q.at
  %wide.p = getelementptr $type, ptr %wide.q, i64 %wide.i
  %wide.p.ahead = getelementptr i8, ptr %wide.p, i64 $AHEAD_BYTES
  call void @llvm.prefetch.p0(ptr %wide.p.ahead, i32 0, i32 3, i32 1)
  %wide.x = load <${line} x $type>, ptr %wide.p, align $bytes
  %wide.d.at = getelementptr double, ptr %weights, i64 %wide.r
  %wide.d = load double, ptr %wide.d.at
  %wide.w = $narrow double %wide.d to $type
  %wide.s = insertelement <${line} x $type> poison, $type %wide.w, i64 0
  %wide.v = shufflevector <${line} x $type> %wide.s, <${line} x $type> poison, <${line} x i32> zeroinitializer
  %wide.a1 = call <${line} x $type> @llvm.fma.v${line}$suffix(
    <${line} x $type> %wide.x, <${line} x $type> %wide.v, <${line} x $type> %wide.a)
  %wide.r1 = add i64 %wide.r, 1
  br label %wide.rank
wide.store:
  %wide.o = getelementptr $type, ptr %out, i64 %wide.i
  br i1 %streams, label %wide.past, label %wide.kept
wide.past:
  store <${line} x $type> %wide.a, ptr %wide.o, align 64, !nontemporal !0
  br label %wide.head
wide.kept:
  store <${line} x $type> %wide.a, ptr %wide.o, align $bytes
  br label %wide.head

; The elements that are left, one at a time.
single.head:
  %single.i = phi i64 [ %wide.i, %wide.head ], [ %single.next, %single.store ]
  %single.next = add i64 %single.i, 1
  %single.fits = icmp ule i64 %single.next, %elems
  br i1 %single.fits, label %single.first, label %end
single.first:
  %single.p0 = getelementptr $type, ptr %first, i64 %single.i
  %single.x0 = load <1 x $type>, ptr %single.p0, align $bytes
  %single.s0 = insertelement <1 x $type> poison, $type %w0, i64 0
  %single.v0 = shufflevector <1 x $type> %single.s0, <1 x $type> poison, <1 x i32> zeroinitializer
  %single.a0 = fmul <1 x $type> %single.x0, %single.v0
  br label %single.rank
single.rank:
  %single.r = phi i64 [ 1, %single.first ], [ %single.r1, %single.add ]
  %single.a = phi <1 x $type> [ %single.a0, %single.first ], [ %single.a1, %single.add ]
  %single.more = icmp ult i64 %single.r, %ranks
  br i1 %single.more, label %single.add, label %single.store
single.add:
  %single.q.at = getelementptr ptr, ptr %parts, i64 %single.r
  %single.q = load ptr, ptr %single.q.at
  %single.p = getelementptr $type, ptr %single.q, i64 %single.i
  %single.x = load <1 x $type>, ptr %single.p, align $bytes
  %single.d.at = getelementptr double, ptr %weights, i64 %single.r
  %single.d = load double, ptr %single.d.at
  %single.w = $narrow double %single.d to $type
  %single.s = insertelement <1 x $type> poison, $type %single.w, i64 0
  %single.v = shufflevector <1 x $type> %single.s, <1 x $type> poison, <1 x i32> zeroinitializer
  %single.a1 = call <1 x $type> @llvm.fma.v1$suffix(
    <1 x $type> %single.x, <1 x $type> %single.v, <1 x $type> %single.a)
  %single.r1 = add i64 %single.r, 1
  br label %single.rank
single.store:
  %single.o = getelementptr $type, ptr %out, i64 %single.i
  store <1 x $type> %single.a, ptr %single.o, align $bytes
  br label %single.head

end:  ; stores past the cache are not ordered by themselves
  br i1 %streams, label %drain, label %over
drain:
  call void @llvm.x86.sse.sfence()
  br label %over
over:
  ret void
}

; An allreduce of a small vector: posts the call, copies the vector into the slot, arrives at the barrier, and adds up
; the slots of all ranks if they have posted the same call.
define i64 @small.$suffix(ptr %state, ptr %data, i64 %elems, double %weight) {
entry:
  %turn.at = getelementptr i64, ptr %state, i64 $TURN
  %turn = load i64, ptr %turn.at
  %turned = xor i64 %turn, 1
  store i64 %turned, ptr %turn.at
  %rank.at = getelementptr i64, ptr %state, i64 $RANK
  %rank = load i64, ptr %rank.at
  %ranks.at = getelementptr i64, ptr %state, i64 $RANKS
  %ranks = load i64, ptr %ranks.at
  %blocks = getelementptr i64, ptr %state, i64 $BLOCKS
  %parts = getelementptr ptr, ptr %blocks, i64 %ranks
  %weights = getelementptr ptr, ptr %parts, i64 %ranks
  %mine.at = getelementptr ptr, ptr %blocks, i64 %rank
  %mine = load ptr, ptr %mine.at
  %call.bytes = mul i64 %turn, $CALL_BYTES
  %call.at = add i64 %call.bytes, $CALLS_AT
  %slot.bytes = mul i64 %turn, $SLOT_BYTES
  %slot.at = add i64 %slot.bytes, $SLOTS_AT
  %call = getelementptr i8, ptr %mine, i64 %call.at
  %slot = getelementptr i8, ptr %mine, i64 %slot.at
  store <4 x i64> <i64 $ALLREDUCE, i64 $dtype, i64 0, i64 0>, ptr %call, align 8
  %call.where = getelementptr i64, ptr %call, i64 4
  store <4 x i64> <i64 -1, i64 -1, i64 0, i64 0>, ptr %call.where, align 8
  %call.elems = getelementptr i64, ptr %call, i64 2
  store i64 %elems, ptr %call.elems
  %call.weight = getelementptr i64, ptr %call, i64 7
  store double %weight, ptr %call.weight
  %bytes = mul i64 %elems, $bytes
  call void @llvm.memcpy.p0.p0.i64(ptr %slot, ptr %data, i64 %bytes, i1 false)
  %arrived = call i64 @arrive(ptr %state)
  %not.done = icmp eq i64 %arrived, $NOT_DONE
  br i1 %not.done, label %late, label %other
other:
  %o = phi i64 [ 0, %entry ], [ %o.next, %equal ]
  %o.at = getelementptr ptr, ptr %blocks, i64 %o
  %o.block = load ptr, ptr %o.at
  %o.call = getelementptr i8, ptr %o.block, i64 %call.at
  %o.matter = load <4 x i64>, ptr %o.call, align 8
  %matter = load <4 x i64>, ptr %call, align 8
  %differ = icmp ne <4 x i64> %o.matter, %matter
  %differ.bits = bitcast <4 x i1> %differ to i4
  %differs = icmp ne i4 %differ.bits, 0
  br i1 %differs, label %unequal, label %equal
equal:
  %o.part = getelementptr i8, ptr %o.block, i64 %slot.at
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
  call void @sum.$suffix(ptr %data, ptr %parts, ptr %weights, i64 %ranks, i64 %elems, i64 0)
  ret i64 %arrived
late:
  ret i64 $NOT_DONE
unequal:
  ret i64 $NOT_DONE
}
