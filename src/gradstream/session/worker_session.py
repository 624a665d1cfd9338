"""The session of one of several workers: the user's loop on one side, the worker's node on the other."""

from __future__ import annotations

import math
import shutil
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import nn
from torch.optim import Optimizer as TorchOptimizer
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook
from torch.utils.hooks import RemovableHandle
from typing_extensions import override

from gradstream.checkpoint.layouts import keep_configs
from gradstream.errors import ClosedError, ConfigError, DeadlineError
from gradstream.job.plan import RunPlan, worker_name
from gradstream.job.registry import find_codec
from gradstream.job.traits import traits_of_codec
from gradstream.model.buffers import Tree
from gradstream.optim.base import Optimizer
from gradstream.run.placement import WorkerPlacement
from gradstream.runtime.storage import DiskStorage
from gradstream.session.arrays import ArrayGradients, ArrayParameters, rate_of
from gradstream.session.binding import ParameterBinding
from gradstream.session.bridge import LoopBridge
from gradstream.session.host import Host
from gradstream.session.loaders import ShardedLoader
from gradstream.session.local import LocalArrays, LocalRound
from gradstream.session.log import SessionLog
from gradstream.session.node import RunConnection
from gradstream.session.optimizer import as_list, take_over
from gradstream.session.progress import LoopProgress
from gradstream.session.rules import description_of
from gradstream.session.samples import BeforeForward, whole
from gradstream.session.session import M, O, Session
from gradstream.session.split_module import LoopSplit, SplitModule
from gradstream.session.steps import LoopSteps, loop_makes_steps
from gradstream.strategies.base import PeerStrategy, Strategy
from gradstream.traits import refuse

# ---- early barrier -----------------------------------------------------------------------
# `EarlyBarrier`: lets workers wait for one another before they join their run in `wrap`.
#
#     if session.rank == 0: download()
#     session.barrier()
#
# They write files beside the run's specification, so they must be on one machine.

