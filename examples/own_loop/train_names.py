"""Trains a recurrent network to tell made-up languages apart by their words.

Words of different lengths are padded and packed. The rate falls when the validation loss does not; training
ends early when it has not fallen for long. Everything goes to a log file, figures to a JSON file.
"""

import argparse
import json
import logging
import math
import random
import sys
from dataclasses import asdict, dataclass, field
from pathlib import Path

import torch
from torch import nn
from torch.nn.utils.rnn import pack_padded_sequence, pad_sequence
from torch.utils.data import DataLoader, Dataset, random_split

import gradstream

session = gradstream.join()
log = logging.getLogger("names")

LETTERS = "abcdefghijklmnopqrstuvwxyz"
PAD = 0


@dataclass
class Figures:
    """What was seen while training, by epoch."""

    train_loss: list[float] = field(default_factory=list)
    valid_loss: list[float] = field(default_factory=list)
    valid_accuracy: list[float] = field(default_factory=list)
    lr: list[float] = field(default_factory=list)

    def save(self, path: Path) -> None:
        path.write_text(json.dumps(asdict(self), indent=1))


class Language:
    """Draws words letter by letter: which letter follows which depends on the language."""

    def __init__(self, rng: random.Random) -> None:
        self.rng = rng
        self.following = {letter: rng.choices(LETTERS, k=4) for letter in LETTERS}

    def word(self) -> str:
        letters = [self.rng.choice(LETTERS)]
        for _ in range(self.rng.randint(3, 11)):
            letters.append(self.rng.choice(self.following[letters[-1]]))
        return "".join(letters)


class Words(Dataset):
    def __init__(self, languages: int, count: int, seed: int) -> None:
        rng = random.Random(seed)
        spoken = [Language(rng) for _ in range(languages)]
        self.samples = [(spoken[i % languages].word(), i % languages) for i in range(count)]

    def __len__(self) -> int:
        return len(self.samples)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        word, language = self.samples[index]
        return torch.tensor([LETTERS.index(letter) + 1 for letter in word]), language


def collate(samples):
    """Pads words to the longest."""
    words, languages = zip(*samples, strict=True)
    lengths = torch.tensor([len(word) for word in words])
    return {
        "letters": pad_sequence(words, batch_first=True, padding_value=PAD),
        "lengths": lengths,
        "labels": torch.tensor(languages),
    }


