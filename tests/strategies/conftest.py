"""Fixtures of the strategies' tests."""

from __future__ import annotations

import pytest


@pytest.fixture
def few_seeds(few_seeds: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """As for all tests, and only 2 shards where runs of any size must end."""
    monkeypatch.setattr("gradstream.testing.properties.SHARDS", (2,))
