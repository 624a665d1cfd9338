"""Reports of workers that have unequal numbers of minibatches: none may wait for ever, and no sample may be lost."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from itertools import pairwise

import torch
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

import gradstream as gs
from acted_loops import (
    DEADLINES,
    Batch,
    alone,
    close,
    flat,
    joined,
    line,
    part,
    samples,
    sgd,
    step,
)
from gradstream.testing.sessions import loop_in_threads


def test_who_has_more_minibatches_goes_on_with_its_own() -> None:
    """pytorch/pytorch#38174: the process with more minibatches waited for ever for those that were through."""
    data = samples(20)
    own = [[(0, 4), (8, 12), (12, 16), (16, 20)], [(4, 8)]]  # of each worker

    def loop(session: gs.Session) -> torch.Tensor:
        model, optimizer = session.wrap(made := line(session.rank), sgd(made))
        for start, stop in own[session.rank]:
            step(model, optimizer, part(data, start, stop))
        session.close()
        return flat(made)

    found = loop_in_threads(loop, deadlines=DEADLINES)
    close(found, alone(part(data, start, stop) for start, stop in [(0, 8), (8, 12), (12, 16), (16, 20)]))


def test_a_sampler_of_minibatches_of_unequal_sizes_leaves_none_over() -> None:
    """k2-fsa/snowfall#152: of minibatches by length one process had one fewer, and all hung."""
    data = samples(23)
    sizes = [5, 2, 7, 1, 5, 3]  # and two workers would have three each, but there is a seventh
    ends = [sum(sizes[:index]) for index in range(len(sizes) + 1)]
    batches = [list(range(*pair)) for pair in pairwise(ends)] + [[0, 22]]
    seen: list[list[tuple[int, ...]]] = [[], []]

    def loop(session: gs.Session) -> torch.Tensor:
        rows = TensorDataset(torch.arange(23), *data)
        loader = session.shard(DataLoader(rows, batch_sampler=batches))
        model, optimizer = session.wrap(made := line(session.rank), sgd(made))
        for ids, x, y in loader:
            seen[session.rank].append(tuple(ids.tolist()))
            step(model, optimizer, (x, y))
        session.close()
        return flat(made)

    found = loop_in_threads(loop, strategy="allreduce", deadlines=DEADLINES)
    whole = [(data[0][ids], data[1][ids]) for ids in batches]
    close(found, alone(joined(*whole[index : index + 2]) for index in range(0, 7, 2)))
    assert [len(one) for one in seen] == [4, 4]  # the eighth repeats one, and counts nothing
    assert set(seen[0]) | set(seen[1]) == {tuple(ids) for ids in batches}


def test_a_worker_that_stops_early_by_its_own_loss_ends_no_other() -> None:
    """facebookresearch/pytext#585: all processes but the first stopped early, on a count of their own, and it hung."""
    data = samples(32)

    def batch(number: int, rank: int) -> Batch:
        return part(data, 8 * number + 4 * rank, 8 * number + 4 * rank + 4)

    def loop(session: gs.Session) -> torch.Tensor:
        model, optimizer = session.wrap(made := line(session.rank), sgd(made))
        epochs_without_better = 0
        for number in range(4):
            step(model, optimizer, batch(number, session.rank))
            epochs_without_better += session.rank
            if epochs_without_better == 2:
                break
        session.close()
        return flat(made)

    found = loop_in_threads(loop, strategy="synchronous", deadlines=DEADLINES)
    both = [joined(batch(number, 0), batch(number, 1)) for number in range(2)]
    close(found, alone([*both, batch(2, 0), batch(3, 0)]))


def test_fewer_minibatches_than_workers_are_one_step() -> None:
    """rasbt/LLMs-from-scratch#523: with more processes than minibatches some had none, and divided by their count."""
    data = samples(10)
    means: list[float] = []

    def loop(session: gs.Session) -> torch.Tensor:
        loader = session.shard(DataLoader(TensorDataset(*data), batch_size=5))
        model, optimizer = session.wrap(made := line(session.rank), sgd(made))
        for _ in range(3):
            total, count = 0, 0
            for x, y in loader:
                step(model, optimizer, (x, y))
                total, count = total + len(x), count + 1
            means.append(total / count)
        session.close()
        return flat(made)

    found = loop_in_threads(loop, workers=3, strategy="allreduce", deadlines=DEADLINES)
    close(found, alone([data] * 3))
    assert means == [5.0] * 3 * 3


class Stream(IterableDataset[int]):
    """Ten samples, all of them in whichever process goes through it."""

    def __iter__(self) -> Iterator[int]:
        return iter(range(10))


def test_a_stream_that_every_worker_goes_through_counts_each_sample_once() -> None:
    """huggingface/datasets#5360: an iterable data set knows nothing of ranks, so each process took all of it."""
    data = samples(10)
    counts: Counter[int] = Counter()

    def loop(session: gs.Session) -> torch.Tensor:
        loader = session.shard(DataLoader(Stream(), batch_size=2))
        model, optimizer = session.wrap(made := line(session.rank), sgd(made))
        before = 0
        for ids in loader:
            step(model, optimizer, (data[0][ids], data[1][ids]))
            counted = session._connection.bridge.samples  # type: ignore[attr-defined]
            counts.update(ids.tolist() if counted > before else [])
            before = counted
        session.close()
        return flat(made)

    found = loop_in_threads(loop, workers=3, strategy="allreduce", deadlines=DEADLINES)
    assert counts == dict.fromkeys(range(10), 1)
    close(found, alone([part(data, 0, 6), part(data, 6, 10)]))
