"""Repeats a recorded run update by update, with the same bits."""

from gradstream.ext.replay.iterator import Replay, replay
from gradstream.ext.replay.update import ReplayedUpdate

__all__ = ["Replay", "ReplayedUpdate", "replay"]
