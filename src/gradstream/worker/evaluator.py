"""Evaluates the model while training continues, on the present worker of the lowest rank."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext

import torch

from gradstream.checkpoint.elsewhere import ElsewhereStorage
from gradstream.checkpoint.manifest import Evaluated
from gradstream.coordinator.client.member import Member
from gradstream.data.base import BatchRef
from gradstream.model.buffers import Buffers, with_buffers
from gradstream.runtime.base import Runtime, Work
from gradstream.runtime.storage import disk_error
from gradstream.strategies.base import ServerStrategy
from gradstream.telemetry.events import DiskEvent, EvaluatedEvent
from gradstream.worker.buffer_averager import BufferAverager
from gradstream.worker.config import WorkerConfig
from gradstream.worker.evaluation import DueEvaluations, Evaluation, check_goals, check_outputs, evaluate
from gradstream.worker.final_model import keep_if_best
from gradstream.worker.parts.worker import ReplicaLead
from gradstream.worker.replica import Replica
from gradstream.worker.schedule import Schedule


class Evaluator:
    """Evaluates the model when that is due, and reports the result.

    In a synchronous run it evaluates the parameters after the last round; in an asynchronous run, the parameters that
    this worker swapped in last, with its own steps since then. If each worker has parameters of its own, it fetches
    the shards' parameters. Buffers are averaged over all workers.

    Args:
        runtime: runtime of the worker's node.
        member: reports the results.
        config: when to evaluate, and with which metrics.
        schedule: knows the place of each minibatch in the run.
        averager: averages the buffers of all workers.
        is_lowest: whether this is the present worker of the lowest rank.
        lead: leads the other processes of this worker's replica, which compute outputs with it; None without them.
    """

    def __init__(
        self,
        runtime: Runtime,
        member: Member,
        config: WorkerConfig,
        schedule: Schedule,
        averager: BufferAverager,
        is_lowest: Callable[[], bool],
        lead: ReplicaLead | None = None,
    ) -> None:
        self._runtime = runtime
        self._member = member
        self._config = config
        self._schedule = schedule
        self._averager = averager
        self._is_lowest = is_lowest
        self._lead = lead
        self._last_ref: BatchRef | None = None
        self._is_told = False
        self._due = DueEvaluations(config.plan.evaluation, schedule)

    async def at_begin(self, replica: Replica, *, late: bool = False) -> None:
        """Checks before training that the model computes the outputs that metrics need.

        Args:
            replica: has the initial parameters.
            late: this worker joined after training had begun, so earlier evaluations are not its own.

        Raises:
            UserCodeError: the model does not.
        """
        self._due.late = late
        plan, model = self._config.plan.evaluation, self._config.model
        if plan.every is not None and plan.metrics and getattr(model, "calls_itself", False):
            await self._runtime.compute(
                lambda _: check_outputs(model, replica.parameters.tensor, self._config.plan.job.data),
                work=Work("evaluate", samples=1),
                reads=[replica.parameters.all],
            )

    async def at_boundary(self, replica: Replica, refs: Sequence[BatchRef]) -> None:
        """Evaluates if an evaluation became due with these minibatches, which are done."""
        self._last_ref = ref = refs[-1]
        step = self._due.newly_due(refs)
        if step is None:
            return
        if self._is_lowest():
            await self._evaluate(replica, ref, step)
        else:
            await self._averager.keep(step)

    async def at_end(self, replica: Replica, *, early: bool) -> None:
        """Evaluates the final parameters, if the run evaluates at all.

        Args:
            replica: has the final parameters.
            early: the run ends before its last minibatch.
        """
        if self._config.plan.evaluation.every is not None:
            last = self._last_ref if early and self._last_ref else self._schedule.last
            await self._evaluate(replica, last, None)

    async def _evaluate(self, replica: Replica, ref: BatchRef, step: int | None) -> None:
        """Evaluates the current parameters, with the workers' buffers as of `step`; None is the end of the run."""
        final = step is None
        config, data, begun_ns = self._config, self._config.plan.job.data, self._runtime.now()
        done = self._schedule.position(ref).after()
        buffers = await self._averager.average(step, last=final)
        strategy = config.plan.strategy
        apart = strategy.in_passes or (
            isinstance(strategy, ServerStrategy) and strategy.pushes != "gradients"
        )
        own = apart and not final  # the worker's parameters are its own, or those of a trial
        parameters = await replica.newest() if own else replica.parameters.tensor

        given = (
            None if self._lead is None else await self._lead.outputs(parameters, data, buffers, newest=own)
        )

        def look(_: object) -> Evaluation:
            model = config.model if given is None else given
            with nullcontext() if given is not None else with_buffers(config.model, buffers):
                evaluation = evaluate(model, parameters, data, config.plan.evaluation.metrics)
            check_goals(evaluation, config.plan.evaluation.goals)
            if (
                config.plan.evaluation.keep_best and given is None
            ):  # parts of a split model are on several processes
                self._keep_if_best(done.step, parameters, buffers, evaluation)
            return evaluation

        evaluation = await self._runtime.compute(
            look,
            work=Work("evaluate", samples=data.num_test_samples),
            reads=[replica.parameters.all],
            shape_only=Evaluation(None, None, data.num_test_samples),
        )
        num_samples = data.num_samples
        self._member.emit(
            EvaluatedEvent(
                step=done.step,
                epoch=ref.epoch,
                samples=round(done.epoch * num_samples) if num_samples else 0,
                accuracy=evaluation.accuracy,
                loss=evaluation.loss,
                metrics=evaluation.metrics,
                held_out=evaluation.num_samples,
                seconds=(self._runtime.now() - begun_ns) / 1e9,
                final=final,
            )
        )
        self._member.hurry()  # the result may end the run

    def _keep_if_best(
        self, step: int, parameters: torch.Tensor, buffers: Buffers, evaluation: Evaluation
    ) -> None:
        """Keeps these parameters if no evaluation was as good. A disk error does not end the run."""
        if isinstance(self._runtime.storage, ElsewhereStorage):  # worker 0 was lost, or is on another machine
            text = (
                f"{self._runtime.node} evaluates now, on another machine than the run directory: checkpoints/best has "
                "the best parameters of the evaluations before"
            )
            if not self._is_told:
                self._member.emit(DiskEvent(what="best parameters", state="waiting", error="", message=text))
            self._is_told = True
            return
        try:
            until = self._config.plan.evaluation.until
            score = (
                None
                if until is None
                else until.score(evaluation.accuracy, evaluation.loss, evaluation.metrics)
            )
            best = Evaluated(step, evaluation.accuracy, evaluation.loss, score)
            keep_if_best(self._runtime.storage, self._config.model, parameters, buffers, best)
        except OSError as error:
            why = disk_error(error)
            text = f"the parameters of step {step:,}, the best so far, are not kept: {why}"
            self._member.emit(DiskEvent(what="best parameters", state="waiting", error=why, message=text))
