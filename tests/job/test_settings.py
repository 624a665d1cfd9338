"""Settings, layer over layer: sources, types, errors that say where, and origins."""

from __future__ import annotations

import json
import typing
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pytest

import gradstream as gs
from gradstream.job.job import Job
from gradstream.job.settings import Setting, Word, apply, from_environment, from_texts, from_toml
from gradstream.job.settings.layers import from_toml_text
from gradstream.job.settings.values import MisfitError, fit
from gradstream.run.planning import plan_run
from gradstream.run.records import to_toml

MODEL = gs.from_functions(lambda seed: np.zeros(1), lambda p, x: x * p, lambda p, x, y: p)
DATA = gs.from_arrays(np.zeros((8, 1)), np.zeros((8, 1)))


def a_job(**options: Any) -> Job:
    return gs.Job(MODEL, DATA, **{"epochs": 1, **options})


@pytest.fixture
def toml(tmp_path: Path) -> typing.Callable[[str], list[Setting]]:
    def read(text: str) -> list[Setting]:
        path = tmp_path / "gradstream.toml"
        path.write_text(text)
        return from_toml(path)

    return read


# ---- sources ----------------------------------------------------------------------------


def test_a_toml_file_says_on_which_line(toml: typing.Callable[[str], list[Setting]]) -> None:
    text = """# a comment
workers = 4
deadlines.join_s = 5

[strategy]  # how
name = "downpour"

"push_every" = 10
"""
    assert toml(text) == [
        Setting("workers", 4, "gradstream.toml:2"),
        Setting("deadlines.join_s", 5, "gradstream.toml:3"),
        Setting("strategy.name", "downpour", "gradstream.toml:6"),
        Setting("strategy.push_every", 10, "gradstream.toml:8"),
    ]
    with pytest.raises(gs.errors.ConfigError, match=r"gradstream.toml: not a TOML file: .*line 2"):
        toml("seed = 1\nworkers = x\n")


def test_the_environment_and_words() -> None:
    given = {"GRADSTREAM_WORKERS": "4", "GRADSTREAM_STRATEGY__PUSH_EVERY": "10", "GRADSTREAM_DATA": "x"}
    assert from_environment({**given, "HOME": "here"}) == [
        Setting("strategy.push_every", Word("10"), "GRADSTREAM_STRATEGY__PUSH_EVERY"),
        Setting("workers", Word("4"), "GRADSTREAM_WORKERS"),
    ]
    assert from_texts(["a.b = c=d"]) == [Setting("a.b", "c=d", "--set a.b")]


# ---- layers -----------------------------------------------------------------------------


def under(job: Job, *layers: Sequence[str]) -> Job:
    """The job under layers of words, each layer with its number as its origin."""
    return apply(job, [from_texts(layer, f"layer {number}:") for number, layer in enumerate(layers, 1)])


def test_later_layers_win_and_origins_say_so() -> None:
    job = under(a_job(), ["workers=3", "seed=3"], ["workers=4"])
    assert (job.workers, job.seed, job.servers) == (4, 3, None)
    assert job.origins == {"workers": "layer 2: workers", "seed": "layer 1: seed"}


def test_options_of_a_strategy_are_its_own() -> None:
    own = a_job(strategy=gs.Downpour(push_every=5))
    job = under(own, ["strategy.fetch_every=3"], ["push_every=7"])  # bare: no field of a job has that name
    assert (job.strategy, job.strategy_options) == (own.strategy, {"fetch_every": 3, "push_every": 7})
    # Who names a strategy begins from its defaults; the order within a layer does not matter.
    job = under(own, ["strategy.fetch_every=3"], ["strategy.push_every=2", "strategy=downpour"])
    assert (job.strategy, job.strategy_options) == ("downpour", {"push_every": 2})
    assert sorted(job.origins) == ["strategy", "strategy.push_every"]


def test_options_of_an_optimizer_go_to_whichever_it_is_in_the_end() -> None:
    assert under(
        a_job(optimizer=gs.optim.SGD(0.1, momentum=0.9)), ["optimizer.lr=0.5"]
    ).optimizer == gs.optim.SGD(0.5, momentum=0.9)
    own = gs.optim.Adagrad(lr=0.5, initial_accumulator=0.01)
    assert under(a_job(), ["optimizer.lr=0.5"], ["strategy=downpour"]).optimizer == own
    named = under(a_job(), ["optimizer=momentum", "optimizer.lr=1", "optimizer.momentum=0.5"])
    assert named.optimizer == gs.optim.SGD(1.0, momentum=0.5)


