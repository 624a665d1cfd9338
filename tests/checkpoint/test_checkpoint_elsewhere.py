"""Checkpoints of nodes that do not see the run directory: what the coordinator writes and reads for them.

Whole runs on two machines are in test_remote_join.py.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from unittest.mock import MagicMock

import pytest

import gradstream as gs
from gradstream._simulate import simulate
from gradstream.checkpoint import newest
from gradstream.checkpoint.elsewhere import PART_BYTES, CopyKeeper, ElsewhereStorage
from gradstream.checkpoint.folder import Policy, data_offset
from gradstream.checkpoint.manifest import STATE
from gradstream.checkpoint.snapshot import NodeSnapshots
from gradstream.run import nodes as run_nodes
from gradstream.run.simulated import SimulatedCluster
from gradstream.runtime.simulation import Cost, SimulationConfig
from gradstream.runtime.storage import MemoryStorage
from gradstream.testing.runs import QUICK, least_squares
from gradstream.transport.base import Identity, Stream
from gradstream.transport.simulated import MemoryEndpoint
from gradstream.wire import v1
from gradstream.worker.group.exchange import _GroupSnapshot
from whole_runs import same

MODEL, DATA = least_squares(320, 400, seed=1, whole=False, dtype="float32", reduction="mean")
JOB: dict[str, Any] = {
    "optimizer": gs.optim.SGD(lr=0.01), "workers": 2, "servers": 2, "batch_size": 8, "epochs": 2,
    "chunk_elems": 64, "deadlines": QUICK, "checkpoint_every": 10,
    "config": SimulationConfig(costs={"gradient": Cost(base_s=0.03), "write": Cost(base_s=0.2)}),
}  # fmt: skip
CHUNK_BYTES = 64 * 4


class Caller:
    """Calls the coordinator of a simulated run in the name of one of its nodes."""

    def __init__(self, cluster: SimulatedCluster, name: str) -> None:
        runtime = cluster.virtual.runtime("director")
        identity = Identity(cluster.plan.id, name, 1)
        self._endpoint = MemoryEndpoint(identity, runtime, cluster.network)
        self._endpoint.know("coordinator", cluster._address)

    async def keep(self, path: str, parts: Sequence[tuple[int, bytes]]) -> str:
        """Sends parts of a file; "" where they were taken, else why not."""
        stream = await self._open("keep", v1.Keep(path=path))
        for offset, data in parts:
            part = v1.Part(offset_bytes=offset, data=data)
            await stream.send(v1.Frame(body=v1.Body(data=part.SerializeToString())))
        await stream.end()
        try:
            assert await stream.recv(5) is not None
        except gs.errors.RefusedError as error:
            return str(error)
        return ""

    async def kept(self, path: str, offset: int = 0, size: int = 1 << 40) -> bytes:
        """What it is told of a file."""
        request = v1.Kept(path=path, offset_bytes=offset, size_bytes=size)
        stream, found = await self._open("kept", request), b""
        while (received := await stream.recv(5)) is not None:
            assert len(received.frame.body.data) <= PART_BYTES
            found += received.frame.body.data
        return found

    async def _open(self, method: str, request: Any) -> Stream:
        return await self._endpoint.open("coordinator", method, request)


async def open_draft(cluster: SimulatedCluster, storage: MemoryStorage) -> str:
    """Waits until one is being written, and returns its model's path."""
    while True:
        for name in storage.names("checkpoints"):
            path = f"checkpoints/{name}/model.safetensors"
            if name.endswith(".tmp") and name.startswith(".step") and path in storage.files:
                return path
        await cluster.virtual.runtime("director").sleep(1e-3)


def test_a_shard_writes_its_own_ranges_of_an_open_draft_and_nothing_else() -> None:
    said: dict[str, str] = {}
    storage = MemoryStorage()

    async def script(cluster: SimulatedCluster) -> None:
        path = await open_draft(cluster, storage)
        begin = data_offset_of_draft(cluster)
        mine, hers, worker = (
            Caller(cluster, "shard-1"),
            Caller(cluster, "shard-0"),
            Caller(cluster, "worker-0"),
        )
        chunk = bytes(CHUNK_BYTES)
        said["another's"] = await mine.keep(path, [(begin, chunk)])
        said["beyond"] = await mine.keep(path, [(begin + CHUNK_BYTES, bytes(CHUNK_BYTES + 1))])
        said["the header"] = await hers.keep(path, [(0, chunk)])
        said["the end"] = await hers.keep(path, [(begin + 4 * CHUNK_BYTES, chunk), (1 << 60, b"x")])
        said["a worker's"] = await worker.keep(path, [(begin, chunk)])
        said["another file"] = await mine.keep("events.jsonl", [(begin + CHUNK_BYTES, chunk)])
        said["nothing"] = await mine.keep("made-of-nothing", [])
        path = await open_draft(cluster, storage)
        content = storage.read_at(path, begin + CHUNK_BYTES, CHUNK_BYTES)
        said["its own"] = await mine.keep(path, [(begin + CHUNK_BYTES, content)])

    run = simulate(MODEL, DATA, storage=storage, script=script, **JOB)
    assert said.pop("its own") == said.pop("nothing") == ""
    assert said
    for what, reason in said.items():
        assert "refused (BAD_REQUEST)" in reason and "may not write" in reason, (what, reason)
    assert "events.jsonl" not in storage.files and "made-of-nothing" not in storage.files
    assert not [event for event in run.events if event["event"] == "checkpoint_failed"]


