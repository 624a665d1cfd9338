"""Enrolment: who gets in, who is refused and with which word, and a whole run of two machines."""

from __future__ import annotations

import asyncio
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes

import gradstream as gs
from gradstream.data.arrays import checksum_of
from gradstream.errors import GradstreamError, Interrupted, exit_code
from gradstream.job.files import load_job
from gradstream.run.planning import plan_run
from gradstream.run.remote import join as joining_module
from gradstream.run.remote.address import Address, files_of, new_token
from gradstream.run.remote.certificate_authority import CertificateAuthority, Invitation
from gradstream.run.remote.join import Entrance, Joining, join
from gradstream.run.remote.join_service import JoinService
from gradstream.run.remote.listening import Listening, workers_each
from gradstream.run.remote.members import REPLACED, MachineMembers, Seat, difference, facts_of, file_hash
from gradstream.run.remote.reach import reach
from gradstream.wire import v1

LINEAR = """
import os
import numpy as np
import gradstream as gs

WEIGHTS = np.array([1, 2, 3], np.float32)

def outputs(parameters, inputs):
    return inputs @ parameters["w"]

def gradients(parameters, inputs, targets):
    error = outputs(parameters, inputs) - targets
    return float((error**2).mean()), {"w": (2 * inputs.T @ error / len(error)).astype(np.float32)}

def job():
    inputs = np.random.default_rng(int(os.environ.get("SEED", "0"))).normal(size=(400, 3)).astype(np.float32)
    model = gs.from_functions(lambda seed: {"w": np.zeros(3, np.float32)}, outputs, gradients)
    data = gs.from_arrays(inputs, inputs @ WEIGHTS, inputs, inputs @ WEIGHTS)
    return gs.Job(model, data, batch_size=20, epochs=10, optimizer=gs.optim.SGD(lr=0.1), chunk_elems=64)
"""
TOKEN = "a token of sixteen characters or more"
SOURCE = str(Path(gs.__file__).resolve().parents[1])
LOOPBACK = Address("127.0.0.1")


@pytest.fixture
def linear(tmp_path: Path) -> Path:
    path = tmp_path / "linear.py"
    path.write_text(LINEAR)
    return path


def members(machines: int = 3, per_machine: int = 1, **options: Any) -> MachineMembers:
    return MachineMembers("here", machines=machines, workers_per_machine=per_machine, facts={}, **options)


def ask(name: str = "there", **facts: str) -> v1.Enrol:
    return v1.Enrol(machine=name, facts=facts, address="192.0.2.7")


# ---- decisions --------------------------------------------------------------------------


def test_machines_get_workers_in_turn_and_names_of_their_own() -> None:
    state = members(machines=4, per_machine=2)
    assert state.nodes_of(0) == ("worker-0", "worker-1")
    seats = [state.enrol(ask(name)) for name in ("b", "b", "here")]
    assert seats == [
        Seat("b", "192.0.2.7", ("worker-2", "worker-3")),
        Seat("b-2", "192.0.2.7", ("worker-4", "worker-5")),
        Seat("here-2", "192.0.2.7", ("worker-6", "worker-7")),
    ]
    assert state.missing == 0
    assert state.state == "all 4 machines are here: here, b, b-2, here-2"
    late = state.enrol(ask("c"))
    assert isinstance(late, v1.Refuse)
    assert late.code == v1.NOT_MEMBER


@pytest.mark.parametrize(
    ("shards", "servers_on", "nodes"),
    [
        (3, "all", [("shard-0", "worker-0"), ("shard-1", "worker-1"), ("shard-2", "worker-2")]),
        (4, "all", [("shard-0", "shard-3", "worker-0"), ("shard-1", "worker-1"), ("shard-2", "worker-2")]),
        (1, "all", [("shard-0", "worker-0"), ("worker-1",), ("worker-2",)]),
        (0, "all", [("worker-0",), ("worker-1",), ("worker-2",)]),
        (2, "launcher", [("shard-0", "shard-1", "worker-0"), ("worker-1",), ("worker-2",)]),
    ],
)
def test_shard_i_is_on_machine_i_mod_n(shards: int, servers_on: Any, nodes: list[tuple[str, ...]]) -> None:
    state = members(shards=shards, servers_on=servers_on)
    assert [state.nodes_of(index) for index in range(3)] == nodes
    seats = [state.enrol(ask(name)) for name in ("b", "c")]
    assert [seat.nodes for seat in seats if isinstance(seat, Seat)] == nodes[1:]
    for index, name in enumerate(("here", "b", "c")):
        found = {seat.machine for node in nodes[index] if (seat := state.seat_of(node))}
        assert found == {name}
    assert state.seat_of("worker-9") is None


