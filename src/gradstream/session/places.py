"""Where a loop is in its data: in checkpoints, and at resume.

A script whose minibatches all come from DataLoaders of `Session.shard` need not say anything about resuming. It runs
from its top, and its loaders know which epochs are over: these yield nothing. In the present epoch they begin where the
run was.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch

from gradstream.errors import ConfigError, DataError
from gradstream.untrusted import say


class ResumePoint:
    """Where a resumed loop continues, and how many of the earlier iterations the script has skipped.

    Args:
        steps: steps that this worker made before the run was resumed; None in a new run.

    Attributes:
        skipped: iterations that the script has skipped.
        asked: whether the script has asked where the run continues.
        has_entered: this worker has come to a run that others had begun or resumed.
        again: whether the loop goes once more through the last iteration before the run was resumed, whose step is in
            the model already. See `Registered.again`.
    """

    def __init__(self, steps: int | None) -> None:
        self.skipped = 0
        self.asked = False
        self.again = self.has_entered = False
        self._steps = steps
        self._entered = 0

    @property
    def is_resumed(self) -> bool:
        """Whether the run was resumed from a checkpoint."""
        return self._steps is not None

    @property
    def steps(self) -> int:
        """Steps before the run was resumed."""
        return self._steps or 0

    def skip(self) -> bool:
        """Counts an iteration; True if it was done before the run was resumed."""
        self.asked = True
        if self.skipped == self.first:
            return False
        self.skipped += 1
        return True

    def enter(self, steps: int, *, skips: bool) -> None:
        """Goes on where the others are, which have made so many steps since the run began or was resumed.

        Args:
            steps: their number.
            skips: the script skips them itself; else its loaders lead to where the others are.
        """
        self.has_entered = True
        if skips:
            self._entered = steps
        else:
            self.pass_by()

    @property
    def first(self) -> int:
        """Number of iterations before the first one that the loop goes through."""
        return self.steps - self.again + self._entered

    def end_again(self) -> None:
        """The iteration that the loop goes through once more is over."""
        self.again = False
        self.skipped = self.first

    def pass_by(self) -> None:
        """Skips nothing: the loop does not begin at its first step."""
        self.asked, self.skipped = True, self.first

    def next_step(self, batches: int) -> int | None:
        """The number of the next step since the run was resumed, negative while the script skips.

        Args:
            batches: gradients submitted since then.

        Returns:
            None while it is unknown whether the script skips.
        """
        if self.steps and not batches and not self.skipped:
            return None
        return batches + (self.skipped - self.steps - self._entered if self.skipped else 0)

    def check_asked(self) -> None:
        """Raises ConfigError if a resumed script makes steps without asking where to continue."""
        if self.steps and not self.asked:
            raise ConfigError(
                f"this run was resumed at step {self.steps}, but the script begins its loop at the first step: "
                "take its minibatches from DataLoaders of session.shard, skip the iterations that are done (`if "
                "session.skip(): continue` at the top of the loop), or begin the loop at session.step"
            )


class RestingDeals(Protocol):
    """Deals out the minibatches of a loader, and knows which are in no round."""

    def resting(self, over: int) -> dict[str, Any]:
        """See `LoaderDeals.resting`."""
        ...


@dataclass(slots=True, eq=False)
class LoaderPlace:
    """A loop's place in one loader.

    Args:
        places: those of all loaders of the session.
        index: number of the loader, in the order in which the script made them.

    Attributes:
        begun: iterations that the sampler has begun.
        over: iterations that the loop has gone through, or broken off.
        taken: this worker's minibatches that the loop has taken in the iteration after these.
        early: iterations that were over before the loop made its first step. A resumed loop goes through them again.
        columns: minibatches of one process for each of this worker's.
        any_size: another number of workers can continue from this place.
        deals: deals out the minibatches, if all workers make their rounds together.
        trains: the loop has asked it for minibatches with gradients on.
        ended: the loop has gone through its last iteration to the end.
    """

    places: LoopPlaces
    index: int
    begun: int = 0
    over: int = 0
    taken: int = 0
    early: int = 0
    columns: int = 1
    any_size: bool = False
    deals: RestingDeals | None = None
    trains: bool = False
    ended: bool = False

    @property
    def resumed(self) -> Mapping[str, Any] | None:
        """The place at which a resumed loop continues; None in a new run, or if the script looks for it itself."""
        return self.places.resumed(self.index)

    @property
    def applies(self) -> bool:
        """Whether a resumed loop finds its place by this loader."""
        return self.resumed is not None

    @property
    def is_behind(self) -> bool:
        """Whether the next iteration was over before the run was resumed, and the script does not begin with it."""
        resumed = self.resumed if self.places.epoch is not None else None
        return resumed is not None and resumed["early"] <= self.begun < resumed["over"]

    @property
    def passes(self) -> int:
        """Number of this worker's minibatches that the next iteration passes over."""
        resumed = self.resumed
        return resumed["taken"] if resumed is not None and self.begun == resumed["over"] else 0

    def begin(self) -> tuple[bool, int, int]:
        """The sampler begins an iteration.

        Returns:
            (whether it was over before the run was resumed; how many minibatches of one process to pass over; number
            of the next one, by which they are dealt to workers).
        """
        resumed, passed = self.resumed, self.passes
        self.begun += 1
        if resumed is None:
            return False, 0, 0
        is_over = resumed["early"] < self.begun <= resumed["over"]
        passed *= resumed["columns"]
        return is_over, passed, passed if self.places.is_same_size else 0

    def asks(self, *, at_beginning: bool = False, ahead: bool = False) -> None:
        """The loop asks for a minibatch.

        Args:
            at_beginning: for the first one of an iteration.
            ahead: the sampler has begun that iteration already.
        """
        self.ended = False
        if at_beginning:
            self.over, self.taken = self.begun - ahead, 0
            resumed = self.resumed
            if resumed is not None:
                self.early = resumed["early"]
                self.taken = resumed["taken"] if self.over == resumed["over"] else 0
            elif not self.places.made():
                self.early = self.over
        self.trains |= torch.is_grad_enabled()
        self.places.asked()

    def takes(self) -> None:
        """The loop takes the minibatch for which it has asked."""
        self.taken += 1

    def saved(self) -> dict[str, Any]:
        """The place as JSON."""
        plain = {"over": self.over, "taken": self.taken, "early": self.early, "columns": self.columns}
        return plain if self.deals is None else {**plain, **self.deals.resting(self.over)}


