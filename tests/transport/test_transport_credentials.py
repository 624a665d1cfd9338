"""Credentials: as text, and as the file of workers that others start, which nobody else may touch."""

from __future__ import annotations

import dataclasses
import os
import stat
import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

import gradstream as gs
from gradstream.errors import ConfigError
from gradstream.job.files import load_job
from gradstream.run import launcher
from gradstream.run.remote.certificate_authority import CertificateAuthority
from gradstream.testing.pairs import SECRET
from gradstream.testing.sessions import loop_in_threads
from gradstream.transport import proof
from gradstream.transport.proof import FILE, Credentials
from gradstream.transport.security import Tls

pytestmark = pytest.mark.cold  # looks at command lines and environments of processes

PLAIN = Credentials(SECRET)


def test_they_are_the_same_after_a_trip_as_text() -> None:
    authority = CertificateAuthority()
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


# ---- whole runs -----------------------------------------------------------------------------

LINEAR = """
import time
import numpy as np
import gradstream as gs

X = np.random.default_rng(0).normal(size=(64, 3)).astype(np.float32)

def outputs(p, x):
    return x @ p["w"]

def gradients(p, x, y):
    time.sleep(0.01)  # of arithmetic, so that there is a run to be looked at
    error = outputs(p, x) - y
    return float((error**2).mean()), {"w": (2 * x.T @ error / len(error)).astype(np.float32)}

def job():
    model = gs.from_functions(lambda seed: {"w": np.zeros(3, np.float32)}, outputs, gradients)
    data = gs.from_arrays(X, X @ np.ones(3, np.float32))
    given = dict(workers=2, servers=1, batch_size=8, strategy="downpour", steps=150)
    return gs.Job(model, data, optimizer=gs.optim.SGD(lr=0.1), **given)
"""


def what_others_can_see() -> dict[str, bytes]:
    """Command line and environment of each process, by its name."""
    seen = {}
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            parts = [(folder / name).read_bytes() for name in ("comm", "cmdline", "environ")]
        except OSError:  # it has ended, or is another user's
            continue
        seen[f"{parts[0].decode(errors='replace').strip()} {folder.name}"] = b"\n".join(parts)
    return seen


def test_the_secret_of_a_run_is_nowhere_to_be_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    secret = proof.new_secret()
    monkeypatch.setattr(launcher, "new_secret", lambda: secret)
    path = tmp_path / "linear.py"
    path.write_text(LINEAR)
    seen: dict[str, bytes] = {}

    def look(event: Mapping[str, Any]) -> None:
        if event["event"] == "step":
            seen.update(what_others_can_see())

    run_dir = tmp_path / "run"
    gs.train(dataclasses.replace(load_job(str(path)), run_dir=run_dir), on_event=look)
    names = {name.split()[0] for name in seen}
    assert {"worker-0", "worker-1", "shard-0"} <= names, names
    files = {str(file): file.read_bytes() for file in run_dir.rglob("*") if file.is_file()}
    assert any(name.endswith("nodes.json") for name in files)
    for where, data in {**seen, **files}.items():
        assert secret not in data and secret.hex().encode() not in data, where


def test_a_secret_in_an_argument_would_be_seen() -> None:
    """The test above looks where it would be."""
    code = "print(flush=True); input()"
    with subprocess.Popen(
        [sys.executable, "-c", code, "--credentials", str(PLAIN)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    ) as process:
        assert process.stdout is not None
        process.stdout.readline()
        assert any(SECRET.hex().encode() in data for data in what_others_can_see().values())


def test_the_file_is_gone_once_all_have_joined() -> None:
    found = list[tuple[bool, bool]]()

    def loop(session: gs.Session) -> None:
        assignment = session._place  # type: ignore[attr-defined]
        path = Path(assignment.spec).parent / FILE
        before = path.exists()
        model = torch.nn.Linear(2, 1)
        wrapped, optimizer = session.wrap(model, torch.optim.SGD(model.parameters(), lr=0.1))
        while path.exists():  # until the launcher has read that it began
            wrapped(torch.ones(1, 2)).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
        found.append((before, path.exists()))
        session.close()

    loop_in_threads(loop, workers=1)
    assert found == [(True, False)]
