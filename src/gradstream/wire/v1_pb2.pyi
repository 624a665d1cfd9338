from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from typing import ClassVar as _ClassVar, Iterable as _Iterable, Mapping as _Mapping, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class DType(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    DTYPE_UNSPECIFIED: _ClassVar[DType]
    FLOAT32: _ClassVar[DType]
    FLOAT64: _ClassVar[DType]

class Code(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    CODE_UNSPECIFIED: _ClassVar[Code]
    BAD_PROTOCOL: _ClassVar[Code]
    BAD_JOB: _ClassVar[Code]
    BAD_FINGERPRINT: _ClassVar[Code]
    STALE_EPOCH: _ClassVar[Code]
    UNKNOWN_METHOD: _ClassVar[Code]
    BAD_REQUEST: _ClassVar[Code]
    NON_FINITE: _ClassVar[Code]
    TOO_OLD: _ClassVar[Code]
    SUPERSEDED: _ClassVar[Code]
    NOT_MEMBER: _ClassVar[Code]
    INTERNAL: _ClassVar[Code]
    BAD_SECRET: _ClassVar[Code]
    BAD_VERSION: _ClassVar[Code]
    BAD_JOB_FILE: _ClassVar[Code]
    BAD_DATA: _ClassVar[Code]
    BAD_CERTIFICATE: _ClassVar[Code]
    FORBIDDEN: _ClassVar[Code]
    OVER_LIMIT: _ClassVar[Code]
DTYPE_UNSPECIFIED: DType
FLOAT32: DType
FLOAT64: DType
CODE_UNSPECIFIED: Code
BAD_PROTOCOL: Code
BAD_JOB: Code
BAD_FINGERPRINT: Code
STALE_EPOCH: Code
UNKNOWN_METHOD: Code
BAD_REQUEST: Code
NON_FINITE: Code
TOO_OLD: Code
SUPERSEDED: Code
NOT_MEMBER: Code
INTERNAL: Code
BAD_SECRET: Code
BAD_VERSION: Code
BAD_JOB_FILE: Code
BAD_DATA: Code
BAD_CERTIFICATE: Code
FORBIDDEN: Code
OVER_LIMIT: Code

class Frame(_message.Message):
    __slots__ = ("open", "accept", "chunk", "body", "credit", "waiting", "refuse", "cancel", "end", "challenge", "greeting", "proven", "checksum", "payload")
    OPEN_FIELD_NUMBER: _ClassVar[int]
    ACCEPT_FIELD_NUMBER: _ClassVar[int]
    CHUNK_FIELD_NUMBER: _ClassVar[int]
    BODY_FIELD_NUMBER: _ClassVar[int]
    CREDIT_FIELD_NUMBER: _ClassVar[int]
    WAITING_FIELD_NUMBER: _ClassVar[int]
    REFUSE_FIELD_NUMBER: _ClassVar[int]
    CANCEL_FIELD_NUMBER: _ClassVar[int]
    END_FIELD_NUMBER: _ClassVar[int]
    CHALLENGE_FIELD_NUMBER: _ClassVar[int]
    GREETING_FIELD_NUMBER: _ClassVar[int]
    PROVEN_FIELD_NUMBER: _ClassVar[int]
    CHECKSUM_FIELD_NUMBER: _ClassVar[int]
    PAYLOAD_FIELD_NUMBER: _ClassVar[int]
    open: Open
    accept: Accept
    chunk: Chunk
    body: Body
    credit: Credit
    waiting: Waiting
    refuse: Refuse
    cancel: Cancel
    end: End
    challenge: Challenge
    greeting: Greeting
    proven: Proven
    checksum: int
    payload: bytes
    def __init__(self, open: _Optional[_Union[Open, _Mapping]] = ..., accept: _Optional[_Union[Accept, _Mapping]] = ..., chunk: _Optional[_Union[Chunk, _Mapping]] = ..., body: _Optional[_Union[Body, _Mapping]] = ..., credit: _Optional[_Union[Credit, _Mapping]] = ..., waiting: _Optional[_Union[Waiting, _Mapping]] = ..., refuse: _Optional[_Union[Refuse, _Mapping]] = ..., cancel: _Optional[_Union[Cancel, _Mapping]] = ..., end: _Optional[_Union[End, _Mapping]] = ..., challenge: _Optional[_Union[Challenge, _Mapping]] = ..., greeting: _Optional[_Union[Greeting, _Mapping]] = ..., proven: _Optional[_Union[Proven, _Mapping]] = ..., checksum: _Optional[int] = ..., payload: _Optional[bytes] = ...) -> None: ...

class Open(_message.Message):
    __slots__ = ("protocol", "job", "fingerprint", "sender", "incarnation", "epoch", "method", "window", "body", "urgent")
    PROTOCOL_FIELD_NUMBER: _ClassVar[int]
    JOB_FIELD_NUMBER: _ClassVar[int]
    FINGERPRINT_FIELD_NUMBER: _ClassVar[int]
    SENDER_FIELD_NUMBER: _ClassVar[int]
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    METHOD_FIELD_NUMBER: _ClassVar[int]
    WINDOW_FIELD_NUMBER: _ClassVar[int]
    BODY_FIELD_NUMBER: _ClassVar[int]
    URGENT_FIELD_NUMBER: _ClassVar[int]
    protocol: int
    job: str
    fingerprint: int
    sender: str
    incarnation: int
    epoch: int
    method: str
    window: int
    body: bytes
    urgent: bool
    def __init__(self, protocol: _Optional[int] = ..., job: _Optional[str] = ..., fingerprint: _Optional[int] = ..., sender: _Optional[str] = ..., incarnation: _Optional[int] = ..., epoch: _Optional[int] = ..., method: _Optional[str] = ..., window: _Optional[int] = ..., body: _Optional[bytes] = ..., urgent: bool = ...) -> None: ...

class Challenge(_message.Message):
    __slots__ = ("protocol", "nonce", "checked")
    PROTOCOL_FIELD_NUMBER: _ClassVar[int]
    NONCE_FIELD_NUMBER: _ClassVar[int]
    CHECKED_FIELD_NUMBER: _ClassVar[int]
    protocol: int
    nonce: bytes
    checked: bool
    def __init__(self, protocol: _Optional[int] = ..., nonce: _Optional[bytes] = ..., checked: bool = ...) -> None: ...

class Greeting(_message.Message):
    __slots__ = ("protocol", "challenge", "nonce", "sender", "incarnation", "proof", "link", "index", "count", "line", "checked")
    PROTOCOL_FIELD_NUMBER: _ClassVar[int]
    CHALLENGE_FIELD_NUMBER: _ClassVar[int]
    NONCE_FIELD_NUMBER: _ClassVar[int]
    SENDER_FIELD_NUMBER: _ClassVar[int]
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    PROOF_FIELD_NUMBER: _ClassVar[int]
    LINK_FIELD_NUMBER: _ClassVar[int]
    INDEX_FIELD_NUMBER: _ClassVar[int]
    COUNT_FIELD_NUMBER: _ClassVar[int]
    LINE_FIELD_NUMBER: _ClassVar[int]
    CHECKED_FIELD_NUMBER: _ClassVar[int]
    protocol: int
    challenge: bytes
    nonce: bytes
    sender: str
    incarnation: int
    proof: bytes
    link: int
    index: int
    count: int
    line: str
    checked: bool
    def __init__(self, protocol: _Optional[int] = ..., challenge: _Optional[bytes] = ..., nonce: _Optional[bytes] = ..., sender: _Optional[str] = ..., incarnation: _Optional[int] = ..., proof: _Optional[bytes] = ..., link: _Optional[int] = ..., index: _Optional[int] = ..., count: _Optional[int] = ..., line: _Optional[str] = ..., checked: bool = ...) -> None: ...

class Proven(_message.Message):
    __slots__ = ("proof", "session")
    PROOF_FIELD_NUMBER: _ClassVar[int]
    SESSION_FIELD_NUMBER: _ClassVar[int]
    proof: bytes
    session: int
    def __init__(self, proof: _Optional[bytes] = ..., session: _Optional[int] = ...) -> None: ...

class Pass(_message.Message):
    __slots__ = ("session", "number", "proof")
    SESSION_FIELD_NUMBER: _ClassVar[int]
    NUMBER_FIELD_NUMBER: _ClassVar[int]
    PROOF_FIELD_NUMBER: _ClassVar[int]
    session: int
    number: int
    proof: bytes
    def __init__(self, session: _Optional[int] = ..., number: _Optional[int] = ..., proof: _Optional[bytes] = ...) -> None: ...

class Accept(_message.Message):
    __slots__ = ("window",)
    WINDOW_FIELD_NUMBER: _ClassVar[int]
    window: int
    def __init__(self, window: _Optional[int] = ...) -> None: ...

class Chunk(_message.Message):
    __slots__ = ("index", "sequence", "elems", "dtype", "version", "flags", "waited", "reference", "clock", "rows")
    INDEX_FIELD_NUMBER: _ClassVar[int]
    SEQUENCE_FIELD_NUMBER: _ClassVar[int]
    ELEMS_FIELD_NUMBER: _ClassVar[int]
    DTYPE_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    FLAGS_FIELD_NUMBER: _ClassVar[int]
    WAITED_FIELD_NUMBER: _ClassVar[int]
    REFERENCE_FIELD_NUMBER: _ClassVar[int]
    CLOCK_FIELD_NUMBER: _ClassVar[int]
    ROWS_FIELD_NUMBER: _ClassVar[int]
    index: int
    sequence: int
    elems: int
    dtype: DType
    version: int
    flags: int
    waited: Waited
    reference: Reference
    clock: int
    rows: int
    def __init__(self, index: _Optional[int] = ..., sequence: _Optional[int] = ..., elems: _Optional[int] = ..., dtype: _Optional[_Union[DType, str]] = ..., version: _Optional[int] = ..., flags: _Optional[int] = ..., waited: _Optional[_Union[Waited, _Mapping]] = ..., reference: _Optional[_Union[Reference, _Mapping]] = ..., clock: _Optional[int] = ..., rows: _Optional[int] = ...) -> None: ...

class Reference(_message.Message):
    __slots__ = ("channel", "segment", "offset_bytes", "size_bytes", "loan")
    CHANNEL_FIELD_NUMBER: _ClassVar[int]
    SEGMENT_FIELD_NUMBER: _ClassVar[int]
    OFFSET_BYTES_FIELD_NUMBER: _ClassVar[int]
    SIZE_BYTES_FIELD_NUMBER: _ClassVar[int]
    LOAN_FIELD_NUMBER: _ClassVar[int]
    channel: int
    segment: int
    offset_bytes: int
    size_bytes: int
    loan: int
    def __init__(self, channel: _Optional[int] = ..., segment: _Optional[int] = ..., offset_bytes: _Optional[int] = ..., size_bytes: _Optional[int] = ..., loan: _Optional[int] = ...) -> None: ...

class Waited(_message.Message):
    __slots__ = ("on", "until_us")
    ON_FIELD_NUMBER: _ClassVar[int]
    UNTIL_US_FIELD_NUMBER: _ClassVar[int]
    on: str
    until_us: int
    def __init__(self, on: _Optional[str] = ..., until_us: _Optional[int] = ...) -> None: ...

class Body(_message.Message):
    __slots__ = ("data",)
    DATA_FIELD_NUMBER: _ClassVar[int]
    data: bytes
    def __init__(self, data: _Optional[bytes] = ...) -> None: ...

class Credit(_message.Message):
    __slots__ = ("frames",)
    FRAMES_FIELD_NUMBER: _ClassVar[int]
    frames: int
    def __init__(self, frames: _Optional[int] = ...) -> None: ...

class Waiting(_message.Message):
    __slots__ = ("on",)
    ON_FIELD_NUMBER: _ClassVar[int]
    on: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, on: _Optional[_Iterable[str]] = ...) -> None: ...

class Cancel(_message.Message):
    __slots__ = ("reason", "cause")
    class Cause(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
        __slots__ = ()
        NO_MORE: _ClassVar[Cancel.Cause]
        SILENT: _ClassVar[Cancel.Cause]
        LOST: _ClassVar[Cancel.Cause]
    NO_MORE: Cancel.Cause
    SILENT: Cancel.Cause
    LOST: Cancel.Cause
    REASON_FIELD_NUMBER: _ClassVar[int]
    CAUSE_FIELD_NUMBER: _ClassVar[int]
    reason: str
    cause: Cancel.Cause
    def __init__(self, reason: _Optional[str] = ..., cause: _Optional[_Union[Cancel.Cause, str]] = ...) -> None: ...

class End(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class Refuse(_message.Message):
    __slots__ = ("code", "message", "epoch")
    CODE_FIELD_NUMBER: _ClassVar[int]
    MESSAGE_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    code: Code
    message: str
    epoch: int
    def __init__(self, code: _Optional[_Union[Code, str]] = ..., message: _Optional[str] = ..., epoch: _Optional[int] = ...) -> None: ...

class Lending(_message.Message):
    __slots__ = ("hello", "segment", "attached", "dropped", "returned", "forgotten")
    class Hello(_message.Message):
        __slots__ = ("job", "sender", "incarnation", "channel")
        JOB_FIELD_NUMBER: _ClassVar[int]
        SENDER_FIELD_NUMBER: _ClassVar[int]
        INCARNATION_FIELD_NUMBER: _ClassVar[int]
        CHANNEL_FIELD_NUMBER: _ClassVar[int]
        job: str
        sender: str
        incarnation: int
        channel: int
        def __init__(self, job: _Optional[str] = ..., sender: _Optional[str] = ..., incarnation: _Optional[int] = ..., channel: _Optional[int] = ...) -> None: ...
    class Loans(_message.Message):
        __slots__ = ("ids",)
        IDS_FIELD_NUMBER: _ClassVar[int]
        ids: _containers.RepeatedScalarFieldContainer[int]
        def __init__(self, ids: _Optional[_Iterable[int]] = ...) -> None: ...
    HELLO_FIELD_NUMBER: _ClassVar[int]
    SEGMENT_FIELD_NUMBER: _ClassVar[int]
    ATTACHED_FIELD_NUMBER: _ClassVar[int]
    DROPPED_FIELD_NUMBER: _ClassVar[int]
    RETURNED_FIELD_NUMBER: _ClassVar[int]
    FORGOTTEN_FIELD_NUMBER: _ClassVar[int]
    hello: Lending.Hello
    segment: int
    attached: int
    dropped: int
    returned: Lending.Loans
    forgotten: Lending.Loans
    def __init__(self, hello: _Optional[_Union[Lending.Hello, _Mapping]] = ..., segment: _Optional[int] = ..., attached: _Optional[int] = ..., dropped: _Optional[int] = ..., returned: _Optional[_Union[Lending.Loans, _Mapping]] = ..., forgotten: _Optional[_Union[Lending.Loans, _Mapping]] = ...) -> None: ...

class Tensor(_message.Message):
    __slots__ = ("tag", "elems", "dtype", "sequence")
    TAG_FIELD_NUMBER: _ClassVar[int]
    ELEMS_FIELD_NUMBER: _ClassVar[int]
    DTYPE_FIELD_NUMBER: _ClassVar[int]
    SEQUENCE_FIELD_NUMBER: _ClassVar[int]
    tag: int
    elems: int
    dtype: DType
    sequence: int
    def __init__(self, tag: _Optional[int] = ..., elems: _Optional[int] = ..., dtype: _Optional[_Union[DType, str]] = ..., sequence: _Optional[int] = ...) -> None: ...

class Meet(_message.Message):
    __slots__ = ("round", "elems", "dtype", "contains")
    ROUND_FIELD_NUMBER: _ClassVar[int]
    ELEMS_FIELD_NUMBER: _ClassVar[int]
    DTYPE_FIELD_NUMBER: _ClassVar[int]
    CONTAINS_FIELD_NUMBER: _ClassVar[int]
    round: int
    elems: int
    dtype: DType
    contains: _containers.RepeatedCompositeFieldContainer[SenderPushes]
    def __init__(self, round: _Optional[int] = ..., elems: _Optional[int] = ..., dtype: _Optional[_Union[DType, str]] = ..., contains: _Optional[_Iterable[_Union[SenderPushes, _Mapping]]] = ...) -> None: ...

class Exchange(_message.Message):
    __slots__ = ("epoch", "rank", "members")
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    RANK_FIELD_NUMBER: _ClassVar[int]
    MEMBERS_FIELD_NUMBER: _ClassVar[int]
    epoch: int
    rank: int
    members: bytes
    def __init__(self, epoch: _Optional[int] = ..., rank: _Optional[int] = ..., members: _Optional[bytes] = ...) -> None: ...

class Tunnel(_message.Message):
    __slots__ = ("peer", "ticket", "port", "back")
    PEER_FIELD_NUMBER: _ClassVar[int]
    TICKET_FIELD_NUMBER: _ClassVar[int]
    PORT_FIELD_NUMBER: _ClassVar[int]
    BACK_FIELD_NUMBER: _ClassVar[int]
    peer: str
    ticket: bytes
    port: int
    back: bool
    def __init__(self, peer: _Optional[str] = ..., ticket: _Optional[bytes] = ..., port: _Optional[int] = ..., back: bool = ...) -> None: ...

class Broken(_message.Message):
    __slots__ = ("epoch", "culprit", "silent", "message")
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    CULPRIT_FIELD_NUMBER: _ClassVar[int]
    SILENT_FIELD_NUMBER: _ClassVar[int]
    MESSAGE_FIELD_NUMBER: _ClassVar[int]
    epoch: int
    culprit: str
    silent: bool
    message: str
    def __init__(self, epoch: _Optional[int] = ..., culprit: _Optional[str] = ..., silent: bool = ..., message: _Optional[str] = ...) -> None: ...

class Push(_message.Message):
    __slots__ = ("command", "vector", "sequence", "samples", "lr", "round", "num_gradients", "clock", "loss", "rows", "base_version", "stands_for", "batches", "settled", "behalf", "portion")
    class Command(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
        __slots__ = ()
        APPLY: _ClassVar[Push.Command]
        ASSIGN: _ClassVar[Push.Command]
    APPLY: Push.Command
    ASSIGN: Push.Command
    COMMAND_FIELD_NUMBER: _ClassVar[int]
    VECTOR_FIELD_NUMBER: _ClassVar[int]
    SEQUENCE_FIELD_NUMBER: _ClassVar[int]
    SAMPLES_FIELD_NUMBER: _ClassVar[int]
    LR_FIELD_NUMBER: _ClassVar[int]
    ROUND_FIELD_NUMBER: _ClassVar[int]
    NUM_GRADIENTS_FIELD_NUMBER: _ClassVar[int]
    CLOCK_FIELD_NUMBER: _ClassVar[int]
    LOSS_FIELD_NUMBER: _ClassVar[int]
    ROWS_FIELD_NUMBER: _ClassVar[int]
    BASE_VERSION_FIELD_NUMBER: _ClassVar[int]
    STANDS_FOR_FIELD_NUMBER: _ClassVar[int]
    BATCHES_FIELD_NUMBER: _ClassVar[int]
    SETTLED_FIELD_NUMBER: _ClassVar[int]
    BEHALF_FIELD_NUMBER: _ClassVar[int]
    PORTION_FIELD_NUMBER: _ClassVar[int]
    command: Push.Command
    vector: str
    sequence: int
    samples: int
    lr: float
    round: int
    num_gradients: int
    clock: int
    loss: float
    rows: bool
    base_version: int
    stands_for: int
    batches: _containers.RepeatedCompositeFieldContainer[Receipt]
    settled: int
    behalf: Behalf
    portion: int
    def __init__(self, command: _Optional[_Union[Push.Command, str]] = ..., vector: _Optional[str] = ..., sequence: _Optional[int] = ..., samples: _Optional[int] = ..., lr: _Optional[float] = ..., round: _Optional[int] = ..., num_gradients: _Optional[int] = ..., clock: _Optional[int] = ..., loss: _Optional[float] = ..., rows: bool = ..., base_version: _Optional[int] = ..., stands_for: _Optional[int] = ..., batches: _Optional[_Iterable[_Union[Receipt, _Mapping]]] = ..., settled: _Optional[int] = ..., behalf: _Optional[_Union[Behalf, _Mapping]] = ..., portion: _Optional[int] = ...) -> None: ...

class Behalf(_message.Message):
    __slots__ = ("sender", "incarnation")
    SENDER_FIELD_NUMBER: _ClassVar[int]
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    sender: str
    incarnation: int
    def __init__(self, sender: _Optional[str] = ..., incarnation: _Optional[int] = ...) -> None: ...

class PushResult(_message.Message):
    __slots__ = ("chunk", "sequence", "outcome", "version", "staleness", "waited")
    class Outcome(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
        __slots__ = ()
        APPLIED: _ClassVar[PushResult.Outcome]
        DUPLICATE: _ClassVar[PushResult.Outcome]
        DROPPED: _ClassVar[PushResult.Outcome]
    APPLIED: PushResult.Outcome
    DUPLICATE: PushResult.Outcome
    DROPPED: PushResult.Outcome
    CHUNK_FIELD_NUMBER: _ClassVar[int]
    SEQUENCE_FIELD_NUMBER: _ClassVar[int]
    OUTCOME_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    STALENESS_FIELD_NUMBER: _ClassVar[int]
    WAITED_FIELD_NUMBER: _ClassVar[int]
    chunk: int
    sequence: int
    outcome: PushResult.Outcome
    version: int
    staleness: int
    waited: Waited
    def __init__(self, chunk: _Optional[int] = ..., sequence: _Optional[int] = ..., outcome: _Optional[_Union[PushResult.Outcome, str]] = ..., version: _Optional[int] = ..., staleness: _Optional[int] = ..., waited: _Optional[_Union[Waited, _Mapping]] = ...) -> None: ...

class PushResults(_message.Message):
    __slots__ = ("results", "absent")
    RESULTS_FIELD_NUMBER: _ClassVar[int]
    ABSENT_FIELD_NUMBER: _ClassVar[int]
    results: _containers.RepeatedCompositeFieldContainer[PushResult]
    absent: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, results: _Optional[_Iterable[_Union[PushResult, _Mapping]]] = ..., absent: _Optional[_Iterable[int]] = ...) -> None: ...

class Fetch(_message.Message):
    __slots__ = ("vector", "min_version", "after_sequence", "chunks", "flush", "min_clock", "known", "number", "attempt")
    VECTOR_FIELD_NUMBER: _ClassVar[int]
    MIN_VERSION_FIELD_NUMBER: _ClassVar[int]
    AFTER_SEQUENCE_FIELD_NUMBER: _ClassVar[int]
    CHUNKS_FIELD_NUMBER: _ClassVar[int]
    FLUSH_FIELD_NUMBER: _ClassVar[int]
    MIN_CLOCK_FIELD_NUMBER: _ClassVar[int]
    KNOWN_FIELD_NUMBER: _ClassVar[int]
    NUMBER_FIELD_NUMBER: _ClassVar[int]
    ATTEMPT_FIELD_NUMBER: _ClassVar[int]
    vector: str
    min_version: int
    after_sequence: int
    chunks: _containers.RepeatedScalarFieldContainer[int]
    flush: bool
    min_clock: int
    known: _containers.RepeatedScalarFieldContainer[int]
    number: int
    attempt: int
    def __init__(self, vector: _Optional[str] = ..., min_version: _Optional[int] = ..., after_sequence: _Optional[int] = ..., chunks: _Optional[_Iterable[int]] = ..., flush: bool = ..., min_clock: _Optional[int] = ..., known: _Optional[_Iterable[int]] = ..., number: _Optional[int] = ..., attempt: _Optional[int] = ...) -> None: ...

class Unchanged(_message.Message):
    __slots__ = ("chunks", "versions")
    CHUNKS_FIELD_NUMBER: _ClassVar[int]
    VERSIONS_FIELD_NUMBER: _ClassVar[int]
    chunks: _containers.RepeatedScalarFieldContainer[int]
    versions: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, chunks: _Optional[_Iterable[int]] = ..., versions: _Optional[_Iterable[int]] = ...) -> None: ...

class Command(_message.Message):
    __slots__ = ("kind", "out", "x", "y", "alpha", "sequence", "clock", "commands", "step")
    class Kind(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
        __slots__ = ()
        ZERO: _ClassVar[Command.Kind]
        COPY: _ClassVar[Command.Kind]
        SCALE: _ClassVar[Command.Kind]
        ADD: _ClassVar[Command.Kind]
        DOT: _ClassVar[Command.Kind]
        LEAVE: _ClassVar[Command.Kind]
        ENTER: _ClassVar[Command.Kind]
        MULTIPLY: _ClassVar[Command.Kind]
        STEP: _ClassVar[Command.Kind]
    ZERO: Command.Kind
    COPY: Command.Kind
    SCALE: Command.Kind
    ADD: Command.Kind
    DOT: Command.Kind
    LEAVE: Command.Kind
    ENTER: Command.Kind
    MULTIPLY: Command.Kind
    STEP: Command.Kind
    KIND_FIELD_NUMBER: _ClassVar[int]
    OUT_FIELD_NUMBER: _ClassVar[int]
    X_FIELD_NUMBER: _ClassVar[int]
    Y_FIELD_NUMBER: _ClassVar[int]
    ALPHA_FIELD_NUMBER: _ClassVar[int]
    SEQUENCE_FIELD_NUMBER: _ClassVar[int]
    CLOCK_FIELD_NUMBER: _ClassVar[int]
    COMMANDS_FIELD_NUMBER: _ClassVar[int]
    STEP_FIELD_NUMBER: _ClassVar[int]
    kind: Command.Kind
    out: str
    x: str
    y: str
    alpha: float
    sequence: int
    clock: int
    commands: _containers.RepeatedCompositeFieldContainer[Command]
    step: Procedure
    def __init__(self, kind: _Optional[_Union[Command.Kind, str]] = ..., out: _Optional[str] = ..., x: _Optional[str] = ..., y: _Optional[str] = ..., alpha: _Optional[float] = ..., sequence: _Optional[int] = ..., clock: _Optional[int] = ..., commands: _Optional[_Iterable[_Union[Command, _Mapping]]] = ..., step: _Optional[_Union[Procedure, _Mapping]] = ...) -> None: ...

class Procedure(_message.Message):
    __slots__ = ("number", "note", "scalars", "pass_number", "portions", "chunk", "accepted", "by")
    NUMBER_FIELD_NUMBER: _ClassVar[int]
    NOTE_FIELD_NUMBER: _ClassVar[int]
    SCALARS_FIELD_NUMBER: _ClassVar[int]
    PASS_NUMBER_FIELD_NUMBER: _ClassVar[int]
    PORTIONS_FIELD_NUMBER: _ClassVar[int]
    CHUNK_FIELD_NUMBER: _ClassVar[int]
    ACCEPTED_FIELD_NUMBER: _ClassVar[int]
    BY_FIELD_NUMBER: _ClassVar[int]
    number: int
    note: bytes
    scalars: _containers.RepeatedScalarFieldContainer[float]
    pass_number: int
    portions: _containers.RepeatedCompositeFieldContainer[Portion]
    chunk: int
    accepted: bool
    by: str
    def __init__(self, number: _Optional[int] = ..., note: _Optional[bytes] = ..., scalars: _Optional[_Iterable[float]] = ..., pass_number: _Optional[int] = ..., portions: _Optional[_Iterable[_Union[Portion, _Mapping]]] = ..., chunk: _Optional[int] = ..., accepted: bool = ..., by: _Optional[str] = ...) -> None: ...

class Portion(_message.Message):
    __slots__ = ("first", "samples", "loss")
    FIRST_FIELD_NUMBER: _ClassVar[int]
    SAMPLES_FIELD_NUMBER: _ClassVar[int]
    LOSS_FIELD_NUMBER: _ClassVar[int]
    first: int
    samples: int
    loss: float
    def __init__(self, first: _Optional[int] = ..., samples: _Optional[int] = ..., loss: _Optional[float] = ...) -> None: ...

class CommandResult(_message.Message):
    __slots__ = ("clock", "chunks", "note", "by")
    CLOCK_FIELD_NUMBER: _ClassVar[int]
    CHUNKS_FIELD_NUMBER: _ClassVar[int]
    NOTE_FIELD_NUMBER: _ClassVar[int]
    BY_FIELD_NUMBER: _ClassVar[int]
    clock: int
    chunks: _containers.RepeatedCompositeFieldContainer[Procedure]
    note: bytes
    by: str
    def __init__(self, clock: _Optional[int] = ..., chunks: _Optional[_Iterable[_Union[Procedure, _Mapping]]] = ..., note: _Optional[bytes] = ..., by: _Optional[str] = ...) -> None: ...

class Backup(_message.Message):
    __slots__ = ("chunk", "workers", "number")
    CHUNK_FIELD_NUMBER: _ClassVar[int]
    WORKERS_FIELD_NUMBER: _ClassVar[int]
    NUMBER_FIELD_NUMBER: _ClassVar[int]
    chunk: ChunkBackup
    workers: _containers.RepeatedCompositeFieldContainer[WorkerClock]
    number: int
    def __init__(self, chunk: _Optional[_Union[ChunkBackup, _Mapping]] = ..., workers: _Optional[_Iterable[_Union[WorkerClock, _Mapping]]] = ..., number: _Optional[int] = ...) -> None: ...

class ChunkBackup(_message.Message):
    __slots__ = ("index", "version", "summed", "clock", "lr", "windows", "clocks", "vectors", "pushes", "procedure")
    class ClocksEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: int
        value: int
        def __init__(self, key: _Optional[int] = ..., value: _Optional[int] = ...) -> None: ...
    INDEX_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    SUMMED_FIELD_NUMBER: _ClassVar[int]
    CLOCK_FIELD_NUMBER: _ClassVar[int]
    LR_FIELD_NUMBER: _ClassVar[int]
    WINDOWS_FIELD_NUMBER: _ClassVar[int]
    CLOCKS_FIELD_NUMBER: _ClassVar[int]
    VECTORS_FIELD_NUMBER: _ClassVar[int]
    PUSHES_FIELD_NUMBER: _ClassVar[int]
    PROCEDURE_FIELD_NUMBER: _ClassVar[int]
    index: int
    version: int
    summed: int
    clock: int
    lr: float
    windows: _containers.RepeatedCompositeFieldContainer[Window]
    clocks: _containers.ScalarMap[int, int]
    vectors: _containers.RepeatedScalarFieldContainer[str]
    pushes: _containers.RepeatedCompositeFieldContainer[SenderPushes]
    procedure: Procedure
    def __init__(self, index: _Optional[int] = ..., version: _Optional[int] = ..., summed: _Optional[int] = ..., clock: _Optional[int] = ..., lr: _Optional[float] = ..., windows: _Optional[_Iterable[_Union[Window, _Mapping]]] = ..., clocks: _Optional[_Mapping[int, int]] = ..., vectors: _Optional[_Iterable[str]] = ..., pushes: _Optional[_Iterable[_Union[SenderPushes, _Mapping]]] = ..., procedure: _Optional[_Union[Procedure, _Mapping]] = ...) -> None: ...

class Window(_message.Message):
    __slots__ = ("sender", "incarnation", "low", "above")
    SENDER_FIELD_NUMBER: _ClassVar[int]
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    LOW_FIELD_NUMBER: _ClassVar[int]
    ABOVE_FIELD_NUMBER: _ClassVar[int]
    sender: str
    incarnation: int
    low: int
    above: bytes
    def __init__(self, sender: _Optional[str] = ..., incarnation: _Optional[int] = ..., low: _Optional[int] = ..., above: _Optional[bytes] = ...) -> None: ...

class WorkerClock(_message.Message):
    __slots__ = ("rank", "incarnation", "paused", "entered")
    RANK_FIELD_NUMBER: _ClassVar[int]
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    PAUSED_FIELD_NUMBER: _ClassVar[int]
    ENTERED_FIELD_NUMBER: _ClassVar[int]
    rank: int
    incarnation: int
    paused: bool
    entered: int
    def __init__(self, rank: _Optional[int] = ..., incarnation: _Optional[int] = ..., paused: bool = ..., entered: _Optional[int] = ...) -> None: ...

class Placement(_message.Message):
    __slots__ = ("first", "shards")
    FIRST_FIELD_NUMBER: _ClassVar[int]
    SHARDS_FIELD_NUMBER: _ClassVar[int]
    first: int
    shards: int
    def __init__(self, first: _Optional[int] = ..., shards: _Optional[int] = ...) -> None: ...

class Resharding(_message.Message):
    __slots__ = ("to", "holds")
    TO_FIELD_NUMBER: _ClassVar[int]
    HOLDS_FIELD_NUMBER: _ClassVar[int]
    to: Placement
    holds: bool
    def __init__(self, to: _Optional[_Union[Placement, _Mapping]] = ..., holds: bool = ...) -> None: ...

class Handover(_message.Message):
    __slots__ = ("first", "chunks")
    FIRST_FIELD_NUMBER: _ClassVar[int]
    CHUNKS_FIELD_NUMBER: _ClassVar[int]
    first: int
    chunks: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, first: _Optional[int] = ..., chunks: _Optional[_Iterable[int]] = ...) -> None: ...

class Resharded(_message.Message):
    __slots__ = ("first", "error")
    FIRST_FIELD_NUMBER: _ClassVar[int]
    ERROR_FIELD_NUMBER: _ClassVar[int]
    first: int
    error: str
    def __init__(self, first: _Optional[int] = ..., error: _Optional[str] = ...) -> None: ...

class Node(_message.Message):
    __slots__ = ("name", "role", "rank", "address", "incarnation", "first_round", "since", "elsewhere")
    NAME_FIELD_NUMBER: _ClassVar[int]
    ROLE_FIELD_NUMBER: _ClassVar[int]
    RANK_FIELD_NUMBER: _ClassVar[int]
    ADDRESS_FIELD_NUMBER: _ClassVar[int]
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    FIRST_ROUND_FIELD_NUMBER: _ClassVar[int]
    SINCE_FIELD_NUMBER: _ClassVar[int]
    ELSEWHERE_FIELD_NUMBER: _ClassVar[int]
    name: str
    role: str
    rank: int
    address: str
    incarnation: int
    first_round: int
    since: int
    elsewhere: bool
    def __init__(self, name: _Optional[str] = ..., role: _Optional[str] = ..., rank: _Optional[int] = ..., address: _Optional[str] = ..., incarnation: _Optional[int] = ..., first_round: _Optional[int] = ..., since: _Optional[int] = ..., elsewhere: bool = ...) -> None: ...

class ModelSpec(_message.Message):
    __slots__ = ("fingerprint", "elems", "dtype", "chunk_elems", "optimizer", "rows", "parts")
    FINGERPRINT_FIELD_NUMBER: _ClassVar[int]
    ELEMS_FIELD_NUMBER: _ClassVar[int]
    DTYPE_FIELD_NUMBER: _ClassVar[int]
    CHUNK_ELEMS_FIELD_NUMBER: _ClassVar[int]
    OPTIMIZER_FIELD_NUMBER: _ClassVar[int]
    ROWS_FIELD_NUMBER: _ClassVar[int]
    PARTS_FIELD_NUMBER: _ClassVar[int]
    fingerprint: int
    elems: int
    dtype: DType
    chunk_elems: int
    optimizer: str
    rows: RowSpec
    parts: _containers.RepeatedCompositeFieldContainer[ModelPart]
    def __init__(self, fingerprint: _Optional[int] = ..., elems: _Optional[int] = ..., dtype: _Optional[_Union[DType, str]] = ..., chunk_elems: _Optional[int] = ..., optimizer: _Optional[str] = ..., rows: _Optional[_Union[RowSpec, _Mapping]] = ..., parts: _Optional[_Iterable[_Union[ModelPart, _Mapping]]] = ...) -> None: ...

class ModelPart(_message.Message):
    __slots__ = ("bounds",)
    BOUNDS_FIELD_NUMBER: _ClassVar[int]
    bounds: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, bounds: _Optional[_Iterable[int]] = ...) -> None: ...

class RowSpec(_message.Message):
    __slots__ = ("tables", "block_elems")
    class Table(_message.Message):
        __slots__ = ("start", "rows", "row_elems")
        START_FIELD_NUMBER: _ClassVar[int]
        ROWS_FIELD_NUMBER: _ClassVar[int]
        ROW_ELEMS_FIELD_NUMBER: _ClassVar[int]
        start: int
        rows: int
        row_elems: int
        def __init__(self, start: _Optional[int] = ..., rows: _Optional[int] = ..., row_elems: _Optional[int] = ...) -> None: ...
    TABLES_FIELD_NUMBER: _ClassVar[int]
    BLOCK_ELEMS_FIELD_NUMBER: _ClassVar[int]
    tables: _containers.RepeatedCompositeFieldContainer[RowSpec.Table]
    block_elems: int
    def __init__(self, tables: _Optional[_Iterable[_Union[RowSpec.Table, _Mapping]]] = ..., block_elems: _Optional[int] = ...) -> None: ...

class Join(_message.Message):
    __slots__ = ("node", "model", "software", "tensors", "buffers", "fixed", "boundary")
    NODE_FIELD_NUMBER: _ClassVar[int]
    MODEL_FIELD_NUMBER: _ClassVar[int]
    SOFTWARE_FIELD_NUMBER: _ClassVar[int]
    TENSORS_FIELD_NUMBER: _ClassVar[int]
    BUFFERS_FIELD_NUMBER: _ClassVar[int]
    FIXED_FIELD_NUMBER: _ClassVar[int]
    BOUNDARY_FIELD_NUMBER: _ClassVar[int]
    node: Node
    model: ModelSpec
    software: str
    tensors: _containers.RepeatedCompositeFieldContainer[TensorSpec]
    buffers: _containers.RepeatedCompositeFieldContainer[TensorSpec]
    fixed: _containers.RepeatedCompositeFieldContainer[TensorSpec]
    boundary: int
    def __init__(self, node: _Optional[_Union[Node, _Mapping]] = ..., model: _Optional[_Union[ModelSpec, _Mapping]] = ..., software: _Optional[str] = ..., tensors: _Optional[_Iterable[_Union[TensorSpec, _Mapping]]] = ..., buffers: _Optional[_Iterable[_Union[TensorSpec, _Mapping]]] = ..., fixed: _Optional[_Iterable[_Union[TensorSpec, _Mapping]]] = ..., boundary: _Optional[int] = ...) -> None: ...

class AskPlan(_message.Message):
    __slots__ = ("least",)
    LEAST_FIELD_NUMBER: _ClassVar[int]
    least: int
    def __init__(self, least: _Optional[int] = ...) -> None: ...

class PresentPlan(_message.Message):
    __slots__ = ("boundary", "resume", "end", "reason", "culprit", "error")
    BOUNDARY_FIELD_NUMBER: _ClassVar[int]
    RESUME_FIELD_NUMBER: _ClassVar[int]
    END_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    CULPRIT_FIELD_NUMBER: _ClassVar[int]
    ERROR_FIELD_NUMBER: _ClassVar[int]
    boundary: int
    resume: str
    end: Notice.Status
    reason: str
    culprit: str
    error: str
    def __init__(self, boundary: _Optional[int] = ..., resume: _Optional[str] = ..., end: _Optional[_Union[Notice.Status, str]] = ..., reason: _Optional[str] = ..., culprit: _Optional[str] = ..., error: _Optional[str] = ...) -> None: ...

class TensorSpec(_message.Message):
    __slots__ = ("name", "shape", "dtype", "same_as")
    NAME_FIELD_NUMBER: _ClassVar[int]
    SHAPE_FIELD_NUMBER: _ClassVar[int]
    DTYPE_FIELD_NUMBER: _ClassVar[int]
    SAME_AS_FIELD_NUMBER: _ClassVar[int]
    name: str
    shape: _containers.RepeatedScalarFieldContainer[int]
    dtype: str
    same_as: str
    def __init__(self, name: _Optional[str] = ..., shape: _Optional[_Iterable[int]] = ..., dtype: _Optional[str] = ..., same_as: _Optional[str] = ...) -> None: ...

class Notice(_message.Message):
    __slots__ = ("epoch", "nodes", "model", "status", "reason", "culprit", "error", "snapshot", "revoked", "stand_ins", "placement", "resharding", "heard", "ruling", "fenced", "first_epoch", "next_boundary", "unchanged")
    class Status(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
        __slots__ = ()
        GATHERING: _ClassVar[Notice.Status]
        TRAINING: _ClassVar[Notice.Status]
        FINISHED: _ClassVar[Notice.Status]
        ABORTED: _ClassVar[Notice.Status]
        STOPPED: _ClassVar[Notice.Status]
    GATHERING: Notice.Status
    TRAINING: Notice.Status
    FINISHED: Notice.Status
    ABORTED: Notice.Status
    STOPPED: Notice.Status
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    NODES_FIELD_NUMBER: _ClassVar[int]
    MODEL_FIELD_NUMBER: _ClassVar[int]
    STATUS_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    CULPRIT_FIELD_NUMBER: _ClassVar[int]
    ERROR_FIELD_NUMBER: _ClassVar[int]
    SNAPSHOT_FIELD_NUMBER: _ClassVar[int]
    REVOKED_FIELD_NUMBER: _ClassVar[int]
    STAND_INS_FIELD_NUMBER: _ClassVar[int]
    PLACEMENT_FIELD_NUMBER: _ClassVar[int]
    RESHARDING_FIELD_NUMBER: _ClassVar[int]
    HEARD_FIELD_NUMBER: _ClassVar[int]
    RULING_FIELD_NUMBER: _ClassVar[int]
    FENCED_FIELD_NUMBER: _ClassVar[int]
    FIRST_EPOCH_FIELD_NUMBER: _ClassVar[int]
    NEXT_BOUNDARY_FIELD_NUMBER: _ClassVar[int]
    UNCHANGED_FIELD_NUMBER: _ClassVar[int]
    epoch: int
    nodes: _containers.RepeatedCompositeFieldContainer[Node]
    model: ModelSpec
    status: Notice.Status
    reason: str
    culprit: str
    error: str
    snapshot: Snapshot
    revoked: _containers.RepeatedScalarFieldContainer[bytes]
    stand_ins: _containers.RepeatedCompositeFieldContainer[StandIn]
    placement: Placement
    resharding: Resharding
    heard: int
    ruling: int
    fenced: _containers.RepeatedCompositeFieldContainer[Fenced]
    first_epoch: int
    next_boundary: int
    unchanged: bool
    def __init__(self, epoch: _Optional[int] = ..., nodes: _Optional[_Iterable[_Union[Node, _Mapping]]] = ..., model: _Optional[_Union[ModelSpec, _Mapping]] = ..., status: _Optional[_Union[Notice.Status, str]] = ..., reason: _Optional[str] = ..., culprit: _Optional[str] = ..., error: _Optional[str] = ..., snapshot: _Optional[_Union[Snapshot, _Mapping]] = ..., revoked: _Optional[_Iterable[bytes]] = ..., stand_ins: _Optional[_Iterable[_Union[StandIn, _Mapping]]] = ..., placement: _Optional[_Union[Placement, _Mapping]] = ..., resharding: _Optional[_Union[Resharding, _Mapping]] = ..., heard: _Optional[int] = ..., ruling: _Optional[int] = ..., fenced: _Optional[_Iterable[_Union[Fenced, _Mapping]]] = ..., first_epoch: _Optional[int] = ..., next_boundary: _Optional[int] = ..., unchanged: bool = ...) -> None: ...

class Fenced(_message.Message):
    __slots__ = ("sender", "incarnation", "redos")
    SENDER_FIELD_NUMBER: _ClassVar[int]
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    REDOS_FIELD_NUMBER: _ClassVar[int]
    sender: str
    incarnation: int
    redos: _containers.RepeatedCompositeFieldContainer[Redo]
    def __init__(self, sender: _Optional[str] = ..., incarnation: _Optional[int] = ..., redos: _Optional[_Iterable[_Union[Redo, _Mapping]]] = ...) -> None: ...

class Redo(_message.Message):
    __slots__ = ("sequence", "substitute", "batches")
    SEQUENCE_FIELD_NUMBER: _ClassVar[int]
    SUBSTITUTE_FIELD_NUMBER: _ClassVar[int]
    BATCHES_FIELD_NUMBER: _ClassVar[int]
    sequence: int
    substitute: str
    batches: _containers.RepeatedCompositeFieldContainer[Receipt]
    def __init__(self, sequence: _Optional[int] = ..., substitute: _Optional[str] = ..., batches: _Optional[_Iterable[_Union[Receipt, _Mapping]]] = ...) -> None: ...

class StandIn(_message.Message):
    __slots__ = ("rank", "worker", "newcomer")
    RANK_FIELD_NUMBER: _ClassVar[int]
    WORKER_FIELD_NUMBER: _ClassVar[int]
    NEWCOMER_FIELD_NUMBER: _ClassVar[int]
    rank: int
    worker: str
    newcomer: int
    def __init__(self, rank: _Optional[int] = ..., worker: _Optional[str] = ..., newcomer: _Optional[int] = ...) -> None: ...

class HandOver(_message.Message):
    __slots__ = ("rank", "round", "newcomer")
    RANK_FIELD_NUMBER: _ClassVar[int]
    ROUND_FIELD_NUMBER: _ClassVar[int]
    NEWCOMER_FIELD_NUMBER: _ClassVar[int]
    rank: int
    round: int
    newcomer: int
    def __init__(self, rank: _Optional[int] = ..., round: _Optional[int] = ..., newcomer: _Optional[int] = ...) -> None: ...

class Snapshot(_message.Message):
    __slots__ = ("number", "stage", "stop_at", "places", "last", "ends", "holders")
    class Stage(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
        __slots__ = ()
        PAUSE: _ClassVar[Snapshot.Stage]
        STOP: _ClassVar[Snapshot.Stage]
        SNAPSHOT: _ClassVar[Snapshot.Stage]
        WRITE: _ClassVar[Snapshot.Stage]
        ENDED: _ClassVar[Snapshot.Stage]
    PAUSE: Snapshot.Stage
    STOP: Snapshot.Stage
    SNAPSHOT: Snapshot.Stage
    WRITE: Snapshot.Stage
    ENDED: Snapshot.Stage
    class StopAtEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: int
        def __init__(self, key: _Optional[str] = ..., value: _Optional[int] = ...) -> None: ...
    NUMBER_FIELD_NUMBER: _ClassVar[int]
    STAGE_FIELD_NUMBER: _ClassVar[int]
    STOP_AT_FIELD_NUMBER: _ClassVar[int]
    PLACES_FIELD_NUMBER: _ClassVar[int]
    LAST_FIELD_NUMBER: _ClassVar[int]
    ENDS_FIELD_NUMBER: _ClassVar[int]
    HOLDERS_FIELD_NUMBER: _ClassVar[int]
    number: int
    stage: Snapshot.Stage
    stop_at: _containers.ScalarMap[str, int]
    places: _containers.RepeatedCompositeFieldContainer[Place]
    last: bool
    ends: bool
    holders: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, number: _Optional[int] = ..., stage: _Optional[_Union[Snapshot.Stage, str]] = ..., stop_at: _Optional[_Mapping[str, int]] = ..., places: _Optional[_Iterable[_Union[Place, _Mapping]]] = ..., last: bool = ..., ends: bool = ..., holders: _Optional[_Iterable[str]] = ...) -> None: ...

class Place(_message.Message):
    __slots__ = ("vector", "path", "offset_bytes")
    VECTOR_FIELD_NUMBER: _ClassVar[int]
    PATH_FIELD_NUMBER: _ClassVar[int]
    OFFSET_BYTES_FIELD_NUMBER: _ClassVar[int]
    vector: str
    path: str
    offset_bytes: int
    def __init__(self, vector: _Optional[str] = ..., path: _Optional[str] = ..., offset_bytes: _Optional[int] = ...) -> None: ...

class SnapshotReport(_message.Message):
    __slots__ = ("number", "kind", "count", "versions", "sums", "error", "procedures")
    class Kind(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
        __slots__ = ()
        BEGUN: _ClassVar[SnapshotReport.Kind]
        REACHED: _ClassVar[SnapshotReport.Kind]
        HELD: _ClassVar[SnapshotReport.Kind]
        WRITTEN: _ClassVar[SnapshotReport.Kind]
        FAILED: _ClassVar[SnapshotReport.Kind]
    BEGUN: SnapshotReport.Kind
    REACHED: SnapshotReport.Kind
    HELD: SnapshotReport.Kind
    WRITTEN: SnapshotReport.Kind
    FAILED: SnapshotReport.Kind
    NUMBER_FIELD_NUMBER: _ClassVar[int]
    KIND_FIELD_NUMBER: _ClassVar[int]
    COUNT_FIELD_NUMBER: _ClassVar[int]
    VERSIONS_FIELD_NUMBER: _ClassVar[int]
    SUMS_FIELD_NUMBER: _ClassVar[int]
    ERROR_FIELD_NUMBER: _ClassVar[int]
    PROCEDURES_FIELD_NUMBER: _ClassVar[int]
    number: int
    kind: SnapshotReport.Kind
    count: int
    versions: _containers.RepeatedScalarFieldContainer[int]
    sums: _containers.RepeatedScalarFieldContainer[int]
    error: str
    procedures: _containers.RepeatedCompositeFieldContainer[Procedure]
    def __init__(self, number: _Optional[int] = ..., kind: _Optional[_Union[SnapshotReport.Kind, str]] = ..., count: _Optional[int] = ..., versions: _Optional[_Iterable[int]] = ..., sums: _Optional[_Iterable[int]] = ..., error: _Optional[str] = ..., procedures: _Optional[_Iterable[_Union[Procedure, _Mapping]]] = ...) -> None: ...

class Beat(_message.Message):
    __slots__ = ("events", "receipts", "finished", "failure", "relies", "number", "leaves", "reports")
    EVENTS_FIELD_NUMBER: _ClassVar[int]
    RECEIPTS_FIELD_NUMBER: _ClassVar[int]
    FINISHED_FIELD_NUMBER: _ClassVar[int]
    FAILURE_FIELD_NUMBER: _ClassVar[int]
    RELIES_FIELD_NUMBER: _ClassVar[int]
    NUMBER_FIELD_NUMBER: _ClassVar[int]
    LEAVES_FIELD_NUMBER: _ClassVar[int]
    REPORTS_FIELD_NUMBER: _ClassVar[int]
    events: bytes
    receipts: _containers.RepeatedCompositeFieldContainer[Receipt]
    finished: bool
    failure: Failure
    relies: bool
    number: int
    leaves: bool
    reports: _containers.RepeatedCompositeFieldContainer[BeatReport]
    def __init__(self, events: _Optional[bytes] = ..., receipts: _Optional[_Iterable[_Union[Receipt, _Mapping]]] = ..., finished: bool = ..., failure: _Optional[_Union[Failure, _Mapping]] = ..., relies: bool = ..., number: _Optional[int] = ..., leaves: bool = ..., reports: _Optional[_Iterable[_Union[BeatReport, _Mapping]]] = ...) -> None: ...

class BeatReport(_message.Message):
    __slots__ = ("snapshot", "refused", "sound", "handed", "decision", "orphaned", "redone", "broken", "resharded", "backed_up", "shared", "contained")
    SNAPSHOT_FIELD_NUMBER: _ClassVar[int]
    REFUSED_FIELD_NUMBER: _ClassVar[int]
    SOUND_FIELD_NUMBER: _ClassVar[int]
    HANDED_FIELD_NUMBER: _ClassVar[int]
    DECISION_FIELD_NUMBER: _ClassVar[int]
    ORPHANED_FIELD_NUMBER: _ClassVar[int]
    REDONE_FIELD_NUMBER: _ClassVar[int]
    BROKEN_FIELD_NUMBER: _ClassVar[int]
    RESHARDED_FIELD_NUMBER: _ClassVar[int]
    BACKED_UP_FIELD_NUMBER: _ClassVar[int]
    SHARED_FIELD_NUMBER: _ClassVar[int]
    CONTAINED_FIELD_NUMBER: _ClassVar[int]
    snapshot: SnapshotReport
    refused: Refused
    sound: bool
    handed: HandOver
    decision: Decision
    orphaned: SenderPushes
    redone: Redone
    broken: int
    resharded: Resharded
    backed_up: int
    shared: int
    contained: SenderPushes
    def __init__(self, snapshot: _Optional[_Union[SnapshotReport, _Mapping]] = ..., refused: _Optional[_Union[Refused, _Mapping]] = ..., sound: bool = ..., handed: _Optional[_Union[HandOver, _Mapping]] = ..., decision: _Optional[_Union[Decision, _Mapping]] = ..., orphaned: _Optional[_Union[SenderPushes, _Mapping]] = ..., redone: _Optional[_Union[Redone, _Mapping]] = ..., broken: _Optional[int] = ..., resharded: _Optional[_Union[Resharded, _Mapping]] = ..., backed_up: _Optional[int] = ..., shared: _Optional[int] = ..., contained: _Optional[_Union[SenderPushes, _Mapping]] = ...) -> None: ...

class SenderPushes(_message.Message):
    __slots__ = ("sender", "incarnation", "chunks", "pushes", "gradients")
    SENDER_FIELD_NUMBER: _ClassVar[int]
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    CHUNKS_FIELD_NUMBER: _ClassVar[int]
    PUSHES_FIELD_NUMBER: _ClassVar[int]
    GRADIENTS_FIELD_NUMBER: _ClassVar[int]
    sender: str
    incarnation: int
    chunks: int
    pushes: _containers.RepeatedCompositeFieldContainer[KeptPush]
    gradients: int
    def __init__(self, sender: _Optional[str] = ..., incarnation: _Optional[int] = ..., chunks: _Optional[int] = ..., pushes: _Optional[_Iterable[_Union[KeptPush, _Mapping]]] = ..., gradients: _Optional[int] = ...) -> None: ...

class KeptPush(_message.Message):
    __slots__ = ("sequence", "batches", "applied")
    SEQUENCE_FIELD_NUMBER: _ClassVar[int]
    BATCHES_FIELD_NUMBER: _ClassVar[int]
    APPLIED_FIELD_NUMBER: _ClassVar[int]
    sequence: int
    batches: _containers.RepeatedCompositeFieldContainer[Receipt]
    applied: int
    def __init__(self, sequence: _Optional[int] = ..., batches: _Optional[_Iterable[_Union[Receipt, _Mapping]]] = ..., applied: _Optional[int] = ...) -> None: ...

class Redone(_message.Message):
    __slots__ = ("sender", "incarnation", "sequence")
    SENDER_FIELD_NUMBER: _ClassVar[int]
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    SEQUENCE_FIELD_NUMBER: _ClassVar[int]
    sender: str
    incarnation: int
    sequence: int
    def __init__(self, sender: _Optional[str] = ..., incarnation: _Optional[int] = ..., sequence: _Optional[int] = ...) -> None: ...

class Refused(_message.Message):
    __slots__ = ("batch", "samples", "step", "what", "in_a_row")
    BATCH_FIELD_NUMBER: _ClassVar[int]
    SAMPLES_FIELD_NUMBER: _ClassVar[int]
    STEP_FIELD_NUMBER: _ClassVar[int]
    WHAT_FIELD_NUMBER: _ClassVar[int]
    IN_A_ROW_FIELD_NUMBER: _ClassVar[int]
    batch: Receipt
    samples: int
    step: int
    what: str
    in_a_row: int
    def __init__(self, batch: _Optional[_Union[Receipt, _Mapping]] = ..., samples: _Optional[int] = ..., step: _Optional[int] = ..., what: _Optional[str] = ..., in_a_row: _Optional[int] = ...) -> None: ...

class Resume(_message.Message):
    __slots__ = ("attempt",)
    ATTEMPT_FIELD_NUMBER: _ClassVar[int]
    attempt: int
    def __init__(self, attempt: _Optional[int] = ...) -> None: ...

class Keep(_message.Message):
    __slots__ = ("path",)
    PATH_FIELD_NUMBER: _ClassVar[int]
    path: str
    def __init__(self, path: _Optional[str] = ...) -> None: ...

class Part(_message.Message):
    __slots__ = ("offset_bytes", "data")
    OFFSET_BYTES_FIELD_NUMBER: _ClassVar[int]
    DATA_FIELD_NUMBER: _ClassVar[int]
    offset_bytes: int
    data: bytes
    def __init__(self, offset_bytes: _Optional[int] = ..., data: _Optional[bytes] = ...) -> None: ...

class Kept(_message.Message):
    __slots__ = ("path", "offset_bytes", "size_bytes")
    PATH_FIELD_NUMBER: _ClassVar[int]
    OFFSET_BYTES_FIELD_NUMBER: _ClassVar[int]
    SIZE_BYTES_FIELD_NUMBER: _ClassVar[int]
    path: str
    offset_bytes: int
    size_bytes: int
    def __init__(self, path: _Optional[str] = ..., offset_bytes: _Optional[int] = ..., size_bytes: _Optional[int] = ...) -> None: ...

class Decision(_message.Message):
    __slots__ = ("round", "ranks", "distances")
    ROUND_FIELD_NUMBER: _ClassVar[int]
    RANKS_FIELD_NUMBER: _ClassVar[int]
    DISTANCES_FIELD_NUMBER: _ClassVar[int]
    round: int
    ranks: _containers.RepeatedScalarFieldContainer[int]
    distances: _containers.RepeatedScalarFieldContainer[float]
    def __init__(self, round: _Optional[int] = ..., ranks: _Optional[_Iterable[int]] = ..., distances: _Optional[_Iterable[float]] = ...) -> None: ...

class Whole(_message.Message):
    __slots__ = ("rank", "round", "distances")
    RANK_FIELD_NUMBER: _ClassVar[int]
    ROUND_FIELD_NUMBER: _ClassVar[int]
    DISTANCES_FIELD_NUMBER: _ClassVar[int]
    rank: int
    round: int
    distances: _containers.RepeatedScalarFieldContainer[float]
    def __init__(self, rank: _Optional[int] = ..., round: _Optional[int] = ..., distances: _Optional[_Iterable[float]] = ...) -> None: ...

class TensorSums(_message.Message):
    __slots__ = ("step", "tensors", "sums")
    STEP_FIELD_NUMBER: _ClassVar[int]
    TENSORS_FIELD_NUMBER: _ClassVar[int]
    SUMS_FIELD_NUMBER: _ClassVar[int]
    step: int
    tensors: _containers.RepeatedScalarFieldContainer[int]
    sums: _containers.RepeatedScalarFieldContainer[float]
    def __init__(self, step: _Optional[int] = ..., tensors: _Optional[_Iterable[int]] = ..., sums: _Optional[_Iterable[float]] = ...) -> None: ...

class Receipt(_message.Message):
    __slots__ = ("epoch", "partition", "batch", "more")
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    PARTITION_FIELD_NUMBER: _ClassVar[int]
    BATCH_FIELD_NUMBER: _ClassVar[int]
    MORE_FIELD_NUMBER: _ClassVar[int]
    epoch: int
    partition: int
    batch: int
    more: int
    def __init__(self, epoch: _Optional[int] = ..., partition: _Optional[int] = ..., batch: _Optional[int] = ..., more: _Optional[int] = ...) -> None: ...

class Failure(_message.Message):
    __slots__ = ("error", "message", "traceback", "culprit")
    ERROR_FIELD_NUMBER: _ClassVar[int]
    MESSAGE_FIELD_NUMBER: _ClassVar[int]
    TRACEBACK_FIELD_NUMBER: _ClassVar[int]
    CULPRIT_FIELD_NUMBER: _ClassVar[int]
    error: str
    message: str
    traceback: str
    culprit: str
    def __init__(self, error: _Optional[str] = ..., message: _Optional[str] = ..., traceback: _Optional[str] = ..., culprit: _Optional[str] = ...) -> None: ...

class Ask(_message.Message):
    __slots__ = ("number", "wait", "in_hand", "rounds", "samples", "seconds", "squares")
    NUMBER_FIELD_NUMBER: _ClassVar[int]
    WAIT_FIELD_NUMBER: _ClassVar[int]
    IN_HAND_FIELD_NUMBER: _ClassVar[int]
    ROUNDS_FIELD_NUMBER: _ClassVar[int]
    SAMPLES_FIELD_NUMBER: _ClassVar[int]
    SECONDS_FIELD_NUMBER: _ClassVar[int]
    SQUARES_FIELD_NUMBER: _ClassVar[int]
    number: int
    wait: bool
    in_hand: int
    rounds: float
    samples: float
    seconds: float
    squares: float
    def __init__(self, number: _Optional[int] = ..., wait: bool = ..., in_hand: _Optional[int] = ..., rounds: _Optional[float] = ..., samples: _Optional[float] = ..., seconds: _Optional[float] = ..., squares: _Optional[float] = ...) -> None: ...

class Assigned(_message.Message):
    __slots__ = ("batches", "complete")
    BATCHES_FIELD_NUMBER: _ClassVar[int]
    COMPLETE_FIELD_NUMBER: _ClassVar[int]
    batches: _containers.RepeatedCompositeFieldContainer[Receipt]
    complete: bool
    def __init__(self, batches: _Optional[_Iterable[_Union[Receipt, _Mapping]]] = ..., complete: bool = ...) -> None: ...

class Hello(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class Welcome(_message.Message):
    __slots__ = ("software", "state", "clock_s")
    SOFTWARE_FIELD_NUMBER: _ClassVar[int]
    STATE_FIELD_NUMBER: _ClassVar[int]
    CLOCK_S_FIELD_NUMBER: _ClassVar[int]
    software: str
    state: str
    clock_s: float
    def __init__(self, software: _Optional[str] = ..., state: _Optional[str] = ..., clock_s: _Optional[float] = ...) -> None: ...

class Measure(_message.Message):
    __slots__ = ("chunks",)
    CHUNKS_FIELD_NUMBER: _ClassVar[int]
    chunks: int
    def __init__(self, chunks: _Optional[int] = ...) -> None: ...

class Measured(_message.Message):
    __slots__ = ("received_bytes", "facts")
    class FactsEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: str
        def __init__(self, key: _Optional[str] = ..., value: _Optional[str] = ...) -> None: ...
    RECEIVED_BYTES_FIELD_NUMBER: _ClassVar[int]
    FACTS_FIELD_NUMBER: _ClassVar[int]
    received_bytes: int
    facts: _containers.ScalarMap[str, str]
    def __init__(self, received_bytes: _Optional[int] = ..., facts: _Optional[_Mapping[str, str]] = ...) -> None: ...

class Enrol(_message.Message):
    __slots__ = ("machine", "facts", "request", "cores", "address", "memory_bytes")
    class FactsEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: str
        def __init__(self, key: _Optional[str] = ..., value: _Optional[str] = ...) -> None: ...
    MACHINE_FIELD_NUMBER: _ClassVar[int]
    FACTS_FIELD_NUMBER: _ClassVar[int]
    REQUEST_FIELD_NUMBER: _ClassVar[int]
    CORES_FIELD_NUMBER: _ClassVar[int]
    ADDRESS_FIELD_NUMBER: _ClassVar[int]
    MEMORY_BYTES_FIELD_NUMBER: _ClassVar[int]
    machine: str
    facts: _containers.ScalarMap[str, str]
    request: bytes
    cores: int
    address: str
    memory_bytes: int
    def __init__(self, machine: _Optional[str] = ..., facts: _Optional[_Mapping[str, str]] = ..., request: _Optional[bytes] = ..., cores: _Optional[int] = ..., address: _Optional[str] = ..., memory_bytes: _Optional[int] = ...) -> None: ...

class Order(_message.Message):
    __slots__ = ("grant", "go", "over", "age_ns")
    GRANT_FIELD_NUMBER: _ClassVar[int]
    GO_FIELD_NUMBER: _ClassVar[int]
    OVER_FIELD_NUMBER: _ClassVar[int]
    AGE_NS_FIELD_NUMBER: _ClassVar[int]
    grant: Grant
    go: Go
    over: Over
    age_ns: int
    def __init__(self, grant: _Optional[_Union[Grant, _Mapping]] = ..., go: _Optional[_Union[Go, _Mapping]] = ..., over: _Optional[_Union[Over, _Mapping]] = ..., age_ns: _Optional[int] = ...) -> None: ...

class Grant(_message.Message):
    __slots__ = ("spec", "nodes", "files", "waiting", "machine")
    class FilesEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: str
        def __init__(self, key: _Optional[str] = ..., value: _Optional[str] = ...) -> None: ...
    SPEC_FIELD_NUMBER: _ClassVar[int]
    NODES_FIELD_NUMBER: _ClassVar[int]
    FILES_FIELD_NUMBER: _ClassVar[int]
    WAITING_FIELD_NUMBER: _ClassVar[int]
    MACHINE_FIELD_NUMBER: _ClassVar[int]
    spec: str
    nodes: _containers.RepeatedCompositeFieldContainer[Certified]
    files: _containers.ScalarMap[str, str]
    waiting: str
    machine: str
    def __init__(self, spec: _Optional[str] = ..., nodes: _Optional[_Iterable[_Union[Certified, _Mapping]]] = ..., files: _Optional[_Mapping[str, str]] = ..., waiting: _Optional[str] = ..., machine: _Optional[str] = ...) -> None: ...

class Certified(_message.Message):
    __slots__ = ("name", "certificate", "port")
    NAME_FIELD_NUMBER: _ClassVar[int]
    CERTIFICATE_FIELD_NUMBER: _ClassVar[int]
    PORT_FIELD_NUMBER: _ClassVar[int]
    name: str
    certificate: bytes
    port: int
    def __init__(self, name: _Optional[str] = ..., certificate: _Optional[bytes] = ..., port: _Optional[int] = ...) -> None: ...

class Go(_message.Message):
    __slots__ = ("port", "again")
    PORT_FIELD_NUMBER: _ClassVar[int]
    AGAIN_FIELD_NUMBER: _ClassVar[int]
    port: int
    again: Certified
    def __init__(self, port: _Optional[int] = ..., again: _Optional[_Union[Certified, _Mapping]] = ...) -> None: ...

class Over(_message.Message):
    __slots__ = ("status", "message")
    STATUS_FIELD_NUMBER: _ClassVar[int]
    MESSAGE_FIELD_NUMBER: _ClassVar[int]
    status: int
    message: str
    def __init__(self, status: _Optional[int] = ..., message: _Optional[str] = ...) -> None: ...

class Report(_message.Message):
    __slots__ = ("who", "status", "error", "message", "traceback")
    WHO_FIELD_NUMBER: _ClassVar[int]
    STATUS_FIELD_NUMBER: _ClassVar[int]
    ERROR_FIELD_NUMBER: _ClassVar[int]
    MESSAGE_FIELD_NUMBER: _ClassVar[int]
    TRACEBACK_FIELD_NUMBER: _ClassVar[int]
    who: str
    status: int
    error: str
    message: str
    traceback: str
    def __init__(self, who: _Optional[str] = ..., status: _Optional[int] = ..., error: _Optional[str] = ..., message: _Optional[str] = ..., traceback: _Optional[str] = ...) -> None: ...

class Ending(_message.Message):
    __slots__ = ("batches", "samples", "round", "left", "contributed", "own_data")
    class LeftEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: int
        value: int
        def __init__(self, key: _Optional[int] = ..., value: _Optional[int] = ...) -> None: ...
    class ContributedEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: int
        value: int
        def __init__(self, key: _Optional[int] = ..., value: _Optional[int] = ...) -> None: ...
    BATCHES_FIELD_NUMBER: _ClassVar[int]
    SAMPLES_FIELD_NUMBER: _ClassVar[int]
    ROUND_FIELD_NUMBER: _ClassVar[int]
    LEFT_FIELD_NUMBER: _ClassVar[int]
    CONTRIBUTED_FIELD_NUMBER: _ClassVar[int]
    OWN_DATA_FIELD_NUMBER: _ClassVar[int]
    batches: int
    samples: int
    round: int
    left: _containers.ScalarMap[int, int]
    contributed: _containers.ScalarMap[int, int]
    own_data: bool
    def __init__(self, batches: _Optional[int] = ..., samples: _Optional[int] = ..., round: _Optional[int] = ..., left: _Optional[_Mapping[int, int]] = ..., contributed: _Optional[_Mapping[int, int]] = ..., own_data: bool = ...) -> None: ...

class Ended(_message.Message):
    __slots__ = ("over",)
    OVER_FIELD_NUMBER: _ClassVar[int]
    over: bool
    def __init__(self, over: bool = ...) -> None: ...

class Draw(_message.Message):
    __slots__ = ("loader", "epoch", "total", "ended", "wanted", "oldest", "last", "unclear", "uses", "number")
    LOADER_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    TOTAL_FIELD_NUMBER: _ClassVar[int]
    ENDED_FIELD_NUMBER: _ClassVar[int]
    WANTED_FIELD_NUMBER: _ClassVar[int]
    OLDEST_FIELD_NUMBER: _ClassVar[int]
    LAST_FIELD_NUMBER: _ClassVar[int]
    UNCLEAR_FIELD_NUMBER: _ClassVar[int]
    USES_FIELD_NUMBER: _ClassVar[int]
    NUMBER_FIELD_NUMBER: _ClassVar[int]
    loader: int
    epoch: int
    total: int
    ended: bool
    wanted: int
    oldest: int
    last: bool
    unclear: bool
    uses: _containers.RepeatedCompositeFieldContainer[Use]
    number: int
    def __init__(self, loader: _Optional[int] = ..., epoch: _Optional[int] = ..., total: _Optional[int] = ..., ended: bool = ..., wanted: _Optional[int] = ..., oldest: _Optional[int] = ..., last: bool = ..., unclear: bool = ..., uses: _Optional[_Iterable[_Union[Use, _Mapping]]] = ..., number: _Optional[int] = ...) -> None: ...

class Use(_message.Message):
    __slots__ = ("epoch", "place", "step", "samples")
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    PLACE_FIELD_NUMBER: _ClassVar[int]
    STEP_FIELD_NUMBER: _ClassVar[int]
    SAMPLES_FIELD_NUMBER: _ClassVar[int]
    epoch: int
    place: int
    step: int
    samples: int
    def __init__(self, epoch: _Optional[int] = ..., place: _Optional[int] = ..., step: _Optional[int] = ..., samples: _Optional[int] = ...) -> None: ...

class Drawn(_message.Message):
    __slots__ = ("places", "rest")
    PLACES_FIELD_NUMBER: _ClassVar[int]
    REST_FIELD_NUMBER: _ClassVar[int]
    places: _containers.RepeatedCompositeFieldContainer[Use]
    rest: int
    def __init__(self, places: _Optional[_Iterable[_Union[Use, _Mapping]]] = ..., rest: _Optional[int] = ...) -> None: ...

class EpochPart(_message.Message):
    __slots__ = ("loader", "epoch", "taken", "done")
    LOADER_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    TAKEN_FIELD_NUMBER: _ClassVar[int]
    DONE_FIELD_NUMBER: _ClassVar[int]
    loader: int
    epoch: int
    taken: int
    done: bool
    def __init__(self, loader: _Optional[int] = ..., epoch: _Optional[int] = ..., taken: _Optional[int] = ..., done: bool = ...) -> None: ...

class EpochGoesOn(_message.Message):
    __slots__ = ("more",)
    MORE_FIELD_NUMBER: _ClassVar[int]
    more: bool
    def __init__(self, more: bool = ...) -> None: ...

class Took(_message.Message):
    __slots__ = ("epoch", "batch", "rounds", "samples", "seconds", "squares")
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    BATCH_FIELD_NUMBER: _ClassVar[int]
    ROUNDS_FIELD_NUMBER: _ClassVar[int]
    SAMPLES_FIELD_NUMBER: _ClassVar[int]
    SECONDS_FIELD_NUMBER: _ClassVar[int]
    SQUARES_FIELD_NUMBER: _ClassVar[int]
    epoch: int
    batch: int
    rounds: float
    samples: float
    seconds: float
    squares: float
    def __init__(self, epoch: _Optional[int] = ..., batch: _Optional[int] = ..., rounds: _Optional[float] = ..., samples: _Optional[float] = ..., seconds: _Optional[float] = ..., squares: _Optional[float] = ...) -> None: ...

class Shares(_message.Message):
    __slots__ = ("samples",)
    SAMPLES_FIELD_NUMBER: _ClassVar[int]
    samples: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, samples: _Optional[_Iterable[int]] = ...) -> None: ...
