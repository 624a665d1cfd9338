"""Split runs whose activations travel in two bytes a number."""

from __future__ import annotations

from collections import Counter
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import gradstream as gs
from gradstream.codec.casts import DTYPES, Cast
from gradstream.errors import ConfigError, UnknownNameError
from gradstream.run.result import Run
from gradstream.split.plan import DATA, Value
from gradstream.worker.parts.channel import VALUES, PartChannel, as_sent, is_encodable
from split_jobs import net, run


def narrow() -> nn.Module:
    return net().float()


def trained(dtype: str | None, **options: Any) -> Run:
    given: dict[str, Any] = {
        "build": narrow,
        "split": 3,
        "workers": 1,
        "strategy": "allreduce",
        "micro_batches": 2,
    }
    return run(**{**given, **options}, pipeline_dtype=dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("elems", [0, 1, 7, 64])
def test_a_codec_rounds_to_the_nearest_number_of_two_bytes(dtype: str, elems: int) -> None:
    codec, tensor = Cast(dtype), torch.randn(elems, generator=torch.Generator().manual_seed(elems))
    encoded, decoded = torch.empty(codec.encoded_bytes(elems), dtype=torch.uint8), torch.empty(elems)
    assert len(encoded) == 2 * elems
    codec.encode(tensor, encoded)
    codec.decode(encoded, decoded)
    assert torch.equal(decoded, tensor.to(DTYPES[dtype]).float())


class _Sent:
    """Bytes and sizes of the tensors that parts send each other, by the name of the value."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.bytes, self.sizes = Counter[str](), dict[str, Counter[int]]()
        inner = PartChannel._send

        async def send(channel: PartChannel, part: int, tag: int, tensor: torch.Tensor) -> None:
            if tag >= VALUES:
                values = channel._model.plan.values
                name = values[(tag - VALUES) // 4 % len(values)].name
                size = as_sent(tensor).nbytes
                self.bytes[name] += size
                self.sizes.setdefault(name, Counter())[size] += 1
            await inner(channel, part, tag, tensor)

        monkeypatch.setattr(PartChannel, "_send", send)


@pytest.mark.parametrize("pipeline", ["gpipe", "interleaved", "pipedream"])
def test_activations_travel_in_half_of_the_bytes_and_nothing_else_does(
    pipeline: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    given = {"pipeline": pipeline, "micro_batches": 1 if pipeline == "pipedream" else 2}
    given |= {"split": 2} if pipeline == "interleaved" else {}
    sent = []
    for dtype in (None, "bfloat16"):
        with monkeypatch.context() as patched:
            sent.append(_Sent(patched))
            trained(dtype, **given, batch_size=12)
    whole, half = (one.bytes for one in sent)
    assert whole.keys() == half.keys() and "targets" in whole
    for name, size in whole.items():
        assert half[name] == (size if name in ("inputs", "targets") else size / 2), name


def test_an_odd_number_of_elements_is_filled_up(monkeypatch: pytest.MonkeyPatch) -> None:
    sent = _Sent(monkeypatch)
    trained("float16", split=2, micro_batches=1, batch_size=3, epochs=1)
    ((size, _),) = next(sizes for name, sizes in sent.sizes.items() if name != "targets").items()
    assert size % 4 == 0


def losses(done: Run) -> Any:
    return np.array([event["loss"] for event in done.events if event["event"] == "step"])


def test_the_curve_of_the_loss_stays_close() -> None:
    dtype = "bfloat16"
    given: dict[str, Any] = {"epochs": 6, "optimizer": gs.optim.Adam(lr=0.02), "pipeline": "1f1b"}
    exact, rounded = (losses(trained(one, **given)) for one in (None, dtype))
    assert exact[-6:].mean() < 0.95 * exact[:6].mean(), "it learns"
    assert 0 < np.abs(exact - rounded).mean() < 0.01


def test_evaluations_are_those_of_the_model_without_a_codec(monkeypatch: pytest.MonkeyPatch) -> None:
    sent = _Sent(monkeypatch)
    done = trained("bfloat16", evaluate_every=3, epochs=1)
    for name, sizes in sent.sizes.items():
        if name not in ("inputs", "targets"):
            held_out = max(sizes)  # 10 samples, of 4 bytes a number; training passes have 3, of 2 bytes
            assert sizes[held_out] == len(done.evaluations)


def value(**given: Any) -> Value:
    return Value(**{"name": "x", "source": 0, "shape": (3,), "dtype": torch.float32, **given})


def test_only_activations_of_float32_are_encoded() -> None:
    assert is_encodable(value())
    others: list[dict[str, Any]] = [
        {"dtype": torch.int64},
        {"dtype": torch.float64},
        {"dtype": torch.bfloat16},
    ]
    for given in (*others, {"source": DATA}, {"per_sample": False}):
        assert not is_encodable(value(**given))


class _Indexed(nn.Module):
    """Integers and numbers cross the cut."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.narrow = nn.Linear(6, 16), nn.Linear(16, 1)
        self.table, self.last = nn.Embedding(16, 8), nn.Linear(8, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.first(x)
        narrow = self.narrow(hidden)
        result: torch.Tensor = self.last(narrow * self.table(hidden.argmax(1)))
        return result


def test_integers_cross_a_cut_unchanged(monkeypatch: pytest.MonkeyPatch) -> None:
    sent = []
    for dtype in (None, "float16"):
        with monkeypatch.context() as patched:
            sent.append(_Sent(patched))
            trained(dtype, build=_Indexed, split=2)
    whole, half = (one.bytes for one in sent)
    same = {name for name, size in whole.items() if half[name] == size}
    assert "argmax" in same and len(whole) > len(same)


@pytest.mark.parametrize(
    ("error", "options", "message"),
    [
        (ConfigError, {"build": net}, r"torch\.float64, and only torch\.float32 .* leave it out"),
        (UnknownNameError, {"pipeline_dtype": "bf16"}, "bfloat16"),
        (ConfigError, {"split": 1, "micro_batches": 1}, "without split"),
        (ConfigError, {"pipeline": gs.pipeline.Hybrid(), "micro_batches": 1}, "only schedules"),
    ],
    ids=["float64", "name", "whole", "hybrid"],
)
def test_where_nothing_can_be_encoded_it_is_refused_with_the_remedy(
    error: type[ConfigError], options: dict[str, Any], message: str
) -> None:
    given = {"build": narrow, "split": 3, "workers": 1, "micro_batches": 2, "pipeline_dtype": "bfloat16"}
    with pytest.raises(error, match=message):
        run(**{**given, **options})
