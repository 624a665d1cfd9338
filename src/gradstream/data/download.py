"""Downloads a file over HTTP; it resumes an interrupted download, and verifies the file before it is visible.

The bytes so far are in `<file>.part`, and the validator (ETag or date) of their version in `<file>.part.json`. The
next attempt asks for the rest of the same version (`If-Range`). If the server has another version by then, or does
not support ranges, it sends the whole file, and the download begins again. The complete file is renamed into its
place after its SHA-256 has been verified.
"""

from __future__ import annotations

import errno
import fcntl
import hashlib
import http.client
import json
import os
import re
import shutil
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any
from urllib.parse import urlsplit

from gradstream.errors import DataError
from gradstream.runtime.storage import disk_remedy

# ---- download ----------------------------------------------------------------------------

READ_BYTES = 1 << 18
SILENCE_S = 30.0
ATTEMPTS = 5  # attempts in a row without a byte
PAUSE_S, LONGEST_PAUSE_S = 1.0, 30.0
PASSING = {408, 425, 429, 500, 502, 503, 504}
MIRROR = "name a mirror of the file: url=..., or `gradstream data get NAME --url URL`"

Progress = Callable[[int, int], None]
"""Called with (bytes so far, bytes in total)."""


@dataclass(frozen=True, slots=True)
class RemoteFile:
    """A published file that does not change.

    Args:
        url: http or https address.
        num_bytes: length in bytes.
        sha256: SHA-256 of its content, in hexadecimal.
    """

    url: str
    num_bytes: int
    sha256: str


@dataclass(frozen=True, slots=True)
class DownloadPart:
    """The bytes that an earlier attempt has left: their number, and their version ("" if unknown)."""

    num_bytes: int = 0
    validator: str = ""


class _InterruptedError(Exception):
    """This attempt has failed; another one may succeed. The server asks for a pause of `pause_s`."""

    def __init__(self, reason: str, pause_s: float = 0.0) -> None:
        super().__init__(reason)
        self.pause_s = pause_s


# ---- requests and answers -----------------------------------------------------------------


def range_headers(part: DownloadPart) -> dict[str, str]:
    """The headers of a request for the rest of `part`, or for the whole file."""
    headers = {"Accept-Encoding": "identity", "User-Agent": "gradstream"}
    if part.num_bytes:
        headers["Range"] = f"bytes={part.num_bytes}-"
        if part.validator:
            headers["If-Range"] = part.validator
    return headers


def validator_of(headers: Mapping[str, str]) -> str:
    """The version of an answer. A weak ETag does not count, since it does not promise equal bytes."""
    etag = headers.get("ETag", "")
    return etag if etag and not etag.startswith("W/") else headers.get("Last-Modified", "")


def body_begins_at(
    status: int, headers: Mapping[str, str], part: DownloadPart, file: RemoteFile
) -> int | None:
    """The position of an answer's body in the file: 0 or `part.num_bytes`; None if it does not fit.

    Raises:
        DataError: the file on the server has another length than expected.
    """
    length = headers.get("Content-Length", "")
    if status != 206:
        _check_length(int(length) if length.isdigit() else None, file)
        return 0
    match = re.fullmatch(r"bytes (\d+)-\d+/(\d+|\*)", headers.get("Content-Range", "").strip())
    if match is None:
        return None
    _check_length(None if match[2] == "*" else int(match[2]), file)
    other = part.validator and validator_of(headers) not in ("", part.validator)
    return None if other or int(match[1]) != part.num_bytes else part.num_bytes


def _check_length(num_bytes: int | None, file: RemoteFile) -> None:
    if num_bytes not in (None, file.num_bytes):
        raise DataError(
            f"{file.url} is {num_bytes:,} bytes long, expected {file.num_bytes:,}: the publisher has changed the "
            f"file. Install a newer gradstream, or {MIRROR}"
        )


# ---- the download ---------------------------------------------------------------------------


def download(
    file: RemoteFile,
    to: Path,
    *,
    extra_bytes: int = 0,
    on_progress: Progress = lambda done, total: None,
    silence_s: float = SILENCE_S,
    pause: Callable[[float], None] = time.sleep,
) -> None:
    """Downloads a file. The caller makes sure that no other process does so at the same time (`machine_lock`).

    Args:
        file: the file.
        to: path for the file, in a folder that exists.
        extra_bytes: further disk space that the caller will need, for example to extract the file.
        on_progress: called during the download.
        silence_s: an attempt fails if the server sends nothing for this long, in seconds.
        pause: waits for some seconds between two attempts.

    Raises:
        DataError: there is no network, the server refuses, the length or the checksum is wrong, or the disk is full;
            the message says what to do. The bytes so far are kept for the next call unless they are wrong.
    """
    scheme = urlsplit(file.url).scheme
    if scheme not in ("http", "https"):
        raise DataError(f"{file.url}: expected an address that begins with http:// or https://")
    partial = _Partial(to)
    try:
        _check_space(to, file.num_bytes - partial.read().num_bytes + extra_bytes)
        pieces = _fill(file, partial, on_progress, silence_s, pause)
        if not _verified(partial, file, last=pieces == 1):  # several pieces may be of different versions
            _fill(file, partial, on_progress, silence_s, pause)
            _verified(partial, file, last=True)
        partial.finish()
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise DataError(
                f"the disk of {to.parent} is full; the bytes so far are kept: make room and start again, or set "
                "XDG_CACHE_HOME to a folder on another disk"
            ) from error
        raise DataError(
            f"{to} cannot be written ({error}); {disk_remedy(error)}, or set XDG_CACHE_HOME to another folder"
        ) from error


