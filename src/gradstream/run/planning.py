"""Resolves a job once: `plan_run` finds its names, checks it and makes the `RunPlan` that all nodes share.

The launcher makes the plan of a run. `run.node_spec` writes it as JSON, from which each process makes the same
plan again; nodes that are threads or simulated share the launcher's.
"""

from __future__ import annotations

from dataclasses import replace

from gradstream.checkpoint.folder import Policy, parse_every
from gradstream.checkpoint.manifest import JobPhase, Resume
from gradstream.coordinator.link_choice import Chosen
from gradstream.data.base import DataProgress
from gradstream.errors import ConfigError
from gradstream.job.code import find_function
from gradstream.job.job import Job, is_open_ended, strategy_of
from gradstream.job.metrics import Metric
from gradstream.job.phase_jobs import AUTO, job_of_phase, measured_first, rate_of_phase
from gradstream.job.plan import EvaluationPlan, RunPlan
from gradstream.job.registry import find_codec, find_optimizer
from gradstream.job.traits import traits_of_job
from gradstream.job.validation import check, check_micro_batches, check_resumed, check_strategy, whole
from gradstream.optim.groups import groups_of
from gradstream.strategies.base import ServerStrategy, SharedMemoryStrategy, Strategy
from gradstream.traits import refuse
from gradstream.transport.offers import shares_memory
from gradstream.wire.chunks import CHUNK_ELEMS
from gradstream.worker.schedule import Schedule


def plan_run(job: Job, run_id: str, *, resume: Resume | None = None, keeps: bool = True) -> RunPlan:
    """Resolves a job: finds its strategy and update rule, plans its data, and checks that all fit together.

    Args:
        job: as the user asks for it.
        run_id: name of the run; its nodes refuse those of other runs.
        resume: where the run goes on; None where it begins.
        keeps: whether there is a disk for checkpoints.

    Raises:
        ConfigError: any mistake that can be known before a node is started.
    """
    job = measured_first(job)
    if job.phases:
        return _plan_phases(job, run_id, resume, keeps)
    return _plan_job(job, run_id, resume, keeps)


def plan_at(plan: RunPlan, resume: Resume | None) -> RunPlan:
    """The plan of the same run, of the phase in which a checkpoint goes on."""
    return plan_run(plan.whole or plan.job, plan.id, resume=resume, keeps=plan.policy is not None)


def _plan_phases(job: Job, run_id: str, resume: Resume | None, keeps: bool) -> RunPlan:
    """The plan of the phase in which a run begins, or goes on."""
    no_disk = {} if keeps else {"no disk": "a shape-only simulation"}
    refuse({**traits_of_job(job), **no_disk})
    every = tuple(_plan_phase(job, run_id, JobPhase(number), None) for number in range(len(job.phases)))
    for number, one in enumerate(job.phases):
        if one.strategy == AUTO:  # what it may become has to be possible too
            _plan_phase(job, run_id, JobPhase(number, chosen=Chosen(every=2, codec="int8").as_json()), None)
    begin = JobPhase() if resume is None else resume.phase
    if not 0 <= begin.number < len(job.phases):
        raise ConfigError(
            f"the checkpoint is one of phase {begin.number + 1}, but the job has {len(job.phases)}; resume it with "
            "the phases that the run had"
        )
    while resume is not None and (after := _after(job, run_id, begin, resume)) is not None:
        begin = replace(after, origin=_first_step(_plan_phase(job, run_id, after, resume)))
    plan = _plan_phase(job, run_id, begin, resume)
    if plan.strategy.in_passes and resume is not None and begin.number != resume.phase.number:
        # A method before has ended inside of an epoch, of which it left some portions out. A pass has all of them.
        whole = replace(resume, done=DataProgress(resume.done.epochs))
        plan = _plan_phase(job, run_id, begin, whole)
    return replace(plan, every=every)


def _after(job: Job, run_id: str, at: JobPhase, resume: Resume) -> JobPhase | None:
    """Where a run goes on whose phase is over, or has nothing left; None if it is in the middle of it."""
    phase, boundary = job.phases[at.number], at.boundary + 1
    if at.over and at.grown:
        return replace(at, over=False, grown=0, accumulate=at.grown, boundary=boundary)
    if at.number + 1 == len(job.phases):
        return None
    counts = phase.steps is not None and not is_open_ended(job)  # a loop says itself when its phase is over
    over = at.over or (counts and resume.rounds >= at.rounds + (phase.steps or 0))
    if over or _plan_phase(job, run_id, at, resume).ledger().finished:
        return JobPhase(
            at.number + 1,
            epochs=resume.done.epochs,
            rounds=resume.rounds,
            boundary=boundary,
            chosen=at.chosen if at.over else "",  # else it says how this phase itself exchanges
        )
    return None