class Reader(nn.Module):
    """Embedding, recurrent layers in both directions, attention over letters, classifier."""

    def __init__(self, languages: int, width: int, hidden: int, layers: int, dropout: float) -> None:
        super().__init__()
        self.embed = nn.Embedding(len(LETTERS) + 1, width, padding_idx=PAD)
        self.rnn = nn.GRU(
            width,
            hidden,
            layers,
            batch_first=True,
            bidirectional=True,
            dropout=dropout if layers > 1 else 0.0,
        )
        self.attention = nn.Linear(2 * hidden, 1, bias=False)
        self.dropout = nn.Dropout(dropout)
        self.classify = nn.Linear(2 * hidden, languages)

    def forward(self, letters: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
        packed = pack_padded_sequence(
            self.dropout(self.embed(letters)), lengths, batch_first=True, enforce_sorted=False
        )
        states, _ = self.rnn(packed)
        states, _ = nn.utils.rnn.pad_packed_sequence(states, batch_first=True, total_length=letters.shape[1])
        scores = self.attention(states).squeeze(2).masked_fill(letters == PAD, -math.inf)
        summary = (scores.softmax(1).unsqueeze(2) * states).sum(1)
        return self.classify(self.dropout(summary))


class EarlyStopping:
    """Says when the loss has not fallen for some epochs."""

    def __init__(self, patience: int) -> None:
        self.patience = patience
        self.best = math.inf
        self.waited = 0

    def update(self, loss: float) -> bool:
        """Returns whether this is the best loss so far."""
        if loss < self.best:
            self.best, self.waited = loss, 0
            return True
        self.waited += 1
        return False

    @property
    def over(self) -> bool:
        return self.waited >= self.patience


class Trainer:
    def __init__(self, model, optimizer, train_loader, valid_loader, args) -> None:
        self.model = model
        self.optimizer = optimizer
        self.train_loader = train_loader
        self.valid_loader = valid_loader
        self.args = args
        self.scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, factor=0.5, patience=0)
        self.stopping = EarlyStopping(args.patience)
        self.figures = Figures()
        self.epoch = 0
        self.step = 0

    def fit(self) -> None:
        while self.epoch < self.args.epochs and not self.stopping.over:
            train_loss = self.train_epoch()
            valid_loss, accuracy = self.validate()
            self.scheduler.step(valid_loss)
            self.figures.train_loss.append(train_loss)
            self.figures.valid_loss.append(valid_loss)
            self.figures.valid_accuracy.append(accuracy)
            self.figures.lr.append(self.optimizer.param_groups[0]["lr"])
            self.epoch += 1
            log.info(
                "epoch %d: train %.4f valid %.4f accuracy %.3f", self.epoch, train_loss, valid_loss, accuracy
            )
            best = self.stopping.update(valid_loss)
            self.save(self.args.output / "last.pt")
            if best:
                self.save(self.args.output / "best.pt")

    def train_epoch(self) -> float:
        self.model.train()
        total, count = 0.0, 0
        for number, batch in enumerate(self.train_loader):
            self.warm_up()
            scores = self.model(batch["letters"], lengths=batch["lengths"])
            loss = nn.functional.cross_entropy(scores, batch["labels"])
            loss.backward()
            norm = nn.utils.clip_grad_norm_(self.model.parameters(), self.args.clip)
            self.optimizer.step()
            self.optimizer.zero_grad()
            self.step += 1
            total += loss.item() * len(scores)
            count += len(scores)
            if number % self.args.log_every == 0:
                log.debug("step %d: loss %.4f norm %.3f", self.step, loss.item(), norm)
        return total / count

    @torch.no_grad()
    def validate(self) -> tuple[float, float]:
        self.model.eval()
        total, right, count = 0.0, 0, 0
        for batch in self.valid_loader:
            scores = self.model(batch["letters"], lengths=batch["lengths"])
            total += nn.functional.cross_entropy(scores, batch["labels"], reduction="sum").item()
            right += (scores.argmax(1) == batch["labels"]).sum().item()
            count += len(scores)
        return total / count, right / count

    def warm_up(self) -> None:
        if self.step < self.args.warmup_steps:
            for group in self.optimizer.param_groups:
                group["lr"] = self.args.lr * (self.step + 1) / self.args.warmup_steps

    def save(self, path: Path) -> None:
        state = {
            "epoch": self.epoch,
            "step": self.step,
            "model": self.model.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "scheduler": self.scheduler.state_dict(),
            "stopping": [self.stopping.best, self.stopping.waited],
            "figures": asdict(self.figures),
        }
        torch.save(state, path)
        self.figures.save(path.with_suffix(".json"))

    def load(self, path: Path) -> None:
        state = torch.load(path, weights_only=True)
        self.epoch, self.step = state["epoch"], state["step"]
        self.model.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])
        self.scheduler.load_state_dict(state["scheduler"])
        self.stopping.best, self.stopping.waited = state["stopping"]
        self.figures = Figures(**state["figures"])
        log.info("going on from epoch %d", self.epoch)


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--languages", type=int, default=4)
    parser.add_argument("--words", type=int, default=700)
    parser.add_argument("--width", type=int, default=16)
    parser.add_argument("--hidden", type=int, default=16)
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--dropout", type=float, default=0.1)
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--batch-size", type=int, default=16)
    parser.add_argument("--lr", type=float, default=1e-2)
    parser.add_argument("--warmup-steps", type=int, default=5)
    parser.add_argument("--clip", type=float, default=1.0)
    parser.add_argument("--patience", type=int, default=3)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--log-every", type=int, default=10)
    parser.add_argument("--output", type=Path, default=Path("names"))
    parser.add_argument("--resume", action="store_true", help="go on from last.pt, if it is there")
    return parser.parse_args()


def main() -> None:
    args = parse_args()
    args.output /= str(session.rank)
    args.output.mkdir(parents=True, exist_ok=True)
    logging.basicConfig(
        level=logging.INFO,
        format="%(asctime)s %(message)s",
        handlers=[logging.StreamHandler(sys.stdout), logging.FileHandler(args.output / "log.txt")],
        force=True,
    )
    torch.manual_seed(args.seed)
    words = Words(args.languages, args.words, args.seed)
    parts = [0.8, 0.2]
    train_set, valid_set = random_split(words, parts, torch.Generator().manual_seed(args.seed))
    train_loader = DataLoader(
        train_set,
        args.batch_size,
        shuffle=True,
        collate_fn=collate,
        generator=torch.Generator().manual_seed(args.seed),
    )
    train_loader = session.shard(train_loader)
    valid_loader = DataLoader(valid_set, batch_size=100, collate_fn=collate)
    model = Reader(args.languages, args.width, args.hidden, args.layers, args.dropout)
    optimizer = torch.optim.RMSprop(model.parameters(), lr=args.lr, alpha=0.9)
    model, optimizer = session.wrap(model, optimizer)
    log.info("%d parameters, %d words", sum(p.numel() for p in model.parameters()), len(train_set))

    trainer = Trainer(model, optimizer, train_loader, valid_loader, args)
    if args.resume and (args.output / "last.pt").exists():
        trainer.load(args.output / "last.pt")
    trainer.fit()
    log.info("best validation loss %.4f", trainer.stopping.best)


if __name__ == "__main__":
    main()
