"""Commands that list, check and measure what gradstream has: plugins, data sets, strategies, carriers."""

from __future__ import annotations

import inspect
import json
from collections import Counter
from typing import TYPE_CHECKING

import click

from gradstream.cli.options import json_option

if TYPE_CHECKING:
    from gradstream.job.registry import Plugin
    from gradstream.preflight.allreduce import AllreduceResult
    from gradstream.transport.offers import Choice


@click.command()
@json_option
def plugins(as_json: bool) -> None:
    """Lists strategies, optimizers and data sets by name, with the package that each comes from.

    It imports the plugins of installed packages to check them. A plugin that cannot be imported, or has
    the name of another, cannot be used by that name: a warning on stderr says so.

    \b
    Examples:
      gradstream plugins
    """
    from gradstream.job.registry import GROUPS, catalogue

    rows = [(offer, fault) for kind in GROUPS for offer, fault in examined(catalogue(kind))]
    for _, fault in rows:
        if fault:
            click.echo(f"warning: {fault}", err=True)
    if as_json:
        named = ("kind", "name", "origin", "place")
        records = [
            {key: getattr(offer, key) for key in named} | {"fault": fault or None} for offer, fault in rows
        ]
        click.echo(json.dumps(records))
        return
    table = [(offer.kind, offer.name, offer.origin, "broken" if fault else "") for offer, fault in rows]
    widths = [max(len(row[column]) for row in table) for column in range(4)]
    for row in table:
        click.echo("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip())


def examined(offers: list[Plugin]) -> list[tuple[Plugin, str]]:
    """Each member of a family with its fault, or "". Built-in members are not loaded."""
    from gradstream.errors import ConfigError
    from gradstream.job.registry import BUILT_IN, key_of

    times = Counter(key_of(offer.name) for offer in offers)
    rows = []
    for offer in offers:
        fault = ""
        if offer.origin != BUILT_IN:
            try:
                offer.load()
            except ConfigError as error:
                fault = str(error)
            if not fault and times[key_of(offer.name)] > 1:
                same = (other for other in offers if key_of(other.name) == key_of(offer.name))
                fault = f"{offer.kind} {offer.name!r} is the name of {' and '.join(map(str, same))}"
        rows.append((offer, fault))
    return rows


@click.group()
def data() -> None:
    """Shows licence and origin of data sets, and downloads them."""


@data.command()
@click.argument("name")
@click.option("--url", metavar="URL", help="A mirror of the archive; its checksum must be the same.")
def get(name: str, url: str | None) -> None:
    """Downloads a data set into the cache folder, verifies it, and prints its path.

    It continues an interrupted download where that stopped. The cache folder is
    $XDG_CACHE_HOME/gradstream or ~/.cache/gradstream.

    \b
    Examples:
      gradstream data get caltech101
    """
    from gradstream.data.sources import SOURCES, fetch, find
    from gradstream.job.registry import class_of, key_of

    make = class_of("data set", name)
    source = SOURCES.get(key_of(name))
    if source is not None and source.packed is not None:
        click.echo(find(source) or fetch(source, url=url))
    elif "download" in inspect.signature(make).parameters:
        make(download=True)  # a data set of another package downloads itself
    else:
        click.echo(f"{name}: nothing to download", err=True)


@data.command()
@click.argument("name", required=False)
def info(name: str | None) -> None:
    """Shows licence, citation, page and files of a data set, or of all data sets.

    \b
    Examples:
      gradstream data info caltech101
    """
    from gradstream.job.registry import catalogue, class_of, key_of

    known = {offer.name: offer.origin for offer in catalogue("data set")}
    if name is not None:
        class_of("data set", name)  # a misspelt name is an error
        known = {key: origin for key, origin in known.items() if key_of(key) == key_of(name)} or {name: ""}
    click.echo("\n\n".join(_text(key, origin) for key, origin in known.items()))


def _text(name: str, origin: str) -> str:
    from gradstream.data.sources import SOURCES, find
    from gradstream.job.registry import BUILT_IN, class_of

    source = SOURCES.get(name) if origin == BUILT_IN else None
    if source is None:
        about = inspect.getdoc(class_of("data set", name)) or "no description"
        return f"{name}" + (f" ({origin})" if origin else "") + f"\n  {about.splitlines()[0]}"
    lines = [
        name,
        f"  {source.what}",
        f"  licence   {source.licence}",
        f"  cite      {source.citation}",
        f"  page      {source.page}",
    ]
    if source.packed is not None:
        archive = source.packed.archive
        lines += [
            f"  download  {archive.url} ({archive.num_bytes:,} bytes)",
            f"  SHA-256   {archive.sha256}",
            f"  here      {find(source) or f'no: gradstream data get {name}'}",
        ]
    return "\n".join(lines)


@click.command()
@click.argument("strategy")
@json_option
def check(strategy: str, as_json: bool) -> None:
    """Checks the properties of a STRATEGY: a name, or FILE.py:Class.

    It makes about a hundred small runs on virtual time, in seconds. Exit status 1 if a property does
    not hold.

    \b
    Examples:
      gradstream check mine.py:Mine
    """
    from gradstream.testing import BrokenPropertiesError, check_strategy

    try:
        report = check_strategy(strategy)
    except BrokenPropertiesError as broken:
        report = broken.report
    if as_json:
        results = [
            {"property": result.name, "says": result.says, "holds": result.holds, "seen": result.seen}
            for result in report.results
        ]
        click.echo(json.dumps({"strategy": report.strategy, "results": results}))
    else:
        click.echo(str(report))
        for result in report.broken:
            click.echo(f"{result.name}: {result.says}", err=True)
    raise SystemExit(1 if report.broken else 0)


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
    formula predicts, from alpha (seconds per message) and beta (seconds per byte) as measured on the
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
