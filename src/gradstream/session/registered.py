"""The state of objects of the user's own: schedulers, averages of weights, loss scalers, counters, generators.

    session.register(scheduler=scheduler, ema=ema, scaler=scaler, counts={"seen": 0}, rng=True)

A run keeps the states of such objects and of optimizers in one form, without pickle: tensors and arrays under names,
and everything else as JSON.
"""

from __future__ import annotations

import json
import random
from collections import Counter, OrderedDict, defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Protocol, TypeAlias

import numpy as np
import torch

from gradstream.checkpoint.own_state import EXTRA, PLACES, STATES
from gradstream.errors import ConfigError, DataError
from gradstream.model.buffers import Arrays, arrays_of, set_tensor
from gradstream.untrusted import say

# ---- values ------------------------------------------------------------------------------
# A value of tensors, numbers, text, lists and dicts, as arrays and JSON.

Held: TypeAlias = dict[str, "torch.Tensor | np.ndarray[Any, Any]"]
"""The tensors and arrays of a value, by name. They are the value's own, not copies."""

_SEQUENCES: Mapping[str, type[Any]] = {"list": list, "tuple": tuple, "set": set}
_DICTS: Mapping[str, type[Any]] = {
    "dict": dict,
    "OrderedDict": OrderedDict,
    "Counter": Counter,
    "defaultdict": dict,
}
_EXPECTED = "a tensor, an array, a number, text or None, or a list or dict of these"
_ARRAY_KINDS = "biuf"  # dtypes of numpy that a file can hold


def encode(value: Any, where: str, held: Held, refusal: str) -> Any:
    """The value as JSON. Anything but a plain value becomes a list that begins with its kind.

    Args:
        where: the value's place, for names and messages.
        held: receives the tensors and arrays.
        refusal: the message for a value that cannot be saved, with {where}, {kind} and {expected} in it.

    Raises:
        ConfigError: a value can be saved neither as an array nor as JSON.
    """
    if isinstance(value, np.generic):
        value = value.item()
    if value is None or isinstance(value, str | bool | int | float):
        return value
    name = f"{EXTRA}{where}"
    while name in held:  # keys 1 and "1" have the same name
        name += "'"
    if isinstance(value, torch.Tensor) and not value.is_quantized:
        held[name] = value
        dtype, layout = (str(kind).removeprefix("torch.") for kind in (value.dtype, value.layout))
        return ["tensor", name, dtype, layout, list(value.shape)]
    if type(value) is np.ndarray and value.dtype.kind in _ARRAY_KINDS and value.dtype.itemsize <= 8:
        held[name] = value
        return ["array", name]
    if type(value) in (dict, OrderedDict, defaultdict, Counter):
        pairs = value.items()
        encoded = [
            [encode(k, where, held, refusal), encode(v, f"{where}.{k}", held, refusal)] for k, v in pairs
        ]
        return [type(value).__name__, encoded]
    kind = "tuple" if isinstance(value, torch.Size) else type(value).__name__
    if _SEQUENCES.get(kind) is type(value) or isinstance(value, torch.Size):
        return [kind, [encode(item, f"{where}.{i}", held, refusal) for i, item in enumerate(value)]]
    raise ConfigError(refusal.format(where=where, kind=type(value).__name__, expected=_EXPECTED))


def decode(value: Any, arrays: Mapping[str, np.ndarray[Any, Any]]) -> Any:
    """The value that `encode` has returned as JSON, with its tensors and arrays.

    Raises:
        DataError: the arrays are not those of the value.
    """
    if not isinstance(value, list):
        return value
    kind, *rest = value
    if kind == "tensor":
        name, dtype, layout, shape = rest
        kinds = getattr(torch, dtype), getattr(torch, layout)
        if not isinstance(kinds[0], torch.dtype) or not isinstance(kinds[1], torch.layout):
            raise DataError(f"{name[:80]!r} of the checkpoint is a tensor of an unknown kind, {value[2:4]}")
        tensor = torch.zeros(shape, dtype=kinds[0], layout=kinds[1])
        set_tensor(name, tensor, arrays)
        return tensor
    if kind == "array":
        return np.array(arrays[rest[0]])
    if kind in _DICTS:
        return _DICTS[kind]({decode(key, arrays): decode(item, arrays) for key, item in rest[0]})
    return _SEQUENCES[kind](decode(item, arrays) for item in rest[0])


def packed(plain: Any, name: str, held: Held) -> Arrays:
    """Copies of the tensors and arrays of a value, and its JSON under `name`."""
    arrays: Arrays = {name: np.frombuffer(json.dumps(plain).encode(), np.uint8)}
    for key, one in held.items():
        arrays.update(arrays_of(key, one) if isinstance(one, torch.Tensor) else {key: one.copy()})
    return arrays