@pytest.mark.parametrize(
    ("options", "servers_on", "servers"),
    [
        ({}, "all", 3),
        ({}, "launcher", None),
        ({"servers": 2}, "all", 2),
        ({"strategy": "allreduce"}, "all", None),
        ({"phases": [gs.Phase(epochs=1, strategy="allreduce"), gs.Phase(epochs=1)]}, "all", 3),
        ({"phases": [gs.Phase(epochs=1, strategy="allreduce"), gs.Phase(epochs=1, servers=1)]}, "all", None),
    ],
)
def test_a_shard_on_each_machine_is_the_default(
    linear: Path, options: dict[str, Any], servers_on: Any, servers: int | None
) -> None:
    options = {**options, "epochs": None} if "phases" in options else options
    job = replace(load_job(str(linear)), **options)
    listening = Listening(address=LOOPBACK, machines=3, servers_on=servers_on)
    assert listening.spread_servers(job).servers == servers


@pytest.mark.parametrize(
    ("options", "acknowledge", "promise"),
    [
        ({"strategy": "downpour"}, "replicated", "any machine but this one may be lost: each shard sends"),
        ({"strategy": "downpour", "acknowledge": "applied"}, "applied", "takes its shard along"),
        ({"strategy": "downpour", "servers": 1}, None, "any machine but this one may be lost"),
        ({"strategy": "dc-asgd"}, None, "takes its shard along"),
        ({"strategy": "synchronous", "optimizer": "lamb"}, None, "takes its shard along"),
        ({"strategy": "allreduce"}, None, "any machine but this one may be lost"),
        ({"strategy_options": {"backup": 1}}, None, "a machine that is lost ends the run"),
        (  # one of its phases survives, and the other does not
            {
                "epochs": None,
                "phases": [
                    gs.Phase(epochs=1),
                    gs.Phase(epochs=1, strategy="synchronous", strategy_options={"backup": 1}),
                ],
            },
            None,
            "a machine that is lost ends the run",
        ),
    ],
)
def test_shards_on_several_machines_have_backups_where_they_can(
    linear: Path, options: dict[str, Any], acknowledge: str | None, promise: str
) -> None:
    job = replace(load_job(str(linear)), workers=3, **options)
    listening = Listening(address=LOOPBACK, machines=3)
    spread = listening.spread_servers(job)
    assert spread.acknowledge == acknowledge
    said = listening.promise(plan_run(spread, "a run"))
    assert said == promise if promise.endswith("lost") else promise in said
    alone = Listening(address=LOOPBACK, machines=1)
    assert alone.spread_servers(job).acknowledge == options.get("acknowledge")


def test_ports_behind_the_one_of_listen() -> None:
    names = ("coordinator", "shard-0", "shard-3", "worker-1")
    fixed = Listening(address=LOOPBACK.at(4000), machines=2)
    assert [fixed.port_of(name) for name in names] == [4001, 4002, 4005, 0]
    free = Listening(address=LOOPBACK, machines=2)
    assert [free.port_of(name) for name in names] == [0, 0, 0, 0]


def test_the_place_of_a_machine_that_left_before_training_is_free() -> None:
    state = members(machines=3)
    first, second = state.enrol(ask("a")), state.enrol(ask("b"))
    assert isinstance(first, Seat)
    assert isinstance(second, Seat)
    state.left(first)
    assert state.state == "waiting for 1 of 3 machines (here: here, b)"
    third = state.enrol(ask("c"))
    assert isinstance(third, Seat)
    assert third.nodes == first.nodes


@pytest.mark.parametrize("rescues", [False, True])
def test_shards_of_a_lost_machine_go_to_the_launchers(rescues: bool) -> None:
    losses = replace(REPLACED, acknowledge="replicated" if rescues else "applied")
    state = members(machines=2, shards=4, losses=losses)
    seat = state.enrol(ask("b"))
    assert isinstance(seat, Seat)
    state.begun = True
    state.left(seat)
    shards = ("shard-1", "shard-3")
    assert [state.rescue(name) for name in (*shards, *shards)] == [rescues, rescues, False, False]
    assert not state.rescue("worker-1")
    assert not state.rescue("shard-0")
    again = state.enrol(ask("b"))
    if not rescues:
        assert isinstance(again, v1.Refuse)
        assert state.seat_of("shard-1") == seat
        return
    assert state.nodes_of(0) == ("shard-0", "shard-2", *shards, "worker-0")
    assert again == replace(seat, nodes=("worker-1",))
    for rank in range(4):
        assert state.seat_of(f"shard-{rank}") == Seat("here", "", state.nodes_of(0))


def seated(machines: int = 3, **options: Any) -> tuple[MachineMembers, list[Seat]]:
    """A run that trains, and the machines that have joined it: b, c, ..."""
    state = members(machines, **options)
    seats = [state.enrol(ask(chr(ord("a") + index))) for index in range(1, machines)]
    state.begun = True
    return state, [seat for seat in seats if isinstance(seat, Seat)]


def test_a_machine_takes_the_place_of_one_that_was_lost_while_others_train() -> None:
    """Its own, where it had one; so its name and its workers are what they were."""
    state, (b, c) = seated()
    assert isinstance(state.enrol(ask("d")), v1.Refuse)
    for seat in (b, c):
        assert state.is_there(seat.nodes[0])
        state.left(seat)
        assert not state.is_there(seat.nodes[0])
    assert state.state == "training on 1 machine (here: here)"
    assert state.seat_of("worker-1") == b  # it was there, as messages say
    assert state.enrol(ask("c")) == c
    assert state.is_there("worker-2") and not state.is_there("worker-1")
    assert state.enrol(ask("d")) == replace(b, machine="d")
    assert state.seat_of("worker-1") == replace(b, machine="d")
    refused = state.enrol(ask("b"))
    assert isinstance(refused, v1.Refuse)
    assert refused.message.startswith(f"no machine can join now: {REPLACED.stays}")


