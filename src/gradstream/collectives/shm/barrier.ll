; The barrier between ranks of one host: the twin of `HostBarrier._arrive` and `HostBarrier._look` in barrier.py.
;
; A template of Python's string.Template: `native.py` fills in the words of `State` and of the control block.

!0 = !{i32 1}

declare i32 @sched_yield()
declare void @llvm.prefetch.p0(ptr, i32, i32, i32)
declare i32 @sched_getcpu()
declare i32 @clock_gettime(i32, ptr)
declare void @llvm.x86.sse.sfence()
declare void @llvm.memcpy.p0.p0.i64(ptr, ptr, i64, i1)

; Counts up this rank's word ARRIVED, and looks for a moment whether the others have arrived.
define i64 @arrive(ptr %state) {
  %old = load i64, ptr %state
  %count = add i64 %old, 1
  store i64 %count, ptr %state
  %rank.at = getelementptr i64, ptr %state, i64 $RANK
  %rank = load i64, ptr %rank.at
  %blocks = getelementptr i64, ptr %state, i64 $BLOCKS
  %mine.at = getelementptr ptr, ptr %blocks, i64 %rank
  %mine = load ptr, ptr %mine.at
  %arrived = getelementptr i64, ptr %mine, i64 $ARRIVED
  %core.number = call i32 @sched_getcpu()
  %core.word = zext i32 %core.number to i64
  %core = getelementptr i64, ptr %mine, i64 $CORE
  store i64 %core.word, ptr %core
  store atomic i64 %count, ptr %arrived release, align 8
  fence seq_cst
  %looks.at = getelementptr i64, ptr %state, i64 $LOOKS
  %looks = load i64, ptr %looks.at
  %ns.at = getelementptr i64, ptr %state, i64 $LOOKS_NS
  %ns = load i64, ptr %ns.at
  %yields.at = getelementptr i64, ptr %state, i64 $YIELDS
  %yields = load i64, ptr %yields.at
  %status = call i64 @look(ptr %state, i64 %looks, i64 %ns, i64 %yields)
  ret i64 %status
}

; Looks whether all ranks have arrived, at most %looks times and for %ns nanoseconds. The clock sets the pace, or
; the system if looks yield the core. There is no PAUSE: a hypervisor takes several in a row for a lock that is
; never opened, and takes the core away for microseconds. A look yields the core always if %yields, else if the
; awaited rank was last on this very core: it may need this core though others are idle.
define i64 @look(ptr %state, i64 %looks, i64 %ns, i64 %yields) {
entry:
  %count = load i64, ptr %state
  %ranks.at = getelementptr i64, ptr %state, i64 $RANKS
  %ranks = load i64, ptr %ranks.at
  %blocks = getelementptr i64, ptr %state, i64 $BLOCKS
  %rank.at = getelementptr i64, ptr %state, i64 $RANK
  %rank = load i64, ptr %rank.at
  %mine.at = getelementptr ptr, ptr %blocks, i64 %rank
  %mine = load ptr, ptr %mine.at
  %core.at = getelementptr i64, ptr %mine, i64 $CORE
  %core = load i64, ptr %core.at
  br label %other

other:  ; has this rank arrived?
  %o = phi i64 [ 0, %entry ], [ %o.next, %here ]
  %left = phi i64 [ %looks, %entry ], [ %left.now, %here ]
  %until = phi i64 [ 0, %entry ], [ %until.now, %here ]
  %o.at = getelementptr ptr, ptr %blocks, i64 %o
  %o.block = load ptr, ptr %o.at
  %o.arrived = getelementptr i64, ptr %o.block, i64 $ARRIVED
  %o.core.at = getelementptr i64, ptr %o.block, i64 $CORE
  br label %again
again:
  %left.now = phi i64 [ %left, %other ], [ %left.less, %wait ], [ %left.less, %yield ]
  %until.now = phi i64 [ %until, %other ], [ %until.set, %wait ], [ %until.set, %yield ]
  %o.count = load atomic i64, ptr %o.arrived acquire, align 8
  %o.is = icmp uge i64 %o.count, %count
  br i1 %o.is, label %here, label %not.yet
not.yet:  ; the clock starts with the first look that fails
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
here:
  %o.next = add i64 %o, 1
  %o.more = icmp ult i64 %o.next, %ranks
  br i1 %o.more, label %other, label %sleeper

sleeper:  ; does any rank sleep? how many ranks below this one are on its core?
  %s = phi i64 [ 0, %here ], [ %s.next, %sleeper ]
  %some = phi i64 [ 0, %here ], [ %some.now, %sleeper ]
  %below = phi i64 [ 0, %here ], [ %below.now, %sleeper ]
  %s.at = getelementptr ptr, ptr %blocks, i64 %s
  %s.block = load ptr, ptr %s.at
  %s.asleep = getelementptr i64, ptr %s.block, i64 $ASLEEP
  %s.word = load atomic i64, ptr %s.asleep monotonic, align 8
  %some.now = or i64 %some, %s.word
  %s.core.at = getelementptr i64, ptr %s.block, i64 $CORE
  %s.core = load atomic i64, ptr %s.core.at monotonic, align 8
  %s.same = icmp eq i64 %s.core, %core
  %s.lower = icmp ult i64 %s, %rank
  %s.below = and i1 %s.same, %s.lower
  %s.one = zext i1 %s.below to i64
  %below.now = add i64 %below, %s.one
  %s.next = add i64 %s, 1
  %s.more = icmp ult i64 %s.next, %ranks
  br i1 %s.more, label %sleeper, label %passed
passed:  ; the rank that arrives last, and so has not waited, wakes the sleepers
  %patient.at = getelementptr i64, ptr %state, i64 $PATIENT
  %patient.old = load i64, ptr %patient.at
  %patient = or i64 %patient.old, %some.now
  store i64 %patient, ptr %patient.at
  %last = icmp eq i64 %until.now, 0
  %some.sleep = icmp ne i64 %some.now, 0
  %wakes = and i1 %last, %some.sleep
  %share.at = getelementptr i64, ptr %state, i64 $SHARE
  %share = load i64, ptr %share.at
  %too.many = icmp uge i64 %below.now, %share
  %passed.status = select i1 %too.many, i64 $SPREAD, i64 $DONE
  %status = select i1 %wakes, i64 $WAKE, i64 %passed.status
  ret i64 %status
missing:
  ret i64 $NOT_DONE
}

define internal i64 @now() {  ; nanoseconds of the monotonic clock
  %time = alloca [2 x i64]
  %ignored = call i32 @clock_gettime(i32 1, ptr %time)
  %s = load i64, ptr %time
  %ns.at = getelementptr i64, ptr %time, i64 1
  %ns = load i64, ptr %ns.at
  %s.ns = mul i64 %s, 1000000000
  %sum = add i64 %s.ns, %ns
  ret i64 %sum
}
