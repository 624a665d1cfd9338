"""Draws the picture of README.md: four workers, one of them slow, under `synchronous` and under `downpour`.

    python tools/draw_one_slow_worker.py    # writes docs/one-slow-worker.svg

Both runs are simulations on virtual time, so every machine draws the same picture. The lanes and the
colours are those of `gradstream report`. The picture follows the reader's choice of light or dark.
"""

from __future__ import annotations

import argparse
import dataclasses
import re
from collections.abc import Iterator
from pathlib import Path

import gradstream as gs
from gradstream.report import figures, lanes
from gradstream.report.charts import time_text
from gradstream.report.lanes import lanes_of
from gradstream.run.result import Run
from gradstream.runtime.simulation import Cost, SimulationConfig
from gradstream.testing.runs import least_squares

PICTURE = Path(__file__).resolve().parents[1] / "docs" / "one-slow-worker.svg"
COLOURS = (Path(figures.__file__).parent / "page.css").read_text()

WORLD = SimulationConfig(costs={"gradient": Cost(base_s=10e-3)}, speeds={"worker-3": 0.25})
RUNS = {
    "synchronous": "every update waits for all four workers",
    "downpour": "nobody waits; the fast workers take over samples of the slow one",
}
KEYS = {"compute": "computes a gradient", "wait0": "waits for worker-3, which has a quarter of the speed"}
FILLS = {"text": "quiet", ".name": "ink", ".paper": "card"} | {
    f".{style}": style for style in ("compute", "own", "wait0", "shard", "rest")
}
"""By selector: the name of its colour in the report's page.css."""

LEFT, ACROSS, EDGE = 78, 690, 14
HEAD = 30
PITCH = lanes.STEP + 5
BLOCK = HEAD + 4 * PITCH + 10


def main() -> None:
    """Writes the picture."""
    argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    ).parse_args()
    PICTURE.write_text(picture())
    print(PICTURE.name)


def picture() -> str:
    """Both timelines over one another, on one scale of time."""
    model, data = least_squares(960, 8, whole=False, reduction="mean")
    runs = {
        name: gs.simulate(model, data, strategy=name, workers=4, batch_size=16, epochs=1, config=WORLD)
        for name in RUNS
    }
    scale = ACROSS / max(lanes_of(run.events).end_s for run in runs.values())
    wide, high = LEFT + ACROSS + EDGE, len(runs) * BLOCK + 26
    parts = [
        f"<style>{style_sheet()}</style>",
        f'<rect class="paper" width="{wide}" height="{high}" rx="6"/>',
    ]
    for index, (name, run) in enumerate(runs.items()):
        parts += timeline(name, run, index * BLOCK, scale)
    for index, (style, said) in enumerate(KEYS.items()):
        x, y = LEFT + 160 * index, high - 12
        parts.append(f'<rect class="{style}" x="{x}" y="{y - 9}" width="11" height="11" rx="2"/>')
        parts.append(f'<text x="{x + 17}" y="{y}">{said}</text>')
    told = (
        "Timelines of four workers: under synchronous three wait for the slow one, under downpour none does"
    )
    body = "\n".join(parts)
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {wide} {high}" role="img" '
        f'aria-label="{told}">\n{body}\n</svg>\n'
    )


def timeline(name: str, run: Run, top: int, scale: float) -> Iterator[str]:
    """A run's title, its lanes, and when it was done."""
    line = lanes_of(run.events)
    styles = lanes.styles_of(figures.figures_of(run.events))
    took = f"960 samples in {time_text(line.end_s - line.begin_s)}"
    yield f'<text class="name" x="{EDGE}" y="{top + 20}">{name}: {RUNS[name]}. {took}</text>'
    for index, lane in enumerate(line.lanes):
        y = top + HEAD + index * PITCH
        yield f'<text x="{EDGE}" y="{y + 14}">{lane.name}</text>'
        alone = dataclasses.replace(lane, pushes=(), fetches=())  # the bands below would say nothing more
        drawn = lanes.lane_paths(alone, 0, line.begin_s, scale, styles)
        yield f'<g transform="translate({LEFT} {y})">{drawn}</g>'


def style_sheet() -> str:
    """The report's colours: the first of each name is for light readers, the second for dark ones."""
    light, dark = (
        "".join(
            f"{selector}{{fill:{re.findall(f'--{name}: (#[0-9a-f]+);', COLOURS)[which]}}}"
            for selector, name in FILLS.items()
        )
        for which in (0, 1)
    )
    gap = "path{{stroke:{};stroke-width:.8}}"  # between two gradients in a row
    papers = re.findall("--card: (#[0-9a-f]+);", COLOURS)
    return (
        f"text{{font:12px system-ui,sans-serif}}.name{{font-weight:600}}{light}{gap.format(papers[0])}"
        f"@media(prefers-color-scheme:dark){{{dark}{gap.format(papers[1])}}}"
    )


if __name__ == "__main__":
    main()
