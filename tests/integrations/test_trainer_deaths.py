"""Trainers of other libraries whose workers are killed, come back, and join: each sample counts once an epoch."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from safetensors.numpy import load_file

ROOT = Path(__file__).resolve().parents[2]
SAMPLES = 8 * 24 + 3

# A process has a place of its own, and the gradient of its n-th minibatch has an entry for each of its samples. So the
# parameters tell what was used, and by whom; a file that outlives a killed process tells in which epoch.
SCRIPT = """
import json, os, signal, sys, time
from glob import glob
import torch
from torch import nn
import gradstream

told = json.loads(sys.argv[1])
library, here, N, EPOCHS = told["library"], told["here"], told["samples"], told["epochs"]
SLOTS, USES, ACCUMULATE = 8, 120, told["accumulate"]
session = gradstream.join(told["strategy"], strategy_options=told["options"], workers=told["workers"])
from safetensors.torch import save_file

slot = next(slot for slot in range(SLOTS) if not os.path.exists(f"{here}/slot-{slot}-{session.rank}"))
open(f"{here}/slot-{slot}-{session.rank}", "w").close()
place = session.rank * 4 + slot  # the slot-th process of this rank
made, asked = 0, []


def die(where):
    for rank, number, at, when in told["kills"]:
        if (rank, number, when) == (session.rank, slot, where) and made == at:
            os.kill(os.getpid(), signal.SIGKILL)


class Used(nn.Module):
    def __init__(self):
        super().__init__()
        self.uses = nn.Parameter(torch.zeros(16 * USES * N, dtype=torch.float64))
        self.own = nn.Parameter(torch.ones(1, dtype=torch.float64))  # its momentum has to come to a newcomer

    def forward(self, ids):
        global made
        if self.training and torch.is_grad_enabled():
            while session.step == told["waits_at"] and not slot and len(glob(here + "/comes-*")) < told["come"]:
                time.sleep(0.05)
            die("forward")
            with open(f"{here}/log-{place}", "a") as log:
                log.write(json.dumps([made, epoch(), ids.tolist()]) + "\\n")
        begin = (place * USES + made) * N
        made += self.training
        loss = self.uses[ids + begin].sum() / len(ids) + 0.1 * (self.own * ids / N - 0.5).pow(2).mean()
        return {"loss": loss}


def announced(*args, **options):
    open(f"{here}/comes-{place}", "w").close()
    return wrap(*args, **options)


wrap, session.wrap = session.wrap, announced
model = Used()
model.uses.register_hook(lambda gradient: die("backward"))
groups = [{"params": [model.uses]}, {"params": [model.own], "lr": 0.01, "momentum": 0.9}]
optimizer = torch.optim.SGD(groups, lr=1.0)
data = [{"ids": i} for i in range(N)]


def collate(batch):
    return {"ids": torch.tensor([one["ids"] for one in batch])}


def slowly():
    die("step")
    if session.step >= told["stops_at"] >= 0 and not os.path.exists(f"{here}/slot-1-{session.rank}"):
        print("stop now", flush=True)  # of the main worker alone it is seen
        time.sleep(0.2)
    time.sleep(told["pause"])
"""
TRAINERS = {
    "transformers": """
from transformers import TrainerCallback, TrainingArguments
from gradstream.integrations.transformers import GradstreamTrainer, set_process


class AfterStep(TrainerCallback):
    def on_step_end(self, *args, **kwargs):
        slowly()


def epoch():
    return trainer._progress.epoch


set_process(session)
arguments = TrainingArguments(
    here + "/saved", num_train_epochs=EPOCHS, per_device_train_batch_size=8, gradient_accumulation_steps=ACCUMULATE,
    use_cpu=True, lr_scheduler_type="constant", max_grad_norm=0, report_to=[], disable_tqdm=True, logging_steps=1000,
    save_strategy=told["saves"], eval_strategy=told["saves"], dataloader_num_workers=told["processes"],
    remove_unused_columns=False, max_steps=told["max_steps"],
)
trainer = GradstreamTrainer(
    model, arguments, train_dataset=data, eval_dataset=data[:20], data_collator=collate, optimizers=(optimizer, None),
    callbacks=[AfterStep()], session=session,
)
trainer.train()
steps, ended = trainer.state.global_step, trainer.state.max_steps
""",
    "accelerate": """
from accelerate import Accelerator
from gradstream.integrations.accelerate import prepare, set_process

set_process(session)
accelerator = Accelerator(cpu=True, gradient_accumulation_steps=ACCUMULATE)
loader = torch.utils.data.DataLoader(
    data, batch_size=8, shuffle=True, collate_fn=collate, num_workers=told["processes"]
)
model, optimizer, loader = prepare(session, accelerator, model, optimizer, loader)
steps, present = 0, 0


