"""Elastic averaging: what one side of an exchange loses, the other gains."""

from __future__ import annotations

import pytest

import gradstream as gs
from gradstream.strategies import Strategy
from gradstream.testing import check_strategy


@pytest.mark.parametrize(
    "strategy",
    [gs.ElasticAveraging(), gs.ElasticAveraging(every=1, moving_rate=0.5), gs.EAMSGD(every=2)],
    ids=str,
)
def test_it_obeys_the_laws(strategy: Strategy) -> None:
    assert not check_strategy(strategy).broken