def data_offset_of_draft(cluster: SimulatedCluster) -> int:
    """Where data begin in the model's file: it is the same in each checkpoint."""
    assert cluster.coordinator is not None
    snapshot = cluster.coordinator.membership.notice.snapshot
    return next(int(place.offset_bytes) for place in snapshot.places if not place.vector)


def test_what_a_run_goes_on_from_is_read_to_the_byte_and_no_other_file() -> None:
    storage = MemoryStorage()

    async def stop(cluster: SimulatedCluster) -> None:
        await cluster.virtual.runtime("director").sleep(0.5)
        cluster.stop()

    with pytest.raises(gs.errors.Interrupted):
        simulate(MODEL, DATA, storage=storage, script=stop, **JOB)
    storage.write("secret", b"not a checkpoint")
    found = newest(storage, lambda error: None)
    assert found is not None
    folder = found[0]
    there = {name: storage.read(f"{folder}/{name}") for name in storage.names(folder)}
    begin = data_offset(storage, f"{folder}/model.safetensors")
    read: dict[str, bytes] = {}
    refused: list[str] = []

    async def script(cluster: SimulatedCluster) -> None:
        await cluster.virtual.runtime("director").sleep(0.2)
        caller = Caller(cluster, "shard-1")
        for name in storage.names(folder):
            read[name] = await caller.kept(f"{folder}/{name}")
        read["a range"] = await caller.kept(f"{folder}/model.safetensors", begin, CHUNK_BYTES)
        for path in ("secret", f"{folder}/../../secret", "/etc/hostname", "", f"{folder}/"):
            with pytest.raises(gs.errors.RefusedError, match="no file of the checkpoint") as caught:
                await caller.kept(path)
            refused.append(caught.value.code)

    simulate(MODEL, DATA, storage=storage, resume=True, script=script, **JOB)
    assert read.pop("a range") == there["model.safetensors"][begin : begin + CHUNK_BYTES]
    assert read == there
    assert refused == ["BAD_REQUEST"] * 5


# ---- groups -----------------------------------------------------------------------------------

GROUP: dict[str, Any] = {
    **JOB, "servers": 0, "workers": 3, "optimizer": gs.optim.Adam(lr=0.01), "strategy": "allreduce",
}  # fmt: skip


def writers(monkeypatch: pytest.MonkeyPatch, away: Sequence[int]) -> set[str]:
    """Lets workers of these ranks say that they see no run directory. The nodes that write, as they do."""
    found = set[str]()
    member_of, write = run_nodes.member_of, NodeSnapshots._write

    def far(plan: Any, runtime: Any, endpoint: Any, role: str, rank: int, **options: Any) -> Any:
        member = member_of(plan, runtime, endpoint, role, rank, **options)
        member.node.elsewhere = rank in away
        return member

    async def noted(self: Any, *arguments: Any) -> Any:
        found.add(self._runtime.node)
        return await write(self, *arguments)

    monkeypatch.setattr(run_nodes, "member_of", far)
    monkeypatch.setattr(NodeSnapshots, "_write", noted)
    return found


@pytest.mark.parametrize(
    ("away", "write"), [((), {0, 1, 2}), ((1, 2), {0}), ((0,), {1, 2}), ((0, 1, 2), {0, 1, 2})], ids=str
)
def test_of_a_group_those_write_that_see_the_run_directory(
    monkeypatch: pytest.MonkeyPatch, away: tuple[int, ...], write: set[int]
) -> None:
    """All have everything. What they have written is the whole: a resumed run ends with the same bits."""
    whole = simulate(MODEL, DATA, storage=MemoryStorage(), **GROUP)
    found, storage = writers(monkeypatch, away), MemoryStorage()

    async def stop(cluster: SimulatedCluster) -> None:
        await cluster.virtual.runtime("director").sleep(0.5)
        cluster.stop()

    with pytest.raises(gs.errors.Interrupted):
        simulate(MODEL, DATA, storage=storage, script=stop, **GROUP)
    assert found == {f"worker-{rank}" for rank in write}
    assert same(whole, simulate(MODEL, DATA, storage=storage, resume=True, **GROUP))