def _plan_phase(job: Job, run_id: str, begin: JobPhase, resume: Resume | None) -> RunPlan:
    try:
        return replace(
            _plan_job(job_of_phase(job, begin), run_id, resume, True, of=(job, begin)),
            whole=job,
            phase=replace(begin, over=False, grown=0),
        )
    except ConfigError as error:
        where = f"phases[{begin.number}]"
        if where in str(error):
            raise
        raise ConfigError(f"{where}: {error}") from error


def _first_step(plan: RunPlan) -> int:
    """The step with which a plan begins, as it counts steps."""
    job = plan.job
    if plan.open_ended:
        return 0
    schedule = Schedule(
        plan=plan.batch_plan(), rank=0, epochs=job.epochs, steps=plan.steps_left, lr=0.0, num_steps=job.steps
    )
    return 0 if plan.ledger().finished else schedule.first.step


def _plan_job(
    job: Job, run_id: str, resume: Resume | None, keeps: bool, of: tuple[Job, JobPhase] | None = None
) -> RunPlan:
    """The plan of a job without phases, or of one of them."""
    check(job)
    if resume is not None:
        check_resumed(job, resume)
    policy = _policy_of(job)
    strategy = strategy_of(job)
    optimizer = strategy.optimizer() if job.optimizer is None else find_optimizer(job.optimizer)
    if of is not None:
        optimizer = rate_of_phase(*of, optimizer)
    codec = None if job.codec is None else find_codec(job.codec)
    check_strategy(job, strategy, optimizer, codec)
    ends = (job.until, None if of is None else of[0].phases[of[1].number].until)
    goals = sorted({name for until in ends if until is not None for name in until.goals})
    monitored = next((until for until in ends if until is not None and until.monitors), None)
    plan = RunPlan(
        id=run_id,
        job=job,
        strategy=strategy,
        optimizer=optimizer,
        servers=num_servers(job, strategy) * job.split,
        chunk_elems=_chunk_elems(job, strategy, resume),
        codec=codec,
        groups=groups_of(job.groups, optimizer),
        evaluation=EvaluationPlan(
            job.evaluate_every, metrics_of(job), goals, keeps and job.keep_best, monitored
        ),
        policy=policy if keeps else None,
        resume=resume,
    )
    if resume is not None and (of is None or (of[1].number == resume.phase.number and not resume.phase.over)):
        _check_procedure(plan, resume)
    plan.ledger()  # raises where the numbers do not fit
    if job.micro_batches > 1:
        check_micro_batches(job, getattr(plan.batch_plan(), "batch_sizes", ()))  # a stream does not know
    if isinstance(strategy, ServerStrategy):
        from gradstream.server.aggregation import AggregationRule  # a run without servers does not import it

        rule = strategy.rule(job.workers, getattr(job.model, "reduction", "mean"))  # else a shard would raise
        if not isinstance(rule, AggregationRule):
            raise ConfigError(
                f"{type(strategy).__name__}.rule() returned {rule!r}; expected an object of a class that derives "
                "from gradstream.server.aggregation.AggregationRule"
            )
    return plan


def _check_procedure(plan: RunPlan, resume: Resume) -> None:
    """Raises ConfigError where a batch method would go on in the middle of what another one has begun."""
    rule = plan.rule_name
    if plan.strategy.in_passes and resume.rule != rule:
        before, now = (one.rpartition(" of ")[2] or "no batch method" for one in (resume.rule, rule))
        raise ConfigError(
            f"the checkpoint {resume.folder} has the state of {before}, and the run would go on with {now}: resume it "
            "with the strategy and the vectors that it had, with servers or without as before; or begin a new run, and "
            "give it these parameters"
        )


def _chunk_elems(job: Job, strategy: Strategy, resume: Resume | None) -> int | None:
    """See `RunPlan.chunk_elems`. A checkpoint holds a version of each chunk, so a resumed run keeps them."""
    if job.chunk_elems is not None:
        return job.chunk_elems
    if resume is not None:
        return int(resume.model["chunk_elems"])
    exchanges = not isinstance(strategy, SharedMemoryStrategy)
    return None if exchanges and shares_memory(job.carrier) else CHUNK_ELEMS


def num_servers(job: Job, strategy: Strategy) -> int:
    """Number of shards that a job asks for, of each part, where the strategy has any."""
    if not isinstance(strategy, ServerStrategy):
        return 0
    return job.servers or (2 if job.acknowledge == "replicated" else 1)


def _policy_of(job: Job) -> Policy:
    """When checkpoints of a job are made, and which are kept. Raises ConfigError."""
    whole("keep_last", job.keep_last, least=1)
    every = parse_every(job.checkpoint_every)
    return Policy(every=every, keep_last=job.keep_last, keep_best=job.keep_best)


def metrics_of(job: Job) -> dict[str, Metric]:
    """The job's metrics as functions. Raises ConfigError if the place of one holds no function."""
    return {name: find_function(f) if isinstance(f, str) else f for name, f in job.metrics.items()}
