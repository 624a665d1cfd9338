"""Archives of machines gone bad: in each place where one is unpacked, nothing but what is expected comes of it."""

from __future__ import annotations

import io
import json
import random
import shlex
import tarfile
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gradstream.errors import ConfigError, DataError
from gradstream.ext.ssh import archives, run_files
from gradstream.ext.ssh.archives import Expected, unpacked
from gradstream.ext.ssh.data_delivery import receive
from gradstream.ext.ssh.fleet import Fleet
from gradstream.ext.ssh.host import HostError
from gradstream.ext.ssh.run_files import bring_log, collect

SHA256 = "0" * 64


def header(
    name: str, content: bytes = b"", kind: bytes = b"0", link: str = "", size: int | None = None
) -> bytes:
    """A member as tar has it, whatever its name and kind."""
    made = bytearray(512)
    made[: len(name.encode())] = name.encode()
    made[100:108], made[124:136] = b"0000644\0", b"%011o\0" % (len(content) if size is None else size)
    made[148:156], made[156:157] = b" " * 8, kind
    made[157 : 157 + len(link)], made[257:265] = link.encode(), b"ustar\00000"
    made[148:156] = b"%06o\0 " % sum(made)
    return bytes(made) + content + bytes(-len(content) % 512)


def pax(**values: str) -> bytes:
    records = b""
    for key, value in values.items():
        body = f" {key}={value}\n".encode()
        size = len(body) + 1
        while len(str(size)) + len(body) != size:
            size = len(str(size)) + len(body)
        records += str(size).encode() + body
    return header("pax", records, b"x")


END = bytes(1024)


def chain_of_links(name: str) -> bytes:
    """CVE-2025-4517: a path so long that its links are not looked at leads out of the folder."""
    made, parts = b"", list[str]()
    for letter in "abcdefghijklmnop":
        made += header("/".join([*parts, "d" * 60]), kind=b"5")[:512] + header(
            "/".join([*parts, letter]), kind=b"2"
        )
        parts.append(letter)
    made += pax(path="/".join(parts) + "/l" * 200) + header("l", kind=b"2", link="../" * 16)
    return made + header("escape", kind=b"2", link="l/../../elsewhere") + header("escape/file", b"taken")


