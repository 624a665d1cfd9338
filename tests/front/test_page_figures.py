"""What pages say was measured is what the records of the benchmarks say."""

from __future__ import annotations

import importlib
import json
import re
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

# ---- tables that bench/tables.py writes ----------------------------------------------------------


@pytest.fixture
def tables(repository: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """The script that writes them."""
    monkeypatch.syspath_prepend(str(repository / "bench"))
    return importlib.import_module("tables")


@pytest.fixture
def marks(tables: Any) -> Any:
    """Where on a page they stand."""
    return importlib.import_module("common")


def test_tables_are_as_the_records_have_them(tables: Any, marks: Any, repository: Path) -> None:
    """Else: `python bench/tables.py`, and read again what the pages say beside."""
    for name, places in tables.PAGES.items():
        text = (repository / name).read_text()
        assert marks.filled(text, places()).splitlines() == text.splitlines(), name
        of_study = text.count("<!-- begin: study -->")  # by `studies/async_study/async_study.py`
        assert text.count("<!-- begin: ") - of_study == len(places()), f"{name}: a place that nobody fills"


def test_pages_say_alike_what_synchronous_makes_of_a_network_card(tables: Any, repository: Path) -> None:
    rows = [row for row in tables.recorded("shards-apart")["rows"] if row["strategy"] == "synchronous"]
    of_bound, simulated = (
        f"{100 * min(row[key] for row in rows):.0f} to {100 * max(row[key] for row in rows):.0f} %"
        for key in ("of_bound", "simulated_of_bound")
    )
    before = (repository / "docs/guide/before.md").read_text()
    assert f"`synchronous` made {of_bound} of what" in before and f"time said {simulated}" in before
    assert f"rounds make {of_bound} of the bound" in (repository / "docs/scaling.md").read_text()


def test_a_wrong_figure_is_noticed(tables: Any, marks: Any, repository: Path, tmp_path: Path) -> None:
    for name, places in tables.PAGES.items():
        text = (repository / name).read_text()
        figure = re.search(r"<!-- begin: .*?\| (\d[\d.,]*)", text, re.DOTALL)
        assert figure is not None
        page = tmp_path / "page.md"
        page.write_text(f"{text[: figure.start(1)]}0.123{text[figure.end(1) :]}")
        assert marks.put(page, places()), name
        assert page.read_text() == text


def test_a_new_record_is_noticed(
    tables: Any, marks: Any, repository: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shutil.copytree(repository / "bench" / "results", tmp_path, dirs_exist_ok=True)
    monkeypatch.setattr(marks, "RESULTS", tmp_path)
    record = json.loads((tmp_path / "collectives.json").read_text())
    record["loopback"][-1]["median_s"]["tcp messages"] *= 1.1
    (tmp_path / "collectives.json").write_text(json.dumps(record))
    text = (repository / "docs/collectives.md").read_text()
    old, new = text.splitlines(), marks.filled(text, tables.collectives()).splitlines()
    changed = [line for line, other in zip(new, old, strict=True) if line != other]
    assert len(changed) == 1
    assert changed[0].startswith("| 4, 11,000,000 |")


def test_a_mark_that_is_lost_is_noticed(tables: Any, marks: Any, repository: Path) -> None:
    text = (repository / "docs/benchmarks.md").read_text().replace("<!-- end: carriers -->", "")
    with pytest.raises(LookupError, match="0 places 'carriers'"):
        marks.filled(text, tables.benchmarks())


# ---- README and docs/benchmarks.md ---------------------------------------------------------------


def test_the_picture_is_what_a_simulation_does(repository: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Else: `python tools/draw_one_slow_worker.py`, and look at it."""
    monkeypatch.syspath_prepend(str(repository / "tools"))
    script: Any = importlib.import_module("draw_one_slow_worker")
    assert script.PICTURE.read_text() == script.picture()


def most_own_gb(row: dict[str, Any]) -> float:
    """Of that worker which takes most; 0 where the row is not of ours."""
    found: dict[str, float] = row.get("peak_own_mb") or {}
    return max((mb / 1e3 for name, mb in found.items() if name.startswith("worker")), default=0.0)


def of_plain(row: dict[str, Any], record: dict[str, Any]) -> float:
    """Samples a second, divided by those of the record's plain loop; 0 where it has none."""
    plain = record["rows"].get("plain")
    return float(row["samples_per_s"] / plain["samples_per_s"]) if plain else 0.0


COLUMNS: dict[str, Callable[[dict[str, Any]], str]] = {
    "samples/s": lambda row: f"{row['samples_per_s']:,.0f}",
    "of plain": lambda row: f"{row['of_plain']:.2f}",
    "seconds": lambda row: f"{row['train_s']:.0f}",
    "test accuracy": lambda row: f"{100 * row.get('accuracy', 0):.1f}",
    "own memory of a worker": lambda row: f"{most_own_gb(row):.2f}",
}
"""By the heading of a column: a row of the records as it is written there."""


def said_of_caltech(page: str) -> Iterator[dict[str, str]]:
    """Each run of a table with such columns: its figures by column. A row may be of two, "1,391 · 1,641"."""
    for table in re.findall(r"(?:^\|.*\n)+", page, re.MULTILINE):
        head, _, *rows = (
            [cell.strip() for cell in line.strip("|").split("|")] for line in table.splitlines()
        )
        if "samples/s" in head:
            for row in rows:
                found = {
                    column: re.findall(r"\d[\d.,]*", row[head.index(column)])
                    for column in COLUMNS.keys() & {*head}
                }
                for run in range(len(found["samples/s"])):
                    yield {column: figures[run] for column, figures in found.items() if figures}


def test_figures_of_caltech_are_those_of_a_recorded_run(repository: Path) -> None:
    records = list(json.loads((repository / "bench/results/caltech101.json").read_text()).values())
    recorded = [
        {column: written({**row, "of_plain": of_plain(row, record)}) for column, written in COLUMNS.items()}
        for record in records
        for row in record["rows"].values()
    ]
    said = list(said_of_caltech((repository / "docs/benchmarks.md").read_text()))
    assert len(said) == 12
    for run in said:
        assert any(run.items() <= row.items() for row in recorded), run


def test_where_and_when_is_said(repository: Path) -> None:
    page = (repository / "docs/benchmarks.md").read_text()
    record = result(repository, "caltech101/large, seed 0")
    assert f"**{record['machine']['machine']['cores']} cores**" in page
    assert record["date"][:10] in page


def compared(page: str) -> str:
    """The table of what was measured beside something else."""
    return page.split("| measured, and compared with")[1].split("\n\n")[0]


def result(repository: Path, name: str) -> dict[str, Any]:
    """What a benchmark or a study has written; the part of a record behind a slash."""
    name, _, part = name.partition("/")
    study = repository / "studies" / name / "record.json"
    path = study if study.is_file() else repository / f"bench/results/{name}.json"
    found: dict[str, Any] = json.loads(path.read_text())
    return found[part] if part else found


def allreduce_ms(repository: Path, how: str) -> float:
    """Of the large model's gradient, by two processes of one host."""
    rows = result(repository, "allreduce-shared")["by_ranks"]["2"]["rows"]
    (row,) = (row for row in rows if row["elems"] == 74_770_901)
    return 1e3 * float(row["median_s"][how])


def over_tcp_ms(repository: Path, how: str) -> list[str]:
    """Of 11,000,000 floats, by two and by four processes that send messages."""
    rows = [row for row in result(repository, "collectives")["loopback"] if row["elements"] == 11_000_000]
    return [
        f"{1e3 * (row['gloo_s'] if how == 'gloo' else row['median_s']['tcp messages']):.0f}" for row in rows
    ]


def cost_of_a_loop(row: Any) -> str:
    """A step of a wrapped loop, in steps of the plain one, with its interval."""
    low, high = row["interval"]
    return f"{row['wrapped_of_plain']:.2f} ({low:.2f} to {high:.2f})"


def test_scripts_on_two_machines_are_those_of_one(repository: Path) -> None:
    rows = result(repository, "own_scripts_apart")["rows"]
    exact = [row for row in rows if row["strategy"] != "allreduce, auto"]
    assert len(exact) == 14
    assert not any(row["bytes_that_differ"] or row["samples_that_differ"] for row in exact)
    assert max(row["largest_difference"] for row in rows) < 1e-6


def test_ratios_are_the_recorded_ones(repository: Path) -> None:
    table = compared((repository / "docs/benchmarks.md").read_text())
    large, cnn = (result(repository, f"data-parallel/{model}")["rows"] for model in ("large", "cnn"))
    beside = "of_side_by_side"
    shm, tcp = (result(repository, f"server-bulk/{carrier}, 74770901")["ratio"] for carrier in ("shm", "tcp"))
    slow, rows = result(repository, "slow-worker")["median_ratio"], result(repository, "row_sparse")
    shared, gloo, *mpi = (
        f"{allreduce_ms(repository, how):.0f}"
        for how in ("as called", "gloo", "openmpi", "mpich", "intel mpi")
    )
    ours, gloos = (over_tcp_ms(repository, how) for how in ("ours", "gloo"))
    ratios = [result(repository, "hogwild/latest")[problem]["ratios"] for problem in ("sparse", "sparser")]
    hogwild = [
        " to ".join(f"{value:.2f}" for value in sorted(one[ratio] for one in ratios))
        for ratio in ("plain, 2 processes / 1", "plain / lock, 2 processes each")
    ]
    for said in (
        f"| {large['allreduce'][beside]:.2f}; `DistributedDataParallel` over gloo "
        f"{large['ddp'][beside]:.2f} |",
        f"| {cnn['allreduce'][beside]:.2f}; DDP {cnn['ddp'][beside]:.2f} |",
        f"| {large['one']['of_plain']:.2f}; {cnn['one']['of_plain']:.2f} |",
        f"| {shared} ms; gloo {gloo}, OpenMPI {mpi[0]}, MPICH {mpi[1]}, Intel MPI {mpi[2]} |",
        f"| {' · '.join(ours)} ms; gloo {' · '.join(gloos)} |",
        f"| {shm:.2f}; {tcp:.2f} |",
        f"| {result(repository, 'server-bulk/grpc, 20000000')['ratio']:.2f} | `bench/server_bulk.py` |",
        f"| {result(repository, 'grpc_bulk')['ratio_to_bare']:.2f} | `bench/grpc_bulk.py` |",
        f"| {'; '.join(hogwild)} |",
        f"| {slow['downpour']:.2f}; {slow['synchronous']:.2f}, {slow['synchronous_measured']:.2f} |",
        f"| {max(rows['pushed_ratio'], rows['fetched_ratio']):.2f} each way |",
        f"| {result(repository, 'replay_cost')['step_ratio']:.2f}, within noise |",
        f"| {cost_of_a_loop(result(repository, 'loop-cost')['rows']['allreduce'])} | `bench/loop_cost.py` |",
    ):
        assert said in table, said


def test_figures_of_readme_are_rows_of_the_benchmarks(repository: Path) -> None:
    own = compared((repository / "README.md").read_text()).splitlines()[2:]
    assert len(own) == 3
    for row in own:
        assert f"\n{row} `bench/" in compared((repository / "docs/benchmarks.md").read_text()), row


# ---- sentences of other pages ----------------------------------------------------------------------


def test_sentences_of_strategies_have_the_recorded_figures(repository: Path) -> None:
    shared, read = (allreduce_ms(repository, how) for how in ("as called", "only read"))
    beside = {
        model: result(repository, f"data-parallel/{model}")["rows"]["allreduce"]["of_side_by_side"]
        for model in ("large", "cnn")
    }
    deep = result(repository, "overlap")["median"]
    exchange_s = deep["serial_s"] - deep["serial_compute_s"]
    hidden = (deep["serial_s"] - deep["overlapped_s"]) / exchange_s
    slow = result(repository, "slow-worker")
    took = {
        name: f"{slow['median_s'][name]:.0f} s, {slow['median_ratio'][name]:.2f}" for name in slow["median_s"]
    }
    rate = {
        name: row["samples_per_s"]
        for name, row in result(repository, "caltech101/large, seed 0")["rows"].items()
    }
    for page, *sentences in (
        (
            "allreduce",
            f"takes {shared:.0f} ms in shared memory, "
            f"of which reading the two vectors alone takes {read:.0f};",
            f"two workers make {beside['large']:.2f} (CNN: {beside['cnn']:.2f}) of two loops",
            f"go {deep['ratio']:.2f} times faster with it, and {hidden:.0%} of".replace("%", " %"),
        ),
        (
            "downpour",
            f"Downpour takes {took['downpour']} of what the workers' speeds allow",
            f"with partitions {took['downpour_partitions']};",
            f"`synchronous` {took['synchronous']}, with measured shares {took['synchronous_measured']}",
            f"`ssp` {took['ssp']}, with measured shares {took['ssp_measured']}",
        ),
        (
            "synchronous",
            f"{rate['synchronous']:.0f} samples/s by two workers "
            f"where a plain loop makes {rate['plain']:.0f}",
        ),
    ):
        text = " ".join((repository / f"docs/strategies/{page}.md").read_text().split())
        for sentence in sentences:
            assert sentence in text, f"{page}: {sentence}"


def test_sentences_of_collectives_have_the_recorded_figures(repository: Path) -> None:
    rows = result(repository, "allreduce-shared")["by_ranks"]
    small_us = [1e6 * rows["2"]["rows"][0]["median_s"][how] for how in ("as called", "core")]
    large = [row for found in rows.values() for row in found["rows"][-2:]]
    reading, moving = ([row[bound] for row in large] for bound in ("of_reading", "of_moving"))
    waiting = max(found["waiting"] for found in rows.values())
    text = " ".join((repository / "docs/collectives.md").read_text().split())
    assert f"takes {small_us[0]:.0f} µs, of which the core takes {small_us[1]:.0f}" in text
    assert f"at {min(moving):.2f} to {max(moving):.2f} of moving" in text
    assert f"Of reading it is at {min(reading):.2f} to {max(reading):.2f}" in text
    assert f"takes {max(waiting, 1e-4):.2%} of a core" in text
