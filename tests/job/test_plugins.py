"""Members of families that other packages offer: a package is put on the path, as pip would put it."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Callable
from operator import attrgetter
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner, Result

import gradstream as gs
from gradstream.cli import main
from gradstream.errors import ConfigError, UnknownNameError
from gradstream.job.descriptions import describe
from gradstream.job.registry import (
    GROUPS,
    OPTIMIZERS,
    STRATEGIES,
    class_of,
    find_dataset,
    find_optimizer,
    find_strategy,
    name_of,
)
from gradstream.testing.runs import least_squares

CODE = '''
"""What a package would hold."""

from dataclasses import dataclass

import numpy as np

import gradstream as gs
from gradstream.model.base import Batch


@dataclass(frozen=True)
class Gentle(gs.Downpour):
    """Downpour by another name."""

    care: float = 0.5


def tiny(count=4):
    """Four numbers."""
    return gs.from_arrays(np.zeros((count, 1)), np.zeros(count))


not_a_strategy = dict
'''

Install = Callable[..., None]


@pytest.fixture
def install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Install:
    """Puts packages on the path: a module, and the metadata that pip writes."""

    def put(package: str, entry_points: str, *, code: str = CODE) -> None:
        site = tmp_path / f"site-{package}"
        info = site / f"{package}-1.2.dist-info"
        info.mkdir(parents=True)
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {package}\nVersion: 1.2\n")
        (info / "entry_points.txt").write_text(entry_points)
        (site / f"{package}.py").write_text(code)
        monkeypatch.syspath_prepend(site)
        monkeypatch.delitem(sys.modules, package, raising=False)

    return put


ACME = """
[gradstream.strategies]
gentle = acme:Gentle

[gradstream.optimizers]
slow_sgd = gradstream.optim:SGD