def epoch():
    return present


for present in range(EPOCHS):
    for batch in loader:
        with accelerator.accumulate(model):
            accelerator.backward(model(**batch)["loss"])
            optimizer.step()
            optimizer.zero_grad()
            if accelerator.sync_gradients:
                slowly()
steps = ended = session.step
""",
    "lightning": """
import lightning
from gradstream.integrations.lightning import GradstreamStrategy


class Module(lightning.LightningModule):
    def __init__(self):
        super().__init__()
        self.model = model

    def training_step(self, batch, index):
        return self.model(**batch)["loss"]

    def validation_step(self, batch, index):
        self.log("validated", self.model(**batch)["loss"])

    def configure_optimizers(self):
        return optimizer

    def on_train_batch_end(self, *args):
        if not trainer.fit_loop._should_accumulate():
            slowly()


def epoch():
    return trainer.current_epoch


loader = torch.utils.data.DataLoader(
    data, batch_size=8, shuffle=True, collate_fn=collate, num_workers=told["processes"]
)
trainer = lightning.Trainer(
    accelerator="cpu", strategy=GradstreamStrategy(session), max_epochs=EPOCHS, accumulate_grad_batches=ACCUMULATE,
    num_sanity_val_steps=0, enable_progress_bar=False, enable_model_summary=False, logger=False,
    enable_checkpointing=told["saves"] != "no", default_root_dir=here + "/saved", max_steps=told["max_steps"],
)
validation = torch.utils.data.DataLoader(data[:20], batch_size=8, collate_fn=collate)
trainer.fit(Module(), loader, None if told["saves"] == "no" else validation)
steps, ended = trainer.global_step, trainer.global_step
""",
}
END = """
session.close()
kept = {name: value.detach().clone() for name, value in model.named_parameters()}
save_file(kept, f"{here}/{session.rank}.safetensors")
facts = {"steps": steps, "ended": ended, "world": session.world_size, "main": session.is_main, "slot": slot}
with open(f"{here}/{session.rank}.json", "w") as out:
    json.dump(facts, out)
