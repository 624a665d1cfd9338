"""Which carrier two nodes take, and one endpoint over all of them."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest
import torch

from gradstream.errors import ConfigError, RefusedError
from gradstream.memory import Vector
from gradstream.run.remote.certificate_authority import CertificateAuthority
from gradstream.runtime import RealRuntime
from gradstream.testing import pieces, refusal_checks, stream_checks
from gradstream.testing.pairs import SECRET, real_pairs
from gradstream.testing.pieces import Check, reply_once
from gradstream.testing.suites import run_check
from gradstream.transport.base import Identity
from gradstream.transport.carriers import RoutedEndpoint, make_endpoint
from gradstream.transport.grpc.endpoint import GrpcEndpoint
from gradstream.transport.offers import CarrierOffer, choose
from gradstream.transport.socket.tcp import TcpEndpoint
from gradstream.wire import v1

GRPC, TCP, SHM = {"grpc": "10.0.0.1:1"}, {"tcp": "10.0.0.1:2"}, {"shm": "gradstream/job/a/1"}


@pytest.mark.parametrize(
    "offer",
    [
        CarrierOffer(),
        CarrierOffer(GRPC),
        CarrierOffer(TCP),
        CarrierOffer(GRPC | TCP),
        CarrierOffer(GRPC | SHM, "host"),
        CarrierOffer(SHM, "x"),
    ],
)
def test_offers_travel_as_text(offer: CarrierOffer) -> None:
    assert CarrierOffer.parse(str(offer)) == offer


def test_carriers_of_later_versions_are_passed_over() -> None:
    assert CarrierOffer.parse("10.0.0.1:1 rdma=fe80 tcp=10.0.0.1:2 nonsense") == CarrierOffer(GRPC | TCP)


@pytest.mark.parametrize(
    ("mine", "theirs", "chosen"),
    [
        (CarrierOffer(GRPC | TCP | SHM, "a"), CarrierOffer(GRPC | TCP | SHM, "a"), "shm"),
        (CarrierOffer(GRPC | TCP | SHM, "a"), CarrierOffer(GRPC | TCP | SHM, "b"), "tcp"),
        (CarrierOffer(GRPC | TCP | SHM), CarrierOffer(GRPC | TCP | SHM), "tcp"),
        (CarrierOffer(GRPC | SHM, "a"), CarrierOffer(GRPC | TCP | SHM, "b"), "grpc"),
        (CarrierOffer(GRPC | TCP), CarrierOffer(GRPC), "grpc"),
        (CarrierOffer(GRPC), CarrierOffer(GRPC), "grpc"),
    ],
)
def test_the_best_that_both_have(mine: CarrierOffer, theirs: CarrierOffer, chosen: str) -> None:
    assert choose(mine, theirs) == choose(theirs, mine) == chosen


def test_nothing_in_common_is_an_error() -> None:
    with pytest.raises(ConfigError, match="one offers shm, the other grpc"):
        choose(CarrierOffer(SHM, "a"), CarrierOffer(GRPC))


def made(name: str, carrier: str = "auto", **options: object) -> RoutedEndpoint:
    return make_endpoint(Identity("job", name, 1, secret=SECRET), RealRuntime(name), carrier, **options)  # type: ignore[arg-type]


TLS = CertificateAuthority().issue("a")


@pytest.mark.parametrize(
    ("options", "offered"),
    [
        ({}, {"grpc", "tcp"}),
        ({"carrier": "grpc"}, {"grpc"}),
        ({"carrier": "tcp"}, {"grpc", "tcp"}),
        ({"listen": "192.0.2.1:0", "insecure": True}, {"grpc", "tcp"}),
        ({"listen": "192.0.2.1:7000", "insecure": True}, {"grpc", "tcp"}),
        ({"listen": "192.0.2.1:0", "security": TLS}, {"grpc", "tcp"}),
        ({"listen": "192.0.2.1:7000", "security": TLS}, {"grpc", "tcp"}),
    ],
)
def test_what_is_offered(options: dict[str, object], offered: set[str]) -> None:
    assert offered <= set(made("a", **options).offered) <= offered | {"shm"}  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("options", "why"),
    [
        ({"carrier": "tcp", "listen": "192.0.2.1:0"}, "neither encrypted"),
        ({"listen": "192.0.2.1:0"}, "neither encrypted"),
        ({"carrier": "pigeon"}, "expected one of auto, grpc, tcp, shm"),
        ({"listen": "here"}, "expected host:port"),
    ],
)
def test_what_cannot_be_had(options: dict[str, object], why: str) -> None:
    with pytest.raises(ConfigError, match=why):
        made("a", **options)  # type: ignore[arg-type]


@asynccontextmanager
async def nodes(**carriers: str) -> AsyncIterator[list[RoutedEndpoint]]:
    """Started endpoints that know each other, by name."""
    endpoints = [made(name, carrier) for name, carrier in carriers.items()]
    for one in endpoints:
        await one.start()
    for one in endpoints:
        for other in endpoints:
            if other is not one:
                one.know(other.identity.name, other.address)
    try:
        yield endpoints
    finally:
        for one in endpoints:
            await one.close()


def test_each_pair_takes_its_own_carrier() -> None:
    async def main() -> None:
        async with nodes(a="tcp", b="tcp", c="grpc") as (a, b, c):
            assert a.routes == {"b": "tcp", "c": "grpc"}
            assert c.routes == {"a": "grpc", "b": "grpc"}
            for one in (a, b, c):
                one.serve("reply", reply_once)
            for one, other in ((a, "b"), (a, "c"), (c, "a"), (b, "a")):
                assert (await one.call(other, "reply", v1.Tensor(tag=3), v1.Tensor)).tag == 3
            a.identity.job = "another"  # one identity for all carriers
            for other in ("b", "c"):
                with pytest.raises(RefusedError, match="another"):
                    await a.call(other, "reply", v1.Tensor(), v1.Tensor)

    asyncio.run(main())


def test_tagged_tensors_meet_by_whichever_carrier_they_come() -> None:
    async def main() -> None:
        async with nodes(a="tcp", b="tcp", c="grpc") as (a, b, c):
            a.serve_tensors()
            got = [Vector("got", torch.zeros(300_000)) for _ in range(2)]
            sent = [Vector("sent", torch.full((300_000,), float(value))) for value in (1, 2)]
            await a.runtime.gather(
                a.recv("b", 1, got[0].all),
                a.recv("c", 1, got[1].all),
                b.send("a", 1, sent[0].all),
                c.send("a", 1, sent[1].all),
            )
            assert [float(vector.tensor.mean()) for vector in got] == [1.0, 2.0]

    asyncio.run(main())


def test_a_peer_that_comes_back_elsewhere_is_reached_by_what_it_has_then() -> None:
    async def main() -> None:
        async with nodes(a="tcp", b="tcp") as (a, b):
            b.serve("reply", reply_once)
            await a.call("b", "reply", v1.Tensor(), v1.Tensor)
            await b.close()
            again = made("b", "grpc")
            await again.start()
            again.serve("reply", reply_once)
            again.serve_tensors()
            a.know("b", again.address)
            assert a.routes == {"b": "grpc"}
            await a.call("b", "reply", v1.Tensor(), v1.Tensor)
            got, sent = Vector("got", torch.zeros(5)), Vector("sent", torch.ones(5))
            again.know("a", a.address)
            await a.runtime.gather(again.recv("a", 1, got.all), a.send("b", 1, sent.all))
            assert got.tensor.tolist() == [1.0] * 5
            await again.close()

    asyncio.run(main())


def test_the_first_carrier_reaches_who_is_not_known() -> None:
    carriers = {
        "grpc": GrpcEndpoint(Identity("job", "a", 1, secret=SECRET), RealRuntime("a")),
        "tcp": TcpEndpoint(Identity("job", "a", 1, secret=SECRET), RealRuntime("a")),
    }
    assert RoutedEndpoint(carriers).routes == {}


@pytest.mark.parametrize(
    "check",
    [
        stream_checks.order,
        stream_checks.concurrent_calls,
        refusal_checks.identity,
        pieces.tensors,
        pieces.landing,
        stream_checks.peer_death,
        stream_checks.unknown_peer,
        stream_checks.closing,
    ],
    ids=lambda check: check.__name__,
)
def test_it_is_an_endpoint_like_those_of_its_carriers(check: Check) -> None:
    run, make_pair = real_pairs(lambda identity, runtime: make_endpoint(identity, runtime))
    run(run_check(check, make_pair))
