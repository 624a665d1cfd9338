"""What a command prints at its end: figures as a table or as JSON, or an error."""

from __future__ import annotations

import dataclasses
import json
import os
import re
import shlex
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gradstream.errors import GradientError, GradstreamError, UserCodeError
from gradstream.report.charts import size_text
from gradstream.report.staleness import quantile
from gradstream.report.straggler import straggler_text
from gradstream.untrusted import TEXT_BYTES, escaped

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from rich.console import Console

    from gradstream.run.result import Run
    from gradstream.worker.evaluation import Evaluation


def error_text(error: GradstreamError) -> str:
    """The message of an error with its notes; for an error in the user's code, its traceback follows.

    If the traceback of an unusable gradient leads through no file of the user's, gradstream found it: the message says
    everything, and the traceback is skipped.
    """
    notes = [note for note in getattr(error, "__notes__", ()) if "\n" not in note]
    text = "\n".join([f"error: {error}", *notes])
    trace = error.traceback_text.rstrip() if isinstance(error, UserCodeError) else ""
    shown = trace and not (isinstance(error, GradientError) and _only_ours(trace))
    return f"{text}\n\n{trace}" if shown else text


def _only_ours(trace: str) -> bool:
    """Whether all files of a traceback are gradstream's or Python's own."""
    package, pythons = str(Path(__file__).parents[1]), str(Path(os.__file__).parent)
    files = re.findall(r'^  File "(.*)", line \d+', trace, re.MULTILINE)
    return all(
        file.startswith(f"{package}/") or (file.startswith(f"{pythons}/") and "/site-packages/" not in file)
        for file in files
    )


def print_result(as_json: bool, record: Any, rows: Sequence[tuple[str, str]]) -> None:
    """Prints the result of a command on stdout: a record as JSON, or rows (name, figure) as a table."""
    print(json.dumps(record)) if as_json else print_rows(rows)


def print_end(run: Run, evaluation: Evaluation | None, as_json: bool) -> None:
    """Prints the figures of a run on stdout: a table, or one JSON object."""
    if as_json:
        print(json_text(run, evaluation))
    else:
        show(run, evaluation)


def json_text(run: Run, evaluation: Evaluation | None) -> str:
    """One JSON object: {"run_dir": …, "summary": {…}, "evaluation": {…} or null}."""
    record = {
        "run_dir": str(run.path) if run.path else None,
        "summary": run.summary,
        "evaluation": dataclasses.asdict(evaluation) if evaluation else None,
    }
    return json.dumps(record)


def show(run: Run, evaluation: Evaluation | None, console: Console | None = None) -> None:
    """Prints the figures of a run as a table, on standard output by default."""
    rows = figures(run.summary)
    if run.path is None:  # a simulation
        rows = [("virtual time" if name == "time" else name, value) for name, value in rows]
    if evaluation:
        rows += evaluation_rows(evaluation)
    if run.path:
        rows.append(("run directory", str(run.path)))
        rows.append(("more", f"gradstream report {shlex.quote(str(run.path))}"))
    print_rows(rows, console)


def print_rows(rows: Sequence[tuple[str, str]], console: Console | None = None) -> None:
    """Prints rows (name, figure) in two columns, on standard output by default.

    A terminal folds long figures; elsewhere each row is one line. Names and figures are escaped, since they
    may contain file names.
    """
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    console = console or Console(highlight=False)
    table = Table(box=None, show_header=False, pad_edge=False)
    table.add_column(no_wrap=True)
    table.add_column(overflow="fold")
    width = max((len(name) for name, _ in rows), default=0)
    for name, value in rows:
        name, value = (escaped(text, TEXT_BYTES) for text in (name, value))
        table.add_row(Text(name), Text(value))
        if not console.is_terminal:
            console.print(f"{name:{width}}  {value}", markup=False, soft_wrap=True)
    if console.is_terminal:
        console.print(table)


def evaluation_rows(evaluation: Evaluation) -> list[tuple[str, str]]:
    """The rows (name, figure) of an evaluation."""
    rows = []
    if evaluation.accuracy is not None:
        rows.append(("test accuracy", f"{evaluation.accuracy:.2%} of {evaluation.num_samples:,} samples"))
    if evaluation.loss is not None:
        name, of = ("test loss", "the model's own") if evaluation.own_loss else ("test error", "mean square")
        rows.append((name, f"{evaluation.loss:.4g} ({of}, {evaluation.num_samples:,} samples)"))
    if not rows and not evaluation.metrics:
        rows.append(("test accuracy", "unknown: outputs and targets are not of shapes that can be compared"))
    return rows + [(f"test {name}", f"{value:.4g}") for name, value in evaluation.metrics.items()]


