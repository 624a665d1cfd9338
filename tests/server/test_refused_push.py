"""A push that a shard refuses ends the run with the shard's words, although a fetch waits for that push."""

from __future__ import annotations

from typing import Any

import pytest

import gradstream as gs
from gradstream.server.shard.inspection import Inspection
from gradstream.testing.runs import QUICK, least_squares


@pytest.mark.limit_s(60)
@pytest.mark.parametrize(
    "strategy",
    ["synchronous", gs.Synchronous(overlap=False), "downpour", gs.Downpour(overlap=False), "ssp", "diloco"],
    ids=str,
)
def test_a_refused_push_ends_the_run(strategy: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    real, pushed = Inspection.part, [0]

    def part(self: Inspection, sender: str, received: Any) -> Any:
        pushed[0] += 1
        if pushed[0] > 12:  # the first ones have been taken
            raise self.bad(sender, "a push that this test does not like")
        return real(self, sender, received)

    monkeypatch.setattr(Inspection, "part", part)
    model, data = least_squares(48, 70)
    options: dict[str, Any] = {"strategy_options": {"every": 2}} if strategy == "diloco" else {}
    with pytest.raises(gs.errors.GradstreamError, match="a push that this test does not like"):
        gs.simulate(
            model, data, strategy=strategy, workers=2, batch_size=2, epochs=4, chunk_elems=64, deadlines=QUICK,
            **options,
        )  # fmt: skip
