"""Runs with HOGWILD!: from the outside they are runs like others."""

from __future__ import annotations

import dataclasses

import pytest

import gradstream as gs
from gradstream.config import cast_of
from gradstream.errors import ConfigError, UnknownNameError
from gradstream.strategies import Worker
from gradstream.testing import check_strategy
from gradstream.testing.runs import least_squares
from gradstream.testing.strategies import BrokenLawsError

pytest.importorskip("numba", reason="numba is not installed: pip install 'gradstream[fast]'")


def test_it_obeys_the_laws_and_with_one_worker_is_plain_sgd_bit_for_bit() -> None:
    report = check_strategy("hogwild")
    assert "'atomic'" in str(report)


@dataclasses.dataclass(frozen=True)
class Twice(gs.Hogwild):
    """Adds every gradient twice: what the laws are to notice."""

    async def train(self, worker: Worker) -> None:
        async for batch in worker.batches():
            gradient = await worker.gradient(batch)
            for _ in range(2):
                await worker.shared.add(gradient, self.update)


def test_the_laws_see_an_update_that_is_made_twice() -> None:
    with pytest.raises(BrokenLawsError, match="too many"):
        check_strategy(Twice)


def job(**options: object) -> gs.Job:
    model, data = least_squares(32, 3)
    return gs.Job(model, data, **{"strategy": "hogwild", "epochs": 1, **options})  # type: ignore[arg-type]


def test_what_it_cannot_do_is_said_before_anything_is_started() -> None:
    cast_of(job(), "x")
    for options, match in (
        ({"servers": 1}, "in memory that workers share"),
        ({"optimizer": "adam"}, "expected gradstream.SGD"),
        ({"optimizer": gs.SGD(0.1, momentum=0.9)}, "expected gradstream.SGD"),
        ({"optimizer": gs.SGD(0.1, weight_decay=0.1)}, "expected gradstream.SGD"),
        ({"groups": [{"match": "w", "lr_scale": 2.0}], "optimizer": gs.SGD(0.1)}, "and groups"),
    ):
        with pytest.raises(ConfigError, match=match):
            cast_of(job(**options), "x")
    with pytest.raises(UnknownNameError, match="did you mean 'atomic'"):
        gs.Hogwild(update="atomik")