def placed(value: Any, before: Any, owner: torch.Tensor | None, on_cpu: str, key: Any = None) -> Any:
    """The value with tensors on the devices of those of `before`, or else of their parameter.

    Args:
        owner: the parameter that the state belongs to, or None.
        on_cpu: key of the tensor that stays in main memory, the step counter of torch's optimizers.
        key: key of the value in its state.
    """
    if isinstance(value, dict):
        was = before if isinstance(before, dict) else {}
        items = {k: placed(item, was.get(k), owner, on_cpu, k) for k, item in value.items()}
        return (
            defaultdict(before.default_factory, items)
            if isinstance(before, defaultdict)
            else type(value)(items)
        )
    if type(value) in (list, tuple):
        old = (
            before if isinstance(before, list | tuple) and len(before) == len(value) else [None] * len(value)
        )
        return type(value)(placed(item, was, owner, on_cpu) for item, was in zip(value, old, strict=True))
    if not isinstance(value, torch.Tensor):
        return value
    if isinstance(before, torch.Tensor):
        value = value.to(before.device)
    elif owner is not None and key != on_cpu:
        value = value.to(owner.device)
    if owner is not None and value.shape == owner.shape and value.layout is torch.strided:
        # fused optimizers want the parameter's strides
        return torch.empty_like(owner, dtype=value.dtype, device=value.device).copy_(value).detach()
    return value


# ---- registered objects ------------------------------------------------------------------

_REFUSAL = (
    "session.register: {where} is a {kind}; expected {expected}: store it as one of them, or have state_dict leave it "
    "out; or do not register the object"
)


class OwnStates(Protocol):
    """States of optimizers, as arrays whose names begin with `EXTRA`."""

    def saved(self) -> Arrays:
        """The states as they are now."""
        ...

    def load(self, arrays: Mapping[str, np.ndarray[Any, Any]]) -> None:
        """Restores what `saved` has returned; does nothing without it."""
        ...


