"""Collectives by `torch.distributed`."""

__all__ = ()