def test_training_begins_with_the_machines_that_are_here_and_the_others_may_come() -> None:
    state = members(machines=4, servers_on="launcher")
    b = state.enrol(ask("b"))
    assert isinstance(b, Seat)
    assert state.here == 2
    assert state.begin() == ["worker-2", "worker-3"]
    assert [state.is_there(f"worker-{rank}") for rank in range(4)] == [True, True, False, False]
    c = state.enrol(ask("c"))
    assert isinstance(c, Seat)
    assert c.nodes == ("worker-2",)
    state.left(c)
    assert state.enrol(ask("c")) == c


def test_nobody_takes_the_place_of_a_shard_or_where_the_run_forbids_it() -> None:
    state, (b, c) = seated(shards=2)  # shard-1 is on b
    state.left(b)
    assert isinstance(state.enrol(ask("b")), v1.Refuse)
    state.left(c)
    assert state.enrol(ask("b")) == replace(c, machine="b")
    state, (b,) = seated(2, losses=replace(REPLACED, obstacle="the training loop is the user's own"))
    state.left(b)
    refused = state.enrol(ask("b"))
    assert isinstance(refused, v1.Refuse) and refused.code == v1.NOT_MEMBER
    assert refused.message.endswith("cannot be replaced: the training loop is the user's own")


@pytest.mark.parametrize(
    ("fact", "mine", "code"),
    [
        ("gradstream", "0.0.1", v1.BAD_VERSION),
        ("torch", "1.0", v1.BAD_VERSION),
        ("job file", "linear.py sha256:00", v1.BAD_JOB_FILE),
        ("job function", "other", v1.BAD_JOB_FILE),
        ("data set", "other", v1.BAD_DATA),
        ("data samples", "1 and 0 held out", v1.BAD_DATA),
        ("data checksum", "00", v1.BAD_DATA),
    ],
)
def test_a_difference_is_named_with_both_sides(linear: Path, fact: str, mine: str, code: int) -> None:
    facts = facts_of(load_job(str(linear)))
    assert difference(facts, facts, "there") is None
    found = difference(facts, {**facts, fact: mine}, "there")
    assert found is not None
    assert found.code == code
    assert f"{fact} differs: there has {mine}, the launcher has {facts[fact]}." in found.message


def test_the_same_file_under_another_name_is_the_same(linear: Path) -> None:
    facts = facts_of(load_job(str(linear)))
    renamed = linear.rename(linear.with_name("renamed.py"))
    assert difference(facts, facts_of(load_job(str(renamed))), "there") is None


def test_checksums_see_bytes_shapes_and_types_of_data() -> None:
    rng = np.random.default_rng(0)
    array = rng.normal(size=(1000, 3)).astype("float32")
    seen = {checksum_of([array]), checksum_of([array.reshape(3, 1000)]), checksum_of([array], "more")}
    seen |= {checksum_of([array.view("int32")]), checksum_of([array.T])}
    changed = array.copy()
    changed[17, 2] += 1
    seen.add(checksum_of([changed]))
    assert len(seen) == 6
    assert (
        checksum_of([array.astype(">f4")]) == checksum_of([np.asfortranarray(array)]) == checksum_of([array])
    )
    data = gs.from_arrays(array, array)
    assert data.checksum == gs.from_arrays(array.copy(), array.copy()).checksum
    large = np.zeros((70 << 20, 1), np.uint8)
    before = checksum_of([large])
    large[-1] = 1
    assert checksum_of([large]) != before


@pytest.mark.parametrize(
    ("text", "made"),
    [
        ("10.0.0.1:4000", Address("10.0.0.1", 4000)),
        ("node-a", Address("node-a", 0)),
        ("[fd00::1]:4000", Address("fd00::1", 4000)),
        ("[fd00::1]", Address("fd00::1", 0)),
    ],
)
def test_addresses(text: str, made: Address) -> None:
    assert Address.parse(text, "--listen") == made
    assert Address.parse(str(made), "--listen") == made


@pytest.mark.parametrize(
    "text", ["", ":4000", "10.0.0.1:", "10.0.0.1:http", "a:70000", "fd00::1", "[::1]4000"]
)
def test_addresses_that_are_none(text: str) -> None:
    with pytest.raises(gs.errors.ConfigError, match=r"--listen .* expected host:port"):
        Address.parse(text, "--listen")


@pytest.mark.parametrize(
    ("numbers", "each"), [((4, None, None), 1), ((4, 3, None), 3), ((4, None, 8), 2), ((4, 2, 8), 2)]
)
def test_workers_of_each_machine(numbers: tuple[int, int | None, int | None], each: int) -> None:
    assert workers_each(*numbers) == each


