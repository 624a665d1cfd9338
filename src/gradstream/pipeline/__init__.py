"""Schedules of pipelines, and their executor."""
