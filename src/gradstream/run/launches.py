"""`Launch`: what this machine keeps about a run that it started on other machines.

Another machine fills the folder of such a run, so nothing in it is executed. The machines, the commands that reach
them and the files of the job are kept where only this user writes:

    $XDG_STATE_HOME/gradstream/launches/DIGEST OF THE RUN FOLDER/
        hosts.json   the machines
        data.json    the list of the files of the data, if the run has any
        job/         the files of the job
"""

from __future__ import annotations

import dataclasses
import hashlib
import hmac
import importlib
import json
import os
import re
import secrets
import shlex
import shutil
import stat
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

from gradstream.errors import ConfigError
from gradstream.job.code import COPY
from gradstream.job.registry import GROUPS, installed
from gradstream.run.files import HOSTS, JOB
from gradstream.run.node_spec import NodeSpec
from gradstream.runtime.storage import DiskStorage
from gradstream.untrusted import escaped, parse_json, read_regular, read_settings
from gradstream.untrusted.text import check_name

# ---- seals -------------------------------------------------------------------------------
# The seal of a run folder, which tells a user's own runs from folders that came from elsewhere.
#
# Commands that continue a run execute what its folder describes: its job's file, and any class that `nodes.json`
# names. A folder may be a download, or another user's. So `nodes.json` carries a code (HMAC-SHA-256, RFC
# 2104) of itself and of the copy of the job's code, whose key is where only this user reads:
#
#     $XDG_STATE_HOME/gradstream/key
#
# Sharing or moving a run folder does not share the key.

KEY_BYTES = 32
MAX_CODE_BYTES = 1 << 28


def state_folder() -> Path:
    """The folder for this user's state of gradstream; it need not exist."""
    path = os.environ.get("XDG_STATE_HOME", "")
    home = Path(os.path.expanduser("~"))
    return (Path(path) if Path(path).is_absolute() else home / ".local" / "state") / "gradstream"


def copies_folder(run: str) -> Path:
    """Where a machine keeps copies of the checkpoints of another machine's run, by the run's id."""
    return state_folder() / "copies" / check_name(run, "the run's id")


def checked_folder(folder: Path) -> Path:
    """Returns the folder. Raises ConfigError if it exists and others can write in it."""
    if folder.is_dir() and ((status := folder.stat()).st_uid != os.geteuid() or status.st_mode & 0o022):
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
        raise ConfigError(
            f"cannot read {run / COPY}: {error}; put it back from a copy, or train again"
        ) from None
    digests = hashlib.sha256(said).digest() + hashlib.sha256(code).digest()
    return hmac.new(_key(), digests, hashlib.sha256).hexdigest()


def is_sealed(run: Path, spec: NodeSpec) -> bool:
    """Whether this user's gradstream wrote the description in a run folder.

    A job whose file is in the run folder itself is read from there: it is this user's if the folder has not moved.
    """
    file = Path((spec.script or spec.job).partition(":")[0]).resolve()
    moved = Path(spec.run_dir).resolve() != run.resolve()
    if moved and file.is_relative_to(run.resolve()):
        return False
    return bool(spec.seal) and hmac.compare_digest(spec.seal.encode(), seal_of(run, spec).encode())


def _key() -> bytes:
    """The key of this user, which is made if there is none. Raises ConfigError."""
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
    """Writes a key, unless another process was first."""
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


# ---- launches ----------------------------------------------------------------------------

DATA = "data.json"
MAX_BYTES, MAX_DATA_BYTES = 1 << 20, 1 << 29


