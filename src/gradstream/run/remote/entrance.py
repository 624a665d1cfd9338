"""Joins a run at its launcher: proves knowledge of the token, and gets node names, certificates and the job.

Code and data are this machine's own: it reads its own job file, and the launcher refuses it if that differs.
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Self

from gradstream.errors import ConfigError, JoinRefusedError, PeerLostError, RefusedError
from gradstream.job.job import Job, is_script
from gradstream.machine.description import num_cores
from gradstream.machine.resources import free_memory_bytes
from gradstream.run.remote.address import Address, local_address, moved, new_token
from gradstream.run.remote.certificate_authority import LAUNCHER, Key
from gradstream.run.remote.facts import facts_of, file_hash
from gradstream.run.remote.join_service import JOB
from gradstream.runtime.real import RealRuntime
from gradstream.transport.base import Identity, Priority, Stream
from gradstream.transport.grpc.endpoint import GrpcEndpoint
from gradstream.transport.proof import Credentials
from gradstream.transport.security import Tls
from gradstream.untrusted import check_value, parse_json
from gradstream.wire import v1

_GO_ON = "; if the run has ended, `gradstream resume` on the launcher's machine continues it"


class Entrance:
    """An asynchronous context manager: this machine is a member of the run while it is open.

    Args:
        address: address of the launcher.
        job: the job as this machine has read it, with its spec.
        name: name of this machine, or of this process.
        authority: the launcher's certificate, which `reach` has verified; None for plain text.

    Attributes:
        zero_ns: see `RunClock`, on this machine's clock; None before training. It is too late by the latency of the
            quickest order.
    """

    def __init__(self, address: Address, job: Job, name: str, token: str, authority: bytes | None) -> None:
        self._address = address
        self._job = job
        self._name = name
        self._token = new_token(token)
        self._authority = authority
        self._host = local_address(address)
        self._key = Key()
        self._stream: Stream | None = None
        self.runtime = RealRuntime(name)
        self.zero_ns: int | None = None

    async def __aenter__(self) -> Self:
        security = Tls(authority=self._authority, mutual=False) if self._authority else None
        identity = Identity(JOB, f"machine-{self._name}", int.from_bytes(os.urandom(8), "little"))
        identity.secret = self._token.encode()
        self._endpoint = GrpcEndpoint(
            identity, self.runtime, security=security, connection_s=self._job.deadlines.connection_s
        )
        self._endpoint.know(LAUNCHER, str(self._address))
        return self

    async def __aexit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if self._stream is not None and kind is not None:
            self._stream.cancel(f"left: {kind.__name__}")
        await self._endpoint.close()
        self.runtime.close()

    async def enrol(self) -> v1.Grant:
        """Asks the launcher to admit this machine.

        Raises:
            JoinRefusedError: the launcher refuses this machine, and says why.
        """
        request = v1.Enrol(
            machine=self._name,
            facts=facts_of(self._job),
            request=self._key.request(),
            cores=num_cores(),
            memory_bytes=free_memory_bytes() or 0,
            address=self._host,
        )
        self._stream = await self._endpoint.open(LAUNCHER, "enrol", request, priority=Priority.CONTROL)
        try:
            return (await self.order()).grant
        except RefusedError as error:
            text = error.reason
            if error.code == "BAD_SECRET":
                text = "the token is not this run's: copy the line again that the launcher has printed"
            raise JoinRefusedError(LAUNCHER, error.code, text) from None

    async def order(self) -> v1.Order:
        """Waits for the launcher's next order. Raises PeerLostError if the launcher is gone."""
        assert self._stream is not None
        try:
            received = await self._stream.recv(self._job.deadlines.patience_s)
        except PeerLostError as error:
            raise PeerLostError(LAUNCHER, f"is gone, or cannot be reached ({error}){_GO_ON}") from error
        if received is None:
            raise PeerLostError(LAUNCHER, f"closed the connection before the run was over{_GO_ON}")
        order = v1.Order.FromString(received.frame.body.data)
        if order.age_ns:
            zero_ns = self.runtime.now() - order.age_ns
            self.zero_ns = zero_ns if self.zero_ns is None else min(self.zero_ns, zero_ns)
        return order

    async def report(self, report: v1.Report) -> None:
        """Reports to the launcher how a node ended."""
        assert self._stream is not None
        await self._stream.send(v1.Frame(body=v1.Body(data=report.SerializeToString())))

    async def leave(self) -> None:
        """Closes the stream to the launcher, once the run is over."""
        assert self._stream is not None
        await self._stream.end()

    # ---- arguments of the nodes of this machine -----------------------------------------

    def coordinator(self, go: v1.Go) -> str:
        """The coordinator's address."""
        return str(self._address.at(go.port))

    def network(self, node: v1.Certified) -> list[str]:
        """The network arguments of a node of this machine."""
        listen, credentials = str(Address(self._host, node.port)), Credentials(self._token.encode())
        if self._authority is None:
            return ["--listen", listen, "--credentials", str(credentials), "--insecure"]
        pem = {"authority": self._authority, "certificate": node.certificate, "key": self._key.pem}
        return ["--listen", listen, "--credentials", str(dataclasses.replace(credentials, **pem))]

    def spec(self, grant: v1.Grant, run_dir: Path) -> dict[str, Any]:
        """The launcher's description of the plan, with this machine's paths."""
        try:
            spec: dict[str, Any] = parse_json(grant.spec, max_bytes=len(grant.spec.encode()), max_depth=32)
            for part in ("plain", "strategy", "optimizer"):
                check_value(spec[part], Mapping[str, Any], part)
        except (ValueError, TypeError, KeyError) as error:
            raise ConfigError(f"the launcher's description of the run cannot be read: {error}") from error
        spec |= {"run_dir": str(run_dir), "earlier": [], "elsewhere": True, "imports": ""}
        spec["script" if is_script(self._job) else "job"] = self._job.spec or ""
        if spec.get("meeting"):  # at the launcher's address as it is known here
            port = Address.parse(str(spec["meeting"]), "where process groups meet").port
            spec["meeting"] = str(self._address.at(port))
        spec["plain"]["run_dir"] = spec["plain"]["cwd"] = None
        spec["plain"]["argv"] = [str(self._job.spec), *(spec["plain"].get("argv") or ())[1:]]
        return moved(spec, lambda file: self._own_file(file.name, grant))

    def _own_file(self, name: str, grant: v1.Grant) -> Path:
        """This machine's copy, beside the job file, of a user's file that the run needs."""
        job_file = Path(str(self._job.spec).partition(".py")[0] + ".py")
        path, expected = job_file.with_name(name), grant.files.get(name, "not known")
        here = file_hash(path) if path.is_file() else "no such file"
        if here != expected and job_file.is_file() and file_hash(job_file) == expected:
            return job_file  # it has another name here
        if here != expected:
            raise JoinRefusedError(
                LAUNCHER,
                "BAD_JOB_FILE",
                f"the run needs {name} with SHA-256 {expected}; {path}: {here}. "
                "Copy it from the launcher's machine to beside the job file",
            )
        return path
