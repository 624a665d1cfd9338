"""The sharded parameter server: chunk map, shard state machine, service, client, rules."""

from gradstream.server.chunks import ChunkMap
from gradstream.server.client import Arrival, ServerClient, Update
from gradstream.server.correction import Correction
from gradstream.server.rule import Contribution, Gathered, Immediate, Rule
from gradstream.server.service import ShardConfig, ShardService
from gradstream.server.shard import ShardState

__all__ = [
    "Arrival",
    "ChunkMap",
    "Contribution",
    "Correction",
    "Gathered",
    "Immediate",
    "Rule",
    "ServerClient",
    "ShardConfig",
    "ShardService",
    "ShardState",
    "Update",
]
