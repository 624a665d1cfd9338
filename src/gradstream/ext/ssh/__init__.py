"""Runs a job on machines that the system's `ssh` reaches: nothing else has to be installed on them but gradstream."""
