"""Checkpoints: the format of their files, and how they are written, kept and found again.

`format.py`: safetensors headers. `manifest.py`: the contents of `state.json`. `draft.py` writes checkpoints;
`folder.py` finds and reads them, and says when they are made and which are kept. `own_state.py`:
the state that each worker has of its own. `coordinator/snapshot_rounds.py` decides when a snapshot is made.
"""

from gradstream.checkpoint.draft import DraftSnapshot, VectorPlace
from gradstream.checkpoint.folder import (
    Every,
    Policy,
    kept,
    newest,
    parse_every,
    prune,
    sweep,
    to_resume,
    verify,
)
from gradstream.checkpoint.format import TensorSpec, spec_of
from gradstream.checkpoint.manifest import Evaluated, Manifest, Resume

__all__ = [
    "DraftSnapshot",
    "Evaluated",
    "Every",
    "Manifest",
    "Policy",
    "Resume",
    "TensorSpec",
    "VectorPlace",
    "kept",
    "newest",
    "parse_every",
    "prune",
    "spec_of",
    "sweep",
    "to_resume",
    "verify",
]
