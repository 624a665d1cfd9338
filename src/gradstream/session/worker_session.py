"""The session of one of several workers: the user's loop on one side, the worker's node on the other."""

from __future__ import annotations

import math
import shutil
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import nn
from torch.optim import Optimizer as TorchOptimizer
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook
from torch.utils.data import DataLoader, IterableDataset
from torch.utils.hooks import RemovableHandle
from typing_extensions import override

from gradstream.checkpoint.layouts import keep_configs
from gradstream.checkpoint.own_state import PLACES
from gradstream.data.open_ledger import Left
from gradstream.errors import ClosedError, ConfigError, DeadlineError
from gradstream.job.job import strategy_of
from gradstream.job.overrides import text_of_optimizer
from gradstream.job.plan import RunPlan, worker_name
from gradstream.job.registry import find_codec
from gradstream.job.traits import traits_of_codec
from gradstream.model.buffers import Tree
from gradstream.optim.base import Optimizer
from gradstream.run.placement import WorkerPlacement
from gradstream.runtime.storage import DiskStorage
from gradstream.session.arrays import ArrayGradients, ArrayParameters, rate_of
from gradstream.session.binding import ModuleBinding, ParameterBinding
from gradstream.session.bridge import LoopBridge
from gradstream.session.entry import SessionEntry
from gradstream.session.gradient_states import WrappedParameters
from gradstream.session.gradients import GradientReducer
from gradstream.session.host import Host
from gradstream.session.loaders import ShardedLoader, part_of
from gradstream.session.loaders_part import Ahead, LoaderPart, StreamEnds, Takeover
from gradstream.session.local import LocalArrays, LocalModule, LocalRound
from gradstream.session.log import SessionLog
from gradstream.session.node import RunConnection
from gradstream.session.optimizer import around_each_step, as_list, take_over
from gradstream.session.places import LoopPlaces, ResumePoint
from gradstream.session.registered import counts_ahead
from gradstream.session.replica import OptimizerStates, ReplicaBinding
from gradstream.session.roster import Roster
from gradstream.session.rules import STEPS, description_of, objection
from gradstream.session.samples import BeforeForward, PassSamples, SampleCount, whole
from gradstream.session.session import M, O, Session
from gradstream.session.split_module import LoopSplit, SplitModule
from gradstream.session.streams import ShardedIterable, ShardedStream
from gradstream.strategies.base import GroupStrategy, PeerStrategy, ServerStrategy, Strategy
from gradstream.traits import refuse

# ---- early barrier -----------------------------------------------------------------------
# `EarlyBarrier`: lets workers wait for one another before they join their run in `wrap`.
#
#     if session.rank == 0: download()
#     session.barrier()
#
# They write files beside the run's specification, so they must be on one machine.

POLL_S = 0.05

SLOW_STEPS = 3
"""Steps of strategy "auto" that measure links over which a sum takes long."""


class EarlyBarrier:
    """The barriers of one worker before `wrap`.

    Args:
        place: the rank of this worker, and the place of its run.
    """

    def __init__(self, place: WorkerPlacement) -> None:
        self._place = place
        self._passed = 0

    def wait(self) -> None:
        """Waits until all workers have called it as often as this worker.

        Raises:
            ConfigError: the workers are on several machines.
            DeadlineError: a worker has not called it within `join_s`.
        """
        if self._place.is_late:
            return  # the others have passed it
        place, deadlines = self._place, self._place.job().deadlines
        if place.node_spec().elsewhere:
            raise ConfigError(
                f"worker-{place.rank}: session.barrier() before session.wrap: workers on several machines connect "
                "only in wrap; call wrap first, then the barrier: wrap needs the model and its optimizer, but no data"
            )
        folder = self._folder()
        folder.mkdir(exist_ok=True)
        (folder / f"{self._passed}-{place.rank}").touch()
        missing, end = set(range(place.world_size)), time.monotonic() + deadlines.join_s
        while missing := {rank for rank in missing if not (folder / f"{self._passed}-{rank}").exists()}:
            if time.monotonic() > end:
                names = ", ".join(map(worker_name, sorted(missing)))
                raise DeadlineError(
                    names,
                    f"did not call session.barrier() within {deadlines.join_s:g} s after worker-{place.rank}; if its "
                    "work there takes longer, join(deadlines=gradstream.Deadlines(join_s=...))",
                )
            time.sleep(POLL_S)
        self._passed += 1

    def over(self) -> None:
        """Removes the files, once all workers have joined."""
        if self._passed and self._place.rank == 0:
            shutil.rmtree(self._folder(), ignore_errors=True)

    def _folder(self) -> Path:
        """A separate folder for each start of the run, since a resumed run must not see earlier files."""
        spec = Path(self._place.spec)
        return spec.parent / f"barrier-{spec.stat().st_mtime_ns}"


