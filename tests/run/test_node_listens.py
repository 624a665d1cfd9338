"""A new coordinator takes the port of the one before, although something else has it for a moment."""

from __future__ import annotations

import pytest

from gradstream.errors import ConfigError
from gradstream.run.node import _listen
from gradstream.runtime.simulation import SimulationConfig
from gradstream.runtime.virtual import VirtualCluster


class Taken:
    """An endpoint whose port is free at the given time, in seconds."""

    def __init__(self, free_s: float, cluster: VirtualCluster) -> None:
        self._free_ns, self._runtime, self.tries = round(free_s * 1e9), cluster.runtime("coordinator"), 0

    async def start(self) -> None:
        """See `Endpoint.start`."""
        self.tries += 1
        if self._runtime.now() < self._free_ns:
            raise ConfigError("the port is in use")


@pytest.mark.parametrize(
    ("free_s", "wait_s", "listens"), [(1.2, 5.0, True), (9.0, 5.0, False), (0.1, 0.0, False)]
)
def test_the_port_is_waited_for(free_s: float, wait_s: float, listens: bool) -> None:
    cluster = VirtualCluster(0, SimulationConfig())
    endpoint = Taken(free_s, cluster)

    async def main() -> None:
        await _listen(endpoint, cluster.runtime("coordinator"), wait_s)  # type: ignore[arg-type]

    if listens:
        cluster.run(main())
        assert endpoint.tries > 1
        return
    with pytest.raises(ConfigError, match="in use"):
        cluster.run(main())
    assert (endpoint.tries > 1) == (wait_s > 0)
