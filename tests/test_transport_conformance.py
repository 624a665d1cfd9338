"""Every carrier keeps the promises of transport.base; planted faults are found."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from gradstream.testing.endpoints import CHECKS, Check, MakePair, run_check
from gradstream.testing.pairs import Run, grpc_pairs, memory_pairs


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
@pytest.mark.parametrize("carrier", [memory_pairs, grpc_pairs], ids=["memory", "grpc"])
def test_carrier(carrier: Callable[[], tuple[Run, MakePair]], check: Check) -> None:
    run, make_pair = carrier()
    run(run_check(check, make_pair))
