"""Tensors and messages between the processes of one replica, over the carriers of their endpoints.

Everything is a tagged tensor (`Endpoint.send`). The sender does not wait until it has arrived: tasks beside it send
messages in order, and each value of the model as soon as it exists.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Awaitable, Callable, Coroutine, Mapping, Sequence
from copy import copy
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch

from gradstream.codec.base import DTYPE, Codec
from gradstream.codec.casts import DTYPES, Cast
from gradstream.errors import ConfigError, DeadlineError, RefusedError, UnknownNameError
from gradstream.memory import Vector
from gradstream.pipeline.executor import TensorTransfer
from gradstream.runtime.base import Runtime, Work, awaited_later
from gradstream.split.part_model import PartModel
from gradstream.split.plan import DATA, SplitPlan, Value
from gradstream.transport.base import Endpoint, Stream
from gradstream.transport.tagged_tensors import PARKED_S
from gradstream.wire import v1
from gradstream.worker.parts.messages import KINDS, MESSAGE_ELEMS, M, Message, decode, encode
from gradstream.worker.parts.sockets import PartSockets

# ---- value forms -------------------------------------------------------------------------
# The form in which values of the model travel between parts: which may be encoded, and elements that carriers know.

_AS = {8: torch.float64, 4: torch.float32}  # carriers know these; a view of the same bytes


@dataclass(frozen=True, slots=True)
class TransferForm:
    """How a tensor travels between two parts.

    Args:
        tag: tells it from others.
        shape, dtype: of the tensor.
        codec: encodes it; None sends it as it is.
        what: its name, for messages.
    """

    tag: int
    shape: tuple[int, ...]
    dtype: torch.dtype
    codec: Codec | None
    what: str

    @property
    def size_bytes(self) -> int:
        """Number of bytes that travel."""
        if self.codec is None:
            return sent_bytes(self.shape, self.dtype)
        return -(-self.codec.encoded_bytes(math.prod(self.shape)) // 4) * 4


def check_encodable(plan: SplitPlan, dtype: str | None) -> None:
    """Raises UnknownNameError or ConfigError if activations of a plan cannot travel in this dtype."""
    if dtype is None:
        return
    if dtype not in DTYPES:
        raise UnknownNameError("pipeline_dtype", str(dtype), [*DTYPES])
    crossing = [value for value, _ in plan.crossings()]
    if not any(map(is_encodable, crossing)):
        kinds = ", ".join(sorted({str(value.dtype) for value in crossing if value.source != DATA}))
        raise ConfigError(
            f"pipeline_dtype={dtype!r}: what parts send each other is {kinds or 'no activations'}, and only "
            f"{DTYPE} is sent in another dtype; leave it out"
        )


def is_encodable(value: Value) -> bool:
    """Whether a value is an activation of the dtype that codecs know."""
    return value.source != DATA and value.per_sample and value.dtype == DTYPE


def sent_bytes(shape: Sequence[int], dtype: torch.dtype) -> int:
    """Number of bytes of `as_sent`."""
    return math.prod(shape) * (dtype.itemsize if dtype.itemsize in _AS else 4)


def as_sent(tensor: torch.Tensor) -> torch.Tensor:
    """The elements as carriers know them: a view of the same bytes; as numbers of 4 bytes where they are smaller."""
    flat = tensor.detach().contiguous().view(-1)
    if flat.element_size() not in _AS:
        flat = flat.to(_wide(tensor.dtype))
    return flat.view(_AS[flat.element_size()])


def as_it_was(flat: torch.Tensor, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """The tensor of which `as_sent` has made these elements."""
    wide = flat.view(dtype if dtype.itemsize in _AS else _wide(dtype))
    return wide.to(dtype).view(shape)


def encoded(codec: Codec, tensor: torch.Tensor) -> torch.Tensor:
    """The encoded tensor as elements that carriers know, the last of them filled up with zeros."""
    size = codec.encoded_bytes(tensor.numel())
    result = torch.empty(-(-size // 4), dtype=torch.float32)
    room = result.view(torch.uint8)
    room[size:].zero_()
    codec.encode(tensor.reshape(-1), room[:size])
    return result


def decoded(codec: Codec, came: torch.Tensor, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """The tensor of which `encoded` has made these elements."""
    result = torch.empty(shape, dtype=dtype)
    size = codec.encoded_bytes(result.numel())
    codec.decode(came.view(torch.uint8)[:size], result.view(-1))
    return result


def _wide(dtype: torch.dtype) -> torch.dtype:
    """A dtype of 4 bytes that holds every number of a smaller one. Raises ConfigError for a larger one."""
    if dtype.itemsize > max(_AS):
        raise ConfigError(f"a value of {dtype} crosses a cut; expected elements of at most {max(_AS)} bytes")
    return torch.float32 if dtype.is_floating_point else torch.int32


# ---- channel -----------------------------------------------------------------------------

NEWS_S, RETRY_S = 60.0, 0.01
"""Seconds in which the coordinator's news reach every process, at most, and between two tries until then."""