@dataclass(frozen=True, slots=True)
class Launch:
    """What this machine keeps about a run on other machines.

    Args:
        run: the local folder of the run.
        folder: where it is kept.
    """

    run: Path
    folder: Path

    @classmethod
    def at(cls, run: Path) -> Self:
        """The record of a run folder, whether or not anything is kept.

        Raises:
            ConfigError: others can write where it is kept.
        """
        kept = checked_folder(state_folder()) / "launches"
        checked_folder(kept)
        digest = hashlib.sha256(os.fsencode(os.path.realpath(run))).hexdigest()
        return cls(run, kept / digest[:32])

    @property
    def is_known(self) -> bool:
        """Whether this machine started the run, and so has the files of its job."""
        return (self.folder / JOB).is_dir() and (self.folder / HOSTS).exists()

    def begin(self, files: Mapping[str, Path]) -> None:
        """Starts over, with the files of a job.

        Raises:
            ConfigError: the files cannot be written.
        """
        launches = self.folder.parent
        try:
            shutil.rmtree(self.folder, ignore_errors=True)
            launches.parent.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            for folder in (launches.parent, launches, self.folder):
                folder.mkdir(mode=0o700, exist_ok=True)
            for name, path in files.items():
                DiskStorage(self.folder).write(f"{JOB}/{name}", path.read_bytes())
        except OSError as error:
            raise ConfigError(
                f"cannot write {self.folder}: {error.strerror}; set XDG_STATE_HOME to a folder of yours"
            ) from None

    def forget(self) -> None:
        """Removes what is kept."""
        shutil.rmtree(self.folder, ignore_errors=True)

    def write(self, name: str, text: str) -> None:
        """Keeps a text. Raises OSError if the disk fails."""
        DiskStorage(self.folder).write(name, text.encode())

    def hosts(self) -> dict[str, Any] | None:
        """The machines according to `HOSTS`; None if nothing is kept. Raises ConfigError for a damaged file."""
        return read_hosts(self.folder / HOSTS)

    def data(self) -> bytes:
        """The list of the data's files. Raises ConfigError if there is none."""
        try:
            return read_settings(self.folder / DATA, MAX_DATA_BYTES)
        except FileNotFoundError:
            raise self.unknown("the list of its data") from None

    def files(self) -> dict[str, Path]:
        """The files of the job by name. Raises ConfigError if none are kept."""
        job = self.folder / JOB
        files = {str(path.relative_to(job)): path for path in sorted(job.rglob("*")) if path.is_file()}
        if not files:
            raise self.unknown("the files of its job")
        return files

    def unknown(self, what: str) -> ConfigError:
        """The error for something that this machine does not know about a run."""
        return ConfigError(
            f"{self.run}: {what} are not known here, since the run was started elsewhere; call this command where "
            "`gradstream launch` was called"
        )

    def own(self, spec: NodeSpec) -> NodeSpec:
        """A description of the run from another machine, with nothing to execute but code of this machine.

        The job and its command line are those that were typed here. Classes and functions are gradstream's own, of
        installed plugins, or in files of the job.

        Raises:
            ConfigError: it names others.
        """
        said = self.hosts()
        assert said is not None
        job, colon, function = said["job"].partition(":")
        place = f"{self.folder / JOB / job}{colon}{function}"
        words = said["arguments"]
        argv = [str(self.folder / JOB / job), *(words[words.index("--") + 1 :] if "--" in words else [])]
        fields = {key: value for key, value in spec.plain.items() if key not in _TEXTS}
        texts = {key: spec.plain[key] for key in _TEXTS & spec.plain.keys()}
        return dataclasses.replace(
            spec,
            job=place if spec.job else "",
            script=place if spec.script else "",
            earlier=(),
            imports="",
            run_dir=str(self.run),
            plain={**texts, **self._own(fields), "argv": argv, "run_dir": str(self.run)},
            strategy=self._own(spec.strategy),
            optimizer=self._own(spec.optimizer),
        )

    def _own(self, value: Any) -> Any:
        """The value with places of this machine in it: each text with a colon may become code."""
        if isinstance(value, Mapping):
            return {key: self._own(entry) for key, entry in value.items()}
        if isinstance(value, list | tuple):
            return [self._own(entry) for entry in value]
        return self._place(value) if isinstance(value, str) and ":" in value else value

    def _place(self, place: str) -> str:
        where, _, name = place.rpartition(":")
        if place in {plugin.place for kind in GROUPS for plugin in installed(kind)}:
            return place
        if where.endswith(".py"):
            known = [path for file, path in self.files().items() if f"/{where}".endswith(f"/{file}")]
            if known:
                return f"{max(known, key=lambda path: len(path.parts))}:{name}"
        elif where.startswith(_OURS):
            with suppress(ImportError):
                member = getattr(importlib.import_module(where), name, None)
                if str(getattr(member, "__module__", "")).startswith(_OURS):
                    return place
        elif file := self.files().get(f"{where.replace('.', '/')}.py"):
            return f"{file}:{name}"
        raise self._refused(place)

    def _refused(self, place: object) -> ConfigError:
        return ConfigError(
            f"{self.run / 'nodes.json'} names {escaped(str(place), 120)!r}, which is neither gradstream's nor in a "
            "file of the job, so it is not executed: the first machine wrote it. If it is right, bring that code "
            "along with --with"
        )


_OURS = ("gradstream.strategies.", "gradstream.optim.", "gradstream.codec.", "gradstream.worker.evaluation")
_PLACE = re.compile(r"[^:]+:[A-Za-z_][\w.]*")
_TEXTS = frozenset({"name"})
"""Fields of a job that are for people to read."""


def read_hosts(path: Path) -> dict[str, Any] | None:
    """The object in a file of machines; None if there is no file. Raises ConfigError if it holds no object."""
    try:
        said = parse_json(read_settings(path, MAX_BYTES))
    except FileNotFoundError:
        return None
    except ValueError as error:
        raise ConfigError(
            f"cannot read {path}: {error}; put it back from a copy, or launch the run again"
        ) from None
    if not isinstance(said, dict):
        raise ConfigError(
            f"cannot read {path}: expected an object; put it back from a copy, or launch the run again"
        )
    return said


def checked(run: Path, spec: NodeSpec) -> NodeSpec:
    """The description of a run, if no other user or machine has chosen what it would execute.

    Raises:
        ConfigError: the folder was not filled by this user's gradstream, or was altered since.
    """
    launch = Launch.at(run)
    if launch.is_known:
        return launch.own(spec)
    if (spec.job or spec.script) and not is_sealed(run, spec):
        raise ConfigError(
            f"{run} comes from elsewhere: nothing on this machine says that you have made it, or nodes.json or the "
            f"copy of its code was altered. To read its job would run {runs(spec)}. If you trust whoever wrote these "
            f"files: gradstream status {run} --adopt"
        )
    return spec


def runs(spec: NodeSpec) -> str:
    """What is executed by reading the job of a description, for people: its file with its arguments, and other code."""
    named = sorted(
        {text for text in _texts([spec.plain, spec.strategy, spec.optimizer]) if _PLACE.fullmatch(text)}
    )
    others = [text for text in named if not text.startswith(_OURS)]
    words = shlex.join([spec.script or spec.job or "no job", *spec.argv[1:]])
    return escaped(words + (f", and {', '.join(others)}" if others else ""), 1000)


def _texts(value: Any) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping | list | tuple):
        for entry in value.values() if isinstance(value, Mapping) else value:
            yield from _texts(entry)
