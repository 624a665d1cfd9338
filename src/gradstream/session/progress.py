"""Where a worker's loop is: the steps that it has made, and the minibatches that it has used for them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer as TorchOptimizer
from torch.utils.data import DataLoader, IterableDataset

from gradstream.checkpoint.own_state import PLACES
from gradstream.data.open_ledger import Left
from gradstream.errors import ConfigError
from gradstream.job.plan import worker_name
from gradstream.run.placement import WorkerPlacement
from gradstream.session.bridge import LoopBridge
from gradstream.session.entry import SessionEntry
from gradstream.session.loaders import ShardedLoader, part_of
from gradstream.session.loaders_part import Ahead, LoaderPart, StreamEnds, Takeover
from gradstream.session.log import SessionLog
from gradstream.session.node import RunConnection
from gradstream.session.places import LoopPlaces, ResumePoint
from gradstream.session.registered import Registered, counts_ahead
from gradstream.session.replica import OptimizerStates
from gradstream.session.roster import Roster
from gradstream.session.samples import PassSamples, SampleCount
from gradstream.session.streams import ShardedIterable, ShardedStream
from gradstream.strategies.base import GroupStrategy, PeerStrategy


class LoopProgress:
    """The progress of one worker's loop, in a new run, a resumed one, or one that others had begun.

    Args:
        place: the rank of this worker, and the place of its run.
        connection: the run.
        registered: what the script has registered.
        log: tells the user something.
        seed: seed of the order in which `shard` shuffles, the same on all workers.

    Attributes:
        point: where a resumed loop continues.
        places: where the loop is in its data.
        samples: the samples of the gradient that comes next.
        takeover: the run, as the loaders see it.
        entry: what a newcomer has to know.
        ahead: minibatches that a trainer takes before it uses them.
    """

    def __init__(
        self,
        place: WorkerPlacement,
        connection: RunConnection,
        registered: Registered,
        log: SessionLog,
        seed: int,
    ) -> None:
        self._place = place
        self._connection = connection
        self._registered = registered
        self._log = log
        self._seed = seed
        strategy = connection.strategy
        self.point = ResumePoint(place.steps_before())
        self.samples = SampleCount()
        self.ahead = Ahead()
        in_rounds = isinstance(strategy, GroupStrategy)
        self.takeover = Takeover(
            self.next_step,
            Roster(place.world_size),
            place.rank,
            num_at_first=place.num_at_first,
            in_rounds=in_rounds,
            steps_a_round=strategy.local_steps if strategy.local_rounds else 1,
        )
        self._stream_ends = StreamEnds(lambda: connection.bridge, self._passed, self._present)
        self.places = LoopPlaces(self.point, self._asks, lambda: self.made, place.world_size)
        self.entry = SessionEntry(
            self.takeover, self.point, registered, self.places, lambda: not self.is_unclear
        )
        self.places.has_changed = lambda: len(self.takeover.roster.changes) > 1 or bool(self.takeover.draws)
        self.takeover.is_unclear = lambda: self.is_unclear
        # Elsewhere the others may wait for a step of this worker.
        goes_on_alone = strategy.partitioning == "queue" or isinstance(strategy, PeerStrategy)
        self.takeover.is_last = lambda: goes_on_alone and self.places.is_last
        self.takeover.is_again = lambda: self.point.again
        self.places.tell = registered.tell = log.note
        registered.add({PLACES: self.places})
        self._placed: set[object] = set()  # loaders in which a resumed loop finds its place
        self._dealt: set[object] = set()  # loaders of which others take over a lost worker's rest
        self._has_loader = False  # the script has registered one that has its place itself
        self._is_passed = False  # the loop has gone through the iteration of `ResumePoint.again`

    # ---- steps --------------------------------------------------------------------------

    @property
    def made(self) -> int:
        """Number of the loop's steps, with those before the run was resumed."""
        bridge = self._connection.bridge
        return self.point.steps + (0 if bridge is None else bridge.counts.steps)

    @property
    def where(self) -> str:
        """The worker and its step, for messages."""
        return f"worker-{self._place.rank}, step {self.made}"

    def next_step(self) -> int | None:
        """See `ResumePoint.next_step`; None before `wrap` or `exchange`."""
        bridge = self._connection.bridge
        return None if bridge is None else self.point.next_step(bridge.counts.batches)

    def begin(self, bridge: LoopBridge, *, in_step: bool) -> None:
        """The loop can make steps from now on.

        Args:
            bridge: the worker beside the loop.
            in_step: the loop makes its first one.
        """
        strategy, point = self._connection.strategy, self.point
        self.takeover.bridge = bridge
        if not in_step:  # what was taken before, for the means of the data perhaps, is in no round
            self.samples.begin()
        point.again = not strategy.gives_mean and self._registered.again and point.steps > 0
        self._registered.begin(keeps=self._connection.keeps)
        if isinstance(strategy, GroupStrategy):
            bridge.find_left = self.left
            bridge.find_mark, bridge.falls_out = lambda: self.takeover.mark, self.takeover.fall_out
            bridge.is_at_edge = lambda: self.entry.is_at_edge

    def take(self, local: Sequence[PassSamples] = (), *, is_new: bool = True) -> float:
        """Samples of the gradient that is submitted now, including passes in `no_sync`.

        Args:
            local: these passes.
            is_new: the gradient is for a step of the loop that is not counted yet.
        """
        self.point.check_asked()
        if is_new:
            self.use()
        taken = self.samples.take(local)
        self.takeover.report()
        self.places.has_others |= self.samples.unseen or self.samples.ahead
        return taken

    def use(self) -> None:
        """Notes that the loop works on its next step."""
        point = self.point
        if point.again and not (self.places.skips or point.skipped):
            point.again = False
            if self._registered.has_any:
                raise ConfigError(
                    f"this run goes on after step {point.steps}, and its script looks for its place by session.step. "
                    f"Under {type(self._connection.strategy).__name__} what it has registered is as it was within that "
                    "step: take the minibatches from DataLoaders of session.shard, and do not read session.step or "
                    "session.resumed before the loop; or call session.skip() in each iteration"
                )
        if self._has_loader and self.places.epoch is None and not self._registered.has_counts:
            raise ConfigError(
                "session.register: a loader with a state of its own continues within its epoch in a resumed run, but "
                "nobody knows how many epochs are left: take `for epoch in session.epochs(n)`, or register a dict with "
                "the epoch from which your loop begins"
            )
        changed = self.places.check_options(may_differ=self._connection.job.allow_changed)
        if changed:
            self._log.note(f"from here on: {changed}")
        self._registered.uses()

    def called(self, module: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        """Notes that the loop calls a model."""
        if module.training and torch.is_grad_enabled():
            self.use()
        self.samples.forward(module, args, kwargs)

    def end(self, *, is_main: bool) -> None:
        """Notes that the loop has come to its end, and says what of its data it has not used.

        Raises:
            ConfigError: the loop of this newcomer has not come to where the others are.
        """
        if self.entry.is_behind:
            raise ConfigError(
                f"worker-{self._place.rank} has come to a run that had begun, and its loop has ended without a step: "
                "it has to go through all epochs from the first one (those that are over have no minibatches), or "
                "through those of session.epochs"
            )
        if self.places.breaks_off and is_main and not self._registered.has_counts:
            self._log.note(
                f"this run was resumed at step {self.point.steps}, and its loop has ended within an epoch: if it "
                "counts its steps or epochs itself, it has made more than without the stop. Register the count: "
                "session.register(counts=counts), with a dict"
            )
        if is_main and (left := self.samples.told_left()):
            self._log.note(f"{worker_name(self._place.rank)}: {left}")

    # ---- a resumed loop -----------------------------------------------------------------

    def skip(self, optimizers: Iterable[TorchOptimizer]) -> bool:
        """See `Session.skip`. `optimizers`: the script's."""
        allow_lost = self._connection.job.allow_lost
        if self.takeover.draws and not (self.places.skips or allow_lost):
            self._log.note(
                "session.skip: under this strategy minibatches go to who asks, so a run that is stopped will not be "
                "resumed with session.skip() in its script. Leave it out: loaders of session.shard find their place "
                "themselves"
            )
        self.places.skips = True
        if self.places.skips_wrong and not allow_lost:
            raise ConfigError(
                "session.skip: workers were lost or have come before the run was stopped, or minibatches went to who "
                "asked, so nobody knows which iterations of this worker are done. Leave session.skip() out: loaders of "
                "session.shard find their place themselves; allow_lost=True, --allow-lost, accepts that data is left "
                "out or comes twice"
            )
        self._end_again()
        if not self.point.skip():
            if not self._registered.is_marked:
                self._registered.asks()
            if self._connection.bridge is not None and not self.point.again:
                self._connection.bridge.counts.iterations += 1
            return False
        for optimizer in optimizers:
            optimizer._opt_called = True  # type: ignore[attr-defined]  # torch's schedulers warn without it
        self.samples.clear()
        return True

    def is_in_model(self) -> bool:
        """Whether the step that the loop makes is the last one before the run was resumed: see `Registered`."""
        if not self.point.again:
            return False
        self.point.check_asked()
        self.samples.clear()
        self._registered.passed()
        self._connection.restore_buffers()
        self._is_passed = True
        return True

    def _before_step(self, optimizer: TorchOptimizer, args: Any, kwargs: Any) -> Any:
        """Lets a step that is in the model already change nothing."""
        if not self.point.again:
            return None

        def drop() -> None:
            for group in optimizer.param_groups:
                for parameter in group["params"]:
                    parameter.grad = None

        closure = args[1] if len(args) > 1 else kwargs.get("closure")  # args[0] is the optimizer
        if closure is None:
            drop()
            return None

        def dropped() -> Any:
            loss = closure()
            drop()
            return loss

        return (
            ((args[0], dropped, *args[2:]), kwargs)
            if len(args) > 1
            else (args, {**kwargs, "closure": dropped})
        )

    def keep_states(
        self, optimizers: Sequence[TorchOptimizer], states: OptimizerStates | None = None
    ) -> OptimizerStates:
        """Has checkpoints keep the states of optimizers that make their steps on this worker alone.

        Args:
            optimizers: the optimizers.
            states: their states, as a phase before has watched them.
        """
        if states is None:
            states = OptimizerStates(optimizers, {})
            states.watch(check=self._connection.keeps)
        self._registered.optimizers = states
        for optimizer in optimizers:
            optimizer.register_step_pre_hook(self._before_step)
        return states

    def _end_again(self) -> None:
        if self.point.again and self._is_passed:
            self.point.end_again()

    def check_registered(self, objects: Mapping[str, Any]) -> None:
        """Looks for loaders with a state of their own among what the script registers.

        Raises:
            ConfigError: the state of such a loader would be another one than the model's.
        """
        ahead = [name for name, one in objects.items() if counts_ahead(one)]
        phases, strategy = self._connection.job.phases, self._connection.strategy
        if ahead and (phases or not strategy.gives_mean):
            kind = "phases" if phases else type(strategy).__name__
            raise ConfigError(
                f"session.register: {ahead[0]} is a loader with a state of its own, which under {kind} counts "
                "a minibatch more than the model has in a checkpoint: leave it out, and take the minibatches from "
                "session.shard of a DataLoader"
            )
        self._has_loader |= bool(ahead)

    def pass_by(self, objects: Mapping[str, Any]) -> None:
        """Lets a loader that the script has registered, and that has its place itself, go on by itself."""
        restored = any(counts_ahead(one) and self._registered.restores(name) for name, one in objects.items())
        if restored and self.point.is_resumed and not self.point.has_entered:
            self.places.is_elsewhere = True
            self.point.pass_by()

    # ---- data ---------------------------------------------------------------------------

    def shard(self, data: Any, *, split: bool, alike: bool) -> Any:
        """See `Session.shard`. `alike`: all workers take all minibatches, since they have parts of one model."""
        if isinstance(data, tuple):
            return tuple(self.shard(item, split=split, alike=alike) for item in data)
        loader = object()  # identifies the loader that is made
        strategy, in_rounds = self._connection.strategy, self.takeover.in_rounds
        others_go_on = strategy.survives_worker_loss and (not strategy.gives_mean or in_rounds)
        is_placed = isinstance(data, DataLoader) and not isinstance(data.dataset, IterableDataset)
        place = self.places.new() if is_placed else None
        self._placed |= {loader} if is_placed else set()
        part = LoaderPart(
            0 if alike else self._place.rank,
            1 if alike else len(self.takeover.roster.now),
            self._seed,
            split,
            partial(self._note, loader=loader),
            in_rounds,
            partial(self._over, loader=loader),
            self.takeover if others_go_on and not alike else None,
            self._asks,
            self._stream_ends,
            place,
            self.ahead,
            self._log.note,
        )
        made = part_of(data, part)
        if isinstance(made, ShardedLoader) and made.is_dealt:
            self._dealt.add(loader)
        elif self._place.is_further or (
            self._place.is_late and isinstance(made, ShardedStream | ShardedIterable)
        ):
            raise ConfigError(
                f"session.shard: worker-{self._place.rank} has come to a run that had begun, and a "
                f"{type(data).__name__} is divided among the workers of its beginning. Expected a DataLoader of a data "
                "set that is read by number"
            )
        if is_placed:
            with suppress(TypeError):  # the sampler has no length
                self.samples.uses[loader].total = len(made)
        return made

    def _asks(self) -> None:
        """Notes that the loop asks a loader for a minibatch."""
        if torch.is_grad_enabled():
            self._end_again()
            is_live = self.point.skipped == self.point.first or self.made > self.point.steps
            self._registered.asks(live=is_live)

    def _note(self, samples: int | None, loader: object) -> None:
        """Notes that the loop takes a minibatch from a loader."""
        self.samples.note(samples, loader)
        if torch.is_grad_enabled():
            self.takeover.own_data |= loader not in self._dealt
            self.places.has_others |= loader not in self._placed

    def _over(self, ended: bool, loader: object) -> None:
        """Notes that the loop goes through an iteration of a loader no further."""
        self.samples.over(loader, ended=ended, epoch=self.places.epoch)

    def _present(self) -> Sequence[int]:
        """Ranks of the workers that have made the newest round, which all of them know; without rounds, all."""
        number = self.next_step() if self.takeover.in_rounds else None
        roster = self.takeover.roster
        return roster.changes[0].ranks if number is None else roster.of(number - 1)

    def _passed(self) -> tuple[int, ...]:
        """Numbers that change with each step that the loop makes or skips, and each backward."""
        bridge = self._connection.bridge
        counts = () if bridge is None else (bridge.counts.batches, bridge.counts.steps)
        return (*counts, self.point.skipped, self.samples.passes)

    # ---- after losses -------------------------------------------------------------------

    def left(self) -> Left:
        """What lost workers had left of the data."""
        batches: Counter[int] = Counter()
        for deal in self.takeover.deals.values():
            batches.update(deal.left())
        batches.update(dict.fromkeys(self.takeover.roster.lost, 0))
        return Left(batches, self.is_unclear)

    @property
    def is_unclear(self) -> bool:
        """Whether the loop has used minibatches of which nobody knows who has them, and in which round."""
        return self.takeover.own_data or self.samples.unseen or self.samples.ahead