def test_of_a_group_with_sharded_state_all_write(monkeypatch: pytest.MonkeyPatch) -> None:
    found = writers(monkeypatch, (1, 2))
    simulate(MODEL, DATA, storage=MemoryStorage(), **{**GROUP, "strategy": gs.AllReduce(sharded=True)})
    assert found == {"worker-0", "worker-1", "worker-2"}


def test_parts_that_nobody_writes_are_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """The planted fault: the one that writes counts those that do not."""
    writers(monkeypatch, (1, 2))
    monkeypatch.setattr(_GroupSnapshot, "_among", lambda self, holders: (0, 3))
    run = simulate(MODEL, DATA, storage=MemoryStorage(), **GROUP)
    failed = [event for event in run.events if event["event"] == "checkpoint_failed"]
    assert failed and "worker-0 has reported" in failed[0]["message"]


# ---- copies ----------------------------------------------------------------------------------


QUICK_DISK = SimulationConfig(costs={"gradient": Cost(base_s=0.03)})


def copying(monkeypatch: pytest.MonkeyPatch, copies: dict[int, MemoryStorage]) -> None:
    """Lets workers of these ranks be on another machine, and keep copies there."""
    member_of = run_nodes.member_of

    def far(plan: Any, runtime: Any, endpoint: Any, role: str, rank: int, **options: Any) -> Any:
        member = member_of(plan, runtime, endpoint, role, rank, **options)
        if role == "worker" and rank in copies:
            member.node.elsewhere = True
            CopyKeeper(runtime, endpoint, copies[rank], Policy(keep_last=1))
        return member

    monkeypatch.setattr(run_nodes, "member_of", far)


@pytest.mark.parametrize("job", [JOB, GROUP], ids=["servers", "group"])
def test_a_second_machine_has_a_copy_to_the_byte(
    monkeypatch: pytest.MonkeyPatch, job: dict[str, Any]
) -> None:
    copies, storage = {1: MemoryStorage()}, MemoryStorage()
    copying(monkeypatch, copies)
    run = simulate(MODEL, DATA, storage=storage, **{**job, "keep_last": 100, "config": QUICK_DISK})
    sent = [event for event in run.events if event["event"] == "checkpoint_copy"]
    assert sent
    assert {(event["worker"], event["error"]) for event in sent} == {("worker-1", "")}
    folder = sent[-1]["folder"]
    assert copies[1].names("checkpoints") == [folder.rpartition("/")[2]]
    assert {path: data for path, data in storage.files.items() if path.startswith(f"{folder}/")} == {
        path: bytes(data) for path, data in copies[1].files.items()
    }


def test_a_torn_copy_is_none_and_the_next_machine_gets_it(monkeypatch: pytest.MonkeyPatch) -> None:
    class Torn(MemoryStorage):
        def patch(self, path: str, pieces: Any) -> None:
            super().patch(path, [(at, bytes(len(piece))) for at, piece in pieces if not path.endswith(STATE)])

    copies: dict[int, MemoryStorage] = {1: Torn(), 2: MemoryStorage()}
    copying(monkeypatch, copies)
    run = simulate(MODEL, DATA, storage=MemoryStorage(), **{**GROUP, "config": QUICK_DISK})
    sent = [event for event in run.events if event["event"] == "checkpoint_copy"]
    assert {event["worker"]: bool(event["error"]) for event in sent} == {"worker-1": True, "worker-2": False}
    assert not copies[1].files
    assert newest(copies[2], lambda error: None) is not None


def test_only_checkpoints_are_elsewhere(tmp_path: Path) -> None:
    """A worker that does not see the run directory writes the final model on its own machine, and what is beside it."""

    async def there() -> None:
        storage = ElsewhereStorage(tmp_path, MagicMock(), "coordinator", silence_s=1.0)
        for path in ("checkpoints/pretrained.json", "checkpoints/final/model.safetensors"):
            with pytest.raises(FileNotFoundError):
                storage.read(path)
            storage.write(path, b"here")
            assert storage.read(path) == (tmp_path / path).read_bytes() == b"here"

    asyncio.run(there())
