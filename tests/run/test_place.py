"""The place of a process, from what engines set in its environment."""

from __future__ import annotations

import pytest

from gradstream.errors import ConfigError
from gradstream.run.place import Place, first_host, place_of

TORCHRUN = {"RANK": "1", "WORLD_SIZE": "4", "MASTER_ADDR": "10.0.0.1", "MASTER_PORT": "29500"}
SLURM = {
    "SLURM_PROCID": "2",
    "SLURM_STEP_NUM_TASKS": "3",
    "SLURM_NTASKS": "8",
    "SLURM_STEP_NODELIST": "rack[2-4]node[07-09,12],login",
    "SLURM_JOB_ID": "30007",
    "SLURM_RESTART_COUNT": "1",
}
KUBERNETES = {"JOB_COMPLETION_INDEX": "0", "GRADSTREAM_NODES": "2", "GRADSTREAM_HOST": "mine-0.mine"}


@pytest.mark.parametrize(
    ("environment", "place"),
    [
        (TORCHRUN, Place(engine="torchrun", rank=1, size=4, host="10.0.0.1", port=29500)),
        (
            TORCHRUN | {"TORCHELASTIC_RUN_ID": "mine", "TORCHELASTIC_RESTART_COUNT": "2"},
            Place(engine="torchrun", rank=1, size=4, host="10.0.0.1", port=29500, job="mine", restarts=2),
        ),
        (
            SLURM,
            Place(
                engine="Slurm", rank=2, size=3, host="rack2node07", port=20007, job="slurm-30007", restarts=1
            ),
        ),
        (
            SLURM | {"GRADSTREAM_PORT": "4000", "SLURM_RESTART_COUNT": "0"},
            Place(engine="Slurm", rank=2, size=3, host="rack2node07", port=4000, job="slurm-30007"),
        ),
        (KUBERNETES, Place(engine="Kubernetes", rank=0, size=2, host="mine-0.mine", port=29400)),
        (
            KUBERNETES | {"GRADSTREAM_RUN": "mine"},
            Place(engine="Kubernetes", rank=0, size=2, host="mine-0.mine", port=29400, job="mine"),
        ),
        (
            {
                "GRADSTREAM_NODE": "3",
                "GRADSTREAM_NODES": "4",
                "GRADSTREAM_HOST": "10.0.0.1",
                "GRADSTREAM_LEAST": "2",
            },
            Place(engine="gradstream", rank=3, size=4, host="10.0.0.1", port=29400, least=2),
        ),
        (
            KUBERNETES | {"GRADSTREAM_LEAST": "1"},
            Place(engine="Kubernetes", rank=0, size=2, host="mine-0.mine", port=29400, least=1),
        ),
    ],
)
def test_each_engine_says_where_a_process_is(environment: dict[str, str], place: Place) -> None:
    assert place_of(environment) == place


@pytest.mark.parametrize(
    "environment",
    [
        {},
        {"RANK": "0", "WORLD_SIZE": "1"},  # one process
        {"SLURM_PROCID": "0", "SLURM_NTASKS": "4", "SLURM_JOB_ID": "1"},  # a batch script, without srun
        {"JOB_COMPLETION_INDEX": "3"},  # pods of one Job that are so many runs
    ],
)
def test_a_process_that_is_alone_has_no_place(environment: dict[str, str]) -> None:
    assert place_of(environment) is None


@pytest.mark.parametrize(
    ("environment", "message"),
    [
        (TORCHRUN | {"RANK": "x"}, r"RANK='x'; expected a whole number, as set by torchrun"),
        (TORCHRUN | {"RANK": "4"}, r"process 4 of 4, by torchrun; expected a number from 0 to 3"),
        (TORCHRUN | {"MASTER_ADDR": ""}, r"MASTER_ADDR is not set, but others of torchrun are"),
        ({key: SLURM[key] for key in SLURM if key != "SLURM_JOB_ID"}, r"SLURM_JOB_ID is not set"),
        ({"GRADSTREAM_NODES": "2"}, r"JOB_COMPLETION_INDEX is not set, but others of Kubernetes"),
        (
            KUBERNETES | {"GRADSTREAM_HOST": ""},
            r"GRADSTREAM_HOST is not set.*the manifest: the name of the first",
        ),
    ],
)
def test_variables_that_do_not_fit_are_named(environment: dict[str, str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        place_of(environment)


@pytest.mark.parametrize(
    ("hosts", "first"),
    [
        ("a", "a"),
        ("a,b", "a"),
        ("a[01-03],b", "a01"),
        ("a[5,7]", "a5"),
        ("a[1-2]b[3-4].x,c", "a1b3.x"),
        ("", ""),
    ],
)
def test_the_first_host_of_a_list(hosts: str, first: str) -> None:
    assert first_host(hosts) == first
