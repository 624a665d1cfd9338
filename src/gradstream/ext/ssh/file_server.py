"""`FileServer`: serves the files of one folder to machines of the same run, over TLS.

The standard library's HTTPS suffices: a caller proves by the run's token that it belongs to the run, and gets all files
as one tar archive. The certificate is made for this server alone, and its key never leaves the process. Callers get the
certificate by ssh, and trust no other.
"""

from __future__ import annotations

import hmac
import http.client
import http.server
import os
import socket
import ssl
import tarfile
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import closing, contextmanager, suppress
from io import BufferedIOBase
from pathlib import Path
from typing import IO, Any, Self

from gradstream.errors import PeerLostError, RefusedError
from gradstream.run.remote.certificate_authority import self_signed

SILENCE_S = 30.0
"""A connection on which nothing moves for this long is closed."""

PROOF_S = 10.0
"""A connection on which the token was not shown for this long is closed, whatever moves on it."""

MAX_UNPROVED, MAX_PROVED = 64, 1024
"""Most connections before and after the token was shown. Before, the oldest one makes room for a new one."""

PIECE_BYTES = 1 << 20


class FileServer:
    """A context manager: files are served while it is open.

    Args:
        files: the files, by their names in the archive.
        port: port at which to listen; 0 takes a free one.

    Attributes:
        certificate: of this server, PEM.
        port: at which it listens.

    Raises:
        OSError: the port is in use.
    """

    def __init__(self, files: Mapping[str, Path], token: str, port: int) -> None:
        self.certificate, key = self_signed("file-server")
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        with (
            tempfile.NamedTemporaryFile() as both
        ):  # `ssl` reads keys from files alone; only the owner can read it
            both.write(self.certificate + key)
            both.flush()
            context.load_cert_chain(both.name)
        self._server = _Server(("", port), _Answer)
        self._server.given, self._server.authorization = files, _authorization(token)
        self._server.tls = context
        self.port = self._server.server_port
        self._thread = threading.Thread(target=self._server.serve_forever, name="file-server", daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()


@contextmanager
def served_archive(host: str, port: int, certificate: str, token: str) -> Iterator[IO[bytes]]:
    """The archive that a server sends, as it comes. It may end early: compare its contents with a list.

    Args:
        host: host name or address of the server.
        certificate: its certificate, PEM. No other server is trusted.

    Raises:
        PeerLostError: the server cannot be reached, is silent, or has another certificate.
        RefusedError: the token is not the server's.
    """
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname = False  # the certificate names no machine, but is the only one trusted
    context.load_verify_locations(cadata=certificate)
    who = f"{host}:{port}"
    with closing(http.client.HTTPSConnection(host, port, timeout=SILENCE_S, context=context)) as connection:
        try:
            connection.request("GET", "/", headers={"Authorization": _authorization(token)})
            answer = connection.getresponse()
        except (OSError, http.client.HTTPException) as error:
            raise PeerLostError(who, str(error) or type(error).__name__) from None
        if answer.status != http.client.OK:
            raise RefusedError(who, "BAD_SECRET", f"{answer.status} {answer.reason}")
        yield answer


class _Server(http.server.ThreadingHTTPServer):
    daemon_threads = True  # hanging threads do not keep it from ending
    given: Mapping[str, Path]
    authorization: str
    tls: ssl.SSLContext

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self._lock = threading.Lock()
        self._unproved, self._proved = (
            dict[Any, float](),
            set[Any](),
        )  # when each connection began; none waits longer

    def get_request(self) -> tuple[Any, Any]:
        """Accepts a connection; its own thread does the handshake, so that a silent caller keeps nobody waiting."""
        connection, address = super().get_request()
        return self.tls.wrap_socket(connection, server_side=True, do_handshake_on_connect=False), address

    def process_request(self, request: Any, client_address: Any) -> None:
        """Gives a connection its own thread."""
        with self._lock:
            while len(self._unproved) >= MAX_UNPROVED:
                self._hang_up(next(iter(self._unproved)))
            self._unproved[request] = time.monotonic()
        super().process_request(request, client_address)

    def service_actions(self) -> None:
        """Is called twice a second."""
        with self._lock:
            late_s = time.monotonic() - PROOF_S
            for request in [request for request, began_s in self._unproved.items() if began_s < late_s]:
                self._hang_up(request)

    def prove(self, request: Any) -> bool:
        """Notes that the token was shown on a connection. Returns whether the connection may stay."""
        with self._lock:
            if self._unproved.pop(request, None) is None or len(self._proved) >= MAX_PROVED:
                return False
            self._proved.add(request)
            return True

    def shutdown_request(self, request: Any) -> None:
        """Notes that a connection has ended."""
        with self._lock:
            self._unproved.pop(request, None)
            self._proved.discard(request)
        super().shutdown_request(request)

    def _hang_up(self, request: Any) -> None:
        """Ends a connection, whose own thread then closes it."""
        del self._unproved[request]
        with suppress(OSError):
            socket.socket.shutdown(request, socket.SHUT_RDWR)  # not TLS's shutdown, which the thread is using

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Prints nothing: the caller reports what it missed."""


class _Answer(http.server.BaseHTTPRequestHandler):
    timeout = SILENCE_S
    server: _Server

    def do_GET(self) -> None:
        """Sends all files to whoever knows the token."""
        shown = self.headers.get("Authorization", "")
        if not hmac.compare_digest(shown.encode(errors="replace"), self.server.authorization.encode()):
            self.send_error(http.client.UNAUTHORIZED)
            return
        if not self.server.prove(self.connection):
            return
        self.send_response(http.client.OK)
        self.end_headers()
        write_archive(self.server.given, self.wfile)

    def log_message(self, *_: Any) -> None:
        """Prints nothing: standard error is for the reason why a server cannot start."""


def write_archive(files: Mapping[str, Path], into: IO[bytes] | BufferedIOBase) -> None:
    """Writes files as a tar archive. Links are replaced by their targets, which no other machine has."""
    with tarfile.open(fileobj=into, mode="w|", dereference=True, bufsize=PIECE_BYTES) as archive:
        for name, path in files.items():
            archive.add(os.path.realpath(path), name, recursive=False)


def _authorization(token: str) -> str:
    return f"Bearer {token}"