# ---- sync batch norm ---------------------------------------------------------------------
# Refuses SyncBatchNorm where it would see only one worker's samples.
#
# torch's layer sums its statistics in a process group during the forward pass. Without a group it silently uses only
# its own minibatch, as BatchNorm does. A session's rounds come after a backward, so they cannot replace that.


def refuse_sync_batch_norm(modules: Sequence[nn.Module], workers: int) -> None:
    """Refuses every SyncBatchNorm in training mode, now and whenever it is called later.

    Args:
        modules: the modules that a script wraps.
        workers: number of workers. A single worker has all samples, so nothing is refused.

    Raises:
        ConfigError: there is a SyncBatchNorm, but no process group.
    """
    for module in modules if workers > 1 else ():
        for name, part in module.named_modules():
            if isinstance(part, nn.SyncBatchNorm):
                refusal = _Refusal(name)
                refusal(part, (), {})
                part.register_forward_pre_hook(BeforeForward(refusal), with_kwargs=True)


class _Refusal:
    def __init__(self, name: str) -> None:
        self._name = name

    def __call__(self, module: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        if module.training and not (dist.is_available() and dist.is_initialized()):
            raise ConfigError(
                f"session.wrap: {self._name or 'the model'!r} is a SyncBatchNorm in training mode, but "
                "torch.distributed has no process group in which it could combine the workers' statistics, so each "
                "worker would use only its own. Use BatchNorm, which is meant to do so (its running means are averaged "
                "at the end), or GroupNorm or LayerNorm, which look at one sample at a time; put it into eval() before "
                "session.wrap if it is not trained; or, on GPUs, call torch.distributed.init_process_group before "
                "gradstream.join"
            )


# ---- worker session ----------------------------------------------------------------------


class WorkerSession(Session):
    """The session of one of several workers.

    Args:
        place: the rank of this worker, and the place of its run.
        seed: seed of the order in which `shard` shuffles, the same on all workers.
        host: coordinator and servers, if this process runs them for all workers; waited for at the end.

    Attributes:
        ahead: minibatches that a trainer takes before it uses them.
    """

    def __init__(self, place: WorkerPlacement, seed: int, host: Host | None = None) -> None:
        self.rank = place.rank
        self._place = place
        self._job = place.job()
        self._strategy: Strategy = strategy_of(self._job)  # of the present plan, once the loop has joined it
        self._seed = seed
        self._log = SessionLog(place.rank, self._steps_made)
        self._connection = RunConnection(place, self._log, self._registered, host)
        self._resume_point = ResumePoint(place.steps_before())
        self._samples = SampleCount()
        self.ahead = Ahead()
        self._takeover = Takeover(
            self._next_step,
            Roster(place.world_size),
            place.rank,
            num_at_first=place.num_at_first,
            in_rounds=isinstance(self._strategy, GroupStrategy),
            steps_a_round=self._strategy.local_steps if self._strategy.local_rounds else 1,
        )
        self._stream_ends = StreamEnds(lambda: self._connection.bridge, self._passed, self._present)
        self._places = LoopPlaces(self._resume_point, self._ask, self._steps_made, place.world_size)
        self._entry = SessionEntry(
            self._takeover, self._resume_point, self._registered, self._places, lambda: not self._is_unclear
        )
        self._places.has_changed = lambda: (
            len(self._takeover.roster.changes) > 1 or bool(self._takeover.draws)
        )
        self._takeover.is_unclear = lambda: self._is_unclear
        # Elsewhere the others may wait for a step of this worker.
        goes_on_alone = self._strategy.partitioning == "queue" or isinstance(self._strategy, PeerStrategy)
        self._takeover.is_last = lambda: goes_on_alone and self._places.is_last
        self._takeover.is_again = lambda: self._resume_point.again
        self._places.tell = self._registered.tell = self._log.note
        self._registered.add({PLACES: self._places})
        self._placed: set[object] = set()  # loaders in which a resumed loop finds its place
        self._dealt: set[object] = set()  # loaders of which others take over a lost worker's rest
        self._early_barrier = EarlyBarrier(place)
        self._optimizers: Sequence[TorchOptimizer] = ()
        self._binding: ReplicaBinding | LocalModule | None = None  # of models whose steps the loop makes
        self._last_step: int | None = None  # of the present phase
        self._reducer: GradientReducer | None = None
        self._arrays: ArrayGradients | ArrayParameters | LocalArrays | None = None
        self._round: LocalRound | None = None
        self._split: SplitModule | None = None
        self._step_hooks: Sequence[RemovableHandle] = ()  # for the steps of all optimizers of this process
        self._has_loader = False  # the script has registered one that has its place itself
        self._is_passed = False  # the loop has gone through the iteration of `ResumePoint.again`
        self._closed = False

    @property
    def world_size(self) -> int:  # type: ignore[override]  # a group may change
        """Number of workers: of a group, those that make the present round."""
        return len(self._takeover.roster.now)

    @property
    def has_replicas(self) -> bool:
        """Whether all workers have the same parameters after each step."""
        return self._averages_gradients

    @property
    @override
    def is_main(self) -> bool:
        return self.rank == self._takeover.roster.first

    @property
    @override
    def step(self) -> int:
        self._resume_point.asked = True
        return self._steps_made()

    def _next_step(self) -> int | None:
        """See `ResumePoint.next_step`; None before `wrap` or `exchange`."""
        bridge = self._connection.bridge
        return None if bridge is None else self._resume_point.next_step(bridge.counts.batches)

    def _steps_made(self) -> int:
        bridge = self._connection.bridge
        return self._resume_point.steps + (0 if bridge is None else bridge.counts.steps)

    @property
    @override
    def resumed(self) -> bool:
        self._resume_point.asked = True
        return self._resume_point.is_resumed

    @property
    def resumable(self) -> bool:
        """Whether a resumed run would not start over: its script asks where it continues, or its loaders know."""
        return self._resume_point.asked or self._places.are_enough

    @override
    def skip(self) -> bool:
        if self._takeover.draws and not (self._places.skips or self._job.allow_lost):
            self._log.note(
                "session.skip: under this strategy minibatches go to who asks, so a run that is stopped will not be "
                "resumed with session.skip() in its script. Leave it out: loaders of session.shard find their place "
                "themselves"
            )
        self._places.skips = True
        if self._places.skips_wrong and not self._job.allow_lost:
            raise ConfigError(
                "session.skip: workers were lost or have come before the run was stopped, or minibatches went to who "
                "asked, so nobody knows which iterations of this worker are done. Leave session.skip() out: loaders of "
                "session.shard find their place themselves; allow_lost=True, --allow-lost, accepts that data is left "
                "out or comes twice"
            )
        self._end_again()
        if not self._resume_point.skip():
            if not self._registered.is_marked:
                self._registered.asks()
            if self._connection.bridge is not None and not self._resume_point.again:
                self._connection.bridge.counts.iterations += 1
            return False
        for optimizer in self._optimizers:
            optimizer._opt_called = True  # type: ignore[attr-defined]  # torch's schedulers warn without it
        self._samples.clear()
        return True

    @override
    def register(self, **objects: Any) -> None:
        objects = {
            name: one for name, one in objects.items() if not isinstance(one, ShardedLoader)
        }  # kept anyway
        ahead = [name for name, one in objects.items() if counts_ahead(one)]
        if ahead and (self._job.phases or not self._averages_gradients):
            kind = "phases" if self._job.phases else type(self._strategy).__name__
            raise ConfigError(
                f"session.register: {ahead[0]} is a loader with a state of its own, which under {kind} counts "
                "a minibatch more than the model has in a checkpoint: leave it out, and take the minibatches from "
                "session.shard of a DataLoader"
            )
        super().register(**objects)
        self._has_loader |= bool(ahead)
        point = self._resume_point
        if (
            point.is_resumed
            and not point.has_entered
            and any(self._registered.restores(name) for name in ahead)
        ):
            self._places.is_elsewhere = True  # the loader continues by itself
            point.pass_by()

    @override
    def epochs(self, number: int) -> Iterator[int]:
        return self._places.epochs(number)

    @property
    def aborted(self) -> bool:
        """Whether another node has ended the run; it reports why."""
        return self._connection.aborted

    @override
    def wrap(self, model: M, optimizer: O, *, fused: bool = True) -> tuple[M, O]:
        modules, optimizers = as_list(model, nn.Module), as_list(optimizer, TorchOptimizer)
        self._check_unused()
        self._check_momentum(group.get("momentum", 0.0) for one in optimizers for group in one.param_groups)
        refuse_sync_batch_norm(modules, self.world_size)
        if self.rank == 0:
            keep_configs(DiskStorage(Path(self._place.spec).parent), modules)
        if self._averages_gradients or self._strategy.local_rounds or self._moves_own_parameters:
            self._wrap_trained_here(modules, optimizers)
            return model, optimizer
        if len(modules) != 1 or len(optimizers) != 1:
            raise ConfigError(
                f"session.wrap: got {len(modules)} models and {len(optimizers)} optimizers; expected one of "
                f"each: {type(self._strategy).__name__} exchanges parameters, of one model and one optimizer. "
                'Use the strategy "synchronous" or "allreduce" for several, or, over slow links, "local-sgd"'
            )
        (module,), (torch_optimizer,) = modules, optimizers
        wrapped, binding, rule = take_over(
            module, torch_optimizer, self._strategy, self.world_size, self._step, self._where, fused=fused
        )
        self._optimizers, self._places.optimizers = [torch_optimizer, wrapped], [torch_optimizer]
        if wrapped is torch_optimizer:
            self._keep_states([torch_optimizer])
        self._begin(binding, rule)
        module.register_forward_pre_hook(BeforeForward(self._forward), with_kwargs=True)
        return model, cast(O, wrapped if isinstance(optimizer, TorchOptimizer) else [wrapped])

    def _wrap_trained_here(self, modules: Sequence[nn.Module], optimizers: Sequence[TorchOptimizer]) -> None:
        """Joins the run with models of which the loop's own optimizers make all steps."""
        self._optimizers = self._places.optimizers = optimizers
        bind: ParameterBinding | Callable[[RunPlan], ParameterBinding]
        if self._job.phases:
            self._check_phases(modules, optimizers)
            bind = partial(self._bind_phase, modules, optimizers)
        else:
            bind = self._bind(modules, optimizers)
        own_rule = self._averages_gradients or self._strategy.local_rounds
        # Else the worker hears of each step, and exchanges when it likes.
        rule = description_of(*optimizers) if own_rule else text_of_optimizer(STEPS)
        self._begin(bind, rule)
        for module in modules:
            module.register_forward_pre_hook(BeforeForward(self._called, self._forward), with_kwargs=True)
        if self._job.phases:
            for torch_optimizer in optimizers:
                around_each_step(torch_optimizer, lambda: None, lambda _: self._after_joint_step())
        self._begin_steps()

    def _bind_phase(
        self, modules: Sequence[nn.Module], optimizers: Sequence[TorchOptimizer], plan: RunPlan
    ) -> ParameterBinding:
        """The binding for a plan of the run. The node's thread calls it, while the loop's own one waits."""
        strategy = self._strategy = plan.strategy
        self._takeover.steps_a_round = strategy.local_steps if strategy.local_rounds else 1
        self._last_step = plan.loop_steps
        return self._bind(modules, optimizers)

    def _bind(self, modules: Sequence[nn.Module], optimizers: Sequence[TorchOptimizer]) -> ParameterBinding:
        """The binding for the present strategy."""
        if self._averages_gradients:
            self._binding = self._binding or ReplicaBinding(modules, optimizers)
        elif not isinstance(self._binding, LocalModule):
            begins = None if self._binding is None else self._binding.states
            self._binding = self._bind_local(modules, optimizers, begins)
        return self._binding

    def _begin_steps(self) -> None:
        """The loop goes on with the binding of the present plan."""
        if isinstance(self._binding, LocalModule):
            self._begin_local(self._binding)
        elif self._binding is not None:
            self._begin_replicas(self._binding)

    def _begin_replicas(self, binding: ReplicaBinding) -> None:
        bridge, optimizers = self._connection.bridge, self._optimizers
        assert bridge is not None
        parameters = [binding.parameters[name] for name in binding.names]
        wrapped = WrappedParameters(binding.names, parameters, optimizers)
        reducer = self._reducer = GradientReducer(
            wrapped,
            binding.vector,
            bridge,
            self._taken_samples,
            self._samples,
            self._log.step,
            self._takeover.roster,
            self.rank,
        )
        if self._entry.came is None:
            reducer.synchronize()
        else:
            reducer.rounds.load(self._entry.came["rounds"])
        self._entry.rounds = reducer.rounds.saved
        binding.states.watch(check=self._keeps)
        self._step_hooks = [register_optimizer_step_pre_hook(reducer.before_other_step)]
        for torch_optimizer in optimizers:
            self._step_hooks += [
                torch_optimizer.register_step_pre_hook(reducer.before_step),
                torch_optimizer.register_step_post_hook(reducer.after_step),
            ]

    def _after_joint_step(self) -> None:
        """The loop has made a step of which all workers have the same parameters."""
        reducer = self._reducer
        if reducer is None or reducer.is_open or not self._is_phase_over:
            return
        reducer.end()
        self._next_phase()
        if not self._averages_gradients:
            reducer.release()
            self._remove_hook()
            self._reducer, self._entry.rounds = None, lambda: None
            self._begin_steps()

    @property
    def _is_phase_over(self) -> bool:
        bridge, last = self._connection.bridge, self._last_step
        if last is None or bridge is None:
            return False
        return self._steps_made() >= (min(last, SLOW_STEPS) if bridge.is_slow else last)

    def _next_phase(self) -> None:
        bridge = self._connection.bridge
        assert bridge is not None
        bridge.end_phase()
        self._takeover.first_of_phase = bridge.before[0]

    def _check_phases(self, modules: Sequence[nn.Module], optimizers: Sequence[TorchOptimizer]) -> None:
        """Raises ConfigError if a later phase could not begin."""
        if len(optimizers) > 1:
            raise ConfigError(
                f"session.wrap: got {len(optimizers)} optimizers, expected one: this run has phases, whose steps are "
                "those of one optimizer. Give it the parameters of all models, in groups; or leave the phases out"
            )
        ModuleBinding(*_joined(modules, optimizers))  # raises

    def _bind_local(
        self,
        modules: Sequence[nn.Module],
        optimizers: Sequence[TorchOptimizer],
        states: OptimizerStates | None,
    ) -> LocalModule:
        is_first = states is None
        states = self._keep_states(optimizers, states)
        return LocalModule(
            *_joined(modules, optimizers),
            in_pairs=self._in_pairs,
            counted=self._samples,
            states=states,
            is_first=is_first,
        )

    def _called(self, module: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        if self._round is not None:
            self._round.called(module, args, kwargs)

    def _begin_local(self, binding: LocalModule) -> None:
        bridge, optimizers, is_again = self._connection.bridge, self._optimizers, self._round is not None
        assert bridge is not None
        in_rounds, is_new = self._strategy.local_rounds, self._entry.came is not None and not bridge.goes_on
        steps = self._strategy.local_steps if in_rounds else 1
        self._round = LocalRound(bridge, steps, binding, len(optimizers), is_new=is_new)
        if is_again:
            return

        first_evaluation = list[float]()  # its samples: LBFGS makes several in a step, of the same ones

        def evaluated() -> None:
            first_evaluation.append(self._taken_samples())

        def made(optimizer: TorchOptimizer, loss: float) -> None:
            if self._is_in_model():
                first_evaluation.clear()
                return
            binding.watch.check_groups(self._where(), optimizer.param_groups)
            one_round = self._round
            assert one_round is not None
            taken = partial(self._taken_samples, is_new=not one_round.is_further(optimizer))
            samples, _ = whole(first_evaluation[0] if first_evaluation else taken())
            first_evaluation.clear()
            one_round.stepped(samples, self._log.step(loss), optimizer)
            if self._is_phase_over:
                one_round.end()
                self._next_phase()
                self._begin_steps()

        def before() -> None:
            bridge.check_open()
            self._check_unchanged()

        for torch_optimizer in optimizers:
            around_each_step(torch_optimizer, before, partial(made, torch_optimizer), evaluated)

    def _keep_states(
        self, optimizers: Sequence[TorchOptimizer], states: OptimizerStates | None = None
    ) -> OptimizerStates:
        """Has checkpoints keep the states of optimizers that make their steps on this worker alone.

        `states`: as a phase before has watched them.
        """
        if states is None:
            states = OptimizerStates(optimizers, {})
            states.watch(check=self._keeps)
        self._registered.optimizers = states
        for optimizer in optimizers:
            optimizer.register_step_pre_hook(self._without_gradients)
        return states

    @property
    def _keeps(self) -> bool:
        """Whether the run makes checkpoints, between two phases at least."""
        return self._job.checkpoint_every is not None or bool(self._job.phases)

    def _without_gradients(self, optimizer: TorchOptimizer, args: Any, kwargs: Any) -> Any:
        """Lets a step that is in the model already change nothing."""
        if not self._resume_point.again:
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

    def _is_in_model(self) -> bool:
        """Whether the step that the loop makes is the last one before the run was resumed: see `Registered`."""
        if not self._resume_point.again:
            return False
        self._resume_point.check_asked()
        self._samples.clear()
        self._registered.passed()
        self._connection.restore_buffers()
        self._is_passed = True
        return True

    def _end_again(self) -> None:
        if self._resume_point.again and self._is_passed:
            self._resume_point.end_again()

    @override
    def split(
        self, build: Callable[[], nn.Module], example: Any, *, into: int, pipeline_dtype: str | None = None
    ) -> nn.Module:
        self._check_unused()
        if not self._averages_gradients:
            raise ConfigError(
                f"session.split under {type(self._strategy).__name__}, which exchanges parameters: replicas of a split "
                'model can only average gradients; expected gradstream.join("allreduce") or "synchronous"'
            )
        split = LoopSplit(self.rank, build, example, into, self.world_size, self._job, pipeline_dtype)
        bridge = self._begin(split.binding, split.RULE)
        module = self._split = split.join(bridge, self._seed, self._handed_over)
        module.register_forward_pre_hook(BeforeForward(self._forward), with_kwargs=True)
        self._step_hooks = [
            register_optimizer_step_pre_hook(module.before_step),
            register_optimizer_step_post_hook(self._after_split_step),
        ]
        return module

    def _handed_over(self, samples: int) -> None:
        """Counts a backward pass of a split model, once for all parts."""
        del samples
        assert self._connection.bridge is not None
        samples, _ = whole(self._taken_samples())
        self._connection.bridge.open(0 if self.rank else samples).zero_()
        self._connection.bridge.exchange(self._log.step(), torch.Tensor.zero_)

    def _after_split_step(self, optimizer: TorchOptimizer, *_: Any) -> None:
        if self._split is not None and self._split.has_any(optimizer):
            assert self._connection.bridge is not None
            self._connection.bridge.stepped()

    @override
    def clip_grad_norm_(self, parameters: Iterable[torch.Tensor], max_norm: float) -> torch.Tensor:
        if self._split is None:
            return super().clip_grad_norm_(parameters, max_norm)
        return self._split.clip_grad_norm(list(parameters), max_norm)

    @contextmanager
    @override
    def no_sync(self) -> Iterator[None]:
        if self._reducer is None:
            yield
            return
        with self._reducer.no_sync():
            yield
        self._samples.use()

    @override
    def barrier(self) -> None:
        if self._connection.bridge is None and not self._closed:
            self._early_barrier.wait()
        if self._reducer is not None and not (self._closed or self._entry.is_behind):
            self._reducer.synchronize()

    @override
    def shard(self, data: Any, *, split: bool = False) -> Any:
        if isinstance(data, tuple):
            return tuple(self.shard(item, split=split) for item in data)
        loader = object()  # identifies the loader that is made
        note, over = (partial(call, loader=loader) for call in (self._note, self._over))
        strategy, in_group = self._strategy, self._takeover.in_rounds
        others_go_on = strategy.survives_worker_loss and (not strategy.gives_mean or in_group)
        takeover = self._takeover if others_go_on and self._split is None else None
        rank, workers = (self.rank, self.world_size) if self._split is None else (0, 1)
        is_placed = isinstance(data, DataLoader) and not isinstance(data.dataset, IterableDataset)
        place = self._places.new() if is_placed else None
        self._placed |= {loader} if is_placed else set()
        part = LoaderPart(
            rank,
            workers,
            self._seed,
            split,
            note,
            in_group,
            over,
            takeover,
            self._ask,
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
                f"session.shard: worker-{self.rank} has come to a run that had begun, and a {type(data).__name__} is "
                "divided among the workers of its beginning. Expected a DataLoader of a data set that is read by number"
            )
        if is_placed:
            with suppress(TypeError):  # the sampler has no length
                self._samples.uses[loader].total = len(made)
        return made

    def _ask(self) -> None:
        """Notes that the loop asks a loader for a minibatch."""
        if torch.is_grad_enabled():
            point = self._resume_point
            self._end_again()
            is_live = point.skipped == point.first or self._steps_made() > point.steps
            self._registered.asks(live=is_live)

    def _forward(self, module: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        """Notes that the loop calls a model."""
        if module.training and torch.is_grad_enabled():
            self._uses()
        self._samples.forward(module, args, kwargs)

    def _present(self) -> Sequence[int]:
        """Ranks of the workers that have made the newest round, which all of them know; without rounds, all."""
        number = self._next_step() if self._takeover.in_rounds else None
        roster = self._takeover.roster
        return roster.changes[0].ranks if number is None else roster.of(number - 1)

    def _passed(self) -> tuple[int, ...]:
        """Numbers that change with each step that the loop makes or skips, and each backward."""
        bridge = self._connection.bridge
        counts = () if bridge is None else (bridge.counts.batches, bridge.counts.steps)
        return (*counts, self._resume_point.skipped, self._samples.passes)

    def _uses(self) -> None:
        """Notes that the loop works on its next step."""
        point = self._resume_point
        if point.again and not (self._places.skips or point.skipped):
            point.again = False
            if self._registered.has_any:
                raise ConfigError(
                    f"this run goes on after step {point.steps}, and its script looks for its place by session.step. "
                    f"Under {type(self._strategy).__name__} what it has registered is as it was within that step: take "
                    "the minibatches from DataLoaders of session.shard, and do not read session.step or "
                    "session.resumed before the loop; or call session.skip() in each iteration"
                )
        if self._has_loader and self._places.epoch is None and not self._registered.has_counts:
            raise ConfigError(
                "session.register: a loader with a state of its own continues within its epoch in a resumed run, but "
                "nobody knows how many epochs are left: take `for epoch in session.epochs(n)`, or register a dict with "
                "the epoch from which your loop begins"
            )
        changed = self._places.check_options(may_differ=self._job.allow_changed)
        if changed:
            self._log.note(f"from here on: {changed}")
        self._registered.uses()

    def _note(self, samples: int | None, loader: object) -> None:
        """Notes that the loop takes a minibatch from a loader."""
        self._samples.note(samples, loader)
        if torch.is_grad_enabled():
            self._takeover.own_data |= loader not in self._dealt
            self._places.has_others |= loader not in self._placed

    def _over(self, ended: bool, loader: object) -> None:
        """Notes that the loop goes through an iteration of a loader no further."""
        self._samples.over(loader, ended=ended, epoch=self._places.epoch)

    @override
    def exchange(
        self, parameters: Tree, gradients: Tree, rule: Optimizer, samples: float | None = None
    ) -> Tree:
        if samples is not None:
            self.samples(samples)
        if self._arrays is None:
            if self._connection.bridge is not None:
                raise ConfigError(
                    "session.exchange: this session has a PyTorch module already, from session.wrap; make "
                    "steps with its optimizer"
                )
            self._begin_arrays(parameters, rule)
        bridge = self._connection.bridge
        assert self._arrays is not None and bridge is not None
        if isinstance(self._arrays, LocalArrays):
            assert self._round is not None
            bridge.check_open()
            if self._is_in_model():
                return parameters
            self._arrays.step(parameters, gradients, rule)
            samples, _ = whole(self._taken_samples())
            self._round.stepped(samples, self._log.step())
            return parameters
        if isinstance(self._arrays, ArrayGradients):
            return self._arrays.step(bridge, parameters, gradients, rule, self._taken_samples())
        self._arrays.check(parameters, rule)
        self._check_unchanged()
        self._arrays.binding.set_gradients(gradients)
        self._step(rate_of(rule), math.nan)
        return parameters

    def _begin_arrays(self, parameters: Tree, rule: Optimizer) -> None:
        self._check_unused()
        if self._place.is_late:
            raise ConfigError(
                "session.exchange: this worker has come to a run that had begun, and its first gradient is one of the "
                "arrays' first values. Only loops with session.wrap can take further workers"
            )
        self._check_momentum([getattr(rule, "momentum", 0.0)])
        if self._averages_gradients:
            replica = self._arrays = ArrayGradients(parameters)
            bridge = self._begin(replica.binding, description_of(rule), in_step=True)
            if self._entry.came is None:
                replica.synchronize(bridge)
        elif self._strategy.local_rounds:
            local = self._arrays = LocalArrays(
                parameters, rule, in_pairs=self._in_pairs, is_repeat=self._samples.is_repeat
            )
            self._registered.optimizers = local.updates
            bridge = self._begin(local, description_of(rule), in_step=True)
            is_new = self._entry.came is not None
            self._round = LocalRound(bridge, self._strategy.local_steps, local, is_new=is_new)
        else:
            arrays = self._arrays = ArrayParameters(parameters, rule)
            self._begin(arrays.binding, arrays.rule_text(), in_step=True)

    @override
    def samples(self, count: float) -> None:
        number = float(count)
        if not 0 <= number < math.inf:
            raise ConfigError(f"session.samples({count}): expected a number of samples, 0 or more")
        if not number.is_integer() and not self._averages_gradients:
            raise ConfigError(
                f"session.samples({count}): {type(self._strategy).__name__} weighs by whole numbers of samples; "
                'multiply the weights of all workers by the same factor and round them, or use "synchronous" or '
                '"allreduce"'
            )
        self._samples.set(number)

    @override
    def log(self, /, **values: Any) -> None:
        self._log.log(**values)

    @override
    def total(self, steps: int) -> None:
        self._log.total(steps)

    @contextmanager
    @override
    def evaluation(self) -> Iterator[None]:
        if self._connection.bridge is None or self._closed or self._averages_gradients:
            yield
            return
        self._check_unchanged()
        with self._connection.newest_parameters():
            yield

    def close(self) -> None:
        """See `Session.close`. Raises the error that ended the run, if any.

        Raises:
            ConfigError: the script has changed parameters since its last step. The model is saved as the
                servers have it, and `gradstream train` ends with status 1.
        """
        changed = None
        try:
            self._check_unchanged()
        except ConfigError as error:
            changed = error
        self.finish()
        if changed is not None:
            raise changed

    def finish(self) -> None:
        """Ends the session after the script has ended. Does not read the script's parameters."""
        if self._closed:
            return
        self._closed = self._entry.is_closing = True
        self._remove_hook()
        if self._entry.is_behind:
            error = ConfigError(
                f"worker-{self.rank} has come to a run that had begun, and its loop has ended without a step: it has "
                "to go through all epochs from the first one (those that are over have no minibatches), or through "
                "those of session.epochs"
            )
            self._connection.fail(error)
            raise error
        if self._places.breaks_off and self.is_main and not self._registered.has_counts:
            self._log.note(
                f"this run was resumed at step {self._resume_point.steps}, and its loop has ended within an epoch: if "
                "it counts its steps or epochs itself, it has made more than without the stop. Register the count: "
                "session.register(counts=counts), with a dict"
            )
        if self.is_main and (left := self._samples.told_left()):
            self._log.note(f"{worker_name(self.rank)}: {left}")
        try:
            if self._split is not None:
                self._split.close()
            elif self._reducer is not None and not self.aborted:
                self._reducer.end()
            elif self._round is not None and not self.aborted:
                self._round.end()
        finally:
            self._connection.leave()

    def fail(self, error: BaseException) -> None:
        """Ends the run for all workers, since the script has ended with an exception. Never raises."""
        if self._closed or self._connection.bridge is None:
            return
        self._closed = True
        self._remove_hook()
        self._connection.fail(error)

    def _check_unused(self) -> None:
        if self._connection.bridge is not None:
            raise ConfigError(
                "session.wrap: this session has parameters already, from session.wrap, split or exchange; "
                "one run trains one model. Wrap several modules in one call"
            )
        if self._closed:
            raise ClosedError(
                "session.wrap: the session was closed, and a session trains only one model: call it before "
                "session.close, or train the next model in another run of the script"
            )

    def _check_momentum(self, momenta: Iterable[float]) -> None:
        """Raises ConfigError if the script's optimizer has a momentum besides that of the codec."""
        codec = self._job.codec
        if codec is not None and any(momenta):
            named = traits_of_codec(find_codec(codec), f"codec={codec!r}")
            refuse({**named, "momentum": "an optimizer with momentum"}, "session.wrap: ")

    def _where(self) -> str:
        return f"worker-{self.rank}, step {self._steps_made()}"

    def _check_unchanged(self) -> None:
        """Raises ConfigError if the script has changed parameters that the exchange would overwrite."""
        if not self._closed:
            self._connection.check_unchanged(self._where())

    def _remove_hook(self) -> None:
        for hook in self._step_hooks:
            hook.remove()

    def _begin(
        self,
        binding: ParameterBinding | Callable[[RunPlan], ParameterBinding],
        rule: str,
        *,
        in_step: bool = False,
    ) -> LoopBridge:
        """Joins the run: between two steps of the loop or, with arrays, in its first one (`in_step`)."""
        bridge = self._connection.join(
            (lambda _: binding) if isinstance(binding, ParameterBinding) else binding,
            rule,
            counts_steps=self._averages_gradients or self._strategy.local_rounds,
            entry=self._entry,
        )
        self._takeover.bridge = bridge
        if not in_step:  # what was taken before, for the means of the data perhaps, is in no round
            self._samples.begin()
        point = self._resume_point
        point.again = not self._averages_gradients and self._registered.again and point.steps > 0
        self._registered.begin(keeps=self._keeps)
        if isinstance(self._strategy, GroupStrategy):
            bridge.find_left = self._left
            bridge.find_mark, bridge.falls_out = lambda: self._takeover.mark, self._takeover.fall_out
            bridge.is_at_edge = lambda: self._entry.is_at_edge
        self._early_barrier.over()
        return bridge

    def _left(self) -> Left:
        """What lost workers had left of the data."""
        batches: Counter[int] = Counter()
        for deal in self._takeover.deals.values():
            batches.update(deal.left())
        batches.update(dict.fromkeys(self._takeover.roster.lost, 0))
        return Left(batches, self._is_unclear)

    @property
    def _is_unclear(self) -> bool:
        """Whether the loop has used minibatches of which nobody knows who has them, and in which round."""
        return self._takeover.own_data or self._samples.unseen or self._samples.ahead

    def _step(self, lr: float, loss: float) -> None:
        if self._is_in_model():
            return
        samples, _ = whole(self._taken_samples())
        assert self._connection.bridge is not None
        self._registered.stepped()
        self._connection.bridge.step(samples, lr, self._log.step(loss))

    def _taken_samples(self, local: Sequence[PassSamples] = (), *, is_new: bool = True) -> float:
        """Samples of the gradient that is submitted now, including passes in `no_sync`.

        Args:
            local: these passes.
            is_new: the gradient is for a step of the loop that is not counted yet.
        """
        self._resume_point.check_asked()
        if is_new:
            self._uses()
        taken = self._samples.take(local)
        self._takeover.report()
        self._places.has_others |= self._samples.unseen or self._samples.ahead
        return taken

    @property
    def _averages_gradients(self) -> bool:
        """Whether the workers exchange only gradients, and the loop's own optimizer makes each step."""
        return self._strategy.gives_mean

    @property
    def _moves_own_parameters(self) -> bool:
        """Whether each worker trains parameters of its own and the servers merge them, without optimizers' states."""
        strategy = self._strategy
        own = isinstance(strategy, ServerStrategy) and strategy.pushes != "gradients"
        return own and not objection(strategy, self.world_size)

    @property
    def _in_pairs(self) -> bool:
        """Whether workers exchange parameters in pairs."""
        return isinstance(self._strategy, PeerStrategy)


def _joined(
    modules: Sequence[nn.Module], optimizers: Sequence[TorchOptimizer]
) -> tuple[nn.Module, list[nn.Parameter]]:
    """All models as one, and the parameters that are trained."""
    groups = [group["params"] for torch_optimizer in optimizers for group in torch_optimizer.param_groups]
    trained = {id(p): p for group in groups for p in group if p.requires_grad}
    return modules[0] if len(modules) == 1 else nn.ModuleList(modules), list(trained.values())
