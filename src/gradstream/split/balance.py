"""Cuts a chain of layers into contiguous groups of about equal weight. Pure functions."""

from __future__ import annotations

import math
from collections.abc import Sequence


def contiguous_groups(weights: Sequence[float], cut_costs: Sequence[float], groups: int) -> list[int]:
    """Cuts a sequence into contiguous groups, none empty, so that the heaviest group is as light as possible.

    Among equal cuts it takes one of low cost. Dynamic programming over (group, end): O(groups · n²).

    Args:
        weights: of the n elements.
        cut_costs: of a cut before each element, in the same order; the first is not used.
        groups: how many, 1 to n.

    Returns:
        The group of each element.
    """
    n = len(weights)
    sums = [0.0]
    for weight in weights:
        sums.append(sums[-1] + weight)
    best = [
        (sums[end], 0.0) for end in range(n + 1)
    ]  # (heaviest group, costs of all cuts) of the first `end`
    starts: list[list[int]] = []
    for group in range(1, groups):
        longer, chosen = [(math.inf, math.inf)] * (n + 1), [0] * (n + 1)
        for end in range(group + 1, n + 1):
            for start in range(group, end):
                heaviest, costs = best[start]
                option = (max(heaviest, sums[end] - sums[start]), costs + cut_costs[start])
                if option < longer[end]:
                    longer[end], chosen[end] = option, start
        best = longer
        starts.append(chosen)
    found, end = [0] * n, n
    for group in range(groups - 1, 0, -1):
        start = starts[group - 1][end]
        found[start:end] = [group] * (end - start)
        end = start
    return found


def filled(weights: Sequence[float], more: float) -> list[float]:
    """Divides a further weight, so that the heaviest is as light as possible: as water fills a vessel.

    Args:
        weights: that are there.
        more: the weight to divide, > 0.

    Returns:
        The share of each, of a sum of 1.
    """
    ascending = sorted(weights)
    for count in range(len(ascending), 0, -1):
        level = (more + sum(ascending[:count])) / count
        if level >= ascending[count - 1]:
            break
    return [max(level - weight, 0) / more for weight in weights]
