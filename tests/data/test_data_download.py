"""Downloads against a local HTTP server that does everything wrong once."""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import hashlib
import io
import os
import shutil
import signal
import stat
import subprocess
import sys
import tarfile
import threading
import urllib.request
import zipfile
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from gradstream.data import caltech101
from gradstream.data.download import (
    DownloadPart,
    RemoteFile,
    _SafeRedirects,
    body_begins_at,
    download,
    machine_lock,
    range_headers,
)
from gradstream.data.sources import DataSource, Packed, extract_file, fetch, stored_at
from gradstream.errors import DataError

CONTENT = np.random.default_rng(0).bytes(700_000)
LENGTH = len(CONTENT)
FOLDER = "101_ObjectCategories"
MEMBER = FOLDER + ".tar.gz"


# ---- a server ---------------------------------------------------------------------------


@dataclass
class Faults:
    """What the server does to the next requests, and what it was asked."""

    content: bytes = CONTENT
    etag: str = '"one"'
    ranges: bool = True
    honours_if_range: bool = True
    statuses: list[int] = field(default_factory=list)
    cut_after: list[int] = field(default_factory=list)  # bytes of the body of the next answers
    shift: int = 0  # sends another range than it was asked for
    says_length: bool = True
    asked: list[str] = field(default_factory=list)
    on_request: Callable[[], None] = lambda: None


class Handler(BaseHTTPRequestHandler):
    faults: Faults

    def do_GET(self) -> None:
        faults = self.faults
        faults.on_request()
        asked = self.headers.get("Range", "")
        faults.asked.append(asked)
        if faults.statuses:
            self.send_response(faults.statuses.pop(0))
            self.send_header("Content-Length", "0")
            self.send_header("Retry-After", "7")
            self.end_headers()
            return
        start = int(asked.removeprefix("bytes=").removesuffix("-")) if asked and faults.ranges else 0
        if faults.honours_if_range and self.headers.get("If-Range") not in (None, faults.etag):
            start = 0
        body = faults.content[start:]
        if start:
            start += faults.shift
            self.send_response(206)
            last, total = len(faults.content) - 1, len(faults.content)
            self.send_header("Content-Range", f"bytes {start}-{last}/{total}")
        else:
            self.send_response(200)
        if faults.says_length:
            self.send_header("Content-Length", str(len(body)))
        if faults.etag:
            self.send_header("ETag", faults.etag)
        self.end_headers()
        cut = faults.cut_after.pop(0) if faults.cut_after else None
        with contextlib.suppress(BrokenPipeError):  # who has seen enough hangs up
            self.wfile.write(body[:cut])

    def log_message(self, *args: Any) -> None:
        pass


@dataclass
class Site:
    url: str
    faults: Faults
    pauses: list[float] = field(default_factory=list)

    def get(self, to: Path, **file: Any) -> None:
        """Downloads what should be CONTENT; pauses are noted, not made."""
        fields = {"url": self.url, "num_bytes": LENGTH, "sha256": sha256(CONTENT), **file}
        download(RemoteFile(**fields), to, pause=self.pauses.append)


@pytest.fixture
def site(monkeypatch: pytest.MonkeyPatch) -> Iterator[Site]:
    monkeypatch.setenv("no_proxy", "*")
    faults = Faults()
    handler = type("Handled", (Handler,), {"faults": faults})
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        yield Site(f"http://127.0.0.1:{server.server_port}/file.zip", faults)
        server.shutdown()
        thread.join()


