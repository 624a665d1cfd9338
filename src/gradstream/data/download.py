"""One file over HTTP into place: resumed where it was cut off, and verified before anybody sees it.

What has come so far is kept in `<file>.part`, with the validator (ETag or date) of the version it is
a part of in `<file>.part.json`. A next try asks for the rest of that very version (`If-Range`); a
server that has another one by now, or knows no ranges, sends all of it, and all is taken anew.
The finished file is renamed into its place only after its SHA-256 has been found right.
"""

from __future__ import annotations

import errno
import hashlib
import http.client
import json
import os
import re
import shutil
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any
from urllib.parse import urlsplit

from gradstream.errors import DataError

__all__ = ["DownloadPart", "RemoteFile", "body_begins_at", "download", "range_headers"]

READ_BYTES = 1 << 18
SILENCE_S = 30.0
ATTEMPTS = 5  # in a row that bring nothing
PAUSE_S, LONGEST_PAUSE_S = 1.0, 30.0
PASSING = {408, 425, 429, 500, 502, 503, 504}

Progress = Callable[[int, int], None]
"""Told (bytes so far, bytes in all)."""


@dataclass(frozen=True, slots=True)
class RemoteFile:
    """A published file that does not change.

    Args:
        url: http or https.
        num_bytes: its length.
        sha256: of its content, in hexadecimal.
    """

    url: str
    num_bytes: int
    sha256: str


@dataclass(frozen=True, slots=True)
class DownloadPart:
    """What an earlier try has left: its length, and the version it is a part of ("" if unknown)."""

    num_bytes: int = 0
    validator: str = ""


class _InterruptedError(Exception):
    """This try is over; another may help. `pause_s` is what the server asks for."""

    def __init__(self, reason: str, pause_s: float = 0.0) -> None:
        super().__init__(reason)
        self.pause_s = pause_s


# ---- deciding -------------------------------------------------------------------------------


def range_headers(part: DownloadPart) -> dict[str, str]:
    """What to ask for: the rest of the version that `part` is of, or all of whichever there is now."""
    headers = {"Accept-Encoding": "identity", "User-Agent": "gradstream"}
    if part.num_bytes:
        headers["Range"] = f"bytes={part.num_bytes}-"
        if part.validator:
            headers["If-Range"] = part.validator
    return headers


def validator_of(headers: Mapping[str, str]) -> str:
    """What names the version of an answer; a weak ETag promises no equal bytes, so it does not count."""
    etag = headers.get("ETag", "")
    return etag if etag and not etag.startswith("W/") else headers.get("Last-Modified", "")


def body_begins_at(
    status: int, headers: Mapping[str, str], part: DownloadPart, file: RemoteFile
) -> int | None:
    """Where in the file an answer's body belongs: 0 or `part.num_bytes`; None if it fits nowhere.

    Raises:
        DataError: the file there has another length than the one expected.
    """
    length = headers.get("Content-Length", "")
    if status != 206:
        _check_length(int(length) if length.isdigit() else None, file)
        return 0
    found = re.fullmatch(r"bytes (\d+)-\d+/(\d+|\*)", headers.get("Content-Range", "").strip())
    if found is None:
        return None
    _check_length(None if found[2] == "*" else int(found[2]), file)
    other = part.validator and validator_of(headers) not in ("", part.validator)
    return None if other or int(found[1]) != part.num_bytes else part.num_bytes


def _check_length(num_bytes: int | None, file: RemoteFile) -> None:
    if num_bytes not in (None, file.num_bytes):
        raise DataError(
            f"{file.url} is {num_bytes:,} bytes long, expected {file.num_bytes:,}: it is another file, or "
            "the publisher has changed it. Look for a newer gradstream, or name a mirror of the old file"
        )


# ---- doing ----------------------------------------------------------------------------------


def download(
    file: RemoteFile,
    to: Path,
    *,
    extra_bytes: int = 0,
    on_progress: Progress = lambda done, total: None,
    silence_s: float = SILENCE_S,
    pause: Callable[[float], None] = time.sleep,
) -> None:
    """Brings a file to its place. The caller sees to it that nobody else does so (`machine_lock`).

    Args:
        file: what to get.
        to: where; its folder exists.
        extra_bytes: disk space that is needed besides, for what is made of the file.
        on_progress: told while it comes.
        silence_s: how long the server may say nothing.
        pause: waits between two tries.

    Raises:
        DataError: no network, a refusal, a wrong length or checksum, no space; each says what to do.
            What has come is kept for the next call, unless it is of the wrong length or checksum.
    """
    scheme = urlsplit(file.url).scheme
    if scheme not in ("http", "https"):
        raise DataError(f"{file.url}: expected an address that begins with http:// or https://")
    partial = _Partial(to)
    try:
        _check_space(to, file.num_bytes - partial.read().num_bytes + extra_bytes)
        pieces = _fill(file, partial, on_progress, silence_s, pause)
        if not _verified(partial, file, last=pieces == 1):  # pieces may be of two versions
            _fill(file, partial, on_progress, silence_s, pause)
            _verified(partial, file, last=True)
        partial.finish()
    except OSError as error:
        if error.errno == errno.ENOSPC:
            raise DataError(
                f"the disk of {to.parent} is full; what has come is kept: make room and start again, or set "
                "XDG_CACHE_HOME to a folder on another disk"
            ) from error
        raise DataError(
            f"{to} cannot be written ({error}); set XDG_CACHE_HOME to a folder that you may write to"
        ) from error


