"""Repeats a recorded run update by update, with the same bits."""

from gradstream.replay.iterator import Replay, replay
from gradstream.replay.update import ReplayedUpdate

__all__ = ["Replay", "ReplayedUpdate", "replay"]
