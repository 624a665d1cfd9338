"""Credentials: as text, and as the file of workers that others start, which nobody else may touch."""

from __future__ import annotations

import os
import stat
from collections.abc import Callable
from pathlib import Path

import pytest

from gradstream.errors import ConfigError
from gradstream.remote.authority import Authority
from gradstream.testing.pairs import SECRET
from gradstream.transport.credentials import FILE, Credentials
from gradstream.transport.security import Tls

PLAIN = Credentials(SECRET)


def test_they_are_the_same_after_a_trip_as_text() -> None:
    authority = Authority()
    protected = authority.credentials("worker-0", SECRET)
    for made in (PLAIN, protected):
        assert Credentials.parse(str(made)) == made
    assert not PLAIN.is_protected and Tls.of(PLAIN) is None
    tls = Tls.of(protected)
    assert tls is not None and tls.mutual
    assert (tls.authority, tls.certificate, tls.key) == (
        authority.certificate,
        protected.certificate,
        protected.key,
    )


@pytest.mark.parametrize(
    "text",
    [
        "",
        "nonsense",
        "[]",
        "{}",
        "null",
        '{"secret": "not hexadecimal"}',
        '{"secret": 5}',
        '{"secret": "00", "other": "x"}',
        "[" * 100_000,
        str(PLAIN)[:-1],
    ],
)
def test_what_is_no_credentials_is_not_shown(text: str) -> None:
    with pytest.raises(
        ConfigError, match="--credentials: expected what the launcher has handed out"
    ) as caught:
        Credentials.parse(text)
    assert SECRET.hex() not in str(caught.value)
    assert caught.value.__cause__ is None


def test_the_file_is_this_users_alone(tmp_path: Path) -> None:
    before = os.umask(0)
    try:
        path = PLAIN.save(tmp_path)
    finally:
        os.umask(before)
    assert path == tmp_path / FILE
    found = path.stat()
    assert (stat.S_IMODE(found.st_mode), found.st_uid) == (0o600, os.getuid())
    assert Credentials.read(tmp_path) == PLAIN
    newer = Credentials(b"the secret of a later run")
    newer.save(tmp_path)  # over that of a run that was killed
    assert Credentials.read(tmp_path) == newer


def others_may_read_it(path: Path) -> None:
    path.chmod(0o640)


def others_may_write_it(path: Path) -> None:
    path.chmod(0o602)


def it_is_a_link(path: Path) -> None:
    path.rename(path.with_name("elsewhere"))
    path.symlink_to(path.with_name("elsewhere"))


def it_is_a_folder(path: Path) -> None:
    path.unlink()
    path.mkdir(mode=0o700)


def it_is_a_pipe(path: Path) -> None:
    """That nobody writes to: whoever opens it waits for ever."""
    path.unlink()
    os.mkfifo(path, 0o600)


def it_is_gone(path: Path) -> None:
    path.unlink()


@pytest.mark.parametrize(
    "spoil",
    [others_may_read_it, others_may_write_it, it_is_a_link, it_is_a_folder, it_is_a_pipe, it_is_gone],
    ids=lambda spoil: spoil.__name__,
)
def test_a_file_that_others_may_have_made_is_not_believed(
    tmp_path: Path, spoil: Callable[[Path], None]
) -> None:
    path = PLAIN.save(tmp_path)
    spoil(path)
    with pytest.raises(ConfigError, match=str(path)) as caught:
        Credentials.read(tmp_path)
    assert SECRET.hex() not in str(caught.value)


def test_a_file_of_another_user_is_not_believed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    PLAIN.save(tmp_path)
    me = os.getuid()
    monkeypatch.setattr(os, "getuid", lambda: me + 1)
    with pytest.raises(ConfigError, match="expected a file of this user that nobody else can read"):
        Credentials.read(tmp_path)


def test_saving_follows_no_link(tmp_path: Path) -> None:
    """Somebody has laid a link where the file goes: what it leads to is neither written nor removed."""
    target = tmp_path / "target"
    target.write_text("precious")
    (tmp_path / FILE).symlink_to(target)
    path = PLAIN.save(tmp_path)
    assert target.read_text() == "precious"
    assert not path.is_symlink()


def test_reading_leaves_no_descriptor(tmp_path: Path) -> None:
    PLAIN.save(tmp_path).chmod(0o644)
    before = len(os.listdir("/proc/self/fd"))
    for _ in range(10):
        with pytest.raises(ConfigError):
            Credentials.read(tmp_path)
    assert len(os.listdir("/proc/self/fd")) == before
