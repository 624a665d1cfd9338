"""Costs of algorithms against figures computed by hand: messages, bytes, and seconds on virtual time."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import numpy as np
import pytest
import torch

from gradstream.collectives.algorithms import ALGORITHMS, halving_doubling, ring
from gradstream.collectives.group import Group
from gradstream.collectives.message_group import MessageGroup
from gradstream.collectives.schedule import Recv, Send, Step
from gradstream.errors import InternalError
from gradstream.runtime import Cost, Link, Network, SimulationConfig
from kit.group_runs import VirtualRanks
from kit.schedule_checks import check_allreduce, execute, schedules_of

SIZES = [*range(1, 10), 12, 16, 32, 64]
ALPHA_S, BYTES_S = 1e-3, 1e9  # a byte takes a nanosecond: the clock rounds nothing


def lg(size: int) -> int:
    """⌊lg p⌋."""
    return size.bit_length() - 1


def folded(size: int) -> tuple[int, int]:
    """p' and r."""
    return 1 << lg(size), size - (1 << lg(size))


def is_power(size: int) -> bool:
    return size == 1 << lg(size)


# ---- messages and bytes ------------------------------------------------------------------

TOTAL: dict[str, Callable[[int], int]] = {  # vectors sent in all
    "naive": lambda p: 2 * (p - 1),
    "complete-tree": lambda p: 2 * (p - 1),
    "binomial-tree": lambda p: 2 * (p - 1),
    "butterfly": lambda p: folded(p)[0] * lg(p) + 2 * folded(p)[1],
    "halving-doubling": lambda p: 2 * (p - 1),
    "ring": lambda p: 2 * (p - 1),
    "direct": lambda p: 2 * (p - 1),
}
MESSAGES: dict[str, Callable[[int], int]] = {
    "naive": lambda p: 2 * (p - 1),
    "complete-tree": lambda p: 2 * (p - 1),
    "binomial-tree": lambda p: 2 * (p - 1),
    "butterfly": lambda p: folded(p)[0] * lg(p) + 2 * folded(p)[1],
    "halving-doubling": lambda p: 2 * folded(p)[0] * lg(p) + 2 * folded(p)[1],
    "ring": lambda p: 2 * p * (p - 1),
    "direct": lambda p: 2 * p * (p - 1),
}
BUSIEST: dict[str, Callable[[int], float]] = {  # vectors sent by the rank that sends most
    "naive": lambda p: p - 1,
    "binomial-tree": lambda p: (p - 1).bit_length(),
    "butterfly": lambda p: lg(p),
    "halving-doubling": lambda p: 2 * (p - 1) / p,
    "ring": lambda p: 2 * (p - 1) / p,
    "direct": lambda p: 2 * (p - 1) / p,
}


@pytest.mark.parametrize("how", ALGORITHMS)
def test_sums_messages_and_bytes(how: str) -> None:
    make = ALGORITHMS[how].schedule
    for size in SIZES:
        for elems in {0, 1, size - 1, size, size + 1, 1000}:
            tally = check_allreduce(make, size, elems)
            assert tally.elems == TOTAL[how](size) * elems, (size, elems)
            if elems >= size:
                assert tally.messages == MESSAGES[how](size), (size, elems)
            else:
                assert tally.messages <= MESSAGES[how](size), (size, elems)
        if how in BUSIEST and (is_power(size) or how not in ("butterfly", "halving-doubling")):
            tally = check_allreduce(make, size, 960 * size)
            assert tally.busiest_elems == round(BUSIEST[how](size) * 960 * size)
        alphas = ALGORITHMS[how].cost(size).alphas
        depth = check_allreduce(make, size, 1000).depth
        assert depth == alphas if is_power(size) or how in ("ring", "direct", "naive") else depth <= alphas


