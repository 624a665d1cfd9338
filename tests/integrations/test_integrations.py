"""Trainers of other libraries in a session: a small GPT-2 ends as under the library's own DDP."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.numpy import load_file
from torch import nn

from gradstream.integrations import is_joined, wrap
from gradstream.session.session import Session
from gradstream.testing.sessions import loop_in_threads

ROOT = Path(__file__).resolve().parents[2]
SAMPLES = 24
BEGIN = """
import json, os, sys
import torch
import gradstream

JOINT, SAMPLES = "ddp" not in sys.argv, int(open("samples").read())
EPS = 1e-4  # the gradients of some biases, of the keys, are rounding errors: Adam would make steps of them
session = gradstream.join() if JOINT else None

from safetensors.torch import save_file
from transformers import GPT2Config, GPT2LMHeadModel

torch.manual_seed(session.rank if JOINT else 0)  # worker 0's parameters become those of all
model = GPT2LMHeadModel(GPT2Config(
    n_layer=2, n_head=2, n_embd=16, vocab_size=32, n_positions=8, bos_token_id=0, eos_token_id=0,
    resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0,
))
drawn = torch.Generator().manual_seed(1)
tokens = torch.randint(32, (SAMPLES, 8), generator=drawn)

def tell(rank, module, **facts):
    arrays = {name: p.detach().clone() for name, p in module.named_parameters()}
    save_file(arrays, f"{rank}.safetensors")
    open(f"{rank}.json", "w").write(json.dumps(facts))
"""
TRANSFORMERS = """
from transformers import Trainer, TrainingArguments
from gradstream.integrations.transformers import GradstreamTrainer, set_process

if JOINT:
    set_process(session)
labels = torch.where(torch.rand(tokens.shape, generator=drawn) < 0.5, -100, tokens)  # some are not learned
data = [{"input_ids": one, "labels": label} for one, label in zip(tokens, labels)]
arguments = TrainingArguments(
    "saved", num_train_epochs=2, per_device_train_batch_size=2, gradient_accumulation_steps=2, use_cpu=True,
    learning_rate=1e-2, adam_epsilon=EPS, lr_scheduler_type="cosine", warmup_steps=2, weight_decay=0.1,
    max_grad_norm=0.5, logging_steps=1, save_strategy="epoch", eval_strategy="epoch", report_to=[],
    disable_tqdm=True, load_best_model_at_end=True,
)
whole = [{"input_ids": one, "labels": one} for one in tokens[:16]]
given = dict(args=arguments, train_dataset=data, eval_dataset=whole)
trainer = GradstreamTrainer(model, **given, session=session) if JOINT else Trainer(model, **given)
trainer.train()
told = [one["eval_loss"] for one in trainer.state.log_history if "eval_loss" in one]
trained = [one["loss"] for one in trainer.state.log_history if "loss" in one]
tell(
    session.rank if JOINT else arguments.process_index, model, evaluated=told, trained=trained,
    saves=arguments.should_save, steps=trainer.state.global_step, wrapped=type(trainer.model_wrapped).__name__
)
"""
ACCELERATE = """
from accelerate import Accelerator
from gradstream.integrations.accelerate import prepare, set_process

if JOINT:
    set_process(session)
accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
loader = torch.utils.data.DataLoader(tokens, batch_size=2)
rest = accelerator.prepare(torch.utils.data.DataLoader(tokens, batch_size=4))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, eps=EPS)
scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 2 * len(loader))
class Stream(torch.utils.data.IterableDataset):
    def __iter__(self):
        return iter(range(SAMPLES))

shuffled = torch.utils.data.DataLoader(torch.arange(SAMPLES), batch_size=2, shuffle=True)
made = [model, optimizer, loader, scheduler, shuffled, torch.utils.data.DataLoader(Stream(), batch_size=2)]
made = prepare(session, accelerator, *made) if JOINT else accelerator.prepare(*made)
model, optimizer, loader, scheduler, *others = made
losses = []
for epoch in range(2):
    for batch in loader:
        with accelerator.accumulate(model):
            loss = model(input_ids=batch, labels=batch).loss
            accelerator.backward(loss)
            if accelerator.sync_gradients:
                accelerator.clip_grad_norm_(model.parameters(), 0.5)
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
        losses.append(loss.item())
accelerator.wait_for_everyone()
tell(
    session.rank if JOINT else accelerator.process_index, accelerator.unwrap_model(model), trained=losses,
    rates=scheduler.get_last_lr(), minibatches=len(loader), evaluated=len(rest),
    saves=accelerator.is_main_process, seen=[torch.cat(list(one)).tolist() for one in others],
)
"""
LIGHTNING = """
import lightning
from gradstream.integrations.lightning import GradstreamStrategy

class Module(lightning.LightningModule):
    def __init__(self):
        super().__init__()
        self.model = model
        self.losses, self.seen, self.evaluated = [], 0, 0

    def training_step(self, batch, index):
        loss = self.model(input_ids=batch, labels=batch).loss
        self.losses.append(loss.item())
        self.log("train", loss)
        return loss

    def validation_step(self, batch, index):
        self.evaluated += len(batch)
        self.log("loss", self.model(input_ids=batch, labels=batch).loss)

    def configure_optimizers(self):
        optimizer = torch.optim.AdamW(self.parameters(), lr=1e-2, eps=EPS)
        schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)
        return [optimizer], [schedule]

