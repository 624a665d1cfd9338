"""Trains a picture classifier: warm-up, milestones, evaluation, checkpoints, resume."""

import argparse
import shutil
import time
from importlib.resources import files
from pathlib import Path

import numpy as np
import torch
from torch import nn
from torch.optim.lr_scheduler import LinearLR, MultiStepLR, SequentialLR
from torch.utils.data import DataLoader, Dataset


def get_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )
    data = parser.add_argument_group("data")
    data.add_argument("--train-samples", type=int, default=960)
    data.add_argument("--test-samples", type=int, default=500)
    data.add_argument("--workers", type=int, default=0, help="processes that load data")
    data.add_argument("--no-flip", action="store_true", help="do not mirror pictures at random")
    model = parser.add_argument_group("model")
    model.add_argument("--arch", choices=sorted(ARCHITECTURES), default="convnet")
    model.add_argument("--width", type=int, default=8)
    model.add_argument("--dropout", type=float, default=0.1)
    training = parser.add_argument_group("training")
    training.add_argument("--epochs", type=int, default=3)
    training.add_argument("--start-epoch", type=int, default=0, help="to begin at")
    training.add_argument("--batch-size", type=int, default=32)
    training.add_argument("--lr", type=float, default=0.1, help="after the warm-up")
    training.add_argument("--momentum", type=float, default=0.9)
    training.add_argument("--weight-decay", type=float, default=1e-4)
    training.add_argument("--norm-weight-decay", type=float, default=0.0)
    training.add_argument("--warmup-epochs", type=int, default=1)
    training.add_argument("--milestones", type=int, nargs="*", default=[2])
    training.add_argument("--label-smoothing", type=float, default=0.1)
    training.add_argument("--clip-norm", type=float, default=5.0, help="0: do not clip")
    training.add_argument("--seed", type=int, default=0)
    output = parser.add_argument_group("output")
    output.add_argument("--output", type=Path, default=Path("pictures"), help="folder of the checkpoints")
    output.add_argument("--resume", type=Path, help="checkpoint to go on from")
    output.add_argument("--evaluate", action="store_true", help="evaluate only")
    output.add_argument("--print-every", type=int, default=10)
    return parser.parse_args()


class Clothes(Dataset):
    """Pictures of clothes with their kind."""

    def __init__(self, part: str, samples: int, flip: bool, seed: int = 0) -> None:
        with np.load(str(files("gradstream.data") / "fashion_mnist.npz")) as kept:
            self.pictures = torch.from_numpy(kept[f"{part}_images"][:samples])
            self.labels = torch.from_numpy(kept[f"{part}_labels"][:samples]).long()
        self.flip = flip
        self.seed = seed
        self.epoch = 0

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        picture = self.pictures[index].unsqueeze(0) / 255
        rng = np.random.default_rng((self.seed, self.epoch, index))
        if self.flip and rng.random() < 0.5:
            picture = picture.flip(-1)
        return (picture - 0.286) / 0.353, self.labels[index]


class ConvBlock(nn.Sequential):
    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__(
            nn.Conv2d(inputs, outputs, 3, padding=1, bias=False),
            nn.GroupNorm(4, outputs),
            nn.SiLU(),
            nn.MaxPool2d(2),
        )


class ConvNet(nn.Module):
    def __init__(self, width: int, dropout: float) -> None:
        super().__init__()
        self.features = nn.Sequential(
            ConvBlock(1, width), ConvBlock(width, 2 * width), ConvBlock(2 * width, 4 * width)
        )
        self.classifier = nn.Sequential(nn.Dropout(dropout), nn.Linear(4 * width * 9, 10))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.classifier(self.features(x).flatten(1))


class Perceptron(nn.Sequential):
    def __init__(self, width: int, dropout: float) -> None:
        super().__init__(
            nn.Flatten(),
            nn.Linear(784, 16 * width),
            nn.LayerNorm(16 * width),
            nn.ReLU(),
            nn.Dropout(dropout),
            nn.Linear(16 * width, 10),
        )


ARCHITECTURES = {"convnet": ConvNet, "perceptron": Perceptron}


class AverageMeter:
    """The latest value, and the mean of all."""

    def __init__(self, name: str, form: str = ".3f") -> None:
        self.name = name
        self.form = form
        self.value = self.total = 0.0
        self.count = 0

    def update(self, value: float, count: int = 1) -> None:
        self.value = value
        self.total += value * count
        self.count += count

    @property
    def mean(self) -> float:
        return self.total / max(1, self.count)

    def __str__(self) -> str:
        return f"{self.name} {self.value:{self.form}} ({self.mean:{self.form}})"


@torch.no_grad()
def topk_accuracy(scores: torch.Tensor, labels: torch.Tensor, topk: tuple[int, ...]) -> list[float]:
    """For each k the share of samples, in percent, whose label is among the k highest scores."""
    best = scores.topk(max(topk), dim=1).indices
    right = best == labels[:, None]
    return [100 * right[:, :k].any(1).sum().item() / len(labels) for k in topk]


