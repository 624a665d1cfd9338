"""A recorded run, done again update by update, with the same bits."""

from gradstream.replay.replay import Replay, replay
from gradstream.replay.update import ReplayedUpdate

__all__ = ["Replay", "ReplayedUpdate", "replay"]
