"""The seal of a run folder, by which a user's own runs are told from folders that came from elsewhere.

What a run folder describes is executed by commands that go on with it: its job's file, and any class that
`nodes.json` names. A folder may be a download, or another user's. So `nodes.json` carries a code (HMAC-SHA-256, RFC
2104) of itself and of the copy of the job's code, whose key is where only this user reads:

    $XDG_STATE_HOME/gradstream/key

Who shares a run folder, or moves it, does not share the key.
"""

from __future__ import annotations

import dataclasses
import hashlib
import hmac
import json
import os
import secrets
import stat
from pathlib import Path

from gradstream.errors import ConfigError
from gradstream.job.code import COPY
from gradstream.run.node_spec import NodeSpec
from gradstream.untrusted import read_regular

KEY_BYTES = 32
MAX_CODE_BYTES = 1 << 28


def state_folder() -> Path:
    """The folder of this user's state of gradstream; it need not be there."""
    given = os.environ.get("XDG_STATE_HOME", "")
    home = Path(os.path.expanduser("~"))
    return (Path(given) if Path(given).is_absolute() else home / ".local" / "state") / "gradstream"


def checked_folder(folder: Path) -> Path:
    """The folder. Raises ConfigError if it is there, and others can write in it."""
    if folder.is_dir() and ((found := folder.stat()).st_uid != os.geteuid() or found.st_mode & 0o022):
        raise ConfigError(
            f"{folder}: others can write there, and what it says is executed; expected a folder of this user with "
            f"mode 0700: chmod 700 {folder}, or set XDG_STATE_HOME"
        )
    return folder


def seal_of(run: Path, spec: NodeSpec) -> str:
    """The seal of a description and of the copy of the code in a run folder.

    Raises:
        ConfigError: the key cannot be made or read.
    """
    record = dataclasses.asdict(dataclasses.replace(spec, seal=""))
    said = json.dumps(record, sort_keys=True).encode()
    try:
        code = read_regular(run / COPY, MAX_CODE_BYTES)
    except FileNotFoundError:
        code = b""
    except (OSError, ValueError) as error:
        raise ConfigError(f"cannot read {run / COPY}: {error}") from None
    digests = hashlib.sha256(said).digest() + hashlib.sha256(code).digest()
    return hmac.new(_key(), digests, hashlib.sha256).hexdigest()


def is_sealed(run: Path, spec: NodeSpec) -> bool:
    """Whether this user's gradstream has written the description that is in a run folder.

    A job whose file is in the run folder itself is read from there: it is this user's where the folder has not moved.
    """
    file = Path((spec.script or spec.job).partition(":")[0]).resolve()
    moved = Path(spec.run_dir).resolve() != run.resolve()
    if moved and file.is_relative_to(run.resolve()):
        return False
    return bool(spec.seal) and hmac.compare_digest(spec.seal.encode(), seal_of(run, spec).encode())


def _key() -> bytes:
    """The key of this user, made where there is none. Raises ConfigError."""
    folder = checked_folder(state_folder())
    path = folder / "key"
    try:
        if not folder.is_absolute():
            raise FileNotFoundError("this user has no home")
        if not path.exists():
            folder.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            folder.mkdir(mode=0o700, exist_ok=True)
            _make(path)
        if stat.S_IMODE(path.stat().st_mode) & 0o077 or path.stat().st_uid != os.geteuid():
            raise ConfigError(f"{path}: others can read it; chmod 600 {path}, or remove it if they have")
        key = read_regular(path, KEY_BYTES)
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"cannot keep a key in {folder}: {error}; set XDG_STATE_HOME to a folder of yours"
        ) from None
    if len(key) != KEY_BYTES:
        raise ConfigError(f"{path} has {len(key)} bytes, expected {KEY_BYTES}: remove it")
    return key


def _make(path: Path) -> None:
    """Writes a key, unless another process is first."""
    draft = path.with_name(f".key-{secrets.token_hex(8)}")
    descriptor = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    try:
        with open(descriptor, "wb") as file:
            file.write(secrets.token_bytes(KEY_BYTES))
        os.link(draft, path)
    except FileExistsError:
        pass
    finally:
        draft.unlink()