class Registered:
    """Objects that a script has registered, by name: see `Session.register`.

    A run continues at the top of the loop's body, so a checkpoint has the states of that moment: when the loop asks for
    the minibatch of a step that is not in the model yet. By the time of the checkpoint the body has gone on (it has
    drawn random numbers, for instance), so the states are copied at that moment.

    Under `synchronous` and `allreduce` the model of a checkpoint is that of the same moment. Under other strategies
    `optimizer.step()` waits for the checkpoint, so the step of that minibatch is in the model, and what the body does
    after it (a scheduler, an average of the weights) is not in the states. A resumed loop then goes through this body
    once more, in which its optimizers change nothing.

    All methods but `marked` and `load` are called from the user's thread, and these two while it waits.

    Attributes:
        is_marked: whether the loop has asked for a minibatch since its last step.
        again: whether the step of the minibatch for which the loop had asked is in the model from which it continues.
        optimizers: further states, of the moment of the checkpoint.
        tell: tells the user something.
    """

    def __init__(self) -> None:
        self.is_marked = self.again = False
        self.optimizers: OwnStates | None = None
        self.tell: Callable[[str], None] = say
        self._loaded: Mapping[str, np.ndarray[Any, Any]] = {}
        self._has_asked = False  # the loop takes its minibatches from loaders, or calls `Session.skip`
        self._is_used = False  # the loop works on the next step
        self._keeps = False
        self._objects: dict[str, Any] = {}
        self._told: dict[str, Any] = {}  # states to restore, also into what is registered later
        self._marks: dict[str, tuple[Any, Held]] = {}  # the states for a checkpoint

    def add(self, objects: Mapping[str, Any]) -> None:
        """Registers objects, and restores those of which `load` has brought a state.

        Raises:
            ConfigError: an object has no state that can be saved, or a name is taken.
            DataError: an object refuses its state.
        """
        for name, one in objects.items():
            if name in self._objects and self._objects[name] is not one:
                raise ConfigError(
                    f"session.register: {name} is registered already: give every object a name of its own"
                )
            held: Held = {}
            packed(encode(_state_of(name, one), f"registered.{name}", held, _REFUSAL), STATES, held)
            self._objects[name] = one
            if name in self._told:
                _restore(name, one, self._told[name])
            if self._keeps and counts_ahead(one):
                self._mark([name])

    @property
    def has_any(self) -> bool:
        """Whether the script has registered anything."""
        return any(name != PLACES for name in self._objects)

    def restores(self, name: str) -> bool:
        """Whether a resumed run has brought a state of this object."""
        return name in self._told

    @property
    def has_counts(self) -> bool:
        """Whether the script has registered a dict."""
        return any(isinstance(one, dict) for one in self._objects.values())

    # ---- now ----------------------------------------------------------------------------

    def saved(self) -> Arrays:
        """The states of all objects as they are now, as arrays whose names begin with `EXTRA`; {} if there are none.

        Raises:
            ConfigError: a state has a value that cannot be saved; the message names it.
        """
        return self._packed({})

    def load(
        self, arrays: Mapping[str, np.ndarray[Any, Any]], *, own: bool = True, loaders: bool = True
    ) -> None:
        """Restores what `saved` or `marked` has returned, now and into objects that are registered later.

        Args:
            own: whether it was this worker that saved it. Else generators of random numbers stay as they are, since two
                workers would draw the same numbers.
            loaders: False leaves loaders as they are.

        Raises:
            DataError: an object refuses its state.
        """
        if self.optimizers is not None:
            self.optimizers.load(arrays)
        if STATES in arrays:
            self._loaded = arrays
            plain, generators, ahead, self.again = json.loads(arrays[STATES].tobytes())
            left_out = {*(() if own else generators), *(() if loaders else ahead)}
            self._told = {
                name: decode(value, arrays) for name, value in plain.items() if name not in left_out
            }
            self._restore(self._objects)

    def _restore(self, names: Iterable[str]) -> None:
        for name in self._told.keys() & set(names):
            _restore(name, self._objects[name], self._told[name])

    def begin(self, *, keeps: bool) -> None:
        """Notes that the loop has joined its run, which makes checkpoints (`keeps`) or not."""
        self._keeps = keeps
        self.stepped()

    # ---- at the top of the loop's body ---------------------------------------------------

    def asks(self, *, live: bool = True) -> None:
        """Notes that the loop asks for a minibatch.

        Args:
            live: the minibatch is for a step that is not in the model. On the way to the first one after a resume, the
                script may have changed its objects, so they are restored once more.
        """
        if not live or self._is_used:  # a further minibatch of the same step
            return
        if self._told:  # but loaders have begun where their states were saved
            self._restore([name for name, one in self._objects.items() if not counts_ahead(one)])
        self.is_marked = self._has_asked = True
        if self._keeps:
            self._mark([name for name, one in self._objects.items() if not counts_ahead(one)])

    def uses(self) -> None:
        """Notes that the loop works on its next step. Without a call of `asks` since the last one it begins here."""
        if not self.is_marked and not self._has_asked:
            self.asks()
            self._has_asked = False
        if self._told:
            for name in sorted(self._told.keys() - self._objects.keys()):
                self.tell(
                    f"the state of {name!r}, of the run so far, is dropped: the script has not registered it"
                )
            self._told = {}
        self._is_used = True

    def stepped(self) -> None:
        """Notes that the loop has made a step."""
        self.is_marked = self._is_used = False
        if self._keeps:
            self._mark([name for name, one in self._objects.items() if counts_ahead(one)])

    def passed(self) -> None:
        """Notes that the loop has gone through the last body before the resume once more, up to its step."""
        if self.optimizers is not None:
            self.optimizers.load(self._loaded)
        self._loaded = {}
        self.stepped()

    def marked(self) -> Arrays:
        """The states at the top of the body that is under way, and those of the optimizers now."""
        optimizers = {} if self.optimizers is None else self.optimizers.saved()
        return {**self._packed(self._marks), **optimizers}

    def _mark(self, names: Sequence[str]) -> None:
        for name in names:
            held: Held = {}
            plain = encode(_state_of(name, self._objects[name]), f"registered.{name}", held, _REFUSAL)
            before = self._marks[name][1] if name in self._marks else {}
            self._marks[name] = plain, {key: _copied(each, before.get(key)) for key, each in held.items()}

    def _packed(self, marks: Mapping[str, tuple[Any, Held]]) -> Arrays:
        """The states of `marks`; of objects that are not in it, those to restore, or else those of now."""
        plain: dict[str, Any] = {}
        held: Held = {}
        for name in dict.fromkeys([*self._objects, *self._told]):
            if name in marks and name not in self._told:
                plain[name], more = marks[name]
                held |= more
            else:
                state = self._told[name] if name in self._told else _state_of(name, self._objects[name])
                plain[name] = encode(state, f"registered.{name}", held, _REFUSAL)
        generators = [name for name, one in self._objects.items() if one is True or isinstance(one, _KINDS)]
        ahead = [name for name, one in self._objects.items() if counts_ahead(one)]
        return packed([plain, generators, ahead, not self.is_marked], STATES, held) if plain else {}


def counts_ahead(one: Any) -> bool:
    """Whether the state of an object already counts the minibatch that the loop works on: a loader's own state."""
    return (
        hasattr(one, "state_dict")
        and hasattr(one, "__iter__")
        and not isinstance(one, torch.nn.Module | dict)
    )


