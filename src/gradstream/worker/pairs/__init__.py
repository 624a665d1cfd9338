"""The pairs topology: each worker has its own parameters, and exchanges with one other worker at a time."""