@pytest.mark.parametrize("numbers", [(4, None, 6), (4, 1, 8), (4, 3, 4)])
def test_workers_that_do_not_divide(numbers: tuple[int, int | None, int]) -> None:
    with pytest.raises(gs.errors.ConfigError, match=r"--workers . counts the workers of all machines"):
        workers_each(*numbers)


@pytest.mark.parametrize(
    ("options", "part"),
    [
        ({"address": Address("0.0.0.0")}, "name the one address"),
        ({"address": Address("::")}, "name the one address"),
        ({"address": "0.0.0.0:4000"}, "name the one address"),
        ({"machines": 0}, "wait=0"),
        ({"workers_per_machine": 2}, "2 machines with 2 workers each have 4"),
        ({"servers_on": "each"}, "servers_on='each': expected one of 'all', 'launcher'"),
        ({"least": 3}, "least=3: expected a number of machines from 1 to 2"),
        ({"least": 1}, "least=1 with servers_on='all': a machine that joins later cannot have a shard"),
    ],
)
def test_what_cannot_be_listened_for(linear: Path, options: dict[str, Any], part: str) -> None:
    listening = replace(Listening(address=LOOPBACK, machines=2), **options)
    with pytest.raises(gs.errors.ConfigError, match=re.escape(part)):
        gs.train(load_job(str(linear)), listen=listening, workers=2)


def test_an_address_as_text_is_one_and_anything_else_is_refused() -> None:
    assert Listening(address="127.0.0.1:4000", machines=2).port_of("coordinator") == 4001
    for wrong in ("1.2.3.4:5:6", ("127.0.0.1", 4000), None):
        with pytest.raises(gs.errors.ConfigError, match=r"10\.0\.0\.1:4000.* for example"):
            Listening(address=wrong, machines=2)  # type: ignore[arg-type]  # as a user's script may


