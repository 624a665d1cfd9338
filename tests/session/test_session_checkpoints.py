"""What a user makes of a loop's checkpoints: state dicts for plain torch, and files for other software."""

from __future__ import annotations

import json
import tempfile
import warnings
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from click.testing import CliRunner, Result
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.checkpoint.state_dict_loader import load as dcp_load

import gradstream as gs
from gradstream.checkpoint.layouts import (
    INDEX,
    described,
    read_distributed,
    read_shards,
    write_distributed,
    write_shards,
)
from gradstream.cli import main
from gradstream.errors import ConfigError, DataError
from gradstream.run.result import FINAL_MODEL
from gradstream.testing.sessions import loop_in_threads

DEADLINES = gs.Deadlines(join_s=60, silence_s=10, lease_s=8, retry_s=5)


@pytest.fixture
def run_dir(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where `loop_in_threads` keeps its run."""
    monkeypatch.setattr(tempfile, "TemporaryDirectory", lambda *_: nullcontext(str(tmp_path)))
    return tmp_path / "run"


def build() -> nn.Sequential:
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 4), nn.Linear(4, 1))
    model[2].weight = model[0].weight
    model[3].bias.requires_grad_(False)
    return model


def optimizer_of(model: nn.Module) -> torch.optim.Adam:
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    groups: list[dict[str, Any]] = [{"params": trained[:2], "lr": 0.02}, {"params": trained[2:]}]
    return torch.optim.Adam(groups, lr=0.01)


def same(one: Any, other: Any) -> bool:
    if isinstance(one, torch.Tensor):
        return torch.equal(one, other)
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(same(one[key], other[key]) for key in one)
    if isinstance(one, list | tuple):
        return len(one) == len(other) and all(map(same, one, other))
    return bool(one == other)


def train(session: gs.Session, model: nn.Module) -> torch.optim.Optimizer:
    data = torch.randn(32, 4, generator=torch.Generator().manual_seed(0))
    loader = session.shard(torch.utils.data.DataLoader(data, batch_size=4))  # type: ignore[arg-type]
    _, optimizer = session.wrap(model, optimizer_of(model))
    for x in loader:
        optimizer.zero_grad()
        model(x).square().mean().backward()
        optimizer.step()
    session.close()
    return optimizer


@pytest.mark.parametrize("strategy", ["allreduce", "local-sgd", "downpour"])
def test_a_compiled_model_is_kept_under_its_own_names(strategy: str, run_dir: Path) -> None:
    def loop(session: gs.Session) -> tuple[Any, Any]:
        model = build()
        optimizer = train(session, torch.compile(model, backend="eager"))  # type: ignore[arg-type]
        return dict(model.state_dict()), optimizer.state_dict()

    (state, moments), _ = loop_in_threads(loop, strategy=strategy, deadlines=DEADLINES)
    model = build()
    model.load_state_dict(safetensors.torch.load_file(run_dir / FINAL_MODEL), strict=True)
    assert same(dict(model.state_dict()), state)
    checkpoint = gs.checkpoints.load(run_dir)
    assert same(checkpoint.model, state)
    if strategy == "allreduce":
        optimizer = optimizer_of(model)
        optimizer.load_state_dict(checkpoint.optimizers[0])
        assert same(optimizer.state_dict(), moments)
        exported(run_dir, checkpoint)


def exported(run_dir: Path, kept: Any) -> None:
    """Exports the run in each form, and reads it with others' readers."""
    folder = run_dir.parent
    assert gradstream("export", run_dir, folder / "whole").exit_code == 0
    assert same(safetensors.torch.load_file(folder / "whole" / "model.safetensors"), kept.model)
    assert gradstream("export", run_dir, folder / "parts", "--shard-size", "5e-8").exit_code == 0
    places = json.loads((folder / "parts" / INDEX).read_text())["weight_map"]
    assert places.keys() == kept.model.keys()
    assert len(set(places.values())) > 2
    assert same(gs.checkpoints.load(folder / "parts").model, kept.model)
    assert gradstream("export", run_dir, folder / "part", "--module", "1").exit_code == 0
    nn.BatchNorm1d(4).load_state_dict(safetensors.torch.load_file(folder / "part" / "model.safetensors"))
    assert "not empty" in gradstream("export", run_dir, folder / "whole").output
    assert gradstream("export", run_dir, folder / "dcp", "--format", "dcp").exit_code == 0
    model, again = build(), gs.checkpoints.load(folder / "dcp")
    assert same(again.model, kept.model)
    assert same(again.optimizers, kept.optimizers)
    optimizer = optimizer_of(model)
    mine, its = get_state_dict(model, optimizer)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # there is no process group
        dcp_load({"model": mine, "optimizer": its}, checkpoint_id=folder / "dcp", no_dist=True)
    set_state_dict(model, optimizer, model_state_dict=mine, optim_state_dict=its)
    assert same(dict(model.state_dict()), kept.model)
    assert same(optimizer.state_dict()["state"], kept.optimizers[0]["state"])


def gradstream(*words: object) -> Result:
    return CliRunner().invoke(main, [str(word) for word in words])


def test_several_models_and_optimizers_come_back_in_their_order(run_dir: Path) -> None:
    def loop(session: gs.Session) -> tuple[Any, Any]:
        models = [nn.Linear(2, 2), nn.Linear(2, 1)]
        optimizers: list[torch.optim.Optimizer] = [
            torch.optim.SGD(models[0].parameters(), 0.1, momentum=0.9),
            torch.optim.Adam(models[1].parameters(), 0.01),
        ]
        session.wrap(models, optimizers)
        for _ in range(2):
            models[1](models[0](torch.ones(1, 2))).sum().backward()
            for optimizer in optimizers:
                optimizer.step()
        session.close()
        return dict(nn.ModuleList(models).state_dict()), [optimizer.state_dict() for optimizer in optimizers]

    (state, moments), _ = loop_in_threads(loop, strategy="allreduce", deadlines=DEADLINES)
    kept = gs.checkpoints.load(run_dir)
    assert same(kept.model, state)
    assert same(list(kept.optimizers), moments)
    assert gradstream("export", run_dir, run_dir.parent / "dcp", "--format", "dcp").exit_code == 0
    joined = read_distributed(run_dir.parent / "dcp")["optimizer"]
    assert [group["params"] for group in joined["param_groups"]] == [
        ["0.weight", "0.bias"],
        ["1.weight", "1.bias"],
    ]


class Wrapper(nn.Module):
    """A user's module around a model of transformers."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.backbone = inner

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.backbone(input_ids=x, labels=x).loss  # type: ignore[no-any-return]


@pytest.mark.parametrize("wrapped", [False, True])
def test_from_pretrained_loads_what_a_run_has_made(wrapped: bool, run_dir: Path) -> None:
    transformers = pytest.importorskip("transformers", reason="transformers is not installed")

    def loop(session: gs.Session) -> Any:
        config = transformers.GPT2Config(vocab_size=9, n_positions=4, n_embd=4, n_layer=1, n_head=1)
        inner = transformers.GPT2LMHeadModel(config)
        model = Wrapper(inner)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        session.wrap(model if wrapped else inner, optimizer)
        model(torch.arange(4)[None]).backward()
        optimizer.step()
        session.close()
        return dict(inner.state_dict())

    state, _ = loop_in_threads(loop, strategy="allreduce", deadlines=DEADLINES)
    options = ["--module", "backbone"] if wrapped else []
    result = gradstream("export", run_dir, run_dir.parent / "out", "--shard-size", "1e-6", *options)
    assert result.exit_code == 0, result.output
    for folder in [run_dir.parent / "out", *([] if wrapped else [(run_dir / FINAL_MODEL).parent])]:
        model = transformers.AutoModelForCausalLM.from_pretrained(folder)
        assert type(model) is transformers.GPT2LMHeadModel
        assert same(dict(model.state_dict()), state)


def test_an_index_lists_files_of_its_folder_alone(tmp_path: Path) -> None:
    write_shards(tmp_path, {"a": torch.ones(2), "b": torch.ones(2)}, shard_bytes=8)
    assert read_shards(tmp_path).keys() == {"a", "b"}
    (tmp_path / INDEX).write_text(json.dumps({"weight_map": {"a": "../model.safetensors"}}))
    with pytest.raises(DataError, match="files beside it"):
        read_shards(tmp_path)
    (tmp_path / INDEX).write_text(json.dumps({"weight_map": {"c": "model-00001-of-00002.safetensors"}}))
    with pytest.raises(DataError, match="lacks 'c'"):
        read_shards(tmp_path)
    with pytest.raises(ConfigError, match="no checkpoint"):
        gs.checkpoints.load(tmp_path.parent)


KINDS = [torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.int64, torch.uint8, torch.bool]


def test_a_distributed_checkpoint_is_read_as_torch_wrote_it(tmp_path: Path) -> None:
    state = {
        "model": {str(kind): torch.ones(2, 3).to(kind) for kind in KINDS}
        | {
            "turned": torch.arange(6.0).reshape(2, 3).T,
            "number": torch.tensor(2.0),
            "none": torch.empty(0, 3),
        },
        "steps": [1, 2.5, None, True, "text", (1, {"a": 2})],
        "tensors": [torch.ones(1), {"deep": torch.zeros(2)}],
        "parameter": nn.Parameter(torch.ones(2)),
    }
    write_distributed(tmp_path / "dcp", state)
    told = read_distributed(tmp_path / "dcp")
    assert same({**told, "parameter": told["parameter"]}, state)
    assert all(told["model"][str(kind)].dtype == kind for kind in KINDS)


def test_nothing_in_a_distributed_checkpoint_is_run(tmp_path: Path) -> None:
    write_distributed(tmp_path / "dcp", {"model": {"w": torch.ones(2)}, "value": [1]})
    metadata = (tmp_path / "dcp" / ".metadata").read_bytes()
    call = b"cos\nmkdir\n(V" + str(tmp_path / "made").encode() + b"\ntR."  # os.mkdir(…)
    (tmp_path / "dcp" / ".metadata").write_bytes(call)
    with pytest.raises(DataError, match="dcp_to_torch"):
        read_distributed(tmp_path / "dcp")
    assert not (tmp_path / "made").exists()
    for cut in range(0, len(metadata), 7):
        (tmp_path / "dcp" / ".metadata").write_bytes(metadata[:cut])
        with pytest.raises(DataError):
            read_distributed(tmp_path / "dcp")
    (tmp_path / "dcp" / ".metadata").write_bytes(metadata.replace(b"__0_0.distcp", b"../..distcp0"))
    with pytest.raises(DataError, match="not read here"):
        read_distributed(tmp_path / "dcp")
    assert described(b"\x80\x02cos\nmkdir\n(X\x01\x00\x00\x00atR.").what == "os mkdir"