VECTORS, VALUES = len(KINDS), len(KINDS) + 1
"""Tags, behind those of messages; those from VALUES on are of the model's values."""

BRIEF_ELEMS = 1 << 17
"""So many elements are encoded without a change of thread."""


class PartChannel:
    """The channel of one process of a replica. Implements `pipeline.executor.TensorChannel`.

    Args:
        runtime, endpoint: of the process.
        names: node names of the replica's processes, by part.
        model: this part's model, whose plan determines the size of every value.
        failed: called with the error of something that could not be sent.
        silence_s: a part that gives no answer to a question for this long, in seconds, counts as lost. It may compute
            for any time.
        most_samples: number of samples that a micro-batch has at most; 0 lets all values go by streams.

    Attributes:
        sizes: number of samples of each micro-batch: of those of the current minibatch, or of several minibatches.
        sockets: to the other parts, for a thread that computes; None if values go by streams.
    """

    def __init__(
        self,
        runtime: Runtime,
        endpoint: Endpoint,
        names: list[str],
        model: PartModel,
        failed: Callable[[Exception], Awaitable[None]],
        silence_s: float,
        most_samples: int = 0,
    ) -> None:
        self._runtime = runtime
        self._endpoint = endpoint
        self._names = names
        self.sizes: Sequence[int] | Mapping[int, int] = ()
        self._failed = failed
        self._model = model
        self.silence_s = silence_s
        endpoint.serve_tensors()
        endpoint.serve("alive", _answer, model=False)
        self._codec: Codec | None = None
        self._beside = False
        self._last: dict[
            tuple[int, int], asyncio.Task[None]
        ] = {}  # by part and tag, what sends the last message
        self._hearing: list[asyncio.Task[None]] = []
        self._most_samples = most_samples
        self.sockets: PartSockets | None = None
        if most_samples:
            self.sockets = PartSockets(runtime, endpoint, names, model.part, self._room)

    @cached_property
    def _values(self) -> Mapping[str, tuple[int, Value]]:
        return {value.name: (number, value) for number, value in enumerate(self._model.plan.values)}

    # ---- values of the model --------------------------------------------------------------

    def encoded(self, dtype: str | None) -> PartChannel:
        """The same channel, which sends and receives activations and their gradients in another dtype.

        Inputs, targets and parameters that cross a cut stay as they are.

        Args:
            dtype: one of `codec.casts.DTYPES`; None is their own.

        Raises:
            ConfigError: see `check_encodable`.
        """
        check_encodable(self._model.plan, dtype)
        channel = copy(self)
        channel._codec = None if dtype is None else Cast(dtype)
        return channel

    def beside(self) -> PartChannel:
        """The same channel for values of other gradients, which are computed at the same time.

        It has no sockets: two parts whose threads wait for each other's values of different gradients wait forever.
        """
        channel = copy(self)
        channel._beside, channel.sockets = True, None
        return channel

    def form(self, transfer: TensorTransfer) -> TransferForm:
        """How a value, or the gradient of one, travels."""
        number, value = self._values[transfer.value]
        samples = self.sizes[transfer.micro_batch] if transfer.samples is None else transfer.samples
        place = transfer.micro_batch * len(self._values) + number
        return TransferForm(
            tag=VALUES + 4 * place + 2 * transfer.gradient + self._beside,
            shape=value.shape_of(samples),
            dtype=value.dtype,
            codec=self._codec if is_encodable(value) else None,
            what=f"{'the gradient of ' * transfer.gradient}{transfer.value}, micro-batch {transfer.micro_batch}",
        )

    def _room(self, tag: int) -> int:
        """Number of bytes of the largest value that may come under a tag; 0 if there is none."""
        if tag < VALUES:
            return 0
        value = self._model.plan.values[(tag - VALUES) // 4 % len(self._values)]
        return sent_bytes(value.shape_of(self._most_samples), value.dtype)

    async def send(self, transfer: TensorTransfer, tensor: torch.Tensor) -> None:
        """Begins to send a value, or the gradient of one, to another part. The tensor must not change any more."""
        form = self.form(transfer)

        async def sending() -> None:
            codec, sent = form.codec, tensor
            if codec is not None:
                sent = await self._code(lambda: encoded(codec, tensor), tensor.numel())
            await self._send(transfer.target, form.tag, sent)

        self._spawn(sending(), f"{transfer.value}-{transfer.micro_batch}")

    async def receive(self, transfer: TensorTransfer) -> torch.Tensor:
        """Receives a value, or the gradient of one, whose shape and dtype the plan says."""
        form = self.form(transfer)
        codec, shape, dtype = form.codec, form.shape, form.dtype
        if codec is None:
            return await self._receive(transfer.source, form.tag, shape, dtype, form.what)
        size = codec.encoded_bytes(math.prod(shape))
        came = await self._receive(transfer.source, form.tag, (-(-size // 4),), torch.float32, form.what)
        return await self._code(lambda: decoded(codec, came, shape, dtype), math.prod(shape))

    async def _code(self, fn: Callable[[], torch.Tensor], elems: int) -> torch.Tensor:
        work = Work("copy", elems=elems, brief=elems < BRIEF_ELEMS)
        return await self._runtime.compute(lambda _: fn(), work=work, lane="exchange")

    # ---- messages -------------------------------------------------------------------------

    def say(self, part: int, message: Message) -> None:
        """Sends a message to a part, after those of its kind before it."""
        tag = KINDS.index(type(message))
        before = self._last.get((part, tag))

        async def in_order() -> None:
            if before is not None:
                await asyncio.shield(before)
            await self._send(part, tag, encode(message))

        self._last[part, tag] = self._spawn(in_order(), f"message-{part}")

    def follow(self, part: int, kind: type[M], heard: Callable[[M], None]) -> None:
        """Calls `heard` with each message of this kind from a part, until `close`."""

        async def keep_hearing() -> None:
            while True:
                heard(await self.hear(part, kind))

        self._hearing.append(self._spawn(keep_hearing(), f"hears-{part}"))

    def close(self) -> None:
        """Hears no messages any more, and closes the sockets. Idempotent."""
        if self.sockets is not None:
            self.sockets.close()
        for task in self._hearing:
            task.cancel()

    async def hear(self, part: int, kind: type[M]) -> M:
        """The next message of this kind from a part."""
        tag, what = KINDS.index(kind), f"its next {kind.__name__}"
        return decode(kind, await self._receive(part, tag, (MESSAGE_ELEMS,), torch.float64, what))

    # ---- vectors --------------------------------------------------------------------------

    async def give(self, part: int, vector: torch.Tensor) -> None:
        """Sends a piece of a vector to a part. Returns when it is there."""
        await self._send(part, VECTORS, vector)

    async def take(self, part: int, elems: int, dtype: torch.dtype) -> torch.Tensor:
        """Receives a piece of a vector from a part."""
        return await self._receive(part, VECTORS, (elems,), dtype, "a vector")

    async def agree(self, mine: bool) -> bool:
        """Whether all parts say yes. All call it at once."""
        others = [part for part in range(len(self._names)) if part != self._model.part]
        give = [self.give(part, torch.tensor([float(mine)])) for part in others]
        take = [self.take(part, 1, torch.float32) for part in others]
        found: list[Any] = await self._runtime.gather(*take, *give)
        return mine and all(map(bool, found[: len(take)]))

    async def give_outputs(self, result: Mapping[str, torch.Tensor]) -> None:
        """Sends the worker what `compute_outputs` has found for a batch."""
        await self._send(0, VECTORS, result["outputs"])
        if "loss" in result:
            await self._send(0, VECTORS, result["loss"])

    async def take_outputs(self, part: int, samples: int, *, has_loss: bool) -> Mapping[str, torch.Tensor]:
        """Receives the same."""
        form, dtype = self._model.output, self._model.layout.dtype
        shape = [length * samples if axis == form.axis else length for axis, length in enumerate(form.shape)]
        result = {"outputs": await self._receive(part, VECTORS, tuple(shape), form.dtype, "outputs")}
        if has_loss:
            result["loss"] = await self._receive(part, VECTORS, (), dtype, "a loss")
        return result

    # ---- tensors --------------------------------------------------------------------------

    async def _send(self, part: int, tag: int, tensor: torch.Tensor) -> None:
        flat = as_sent(tensor)
        if not len(flat):
            return
        span, waited_s = Vector("value", flat).all, 0.0
        silence_s = max(self.silence_s, 4 * PARKED_S)
        while True:
            try:
                await self._endpoint.send(self._names[part], tag, span, silence_s=silence_s)
                return
            except RefusedError as error:
                if error.code != "STALE_EPOCH" or waited_s > NEWS_S:
                    raise
            await self._runtime.sleep(
                RETRY_S
            )  # the other part has heard of a newcomer, or of a loss, earlier
            waited_s += RETRY_S

    async def _receive(
        self, part: int, tag: int, shape: tuple[int, ...], dtype: torch.dtype, what: str
    ) -> torch.Tensor:
        flat = as_sent(torch.empty(shape, dtype=dtype))
        came = not len(flat)
        while not came:
            span = Vector("value", flat).all
            try:
                await self._endpoint.recv(self._names[part], tag, span, silence_s=self.silence_s)
                came = True
            except DeadlineError:
                await self.ask(part, what)
        return as_it_was(flat, shape, dtype)

    async def ask(self, part: int, what: str) -> None:
        """Asks a part that this one waits for whether it is there. Raises DeadlineError if it gives no answer."""
        name, silence_s = self._names[part], self.silence_s
        try:
            await self._endpoint.call(name, "alive", v1.Body(), v1.Body, silence_s=silence_s)
        except RefusedError:
            pass  # it is there; whether it is still a member, the coordinator says
        except DeadlineError as error:
            raise DeadlineError(
                name,
                f"gives no answer to {self._runtime.node}, which has waited for {what} for {2 * silence_s:g} s",
            ) from error

    def _spawn(self, work: Coroutine[Any, Any, None], name: str) -> asyncio.Task[None]:
        async def guarded() -> None:
            try:
                await work
            except Exception as error:
                await self._failed(error)

        return awaited_later(self._runtime.spawn(guarded(), name=f"{self._runtime.node}-{name}"))


async def _answer(stream: Stream) -> None:
    """Serves "alive"."""
    await stream.send(v1.Frame(body=v1.Body()))
