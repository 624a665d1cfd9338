"""A GPT-2 of random weights learns this repository's pages with transformers' Trainer, on slow links.

gradstream train examples/own_loop/trainer_gpt2.py --workers 3
"""

import argparse
from pathlib import Path

import torch
from transformers import GPT2Config, GPT2LMHeadModel, TrainingArguments

import gradstream
from gradstream.integrations.transformers import GradstreamTrainer, set_process

parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("--epochs", type=float, default=1)
parser.add_argument("--samples", type=int, default=0, help="0: all")
parser.add_argument("--width", type=int, default=128)
parser.add_argument("--saved", default="saved")
args = parser.parse_args()
session = gradstream.join("local-sgd", strategy_options={"every": 20}, codec="one-bit")
set_process(session)

LENGTH = 64  # bytes of a sample
pages = sorted((Path(__file__).resolve().parents[2] / "docs").rglob("*.md"))
text = b"".join(page.read_bytes() for page in pages)
tokens = torch.frombuffer(bytearray(text), dtype=torch.uint8).long()
tokens = tokens[: len(tokens) // LENGTH * LENGTH].view(-1, LENGTH)
order = torch.randperm(len(tokens), generator=torch.Generator().manual_seed(0))
held_out, training = tokens[order[:128]], tokens[order[128:]][: args.samples or None]


def samples(rows: torch.Tensor) -> list[dict[str, torch.Tensor]]:
    return [{"input_ids": row, "labels": row} for row in rows]


torch.manual_seed(0)
config = GPT2Config(
    vocab_size=256,
    n_positions=LENGTH,
    n_embd=args.width,
    n_layer=2,
    n_head=4,
    bos_token_id=0,
    eos_token_id=0,
)
arguments = TrainingArguments(
    args.saved,
    num_train_epochs=args.epochs,
    per_device_train_batch_size=8,
    learning_rate=1e-3,
    warmup_steps=20,
    lr_scheduler_type="cosine",
    logging_steps=20,
    save_strategy="no",
    report_to=[],
    disable_tqdm=True,
    use_cpu=True,
)
trainer = GradstreamTrainer(
    GPT2LMHeadModel(config),
    arguments,
    train_dataset=samples(training),
    eval_dataset=samples(held_out),
    session=session,
)
trainer.train()
session.close()
loss = trainer.evaluate()["eval_loss"]
print(
    f"worker {session.rank}: step {trainer.state.global_step}, loss {loss:.3f} on pages that nobody has learned"
)
