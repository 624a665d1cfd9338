"""The virtual network against numbers from paper, and its faults against what they must leave true."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

import pytest
import torch

from gradstream.errors import DeadlineError, PeerLostError, RefusedError
from gradstream.memory import Vector
from gradstream.runtime import Link, Network, Partition, SimulationConfig, VirtualCluster
from gradstream.testing.pairs import memory_pairs
from gradstream.testing.pieces import tensors as tensors_check
from gradstream.testing.suites import run_check
from gradstream.transport.base import Identity, Priority, Stream
from gradstream.transport.simulated import MemoryEndpoint, MemoryNetwork, Packet, StreamQueue, VirtualNetwork
from gradstream.wire import v1

LATENCY_S, BANDWIDTH = 1e-3, 1e9


class Fleet:
    """Endpoints by name on one virtual network."""

    def __init__(self, network: Network, *names: str, seed: int = 0, shape_only: bool = False) -> None:
        self.cluster = VirtualCluster(seed, SimulationConfig(network=network, shape_only=shape_only))
        self.network = MemoryNetwork(self.cluster)
        self.nodes = {
            name: MemoryEndpoint(Identity("job", name, number), self.cluster.runtime(name), self.network)
            for number, name in enumerate(names)
        }

    def run(self, work: Callable[[], Awaitable[None]]) -> None:
        async def main() -> None:
            for endpoint in self.nodes.values():
                endpoint.serve_tensors()
                await endpoint.start()
                for other in self.nodes.values():
                    other.know(endpoint.identity.name, endpoint.address)
            await work()

        self.cluster.run(main())

    @property
    def now_s(self) -> float:
        return self.cluster.clock.now_ns / 1e9


def plain(**link: float) -> Network:
    return Network(bandwidth_bytes_s=BANDWIDTH, link=Link(latency_s=LATENCY_S, **link))


def lanes_arrivals(network: Network, sends: list[tuple[str, str, Priority, int, float]]) -> list[float]:
    """When packets of (source, target, priority, bytes, at) arrive, each on a lane of its own."""
    cluster = VirtualCluster(0, SimulationConfig(network=network))
    virtual = VirtualNetwork(cluster)
    arrivals = [-1.0] * len(sends)

    def arrived(index: int) -> Callable[[], None]:
        def note() -> None:
            arrivals[index] = cluster.clock.now_ns / 1e9

        return note

    for index, (source, target, priority, size_bytes, at_s) in enumerate(sends):
        lane, packet = StreamQueue(virtual, source, target, priority), Packet(size_bytes, arrived(index))
        cluster.clock.call_at(round(at_s * 1e9), lambda lane=lane, packet=packet: lane.send(packet))  # type: ignore[misc]
    while cluster.clock.advance():
        pass
    return arrivals


def test_a_lone_frame_takes_latency_and_its_length_once() -> None:
    (arrival,) = lanes_arrivals(plain(), [("a", "b", Priority.BULK, 1_000_000, 0.0)])
    assert arrival == pytest.approx(LATENCY_S + 1e-3, abs=2e-9)


@pytest.mark.parametrize(("slow", "seconds"), [("a", 4e-3), ("b", 4e-3)])
def test_the_slower_card_sets_the_pace(slow: str, seconds: float) -> None:
    network = Network(
        bandwidth_bytes_s=BANDWIDTH, link=Link(latency_s=LATENCY_S), cards={slow: BANDWIDTH / 4}
    )
    (arrival,) = lanes_arrivals(network, [("a", "b", Priority.BULK, 1_000_000, 0.0)])
    assert arrival == pytest.approx(LATENCY_S + seconds, abs=2e-9)


@pytest.mark.parametrize("senders", [1, 2, 5])
def test_senders_to_one_receiver_share_its_card(senders: int) -> None:
    sends = [(f"w{rank}", "server", Priority.BULK, 1_000_000, 0.0) for rank in range(senders)]
    assert max(lanes_arrivals(plain(), sends)) == pytest.approx(LATENCY_S + senders * 1e-3, abs=1e-8)


def test_one_sender_to_many_shares_its_own_card() -> None:
    sends = [("server", f"w{rank}", Priority.BULK, 1_000_000, 0.0) for rank in range(4)]
    assert sorted(lanes_arrivals(plain(), sends)) == pytest.approx(
        [LATENCY_S + k * 1e-3 for k in (1, 2, 3, 4)], abs=1e-8
    )


def test_nodes_of_one_machine_share_its_cards() -> None:
    """Two nodes send and two receive; what passes between the two of a machine waits for no card."""
    machines = {"worker-0": "m0", "shard-0": "m0", "worker-1": "m1", "shard-1": "m1"}
    network = Network(bandwidth_bytes_s=BANDWIDTH, link=Link(latency_s=LATENCY_S), machines=machines)
    sends = [
        ("worker-0", "shard-1", Priority.BULK, 1_000_000, 0.0),
        ("shard-0", "worker-1", Priority.BULK, 1_000_000, 0.0),
        ("worker-0", "shard-0", Priority.BULK, 1_000_000, 0.0),
    ]
    *apart, beside = lanes_arrivals(network, sends)
    assert sorted(apart) == pytest.approx([LATENCY_S + 1e-3, LATENCY_S + 2e-3], abs=1e-8)
    assert beside == 0.0


def test_pairs_do_not_share() -> None:
    sends = [(f"a{k}", f"b{k}", Priority.BULK, 1_000_000, 0.0) for k in range(4)]
    assert lanes_arrivals(plain(), sends) == pytest.approx([LATENCY_S + 1e-3] * 4, abs=2e-9)


def test_control_waits_for_one_frame_at_most_on_each_card() -> None:
    bulk = [(f"w{rank}", "server", Priority.BULK, 1_000_000, 0.0) for rank in range(8)]
    bulk += [("w0", "server", Priority.BULK, 1_000_000, 0.0)] * 4
    *_, ping = lanes_arrivals(plain(), [*bulk, ("w0", "server", Priority.CONTROL, 64, 1e-4)])
    assert ping - 1e-4 <= LATENCY_S + 2 * 1e-3 + 1e-6


def test_streams_take_turns() -> None:
    """A stream with a single frame waits for two frames of the other at most, not for ten."""
    cluster = VirtualCluster(0, SimulationConfig(network=plain()))
    virtual = VirtualNetwork(cluster)
    long, short = (StreamQueue(virtual, "a", "b", Priority.BULK) for _ in range(2))
    arrived: list[str] = []
    for _ in range(10):
        long.send(Packet(1_000_000, lambda: arrived.append("long")))
    short.send(Packet(1_000_000, lambda: arrived.append("short")))
    while cluster.clock.advance():
        pass
    assert arrived.index("short") <= 2  # one on the card, one in its turn


def test_jitter_keeps_the_order_of_a_lane() -> None:
    for seed in range(20):
        cluster = VirtualCluster(seed, SimulationConfig(network=Network(link=Link(jitter_s=1e-2))))
        lane, got = StreamQueue(VirtualNetwork(cluster), "a", "b", Priority.BULK), list[int]()
        for number in range(30):
            lane.send(Packet(100, lambda number=number, got=got: got.append(number)))  # type: ignore[misc]
        while cluster.clock.advance():
            pass
        assert got == list(range(30))


@pytest.mark.parametrize("workers", [1, 3])
def test_pushes_through_streams_take_p_n_over_bandwidth(workers: int) -> None:
    """p workers send n bytes each to one server: p·n·β, and the handshakes."""
    names = [f"w{rank}" for rank in range(workers)]
    fleet, num_bytes = Fleet(plain(), "server", *names, shape_only=True), 100_000_000

    async def work() -> None:
        server = fleet.nodes["server"]
        memory = server.runtime.memory
        sends, recvs = list[Awaitable[None]](), list[Awaitable[None]]()
        for name in names:
            sent, got = (memory.allocate(num_bytes // 4, torch.float32, name) for _ in range(2))
            sends.append(fleet.nodes[name].send("server", 1, sent.all))
            recvs.append(server.recv(name, 1, got.all))
        await server.runtime.gather(*sends, *recvs)

    fleet.run(work)
    frames = -(-num_bytes // (1 << 20))
    bound_s = workers * (num_bytes + frames * plain().header_bytes) / BANDWIDTH
    assert bound_s <= fleet.now_s <= bound_s * 1.01 + 5 * LATENCY_S


def test_one_seed_one_history_another_seed_another() -> None:
    def history(seed: int) -> tuple[float, int]:
        fleet = Fleet(plain(jitter_s=1e-3), "a", "b", seed=seed)

        async def work() -> None:
            sent, got = Vector("sent", torch.ones(1_000_000)), Vector("got", torch.zeros(1_000_000))
            a, b = fleet.nodes.values()
            await a.runtime.gather(a.send("b", 1, sent.all), b.recv("a", 1, got.all))

        fleet.run(work)
        return fleet.now_s, fleet.cluster.clock.num_fired

    assert history(3) == history(3)
    assert history(3) != history(4)


@pytest.mark.parametrize("seed", range(5))
def test_duplicated_tensors_are_received_once(seed: int) -> None:
    """Every stream comes twice; a copy must not be taken for the next tensor of the same tag."""
    fleet = Fleet(plain(duplicate=1.0, jitter_s=1e-3), "a", "b", seed=seed)

    async def work() -> None:
        a, b = fleet.nodes.values()
        got = Vector("got", torch.zeros(10))
        for number in range(20):
            sent = Vector("sent", torch.full((10,), float(number)))
            await a.runtime.gather(a.send("b", 1, sent.all), b.recv("a", 1, got.all))
            assert got.tensor.tolist() == [float(number)] * 10
            await a.runtime.sleep(0.02)

    fleet.run(work)


def test_a_duplicated_call_runs_its_handler_twice_and_is_answered_once() -> None:
    fleet, served = Fleet(plain(duplicate=1.0), "a", "b"), list[int]()

    async def count(stream: Stream) -> None:
        served.append(1)
        await stream.send(v1.Frame(body=v1.Body(data=stream.opened.body)))

    async def work() -> None:
        a, b = fleet.nodes.values()
        b.serve("count", count)
        assert (await a.call("b", "count", v1.Tensor(tag=4), v1.Tensor)).tag == 4
        await a.runtime.sleep(1.0)
        assert len(served) == 2

    fleet.run(work)


def test_loss_is_silence_until_the_deadline() -> None:
    fleet = Fleet(plain(loss=1.0), "a", "b")

    async def work() -> None:
        with pytest.raises(
            DeadlineError, match=r"^b: silent for 2 s.*stands still.*--set deadlines\.silence_s="
        ):
            await fleet.nodes["a"].call("b", "any", v1.Tensor(), v1.Tensor, silence_s=2.0)
        assert fleet.now_s == pytest.approx(2.0)

    fleet.run(work)


def test_under_loss_calls_succeed_by_retrying() -> None:
    fleet, tries = Fleet(plain(loss=0.2), "a", "b", seed=1), list[int]()

    async def reply(stream: Stream) -> None:
        await stream.send(v1.Frame(body=v1.Body(data=stream.opened.body)))

    async def work() -> None:
        a, b = fleet.nodes.values()
        b.serve("reply", reply)
        for tag in range(50):
            while True:
                tries.append(tag)
                try:
                    assert (
                        await a.call("b", "reply", v1.Tensor(tag=tag), v1.Tensor, silence_s=0.1)
                    ).tag == tag
                    break
                except DeadlineError:
                    continue

    fleet.run(work)
    assert len(tries) > 55


def test_a_partition_cuts_and_heals() -> None:
    cut = Partition(0.0, 5.0, frozenset({"a"}), frozenset({"b"}))
    network = Network(bandwidth_bytes_s=BANDWIDTH, link=Link(latency_s=LATENCY_S), partitions=[cut])
    fleet = Fleet(network, "a", "b")

    async def work() -> None:
        a, b = fleet.nodes.values()
        with pytest.raises(DeadlineError):
            await a.call("b", "any", v1.Tensor(), v1.Tensor, silence_s=1.0)
        with pytest.raises(DeadlineError):  # b reaches a, and a's answer does not come back
            await b.call("a", "any", v1.Tensor(), v1.Tensor, silence_s=1.0)
        await a.runtime.sleep(5.0)
        with pytest.raises(RefusedError, match="UNKNOWN_METHOD"):
            await a.call("b", "any", v1.Tensor(), v1.Tensor, silence_s=1.0)

    fleet.run(work)


def test_a_killed_node_is_noticed_one_latency_later_and_can_come_back() -> None:
    fleet = Fleet(plain(), "a", "b")

    async def hold(stream: Stream) -> None:
        await asyncio.get_running_loop().create_future()

    async def work() -> None:
        a, b = fleet.nodes.values()
        b.serve("hold", hold)
        stream = await a.open("b", "hold", v1.Tensor())
        await stream.credit()
        killed_s = fleet.now_s
        fleet.network.kill("b")
        fleet.cluster.runtime("b").kill()
        with pytest.raises(PeerLostError):
            await stream.recv()
        assert fleet.now_s - killed_s == pytest.approx(LATENCY_S)
        with pytest.raises(PeerLostError, match="nobody listens"):
            await a.call("b", "hold", v1.Tensor(), v1.Tensor)
        again = MemoryEndpoint(Identity("job", "b", 9), fleet.cluster.runtime("b2"), fleet.network)
        await again.start()
        with pytest.raises(RefusedError, match="UNKNOWN_METHOD"):
            await a.call("b", "hold", v1.Tensor(), v1.Tensor)

    fleet.run(work)


def test_a_changed_address_breaks_old_streams() -> None:
    fleet = Fleet(plain(), "a", "b", "c")

    async def hold(stream: Stream) -> None:
        await stream.recv()

    async def work() -> None:
        a, b, c = fleet.nodes.values()
        b.serve("hold", hold)
        stream = await a.open("b", "hold", v1.Tensor())
        await stream.credit()
        a.know("b", c.address)
        with pytest.raises(PeerLostError, match="address has changed"):
            await stream.recv()

    fleet.run(work)


@pytest.mark.parametrize("seed", range(3))
def test_tensors_pass_under_jitter(seed: int) -> None:
    run, make_pair = memory_pairs(seed, SimulationConfig(network=plain(jitter_s=5e-3)))
    run(run_check(tensors_check, make_pair))