@dataclass(slots=True, eq=False)
class LoopPlaces:
    """A loop's place in its data. It is registered with the user's own objects: see `Registered`.

    Args:
        point: where a resumed loop continues.
        asked: called when the loop asks a loader for a minibatch.
        made: returns the number of steps that the loop has made.
        world_size: number of workers.

    Attributes:
        epoch: the present one of `Session.epochs`; None if the script does not call it.
        skips: the script calls `Session.skip`.
        has_others: the loop also trains with minibatches of no DataLoader that has a place.
        is_elsewhere: a loader that the script has registered has its place itself.
        optimizers: the script's wrapped optimizers.
        has_changed: returns whether others may have made the loop's steps: workers were lost or have come, or
            minibatches go to who asks.
        is_last: the present epoch is the last one of `Session.epochs`.
        tell: tells the user something.
    """

    point: ResumePoint
    asked: Callable[[], None]
    made: Callable[[], int]
    world_size: int
    epoch: int | None = None
    skips: bool = False
    has_others: bool = False
    is_elsewhere: bool = False
    optimizers: Sequence[torch.optim.Optimizer] = ()
    has_changed: Callable[[], bool] = lambda: False
    is_last: bool = False
    tell: Callable[[str], None] = say
    _loaders: list[LoaderPlace] = field(default_factory=list)
    _told: Mapping[str, Any] | None = None
    _applies: bool | None = None
    _is_checked: bool = False
    _entered: Mapping[str, Any] | None = None

    def new(self) -> LoaderPlace:
        """The place in the next loader that the script makes."""
        self._loaders.append(LoaderPlace(self, len(self._loaders)))
        return self._loaders[-1]

    @property
    def are_enough(self) -> bool:
        """Whether a resumed loop finds its place by its loaders alone."""
        skips = self.skips and not self.has_changed()
        return any(place.trains for place in self._loaders) and not (self.has_others or skips)

    @property
    def starts_over(self) -> bool:
        """Whether the loaders of a resumed loop begin anew, since the script looks for its place itself."""
        return self._told is not None and not self._applies

    def resumed(self, index: int) -> Mapping[str, Any] | None:
        """The place in a loader at which a resumed loop continues: see `LoaderPlace.resumed`."""
        if self._applies is None and self._told is not None:
            self._applies = self._told["enough"] and (self.epoch is not None or not self.point.asked)
            if self._applies:
                self.point.pass_by()
            elif self._told["enough"] and not self.skips:
                self.tell(
                    "the script reads session.step or session.resumed, so its loaders begin at their first minibatch; "
                    "with session.epochs(n) in place of range(n) they begin where the run was"
                )
        if not self._applies or self._told is None:
            return None
        loaders = self._told["loaders"]
        if index >= len(loaders):
            return None
        place: dict[str, Any] = loaders[index]
        return place

    @property
    def is_same_size(self) -> bool:
        """Whether the resumed run has as many workers as before."""
        return self._told is None or self._told["world_size"] == self.world_size

    @property
    def breaks_off(self) -> bool:
        """Whether a resumed loop, which has come to its end, has not gone through a loader's last iteration."""
        return bool(self._applies) and any(place.trains and not place.ended for place in self._loaders)

    @property
    def skips_wrong(self) -> bool:
        """Whether a resumed loop that skips iterations would not skip what is done: workers were lost, or had come."""
        return self._told is not None and bool(self._told["changed"])

    def entry_state(self) -> dict[str, Any]:
        """What a newcomer has to know."""
        return {"epoch": self.epoch, "options": self._options()}

    def enter(self, state: Mapping[str, Any]) -> None:
        """Goes on, in a run that had begun, from what `entry_state` of another worker has returned."""
        self._entered = state

    @property
    def has_entered_epoch(self) -> bool:
        """Whether the script of a newcomer begins with the present epoch."""
        return self._entered is not None and self.epoch is not None

    def epochs(self, number: int) -> Iterator[int]:
        """See `Session.epochs`."""
        told = self._told
        begin = 0 if told is None or not (told["enough"] or self.is_elsewhere) else told["epoch"] or 0
        if self._entered is not None:
            begin = self._entered["epoch"] or 0
        for epoch in range(begin, number):
            self.epoch, self.is_last = epoch, epoch == number - 1
            yield epoch
        self.is_last = False

    def check_options(self, *, may_differ: bool) -> str:
        """Compares the optimizers' options with those at the checkpoint, when a resumed loop makes its first step.

        Returns:
            What differs, for a message; "".

        Raises:
            ConfigError: they differ, and `may_differ` is not set.
        """
        where = self._entered if self._told is None or not self._applies else self._told
        if where is None or self._is_checked or not self.optimizers:
            return ""
        told, self._is_checked = where["options"], True
        pairs = [
            (key, now.get(key), was)
            for now, then in zip(self._options(), told, strict=False)
            for key, was in then.items()
        ]
        changed = [f"{key} is {now}, and was {was}" for key, now, was in pairs if now != was]
        if changed and where is self._entered:
            raise ConfigError(
                "this worker has come to a run that had begun, and its optimizer differs from that of the others: "
                f"{changed[0]} there. Register what changes it: session.register(scheduler=scheduler)"
            )
        if changed and not may_differ:
            raise ConfigError(
                f"this run goes on from step {self.point.steps} of a script that does not skip what is done, and its "
                f"optimizer differs from that step: {changed[0]}. Register what changes it, so that it goes on too: "
                "session.register(scheduler=scheduler), or optimizer=optimizer"
            )
        return "; ".join(changed)

    def _options(self) -> list[dict[str, Any]]:
        """The numbers in the optimizers' groups that schedulers work on."""
        return [
            {
                key: list(value) if isinstance(value, tuple) else value
                for key, value in group.items()
                if key in ("lr", "momentum", "betas") and not isinstance(value, torch.Tensor)
            }
            for optimizer in self.optimizers
            for group in optimizer.param_groups
        ]

    # ---- as a registered object ---------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """The place as it is now."""
        return {
            "loaders": [place.saved() for place in self._loaders],
            "epoch": self.epoch,
            "enough": self.are_enough,
            "any_size": self.are_enough and all(place.any_size for place in self._loaders if place.trains),
            "world_size": self.world_size,
            "options": self._options(),
            "changed": self.skips_wrong or self.has_changed(),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Sets the place at which a resumed loop continues."""
        if not self.point.is_resumed or self.point.has_entered or self._told is not None:
            return
        if state.keys() != self.state_dict().keys():
            raise DataError("another version of gradstream has written the place in the data")
        self._told = state