def tricks(name: str, good: bytes, elsewhere: Path) -> dict[str, bytes]:
    """Archives by what is wrong with them. Each has a file that is expected, `name`, where it can have one."""
    fine = header(name, good)
    away = str(elsewhere / "file")
    return {
        "link": fine + header("l", kind=b"2", link=str(elsewhere)) + header("l/file", b"taken"),
        "link in its place": header(name, kind=b"2", link=away) + fine,
        "file over a link": header(name, kind=b"2", link=away) + header(name, b"taken"),
        "links to links": fine
        + header("a", kind=b"2", link="b")
        + header("b", kind=b"2", link=str(elsewhere)),
        "chain of links": fine + chain_of_links(name),
        "hard link": fine + header("h", kind=b"1", link=away),
        "hard link to a link": header("s", kind=b"2", link=away) + header(name, kind=b"1", link="s"),
        "character device": fine + header("null", kind=b"3"),
        "block device": fine + header("disk", kind=b"4"),
        "fifo": header(name, kind=b"6"),
        "contiguous": header(name, good, kind=b"7"),
        "sparse": header(name, good, kind=b"S"),
        "sparse of pax": pax(**{"GNU.sparse.major": "1", "GNU.sparse.realsize": str(1 << 40)}) + fine,
        "global": header("g", b"20 path=/etc/passwd\n", b"g") + fine,
        "dump of a folder": header(name, good, kind=b"D"),
        "long link of GNU": header("././@LongLink", away.encode() + b"\0", b"K") + header("s", kind=b"2"),
        "absolute": fine + header(away, b"taken"),
        "above": fine + header("../elsewhere/file", b"taken"),
        "above within": fine + header("a/../../elsewhere/file", b"taken"),
        "above by prefix": fine + prefixed("file", "../elsewhere"),
        "above by GNU": fine + header("././@LongLink", b"../elsewhere/file\0", b"L") + header("x", b"taken"),
        "above by pax": fine + pax(path="../elsewhere/file") + header("x", b"taken"),
        "empty part": fine + header("a//b", b"taken"),
        "dot part": fine + header("a/./b", b"taken"),
        "control characters": fine + header("a\x1b[2J", b"taken"),
        "newline": fine + header("a\nb", b"taken"),
        "nul in a name": fine + pax(path="a\0b") + header("x", b"taken"),
        "no UTF-8": fine + header("x", b"taken").replace(b"x", b"\xff", 1),
        "long part": fine + pax(path="p" * 300) + header("x", b"taken"),
        "long path": fine + pax(path="/".join(["p" * 100] * 20)) + header("x", b"taken"),
        "deep": fine + pax(path="/".join("d" * 200)) + header("x", b"taken"),
        "deep folders": fine + pax(path="/".join("d" * 200)) + header("x", kind=b"5"),
        "twice": fine + fine,
        "twice by another spelling": fine + header(f"./{name}", good),
        "folder over a file": fine + header(f"{name}/inside", b"taken"),
        "folder with content": fine + header("d", b"taken", kind=b"5"),
        "two names": fine + header("L", b"a\0", b"L") + pax(path="b") + header("x", b"taken"),
        "two names of pax": fine + pax(path="a") + pax(path="b") + header("x", b"taken"),
        "values for ever": pax(mtime="1") * 5000 + fine,
        "values and no end": fine + header("L", b"a\0", b"L"),
        "large values": fine + header("pax", kind=b"x", size=1 << 40),
        "bad values": fine + header("pax", b"999 path=x\n", b"x") + header("x"),
        "size by pax": pax(size=str(1 << 50)) + fine,
        "negative size": fine + header("x", b"taken").replace(b"00000000005\0", b"-0000000005\0"),
        "negative size of GNU": fine + binary_size("x", b"\xff" * 12),
        "huge size": fine + binary_size("x", b"\x80" + b"\xff" * 11),
        "bomb": header(name, size=1 << 60),
        "many names": fine + b"".join(header(f"n{number}") for number in range(5000)),
        "many folders": fine + header("d", kind=b"5") * 5000,
        "not expected": fine + header("surprise", b"taken"),
        "hidden": fine + header(".bashrc", b"taken"),
        "checksum": fine + header("x", b"taken").replace(b"x", b"y", 1),
        "truncated": (fine + END)[: 512 + len(good) // 2],
        "no end": fine,
        "goes on": fine + END + header("x", b"taken"),
        "no archive": random.Random(0).randbytes(5000),
        "nothing": b"",
    }


def prefixed(name: str, prefix: str) -> bytes:
    made = bytearray(header(name, b"taken"))
    made[345 : 345 + len(prefix)] = prefix.encode()
    return resummed(made)


def binary_size(name: str, field: bytes) -> bytes:
    made = bytearray(header(name))
    made[124:136] = field
    return resummed(made)


def resummed(made: bytearray) -> bytes:
    made[148:156] = b" " * 8
    made[148:156] = b"%06o\0 " % sum(made[:512])
    return bytes(made)


TRICKS = list(tricks("x", b"", Path("/elsewhere")))
UNFINISHED = ("truncated", "no end", "nothing", "no archive", "goes on", "values and no end")

SSH = """#!/bin/sh
for last; do :; done
case "$last" in
*"head -n 1"*) exit 0 ;;
*"log status"*) cat {logs} ;;
*) cat {run} ;;
esac
"""


@pytest.fixture
def elsewhere(tmp_path: Path) -> Path:
    """A folder beside those into which archives go; nothing may come into it."""
    made = tmp_path / "elsewhere"
    made.mkdir()
    (made / "file").write_text("mine")
    return made


def fleet(folder: Path, *, logs: bytes, run: bytes = END) -> Fleet:
    """Machines that send these archives."""
    for name, content in (("logs", logs), ("archive", run)):
        (folder / name).write_bytes(content)
    ssh = folder / "ssh"
    places = {"logs": shlex.quote(str(folder / "logs")), "run": shlex.quote(str(folder / "archive"))}
    ssh.write_text(SSH.format(**places))
    ssh.chmod(0o755)
    return Fleet(
        name="run",
        hosts=["a", "b"],
        ssh=[str(ssh)],
        python="python3",
        folder="~/f",
        port=1,
        job="j.py",
        arguments=[],
    )


def everything(folder: Path) -> dict[str, bytes]:
    return {
        str(path.relative_to(folder)): path.read_bytes() if path.is_file() else b"(folder)"
        for path in sorted(folder.rglob("*"))
    }


@pytest.mark.parametrize("trick", TRICKS)
def test_a_log_of_a_machine_gone_bad_is_refused_and_the_one_before_stays(
    tmp_path: Path, elsewhere: Path, trick: str
) -> None:
    good = header("log", b"said") + header("status", b"0\n") + END
    archive = tricks("log", b"said", elsewhere)[trick] + END * (trick not in UNFINISHED)
    run = tmp_path / "run"
    run.mkdir()
    machines = fleet(tmp_path, logs=good)
    host = machines.machines[0]
    assert bring_log(machines, run, host) == ""
    (tmp_path / "logs").write_bytes(archive)
    before = everything(tmp_path)
    assert bring_log(machines, run, host).startswith("a: ")
    assert everything(tmp_path) == before
    assert before["run/hosts/a/log"] == b"said" and before["run/hosts/a/status"] == b"0\n"


@pytest.mark.parametrize("trick", TRICKS)
def test_a_run_of_a_machine_gone_bad_is_refused_and_what_is_here_stays(
    tmp_path: Path, elsewhere: Path, trick: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(run_files, "MAX_FILES", 1000)
    archive = tricks("events.jsonl", b"{}\n", elsewhere)[trick] + END * (trick not in UNFINISHED)
    run = tmp_path / "run"
    (run / "checkpoints" / "step-00000001").mkdir(parents=True)
    (run / "hosts.json").write_text("mine")
    machines = fleet(tmp_path, logs=header("log", b"said") + END, run=archive)
    before = everything(tmp_path)
    with pytest.raises(HostError, match=r"^a: "):
        collect(machines, run)
    assert everything(tmp_path) == before


@pytest.mark.parametrize(
    "name", ["hosts.json", "hosts/a/log", "job/job.py", ".launcher", "logs", "run.json/x", "x.py"]
)
def test_no_file_that_commands_trust_comes_with_a_run(tmp_path: Path, name: str) -> None:
    run = tmp_path / "run"
    run.mkdir()
    machines = fleet(tmp_path, logs=END, run=header("run.json", b"{}") + header(name, b"taken") + END)
    with pytest.raises(HostError, match="which is not expected"):
        collect(machines, run)
    assert everything(run) == {}


def test_a_run_is_collected_with_its_checkpoints_in_the_place_of_those_before(tmp_path: Path) -> None:
    run = tmp_path / "run"
    (run / "checkpoints" / "step-00000001").mkdir(parents=True)
    (run / "checkpoints" / "step-00000001" / "model.safetensors").write_text("old")
    folder = tmp_path / "there"
    (folder / "checkpoints" / "step-00000002").mkdir(parents=True)
    (folder / "checkpoints" / "step-00000002" / "model.safetensors").write_text("new")
    (folder / "run.json").write_text("{}")
    made = io.BytesIO()
    with tarfile.open(fileobj=made, mode="w", format=tarfile.GNU_FORMAT) as archive:
        archive.add(folder, ".")
    machines = fleet(tmp_path, logs=header("log", b"said") + END, run=made.getvalue())
    assert collect(machines, run) == []
    assert {name for name, content in everything(run).items() if content != b"(folder)"} == {
        "checkpoints/step-00000002/model.safetensors",
        "run.json",
        "hosts/a/log",
        "hosts/b/log",
    }
    assert (run / "checkpoints").stat().st_mode & 0o777 == 0o700
    assert (run / "run.json").stat().st_mode & 0o777 == 0o600


def test_a_run_without_a_whole_checkpoint_leaves_those_that_are_here(tmp_path: Path) -> None:
    run = tmp_path / "run"
    (run / "checkpoints" / "step-00000001").mkdir(parents=True)
    machines = fleet(
        tmp_path, logs=END, run=header("run.json", b"{}") + header("checkpoints/", kind=b"5") + END
    )
    assert collect(machines, run) == []
    assert (run / "checkpoints" / "step-00000001").is_dir()


@pytest.mark.parametrize("trick", TRICKS)
def test_data_of_a_machine_gone_bad_is_refused(
    tmp_path: Path, elsewhere: Path, trick: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    archive = tricks("deep/numbers", b"1 2 3", elsewhere)[trick] + END * (trick not in UNFINISHED)
    home = tmp_path / "home"
    home.mkdir()
    (home / "data.json").write_text(json.dumps({"deep/numbers": [5, SHA256], "more": [1, SHA256]}))
    monkeypatch.chdir(home)
    before = everything(tmp_path)
    with pytest.raises(DataError, match="did not arrive whole: the archive"):
        receive(io.BytesIO(archive))
    assert everything(tmp_path) == before


# ---- the unpacker by itself ---------------------------------------------------------------

ANYTHING = Expected(admits=lambda name, length: True, max_members=100, max_bytes=1 << 16)
NAMES = st.one_of(
    st.sampled_from(
        ["a", "b", "a/b", "./c", "../a", "/a", "", ".", "a/", "a//b", "x" * 300, "ü", "\x1b", "a\n"]
    ),
    st.text(max_size=40),
)
MEMBERS = st.tuples(NAMES, st.binary(max_size=1500), st.sampled_from(list(b"0000055512346Lx\0S7")))


def archive_of(members: list[tuple[str, bytes, int]]) -> bytes:
    made = b""
    for name, content, kind in members:
        cut = name.encode(errors="ignore")[:100].decode(errors="ignore")
        made += header(cut, content if kind in b"0Lx\0S7" else b"", bytes([kind]), link="../elsewhere")
    return made + END


@settings(max_examples=300, deadline=None)
@given(st.lists(MEMBERS, max_size=6), st.randoms(use_true_random=False), st.integers(0, 8))
def test_an_archive_is_unpacked_in_its_folder_or_refused_whole(
    tmp_path_factory: pytest.TempPathFactory,
    members: list[tuple[str, bytes, int]],
    rng: random.Random,
    damages: int,
) -> None:
    data = bytearray(archive_of(members))
    for _ in range(damages if rng.random() < 0.5 else 0):
        data[rng.randrange(len(data))] ^= 1 << rng.randrange(8)
    folder = tmp_path_factory.mktemp("archive")
    (folder / "elsewhere").mkdir()
    check_unpacked(bytes(data), folder)


def check_unpacked(data: bytes, folder: Path) -> None:
    try:
        names = unpacked(io.BytesIO(data), folder / "into", ANYTHING)
    except DataError:
        assert [path.name for path in folder.iterdir()] == ["elsewhere"]
        return
    found = list((folder / "into").rglob("*"))
    assert {str(path.relative_to(folder / "into")) for path in found if path.is_file()} == names
    assert all(not path.is_symlink() and (path.is_file() or path.is_dir()) for path in found)
    assert not list((folder / "elsewhere").iterdir())


@pytest.mark.parametrize("form", [tarfile.USTAR_FORMAT, tarfile.GNU_FORMAT, tarfile.PAX_FORMAT])
def test_what_tar_has_written_is_read(tmp_path: Path, form: int) -> None:
    folder = tmp_path / "from"
    names = ["a", "deep/" + "p" * 90, "größe/" + "q" * 60, "empty"]
    if form != tarfile.USTAR_FORMAT:
        names += ["deep/" * 6 + "r" * 200]
    for number, name in enumerate(names):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(b"%d" % number * (number * 700))
    made = io.BytesIO()
    with tarfile.open(fileobj=made, mode="w", format=form) as archive:
        archive.add(folder, ".")
    made.seek(0)
    assert unpacked(made, tmp_path / "into", ANYTHING) == set(names)
    for name in names:
        assert (tmp_path / "into" / name).read_bytes() == (folder / name).read_bytes()


class Slow:
    """Gives an archive in pieces, as a pipe does, and counts what was asked for."""

    def __init__(self, data: bytes) -> None:
        self._data, self.most = data, 0

    def read(self, size: int) -> bytes:
        self.most = max(self.most, size)
        piece, self._data = self._data[: min(size, 97)], self._data[min(size, 97) :]
        return piece


def test_an_archive_comes_in_pieces_and_never_asks_for_what_a_header_claims(tmp_path: Path) -> None:
    whole = Slow(header("a", b"x" * 5000) + END)
    assert unpacked(whole, tmp_path / "into", ANYTHING) == {"a"}
    huge = Expected(admits=lambda name, length: True, max_members=1, max_bytes=1 << 70)
    claims = Slow(header("a", b"x" * 600, size=1 << 32))
    with pytest.raises(DataError, match="broke off"):
        unpacked(claims, tmp_path / "into", huge)
    assert claims.most <= archives.PIECE_BYTES and not (tmp_path / "into").exists()


def test_a_folder_with_a_name_that_no_machine_would_take_is_refused_before_it_is_sent(tmp_path: Path) -> None:
    from gradstream.ext.ssh.archives import FileList

    (tmp_path / "a\nb").write_text("")
    with pytest.raises(ConfigError, match=r"'a\\\\nb', a name that has a control character.*another one"):
        FileList.of(tmp_path)
