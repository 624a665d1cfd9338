"""`gradstream bench`."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import click

from gradstream.cli.options import json_option

if TYPE_CHECKING:
    from gradstream.preflight.allreduce import AllreduceResult
    from gradstream.transport.offers import Choice


@click.group()
def bench() -> None:
    """Measures parts of gradstream on this machine."""


@bench.command()
@click.option("--ranks", type=int, default=2, show_default=True, help="Number of processes.")
@click.option(
    "--elements", type=int, default=1_000_000, show_default=True, help="Length of the vector, in float32."
)
@click.option(
    "--algorithm",
    metavar="NAME",
    default="auto",
    show_default=True,
    help="auto (as a strategy chooses), messages (the fastest that sends messages), or a name: ring.",
)
@click.option(
    "--carrier",
    metavar="NAME",
    default="auto",
    show_default=True,
    help="Carrier of messages: auto, grpc, tcp or shm.",
)
@click.option("--times", type=int, default=9, show_default=True, help="Number of repetitions.")
@json_option
def allreduce(ranks: int, elements: int, algorithm: str, carrier: Choice, times: int, as_json: bool) -> None:
    """Starts RANKS processes that sum up a vector, and measures how long that takes.

    It measures the call that a strategy makes: on one machine the ranks add in place, in shared memory,
    whatever the carrier. Then it measures the same sum by messages; --algorithm messages does only that.

    It prints the median and the bandwidth. For messages it also prints the time that the algorithm's
    formula predicts, from alpha (seconds for a message) and beta (seconds for a byte) as measured on the
    same sockets.

    \b
    Examples:
      gradstream bench allreduce
      gradstream bench allreduce --ranks 4 --algorithm ring --carrier tcp --json
    """
    from gradstream.preflight.allreduce import AllreducePlan, measure_here

    plan = AllreducePlan(ranks=ranks, elements=elements, algorithm=algorithm, carrier=carrier, times=times)
    result = measure_here(plan)
    messages = None if result.as_messages is None else measure_here(result.as_messages)
    if as_json:
        click.echo(json.dumps({**result.record(), "messages": messages and messages.record()}))
        return
    for line in [*lines_of(result), *(lines_of(messages) if messages else ())]:
        click.echo(line)


def lines_of(result: AllreduceResult) -> list[str]:
    """The lines of a result; the first describes the measurement."""
    plan = result.plan
    how = " over ".join([result.algorithm, *filter(None, [", ".join(result.carriers)])])
    called = ", as a strategy calls it" if plan.algorithm == "auto" else ""
    lines = [
        f"allreduce of {plan.elements:,} float32, {plan.ranks} ranks, {result.kind}: {how}{called}",
        f"  median     {duration(result.median_s)} of {len(result.times_s)}, "
        f"{duration(min(result.times_s))} to {duration(max(result.times_s))}",
        f"  bandwidth  {result.bytes_s / 1e9:.3g} GB/s of the vector, {result.bus_bytes_s / 1e9:.3g} GB/s of "
        "what each rank has to send",
    ]
    if result.predicted_s is not None and result.predicted_over_median is not None:
        cost = result.figures
        gigabyte_s = {name: cost[f"{name}_s_byte"] * 1e9 for name in ("beta", "gamma")}
        lines.append(
            f"  predicted  {duration(result.predicted_s)}, {result.predicted_over_median:.2f} of the median, "
            f"by alpha {duration(cost['alpha_s'])}, beta {gigabyte_s['beta']:.3g} s/GB, "
            f"gamma {gigabyte_s['gamma']:.3g} s/GB, {duration(cost['message_s'])} for each message more"
        )
    return lines


def duration(seconds: float) -> str:
    """A duration as text, in s, ms or µs."""
    for unit, name in ((1.0, "s"), (1e-3, "ms")):
        if seconds >= unit:
            return f"{seconds / unit:.3g} {name}"
    return f"{seconds * 1e6:.3g} µs"
