"""What README says was measured is what the records of the benchmark say."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

RESULTS = "bench/results/caltech101-*.json"


def cells(readme: str, column: str) -> Iterator[str]:
    """What stands under this heading, in every table that has it."""
    for table in re.findall(r"(?:^\|.*\n)+", readme, re.MULTILINE):
        rows = [[cell.strip() for cell in line.strip("|\n").split("|")] for line in table.splitlines(True)]
        if column in rows[0]:
            place = rows[0].index(column)
            yield from (row[place] for row in rows[2:])


def recorded(repository: Path, field: str) -> set[float]:
    rows = [json.loads(path.read_text())["rows"].values() for path in repository.glob(RESULTS)]
    return {row[field] for group in rows for row in group if field in row}


def test_rates_and_accuracies_are_the_recorded_ones(repository: Path) -> None:
    readme = (repository / "README.md").read_text()
    rates = {f"{rate:,.0f}" for rate in recorded(repository, "samples_per_s")}
    accuracies = {f"{100 * accuracy:.1f}" for accuracy in recorded(repository, "accuracy")}
    said = [number for cell in cells(readme, "samples/s") for number in re.findall(r"\d[\d,]*", cell)]
    assert said, "README has no column samples/s"
    assert set(said) <= rates
    said = [number for cell in cells(readme, "test accuracy") for number in re.findall(r"\d[\d.]*", cell)]
    assert set(said) <= accuracies


def test_where_and_when_is_said(repository: Path) -> None:
    readme = (repository / "README.md").read_text()
    record = json.loads((repository / "bench/results/caltech101-large.json").read_text())
    assert f"**{record['machine']['machine']['cores']} cores**" in readme
    assert record["date"][:10] in readme


def compared(readme: str) -> str:
    """The table of what was measured beside something else."""
    return readme.split("| measured in a row, against |")[1].split("\n\n")[0]


def result(repository: Path, name: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((repository / f"bench/results/{name}.json").read_text())
    return found


def test_ratios_are_the_recorded_ones(repository: Path) -> None:
    table = compared((repository / "README.md").read_text())
    large, cnn = (result(repository, f"data-parallel-{model}")["rows"] for model in ("large", "cnn"))
    beside = "of_side_by_side"
    shm, tcp = (result(repository, f"server-bulk-{carrier}-74770901")["ratio"] for carrier in ("shm", "tcp"))
    slow, rows = result(repository, "slow-worker")["median_lost"], result(repository, "row_sparse")
    (summed,) = (
        row["median_s"]
        for row in result(repository, "allreduce-shared")["by_ranks"]["2"]["rows"]
        if row["elems"] == 74_770_901
    )
    ratios = [result(repository, "hogwild")[problem]["ratios"] for problem in ("sparse", "sparser")]
    hogwild = [
        " to ".join(f"{value:.2f}" for value in sorted(one[ratio] for one in ratios))
        for ratio in ("plain, 2 processes / 1", "plain / lock, 2 processes each")
    ]
    for said in (
        f"| {large['allreduce'][beside]:.2f}; `DistributedDataParallel` over gloo "
        f"{large['ddp'][beside]:.2f} |",
        f"| {cnn['allreduce'][beside]:.2f}; DDP {cnn['ddp'][beside]:.2f} |",
        f"| {large['one']['of_plain']:.2f}; {cnn['one']['of_plain']:.2f} |",
        f"| {1e3 * summed['shared']:.0f} ms; gloo {1e3 * summed['gloo']:.0f}, OpenMPI in place "
        f"{1e3 * summed['openmpi']:.0f} |",
        f"| {shm:.2f}; {tcp:.2f} |",
        f"| {'; '.join(hogwild)} |",
        f"| {slow['downpour']:.0%}, {slow['synchronous']:.0%} |".replace("%", " %"),
        f"| {max(rows['pushed_ratio'], rows['fetched_ratio']):.2f} each way |",
        f"| {result(repository, 'replay-cost-304389')['step_ratio']:.2f}, within noise |",
    ):
        assert said in table, said
