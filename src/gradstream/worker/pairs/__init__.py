"""In pairs: each worker has parameters of its own, and exchanges with one other worker at a time."""
