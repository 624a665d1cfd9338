"""The protobuf schema (`gradstream.v1`), generated code, and frames."""

from gradstream.wire import v1_pb2 as v1

__all__ = ["v1"]
