"""Checks of a job's codecs: what workers and servers send, and whether it can be encoded."""

from __future__ import annotations

from gradstream.codec.base import Codec
from gradstream.codec.feedback import EF21
from gradstream.codec.low_rank import PowerSGD
from gradstream.codec.named import PARAMETER_CODECS
from gradstream.codec.sparse import DGC
from gradstream.errors import ConfigError
from gradstream.job.job import Job, is_open_ended
from gradstream.optim.base import Optimizer
from gradstream.strategies.base import GroupStrategy, PeerStrategy, ServerStrategy, Strategy


def check_codec(job: Job, strategy: Strategy, optimizer: Optimizer, codec: Codec | PowerSGD) -> None:
    """Raises ConfigError where what the workers of a strategy send cannot be encoded."""
    name = type(strategy).__name__
    if isinstance(codec, EF21):
        why = "its receiver keeps what each sender has sent before, and no strategy does that yet; take ErrorFeedback"
    elif is_open_ended(job) and strategy.gives_mean:
        why = (
            "a training loop of your own sends other numbers behind its gradients, which must arrive as they are; "
            "leave codec out, or take strategy='local-sgd' or 'diloco'"
        )
    elif isinstance(codec, DGC) and getattr(optimizer, "momentum", False):
        rule = f"{type(optimizer).__name__} with momentum"
        why = f"its workers have a momentum, and {rule} would add a second; take SGD without momentum"
    elif job.noise_scale:
        why = (
            "noise_scale=True: what is sent does not have the length of a gradient; leave one of the two out"
        )
    elif isinstance(strategy, GroupStrategy):
        options = [option for option in ("sharded", "factors") if getattr(strategy, option, None)]
        if not options:
            return
        why = f"{name} with {options[0]}=True exchanges other than whole gradients; leave one of the two out"
    elif isinstance(strategy, PeerStrategy):
        if isinstance(codec, PowerSGD):
            why = "the workers of a pair exchange their vectors whole, and this needs sums; take strategy='local-sgd'"
        elif not strategy.encodes:
            why = (
                f"the workers of {name} exchange whole parameters, of which a codec would keep a few digits; take "
                "strategy='noloco', which exchanges how far they have come besides"
            )
        else:
            return
    elif not isinstance(strategy, ServerStrategy):
        why = f"the workers of {name} exchange through shared memory, where nothing is sent; leave codec out"
    else:
        why = _why_not_pushed(job, strategy, codec)
    if why:
        raise ConfigError(f"codec={job.codec!r}: {why}")


def check_fetch_codec(job: Job, strategy: Strategy) -> None:
    """Raises ConfigError where the parameters that workers fetch cannot be encoded."""
    name, codec = type(strategy).__name__, job.fetch_codec
    if codec not in PARAMETER_CODECS:
        why = f"expected {', '.join(PARAMETER_CODECS)}; what leaves numbers out, or has random ones, fits no parameters"
    elif is_open_ended(job):
        why = "a training loop of your own steps on the parameters that it has, which must be those of the servers"
    elif not isinstance(strategy, ServerStrategy):
        why = f"the workers of {name} have no servers, and fetch nothing"
    elif strategy.pushes == "parameters":
        why = f"{name} pushes whole parameters, so that the servers' would be rounded too; take strategy='diloco'"
    elif strategy.in_passes:
        why = f"{name} needs exact numbers"
    elif strategy.rows(False) is not None:
        why = f"{name} exchanges changed rows alone"
    elif strategy.correction() is not None:
        why = f"{name} corrects by the parameters that a worker had, of which the servers keep exact copies"
    elif job.record:
        why = "record=True: a replay computes on the servers' exact parameters"
    elif job.noise_scale:
        why = "noise_scale=True: it compares gradients of the same parameters"
    else:
        return
    raise ConfigError(f"fetch_codec={codec!r}: {why}; leave fetch_codec out")


def _why_not_pushed(job: Job, strategy: ServerStrategy, codec: Codec | PowerSGD) -> str:
    """Why pushes to servers cannot be encoded, and what to do; "" if they can."""
    name = type(strategy).__name__
    if isinstance(codec, PowerSGD):
        return f"{name} pushes to servers, chunk by chunk, and this needs whole matrices; take strategy='allreduce'"
    if strategy.pushes == "parameters":
        return (
            f"{name} pushes whole parameters, of which a codec would keep a few digits; take strategy='diloco', which "
            "pushes how far they have come"
        )
    if strategy.rows(False) is not None:
        return f"{name} sends significant rows alone; leave significance or codec out"
    if strategy.correction() is not None:
        return f"{name} corrects gradients by their own squares, which a codec changes; leave codec out"
    if job.record:
        return "record=True: a replay would have to know what the codec has kept; leave one of the two out"
    return ""