def test_parts_alone_move_half() -> None:
    for size in (2, 4, 8):
        cuts = list(range(0, 10 * size + 1, 10))
        for part in (ring.reduce_scatter, ring.all_gather, halving_doubling.reduce_scatter):
            vectors = list(np.random.default_rng(0).integers(0, 9, (size, 10 * size)))
            tally = execute([part(rank, cuts) for rank in range(size)], vectors)
            assert tally.elems == (size - 1) * 10 * size


# ---- the lessons' own examples -----------------------------------------------------------


def test_a_complete_tree_on_seven() -> None:
    """Ranks holding 1 to 7: 8 and 13, then 28, two steps up and two down."""
    make = ALGORITHMS["complete-tree"].schedule
    vectors = [np.array([float(rank + 1)]) for rank in range(7)]
    up = [
        [step for step in steps if isinstance(step, Recv) and step.add] for steps in schedules_of(make, 7, 1)
    ]
    assert [len(steps) for steps in up] == [0, 0, 0, 0, 2, 2, 2]
    tops = [np.array([float(rank + 1)]) for rank in range(7)]
    for rank in (4, 5, 6):  # as the sums go up
        for step in up[rank]:
            tops[rank] += tops[step.peer]
    assert [float(tops[rank][0]) for rank in (4, 5, 6)] == [8.0, 13.0, 28.0]
    tally = execute(schedules_of(make, 7, 1), vectors)
    assert [float(vector[0]) for vector in vectors] == [28.0] * 7
    assert tally.depth == 4


def test_a_butterfly_on_four() -> None:
    """Ranks holding 1 to 4: 3 and 7, then 10."""
    make = ALGORITHMS["butterfly"].schedule
    vectors = [np.array([float(rank + 1)]) for rank in range(4)]
    first = [steps[:2] for steps in schedules_of(make, 4, 1)]
    execute(first, vectors)
    assert [float(vector[0]) for vector in vectors] == [3.0, 3.0, 7.0, 7.0]
    execute([steps[2:] for steps in schedules_of(make, 4, 1)], vectors)
    assert [float(vector[0]) for vector in vectors] == [10.0] * 4


# ---- the checker finds what is planted ---------------------------------------------------


def spoilt(spoil: Callable[[int, list[Step]], list[Step]]) -> Any:
    make = ALGORITHMS["ring"].schedule
    return lambda rank, size, elems: spoil(rank, list(make(rank, size, elems)))


@pytest.mark.parametrize(
    ("spoil", "word"),
    [
        (lambda rank, steps: steps[1:] if rank == 1 else steps, "waits for ever|elements came"),
        (lambda rank, steps: [s for s in steps if isinstance(s, Recv)] + steps, "waits for ever"),
        (lambda rank, steps: steps[:-1] if rank == 2 else steps, "never receives"),
        (lambda rank, steps: [*steps[:2], *reversed(steps[2:4]), *steps[4:]], "waits|has|came|never"),
        (
            lambda rank, steps: [
                Recv(s.peer, s.start, s.stop) if isinstance(s, Recv) and rank == 0 else s for s in steps
            ],
            "has .* expected",
        ),
        (lambda rank, steps: [Send(s.peer, s.start, s.stop - 1) for s in steps[:1]] + steps[1:], "came"),
    ],
)
def test_planted_faults_are_found(spoil: Any, word: str) -> None:
    with pytest.raises(InternalError, match=word):
        check_allreduce(spoilt(spoil), 4, 40)


# ---- seconds -----------------------------------------------------------------------------


