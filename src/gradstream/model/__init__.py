"""Makes a `Model` on one flat vector out of functions, a PyTorch module, JAX functions, or layers."""

from gradstream.model.base import Batch, Layout, Model, Reduction, Slot, finite
from gradstream.model.buffers import average_buffers
from gradstream.model.functions import FunctionsModel, from_functions
from gradstream.model.jax_functions import JaxModel, from_jax
from gradstream.model.layers import from_layers
from gradstream.model.rows import Rows
from gradstream.model.torch_module import TorchModel, from_torch

__all__ = [
    "Batch",
    "FunctionsModel",
    "JaxModel",
    "Layout",
    "Model",
    "Reduction",
    "Rows",
    "Slot",
    "TorchModel",
    "average_buffers",
    "finite",
    "from_functions",
    "from_jax",
    "from_layers",
    "from_torch",
]
