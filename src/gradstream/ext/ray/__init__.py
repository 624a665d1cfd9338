"""Runs on the nodes of a Ray cluster: Ray places, starts and replaces processes, and gradstream trains in them."""
