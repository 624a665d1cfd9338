"""Every checkpoint's model file is a whole state dict: frozen parameters and second names are in it."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from safetensors.torch import load
from torch import nn

import gradstream as gs
from gradstream.checkpoint import kept
from gradstream.checkpoint.folder import MODEL
from gradstream.run.result import FINAL_MODEL
from gradstream.runtime.storage import MemoryStorage
from gradstream.session.binding import ModuleBinding


class Tied(nn.Module):
    """Encoder and decoder share a weight; a frozen layer, another with two names, BatchNorm between."""

    def __init__(self) -> None:
        super().__init__()
        self.encode, self.decode = nn.Linear(6, 6, bias=False), nn.Linear(6, 6)
        self.decode.weight = self.encode.weight
        self.norm = nn.BatchNorm1d(6)
        self.frozen, self.again = nn.Linear(6, 6), nn.Linear(6, 6, bias=False)
        self.frozen.requires_grad_(False)
        self.frozen.to(torch.bfloat16)
        self.again.weight = self.frozen.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.norm(self.encode(x)) @ self.frozen.weight.float() + self.frozen.bias.float()
        return self.decode(hidden)  # type: ignore[no-any-return]


@pytest.mark.parametrize("strategy", ["synchronous", "downpour"])
def test_checkpoints_on_the_way_load_strictly(strategy: str) -> None:
    inputs = np.random.default_rng(0).standard_normal((60, 6)).astype("float32")
    storage = MemoryStorage()
    gs.simulate(
        gs.from_torch(Tied, nn.functional.mse_loss),
        gs.from_arrays(inputs, inputs),
        strategy=strategy,
        optimizer=gs.optim.SGD(lr=0.01, momentum=0.5),
        workers=2,
        servers=2,
        batch_size=5,
        epochs=4,
        chunk_elems=64,
        checkpoint_every=4,
        keep_last=3,
        storage=storage,
        config=gs.sim.SimulationConfig(costs={"gradient": gs.sim.Cost(base_s=0.1)}),
    )
    files = [f"{one.folder}/{MODEL}" for one in kept(storage)]
    assert len(files) == 3
    module, states = Tied(), [load(storage.read(path)) for path in [*files, FINAL_MODEL.as_posix()]]
    for state in states:
        module.load_state_dict(state, strict=True)
        assert torch.equal(state["decode.weight"], state["encode.weight"])
        for name in ("frozen.weight", "frozen.bias", "again.weight", "norm.weight"):
            assert state[name].shape == module.state_dict()[name].shape
        assert torch.equal(state["frozen.weight"], states[0]["frozen.weight"])
        assert torch.equal(state["frozen.weight"], state["again.weight"])
        assert int(state["norm.num_batches_tracked"]) > 0
    assert not torch.equal(states[0]["encode.weight"], states[-1]["encode.weight"])


def test_a_loops_module_has_them_as_well() -> None:
    module = Tied()
    trained = [parameter for parameter in module.parameters() if parameter.requires_grad]
    binding = ModuleBinding(module, [p for p in trained if p is not module.decode.bias])  # of no optimizer
    fixed = binding.fixed()
    assert fixed.second == {"decode.weight": "encode.weight"}
    assert set(fixed.frozen) == {"decode.bias", "frozen.weight", "frozen.bias", "again.weight"}
    flat = torch.empty(binding.layout.elems)
    binding.init(0, flat)
    state = {**binding.tree(flat), **binding.buffers()}
    assert set(state) == set(module.state_dict())
    Tied().load_state_dict({name: torch.tensor(array) for name, array in state.items()}, strict=True)
    binding.load_fixed({"decode.bias": np.full(6, 7, np.float32)})
    assert module.decode.bias.tolist() == [7.0] * 6
