"""One rank of a measured allreduce: `python -m gradstream.preflight.allreduce_rank FOLDER RANK`."""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, astuple
from pathlib import Path
from typing import Any

import torch

from gradstream.collectives.algorithms import ALGORITHMS
from gradstream.collectives.autotune import Choice, MeasuredCosts
from gradstream.collectives.factory import form_group
from gradstream.collectives.group import Group, GroupMembers
from gradstream.collectives.message_group import MessageGroup
from gradstream.errors import DeadlineError, InternalError
from gradstream.memory import Span
from gradstream.preflight.allreduce import ITEMSIZE_BYTES, AllreducePlan
from gradstream.run.local.environment import SWITCH_INTERVAL_S
from gradstream.runtime.real import RealRuntime
from gradstream.telemetry.events import Event, GroupEvent
from gradstream.transport.base import Identity
from gradstream.transport.carriers import make_endpoint

WARM_UP = 2
COME_S = 60.0
POLL_S = 0.01


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one rank until the measurement has ended; returns the exit status."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path, help="folder that the ranks share")
    parser.add_argument("rank", type=int)
    parser.add_argument(
        "--report-fd", type=int, help=argparse.SUPPRESS
    )  # every process of a `LocalCluster` gets one
    arguments = parser.parse_args(argv)
    sys.setswitchinterval(SWITCH_INTERVAL_S)
    asyncio.run(_Rank(arguments.folder, arguments.rank).run())
    return 0


class _Rank:
    def __init__(self, folder: Path, rank: int) -> None:
        self._folder = folder
        self._rank = rank
        self._plan = AllreducePlan.load(folder)
        self._names = [f"worker-{other}" for other in range(self._plan.ranks)]
        self._chosen: GroupEvent | None = None

    async def run(self) -> None:
        plan, name = self._plan, self._names[self._rank]
        runtime = RealRuntime(name)
        host = plan.listen[self._rank] if plan.listen else "127.0.0.1"
        endpoint = make_endpoint(
            Identity(self._folder.name, name, 1, secret=plan.secret.encode()),
            runtime,
            plan.carrier,
            listen=f"{host}:0",
            insecure=bool(plan.listen),
        )
        await endpoint.start()
        try:
            self._leave("address", endpoint.address)
            for rank, other in enumerate(self._names):
                endpoint.know(other, await self._read("address", rank))
            group = await form_group(
                runtime,
                endpoint,
                GroupMembers(self._names, self._rank, 1),
                plan.kind,
                host=plan.hosts[self._rank] if plan.hosts else "",
                on_event=self._heard,
            )
            try:
                times_s, figures = await self._times_s(group)
                others = {carrier for peer, carrier in endpoint.routes.items() if peer != name}
                self._leave(
                    "result", {"times_s": times_s, **self._carried_out(group, figures, sorted(others))}
                )
            finally:
                await group.close()
        finally:
            await endpoint.close()
            runtime.close()

    def _heard(self, event: Event) -> None:
        if isinstance(event, GroupEvent):
            self._chosen = event

    async def _times_s(self, group: Group) -> tuple[list[float], MeasuredCosts | None]:
        """Seconds of each repetition, and the costs of messages: means of before and after the repetitions."""
        vector = group.allocate(self._plan.elements, torch.float32, "bench")
        vector.tensor.fill_(group.rank + 1.0)
        total = await self._allreduce(group, vector.all)
        expected = group.size * (group.size + 1) / 2
        if not bool((total.tensor == expected).all()):
            raise InternalError(f"the sum over {group.size} ranks is wrong: expected {expected}")
        vector.tensor.zero_()
        for _ in range(WARM_UP):
            await self._allreduce(group, vector.all)
        before, times_s = await self._figures(group), []
        for _ in range(self._plan.times):
            begun = time.perf_counter()
            await self._allreduce(group, vector.all)
            times_s.append(time.perf_counter() - begun)
        after = await self._figures(group)
        if before is None or after is None:
            return times_s, None
        return times_s, MeasuredCosts(
            *map(statistics.mean, zip(astuple(before), astuple(after), strict=True))
        )

    async def _figures(self, group: Group) -> MeasuredCosts | None:
        """The costs of messages as long as a ring's, on the links of this group; None if it sends none."""
        if not isinstance(group, MessageGroup):
            return None
        return await group.measure(max(1, self._plan.elements // group.size))

    async def _allreduce(self, group: Group, span: Span) -> Span:
        if isinstance(group, MessageGroup) and self._plan.algorithm in ALGORITHMS:
            return await group.allreduce(span, algorithm=self._plan.algorithm)
        return await group.allreduce(span)

    def _carried_out(
        self, group: Group, figures: MeasuredCosts | None, carriers: Sequence[str]
    ) -> dict[str, Any]:
        """Kind, algorithm, carriers, figures and prediction; only on rank 0."""
        formed = self._chosen
        if formed is None:
            return {}
        facts: dict[str, Any] = {"kind": formed.kind, "algorithm": formed.algorithm}
        if formed.kind != "shared":
            facts["carriers"] = carriers
        if not isinstance(group, MessageGroup) or group.choice is None or figures is None:
            return facts
        num_bytes = ITEMSIZE_BYTES * self._plan.elements
        name, choice = self._plan.algorithm, group.choice
        algorithm = name if name in ALGORITHMS else choice.allreduce(num_bytes)
        return facts | {
            "algorithm": algorithm,
            "figures": asdict(figures),
            "predicted_s": Choice(group.size, figures).seconds(algorithm, num_bytes),
        }

    def _leave(self, what: str, value: Any) -> None:
        """Writes a value into the folder, where the other ranks see all of it or nothing."""
        path = self._folder / f"{what}-{self._rank}.json"
        path.with_suffix(".part").write_text(json.dumps(value))
        path.with_suffix(".part").rename(path)

    async def _read(self, what: str, rank: int) -> Any:
        path, until = self._folder / f"{what}-{rank}.json", time.monotonic() + COME_S
        while not path.exists():
            if time.monotonic() > until:
                raise DeadlineError(self._names[rank], f"has not started within {COME_S:g} s")
            await asyncio.sleep(POLL_S)
        return json.loads(path.read_text())


if __name__ == "__main__":
    sys.exit(main())