POLL_S = 0.05


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
        self._seed = seed
        self._log = SessionLog(place.rank, lambda: self._progress.made)
        self._connection = RunConnection(place, self._log, self._registered, host)
        self._progress = LoopProgress(place, self._connection, self._registered, self._log, seed)
        self.ahead = self._progress.ahead
        self._early_barrier = EarlyBarrier(place)
        self._optimizers: Sequence[TorchOptimizer] = ()
        self._steps: LoopSteps | None = None  # of models whose steps the loop's optimizers make
        self._arrays: ArrayGradients | ArrayParameters | LocalArrays | None = None
        self._round: LocalRound | None = None  # of arrays
        self._split: SplitModule | None = None
        self._split_hooks: Sequence[RemovableHandle] = ()
        self._closed = False

    @property
    def _strategy(self) -> Strategy:
        return self._connection.strategy

    @property
    def world_size(self) -> int:  # type: ignore[override]  # a group may change
        """Number of workers: of a group, those that make the present round."""
        return len(self._progress.takeover.roster.now)

    @property
    def has_replicas(self) -> bool:
        """Whether all workers have the same parameters after each step."""
        return self._strategy.gives_mean

    @property
    @override
    def is_main(self) -> bool:
        return self.rank == self._progress.takeover.roster.first

    @property
    @override
    def step(self) -> int:
        self._progress.point.asked = True
        return self._progress.made

    @property
    @override
    def resumed(self) -> bool:
        self._progress.point.asked = True
        return self._progress.point.is_resumed

    @property
    def resumable(self) -> bool:
        """Whether a resumed run would not start over: its script asks where it continues, or its loaders know."""
        return self._progress.point.asked or self._progress.places.are_enough

    @override
    def skip(self) -> bool:
        return self._progress.skip(self._optimizers)

    @override
    def register(self, **objects: Any) -> None:
        objects = {
            name: one for name, one in objects.items() if not isinstance(one, ShardedLoader)
        }  # kept anyway
        self._progress.check_registered(objects)
        super().register(**objects)
        self._progress.pass_by(objects)

    @override
    def epochs(self, number: int) -> Iterator[int]:
        return self._progress.places.epochs(number)

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
        progress = self._progress
        if loop_makes_steps(self._strategy, self.world_size):
            self._optimizers = progress.places.optimizers = optimizers
            steps = self._steps = LoopSteps(self._connection, progress, self._log, modules, optimizers)
            self._begin(steps.bind, steps.rule)
            for module in modules:
                module.register_forward_pre_hook(
                    BeforeForward(steps.called, progress.called), with_kwargs=True
                )
            steps.begin()
            return model, optimizer
        if len(modules) != 1 or len(optimizers) != 1:
            raise ConfigError(
                f"session.wrap: got {len(modules)} models and {len(optimizers)} optimizers; expected one of "
                f"each: {type(self._strategy).__name__} exchanges parameters, of one model and one optimizer. "
                'Use the strategy "synchronous" or "allreduce" for several, or, over slow links, "local-sgd"'
            )
        (module,), (torch_optimizer,) = modules, optimizers
        wrapped, binding, rule = take_over(
            module,
            torch_optimizer,
            self._strategy,
            self.world_size,
            self._step,
            lambda: progress.where,
            fused=fused,
        )
        self._optimizers, progress.places.optimizers = [torch_optimizer, wrapped], [torch_optimizer]
        if wrapped is torch_optimizer:
            progress.keep_states([torch_optimizer])
        self._begin(binding, rule)
        module.register_forward_pre_hook(BeforeForward(progress.called), with_kwargs=True)
        return model, cast(O, wrapped if isinstance(optimizer, TorchOptimizer) else [wrapped])

    @override
    def split(
        self, build: Callable[[], nn.Module], example: Any, *, into: int, pipeline_dtype: str | None = None
    ) -> nn.Module:
        self._check_unused()
        if not self.has_replicas:
            raise ConfigError(
                f"session.split under {type(self._strategy).__name__}, which exchanges parameters: replicas of a split "
                'model can only average gradients; expected gradstream.join("allreduce") or "synchronous"'
            )
        job = self._connection.job
        split = LoopSplit(self.rank, build, example, into, self.world_size, job, pipeline_dtype)
        bridge = self._begin(split.binding, split.RULE)
        module = self._split = split.join(bridge, self._seed, self._handed_over)
        module.register_forward_pre_hook(BeforeForward(self._progress.called), with_kwargs=True)
        self._split_hooks = [
            register_optimizer_step_pre_hook(module.before_step),
            register_optimizer_step_post_hook(self._after_split_step),
        ]
        return module

    def _handed_over(self, samples: int) -> None:
        """Counts a backward pass of a split model, once for all parts."""
        del samples
        assert self._connection.bridge is not None
        samples, _ = whole(self._progress.take())
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
        with nullcontext() if self._steps is None else self._steps.no_sync():
            yield

    @override
    def barrier(self) -> None:
        if self._connection.bridge is None and not self._closed:
            self._early_barrier.wait()
        if self._steps is not None and not (self._closed or self._progress.entry.is_behind):
            self._steps.synchronize()

    @override
    def shard(self, data: Any, *, split: bool = False) -> Any:
        return self._progress.shard(data, split=split, alike=self._split is not None)

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
            if self._progress.is_in_model():
                return parameters
            self._arrays.step(parameters, gradients, rule)
            samples, _ = whole(self._progress.take())
            self._round.stepped(samples, self._log.step())
            return parameters
        if isinstance(self._arrays, ArrayGradients):
            return self._arrays.step(bridge, parameters, gradients, rule, self._progress.take())
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
        if self.has_replicas:
            replica = self._arrays = ArrayGradients(parameters)
            bridge = self._begin(replica.binding, description_of(rule), in_step=True)
            if self._progress.entry.came is None:
                replica.synchronize(bridge)
        elif self._strategy.local_rounds:
            local = self._arrays = LocalArrays(
                parameters,
                rule,
                in_pairs=isinstance(self._strategy, PeerStrategy),
                is_repeat=self._progress.samples.is_repeat,
            )
            self._registered.optimizers = local.updates
            bridge = self._begin(local, description_of(rule), in_step=True)
            is_new = self._progress.entry.came is not None
            self._round = LocalRound(bridge, self._strategy.local_steps, local, is_new=is_new)
        else:
            arrays = self._arrays = ArrayParameters(parameters, rule)
            self._begin(arrays.binding, arrays.rule_text(), in_step=True)

    @override
    def samples(self, count: float) -> None:
        number = float(count)
        if not 0 <= number < math.inf:
            raise ConfigError(f"session.samples({count}): expected a number of samples, 0 or more")
        if not number.is_integer() and not self.has_replicas:
            raise ConfigError(
                f"session.samples({count}): {type(self._strategy).__name__} weighs by whole numbers of samples; "
                'multiply the weights of all workers by the same factor and round them, or use "synchronous" or '
                '"allreduce"'
            )
        self._progress.samples.set(number)

    @override
    def log(self, /, **values: Any) -> None:
        self._log.log(**values)

    @override
    def total(self, steps: int) -> None:
        self._log.total(steps)

    @contextmanager
    @override
    def evaluation(self) -> Iterator[None]:
        if self._connection.bridge is None or self._closed or self.has_replicas:
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
        self._closed = self._progress.entry.is_closing = True
        self._remove_hooks()
        try:
            self._progress.end(is_main=self.is_main)
        except ConfigError as error:
            self._connection.fail(error)
            raise
        try:
            if self._split is not None:
                self._split.close()
            elif self._steps is not None and not self.aborted:
                self._steps.end()
            elif self._round is not None and not self.aborted:
                self._round.end()
        finally:
            self._connection.leave()

    def fail(self, error: BaseException) -> None:
        """Ends the run for all workers, since the script has ended with an exception. Never raises."""
        if self._closed or self._connection.bridge is None:
            return
        self._closed = True
        self._remove_hooks()
        self._connection.fail(error)

    def _remove_hooks(self) -> None:
        if self._steps is not None:
            self._steps.remove_hooks()
        for hook in self._split_hooks:
            hook.remove()

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
        codec = self._connection.job.codec
        if codec is not None and any(momenta):
            named = traits_of_codec(find_codec(codec), f"codec={codec!r}")
            refuse({**named, "momentum": "an optimizer with momentum"}, "session.wrap: ")

    def _check_unchanged(self) -> None:
        """Raises ConfigError if the script has changed parameters that the exchange would overwrite."""
        if not self._closed:
            self._connection.check_unchanged(self._progress.where)

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
            counts_steps=self.has_replicas or self._strategy.local_rounds,
            entry=self._progress.entry,
        )
        self._progress.begin(bridge, in_step=in_step)
        self._early_barrier.over()
        return bridge

    def _step(self, lr: float, loss: float) -> None:
        if self._progress.is_in_model():
            return
        samples, _ = whole(self._progress.take())
        assert self._connection.bridge is not None
        self._registered.stepped()
        self._connection.bridge.step(samples, lr, self._log.step(loss))
