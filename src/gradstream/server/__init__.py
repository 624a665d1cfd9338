"""The sharded parameter server: chunk map, shard state machine, service, client, rules."""

from gradstream.server.arrival import Arrival
from gradstream.server.chunks import ChunkMap
from gradstream.server.client import ServerClient
from gradstream.server.correction import Correction
from gradstream.server.rule import Contribution, Gathered, Immediate, Rule
from gradstream.server.service import ShardService
from gradstream.server.shard import ShardState
from gradstream.server.shard_config import ShardConfig
from gradstream.server.update import Update

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
