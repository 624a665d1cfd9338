"""The loss between runs: on the line through two of them, or on the plane through three."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from gradstream.errors import ConfigError
from gradstream.ext.analysis.full_loss import Vector
from gradstream.ext.analysis.sharpness import Loss

LINE, PLANE = 25, 11
"""Points on the line, and on each side of the plane."""


@dataclass(frozen=True)
class Surface:
    """Losses on a line or a plane.

    Args:
        points: (2,) or (3, 2): where the runs are, in the coordinates of `axes`.
        axes: coordinates of the grid. A line has one axis: 0 is the first run and 1 the second. A plane has two, in
            units of length of parameters: the first run is at (0, 0), the second at (d, 0).
        losses: (k,), or (k, k) with the first axis first.
    """

    points: np.ndarray[Any, Any]
    axes: tuple[Vector, ...]
    losses: np.ndarray[Any, Any]

    def draw(self, path: Path, names: Sequence[str]) -> None:
        """Writes the plot: PNG, SVG or PDF, by the file's name. Needs matplotlib."""
        try:
            from matplotlib.figure import Figure
        except ImportError as error:
            raise ConfigError(
                f"the plot is matplotlib's ({error}): pip install 'gradstream[analysis]'"
            ) from error
        figure = Figure(figsize=(6, 4.5), layout="constrained")
        ax = figure.add_subplot()
        if len(self.axes) == 1:
            ax.plot(self.axes[0], self.losses, marker=".")
            for at, name in zip(self.points, names, strict=True):
                ax.axvline(at, color="grey", linestyle=":")
                ax.annotate(name, (at, ax.get_ylim()[1]), ha="center", va="bottom", fontsize=8)
            ax.set_xlabel("place on the line")
            ax.set_ylabel("loss over all training samples")
        else:
            filled = ax.contourf(*self.axes, self.losses.T, levels=20)
            figure.colorbar(filled, label="loss over all training samples")
            for at, name in zip(self.points, names, strict=True):
                ax.plot(*at, marker="o", color="white", markeredgecolor="black")
                ax.annotate(name, at, xytext=(4, 4), textcoords="offset points", fontsize=8)
            ax.set_xlabel("distance")
            ax.set_ylabel("distance")
        figure.savefig(path)


def surface(loss: Loss, runs: Sequence[Vector], *, points: int | None = None) -> Surface:
    """The loss on the line through two runs, or on the plane through three.

    The line is f((1 - α) a + α b) for α from -1 to 2, as in Keskar et al. (2017). The plane is spanned by b - a and
    the part of c - a that is orthogonal to it, and reaches a third beyond the runs on each side.

    Args:
        loss: f and its gradient, such as a `FullLoss`.
        runs: parameters of two or three runs of one model, (n,) each.
        points: on the line, or on each side of the plane; None takes 25 or 11.

    Raises:
        ConfigError: another number of runs, runs of different sizes, or runs in one place or on one line.

    Source: Goodfellow, Vinyals, Saxe, "Qualitatively characterizing neural network optimization problems", ICLR 2015.
    Garipov, Izmailov, Podoprikhin, Vetrov, Wilson, "Loss surfaces, mode connectivity", NeurIPS 2018.
    """
    if len(runs) not in (2, 3):
        raise ConfigError(f"a line takes 2 runs and a plane 3; got {len(runs)}")
    if len({run.shape for run in runs}) > 1:
        raise ConfigError(
            f"expected runs of one model; got runs of {', '.join(f'{run.size:,}' for run in runs)} parameters"
        )
    count = points or (LINE if len(runs) == 2 else PLANE)
    if count < 2:
        raise ConfigError(f"points={count}: expected 2 or more")
    first, along = runs[0], runs[1] - runs[0]
    length = float(np.linalg.norm(along))
    if not length:
        raise ConfigError(
            "the first two runs have the same parameters: no line leads through them; name another run"
        )
    if len(runs) == 2:
        axis = np.linspace(-1.0, 2.0, count)
        return Surface(np.array([0.0, 1.0]), (axis,), np.array([loss(first + at * along)[0] for at in axis]))
    along = along / length
    to = runs[2] - first
    beside = float(to @ along)
    across = to - beside * along
    height = float(np.linalg.norm(across))
    if height <= 1e-9 * length:
        raise ConfigError("the three runs are on one line: compare two of them")
    across /= height
    places = np.array([[0.0, 0.0], [length, 0.0], [beside, height]])
    low, high = places.min(axis=0), places.max(axis=0)
    margin = (high - low) / 3
    axes = tuple(np.linspace(*ends, count) for ends in zip(low - margin, high + margin, strict=True))
    losses = [[loss(first + u * along + v * across)[0] for v in axes[1]] for u in axes[0]]
    return Surface(places, axes, np.array(losses))
