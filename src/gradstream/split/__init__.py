"""Divides a model over the processes of one replica."""