def figures(summary: dict[str, Any]) -> list[tuple[str, str]]:
    """The rows (name, figure with unit) of a run's summary, without figures that the run lacks."""
    s = summary
    steps = "minibatches"
    if s["num_samples"] == 0:  # a step of a user's own loop may have several
        steps = "steps, all workers together"
    if s["trains_locally"] and s["way"] in ("group", "pairs"):
        steps = "rounds, all workers together"
    untold = ", without those of which lost workers told nothing" if s["workers_lost"] else ""
    rows = [
        ("model", _of(s["num_parameters"] or None, "{:,} parameters")),
        (
            "strategy",
            _of(s["strategy"], f"{{}}, {_count(s['workers'], 'worker')}, {_count(s['servers'], 'server')}"),
        ),
        ("group", _of(s.get("group"), "{}")),
        ("links", _of(s.get("links"), "{}")),
        ("chunks", _of((s["servers"] and s.get("chunk_elems")) or None, "of {:,} elements")),
        ("optimizer", _of(s["optimizer"], "{}")),
        ("samples", f"{s['samples']:,} in {s['steps']:,} {steps}{untold}"),
        ("ended by", _of(s.get("reason"), "{}")),
        ("in the model", _of(s["samples_accounted"], "{:,} samples")),
        ("dropped", _of(s.get("samples_dropped") or None, f"{{:,}} samples, {_why_dropped(s)}")),
        ("not finite", _refused(s.get("gradients_refused", {}))),
        ("shares", ", ".join(f"{who} {size:,}" for who, size in s.get("shares", {}).items())),
        ("time", _of(s["train_s"], "{:.2f} s")),
        ("rate", _of(s["samples_per_s"], "{:,.0f} samples/s")),
        ("loss", _of(s["loss"], "{:.4g} (mean of the last epoch)")),
        ("noise scale", _of(s.get("noise_scale"), "{:,.4g} samples") or s.get("noise_scale_missing", "")),
        ("logged", ", ".join(f"{name} {value:.4g}" for name, value in s.get("logged", {}).items())),
        ("not logged", _of(s.get("logged_dropped") or None, "{:,} values: of more than 64 names")),
        *_exchanged(s),
        ("instead of", _whole(s)),
        ("staleness", _of(s["staleness_mean"], _stale(s))),
        ("slow worker", straggler_text(s.get("straggler"))),
        ("worker time", f"{s['compute_s']:.1f} s in gradients, {s['wait_s']:.1f} s waiting"),
        ("CPU", ", ".join(f"{role} {seconds:.1f} s" for role, seconds in s["cpu_s"].items())),
        ("peak memory", ", ".join(f"{r} ≤ {size_text(size)}" for r, size in _peaks(s["peak_memory_bytes"]))),
        ("loop lateness", ", ".join(f"{r} ≤ {ms:.1f} ms" for r, ms in s["loop_late_max_ms"].items())),
        ("workers lost", ", ".join(s["workers_lost"])),
        ("alone", ", ".join(f"{who} in {_count(n, 'round')}" for who, n in s.get("alone", {}).items())),
    ]
    return [(name, value) for name, value in rows if value]


def _why_dropped(s: Mapping[str, Any]) -> str:
    causes = {
        "of workers that came late": s.get("late"),
        "of refused gradients": s.get("gradients_refused"),
        "of lost workers": s["way"] == "pairs" and s["workers_lost"],
    }
    return " and ".join(cause for cause, some in causes.items() if some) or "of workers that came late"


def _refused(by_worker: Mapping[str, int]) -> str:
    """The gradients that were refused, by worker."""
    total = sum(by_worker.values())
    if not total:
        return ""
    each = ", ".join(f"{who} {count:,}" for who, count in by_worker.items())
    return f"{_count(total, 'gradient')} refused: {each}"


def _exchanged(s: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Rows on the bytes sent: to and from servers, or among workers. None if all workers share one vector."""
    up, down = size_text(s["pushed_bytes"]), size_text(s["fetched_bytes"])
    if s["servers"] == 0:
        what = "parameters in {:,} exchanges" if s["way"] == "pairs" else "gradients in {:,} sums"
        is_one = s["workers"] == 1  # its sums are its own gradients, and are not sent
        return [("exchanged", f"{up} of {what.format(s['pushes'])}")] if s["pushes"] and not is_one else []
    return [
        ("pushed", f"{up} in {s['pushes']:,} pushes, {s['retries']:,} retries"),
        ("fetched", f"{down} in {s['fetches']:,} fetches"),
    ]


def _stale(figures: Mapping[str, Any]) -> str:
    p99 = quantile(figures["staleness"], 0.99)
    return f"mean {{:.2f}}, p99 {p99}, largest {figures['staleness_max']}"


def _whole(s: Mapping[str, Any]) -> str:
    """The bytes that whole chunks would have taken, if workers sent only parts of them; else ""."""
    up, down = s.get("whole_pushed_bytes", 0), s.get("whole_fetched_bytes", 0)
    if up <= s["pushed_bytes"] and down <= s["fetched_bytes"]:
        return ""
    return f"{size_text(up)} up and {size_text(down)} down, had all of every chunk been sent"


def _peaks(by_node: Mapping[str, int]) -> list[tuple[str, int]]:
    """The largest peak of each role, in bytes: a run may have many nodes."""
    peaks: dict[str, int] = {}
    for node, size_bytes in by_node.items():
        role = node.partition("-")[0]
        peaks[role] = max(size_bytes, peaks.get(role, 0))
    return list(peaks.items())


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


def _of(value: Any, template: str) -> str:
    return "" if value is None else template.format(value)
