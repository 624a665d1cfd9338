"""Pictures of a record: needs matplotlib (extra `bench`)."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from common import axes_of, save
from large_batch.page import FULL, METHODS


def draw(record: Mapping[str, Any], folder: Path) -> None:
    """Accuracy and sharpness over the batch, of the dense model; updates over the batch, of all models."""
    found = record["found"]
    if "batch" in found:
        _minima(found["batch"]["dense"], folder / "large-batch-dense.svg")
    if "line" in found:
        _line(found["line"], folder / "large-batch-line.svg")
    if "count" in found:
        _updates(found["count"], folder / "large-batch-updates.svg", found["target"])


def _minima(by_size: Mapping[str, Any], path: Path) -> None:
    figure, (left, right) = axes_of(2)
    for number, (method, title) in enumerate(METHODS.items()):
        # At the small batch, which comes first, all rules of SGD are the first one.
        names = ["plain" if method in ("linear", "longer", "sgd") else method] + [method] * (len(by_size) - 1)
        points = {int(size): one[name] for (size, one), name in zip(by_size.items(), names, strict=True)}
        for axis, figures in (
            (left, {size: one["accuracy"] for size, one in points.items()}),
            (right, {size: one["sharpness"][FULL] for size, one in points.items() if "sharpness" in one}),
        ):
            means, deviations = zip(*figures.values(), strict=True)
            shifted = [size * 1.015**number for size in figures]  # bars beside each other
            axis.errorbar(shifted, means, yerr=deviations, marker="o", markersize=4, capsize=2, label=title)
    epochs = next(iter(by_size.values())).get("longer")
    if epochs:
        title = "128, as many epochs as 2048 with as many updates"
        left.axhline(epochs["accuracy"][0], color="grey", linestyle=":", label=title)
        right.axhline(epochs["sharpness"][FULL][0], color="grey", linestyle=":")
    left.set(ylabel="test accuracy, %")
    right.set(yscale="log", ylabel="sharpness, % (full space, 1e-3)")
    sizes = [int(size) for size in by_size]
    for axis in (left, right):
        axis.set_xscale("log", base=2)
        axis.set_xticks(sizes, map(str, sizes))
        axis.set(xlabel="batch")
        axis.grid(alpha=0.3)
    left.legend(fontsize=8)
    save(figure, path)


def _line(by_model: Mapping[str, Any], path: Path) -> None:
    figure, axis = axes_of(1, 6.0)
    for model, line in by_model.items():
        axis.plot(line["at"], line["losses"], marker=".", label=model)
    axis.set(
        yscale="log",
        xlabel="from the small batch's minimum (0) to the large one's (1)",
        ylabel="training loss",
    )
    axis.grid(alpha=0.3, which="both")
    axis.legend(fontsize=8)
    save(figure, path)


def _updates(by_model: Mapping[str, Any], path: Path, target: float) -> None:
    figure, axis = axes_of(1, 6.0)
    for number, (model, one) in enumerate(by_model.items()):
        sizes, color = [int(size) for size in one["batches"]], f"C{number}"
        means, deviations = zip(*(row["updates"] for row in one["batches"].values()), strict=True)
        axis.errorbar(sizes, means, yerr=deviations, fmt="o", capsize=3, color=color, label=model)
        fitted = [row["fit"] for row in one["batches"].values()]
        axis.plot(sizes, fitted, color=color, label=f"{model}: S_min + E_min/B")
        axis.axvline(one["critical"][0], color=color, linestyle="--", label=f"{model}: critical batch")
        axis.axvline(one["noise_mean"][0], color=color, linestyle=":", label=f"{model}: noise scale")
    axis.set(xscale="log", yscale="log", xlabel="batch", ylabel=f"updates to a training loss of {target:g}")
    axis.grid(alpha=0.3, which="both")
    axis.legend(fontsize=8)
    save(figure, path)