@pytest.mark.parametrize("own", ["127.0.1.1", "127.0.0.1"])
def test_a_name_that_leads_to_loopback_is_refused_and_loopback_itself_is_not(
    own: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As Debian's /etc/hosts has the name of the machine."""
    found = [(socket.AF_INET, socket.SOCK_STREAM, 6, "", (own, 0))]
    monkeypatch.setattr(socket, "getaddrinfo", lambda *_, **options: found)
    with pytest.raises(gs.errors.ConfigError, match=rf"leads to {own} here.*`ip address` shows it"):
        Address("node-a", 4000).check_listen()
    for asked in ("localhost", "localhost.localdomain", "127.0.0.1", "127.0.1.1", "::1"):
        Address(asked).check_listen()


def test_workers_that_share_one_vector_are_refused_before_other_machines_are_waited_for(linear: Path) -> None:
    listening = Listening(address=LOOPBACK, machines=2)
    with pytest.raises(
        gs.errors.ConfigError, match="wait=2 machines with strategy=Hogwild: its workers share one vector"
    ):
        gs.train(load_job(str(linear)), listen=listening, workers=2, strategy="hogwild")


@pytest.mark.parametrize(
    ("phase", "says"),
    [
        (gs.Phase(epochs=1, strategy="hogwild"), "strategy=Hogwild: its workers share one vector in memory"),
        (gs.Phase(epochs=1, workers=3), "workers=3, but 2 machines with 1 workers each have 2"),
    ],
)
def test_a_phase_that_the_machines_cannot_have_is_refused(linear: Path, phase: gs.Phase, says: str) -> None:
    job = replace(load_job(str(linear)), epochs=None, phases=[gs.Phase(epochs=1), phase])
    with pytest.raises(gs.errors.ConfigError, match=says):
        gs.train(job, listen=Listening(address=LOOPBACK, machines=2))
    alone = replace(
        job, workers=2, phases=[gs.Phase(epochs=1, workers=1)]
    )  # one machine would have nothing to do
    with pytest.raises(gs.errors.ConfigError, match="workers=1, but 2 machines"):
        Listening(address=LOOPBACK, machines=2).check(alone, earlier=False)


def test_files_of_the_user_are_found_beside_each_machines_job_file(tmp_path: Path) -> None:
    here, there = tmp_path / "here", tmp_path / "there"
    for folder, job_file in ((here, "job.py"), (there, "renamed.py")):
        folder.mkdir()
        (folder / job_file).write_text(LINEAR)
        (folder / "rules.py").write_text("# the user's")
    rules, job_file = f"{here}/rules.py", f"{here}/job.py"
    schedule: dict[str, Any] = {
        "class": "gradstream.optim.sgd:SGD",
        "fields": {"lr": {"function": f"{rules}:falls"}},
    }
    phase = {"strategy": {"class": f"{job_file}:Mine", "fields": {}}, "optimizer": schedule}
    spec: dict[str, Any] = {"strategy": {"class": ""}, "optimizer": {}}
    spec["plain"] = {
        "argv": ["job.py"],
        "metrics": {"class": f"{rules}:class_of", "m": ""},
        "phases": [phase],
    }
    files = {path.name: file_hash(path) for path in files_of(spec)}
    assert files.keys() == {"rules.py", "job.py"}
    job = replace(load_job(f"{there}/renamed.py"), spec=f"{there}/renamed.py")
    entrance = Entrance(LOOPBACK, job, "b", TOKEN, None)
    try:
        made = entrance.spec(v1.Grant(spec=json.dumps(spec), files=files), there)
        (there / "rules.py").write_text("# changed")
        with pytest.raises(gs.errors.JoinRefusedError, match=r"needs rules\.py with SHA-256"):
            entrance.spec(v1.Grant(spec=json.dumps(spec), files=files), there)
    finally:
        entrance.runtime.close()
    (moved,) = made["plain"]["phases"]
    assert moved["strategy"]["class"] == f"{there}/renamed.py:Mine"
    assert moved["optimizer"]["fields"]["lr"] == {"function": f"{there}/rules.py:falls"}
    assert moved["optimizer"]["class"] == schedule["class"]
    assert made["plain"]["metrics"] == {"class": f"{there}/rules.py:class_of", "m": ""}


def test_a_place_that_cannot_be_listened_on_leaves_no_run_directory(
    linear: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """192.0.2.1 is in an address block that no machine has (RFC 5737)."""
    monkeypatch.chdir(linear.parent)
    job = load_job(str(linear))
    with pytest.raises(gs.errors.ConfigError, match=r"cannot listen on 192\.0\.2\.1:0 \(.+\): name an"):
        gs.train(job, listen="192.0.2.1", workers=2)
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(gs.errors.ConfigError, match=f"cannot listen on 127.0.0.1:{port}"):
            gs.train(job, listen=f"127.0.0.1:{port}", workers=2)
    assert not (linear.parent / "runs").exists()


def test_machines_of_a_run_that_was_stopped_are_told_the_status_that_says_so() -> None:
    assert exit_code(Interrupted(None, "checkpoints/step-00000009")) == 75


def test_tokens() -> None:
    assert len(new_token()) == 32
    assert new_token() != new_token()
    assert new_token(TOKEN) == TOKEN
    with pytest.raises(gs.errors.ConfigError, match="at least 16"):
        new_token("short")


# ---- over the wire ----------------------------------------------------------------------


class Launcher:
    """A join service without a run behind it."""

    def __init__(self, job: Path, *, insecure: bool = False) -> None:
        self.heard: list[dict[str, Any]] = []
        self.authority = None if insecure else CertificateAuthority()
        facts = facts_of(load_job(str(job)))
        self.members = MachineMembers("here", machines=2, workers_per_machine=1, facts=facts)
        self.left = threading.Event()
        self.join_service = JoinService(
            LOOPBACK, self.authority, self.members, Invitation("{}", {}), self._on_message, TOKEN.encode()
        )

    def _on_message(self, message: dict[str, Any]) -> None:
        self.heard.append(message)
        if message.get("state") == "left":
            self.left.set()

    def joining(self, job: Path, **options: Any) -> Joining:
        fingerprint = self.authority.fingerprint if self.authority else None
        chosen = {"fingerprint": fingerprint, "token": TOKEN, "insecure": self.authority is None, **options}
        return Joining(address=self.join_service.address, job=str(job), **chosen)


@pytest.fixture
def launcher(linear: Path) -> Iterator[Launcher]:
    made = Launcher(linear)
    with made.join_service:
        yield made


def refusal(joining: Joining) -> str:
    with pytest.raises(GradstreamError) as caught:
        join(joining, lambda _: None)
    assert TOKEN not in str(caught.value)
    # Wrong usage, nothing was started; or nobody was there.
    assert exit_code(caught.value) == (4 if isinstance(caught.value, gs.errors.PeerLostError) else 2)
    return str(caught.value)


def test_each_refusal_has_its_word(launcher: Launcher, linear: Path, tmp_path: Path) -> None:
    assert launcher.authority is not None
    other = tmp_path / "mine" / "linear.py"
    other.parent.mkdir()
    other.write_text(LINEAR + "\n# changed\n")
    wrong_file = refusal(launcher.joining(other))
    assert "refused (BAD_JOB_FILE): job file differs" in wrong_file
    assert len(set(re.findall(r"sha256:\w{64}", wrong_file))) == 2
    wrong_certificate = refusal(launcher.joining(linear, fingerprint=CertificateAuthority().fingerprint))
    assert "refused (BAD_CERTIFICATE)" in wrong_certificate
    assert launcher.authority.fingerprint in wrong_certificate
    assert "refused (TLS)" in refusal(launcher.joining(linear, insecure=True))
    assert "If the launcher has printed this fingerprint" in refusal(
        launcher.joining(linear, fingerprint=None)
    )
    assert launcher.members.missing == 1
    assert [entry["state"] for entry in launcher.heard[:1]] == ["refused"]  # the next one in a second
    assert TOKEN not in str(launcher.heard)


@pytest.mark.parametrize("token", [TOKEN[:-1], TOKEN + "x", TOKEN.upper()])
@pytest.mark.parametrize("insecure", [False, True], ids=["TLS", "plain text"])
def test_a_wrong_token_is_refused_before_anything_else(linear: Path, token: str, insecure: bool) -> None:
    """Nothing is said about the job, and the launcher hears of a stranger without a name."""
    made = Launcher(linear, insecure=insecure)
    with made.join_service:
        said = refusal(made.joining(linear, token=token))
    assert "refused (BAD_SECRET): the token is not this run's: copy the line" in said
    (heard,) = [entry for entry in made.heard if "insecure" not in entry]
    assert (heard["machine"], heard["state"]) == ("a machine", "refused")
    assert heard["reason"] == "it has not proved that it knows the token"
    assert made.members.missing == 1


def test_other_data_are_refused(launcher: Launcher, linear: Path, tmp_path: Path) -> None:
    """The same file reads data that differ: of another seed, as its environment says."""
    made = Launcher(linear)
    with made.join_service, pytest.MonkeyPatch.context() as patch:
        patch.setenv("SEED", "1")
        assert "refused (BAD_DATA): data checksum differs" in refusal(made.joining(linear))


def test_a_lost_worker_is_started_again_under_a_new_certificate_and_in_the_time_of_the_run(
    linear: Path,
) -> None:
    """Its machine is told so by the stream by which it has joined; nobody is told where there is none."""

    async def take_part(reached: bytes | None) -> None:
        job = load_job(str(linear))
        async with Entrance(service.address, job, "there", TOKEN, reached) as entrance:
            (granted,) = (await entrance.enrol()).nodes
            service.go(4001)
            assert (await entrance.order()).go == v1.Go(port=4001)
            before_ns = entrance.zero_ns
            assert before_ns is None
            zero_ns.append(time.monotonic_ns())
            service.start_again("worker-7")
            service.start_again("worker-1")
            go = (await entrance.order()).go
            assert (go.port, go.again.name) == (4001, "worker-1")
            old, new = (x509.load_pem_x509_certificate(one.certificate) for one in (granted, go.again))
            assert old.subject == new.subject and old.public_key() == new.public_key()
            assert old.fingerprint(hashes.SHA256()) != new.fingerprint(hashes.SHA256())
            assert entrance.zero_ns is not None and zero_ns[0] <= entrance.zero_ns <= time.monotonic_ns()

    made, zero_ns = Launcher(linear), list[int]()
    service = made.join_service
    service._invitation = replace(service._invitation, zero_ns=lambda: next(iter(zero_ns), None))
    with service:
        asyncio.run(take_part(made.authority.certificate if made.authority else None))


@pytest.mark.parametrize("says", [True, False])
def test_who_waits_for_orders_is_heard_and_who_says_nothing_has_left(
    says: bool, linear: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As `gradstream join` does, and each process of torchrun."""
    made, deadlines = Launcher(linear), gs.Deadlines(lease_s=0.4)
    service = made.join_service
    service._invitation = replace(service._invitation, deadlines=deadlines)

    async def take_part() -> bool:
        job = replace(load_job(str(linear)), deadlines=deadlines)
        certificate = made.authority.certificate if made.authority else None
        async with Entrance(service.address, job, "there", TOKEN, certificate) as entrance:
            await entrance.enrol()
            service.go(4001)
            await entrance.order()
            if not says:
                monkeypatch.setattr(entrance, "_beat", lambda stream: entrance.runtime.sleep(60.0))
            with pytest.raises(gs.errors.PeerLostError if not says else asyncio.TimeoutError):
                await asyncio.wait_for(entrance.order(), 3.0)  # 2 * lease_s and more
            return made.left.is_set()

    with service:
        assert asyncio.run(take_part()) == (not says)


def test_tls_where_plain_text_is_spoken(linear: Path) -> None:
    made = Launcher(linear, insecure=True)
    with made.join_service:
        fingerprint = CertificateAuthority().fingerprint
        assert "refused (PLAIN_TEXT)" in refusal(
            made.joining(linear, insecure=False, fingerprint=fingerprint)
        )
    assert {"insecure": str(made.join_service.address)} in made.heard  # it says so


@pytest.mark.parametrize("refused", [True, False])
def test_who_has_lost_its_launcher_says_that_it_comes_back_only_where_it_tries(
    refused: bool, linear: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def reach(*_: Any, **options: Any) -> None:
        error = gs.errors.PeerLostError("launcher", "cannot be reached")
        error.__context__ = ConnectionRefusedError() if refused else OSError()
        raise error

    def never(again: bool) -> int:
        raise AssertionError("it was not reached")

    monkeypatch.setattr(joining_module, "reach", reach)
    monkeypatch.setattr(joining_module, "AGAIN_S", 0.01)
    cut_off, notes = joining_module._CutOffError(), list[str]()
    cut_off.__cause__ = gs.errors.PeerLostError("launcher", "the connection was lost")
    joining = Joining(address=LOOPBACK.at(4000), job=str(linear), token=TOKEN)
    with pytest.raises(gs.errors.PeerLostError, match="the connection was lost"):
        joining_module._come_back(never, joining, cut_off, 0.05, notes.append)
    assert len(notes) == 2 and notes[0].endswith("the nodes here have ended")
    says = (
        "nobody listens at 127.0.0.1:4000 any more" if refused else "trying to come back, for 0.05 s at most"
    )
    assert notes[1].startswith(says)


def test_what_is_not_there_is_named(linear: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        free = taken.getsockname()[1]
    joining = Joining(address=LOOPBACK.at(free), job=str(linear), token=TOKEN)
    assert "no program listens at this port" in refusal(joining)
    nowhere = replace(joining, address=Address("no-such-host.invalid", 4000))
    assert "no machine of this name is known here" in refusal(nowhere)


def test_a_port_of_somebody_else() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        server.settimeout(20)

        def answer() -> None:
            for _ in range(3):  # to connect, for TLS, for plain text
                connection, _ = server.accept()
                with connection:
                    connection.recv(100)
                    connection.sendall(b"SSH-2.0-Other\r\n")

        thread = threading.Thread(target=answer)
        thread.start()
        where = LOOPBACK.at(server.getsockname()[1])
        with pytest.raises(gs.errors.RefusedError, match="NOT_GRADSTREAM"):
            reach(where, fingerprint=None, insecure=False)
        thread.join()


def test_a_port_that_is_in_use(linear: Path) -> None:
    made = Launcher(linear)
    with socket.create_server(("127.0.0.1", 0)) as taken:
        made.join_service.address = LOOPBACK.at(taken.getsockname()[1])
        with pytest.raises(gs.errors.ConfigError, match="in use"), made.join_service:
            raise AssertionError


# ---- whole runs -------------------------------------------------------------------------


class Machine:
    """A process of the command line, and what it prints."""

    def __init__(self, folder: Path, *arguments: str) -> None:
        folder.mkdir(exist_ok=True)
        self.process = subprocess.Popen(
            [sys.executable, "-m", "gradstream", *arguments],
            cwd=folder,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            env={**os.environ, "COLUMNS": "200", "PYTHONPATH": SOURCE},
        )

    def line(self, pattern: str) -> re.Match[str]:
        """The first line from here on in which the pattern is found."""
        assert self.process.stdout is not None
        seen = []
        for line in self.process.stdout:
            seen.append(line)
            if found := re.search(pattern, line):
                return found
        raise AssertionError("".join(seen))

    def end(self) -> tuple[int, str]:
        assert self.process.stdout is not None
        said = self.process.stdout.read()  # not communicate(): that loses what `line` has read ahead
        return self.process.wait(), said


@pytest.fixture
def machine(tmp_path: Path) -> Iterator[Callable[..., Machine]]:
    """Starts commands, each in a folder with its own copy of the job file; leaves none behind."""
    made: list[Machine] = []

    def start(name: str, *arguments: str, addition: str = "") -> Machine:
        folder = tmp_path / name
        folder.mkdir(exist_ok=True)
        (folder / "linear.py").write_text(LINEAR + addition)
        made.append(Machine(folder, *arguments))
        return made[-1]

    yield start
    for entry in made:
        entry.process.kill()
        entry.end()


def test_two_machines_by_the_printed_line(machine: Callable[..., Machine], tmp_path: Path) -> None:
    asked = "import sys\nassert sys.argv[1:] == ['--hidden', '64'], sys.argv\n"
    listen = ("--listen", "127.0.0.1", "--wait", "2", "--run-dir", "run", "--", "--hidden", "64")
    launcher = machine("a", "train", "linear.py", *listen, addition=asked)
    words = launcher.line(r"gradstream join (.*)")[1].split()
    token = words[words.index("--token") + 1]
    joined = machine("b", "join", "--name", "b", "--run-dir", "run", *words, addition=asked)
    status, said = joined.end()
    assert status == 0, said
    assert "in as b, with shard-1, worker-1" in said
    assert "the run has finished" in said
    status, said = launcher.end()
    assert status == 0, said
    assert "machine b (127.0.0.1) has joined with shard-1, worker-1" in said
    assert "2/2 workers on 2 machines" in said
    run = gs.Run.load(tmp_path / "a" / "run")
    np.testing.assert_allclose(run.parameters["w"], [1, 2, 3], atol=0.05)
    assert [e["who"] for e in run.events if e["event"] == "machine"] == ["b"]
    for path in (*(tmp_path / "a" / "run").rglob("*"), *(tmp_path / "b" / "run").rglob("*")):
        assert path.is_dir() or token.encode() not in path.read_bytes(), path


def test_machines_that_leave_or_are_left_before_it_begins(machine: Callable[..., Machine]) -> None:
    launcher = machine("a", "train", "linear.py", "--listen", "127.0.0.1", "--wait", "3")
    words = launcher.line(r"gradstream (join .*)")[1].split()
    first = machine("b", *words, "--name", "b")
    launcher.line("machine b .* has joined with shard-1, worker-1")
    first.process.send_signal(signal.SIGINT)
    assert first.end()[0] == 130
    launcher.line("machine b .* has left")
    second = machine("c", *words, "--name", "c")  # takes its place
    launcher.line("machine c .* has joined with shard-1, worker-1")
    launcher.process.kill()
    status, said = second.end()
    assert status == 4, said
    assert "launcher: is gone, or cannot be reached" in said


def test_a_machine_learns_why_the_run_failed(machine: Callable[..., Machine]) -> None:
    raises = "\ndef outputs(p, x):\n    raise RuntimeError('on purpose')\n"
    arguments = ("train", "linear.py", "--listen", "127.0.0.1", "--wait", "2", "--insecure")
    launcher = machine("a", *arguments, addition=raises)
    words = launcher.line(r"gradstream (join .* --insecure)")[1].split()  # in plain text: it says so
    joined = machine("b", *words, addition=raises)
    status, said = launcher.end()
    assert status == 1, said
    assert "WARNING: --insecure" in said
    status, said = joined.end()
    assert status == 1
    assert "the run has ended" in said
    assert "on purpose" in said


# ---- shards on every machine ------------------------------------------------------------

WIDE = """
import time
from pathlib import Path

WEIGHTS = np.linspace(-1, 1, 640).astype(np.float32)
CALLS = 0

def gradients(parameters, inputs, targets):
    global CALLS
    CALLS += 1
    if CALLS >= 40 and Path("stops").exists():
        if any(Path("run/checkpoints").glob("step-*")):
            raise RuntimeError("on purpose")
        time.sleep(0.2)  # and goes on: a checkpoint waits for the end of every round that has begun
    error = outputs(parameters, inputs) - targets
    return float((error**2).mean()), {"w": (2 * inputs.T @ error / len(error)).astype(np.float32)}

def job():
    inputs = np.random.default_rng(0).normal(size=(400, 640)).astype(np.float32)
    model = gs.from_functions(lambda seed: {"w": np.zeros(640, np.float32)}, outputs, gradients)
    data = gs.from_arrays(inputs, inputs @ WEIGHTS, inputs, inputs @ WEIGHTS)
    momentum = gs.optim.Momentum(lr=1e-4)
    return gs.Job(model, data, batch_size=20, epochs=10, optimizer=momentum, chunk_elems=64,
                  checkpoint_every=20)
"""
"""Ten chunks with a momentum each, 100 rounds of two workers; a file "stops" ends it behind a checkpoint."""

TWO = ("--listen", "127.0.0.1", "--wait", "2")
Start = Callable[..., Machine]


def on_two(machine: Start, name: str, *arguments: str) -> tuple[tuple[int, str], tuple[int, str]]:
    """A run on two machines: what the launcher's command and the joined one have ended with."""
    launcher = machine(name, *arguments, *TWO, addition=WIDE)
    words = launcher.line(r"gradstream (join .*)")[1].split()
    joined = machine(f"{name}-b", *words, "--name", "b", "--run-dir", "run", addition=WIDE)
    return launcher.end(), joined.end()


def parameters_of(folder: Path) -> bytes:
    return bytes(gs.Run.load(folder / "run").parameters["w"].tobytes())


def test_where_shards_are_changes_no_bit_and_checkpoints_are_made(machine: Start, tmp_path: Path) -> None:
    """Also where the run fails, and goes on from its checkpoint on both machines, or on the first alone."""
    train = ("train", "linear.py", "--strategy", "synchronous", "--run-dir", "run")
    together = on_two(machine, "together", *train, "--servers-on", "launcher")
    assert [status for status, _ in together] == [0, 0], together
    expected = parameters_of(tmp_path / "together")

    (tmp_path / "apart").mkdir()
    (tmp_path / "apart" / "stops").touch()
    failed = on_two(machine, "apart", *train)
    assert [status for status, _ in failed] == [1, 1], failed
    assert "on purpose" in failed[0][1]
    assert "with shard-1, worker-1" in failed[1][1]
    assert not (tmp_path / "apart-b" / "run" / "checkpoints").exists()
    (tmp_path / "apart" / "stops").unlink()
    shutil.copytree(tmp_path / "apart", tmp_path / "alone")
    shutil.rmtree(tmp_path / "apart-b")
    apart = on_two(machine, "apart", "resume", "run")
    assert [status for status, _ in apart] == [0, 0], apart
    alone = machine("alone", "resume", "run", addition=WIDE).end()
    assert alone[0] == 0, alone
    for name in ("apart", "alone"):
        kinds = [event["event"] for event in gs.Run.load(tmp_path / name / "run").events]
        assert "resumed" in kinds
        assert "checkpoint_failed" not in kinds
        assert parameters_of(tmp_path / name) == expected, name


@pytest.mark.limit_s(120)
def test_a_machine_that_is_lost_with_its_shard_is_named(machine: Start) -> None:
    waits = WIDE + "\nPath('stops').touch()\n"  # for a checkpoint in a folder that is not the run's
    arguments = ("--strategy", "downpour", "--acknowledge", "applied", "--run-dir", "elsewhere")
    launcher = machine("a", "train", "linear.py", *arguments, *TWO, addition=waits)
    words = launcher.line(r"gradstream (join .*)")[1].split()
    joined = machine("b", *words, "--name", "b", addition=waits)
    launcher.line(r"^step \d+")
    joined.process.kill()
    status, said = launcher.end()
    assert status == 4, said
    assert "shard-1" in said
    assert "shard-1 was on machine b (127.0.0.1)" in said
