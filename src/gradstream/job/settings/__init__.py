"""Settings: what a job is told from outside of its file, layer over layer, each with its origin.

    defaults < job file < TOML file < environment < command line

Sources are read into `Setting`s (`sources`), fitted to the types of the job's fields (`values`),
laid over the job (`layers`), and shown as they came out (`effective`). Nothing here lists the
fields of a job: a new field of `Job`, of a strategy or of an optimizer is a key at once.
"""

from gradstream.job.settings.layers import apply
from gradstream.job.settings.sources import Setting, from_environment, from_texts, from_toml
from gradstream.job.settings.values import Word

__all__ = [
    "Setting",
    "Word",
    "apply",
    "from_environment",
    "from_texts",
    "from_toml",
]