def test_epochs_take_back_steps_of_layers_below() -> None:
    assert (under(a_job(), ["steps=5"]).epochs, under(a_job(), ["steps=5"]).steps) == (None, 5)
    assert under(a_job(), ["steps=5"], ["epochs=2"]).steps is None
    both = under(a_job(), ["steps=5", "epochs=2"])
    assert (both.steps, both.epochs) == (5, 2)  # for the job to refuse


def test_the_automatic_strategy_has_no_options() -> None:
    for word, message in (
        ("strategy.every=4", "the strategy, auto, has no 'every'; it is an option of"),
        ("zzz=1", "unknown key `zzz`"),
    ):
        with pytest.raises(gs.errors.ConfigError, match=message):
            under(a_job(), ["strategy=auto", word])
    given = under(a_job(), ["strategy=auto", "optimizer.lr=0.5"]).optimizer
    assert isinstance(given, gs.optim.SGD) and given.lr == 0.5


@pytest.mark.parametrize(
    ("word", "message"),
    [
        ("stratgy=downpour", "unknown key `stratgy` (did you mean `strategy`?) in layer 1: stratgy"),
        ("workrs=3", "`workers`"),
        ("deadlines.join=3", "`deadlines.join_s`"),
        ("strategy.overlp=1", "`strategy.overlap`"),
        ("momentum=0.9", "`optimizer.momentum`"),
        ("strategy.algorithm=ring", "has no 'algorithm'; it is an option of allreduce"),
        ("model=x", "unknown key `model`"),
        ("seed.x=1", "unknown key `seed.x`"),
        ("zzz.zzz=1", "accumulate, acknowledge, allow_changed, allow_lost, assignment, batch_size"),
        ("workers=four", 'workers = "four" in layer 1: workers: expected a whole number'),
        ("batch_size=1,x", "expected a whole number or a list (each entry a whole number)"),
        ("strategy.overlap=maybe", "expected true or false"),
        (
            "deadlines.join_s=soon",
            '= "soon" in layer 1: deadlines.join_s: expected a number',
        ),
        ("strategy=downpoor", "did you mean 'downpour'"),
        ("optimizer.lr=", "expected a number"),
    ],
)
def test_what_is_wrong_says_where(word: str, message: str) -> None:
    with pytest.raises(gs.errors.ConfigError) as caught:
        gs.simulate(under(a_job(optimizer=gs.optim.SGD(0.1)), [word]))
    assert message in str(caught.value)


def test_a_wrong_type_in_a_toml_file(toml: typing.Callable[[str], list[Setting]]) -> None:
    with pytest.raises(gs.errors.ConfigError) as caught:
        apply(a_job(), [toml('\nworkers = "4"')])
    assert str(caught.value) == 'workers = "4" in gradstream.toml:2: expected a whole number'


def test_every_field_of_a_job_has_a_type_that_can_be_looked_up() -> None:
    assert typing.get_type_hints(Job).keys() >= {"workers", "deadlines"}


def test_a_users_own_strategy(tmp_path: Path) -> None:
    mine = tmp_path / "mine.py"
    mine.write_text(
        "import dataclasses, gradstream\n"
        "@dataclasses.dataclass(frozen=True)\n"
        "class Mine(gradstream.Downpour):\n"
        "    tables: 'NotImported' = None\n"  # a type that only a type checker could resolve
    )
    job = under(a_job(), [f"strategy={mine}:Mine", "strategy.tables=[1, 2]", "push_every=3"])
    assert job.strategy_options == {"tables": [1, 2], "push_every": 3}


def test_a_schedule_comes_back_from_config_toml_and_a_function_by_its_place(
    tmp_path: Path, toml: typing.Callable[[str], list[Setting]]
) -> None:
    schedule = gs.schedules.Warmup(gs.schedules.Cosine(0.05), 10)
    job = a_job(optimizer=gs.optim.SGD(lr=schedule))
    shown = to_toml(plan_run(job, "shown"))
    assert apply(a_job(), [toml(shown)]).optimizer == job.optimizer
    rates = tmp_path / "rates.py"
    rates.write_text("def halved(position):\n    return 0.5\n")
    optimizer = under(a_job(), ["optimizer=sgd", f"optimizer.lr={rates}:halved"]).optimizer
    assert optimizer.lr(None) == 0.5  # type: ignore[arg-type, operator, union-attr]