[gradstream.datasets]
tiny = acme:tiny
"""


def test_every_family_takes_plugins(install: Install) -> None:
    install("acme", ACME)
    strategy = find_strategy("gentle", {"care": 0.7, "push_every": 2})
    assert type(strategy).__name__ == "Gentle"
    assert describe(strategy)["class"] == "acme:Gentle"  # how it travels
    assert find_optimizer("Slow-SGD", {"lr": 0.5}) == gs.optim.SGD(lr=0.5)
    assert find_dataset("tiny", {"count": 7}).num_samples == 7
    with pytest.raises(UnknownNameError, match=r"did you mean 'gentle'.*downpour,.* gentle,.* synchronous"):
        find_strategy("gentel")
    with pytest.raises(UnknownNameError, match="unknown option of strategy 'gentle' 'car'"):
        find_strategy("gentle", {"car": 1})


def test_a_plugin_is_used_by_its_name(install: Install) -> None:
    install("acme", ACME)
    model, data = least_squares(16, 4)
    run = gs.simulate(model, data, strategy="gentle", optimizer=gs.optim.SGD(lr=0.1), batch_size=4, steps=2)
    assert run.summary["strategy"] == "gentle"


@pytest.mark.parametrize(("theirs", "ours"), [("AdamW", gs.optim.AdamW), ("RMSprop", gs.optim.SGD)])
def test_an_optimizer_of_torch_is_refused_with_the_place_of_one_of_ours(theirs: str, ours: type) -> None:
    with pytest.raises(ConfigError) as refused:
        find_optimizer(getattr(torch.optim, theirs))
    place = re.search(r"gradstream\.([\w.]+)\(lr=", str(refused.value))
    assert place is not None
    assert attrgetter(place[1])(gs) is ours


def test_built_in_members_have_names() -> None:
    assert class_of("strategy", "Dc_ASGD") is gs.strategies.DCASGD
    assert find_dataset("fashion_mnist").name == "fashion-mnist"


def test_two_of_one_name_are_both_named(install: Install) -> None:
    install("acme", "[gradstream.strategies]\ndownpour = acme:Gentle\nshared = acme:Gentle\n")
    install("zeta", "[gradstream.strategies]\nshared = zeta:Gentle\n")
    with pytest.raises(
        ConfigError,
        match=r"Downpour \(gradstream\) and acme:Gentle \(acme 1.2\):.* by its place: acme:Gentle",
    ):
        find_strategy("downpour")
    with pytest.raises(ConfigError, match=r"acme:Gentle \(acme 1.2\) and zeta:Gentle \(zeta 1.2\)"):
        find_strategy("Shared")
    assert find_strategy("synchronous") == gs.Synchronous()


def plugins(*options: str) -> Result:
    return CliRunner().invoke(main, ["plugins", *options])


def test_the_list_says_where_they_are_from(install: Install) -> None:
    install("acme", ACME)
    result = plugins()
    assert result.exit_code == 0, result.output
    rows = [line.split() for line in result.stdout.splitlines()]
    assert ["strategy", "gentle", "acme", "1.2"] in rows
    assert ["strategy", "downpour", "gradstream"] in rows
    assert ["data", "set", "tiny", "acme", "1.2"] in rows
    assert result.stderr == ""
    assert {row["kind"] for row in json.loads(plugins("--json").stdout)} == set(GROUPS)


@pytest.mark.parametrize(
    ("code", "message"),
    [
        ("import no_such_module", "ModuleNotFoundError: No module named 'no_such_module'"),
        ("raise SystemExit('bye')", "SystemExit: bye"),
        ("def", "SyntaxError: invalid syntax"),
        ("x = 1", "AttributeError: module 'broken' has no attribute 'Mine'"),
    ],
)
def test_a_broken_plugin_warns_and_does_not_crash(install: Install, code: str, message: str) -> None:
    install("broken", "[gradstream.strategies]\nbroken = broken:Mine\n", code=code)
    result = plugins()
    assert result.exit_code == 0, result.output
    assert f"warning: strategy 'broken' of broken 1.2 cannot be loaded from broken:Mine: {message}" in (
        result.stderr
    )
    assert find_strategy("downpour") == gs.Downpour()
    with pytest.raises(ConfigError, match="uninstall that package"):
        find_strategy("broken")


def test_a_clash_is_a_warning_in_the_list(install: Install) -> None:
    install("acme", "[gradstream.strategies]\nSynchronous = acme:Gentle\n")
    result = plugins()
    assert result.exit_code == 0
    assert "warning: strategy 'Synchronous' is the name of gradstream.strategies" in result.stderr


def test_what_is_offered_must_be_of_its_family(install: Install) -> None:
    entry_points = "[gradstream.{}]\nodd = acme:not_a_strategy\n"
    for group in ("strategies", "optimizers", "datasets"):
        install(f"odd{group}", entry_points.format(group))
    install("acme", "")
    with pytest.raises(ConfigError, match=r"makes an object of class dict; expected a strategy"):
        find_strategy("odd")
    with pytest.raises(ConfigError, match="is a dict without lr, state_names, apply"):
        find_optimizer("odd")
    with pytest.raises(ConfigError, match="makes a dict; expected a Dataset"):
        find_dataset("odd")


def test_a_job_takes_a_data_set_by_name(install: Install, tmp_path: Path) -> None:
    install("acme", ACME)
    model, _ = least_squares(1, 1)
    (tmp_path / "mine.py").write_text(CODE)
    for name in ("tiny", f"{tmp_path}/mine.py:tiny"):
        assert gs.Job(model, name, steps=1).data.num_samples == 4  # type: ignore[arg-type]
        run = gs.simulate(
            model, name, strategy="gentle", batch_size=1, steps=1, optimizer=gs.optim.SGD(lr=0.1)
        )
        assert run.summary["samples"] == 2
    with pytest.raises(UnknownNameError, match="unknown data set 'tyny'"):
        gs.simulate(model, "tyny", steps=1)


def test_a_data_set_of_a_file(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(CODE)
    assert find_dataset(f"{tmp_path}/mine.py:tiny").num_samples == 4
    with pytest.raises(UnknownNameError, match=r"unknown data set in .*mine.py 'tine' \(did you mean 'tiny'"):
        find_dataset(f"{tmp_path}/mine.py:tine")


# ---- gradstream data ------------------------------------------------------------------------


def data(*arguments: str) -> Result:
    return CliRunner().invoke(main, ["data", *arguments])


def test_info_prints_licence_and_citation(
    install: Install, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.delenv("GRADSTREAM_DATA", raising=False)
    said = data("info", "caltech101").stdout
    for text in ("CC BY 4.0", "Perona", "10.22002/D1.20086", "137,414,764 bytes", "gradstream data get"):
        assert text in said
    install("acme", ACME)
    everything = data("info").stdout
    assert "MIT" in everything
    assert "tiny (acme 1.2)\n  Four numbers." in everything
    wrong = data("info", "caltech10")
    assert wrong.exit_code == 2
    assert "did you mean 'caltech101'" in wrong.stderr


def test_get_without_anything_to_get(install: Install) -> None:
    assert "nothing to download" in data("get", "fashion-mnist").stderr
    install("acme", ACME)
    assert "nothing to download" in data("get", "tiny").stderr


def test_what_is_there_is_not_downloaded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    extracted = tmp_path / "caltech101" / "101_ObjectCategories"
    extracted.mkdir(parents=True)
    monkeypatch.setenv("GRADSTREAM_DATA", str(tmp_path))
    assert data("get", "caltech101").stdout == f"{extracted}\n"
    assert f"here      {extracted}" in data("info", "caltech101").stdout


def test_get_from_a_mirror_that_is_not_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.delenv("GRADSTREAM_DATA", raising=False)
    monkeypatch.setattr("gradstream.data.download.ATTEMPTS", 1)
    monkeypatch.setenv("no_proxy", "*")
    refused = data("get", "caltech101", "--url", "http://127.0.0.1:1/x.zip")
    assert refused.exit_code == 1
    assert "127.0.0.1:1 does not answer" in refused.stderr


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_every_rule_travels_as_json(name: str) -> None:
    rule = find_optimizer(name, {"lr": 0.1})
    text = json.dumps(describe(rule))
    assert find_optimizer(json.loads(text)["class"], json.loads(text)["fields"]) == rule


def test_a_strategy_has_the_name_by_which_it_is_found() -> None:
    assert {name for name in STRATEGIES if name_of(find_strategy(name)) != name} == set()
    assert name_of(gs.optim.AdamW()) == "adamw"
    assert name_of(least_squares(8, 1)[1]) == "arraydataset"
