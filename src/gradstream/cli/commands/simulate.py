"""`gradstream simulate`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import click

from gradstream.cli.options import JobCommand, job_options, load_job_with
from gradstream.cli.running import run_and_show

if TYPE_CHECKING:
    from gradstream.runtime.simulation import SimulationConfig


@click.command(cls=JobCommand)
@job_options
@click.option(
    "--shape-only", is_flag=True, help="Count time and bytes, without arithmetic: for large models."
)
@click.option("--latency", type=float, metavar="SECONDS", help="Latency from any node to any other.")
@click.option(
    "--bandwidth", type=float, metavar="BYTES/S", help="Bandwidth of a network card, in each direction."
)
@click.option("--gradient-s", type=float, metavar="SECONDS", help="Mean time of one minibatch's gradient.")
@click.option("--jitter", type=float, metavar="SIGMA", help="Log-normal jitter of computing times.")
def simulate(job: str, as_json: bool, **given: Any) -> None:
    """Runs the nodes of a job in one process, on virtual time.

    The same seed gives the same history. Times in the figures are virtual seconds.

    \b
    Examples:
      gradstream simulate JOB.py --workers 16
      gradstream simulate JOB.py --workers 64 --shape-only --bandwidth 12.5e6 --gradient-s 0.1
    """
    from gradstream._simulate import simulate as run_job

    names = ("shape_only", "latency", "bandwidth", "gradient_s", "jitter")
    config = simulation_config_of(**{name: given.pop(name) for name in names})
    chosen = load_job_with(job, **given)
    run_and_show(lambda on_event: run_job(chosen, config=config, on_event=on_event), as_json)


def simulation_config_of(
    *,
    shape_only: bool = False,
    latency: float | None = None,
    bandwidth: float | None = None,
    gradient_s: float | None = None,
    jitter: float | None = None,
) -> SimulationConfig:
    """The default `SimulationConfig` with the values of the command line; None stands for an option not given."""
    import dataclasses

    from gradstream.runtime.simulation import Cost, LogNormal, SimulationConfig

    config = SimulationConfig(shape_only=shape_only)
    network, costs = config.network, dict(config.costs)
    if latency is not None:
        link = dataclasses.replace(network.link, latency_s=latency)
        network = dataclasses.replace(network, link=link)
    if bandwidth is not None:
        network = dataclasses.replace(network, bandwidth_bytes_s=bandwidth)
    if gradient_s is not None:
        costs["gradient"] = Cost(base_s=gradient_s)
    if jitter is not None:
        costs = {kind: dataclasses.replace(cost, jitter=LogNormal(jitter)) for kind, cost in costs.items()}
    return dataclasses.replace(config, network=network, costs=costs)