class _Partial:
    """`<file>.part` and `<file>.part.json` on the disk."""

    def __init__(self, to: Path) -> None:
        self._to = to
        self.path = to.with_name(to.name + ".part")
        self._about = to.with_name(to.name + ".part.json")

    def read(self) -> DownloadPart:
        """The bytes so far; none if the two files do not fit together."""
        try:
            return DownloadPart(
                self.path.stat().st_size, str(json.loads(self._about.read_text())["validator"])
            )
        except (OSError, ValueError, KeyError, TypeError):
            return DownloadPart()

    def begin(self, validator: str) -> None:
        """Drops the bytes so far, and begins with a version."""
        self.path.write_bytes(b"")
        self._about.write_text(json.dumps({"validator": validator}))

    def drop(self) -> None:
        """Removes both files."""
        self.path.unlink(missing_ok=True)
        self._about.unlink(missing_ok=True)

    def finish(self) -> None:
        """Writes the file through to the disk, and renames it into its place."""
        with open(self.path, "rb") as file:
            os.fsync(file.fileno())
        self.path.rename(self._to)
        self._about.unlink(missing_ok=True)


def _fill(
    file: RemoteFile,
    partial: _Partial,
    on_progress: Progress,
    silence_s: float,
    pause: Callable[[float], None],
) -> int:
    """Makes attempts until all bytes are there, or several attempts in a row have failed without a byte.

    Returns:
        The number of pieces in which the bytes came; those that were there before are one.
    """
    failures, pieces = 0, int(partial.read().num_bytes > 0)
    while (before := partial.read().num_bytes) != file.num_bytes:
        pieces += 1
        try:
            _try(file, partial, on_progress, silence_s)
        except _InterruptedError as error:
            failures = 1 if partial.read().num_bytes > before else failures + 1
            if failures >= ATTEMPTS:
                raise DataError(
                    f"{file.url} cannot be downloaded: {error} ({ATTEMPTS} attempts). Look at the network, and at "
                    "https_proxy where there is a proxy, or name a mirror; "
                    f"{partial.read().num_bytes:,} of {file.num_bytes:,} bytes are kept for the next attempt"
                ) from error
            pause(max(error.pause_s, min(PAUSE_S * 2 ** (failures - 1), LONGEST_PAUSE_S)))
    return pieces


def _try(file: RemoteFile, partial: _Partial, on_progress: Progress, silence_s: float) -> None:
    """Makes one request, and appends the bytes of its answer.

    Raises:
        _InterruptedError: the answer ended early.
        DataError: another attempt cannot succeed.
    """
    part = partial.read()
    if part.num_bytes > file.num_bytes:
        partial.drop()
        part = DownloadPart()
    request = urllib.request.Request(file.url, headers=range_headers(part))
    with _open(request, silence_s, partial) as answer:
        start = body_begins_at(answer.status, answer.headers, part, file)
        if start is None:
            partial.drop()
            raise _InterruptedError("the server sent another range than the requested one")
        if start == 0:
            partial.begin(validator_of(answer.headers))
        with open(partial.path, "ab") as out:
            done = start
            while data := _read(answer):
                done += len(data)
                if done > file.num_bytes:
                    break
                out.write(data)
                on_progress(done, file.num_bytes)
    if done > file.num_bytes:
        partial.drop()
        _check_length(done, file)
    if done < file.num_bytes:
        raise _InterruptedError(f"the connection ended after {done:,} of {file.num_bytes:,} bytes")


