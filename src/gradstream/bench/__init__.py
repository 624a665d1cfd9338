"""Measurements that come with the package: `gradstream bench`."""

from gradstream.bench.allreduce import AllreducePlan, AllreduceResult, measure_here

__all__ = ["AllreducePlan", "AllreduceResult", "measure_here"]
