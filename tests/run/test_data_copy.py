"""A machine's copy of the data: lists of files, what is refused, and the server that gives it to others."""

from __future__ import annotations

import errno
import io
import os
import shutil
import socket
import tarfile
import threading
from collections import namedtuple
from contextlib import ExitStack
from pathlib import Path
from typing import IO

import pytest

from gradstream.errors import ConfigError, DataError, PeerLostError, RefusedError
from gradstream.ext.ssh import data_delivery, file_server
from gradstream.ext.ssh.archives import FileList, files_in
from gradstream.ext.ssh.data_delivery import DiskFullError, main, receive, use
from gradstream.ext.ssh.file_server import FileServer, served_archive, write_archive

TOKEN = "0123456789abcdef0123456789abcdef"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Data with a file in a folder, an odd name, and links to a file and a folder elsewhere."""
    (tmp_path / "elsewhere" / "more").mkdir(parents=True)
    (tmp_path / "elsewhere" / "more" / "labels").write_text("a b")
    made = tmp_path / "data"
    (made / "deep").mkdir(parents=True)
    (made / "deep" / "numbers").write_text("1 2 3")
    (made / "odd \\ name").write_text("")
    (made / "linked").symlink_to(tmp_path / "elsewhere" / "more" / "labels")
    (made / "folder").symlink_to(tmp_path / "elsewhere" / "more")
    (made / "deep" / "above").symlink_to(made)
    (made / "dangling").symlink_to(tmp_path / "nothing")
    return made


@pytest.fixture
def here(tmp_path: Path, folder: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of a run on a machine: the list of files and the token are there already."""
    home = tmp_path / "run"
    home.mkdir()
    (home / "data.json").write_text(str(FileList.of(folder)))
    (home / "token").write_text(f"{TOKEN}\n")
    monkeypatch.chdir(home)
    return home


def archive(folder: Path) -> IO[bytes]:
    made = io.BytesIO()
    write_archive(files_in(folder), made)
    made.seek(0)
    return made


def test_a_list_follows_links_once_and_tells_every_difference(folder: Path) -> None:
    files = FileList.of(folder)
    assert list(files.files) == ["deep/numbers", "folder/labels", "linked", "odd \\ name"]
    assert files.num_bytes == 11
    assert FileList.parse(str(files)) == files
    assert files.difference(folder) == ""
    (folder / "new").write_text("")
    assert files.difference(folder) == "new is not expected"
    (folder / "new").unlink()
    (folder / "deep" / "numbers").write_text("1 2 4")
    assert files.difference(folder) == "deep/numbers has another SHA-256"
    (folder / "deep" / "numbers").write_text("1 2")
    assert files.difference(folder) == "deep/numbers has 3 bytes, expected 5"
    (folder / "deep" / "numbers").unlink()
    assert files.difference(folder) == "deep/numbers is missing"


@pytest.mark.parametrize("text", ["", "[]", '{"a": 1}', '{"../a": [1, "b"]}', '{"/a": [1, "b"]}'])
def test_a_list_that_leads_elsewhere_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="the list of files"):
        FileList.parse(text)


def test_an_archive_becomes_the_copy_once_its_checksums_are_right(here: Path, folder: Path) -> None:
    receive(archive(folder))
    assert FileList.of(folder).difference(here / "data") == ""
    assert not (here / "data" / "linked").is_symlink()
    assert sorted(path.name for path in here.iterdir()) == ["data", "data.json", "token"]


def test_what_is_damaged_or_broken_off_is_no_copy(here: Path, folder: Path) -> None:
    whole = archive(folder).read()
    with pytest.raises(DataError, match="did not arrive whole: the archive broke off"):
        receive(io.BytesIO(whole[:700]))
    with pytest.raises(DataError, match="did not arrive whole: deep/numbers has another SHA-256"):
        receive(io.BytesIO(whole.replace(b"1 2 3", b"1 2 4")))
    outside = io.BytesIO()
    with tarfile.open(fileobj=outside, mode="w") as made:
        made.add(folder / "deep" / "numbers", "../outside")
    with pytest.raises(DataError, match="did not arrive whole"):
        receive(io.BytesIO(outside.getvalue()))
    assert sorted(path.name for path in here.iterdir()) == ["data.json", "token"]
    assert not (here.parent / "outside").exists()