workers = session.world_size if JOINT else 2
sampler = None
if not JOINT:  # or lightning would shuffle
    sampler = torch.utils.data.DistributedSampler(tokens, 2, int(os.environ["RANK"]), shuffle=False)
loader = torch.utils.data.DataLoader(tokens, batch_size=4 // workers, sampler=sampler)
trainer = lightning.Trainer(
    accelerator="cpu", strategy=GradstreamStrategy(session) if JOINT else "ddp", devices=1 if JOINT else 2,
    max_epochs=2, accumulate_grad_batches=1 if SAMPLES % 4 else 2, gradient_clip_val=0.5,
    num_sanity_val_steps=0, enable_progress_bar=False, enable_model_summary=False, logger=False,
    callbacks=[lightning.pytorch.callbacks.ModelCheckpoint("saved", monitor="loss")],
)
module = Module()
trainer.fit(module, loader, torch.utils.data.DataLoader(tokens[:8], batch_size=4))
tell(
    trainer.global_rank, model, trained=module.losses, evaluated=module.evaluated,
    saves=trainer.is_global_zero, steps=trainer.global_step,
    validated=trainer.callback_metrics["loss"].item(),
)
"""


def needs(library: str) -> None:
    """Skips the test without the library, or without transformers, which has the model."""
    for name in {library: None, "transformers": None}:
        pytest.importorskip(name, reason=f"needs pip install 'gradstream[{name}]'")


def run(folder: Path, *words: str, script: str, samples: int = SAMPLES) -> SimpleNamespace:
    """What each process has told, by rank, after a command in a new folder."""
    folder.mkdir()
    (folder / "script.py").write_text(BEGIN + script)
    (folder / "samples").write_text(str(samples))
    kept = {key: value for key, value in os.environ.items() if key not in ("RANK", "WORLD_SIZE")}
    offline = {"HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
    done = subprocess.run(
        [sys.executable, *words],
        cwd=folder,
        env={
            **kept,
            **offline,
            "PYTHONPATH": str(ROOT / "src"),
            "OMP_NUM_THREADS": "1",
            "CUDA_VISIBLE_DEVICES": "",
        },
        capture_output=True,
        text=True,
        check=False,
        timeout=150,
    )
    assert done.returncode == 0, done.stderr[-5000:]
    files = sorted(folder.glob("[0-9].safetensors"))
    facts = [json.loads(file.with_suffix(".json").read_text()) for file in files]
    return SimpleNamespace(models=[load_file(file) for file in files], facts=facts)


def joint(folder: Path, script: str, samples: int = SAMPLES) -> SimpleNamespace:
    words = ("-m", "gradstream", "train", "script.py", "--workers", "2")
    return run(folder, *words, script=script, samples=samples)


def ddp(folder: Path, script: str) -> SimpleNamespace:
    started = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")
    return run(folder, *started, "script.py", "ddp", script=script)


def assert_same(found: Mapping[str, Any], expected: Mapping[str, Any]) -> None:
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        np.testing.assert_allclose(found[name], value, rtol=0, atol=1e-5, err_msg=name)


def means(told: list[dict[str, Any]]) -> Any:
    """The loss of each training step, over the workers."""
    return np.mean([one["trained"] for one in told], axis=0)


def test_the_optimizer_of_a_trainer_makes_its_steps_though_servers_hold_the_parameters() -> None:
    def loop(session: Session) -> list[float]:
        model = nn.Linear(2, 1)
        optimizer = torch.optim.Adamax(model.parameters(), lr=0.1)
        assert is_joined(session)
        wrap(session, [model], [optimizer])
        for _ in range(3):
            optimizer.zero_grad()
            model(torch.ones(4, 2)).pow(2).mean().backward()
            optimizer.step()
        session.close()
        return [float(value) for value in nn.utils.parameters_to_vector(model.parameters())]

    one, other = loop_in_threads(loop, strategy="downpour")
    assert one == other


def test_a_barrier_waits_for_all_workers() -> None:
    come: list[int] = []

    def loop(session: Session) -> int:
        session.barrier()  # before wrap nobody waits
        assert is_joined(session)
        model = nn.Linear(2, 1)
        wrap(session, [model], [torch.optim.SGD(model.parameters(), lr=0.1)])
        before = {name: value.clone() for name, value in model.state_dict().items()}
        if session.rank:
            come.append(session.rank)
        session.barrier()
        assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
        assert all(parameter.grad is None for parameter in model.parameters())
        return len(come)

    assert loop_in_threads(loop, workers=3) == [2, 2, 2]


def test_each_process_of_accelerate_has_a_gpu_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    module = pytest.importorskip("gradstream.integrations.accelerate", exc_type=ImportError)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setenv("LOCAL_RANK", "3")
    for visible, rank, found in [("", 3, "1"), ("4,7", 0, "4"), ("4,7", 5, "7")]:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
        module.set_process(SimpleNamespace(world_size=8, rank=rank))
        assert os.environ["CUDA_VISIBLE_DEVICES"] == found
        assert "LOCAL_RANK" not in os.environ


@pytest.mark.limit_s(300)
def test_a_trainer_of_transformers_ends_as_under_ddp(tmp_path: Path) -> None:
    needs("transformers")
    ours, theirs = joint(tmp_path / "ours", TRANSFORMERS), ddp(tmp_path / "theirs", TRANSFORMERS)
    for model in ours.models:
        assert_same(model, theirs.models[0])
    assert [one["wrapped"] for one in theirs.facts] == ["DistributedDataParallel"] * 2
    assert [one["wrapped"] for one in ours.facts] == ["GPT2LMHeadModel"] * 2
    assert [one["saves"] for one in ours.facts] == [True, False]
    assert [one["steps"] for one in ours.facts] == [one["steps"] for one in theirs.facts] == [6, 6]
    for one in ours.facts:
        np.testing.assert_allclose(one["evaluated"], theirs.facts[0]["evaluated"], atol=1e-5)


@pytest.mark.limit_s(300)
def test_a_loop_on_an_accelerator_ends_as_under_ddp(tmp_path: Path) -> None:
    needs("accelerate")
    ours, theirs = joint(tmp_path / "ours", ACCELERATE), ddp(tmp_path / "theirs", ACCELERATE)
    for model in ours.models:
        assert_same(model, theirs.models[0])
    np.testing.assert_allclose(means(ours.facts), means(theirs.facts), atol=1e-5)
    for one, other in zip(ours.facts, theirs.facts, strict=True):
        assert one["rates"] == pytest.approx(other["rates"], abs=1e-9)
        assert one["minibatches"] == other["minibatches"] == 6
        assert (one["evaluated"], other["evaluated"]) == (6, 3)  # every worker goes through all of it
        assert one["saves"] == other["saves"]
    (mixed, stream), (other_mixed, other_stream) = (one["seen"] for one in ours.facts)
    assert sorted(mixed + other_mixed) == sorted(stream + other_stream) == list(range(SAMPLES))
    assert mixed != sorted(mixed)


@pytest.mark.limit_s(300)
def test_a_trainer_of_lightning_ends_as_under_ddp(tmp_path: Path) -> None:
    needs("lightning")
    ours, theirs = joint(tmp_path / "ours", LIGHTNING), ddp(tmp_path / "theirs", LIGHTNING)
    for model in ours.models:
        assert_same(model, theirs.models[0])
    np.testing.assert_allclose(means(ours.facts), means(theirs.facts), atol=1e-5)
    assert [one["saves"] for one in ours.facts] == [True, False]
    assert [one["steps"] for one in ours.facts] == [one["steps"] for one in theirs.facts]
    assert [one["evaluated"] for one in ours.facts] == [16, 16]
    assert ours.facts[0]["validated"] == ours.facts[1]["validated"]
    assert len(list((tmp_path / "ours" / "saved").iterdir())) == 1


@pytest.mark.limit_s(300)
def test_minibatches_that_do_not_come_out_even_are_those_of_one_process(tmp_path: Path) -> None:
    needs("lightning")
    ours = joint(tmp_path / "ours", LIGHTNING, samples=22)
    alone = run(tmp_path / "alone", "script.py", script=LIGHTNING, samples=22)
    for model in ours.models:
        assert_same(model, alone.models[0])
    assert ours.facts[0]["steps"] == alone.facts[0]["steps"] == 12
    assert ours.facts[0]["validated"] == pytest.approx(alone.facts[0]["validated"], abs=1e-5)


RESUMES = {
    "transformers": (
        TRANSFORMERS.replace("trainer.train()", "trainer.train(resume_from_checkpoint=CHECKPOINT)")
        .replace('save_strategy="epoch", eval_strategy="epoch"', "save_steps=3, num_train_epochs=2")
        .replace("num_train_epochs=2, per_", "per_")
        .replace("load_best_model_at_end=True,", ""),
        "checkpoint-3",
    ),
    "lightning": (
        LIGHTNING.replace("batch_size=4))", "batch_size=4), ckpt_path=CHECKPOINT)").replace(
            'monitor="loss"', 'every_n_train_steps=3, save_top_k=-1, filename="{step}"'
        ),
        "step=3.ckpt",
    ),
}


@pytest.mark.limit_s(300)
@pytest.mark.parametrize("library", RESUMES)
def test_a_run_that_continues_from_a_checkpoint_of_the_library_ends_as_one_that_was_not_stopped(
    library: str, tmp_path: Path
) -> None:
    needs(library)
    script, file = RESUMES[library]
    whole = joint(tmp_path / "whole", "CHECKPOINT = None\n" + script)
    (kept,) = (tmp_path / "whole" / "saved").glob(file)
    again = joint(tmp_path / "again", f"CHECKPOINT = {str(kept)!r}\n" + script)
    assert whole.facts[0]["steps"] == again.facts[0]["steps"] == 6
    assert_same(again.models[0], whole.models[0])