def parameter_groups(model: nn.Module, args: argparse.Namespace) -> list[dict]:
    norms, others = [], []
    for module in model.modules():
        own = list(module.parameters(recurse=False))
        (norms if isinstance(module, nn.GroupNorm | nn.LayerNorm) else others).extend(own)
    return [
        {"params": norms, "weight_decay": args.norm_weight_decay},
        {"params": others, "weight_decay": args.weight_decay},
    ]


def train_one_epoch(model, criterion, optimizer, scheduler, loader, epoch, args) -> None:
    clock, losses = AverageMeter("time", ".2f"), AverageMeter("loss")
    top1, top3 = AverageMeter("top-1", ".1f"), AverageMeter("top-3", ".1f")
    model.train()
    begin = time.time()
    for number, (pictures, labels) in enumerate(loader):
        scores = model(pictures)
        loss = criterion(scores, labels)
        optimizer.zero_grad()
        loss.backward()
        if args.clip_norm:
            nn.utils.clip_grad_norm_(model.parameters(), args.clip_norm)
        optimizer.step()
        scheduler.step()

        accuracy1, accuracy3 = topk_accuracy(scores, labels, (1, 3))
        losses.update(loss.item(), len(labels))
        top1.update(accuracy1, len(labels))
        top3.update(accuracy3, len(labels))
        clock.update(time.time() - begin)
        begin = time.time()
        if number % args.print_every == 0:
            print(f"epoch {epoch} [{number}/{len(loader)}]", clock, losses, top1, top3, sep="  ")


@torch.no_grad()
def evaluate(model, criterion, loader) -> float:
    losses, top1, top3 = AverageMeter("loss"), AverageMeter("top-1", ".1f"), AverageMeter("top-3", ".1f")
    model.eval()
    for pictures, labels in loader:
        scores = model(pictures)
        accuracy1, accuracy3 = topk_accuracy(scores, labels, (1, 3))
        losses.update(criterion(scores, labels).item(), len(labels))
        top1.update(accuracy1, len(labels))
        top3.update(accuracy3, len(labels))
    print(f"test  loss {losses.mean:.4f}  top-1 {top1.mean:.1f}  top-3 {top3.mean:.1f}")
    return top1.mean


def save_checkpoint(state: dict, is_best: bool, folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    torch.save(state, folder / "checkpoint.pt")
    if is_best:
        shutil.copyfile(folder / "checkpoint.pt", folder / "best.pt")


def main() -> None:
    args = get_args()
    torch.manual_seed(args.seed)
    train_set = Clothes("train", args.train_samples, not args.no_flip, args.seed)
    test_set = Clothes("test", args.test_samples, flip=False)
    order = torch.Generator()
    train_loader = DataLoader(
        train_set, args.batch_size, shuffle=True, num_workers=args.workers, generator=order
    )
    test_loader = DataLoader(test_set, batch_size=250, num_workers=args.workers)

    model = ARCHITECTURES[args.arch](args.width, args.dropout)
    criterion = nn.CrossEntropyLoss(label_smoothing=args.label_smoothing)
    optimizer = torch.optim.SGD(parameter_groups(model, args), args.lr, momentum=args.momentum, nesterov=True)
    steps = len(train_loader)
    warmup = max(1, args.warmup_epochs * steps)
    scheduler = SequentialLR(
        optimizer,
        [
            LinearLR(optimizer, start_factor=0.1, total_iters=warmup),
            MultiStepLR(optimizer, [steps * milestone - warmup for milestone in args.milestones]),
        ],
        milestones=[warmup],
    )

    best = 0.0
    if args.resume:
        checkpoint = torch.load(args.resume, weights_only=True)
        args.start_epoch, best = checkpoint["epoch"], checkpoint["best"]
        model.load_state_dict(checkpoint["model"])
        optimizer.load_state_dict(checkpoint["optimizer"])
        scheduler.load_state_dict(checkpoint["scheduler"])
        print(f"going on from {args.resume}, epoch {args.start_epoch}")
    if args.evaluate:
        evaluate(model, criterion, test_loader)
        return

    for epoch in range(args.start_epoch, args.epochs):
        order.manual_seed(args.seed + epoch)
        train_set.epoch = epoch
        train_one_epoch(model, criterion, optimizer, scheduler, train_loader, epoch, args)
        accuracy = evaluate(model, criterion, test_loader)
        is_best, best = accuracy > best, max(accuracy, best)
        state = {
            "epoch": epoch + 1,
            "best": best,
            "arch": args.arch,
            "model": model.state_dict(),
            "optimizer": optimizer.state_dict(),
            "scheduler": scheduler.state_dict(),
        }
        save_checkpoint(state, is_best, args.output)
    print(f"best top-1 accuracy {best:.1f}")


if __name__ == "__main__":
    main()
