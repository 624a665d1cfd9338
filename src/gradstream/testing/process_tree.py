"""The processes that a process has started, as /proc has them."""

from __future__ import annotations

from pathlib import Path


def process_tree(pid: int) -> list[int]:
    """A process and all that it has started, of those that still run."""
    try:
        threads = list(Path(f"/proc/{pid}/task").iterdir())
        children = [int(one) for thread in threads for one in (thread / "children").read_text().split()]
    except OSError:
        return []
    return [pid, *(found for child in children for found in process_tree(child))]