def test_a_full_disk_is_told_before_and_while_it_is_filled(
    here: Path, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(data_delivery, "unpacked", full)
        with pytest.raises(
            DiskFullError, match=r"No space left on device; make room, or take another --folder"
        ):
            receive(archive(folder))
    usage = namedtuple("usage", "free")
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage(free=3))
    with pytest.raises(DiskFullError, match=r"has 0 MB free, and the data takes 0 MB; make room"):
        receive(archive(folder))
    assert sorted(path.name for path in here.iterdir()) == ["data.json", "token"]


def test_data_that_is_there_is_used_where_it_is(
    here: Path, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(DataError, match="there is no folder"):
        use(here / "nothing")
    (folder / "new").write_text("")
    assert main(["there", str(folder)]) == data_delivery.ELSEWHERE
    assert "new is not expected" in capsys.readouterr().err
    (folder / "new").unlink()
    assert main(["there", str(folder)]) == 0
    assert (here / "data").resolve() == folder.resolve()


def test_a_server_gives_files_to_those_that_know_the_token_and_is_known_by_its_certificate(
    here: Path, folder: Path
) -> None:
    with FileServer(files_in(folder), TOKEN, 0) as server, FileServer({}, TOKEN, 0) as other:
        known = server.certificate.decode()
        with (
            pytest.raises(RefusedError, match="401"),
            served_archive("127.0.0.1", server.port, known, "guess"),
        ):
            pass
        with (
            pytest.raises(PeerLostError, match="CERTIFICATE_VERIFY_FAILED"),
            served_archive("127.0.0.1", other.port, known, TOKEN),
        ):
            pass
        with served_archive("127.0.0.1", server.port, known, TOKEN) as came:
            receive(came)
        assert FileList.of(folder).difference(here / "data") == ""
    with (
        pytest.raises(PeerLostError, match="refused"),
        served_archive("127.0.0.1", server.port, known, TOKEN),
    ):
        pass


def test_strangers_hold_no_threads_of_a_server_and_keep_no_machine_waiting(
    here: Path, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(file_server, "PROOF_S", 1.0)
    monkeypatch.setattr(file_server, "MAX_UNPROVED", 8)
    with FileServer(files_in(folder), TOKEN, 0) as server, ExitStack() as stack:
        before = threading.active_count()
        strangers = [
            stack.enter_context(socket.create_connection(("127.0.0.1", server.port), 20)) for _ in range(40)
        ]
        with served_archive("127.0.0.1", server.port, server.certificate.decode(), TOKEN) as came:
            receive(came)
        assert threading.active_count() - before <= 8 + 8  # those that are hung up on may be ending
        for stranger in strangers:
            while True:  # what moves on a connection does not prolong it
                try:
                    stranger.send(b"\x16")
                    stranger.settimeout(0.2)
                    if not stranger.recv(100):
                        break
                except TimeoutError:
                    continue
                except OSError:
                    break
    assert FileList.of(folder).difference(here / "data") == ""


def test_more_machines_than_there_can_be_are_hung_up_on(
    here: Path, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(file_server, "MAX_PROVED", 0)
    with (
        FileServer(files_in(folder), TOKEN, 0) as server,
        pytest.raises(PeerLostError),
        served_archive("127.0.0.1", server.port, server.certificate.decode(), TOKEN),
    ):
        pass


@pytest.mark.parametrize("name", ["token", "data.json"])
@pytest.mark.parametrize("kind", ["pipe", "link", "folder"])
def test_a_file_that_is_none_is_refused_and_nobody_waits(
    here: Path, folder: Path, name: str, kind: str, capsys: pytest.CaptureFixture[str]
) -> None:
    (here / name).rename(here.parent / "elsewhere" / name)
    if kind == "pipe":
        os.mkfifo(here / name)
    elif kind == "link":
        (here / name).symlink_to(here.parent / "elsewhere" / name)
    else:
        (here / name).mkdir()
    shutil.copytree(folder, here / "data", ignore_dangling_symlinks=True, ignore=lambda *_: ["above"])
    words = ["serve", "0"] if name == "token" else ["there", str(folder)]
    assert main(words) == data_delivery.ELSEWHERE
    assert "regular file" in capsys.readouterr().err
