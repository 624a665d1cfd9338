"""Runs a job on machines that the system's `ssh` reaches. They need nothing but gradstream."""
