"""Settings: values for a job from outside its file, in layers, each with its origin.

    defaults < job file < TOML file < environment < command line

`sources` reads them into `Setting`s, `values` converts them to the types of the job's fields, and `layers`
puts them into the job; `run.records` shows the result. No list of fields is kept here: a new
field of `Job`, of a strategy or of an optimizer is a key at once.
"""

from gradstream.job.settings.layers import Setting, apply, from_environment, from_texts, from_toml
from gradstream.job.settings.values import Word

__all__ = [
    "Setting",
    "Word",
    "apply",
    "from_environment",
    "from_texts",
    "from_toml",
]