def _copied(
    one: torch.Tensor | np.ndarray[Any, Any], before: torch.Tensor | np.ndarray[Any, Any] | None
) -> torch.Tensor | np.ndarray[Any, Any]:
    """A copy, in the memory of the copy before where that fits."""
    if not isinstance(one, torch.Tensor):
        return one.copy()
    if isinstance(before, torch.Tensor) and _form(before) == _form(one) and one.layout is torch.strided:
        return before.copy_(one.detach())
    return one.detach().clone()


def _form(tensor: torch.Tensor) -> tuple[object, ...]:
    return tensor.shape, tensor.dtype, tensor.device, tensor.layout


# Objects without `state_dict`: how to read and to set their states.
_GENERATORS: Mapping[type, tuple[Callable[[Any], Any], Callable[[Any, Any], object]]] = {
    torch.Generator: (torch.Generator.get_state, torch.Generator.set_state),
    random.Random: (random.Random.getstate, random.Random.setstate),
    np.random.Generator: (
        lambda one: one.bit_generator.state,
        lambda one, state: setattr(one.bit_generator, "state", state),
    ),
    np.random.RandomState: (np.random.RandomState.get_state, np.random.RandomState.set_state),
}
_KINDS = tuple(_GENERATORS)


def _state_of(name: str, one: Any) -> Any:
    """The state of an object. Its tensors may be those of the object itself.

    Raises:
        ConfigError: it is of no kind that can be registered.
    """
    if one is True:
        cuda = torch.cuda.get_rng_state_all() if torch.cuda.is_initialized() else []  # type: ignore[no-untyped-call]
        process = np.random.get_state()  # noqa: NPY002  # scripts use it
        version, words, following = random.getstate()
        python = version, np.array(words, np.uint32), following
        return {"torch": torch.get_rng_state(), "cuda": cuda, "random": python, "numpy": process}
    for kind, (read, _) in _GENERATORS.items():
        if isinstance(one, kind):
            return read(one)
    if isinstance(one, dict):
        return dict(one)
    if not all(callable(getattr(one, method, None)) for method in ("state_dict", "load_state_dict")):
        raise ConfigError(
            f"session.register: {name} is a {type(one).__name__}; expected an object with state_dict and "
            "load_state_dict, a dict, a generator of random numbers, or True for the generators of this process: put "
            "what is to be kept into a dict, and register that"
        )
    if (groups := _groups_of(one)) is None:
        return one.state_dict()
    # A scheduler works on the options of its optimizer's groups, and its own state has no copy of them.
    options = [
        {key: value for key, value in group.items() if key != "params" and _is_option(value)}
        for group in groups
    ]
    return {"state": one.state_dict(), "options": options}


def _groups_of(one: Any) -> list[dict[str, Any]] | None:
    """The parameter groups of a scheduler's optimizer; None if the object is no scheduler."""
    optimizer = getattr(one, "optimizer", None)
    return optimizer.param_groups if isinstance(optimizer, torch.optim.Optimizer) else None


def _is_option(value: Any) -> bool:
    """Whether a scheduler may work on it: a number, a tensor, or some of them."""
    values = value if type(value) in (list, tuple) else [value]
    return all(isinstance(each, bool | int | float | np.generic | torch.Tensor) for each in values)


def _restore(name: str, one: Any, told: Any) -> None:
    try:
        _set_state(one, told)
    except Exception as error:
        raise DataError(
            f"session.register: {name}, a {type(one).__name__}, does not take the state that the run has of it: "
            f"{type(error).__name__}: {error}. Register what the script that wrote it has registered as {name}, or "
            "another name"
        ) from error


def _set_state(one: Any, told: Any) -> None:
    if one is True:
        torch.set_rng_state(told["torch"])
        if torch.cuda.is_available() and len(told["cuda"]) == torch.cuda.device_count():
            torch.cuda.set_rng_state_all(told["cuda"])
        version, words, following = told["random"]
        random.setstate((version, tuple(words.tolist()), following))
        np.random.set_state(told["numpy"])  # noqa: NPY002
        return
    for kind, (_, write) in _GENERATORS.items():
        if isinstance(one, kind):
            write(one, told)
            return
    if isinstance(one, dict):
        fitting = placed(told, dict(one), None, "")
        one.clear()
        one.update(fitting)
        return
    groups = _groups_of(one)
    state = told if groups is None else told["state"]
    one.load_state_dict(placed(state, one.state_dict(), None, ""))
    for group, options in zip(groups or (), told["options"] if groups else (), strict=False):
        for key, value in options.items():
            before = group.get(key)
            if isinstance(before, torch.Tensor) and isinstance(value, torch.Tensor):
                before.data.copy_(value)  # a compiled step holds the tensor
            else:
                group[key] = value