"""


class Kill(NamedTuple):
    """The process of a rank (the slot-th there) is killed at its so-many-th minibatch."""

    rank: int
    slot: int
    at: int
    when: str


class Ended(NamedTuple):
    """A run: its status and text, what those who are left have told, and how often samples count, by epoch."""

    status: int
    text: str
    facts: dict[int, Any]
    counts: list[Counter[int]]


def train(
    here: Path,
    library: str,
    strategy: str = "allreduce",
    *,
    kills: Sequence[Kill] = (),
    workers: int = 3,
    epochs: int = 2,
    accumulate: int = 1,
    processes: int = 0,
    waits_at: int = -1,
    returns: int = 0,
    pause: float = 0.0,
    saves: str = "no",
    max_steps: int = -1,
    stops_at: int = -1,
    resumes: Sequence[str] = (),
) -> Ended:
    """Trains on several workers, of which some are killed.

    Args:
        saves: when the trainer evaluates and saves.
        stops_at: the step after which the run is stopped, and resumed with the options `resumes`.
        waits_at: the step before which the others wait until so many new processes (`returns`) have begun.
    """
    here.mkdir(exist_ok=True)
    notes = here / "notes"
    notes.mkdir()
    (here / "script.py").write_text(SCRIPT + TRAINERS[library] + END)
    plain = {"outer_lr": 1.0, "outer_momentum": 0.0}
    options = {"local-sgd": {"every": 3}, "diloco": {"every": 3, **plain}}.get(strategy, {})
    told = {
        "library": library, "here": str(notes), "samples": SAMPLES, "epochs": epochs, "accumulate": accumulate,
        "strategy": strategy, "options": options, "workers": workers, "kills": list(kills), "processes": processes,
        "waits_at": waits_at, "pause": pause, "come": workers + returns,
        "stops_at": stops_at, "saves": saves, "max_steps": max_steps,
    }  # fmt: skip
    run = str(here / "run")
    status, text = command(here, "train", str(here / "script.py"), "--run-dir", run, "--", json.dumps(told))
    if stops_at >= 0:
        assert status == 75, text[-4000:]
        status, more = command(here, "resume", run, *resumes)
        text += more
    files = sorted(notes.glob("[0-9].json"))
    facts = {int(file.stem): json.loads(file.read_text()) for file in files}
    models = [load_file(file.with_suffix(".safetensors")) for file in files]
    for name, value in models[0].items() if models else ():
        assert all((model[name] == value).all() for model in models), f"{name} differs between workers"
    counts = [Counter[int]() for _ in range(epochs)]
    for log in notes.glob("log-*"):
        lines = [json.loads(line) for line in log.read_text().splitlines()]
        begins = int(log.name.removeprefix("log-")) * 120
        for made, epoch, ids in lines:
            first = (begins + made) * SAMPLES
            used: Any = models[0]["uses"][first : first + SAMPLES] if models else []
            for one in ids:
                counts[epoch][one] += int(used[one] != 0)
    return Ended(status, text, facts, counts)


def command(here: Path, *words: str) -> tuple[int, str]:
    """Status and text of a command of gradstream, which is interrupted once a worker has asked for it."""
    path = f"{ROOT / 'src'}:{os.environ.get('PYTHONPATH', '')}"
    process = subprocess.Popen(
        [sys.executable, "-m", "gradstream", *words],
        env={**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"},
        cwd=here,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    said: list[str] = []
    assert process.stdout is not None
    for line in process.stdout:
        if line == "stop now\n" and line not in said:
            process.send_signal(signal.SIGINT)
        said.append(line)
    return process.wait(), "".join(said)


def needs(library: str) -> None:
    pytest.importorskip(library, reason=f"needs pip install 'gradstream[{library}]'")


def once(ended: Ended, *, in_step: bool = True) -> None:
    """Each sample counts once in each epoch. Where loops are in step, all have ended at the same one."""
    assert ended.status == 0, ended.text[-4000:]
    for epoch, counts in enumerate(ended.counts):
        wrong = {one: counts[one] for one in range(SAMPLES) if counts[one] != 1}
        assert not wrong, f"epoch {epoch}: {wrong}"
    assert not in_step or len({one["steps"] for one in ended.facts.values()}) == 1, ended.facts
    assert all(one["ended"] == one["steps"] for one in ended.facts.values()), ended.facts


LIBRARIES = ["transformers", "accelerate", "lightning"]


@pytest.mark.limit_s(300)
@pytest.mark.parametrize("library", LIBRARIES)
@pytest.mark.parametrize("strategy", ["allreduce", "local-sgd"])
def test_each_sample_counts_once_an_epoch_though_the_main_worker_is_killed_and_comes_back(
    library: str, strategy: str, tmp_path: Path
) -> None:
    needs(library)
    kills = [Kill(0, 0, 4, "backward")]
    ended = train(tmp_path, library, strategy, kills=kills, waits_at=6, returns=1, pause=0.1, saves="epoch")
    once(ended)
    assert "worker-0 is back" in ended.text
    told = [(one["slot"], one["main"]) for one in ended.facts.values()]
    assert told == [(1, False), (0, True), (0, False)]


@pytest.mark.limit_s(300)
@pytest.mark.parametrize("library", LIBRARIES)
def test_minibatches_of_a_step_that_was_under_way_count_once(library: str, tmp_path: Path) -> None:
    needs(library)
    kills = [Kill(1, 0, 4, "forward"), Kill(2, 0, 11, "backward")]
    once(train(tmp_path, library, kills=kills, accumulate=2, processes=1))


@pytest.mark.limit_s(300)
@pytest.mark.parametrize("library", LIBRARIES)
def test_a_stopped_trainer_goes_on_with_another_number_of_workers(library: str, tmp_path: Path) -> None:
    needs(library)
    ended = train(tmp_path, library, workers=2, stops_at=7, resumes=("--workers", "3"))
    once(ended)
    assert [one["slot"] for one in ended.facts.values()] == [1, 1, 0]


@pytest.mark.limit_s(300)
@pytest.mark.parametrize("library", LIBRARIES)
def test_workers_that_make_no_common_rounds_take_over_what_a_killed_one_had(
    library: str, tmp_path: Path
) -> None:
    needs(library)
    ended = train(tmp_path, library, "diloco", kills=[Kill(1, 0, 5, "step")], pause=0.1)
    once(ended, in_step=False)


@pytest.mark.limit_s(300)
@pytest.mark.parametrize("library", ["transformers", "lightning"])
def test_a_trainer_with_a_number_of_steps_ends_at_it_on_all_workers(library: str, tmp_path: Path) -> None:
    needs(library)
    kills = [Kill(1, 0, 4, "backward")]
    ended = train(tmp_path, library, kills=kills, waits_at=6, returns=1, pause=0.1, max_steps=16)
    assert ended.status in (0, 4), ended.text[-4000:]
    assert [one["steps"] for one in ended.facts.values()] == [16, 16, 16]
    assert set(ended.counts[0].values()) == {1}
    assert set(ended.counts[1].values()) <= {0, 1}