class _Partial:
    """`<file>.part` and `<file>.part.json` on disk."""

    def __init__(self, to: Path) -> None:
        self._to = to
        self.path = to.with_name(to.name + ".part")
        self._about = to.with_name(to.name + ".part.json")

    def read(self) -> DownloadPart:
        """What is there; nothing if it does not fit together."""
        try:
            return DownloadPart(
                self.path.stat().st_size, str(json.loads(self._about.read_text())["validator"])
            )
        except (OSError, ValueError, KeyError, TypeError):
            return DownloadPart()

    def begin(self, validator: str) -> None:
        """Forgets what is there; a version begins."""
        self.path.write_bytes(b"")
        self._about.write_text(json.dumps({"validator": validator}))

    def drop(self) -> None:
        """Removes both."""
        self.path.unlink(missing_ok=True)
        self._about.unlink(missing_ok=True)

    def finish(self) -> None:
        """All of it is on disk, and then at its place."""
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
    """Tries until all bytes are there, or several tries in a row have brought none.

    Returns:
        In how many pieces they came; what was there before is one.
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
                    f"{file.url} cannot be had: {error} ({ATTEMPTS} tries). Look at the network, and at "
                    "https_proxy where there is a proxy, or name a mirror; "
                    f"{partial.read().num_bytes:,} of {file.num_bytes:,} bytes are kept for the next try"
                ) from error
            pause(max(error.pause_s, min(PAUSE_S * 2 ** (failures - 1), LONGEST_PAUSE_S)))
    return pieces


def _try(file: RemoteFile, partial: _Partial, on_progress: Progress, silence_s: float) -> None:
    """One request; appends what comes of it.

    Raises:
        _InterruptedError: it ended before all had come.
        DataError: it makes no sense to go on.
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
            raise _InterruptedError("the server sent another range than it was asked for")
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
        _InterruptedError: nobody answers, or the server says that it cannot now.
        DataError: it says no.
    """
    opener = urllib.request.build_opener(_SafeRedirects)
    try:
        return opener.open(request, timeout=silence_s)
    except urllib.error.HTTPError as error:
        error.close()
        if error.code == 416:  # more is there already than the server has: of another version
            partial.drop()
            raise _InterruptedError("the server has no such range") from error
        if error.code in PASSING:
            asked = error.headers.get("Retry-After", "")
            seconds = min(float(asked), LONGEST_PAUSE_S) if asked.isdigit() else 0.0
            raise _InterruptedError(f"the server answered {error.code} {error.reason}", seconds) from error
        raise DataError(
            f"{request.full_url}: the server answered {error.code} {error.reason}. The file may have "
            "moved: look for a newer gradstream, or name a mirror of the file"
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
    """Follows to any host, but not from https to http."""

    def redirect_request(
        self, req: urllib.request.Request, fp: IO[bytes], code: int, msg: str, headers: Any, newurl: str
    ) -> urllib.request.Request | None:
        if req.type == "https" and urlsplit(newurl).scheme != "https":
            raise DataError(f"{req.full_url} leads to {newurl}, which is not encrypted; name a mirror")
        return super().redirect_request(req, fp, code, msg, headers, newurl)


def _check_space(to: Path, num_bytes: int) -> None:
    free = shutil.disk_usage(to.parent).free
    if num_bytes > free:
        raise DataError(
            f"{to.parent} has {free / 1e6:,.0f} MB free, but {num_bytes / 1e6:,.0f} MB are needed; make "
            "room, or set XDG_CACHE_HOME to a folder on another disk"
        )


def _verified(partial: _Partial, file: RemoteFile, *, last: bool) -> bool:
    """Whether the content is right; what is not is removed. Raises DataError if it was the last try."""
    with open(partial.path, "rb") as opened:
        got = hashlib.file_digest(opened, "sha256").hexdigest()
    if got == file.sha256:
        return True
    partial.drop()
    if last:
        raise DataError(
            f"{file.url} has the SHA-256 {got}, expected {file.sha256}: it was damaged or changed on the "
            "way. It was deleted; start again, and if it stays so, use another network or a mirror"
        )
    return False