def sha256(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def left(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


# ---- one file -----------------------------------------------------------------------------


def test_all_at_once(site: Site, tmp_path: Path) -> None:
    site.get(tmp_path / "file")
    assert (tmp_path / "file").read_bytes() == CONTENT
    assert left(tmp_path) == ["file"]
    assert site.faults.asked == [""]


def test_a_download_continues_after_an_interruption(site: Site, tmp_path: Path) -> None:
    site.faults.cut_after = [1000, 300_000, 0, 5]
    site.get(tmp_path / "file")
    assert (tmp_path / "file").read_bytes() == CONTENT
    assert site.faults.asked == ["", "bytes=1000-", "bytes=301000-", "bytes=301000-", "bytes=301005-"]
    assert left(tmp_path) == ["file"]


def test_goes_on_in_another_process(site: Site, tmp_path: Path) -> None:
    site.faults.cut_after = [2000, 0, 0, 0, 0]
    with pytest.raises(DataError, match=r"after 2,000 of 700,000 bytes \(5 attempts\).*2,000 .* are kept"):
        site.get(tmp_path / "file")
    assert left(tmp_path) == ["file.part", "file.part.json"]
    site.get(tmp_path / "file")
    assert site.faults.asked[-1] == "bytes=2000-"
    assert (tmp_path / "file").read_bytes() == CONTENT


def test_a_server_that_knows_no_ranges_sends_all_of_it_again(site: Site, tmp_path: Path) -> None:
    site.faults.ranges = False
    site.faults.cut_after = [1000]
    site.get(tmp_path / "file")
    assert (tmp_path / "file").read_bytes() == CONTENT


@pytest.mark.parametrize("honest", [True, False], ids=["if-range", "ignores if-range"])
def test_a_file_that_has_changed_is_taken_anew(site: Site, tmp_path: Path, honest: bool) -> None:
    old = bytes(LENGTH)
    site.faults.content, site.faults.etag = old, '"old"'
    site.faults.cut_after = [1000, 0, 0, 0, 0]
    with pytest.raises(DataError, match="are kept"):
        site.get(tmp_path / "file")
    site.faults.content, site.faults.etag = CONTENT, '"new"'
    site.faults.honours_if_range = honest
    site.get(tmp_path / "file")
    assert (tmp_path / "file").read_bytes() == CONTENT


def test_pieces_of_two_versions_are_noticed_without_a_validator(site: Site, tmp_path: Path) -> None:
    site.faults.content, site.faults.etag = bytes(LENGTH), 'W/"weak"'
    site.faults.cut_after = [1000, 0, 0, 0, 0]
    with pytest.raises(DataError, match="are kept"):
        site.get(tmp_path / "file")
    site.faults.content = CONTENT
    site.get(tmp_path / "file")  # of wrong content at first, then once more from the beginning
    assert (tmp_path / "file").read_bytes() == CONTENT
    assert site.faults.asked[-2:] == ["bytes=1000-", ""]


def test_another_range_than_asked_for(site: Site, tmp_path: Path) -> None:
    site.faults.cut_after = [1000]
    site.faults.shift = 1
    site.get(tmp_path / "file")
    assert (tmp_path / "file").read_bytes() == CONTENT


def test_a_wrong_checksum_says_both_and_leaves_nothing(site: Site, tmp_path: Path) -> None:
    site.faults.content = changed = CONTENT[:-1] + b"?"
    with pytest.raises(DataError) as caught:
        site.get(tmp_path / "file")
    assert sha256(changed) in str(caught.value)
    assert sha256(CONTENT) in str(caught.value)
    assert left(tmp_path) == []
    assert len(site.faults.asked) == 1


@pytest.mark.parametrize("says_length", [True, False])
def test_a_file_of_another_length_is_refused(site: Site, tmp_path: Path, says_length: bool) -> None:
    site.faults.content = CONTENT + b"more"
    site.faults.says_length = says_length
    with pytest.raises(DataError, match=r"bytes long, expected 700,000"):
        site.get(tmp_path / "file")
    assert left(tmp_path) == []


def test_a_shorter_file_is_refused_at_once(site: Site, tmp_path: Path) -> None:
    site.faults.content = CONTENT[:-1]
    with pytest.raises(DataError, match=r"is 699,999 bytes long, expected 700,000"):
        site.get(tmp_path / "file")
    assert len(site.faults.asked) == 1


def test_a_refusal_is_final(site: Site, tmp_path: Path) -> None:
    site.faults.statuses = [404]
    with pytest.raises(DataError, match=r"answered 404 Not Found\. The file may have moved"):
        site.get(tmp_path / "file")
    assert len(site.faults.asked) == 1


def test_a_busy_server_is_asked_again_when_it_says(site: Site, tmp_path: Path) -> None:
    site.faults.statuses = [503, 429]
    site.get(tmp_path / "file")
    assert site.pauses == [7.0, 7.0]


def test_a_part_longer_than_the_file_on_the_server(site: Site, tmp_path: Path) -> None:
    (tmp_path / "file.part").write_bytes(bytes(100))
    (tmp_path / "file.part.json").write_text('{"validator": ""}')
    site.faults.statuses = [416]
    site.get(tmp_path / "file")
    assert (tmp_path / "file").read_bytes() == CONTENT


def test_no_network(site: Site, tmp_path: Path) -> None:
    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as gone:
        url = f"http://127.0.0.1:{gone.server_port}/"
    with pytest.raises(DataError, match=r"does not answer .*refused.* Look at the network"):
        site.get(tmp_path / "file", url=url)
    assert site.pauses == [1.0, 2.0, 4.0, 8.0]
    with pytest.raises(DataError, match="expected an address that begins with http"):
        site.get(tmp_path / "file", url="file:///etc/hostname")


def test_not_enough_room_is_said_before_anything_is_asked(
    site: Site, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda path: shutil._ntuple_diskusage(10**9, 10**9, 10**5))
    with pytest.raises(DataError, match="MB free, but 1 MB are needed"):
        site.get(tmp_path / "file")
    assert site.faults.asked == []


def test_a_disk_that_fills_up(site: Site, tmp_path: Path) -> None:
    site.faults.cut_after = [1000]

    def full(done: int, total: int) -> None:
        if done > 1000:
            raise OSError(errno.ENOSPC, "No space left on device")

    file = RemoteFile(site.url, LENGTH, sha256(CONTENT))
    with pytest.raises(DataError, match="is full; the bytes so far are kept"):
        download(file, tmp_path / "file", on_progress=full, pause=lambda _: None)
    site.get(tmp_path / "file")
    assert (tmp_path / "file").read_bytes() == CONTENT


def test_ctrl_c_keeps_the_bytes_so_far(site: Site, tmp_path: Path) -> None:
    def interrupt(done: int, total: int) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        download(RemoteFile(site.url, LENGTH, sha256(CONTENT)), tmp_path / "file", on_progress=interrupt)
    kept = (tmp_path / "file.part").stat().st_size
    assert 0 < kept < LENGTH
    site.get(tmp_path / "file")
    assert site.faults.asked == ["", f"bytes={kept}-"]
    assert (tmp_path / "file").read_bytes() == CONTENT


def test_headers_of_a_request() -> None:
    assert "Range" not in range_headers(DownloadPart())
    assert (
        range_headers(DownloadPart(5, '"tag"')).items() >= {"Range": "bytes=5-", "If-Range": '"tag"'}.items()
    )
    file, part = RemoteFile("http://x/", 100, ""), DownloadPart(5, '"tag"')
    fits = {"Content-Range": "bytes 5-99/100", "ETag": '"tag"'}
    assert body_begins_at(206, fits, part, file) == 5
    assert body_begins_at(206, {**fits, "Content-Range": "bytes 5-99/*"}, part, file) == 5
    assert body_begins_at(206, {**fits, "ETag": '"other"'}, part, file) is None
    assert body_begins_at(206, {"Content-Range": "nonsense"}, part, file) is None
    assert body_begins_at(200, {}, part, file) == 0
    dated = DownloadPart(5, "Fri, 20 Nov 2026 10:00:00 GMT")
    answer = {"Content-Range": "bytes 5-99/100", "ETag": 'W/"weak"', "Last-Modified": dated.validator}
    assert body_begins_at(206, answer, dated, file) == 5
    later = {**answer, "Last-Modified": "Fri, 20 Nov 2026 11:00:00 GMT"}
    assert body_begins_at(206, later, dated, file) is None


def test_encryption_is_not_given_up_on_the_way() -> None:
    asked = urllib.request.Request("https://one.example/file")
    redirects = _SafeRedirects()
    with pytest.raises(DataError, match="which is not encrypted"):
        redirects.redirect_request(asked, io.BytesIO(), 302, "", {}, "http://two.example/file")
    onward = redirects.redirect_request(asked, io.BytesIO(), 302, "", {}, "https://two.example/file")
    assert onward is not None
    assert onward.full_url == "https://two.example/file"


# ---- one file of an archive -----------------------------------------------------------------


def zipped(path: Path, files: dict[str, bytes], *, mode: int = stat.S_IFREG | 0o644) -> Path:
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, data in files.items():
            info = zipfile.ZipInfo(name)
            info.external_attr = mode << 16
            archive.writestr(info, data, zipfile.ZIP_DEFLATED)
    return path


def extract(archive: Path, to: Path) -> str:
    return extract_file(archive, "wanted", to, max_bytes=100)


def test_the_member_is_extracted(tmp_path: Path) -> None:
    archive = zipped(tmp_path / "a.zip", {"folder/wanted": b"data", "folder/other": b"x"})
    md5 = extract(archive, tmp_path / "out")
    assert (tmp_path / "out").read_bytes() == b"data"
    assert md5 == "8d777f385d3dfec8815d20f7496026dc"
    assert left(tmp_path) == ["a.zip", "out"]


@pytest.mark.parametrize(
    ("files", "message"),
    [
        ({"wanted": b"data", "../outside": b""}, "which is no plain file or folder inside"),
        ({"wanted": b"data", "/absolute": b""}, "which is no plain file or folder inside"),
        ({"wanted": b"data", "a\\..\\b": b""}, "which is no plain file or folder inside"),
        ({"wanted": bytes(101)}, "longer than the 100 bytes"),
        ({"other": b"data"}, "holds 0 files called wanted"),
        ({"a/wanted": b"data", "b/wanted": b"data"}, "holds 2 files called wanted"),
    ],
)
def test_archives_that_are_refused(tmp_path: Path, files: dict[str, bytes], message: str) -> None:
    archive = zipped(tmp_path / "a.zip", files)
    with pytest.raises(DataError, match=message):
        extract(archive, tmp_path / "out")
    assert left(tmp_path) == ["a.zip"]


def test_links_and_damage_are_refused(tmp_path: Path) -> None:
    archive = zipped(tmp_path / "a.zip", {"wanted": b"/etc/hostname"}, mode=stat.S_IFLNK | 0o777)
    with pytest.raises(DataError, match="no plain file"):
        extract(archive, tmp_path / "out")
    archive.write_bytes(archive.read_bytes()[:30])
    with pytest.raises(DataError, match="cannot be read"):
        extract(archive, tmp_path / "out")
    assert left(tmp_path) == ["a.zip"]


# ---- one lock for all -----------------------------------------------------------------------


def test_a_waiting_process_reports_the_holder_of_the_lock(tmp_path: Path) -> None:
    lock, told = tmp_path / ".lock", list[str]()
    with (
        machine_lock(lock, doing="downloading it", wait_s=0),
        pytest.raises(DataError, match=rf"process {os.getpid()} \(downloading it\) has held .* for 0 s"),
        machine_lock(lock, doing="the same", wait_s=0, on_wait=told.append),
    ):
        pass
    with machine_lock(lock, doing="the same", wait_s=0):
        pass
    assert lock.stat().st_mode & 0o777 == 0o600  # whoever can open it could hold it


def test_the_lock_of_a_killed_process_is_free(tmp_path: Path) -> None:
    code = (
        "import sys, time; from pathlib import Path; from gradstream.data.download import machine_lock\n"
        "with machine_lock(Path(sys.argv[1]), doing='nothing', wait_s=0): print('held', flush=True); "
        "sys.stdin.read()"
    )
    lock = tmp_path / ".lock"
    command = [sys.executable, "-c", code, str(lock)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as holder:
        assert holder.stdout is not None
        assert holder.stdout.readline() == "held\n"
        with (
            pytest.raises(DataError, match=f"process {holder.pid} "),
            machine_lock(lock, doing="it", wait_s=0),
        ):
            pass
        holder.send_signal(signal.SIGKILL)
        holder.wait()
    with machine_lock(lock, doing="it", wait_s=0):
        pass


# ---- a data set ------------------------------------------------------------------------------


def archive_of_images() -> bytes:
    """A small .tar.gz in the shape of Caltech-101."""
    image, packed = io.BytesIO(), io.BytesIO()
    Image.new("RGB", (20, 10), (200, 100, 50)).save(image, "JPEG")
    with tarfile.open(fileobj=packed, mode="w:gz") as archive:
        for category in ("Faces", "wrench"):
            for number in range(4):
                member = tarfile.TarInfo(f"101_ObjectCategories/{category}/image_{number:04}.jpg")
                member.size = len(image.getvalue())
                archive.addfile(member, io.BytesIO(image.getvalue()))
    return packed.getvalue()


def small_source(site: Site, tmp_path: Path) -> DataSource:
    """Something like Caltech-101, that the site serves."""
    inner = archive_of_images()
    outer = zipped(tmp_path / "outer.zip", {f"caltech-101/{MEMBER}": inner, "caltech-101/note": b"x"})
    site.faults.content = data = outer.read_bytes()
    outer.unlink()
    md5 = hashlib.md5(inner, usedforsecurity=False).hexdigest()
    packed = Packed(RemoteFile(site.url, len(data), sha256(data)), MEMBER, FOLDER, "caltech-101", 10**6, md5)
    return DataSource(
        name="caltech101", what="images", licence="CC BY 4.0", citation="Li", page="x", packed=packed
    )


def test_a_data_set_is_fetched_once_for_all(site: Site, tmp_path: Path) -> None:
    """flock is per open file, so threads contend for it as processes do."""
    source, said = small_source(site, tmp_path), list[str]()
    with ThreadPoolExecutor(4) as threads:
        places = list(threads.map(lambda _: fetch(source, home=tmp_path, say=said.append), range(4)))
    assert set(places) == {stored_at(source, tmp_path)}
    assert len(site.faults.asked) == 1
    assert left(places[0].parent) == [".lock", MEMBER]
    assert any("CC BY 4.0" in line and "cite" in line for line in said)
    assert said[-1].endswith(" MB") or "waiting for " in said[-1]


def test_processes_share_one_download(site: Site, tmp_path: Path) -> None:
    source = small_source(site, tmp_path)
    assert source.packed is not None
    code = (
        "import sys; from pathlib import Path\n"
        "from gradstream.data.sources import DataSource, Packed, RemoteFile, fetch\n"
        f"packed = {source.packed!r}\n"
        "made = DataSource(name='caltech101', what='', licence='', citation='', page='', packed=packed)\n"
        "print(fetch(made, home=Path(sys.argv[1])))"
    )
    command = [sys.executable, "-c", code, str(tmp_path)]
    processes = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True) for _ in range(2)]
    said = {process.communicate()[0].strip() for process in processes}
    assert said == {str(stored_at(source, tmp_path))}
    assert len(site.faults.asked) == 1


def test_caltech101_downloads(site: Site, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = small_source(site, tmp_path)
    monkeypatch.setattr(sys.modules["gradstream.data.caltech"], "CALTECH101", source)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.delenv("GRADSTREAM_DATA", raising=False)
    with pytest.raises(DataError, match="gradstream data get caltech101"):
        caltech101(8)
    assert caltech101(8, download=True).categories == ("Faces", "wrench")
    assert caltech101(8).num_samples + caltech101(8).num_test_samples == 8  # from now on without asking
    assert len(site.faults.asked) == 1


def test_a_bad_archive_is_not_kept(site: Site, tmp_path: Path) -> None:
    source = small_source(site, tmp_path)
    assert source.packed is not None
    missing = Packed(source.packed.archive, "another member", "", "", 10**6, "")
    spoilt = DataSource(name="other", what="", licence="", citation="", page="", packed=missing)
    with pytest.raises(DataError, match="holds 0 files"):
        fetch(spoilt, home=tmp_path, say=lambda _: None)
    assert left(tmp_path / "data" / "other") == [".lock"]


def test_another_md5_than_published_is_said(site: Site, tmp_path: Path) -> None:
    source, said = small_source(site, tmp_path), list[str]()
    assert source.packed is not None
    packed = dataclasses.replace(source.packed, md5="0" * 32)
    place = fetch(dataclasses.replace(source, packed=packed), home=tmp_path, say=said.append)
    assert place.exists()
    assert said[-1].endswith(f"published is {'0' * 32}")


def test_a_folder_that_cannot_be_written(tmp_path: Path, site: Site) -> None:
    (tmp_path / "home").write_bytes(b"")
    with pytest.raises(DataError, match=r"cannot be written .* XDG_CACHE_HOME"):
        fetch(small_source(site, tmp_path), home=tmp_path / "home", say=lambda _: None)
