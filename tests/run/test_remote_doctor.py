"""`gradstream doctor`: what it finds here, on the way, and at a launcher."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import metadata
from pathlib import Path

import pytest
from click.testing import CliRunner

from gradstream.cli import main
from gradstream.machine.doctor import DoctorResult, look_here
from gradstream.run.remote.address import Address
from gradstream.run.remote.certificate_authority import CertificateAuthority, Invitation
from gradstream.run.remote.join_service import JoinService
from gradstream.run.remote.members import MachineMembers
from gradstream.run.remote.reach import (
    clock_finding,
    look_there,
    version_findings,
)

TOKEN = "a token of sixteen characters or more"
WHOLE_WAY = ["name", "TCP", "TLS", "gRPC", "round trip", "clock"]
MEASURED_BYTES = 2 << 20


@contextmanager
def launcher(authority: CertificateAuthority | None) -> Iterator[Address]:
    members = MachineMembers("here", machines=2, workers_per_machine=1, facts={})
    invitation = Invitation("{}", {})
    made = JoinService(Address("127.0.0.1"), authority, members, invitation, lambda _: None, TOKEN.encode())
    with made:
        yield made.address


def visit(address: Address, **options: str) -> dict[str, DoctorResult]:
    found = look_there(address, **options, num_bytes=MEASURED_BYTES)
    return {finding.what: finding for finding in found}


def test_this_machine(tmp_path: Path) -> None:
    found = {finding.what: finding for finding in look_here(tmp_path / "runs")}
    assert {"machine", "versions", "memory", "disk", "disk speed", "open files"} <= set(found)
    assert "gradstream 0." in found["versions"].text
    assert found["disk speed"].text.endswith("MB/s written and synced")
    assert list((tmp_path / "runs").iterdir()) == []


def test_a_folder_that_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    found = {finding.what: finding for finding in look_here(tmp_path / "file" / "runs")}
    assert found["disk"].state == "failed"
    assert "cannot write at" in found["disk"].text


def test_a_package_that_is_not_installed_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(metadata, "version", lambda name: "1" if name == "grpcio" else missing(name))
    found = {finding.what: finding for finding in look_here(tmp_path)}["versions"]
    assert found.state == "failed"
    assert "not installed: torch, protobuf; python -m pip install gradstream==" in found.text


def missing(name: str) -> str:
    raise metadata.PackageNotFoundError(name)


def test_the_whole_way_with_the_token() -> None:
    authority = CertificateAuthority()
    with launcher(authority) as address:
        found = visit(address, token=TOKEN, fingerprint=authority.fingerprint)
    assert list(found) == [*WHOLE_WAY, "speed", "launcher"]
    assert {finding.state for finding in found.values()} == {"ok"}
    assert "waiting for 1 of 2 machines (here: here)" in found["gRPC"].text
    assert "MB/s to the launcher" in found["speed"].text
    assert "torch" in found["launcher"].text


def test_another_launcher_than_the_one_that_is_meant() -> None:
    with launcher(CertificateAuthority()) as address:
        assert "not checked" in visit(address, token=TOKEN)["TLS"].text
        stranger = visit(address, token=TOKEN, fingerprint=CertificateAuthority().fingerprint)
        assert list(stranger) == ["name", "TCP", "TLS"]
        assert "BAD_CERTIFICATE" in stranger["TLS"].text


def test_plain_text_is_measured_too_and_the_token_does_not_go_over_it() -> None:
    with launcher(None) as address:
        plain = visit(address, token=TOKEN)
    assert "plain text" in plain["TLS"].text
    assert "MB/s" in plain["speed"].text


def test_a_wrong_token_and_none() -> None:
    authority = CertificateAuthority()
    with launcher(authority) as address:
        wrong = visit(address, token=TOKEN + "x", fingerprint=authority.fingerprint)
        assert "BAD_SECRET" in wrong["gRPC"].text
        assert wrong["gRPC"].state == "failed"
        unasked = visit(address)
        assert list(unasked) == ["name", "TCP", "TLS", "gRPC"]
        assert "give --token" in unasked["gRPC"].text
        assert unasked["gRPC"].state == "warning"


def test_it_stops_where_the_way_does() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        free = taken.getsockname()[1]
    found = visit(Address("127.0.0.1", free))
    assert list(found) == ["name", "TCP"]
    assert found["TCP"].state == "failed"
    assert list(visit(Address("no-such-host.invalid", 1))) == ["name"]


@pytest.mark.parametrize(
    ("offset_s", "state", "part"),
    [
        (0.002, "ok", "0.002 s ahead"),
        (-5.0, "ok", "5.000 s behind"),
        (90.0, "warning", "ahead"),
        (-7200.0, "failed", "NTP"),
    ],
)
def test_clocks(offset_s: float, state: str, part: str) -> None:
    found = clock_finding(offset_s)
    assert found.state == state
    assert part in found.text


def test_versions() -> None:
    here = {"gradstream": "0.1.0", "torch": "2.13.0+cpu", "python": "3.11.7"}
    assert list(version_findings(here, {**here, "torch": "2.13.0+cu130"})) == []
    (python,) = version_findings(here, {**here, "python": "3.12.0"})
    assert python.state == "warning"
    (torch,) = version_findings(here, {**here, "torch": "2.6.0"})
    assert torch.state == "failed"
    assert "install the same version" in torch.text


def test_the_command(tmp_path: Path) -> None:
    authority = CertificateAuthority()
    with launcher(authority) as address:
        known = ["--fingerprint", authority.fingerprint, "--token", TOKEN, "--folder", str(tmp_path)]
        result = CliRunner().invoke(main, ["doctor", str(address), *known])
    assert result.exit_code == 0, result.output
    assert "round trip" in result.stdout
    failed = CliRunner().invoke(main, ["doctor", str(address), "--folder", str(tmp_path)])
    assert failed.exit_code == 3
    assert "✗ TCP" in failed.stdout
