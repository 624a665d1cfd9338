"""Pictures of a record: needs matplotlib (extra `bench`)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from common import axes_of, save

STYLES = ("-", "--", ":", "-.")


def curves(
    lines: Mapping[str, Sequence[Sequence[float]]], path: Path, *, epoch: float, longest_s: float
) -> None:
    """Accuracy over epochs, and over virtual seconds.

    Args:
        lines: by title, points [samples, seconds, accuracy].
        epoch: samples of one.
        longest_s: end of the second axis.
    """
    figure, (left, right) = axes_of(2)
    for number, (title, points) in enumerate(lines.items()):
        look = {"linestyle": STYLES[number // 10 % 4], "color": f"C{number % 10}", "linewidth": 1.3}
        left.plot([p[0] / epoch for p in points], [100 * p[2] for p in points], label=title, **look)
        right.plot([p[1] for p in points], [100 * p[2] for p in points], **look)
    left.set(xlabel="epochs", ylabel="test accuracy, %")
    right.set(xlabel="virtual seconds", xlim=(0, longest_s))
    for axis in (left, right):
        axis.grid(alpha=0.3)
    left.legend(fontsize=6.5, loc="lower right")
    save(figure, path)


def sensitivity(by_rate: Mapping[str, Mapping[str, float]], path: Path) -> None:
    """Accuracy over the learning rate, by title."""
    figure, axis = axes_of(1, 7.0)
    for number, (title, found) in enumerate(by_rate.items()):
        rates = [float(rate) for rate in found]
        look = {"linestyle": STYLES[number // 10 % 4], "color": f"C{number % 10}", "linewidth": 1.3}
        axis.plot(rates, [100 * accuracy for accuracy in found.values()], marker=".", label=title, **look)
    axis.set(xscale="log", xlabel="learning rate", ylabel="test accuracy, %")
    axis.grid(alpha=0.3)
    axis.legend(fontsize=6.5)
    save(figure, path)


def over_time(lines: Mapping[str, Sequence[Sequence[float]]], path: Path) -> None:
    """Training and test accuracy over virtual seconds.

    Args:
        lines: by title, points [samples, seconds, test accuracy, training accuracy], the first of them
            the warm start, which is the same of all.
    """
    figure, axes = axes_of(2)
    for axis, place, what in zip(axes, (3, 2), ("training", "test"), strict=True):
        for number, (title, points) in enumerate(lines.items()):
            begin, *later = points
            seconds, accuracies = [p[1] for p in later], [100 * p[place] for p in later]
            axis.plot(seconds, accuracies, marker=".", label=title, color=f"C{number}")
        axis.axhline(100 * begin[place], color="grey", linestyle=":", label="warm start")
        axis.set(xscale="log", xlabel="virtual seconds after the warm start", ylabel=f"{what} accuracy, %")
        axis.grid(alpha=0.3)
    axes[0].legend(fontsize=8)
    save(figure, path)


def time_to(lines: Mapping[str, Sequence[tuple[int, float, float]]], path: Path, accuracy: float) -> None:
    """Virtual seconds to an accuracy over the number of machines, by title: (replicas, mean, deviation)."""
    figure, axis = axes_of(1, 6.0)
    for title, points in lines.items():
        counts, seconds, deviations = zip(*points, strict=True) if points else ((), (), ())
        axis.errorbar(counts, seconds, yerr=deviations, marker="o", capsize=3, label=title)
    axis.set(
        xscale="log", yscale="log", xlabel="replicas", ylabel=f"virtual seconds to {100 * accuracy:.0f} %"
    )
    axis.grid(alpha=0.3, which="both")
    axis.legend(fontsize=8)
    save(figure, path)
