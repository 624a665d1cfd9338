"""Stale synchronous parallel in threads: a worker waits only when it is s clocks ahead of the slowest one.

    python examples/naive/ssp.py

Ho and others, "More effective distributed ML via a stale synchronous parallel parameter server", NIPS 2013.
A worker's clock counts its updates. At clock c it sees every update of clocks before c - s, perhaps newer
ones, and always its own. One thing is simpler here: each update is pushed at once, at every clock.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Iterable
from queue import SimpleQueue

import numpy as np
from problem import FEATURES, Minibatch, distance, gradient, minibatches

Gradient = Callable[[np.ndarray, np.ndarray, np.ndarray], np.ndarray]


class Server(threading.Thread):
    """Holds the parameters and all workers' clocks, and carries out one message after the other."""

    def __init__(self, w: np.ndarray, rate: float, workers: int) -> None:
        super().__init__(daemon=True)
        self.w, self.rate = w.copy(), rate
        self.clocks: list[float] = [0] * workers
        self.inbox: SimpleQueue = SimpleQueue()
        self.start()

    def run(self) -> None:
        waiting: list[tuple[int, SimpleQueue]] = []
        for kind, number, body in iter(self.inbox.get, None):
            if kind == "push":  # by worker `number`
                self.w -= self.rate * body
                self.clocks[number] += 1
            elif kind == "leave":  # a worker that is through holds nobody back
                self.clocks[number] = math.inf
            else:  # a read that waits until every worker has come to clock `number`
                waiting.append((number, body))
            slowest = min(self.clocks)
            for needed, answer in waiting:
                if needed <= slowest:
                    answer.put((self.w.copy(), slowest))
            waiting = [(needed, answer) for needed, answer in waiting if needed > slowest]

    def read(self, needed: int) -> tuple[np.ndarray, float]:
        """The parameters, and the clock that every worker had come to; waits until that is `needed`."""
        answer: SimpleQueue = SimpleQueue()
        self.inbox.put(("read", needed, answer))
        return answer.get()


def worker(
    server: Server, rank: int, gradient: Gradient, batches: Iterable[Minibatch], *, bound: int
) -> None:
    """One worker, with a copy of the parameters that it reads anew when the copy is too old."""
    w, complete = np.zeros(0), -1.0  # the copy has all updates of clocks before `complete`
    for clock, (x, y) in enumerate(batches):
        needed = max(0, clock - bound)
        if complete < needed:
            w, complete = server.read(needed)
        g = gradient(w, x, y)
        w = w - server.rate * g  # a worker sees its own updates at once
        server.inbox.put(("push", rank, g))
    server.inbox.put(("leave", rank, None))


if __name__ == "__main__":
    WORKERS = 4
    server = Server(np.zeros(FEATURES), rate=0.1 / WORKERS, workers=WORKERS)
    threads = [
        threading.Thread(
            target=worker, args=(server, rank, gradient, minibatches(rank, WORKERS)), kwargs={"bound": 3}
        )
        for rank in range(WORKERS)
    ]
    print(f"before: {distance(server.read(0)[0]):.3f} from the true weights")
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    print(f"after:  {distance(server.read(0)[0]):.3f}, by {WORKERS} workers at most 3 clocks apart")
