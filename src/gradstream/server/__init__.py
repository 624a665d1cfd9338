"""The sharded parameter server: chunk map, shard state machine, service, client, rules."""

from gradstream.server.aggregation import AggregationRule, EveryN, EveryPush, PushHeader
from gradstream.server.chunks import ChunkMap
from gradstream.server.client.arrival import Arrival
from gradstream.server.client.client import ServerClient
from gradstream.server.correction import Correction
from gradstream.server.shard.config import ShardConfig
from gradstream.server.shard.service import ShardService
from gradstream.server.shard.state import ShardState
from gradstream.server.update import Update

__all__ = [
    "AggregationRule",
    "Arrival",
    "ChunkMap",
    "Correction",
    "EveryN",
    "EveryPush",
    "PushHeader",
    "ServerClient",
    "ShardConfig",
    "ShardService",
    "ShardState",
    "Update",
]
