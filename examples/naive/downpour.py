"""Downpour SGD in threads: replicas train at their own pace around a sharded parameter server.

    python examples/naive/downpour.py

Dean and others, "Large Scale Distributed Deep Networks", NIPS 2012: Algorithm 1.1, and Adagrad on the server
(§4.1). Two things are simpler here: a replica waits for the parameters that it has asked for, and it pushes
at the end of a period, not at its beginning.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable
from queue import SimpleQueue

import numpy as np
from problem import FEATURES, Minibatch, distance, gradient, minibatches

Gradient = Callable[[np.ndarray, np.ndarray, np.ndarray], np.ndarray]
EPS = 1e-10  # the paper's formula is 0/0 for a parameter that has had no gradient yet


class Shard(threading.Thread):
    """Holds a slice of the parameters, and carries out one message after the other."""

    def __init__(self, w: np.ndarray, rate: float) -> None:
        super().__init__(daemon=True)
        self.w, self.rate, self.squares = w.copy(), rate, np.zeros_like(w)
        self.inbox: SimpleQueue = SimpleQueue()

    def run(self) -> None:
        for kind, body in iter(self.inbox.get, None):
            if kind == "push":
                self.squares += body**2
                self.w -= self.rate * body / (np.sqrt(self.squares) + EPS)
            else:
                body.put(self.w.copy())


class Server:
    """All shards. No replica waits for another one: a fetch gets whatever has been pushed by then."""

    def __init__(self, w: np.ndarray, rate: float, num_shards: int) -> None:
        self.shards = [Shard(part, rate) for part in np.array_split(w, num_shards)]
        for shard in self.shards:
            shard.start()

    def push(self, sum_of_gradients: np.ndarray) -> None:
        parts = np.array_split(sum_of_gradients, len(self.shards))
        for shard, part in zip(self.shards, parts, strict=True):
            shard.inbox.put(("push", part))

    def fetch(self) -> np.ndarray:
        answers = [SimpleQueue() for _ in self.shards]
        for shard, answer in zip(self.shards, answers, strict=True):
            shard.inbox.put(("fetch", answer))
        return np.concatenate([answer.get() for answer in answers])


def replica(
    server: Server,
    gradient: Gradient,
    batches: Iterable[Minibatch],
    *,
    local_rate: float = 0.0,
    n_push: int = 1,
    n_fetch: int = 1,
) -> None:
    """Algorithm 1.1: one replica of the model goes through its minibatches."""
    w = accrued = np.zeros(0)
    for step, (x, y) in enumerate(batches):
        if step % n_fetch == 0:
            w = server.fetch()
        if step % n_push == 0:
            accrued = np.zeros_like(w)
        g = gradient(w, x, y)
        accrued += g
        w = w - local_rate * g
        if (step + 1) % n_push == 0:
            server.push(accrued)
    if (step + 1) % n_push:
        server.push(accrued)


if __name__ == "__main__":
    WORKERS = 4
    server = Server(np.zeros(FEATURES), rate=0.3, num_shards=2)
    threads = [
        threading.Thread(target=replica, args=(server, gradient, minibatches(rank, WORKERS)))
        for rank in range(WORKERS)
    ]
    print(f"before: {distance(server.fetch()):.3f} from the true weights")
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    print(f"after:  {distance(server.fetch()):.3f}, by {WORKERS} replicas and {len(server.shards)} shards")
