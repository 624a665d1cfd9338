"""Changes the machines of a run while it trains: one takes the place of another, joins in a free one, or leaves.

A run has as many places as it began with, and those for which it made room. The job of a machine that joins later comes
from this one, which has kept it; token and data come from the first machine, and the data is compared with the list of
this one.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from gradstream.errors import ConfigError
from gradstream.run.launches import Launch
from gradstream.run.ssh.data_delivery import DataDelivery
from gradstream.run.ssh.fleet import Fleet
from gradstream.run.ssh.host import HostError, SshHost
from gradstream.run.ssh.inspection import inspect_machine
from gradstream.run.ssh.run_files import bring_log


def replace_machine(fleet: Fleet, old: str, new: str, run: Path, say: Callable[[str], object]) -> Fleet:
    """Has another machine, or the same one anew, take the place of one whose process is gone.

    Args:
        fleet: the machines of the run.
        old: name of the machine that is gone; not the first one.
        new: name of the machine that takes its place.
        run: the local folder of the run, where the new list of machines is written.
        say: is given lines for people to read.

    Returns:
        The machines from now on.

    Raises:
        ConfigError: there is no such machine, or its process runs.
        HostError: the new one lacks something; the run is as before.
    """
    rank = _rank_of(fleet, old)
    if new != old:
        _check_new(fleet, new)
    if fleet.states()[old].startswith("runs"):
        raise ConfigError(
            f"{old} trains; end its `gradstream train` there before another machine takes its place"
        )
    if new == old:
        fleet.clean([_machine(fleet, old)])
    after = _begun(fleet, rank, new, run, say)
    after.write(run)
    if new != old:
        fleet.clean([_machine(fleet, old)])  # if it can be reached
    return after


def add_machine(fleet: Fleet, new: str, run: Path, say: Callable[[str], object]) -> Fleet:
    """Has a machine join in a free place. Arguments, result and errors as for `replace_machine`."""
    _check_new(fleet, new)
    if "" not in fleet.hosts:
        raise ConfigError(
            f"the run has no free place: its machines are {', '.join(fleet.names)}; start it with --room N for N "
            "machines more, or take one out first: gradstream remove"
        )
    after = _begun(fleet, list(fleet.hosts).index(""), new, run, say)
    after.write(run)
    return after


def remove_machine(fleet: Fleet, old: str, run: Path, say: Callable[[str], object]) -> Fleet:
    """Has a machine hand in what it has computed, and leave; its place is free then.

    Arguments, result and errors as for `replace_machine`. Its log comes into the local folder of the run.
    """
    rank, host = _rank_of(fleet, old), _machine(fleet, old)
    if not fleet.leave(host):
        say(f"{old} has not left in time, and is ended: the others compute its last minibatches again")
    after = _with(fleet, rank, "")
    after.write(run)
    for line in filter(None, [bring_log(fleet, run, host), *fleet.clean([host])]):
        say(line)
    return after


def _rank_of(fleet: Fleet, name: str) -> int:
    if name == fleet.hosts[0]:
        raise ConfigError(f"{name} is the first machine, which has the parameters: the run ends without it")
    if not name or name not in fleet.hosts[1:]:
        raise ConfigError(
            f"the run has no machine {name!r} that joined it; expected one of {', '.join(fleet.names[1:])}"
        )
    return list(fleet.hosts).index(name)


def _check_new(fleet: Fleet, name: str) -> None:
    if name in fleet.names:
        raise ConfigError(f"{name} has a part in the run already; name another machine")
    if not name or name.startswith("-"):
        raise ConfigError(f"{name!r} is no name of a machine that ssh takes")


def _machine(fleet: Fleet, name: str) -> SshHost:
    return fleet.machines[fleet.names.index(name)]


def _with(fleet: Fleet, rank: int, name: str) -> Fleet:
    return replace(fleet, hosts=[*fleet.hosts[:rank], name, *fleet.hosts[rank + 1 :]])


def _begun(fleet: Fleet, rank: int, name: str, run: Path, say: Callable[[str], object]) -> Fleet:
    """Looks at a machine, brings what it needs, and starts its process in a place. Raises HostError."""
    after, made = _with(fleet, rank, name), list[SshHost]()
    host = _machine(after, name)
    try:
        inspect_machine(after, host, made)
        launch = Launch.at(run)
        after.send_to(host, launch.files())
        if after.data:
            DataDelivery(after, say).bring_anew(host, launch.data())
        after.start_on(host)
    except (HostError, ConfigError):
        after.clean(made)
        raise
    return after
