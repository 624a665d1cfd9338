"""Durable cuts of a run: the format of their files, how they are written, kept and found again.

`format.py` safetensors headers; `manifest.py` what a checkpoint is; `policy.py` when, and which are
kept; `folder.py` the files themselves; `own_state.py` what a worker has of its own.
Who makes a cut, and when, is for `coordinator/snapshot.py` to say.
"""

from gradstream.checkpoint.folder import (
    DraftSnapshot,
    VectorPlace,
    kept,
    newest,
    prune,
    sweep,
    to_resume,
    verify,
)
from gradstream.checkpoint.format import TensorSpec, spec_of
from gradstream.checkpoint.manifest import Evaluated, Manifest, Resume
from gradstream.checkpoint.policy import Every, Policy, parse_every

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