def test_parameter_groups_as_tables_and_as_words(toml: typing.Callable[[str], list[Setting]]) -> None:
    groups = [{"match": "*.bias", "weight_decay": 0.0}, {"match": "head.*", "lr_scale": 10.0}]
    text = """[[groups]]
match = "*.bias"
weight_decay = 0.0
[[groups]]
match = "head.*"
lr_scale = 10.0
"""
    job = apply(a_job(), [toml(text)])
    assert job.groups == groups
    assert job.origins == {"groups": "gradstream.toml:1"}
    again = under(a_job(), [f"groups={json.dumps(groups)}"])
    assert again.groups == groups
    shown = to_toml(plan_run(again, "shown"))
    assert apply(a_job(), [toml(shown)]).groups == groups


# ---- values -----------------------------------------------------------------------------


@dataclass(frozen=True)
class Until:
    accuracy: float | None = None
    seconds: float | None = None


@pytest.mark.parametrize(
    ("word", "hint", "value"),
    [
        ("1_000", int, 1000),
        ("1e-3", float, 1e-3),
        ("on", bool, True),
        ("0", bool, False),
        ("0", int | None, 0),
        ("None", int | None, None),
        ("none", str, "none"),
        ("12", str, "12"),
        ("a/b", Path | None, Path("a/b")),
        ("true", bool | Path, True),
        ("logs", bool | Path, Path("logs")),
        ("8", int | Sequence[int], 8),
        ("8,16", int | Sequence[int], [8, 16]),
        ("[8, 16]", tuple[int, ...], (8, 16)),
        ("a, b", list[str], ["a", "b"]),
        ('{"a": 1}', Mapping[str, float], {"a": 1.0}),
        ("epoch", int | Literal["epoch"], "epoch"),
        ("7", int | Literal["epoch"], 7),
        ('{"accuracy": 0.9}', Until | None, Until(accuracy=0.9)),
        ("[1, 2]", Any, [1, 2]),
        ("word", Any, "word"),
        ("3", typing.Callable[[], None] | int, 3),
    ],
)
def test_words_are_read_by_type(word: str, hint: Any, value: Any) -> None:
    found = fit(Word(word), hint)
    assert found == value
    assert type(found) is type(value)


@pytest.mark.parametrize(
    ("value", "hint", "expected"),
    [
        (True, int, "a whole number"),
        ("4", int, "a whole number"),  # of a TOML file, which has numbers of its own
        (1.5, int | None, "none or a whole number"),
        (3, str | Path, "a path or text"),
        ("x", Literal["a", "b"], 'one of "a", "b"'),
        ({"accurcy": 1}, Until, "a table without accurcy, with keys of accuracy, seconds"),
        ("x", typing.Callable[[], None], 'a function as "file.py:function"'),
        ("x", gs.Strategy, "an object, which only a job file can give"),
    ],
)
def test_what_does_not_fit(value: Any, hint: Any, expected: str) -> None:
    with pytest.raises(MisfitError) as caught:
        fit(value, hint)
    assert sorted(caught.value.expected.split(" or ")) == sorted(expected.split(" or "))


def test_a_record_is_changed_or_made() -> None:
    job = under(a_job(deadlines=gs.Deadlines(lease_s=3)), ["deadlines.join_s=20"])
    assert job.deadlines == gs.Deadlines(lease_s=3, join_s=20)


def test_a_wrong_key_beside_a_field_that_may_be_a_dict_is_an_error_of_ours() -> None:
    """Found by fuzzing: the hint looked for the fields of `dict`."""
    text = "Infinitydeadlines = {join_s = 3.0}\nuntil = {accuracy = 0.5}\n[strategy]\n"
    job = Job(None, None, spec="job.py")  # type: ignore[arg-type]
    with pytest.raises(gs.errors.ConfigError, match=r"did you mean `deadlines\.join_s`"):
        apply(job, [from_toml_text(text, Path("job.toml"))])
