"""Synchronous SGD in threads, without a server: the workers sum their gradients around a ring.

    python examples/naive/allreduce.py

    0 ─▶ 1 ─▶ 2 ─▶ 0       W-1 turns in which parts of the sum are summed up on their way round,
                           W-1 turns in which the finished parts go round

Each worker sends 2(W-1)/W of the vector, however many workers there are. All make the same update, so all
have the same parameters after each step: those of one worker that has the joined minibatch.

Patarasuk and Yuan, "Bandwidth optimal all-reduce algorithms for clusters of workstations", 2009.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable
from queue import SimpleQueue

import numpy as np
from problem import FEATURES, Minibatch, distance, gradient, minibatches

Gradient = Callable[[np.ndarray, np.ndarray, np.ndarray], np.ndarray]


class Place:
    """A worker's place in the ring: the queue to the next worker, and the one from the worker before."""

    def __init__(self, rank: int, queues: list[SimpleQueue]) -> None:
        self.rank, self.size = rank, len(queues)
        self.inbox, self.next = queues[rank], queues[(rank + 1) % len(queues)]

    def sum(self, vector: np.ndarray) -> np.ndarray:
        """The sum of all workers' vectors. All of them must call this."""
        parts = np.array_split(vector, self.size)
        for turn in range(self.size - 1):  # reduce-scatter: afterwards part rank + 1 is whole here
            self.next.put(parts[(self.rank - turn) % self.size])
            taken = (self.rank - turn - 1) % self.size
            parts[taken] = parts[taken] + self.inbox.get()
        for turn in range(self.size - 1):  # all-gather: whole parts go round
            self.next.put(parts[(self.rank + 1 - turn) % self.size])
            parts[(self.rank - turn) % self.size] = self.inbox.get()
        return np.concatenate(parts)


def worker(
    place: Place, gradient: Gradient, batches: Iterable[Minibatch], w: np.ndarray, rate: float
) -> np.ndarray:
    """Returns the parameters after the last minibatch. All workers must have as many minibatches."""
    for x, y in batches:
        # The mean over all samples of the step: sums of gradients, and behind them how many samples.
        total = place.sum(np.append(len(y) * gradient(w, x, y), len(y)))
        w = w - rate * total[:-1] / total[-1]
    return w


def ring(workers: int) -> list[Place]:
    """The places of a new ring."""
    queues: list[SimpleQueue] = [SimpleQueue() for _ in range(workers)]
    return [Place(rank, queues) for rank in range(workers)]


if __name__ == "__main__":
    WORKERS = 4
    found: dict[int, np.ndarray] = {}

    def train(place: Place) -> None:
        batches = minibatches(place.rank, WORKERS)
        found[place.rank] = worker(place, gradient, batches, np.zeros(FEATURES), rate=0.1)

    threads = [threading.Thread(target=train, args=(place,)) for place in ring(WORKERS)]
    print(f"before: {distance(np.zeros(FEATURES)):.3f} from the true weights")
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    same = all(np.array_equal(found[0], w) for w in found.values())
    print(f"after:  {distance(found[0]):.3f}, by {WORKERS} workers with the same parameters: {same}")
