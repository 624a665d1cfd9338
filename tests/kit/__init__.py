"""Rigs of our own tests and benchmarks: machines of network namespaces, attackers, groups on virtual time."""