def seconds(
    size: int,
    elems: int,
    hows: Iterable[str],
    *,
    gamma_s_elem: float = 0.0,
    piece_bytes: int = 4 << 20,
    **network: Any,
) -> dict[str, float]:
    """Virtual seconds of one allreduce by each algorithm, which all ranks begin at the same instant."""
    options = {"bandwidth_bytes_s": BYTES_S, "link": Link(latency_s=ALPHA_S), "header_bytes": 0, **network}
    config = SimulationConfig(
        costs={"reduce": Cost(per_elem_s=gamma_s_elem)}, network=Network(**options), shape_only=True
    )

    async def work(group: Group) -> list[float]:
        assert isinstance(group, MessageGroup)
        runtime = ranks.cluster.runtime(group.names[group.rank])
        span, took_s = group.allocate(elems, torch.float32, "gradient").all, []
        for number, how in enumerate(hows, 1):
            await runtime.sleep(number - ranks.now_s)
            await group.allreduce(span, algorithm=how)
            took_s.append(ranks.now_s - number)
        return took_s

    ranks = VirtualRanks(size, config=config)
    return dict(zip(hows, np.max(ranks.run(work, piece_bytes=piece_bytes), axis=0), strict=True))


def exact(how: str, size: int) -> bool:
    """Whether the formula is exact, and not only a bound."""
    if how == "complete-tree":
        return is_power(size + 1) or size == 2
    return how in ("naive", "ring", "direct") or is_power(size)


@pytest.mark.parametrize("size", [2, 3, 4, 5, 6, 7, 8, 12, 16, 32])
def test_seconds_are_those_of_the_formula(size: int) -> None:
    elems = 1000 * size
    for how, found in seconds(size, elems, list(ALGORITHMS)).items():
        expected = ALGORITHMS[how].cost(size).seconds(4 * elems, ALPHA_S, 1 / BYTES_S)
        if exact(how, size):
            assert found == pytest.approx(expected, abs=5e-9), how
        else:  # a vector that was sent early may share a card with a folded one
            assert 0.4 * expected < found < expected + 4 * elems / BYTES_S + 5e-9, how


@pytest.mark.parametrize("size", [2, 4, 16])
def test_sums_cost_what_the_formula_says(size: int) -> None:
    elems, gamma_s_elem = 1000 * size, 8e-9
    hows = ["butterfly", "halving-doubling", "ring", "binomial-tree"]
    for how, found in seconds(size, elems, hows, gamma_s_elem=gamma_s_elem).items():
        cost = ALGORITHMS[how].cost(size)
        expected = cost.seconds(4 * elems, ALPHA_S, 1 / BYTES_S, gamma_s_elem / 4)
        assert found == pytest.approx(expected, abs=5e-9), how


def ring_seconds(size: int, elems: int, **network: Any) -> float:
    return seconds(size, elems, ["ring"], link=Link(latency_s=0.0), **network)["ring"]


def test_a_ring_takes_the_same_time_for_any_number_of_ranks() -> None:
    bound_s = 2 * 4 * 6_720_000 / BYTES_S
    for size in (2, 4, 8, 16, 32):
        assert ring_seconds(size, 6_720_000) == pytest.approx((size - 1) / size * bound_s, rel=1e-6)


def test_a_ring_is_as_slow_as_its_slowest_card() -> None:
    even, lame = (ring_seconds(8, 800_000, cards={"worker-3": card}) for card in (BYTES_S, BYTES_S / 10))
    assert lame == pytest.approx(10 * even, rel=0.02)


def test_a_long_message_is_sent_on_while_it_arrives() -> None:
    """In pieces, a tree of 8 takes little longer than its root, which receives and sends three vectors."""
    hows = ["binomial-tree", "complete-tree", "butterfly"]
    at_once = seconds(8, 1_000_000, hows, link=Link(latency_s=0.0))
    in_pieces = seconds(8, 1_000_000, hows, link=Link(latency_s=0.0), piece_bytes=64 << 10)
    assert at_once["binomial-tree"] == pytest.approx(6 * 4e-3, rel=1e-6)
    assert in_pieces["binomial-tree"] < 0.75 * at_once["binomial-tree"]
    assert in_pieces["complete-tree"] < 0.6 * at_once["complete-tree"]
    assert in_pieces["butterfly"] == pytest.approx(at_once["butterfly"], rel=0.05)
