"""A small GPT that learns to add: tied weights, warm-up and cosine, clipping, accumulation, bf16."""

import argparse
import math

import torch
from torch import nn
from torch.nn import functional
from torch.utils.data import DataLoader, TensorDataset

import gradstream

parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("--epochs", type=int, default=2)
parser.add_argument("--batch-size", type=int, default=8)
parser.add_argument("--accumulate", type=int, default=2, help="minibatches per step")
parser.add_argument("--lr", type=float, default=3e-3)
parser.add_argument("--precision", choices=["full", "autocast", "bfloat16"], default="autocast")
args = parser.parse_args()
session = gradstream.join()

LETTERS = "0123456789+=."
WIDTH, HEADS, LAYERS = 32, 4, 2


def sums(count: int) -> tuple[torch.Tensor, torch.Tensor]:
    numbers = torch.randint(0, 100, (count, 2), generator=torch.Generator().manual_seed(1)).tolist()
    texts = [f"{a:02d}+{b:02d}={a + b:03d}." for a, b in numbers]
    tokens = torch.tensor([[LETTERS.index(letter) for letter in text] for text in texts])
    return tokens[:, :-1], tokens[:, 1:]


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norms = nn.ModuleList([nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)])
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH, bias=False)
        self.out = nn.Linear(WIDTH, WIDTH)
        self.mlp = nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        b, t, c = x.shape
        parts = self.qkv(self.norms[0](x)).view(b, t, 3, HEADS, c // HEADS).permute(2, 0, 3, 1, 4)
        attended = functional.scaled_dot_product_attention(*parts.unbind(), is_causal=True)
        x = x + self.out(attended.transpose(1, 2).reshape(b, t, c))
        return x + self.mlp(self.norms[1](x))


class GPT(nn.Module):
    def __init__(self, length: int) -> None:
        super().__init__()
        self.embed = nn.Embedding(len(LETTERS), WIDTH)
        self.place = nn.Embedding(length, WIDTH)
        self.blocks = nn.Sequential(*(Block() for _ in range(LAYERS)))
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, len(LETTERS), bias=False)
        self.apply(self.initialize)
        self.head.weight = self.embed.weight  # tied

    def initialize(self, module: nn.Module) -> None:
        if isinstance(module, nn.Linear | nn.Embedding):
            nn.init.normal_(module.weight, std=0.02)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        places = torch.arange(tokens.shape[1])
        return self.head(self.norm(self.blocks(self.embed(tokens) + self.place(places))))


torch.manual_seed(0)
data = TensorDataset(*sums(192))
loader = DataLoader(
    data, args.batch_size, shuffle=True, drop_last=True, generator=torch.Generator().manual_seed(0)
)
loader = session.shard(loader)
model = GPT(data.tensors[0].shape[1])
if args.precision == "bfloat16":
    model.to(torch.bfloat16)
decayed = [p for p in model.parameters() if p.ndim > 1]
others = [p for p in model.parameters() if p.ndim <= 1]
groups = [{"params": decayed, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}]
optimizer = torch.optim.AdamW(groups, lr=args.lr, betas=(0.9, 0.95))
model, optimizer = session.wrap(model, optimizer)
steps = args.epochs * len(loader) // args.accumulate
warmup = max(1, steps // 10)


def rate(step: int) -> float:
    if step < warmup:
        return (step + 1) / warmup
    return 0.1 + 0.45 * (1 + math.cos(math.pi * (step - warmup) / max(1, steps - warmup)))


scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, rate)

for epoch in range(args.epochs):
    for number, (tokens, targets) in enumerate(loader, 1):
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=args.precision == "autocast"):
            loss = functional.cross_entropy(model(tokens).flatten(0, 1), targets.flatten())
        (loss / args.accumulate).backward()
        if number % args.accumulate == 0:
            norm = nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad(set_to_none=True)
    print(f"epoch {epoch} loss {loss.item():.3f} norm {norm:.3f} lr {scheduler.get_last_lr()[0]:.5f}")
session.close()
