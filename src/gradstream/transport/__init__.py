"""Carriers behind one `Endpoint`: `grpc`, `tcp`, `shm`, and the virtual network of simulations."""

from gradstream.transport.base import Endpoint, Identity, Priority, Received, Stream

__all__ = ["Endpoint", "Identity", "Priority", "Received", "Stream"]