def _open(request: urllib.request.Request, silence_s: float, partial: _Partial) -> Any:
    """The answer to a request.

    Raises:
        _InterruptedError: the server does not answer, or cannot now.
        DataError: the server refuses.
    """
    opener = urllib.request.build_opener(_SafeRedirects)
    try:
        return opener.open(request, timeout=silence_s)
    except urllib.error.HTTPError as error:
        error.close()
        if error.code == 416:  # the bytes so far are more than the server has, so of another version
            partial.drop()
            raise _InterruptedError("the server has no such range") from error
        if error.code in PASSING:
            asked = error.headers.get("Retry-After", "")
            seconds = min(float(asked), LONGEST_PAUSE_S) if asked.isdigit() else 0.0
            raise _InterruptedError(f"the server answered {error.code} {error.reason}", seconds) from error
        raise DataError(
            f"{request.full_url}: the server answered {error.code} {error.reason}. The file may have "
            f"moved: look for a newer gradstream, or {MIRROR}"
        ) from error
    except (OSError, http.client.HTTPException) as error:
        reason = error.reason if isinstance(error, urllib.error.URLError) else error
        raise _InterruptedError(f"{urlsplit(request.full_url).netloc} does not answer ({reason})") from error


def _read(answer: Any) -> bytes:
    try:
        data: bytes = answer.read(READ_BYTES)
    except (OSError, http.client.HTTPException) as error:
        raise _InterruptedError(f"the connection broke ({error!r})") from error
    return data


class _SafeRedirects(urllib.request.HTTPRedirectHandler):
    """Follows redirects to any host, but not from https to http."""

    def redirect_request(
        self, req: urllib.request.Request, fp: IO[bytes], code: int, msg: str, headers: Any, newurl: str
    ) -> urllib.request.Request | None:
        if req.type == "https" and urlsplit(newurl).scheme != "https":
            raise DataError(f"{req.full_url} leads to {newurl}, which is not encrypted; {MIRROR}")
        return super().redirect_request(req, fp, code, msg, headers, newurl)


def _check_space(to: Path, num_bytes: int) -> None:
    free = shutil.disk_usage(to.parent).free
    if num_bytes > free:
        raise DataError(
            f"{to.parent} has {free / 1e6:,.0f} MB free, but {num_bytes / 1e6:,.0f} MB are needed; make "
            "room, or set XDG_CACHE_HOME to a folder on another disk"
        )


def _verified(partial: _Partial, file: RemoteFile, *, last: bool) -> bool:
    """Whether the content is right. Wrong content is removed; after the last attempt it raises DataError."""
    with open(partial.path, "rb") as opened:
        got = hashlib.file_digest(opened, "sha256").hexdigest()
    if got == file.sha256:
        return True
    partial.drop()
    if last:
        raise DataError(
            f"{file.url} has the SHA-256 {got}, expected {file.sha256}: the download was damaged or changed on the "
            "way, and was deleted. Start again; if this happens again, use another network or a mirror"
        )
    return False


# ---- lock --------------------------------------------------------------------------------
# A lock between processes of a machine: a file that names the process that holds the lock.
#
# The lock is the kernel's (`flock`), which frees it when the holder ends for any reason. The content of the file is
# only for messages.

POLL_S = 0.05


@contextmanager
def machine_lock(
    path: Path, *, doing: str, wait_s: float, on_wait: Callable[[str], None] | None = None
) -> Iterator[None]:
    """Holds the lock file, and first waits until no other process of this machine holds it.

    Args:
        path: the lock file, in a folder that exists. It is not removed. Where it is new, other users cannot open it.
        doing: work of the holder, for the messages of waiting processes: "downloading caltech101".
        wait_s: longest time to wait, in seconds.
        on_wait: called once with a message if the process has to wait.

    Raises:
        DataError: another process has held the lock for `wait_s`; the message names it. Nothing was done.
        OSError: the file cannot be written.
    """
    give_up = time.monotonic() + wait_s
    with open(path, "a+b", buffering=0, opener=_open_for_owner) as file:
        reported = False
        while not _taken(file.fileno()):
            holder = _holder(path)
            if time.monotonic() >= give_up:
                raise DataError(
                    f"{holder} has held the lock {path} for {wait_s:g} s; wait until that process is done, or end "
                    "it and start again: its unfinished work is then continued or discarded"
                )
            if on_wait is not None and not reported:
                on_wait(f"waiting for {holder}")
                reported = True
            time.sleep(POLL_S)
        file.truncate(0)
        try:
            file.write(json.dumps({"pid": os.getpid(), "doing": doing}).encode())
        except OSError:
            pass  # the disk is full: the lock holds, and messages name "another process"
        try:
            yield
        finally:
            file.truncate(0)


def _open_for_owner(path: str, flags: int) -> int:
    """Opens a lock file, and makes it readable for its owner alone: whoever can open it can hold the lock."""
    return os.open(path, flags, 0o600)


def _taken(descriptor: int) -> bool:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _holder(path: Path) -> str:
    """The process that holds the lock, in words; it may not have written its name yet."""
    try:
        holder = json.loads(path.read_text(encoding="utf-8"))
        return f"process {holder['pid']} ({holder['doing']})"
    except (OSError, ValueError, KeyError, TypeError):
        return "another process"
