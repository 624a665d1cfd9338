"""Carriers behind one `Endpoint`: `memory` (the virtual network), `grpc` and `tcp`."""

from gradstream.transport.base import Endpoint, Identity, Priority, Received, Stream

__all__ = ["Endpoint", "Identity", "Priority", "Received", "Stream"]
