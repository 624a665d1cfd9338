"""A small transformer that learns to write like this repository's licence."""

from pathlib import Path

import torch
from torch import nn

STEPS, BATCH, LENGTH, WIDTH = 300, 16, 48, 64

torch.manual_seed(0)
text = Path(__file__).resolve().parents[2].joinpath("LICENSE").read_text()
alphabet = sorted(set(text))
letters = torch.tensor([alphabet.index(letter) for letter in text])
train, held_out = letters[: -len(letters) // 10], letters[-len(letters) // 10 :]


class Transformer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(len(alphabet), WIDTH)
        self.place = nn.Parameter(0.02 * torch.randn(LENGTH, WIDTH))
        layer = nn.TransformerEncoderLayer(WIDTH, 4, 4 * WIDTH, 0.0, batch_first=True, norm_first=True)
        self.layers = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.head = nn.Linear(WIDTH, len(alphabet), bias=False)
        nn.init.normal_(self.embed.weight, std=0.02)
        self.head.weight = self.embed.weight  # tied

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        mask = nn.Transformer.generate_square_subsequent_mask(tokens.shape[1])
        hidden = self.layers(self.embed(tokens) + self.place, mask=mask, is_causal=True)
        return self.head(hidden)


def windows(source: torch.Tensor, starts: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    rows = starts[:, None] + torch.arange(LENGTH)
    return source[rows], source[rows + 1]


def loss_of(model: nn.Module, tokens: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    with torch.autocast("cpu", dtype=torch.bfloat16):
        scores = model(tokens)
    return nn.functional.cross_entropy(scores.float().flatten(0, 1), targets.flatten())


model = Transformer()
optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, weight_decay=0.01)
scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1.0, (step + 1) / 30))
order = torch.randint(len(train) - LENGTH - 1, (STEPS, BATCH))

for starts in order:
    loss = loss_of(model, *windows(train, starts))
    optimizer.zero_grad()
    loss.backward()
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    scheduler.step()

model.eval()
with torch.no_grad():
    starts = torch.arange(0, len(held_out) - LENGTH - 1, LENGTH)
    print(f"held-out loss {loss_of(model, *windows(held_out, starts)):.3f}")
