"""Templates of job files for `gradstream new`."""

from __future__ import annotations

from importlib import resources

__all__ = ["KINDS", "render"]

KINDS = ("numpy", "torch", "jax")


def render(kind: str, file: str) -> str:
    """The text of a job file.

    Args:
        kind: one of `KINDS`.
        file: name of the job file: "mine.py".
    """
    text = resources.files(__name__).joinpath(f"{kind}.py.txt").read_text()
    return text.format(name=file.removesuffix(".py"), file=file)
