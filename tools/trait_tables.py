"""Writes the tables of pages: what goes with what, from traits and rules, and of strategies, from their own pages.

    python tools/trait_tables.py           # writes them; `check_docs.py` fails where one is not up to date

A table stands between `<!-- table: NAME -->` and `<!-- end of table -->`. A cell is "yes", or the number of the reason
below the table, as a job is refused with it. The page of a strategy has its row in a comment below its title.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path

from gradstream.codec.low_rank import PowerSGD
from gradstream.codec.sparse import DGC
from gradstream.job.registry import FAMILIES, find_codec, find_strategy
from gradstream.job.traits import traits_of_strategy
from gradstream.strategies.base import ServerStrategy
from gradstream.traits import Rule, Traits, conflicts

ROOT = Path(__file__).resolve().parents[1]
MARK = re.compile(r"(<!-- table: ([\w -]+) -->\n).*?(<!-- end of table -->)", re.DOTALL)

METHODS = ("conjugate-gradient", "gradient-descent", "lbfgs")
OPTIONS: Mapping[str, tuple[str, Mapping[str, object]]] = {
    "`synchronous`, `backup`": ("synchronous", {"backup": 1}),
    '`synchronous`, `aggregate="median"`': ("synchronous", {"aggregate": "median"}),
    "`synchronous`, `worker_momentum`": ("synchronous", {"worker_momentum": 0.9}),
    "`synchronous`, `sparse=True`": ("synchronous", {"sparse": True}),
    "`allreduce`, `sharded=True`": ("allreduce", {"sharded": True}),
    '`allreduce`, `exchange="torch"`': ("allreduce", {"exchange": "torch"}),
    "`local-sgd`, `delay`": ("local-sgd", {"delay": 1}),
    "`downpour`, `significance`": ("downpour", {"significance": 0.1}),
}
"""Options of strategies that change what goes with them."""

FEATURES: Mapping[str, Sequence[str]] = {
    "[own loop](../guide/loops.md)": ["own loop"],
    "`accumulate`": ["accumulate"],
    '`shares=` `"measured"`': ["measured"],
    "`assignment`": ["assignment"],
    "`split`": ["split"],
    "`2bw`, `pipedream`": ["split", "stream of parts"],
    "row-sparse tensors": ["tables"],
    "stream": ["stream"],
    "`groups`": ["groups"],
    "`clip_norm`": ["clip", "clip_norm"],
    "`record`": ["record"],
    "`noise_scale`": ["noise_scale"],
    "`Muon`": ["by tensor", "by matrix"],
    "`LARS`, `LAMB`": ["by tensor"],
}
CODECS: Mapping[str, Sequence[str]] = {
    "codecs of numbers": ["codec"],
    "`dgc`": ["codec", "codec with momentum"],
    "`powersgd`": ["codec", "codec of matrices"],
    "row-sparse tensors and a codec": ["codec", "tables"],
    "`fetch_codec`": ["fetch_codec"],
}
CHANGES: Mapping[str, Sequence[str]] = {
    "a new process in the place of a lost worker": ["replacement"],
    "the same, of a [stream](guide/data.md)": ["replacement", "stream"],
    "`acknowledge`": ["acknowledge"],
    "`gradstream reshard`": ["resharding"],
}
PAGES: Mapping[str, Mapping[str, Mapping[str, Sequence[str]]]] = {
    "docs/strategies/index.md": {"strategies": FEATURES},
    "docs/codecs.md": {"codecs": CODECS},
    "docs/assumptions.md": {"changes": CHANGES},
}

ROW = re.compile(r"<!-- in the tables\n(.*?)-->", re.DOTALL)
ROWS: Mapping[str, tuple[str, str, Mapping[str, str]]] = {
    "in a line": (
        "docs/strategies/index.md",
        "",
        {
            "in a line": "in a line",
            "waits for": "waits for",
            "bytes": "bytes",
            "survives": "survives a worker's death",
        },
    ),
    "waits": (
        "README.md",
        "docs/strategies/",
        {"waits for": "waits for", "bytes": "bytes up + down", "survives": "survives a worker's death"},
    ),
}
"""By name of a table of strategies: its page, the folder of their pages as that sees it, and columns with titles."""


def strategies() -> Iterator[tuple[str, dict[str, str]]]:
    """Each strategy, with the options that matter, and its traits."""
    for name in FAMILIES["strategy"]:
        strategy = find_strategy(name)
        yield f"`{name}`", traits_of_strategy(strategy, 4)
        if name in METHODS and isinstance(strategy, ServerStrategy) and (alone := strategy.in_group()):
            yield f"`{name}`, `servers=0`", traits_of_strategy(alone, 4)
    for label, (name, options) in OPTIONS.items():
        yield label, traits_of_strategy(find_strategy(name, options), 4)


class Shown(dict[str, str]):
    """Texts of traits on a page: what nobody has asked for is named by the trait."""

    def __missing__(self, trait: str) -> str:
        return f"`{trait}`"


def broken(traits: Traits, asked: Sequence[str]) -> Rule | None:
    """The first rule that is broken where a strategy is asked for something."""
    whole = {**traits, **{trait: trait for trait in asked}}
    if "local steps" in whole and "own loop" not in whole:
        whole["inner rule"] = ""
    return next(conflicts(whole), None)


def table(columns: Mapping[str, Sequence[str]]) -> str:
    """A table of all strategies and these columns, and the reasons below. Strategies of equal cells share a row."""
    reasons = dict[str, int]()
    rows = dict[tuple[str, ...], list[str]]()
    for label, traits in strategies():
        cells = []
        for asked in columns.values():
            rule = broken(traits, asked)
            if rule is None:
                cells.append("yes")
                continue
            reason = rule.why.format_map(Shown())
            cells.append(f"no ({reasons.setdefault(reason, len(reasons) + 1)})")
        rows.setdefault(tuple(cells), []).append(label)
    head = ["", *columns]
    lines = [head, ["---"] * len(head), *(["; ".join(labels), *cells] for cells, labels in rows.items())]
    drawn = "\n".join(f"| {' | '.join(line)} |" for line in lines)
    notes = "\n".join(f"{number}. {reason[0].upper()}{reason[1:]}." for reason, number in reasons.items())
    return f"{drawn}\n\n{notes}\n"


def told() -> dict[str, tuple[str, dict[str, str]]]:
    """Of each strategy its page, and what that says in the tables: by the keys of its comment."""
    found = dict[str, tuple[str, dict[str, str]]]()
    for page in (ROOT / "docs/strategies").glob("*.md"):
        if (row := ROW.search(page.read_text())) is not None:
            cells = dict(line.split(": ", 1) for line in row[1].splitlines())
            found |= dict.fromkeys(cells["names"].split(", "), (page.name, cells))
    return found


def rows(name: str) -> str:
    """A table of strategies, in the order of the registry. Strategies of equal cells share a row."""
    _, where, columns = ROWS[name]
    cells_of = dict[tuple[str, ...], dict[str, list[str]]]()
    said = told()
    for strategy in FAMILIES["strategy"]:
        page, cells = said[strategy]
        there = cells_of.setdefault(tuple(cells[key] for key in columns), {})
        there.setdefault(page, []).append(f"`{strategy}`")
    head = ["`strategy=`", *columns.values()]
    lines = ["| " + " | ".join(head) + " |", "|" + "---|" * len(head)]
    for texts, there in cells_of.items():
        names = ", ".join(f"[{', '.join(each)}]({where}{page})" for page, each in there.items())
        lines.append(f"| {names} | {' | '.join(texts)} |")
    return "\n".join(lines) + "\n"


def of_kind(kind: type) -> list[str]:
    """The names of built-in codecs of a class."""
    return [name for name in FAMILIES["codec"] if isinstance(find_codec(name), kind)]


def filled(page: str) -> str:
    """The text of a page with its tables as they are to be."""
    assert of_kind(DGC) == ["dgc"] and of_kind(PowerSGD) == ["powersgd"]  # the columns of CODECS
    text = (ROOT / page).read_text()
    made = {name: partial(table, columns) for name, columns in PAGES.get(page, {}).items()}
    made |= {name: partial(rows, name) for name, (where, *_) in ROWS.items() if where == page}
    for name in made:
        assert f"<!-- table: {name} -->" in text, f"{page} has no place for the table {name}"
    return MARK.sub(lambda found: f"{found[1]}{made[found[2]]()}{found[3]}", text)


def pages() -> list[str]:
    """The pages that have such tables."""
    return sorted({*PAGES, *(where for where, *_ in ROWS.values())})


def outdated() -> Iterator[str]:
    """The pages whose tables say something else than the rules, or the pages of strategies."""
    for page in pages():
        if filled(page) != (ROOT / page).read_text():
            yield f"{page}: a table is not up to date; run python tools/trait_tables.py"


def main() -> int:
    """Writes all tables."""
    for page in pages():
        (ROOT / page).write_text(filled(page))
    return 0


if __name__ == "__main__":
    sys.exit(main())
