"""The job of `bench/slow_links.py`, and what its peers run in the place of it."""
