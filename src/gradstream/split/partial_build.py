"""Builds a module of which only some tensors have values: those that one process needs.

`build()` runs as it is. Its tensors are created on torch's meta device, where they have a shape and no memory, except
the needed ones. Random numbers of the others are drawn and dropped, one tensor at a time, so the needed ones get
exactly the values that they have in the whole module.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import torch
from torch import nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_leaves, tree_map_only

from gradstream.errors import ConfigError
from gradstream.model.built_module import Build, build_module
from gradstream.split.refusals import refuse_gradient_hooks

_SMALL_ELEMS = 1 << 10
"""Elements up to which every tensor has its values: a `build()` may read them (`.item()`, `.tolist()`)."""


Number = tuple[int, int]
_TRUNCATED_NORMAL = nn.init._no_grad_trunc_normal_


class ShapeMode(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """A context in which tensors are created without values, except those with the given numbers.

    A tensor that has memory of its own has a number of two parts: which call of a torch function made it, and its
    place among the tensors that the call made. An operation is carried out on values if all of its inputs have them.

    Args:
        needed: numbers of the tensors that get values.
        places: memory for some of them, by number.
        draws: whether random numbers of tensors without values are drawn too.
    """

    def __init__(
        self,
        needed: Iterable[Number] = (),
        places: Mapping[Number, torch.Tensor] | None = None,
        *,
        draws: bool = True,
    ) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._needed = frozenset(needed)
        self._places = places or {}
        self._draws = draws
        self._alive: list[torch.Tensor] = []  # so that no other tensor gets the same storage
        self._numbers: dict[int, Number] = {}  # of storages
        self._next: Number = (0, 0)
        self._inside = False
        self._scratch = torch.empty(0, dtype=torch.uint8)
        self.sources: dict[Number, set[Number]] = {}  # of each tensor: all that was ever written into it
        self.random: set[Number] = set()  # those into which random numbers were written

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """False: else torch puts a context around each operation, to keep its compiler out, which takes as long."""
        return False

    @property
    def calls(self) -> int:
        """How many functions of torch were called. What they call themselves depends on which tensors have values."""
        return self._next[0]

    def begin_call(self) -> None:
        """Notes that a function of torch is called, unless it is called for an operation in progress."""
        if not self._inside:
            self._next = (self.calls + 1, 0)

    def number_of(self, tensor: torch.Tensor) -> Number | None:
        """The number of the tensor's memory; None if it comes from outside of the context."""
        return self._numbers.get(tensor.untyped_storage()._cdata)

    def __torch_dispatch__(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """Carries out one operation, on values or on shapes."""
        with self._own_calls():
            return self._carry_out(func, args, dict(kwargs or {}))

    def truncated_normal(self, tensor: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        """In place of torch's own, which draws until all values fit: as often as they say."""
        with self._own_calls(), _disable_current_modes():
            if not _is_meta(tensor):
                _TRUNCATED_NORMAL(tensor, *args, **kwargs)
            elif self._draws:
                _TRUNCATED_NORMAL(self._blanks([tensor])[0], *args, **kwargs)
            if (number := self.number_of(tensor)) is not None:
                self.random.add(number)
        return tensor

    @contextmanager
    def _own_calls(self) -> Iterator[None]:
        before, self._inside = self._inside, True
        try:
            yield
        finally:
            self._inside = before

    def _carry_out(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        given = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
        is_random = torch.Tag.nondeterministic_seeded in func.tags
        if any(_is_meta(tensor) for tensor in given):
            if (
                is_random and self._draws
            ):  # as many numbers as the operation would draw, into memory that is dropped
                blanks = self._blanks(given)
                in_order = iter(blanks)
                func(*_on(args, lambda _: next(in_order)), **_on(kwargs, lambda _: next(in_order)))
            result = func(*_on(args, to_meta), **_on(kwargs, to_meta))
        elif func is torch.ops.aten.empty.memory_format and self._next in self._places:
            result = self._places[self._next].view(args[0])
        elif given or is_random or self._next in self._needed or "device" not in kwargs:
            result = func(*args, **kwargs)
        else:
            result = func(*args, **{**kwargs, "device": "meta"})
            if kwargs["device"] not in (None, torch.device("cpu")) or result.numel() <= _SMALL_ELEMS:
                result = func(*args, **kwargs)
        old = {tensor.untyped_storage()._cdata for tensor in given}
        # What is made of needed tensors stays with them: Module.to() replaces a parameter that changes its kind.
        keep = any(self.number_of(tensor) in self._needed for tensor in given)
        result = _on(result, lambda made: self._keep(made, old, keep))
        self._note(func, given, result, is_random)
        return result

    def _blanks(self, tensors: list[torch.Tensor]) -> list[torch.Tensor]:
        """The same tensors, those without values as zeros, in memory that the next call takes again.

        New memory each time would not do: glibc rarely gives aligned memory of this size a second time.
        """
        sizes = [
            -(-tensor.untyped_storage().nbytes() // 64) * 64 if _is_meta(tensor) else 0 for tensor in tensors
        ]
        if self._scratch.numel() < sum(sizes):
            self._scratch = torch.empty(0, dtype=torch.uint8)
            self._scratch = torch.empty(sum(sizes), dtype=torch.uint8)
        memory = torch.split(self._scratch[: sum(sizes)].zero_(), sizes)
        return [
            own.view(tensor.dtype).as_strided(tensor.shape, tensor.stride()) if _is_meta(tensor) else tensor
            for own, tensor in zip(memory, tensors, strict=True)
        ]

    def _keep(self, made: torch.Tensor, old: set[int], keep: bool) -> torch.Tensor:
        """The tensor, its values dropped unless they are needed."""
        if made.untyped_storage()._cdata in old:
            return made
        number = self._next
        self._next = (number[0], number[1] + 1)
        if number in self._places and not _is_meta(made):
            made = self._places[number].copy_(made.flatten()).view(made.shape)
        elif not keep and number not in self._needed and made.numel() > _SMALL_ELEMS:
            made = to_meta(made)
        self._numbers[made.untyped_storage()._cdata] = number
        self.sources[number] = set()
        self._alive.append(made)
        return made

    def _note(self, func: Any, given: list[torch.Tensor], result: Any, is_random: bool) -> None:
        """Notes the sources of all that the operation has written."""
        numbers = {number for tensor in given if (number := self.number_of(tensor)) is not None}
        made = [leaf for leaf in tree_leaves(result) if isinstance(leaf, torch.Tensor)]
        if func._schema.is_mutable:  # which of its inputs is written does not matter: all depend on all
            made += given
        for tensor in made:
            number = self.number_of(tensor)
            if number is not None:
                self.sources[number] |= numbers - {number}
                if is_random:
                    self.random.add(number)


class _Calls(TorchFunctionMode):
    """Counts calls of torch's functions. No tensor says that it has no values: `nn.init` would then do nothing."""

    def __init__(self, mode: ShapeMode) -> None:
        self._mode = mode

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Calls the function."""
        self._mode.begin_call()
        return False if func == _IS_META else func(*args, **(kwargs or {}))


_IS_META = torch.Tensor.is_meta.__get__  # type: ignore[attr-defined]


def _is_meta(tensor: torch.Tensor) -> bool:
    return tensor.device.type == "meta"


def _on(tree: Any, fn: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    return tree_map_only(torch.Tensor, fn, tree)


def to_meta(tensor: torch.Tensor) -> torch.Tensor:
    """A tensor of the same shape, without values."""
    if _is_meta(tensor):
        return tensor
    return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="meta")


class Blueprint:
    """What a `build()` makes, without values: its module on the meta device, and how its tensors arise.

    Args:
        build: the function that builds the module.

    Attributes:
        module: the module, whose parameters and buffers have no values.
    """

    def __init__(self, build: Build) -> None:
        self._build = build
        self._mode = ShapeMode(draws=False)
        self.module = self._run(self._mode, 0)
        refuse_gradient_hooks(self.module)  # before its parameters are replaced
        self._made: dict[str, torch.Tensor] = {}  # tensors as build() left them: small ones have values
        shapes: dict[int, torch.Tensor] = {}
        for path, part in self.module.named_modules(remove_duplicate=False):
            for tensors in (part._parameters, part._buffers):
                for key, tensor in dict[str, Any](tensors).items():
                    if tensor is None:
                        continue
                    if id(tensor) not in shapes:
                        self._made[f"{path}.{key}" if path else key] = tensor
                        shape = to_meta(tensor.detach())
                        if isinstance(tensor, nn.Parameter):
                            shape = nn.Parameter(shape, requires_grad=tensor.requires_grad)
                        shapes[id(tensor)] = shapes[id(shape)] = shape
                    tensors[key] = shapes[id(tensor)]

    def part(
        self, names: Iterable[str], seed: int, places: Mapping[str, torch.Tensor] | None = None
    ) -> nn.Module:
        """A new module of `build()` under this seed, in which the named tensors have their values.

        Args:
            names: qualified names of parameters, buffers or other attributes that are tensors.
            seed: of torch's generator.
            places: memory (elems,) for the values of some; it is filled in any case.
        """
        needed: set[Number] = set()
        numbers = {name: self._mode.number_of(self._tensor(name)) for name in names}
        open_ = [number for number in numbers.values() if number is not None]
        while open_:
            if (source := open_.pop()) not in needed:
                needed.add(source)
                open_.extend(self._mode.sources[source])
        memory = {}
        for name, place in (places or {}).items():
            tensor, number = self._tensor(name), numbers[name]
            whole = (
                tensor.untyped_storage().nbytes() == tensor.numel() * tensor.itemsize
                and tensor.is_contiguous()
            )
            if number is not None and whole:
                memory[number] = place
        mode = ShapeMode(needed, memory, draws=not needed.isdisjoint(self._mode.random))
        module = self._run(mode, seed)
        made = (tensor_at(module, name) for name in numbers)
        same = all(t.shape == self._tensor(name).shape for name, t in zip(numbers, made, strict=True))
        if mode.calls != self._mode.calls or not same:
            raise ConfigError(
                f"from_torch: build() called torch {mode.calls} times, and {self._mode.calls} times at first, or made "
                "other tensors; expected the same at each call, whatever the seed"
            )
        for name, place in (places or {}).items():
            tensor = tensor_at(module, name).detach()
            if tensor.data_ptr() != place.data_ptr():
                place.copy_(tensor.flatten())
        return module

    def draw(self, seed: int) -> None:
        """Draws all random numbers of `build()` under this seed, and drops them."""
        self._run(ShapeMode(), seed)

    def _tensor(self, name: str) -> torch.Tensor:
        return self._made[name] if name in self._made else tensor_at(self.module, name)

    def _run(self, mode: ShapeMode, seed: int) -> nn.Module:
        def build() -> nn.Module:
            with _Calls(mode), mode, patch.object(nn.init, "_no_grad_trunc_normal_", mode.truncated_normal):
                return self._build()

        try:
            return build_module(build, seed)
        except (NotImplementedError, RuntimeError) as error:
            raise ConfigError(
                "from_torch: build() reads values of a tensor while it builds, or does with it what cannot be done "
                f"on shapes alone; expected one that only creates and fills tensors, so that it can be split: {error}"
            ) from error


def tensor_at(module: nn.Module, name: str) -> torch.Tensor:
    """The parameter, buffer or other tensor of this qualified name. AttributeError if there is none."""
    path, _, attribute = name.rpartition(".")
    tensor: torch.Tensor = getattr(module.get_submodule(path), attribute)
    return tensor
