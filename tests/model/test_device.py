"""Models computed on a device: the copies to it and back, and the time at which they may be read."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F  # noqa: N812  its usual name

import gradstream as gs
from gradstream.cli.options import load_job_with
from gradstream.errors import ConfigError, GradientError, UserCodeError
from gradstream.job.job import Job, build_model
from gradstream.job.validation import check_script
from gradstream.model import Batch, TorchModel, device_model, from_torch
from gradstream.model import devices as devices_file
from gradstream.model.device_model import DeviceModel, Landing, on_device
from gradstream.model.devices import Copied, Streams, device_of, streams_of
from gradstream.model.rows import RowGradient
from gradstream.run.planning import plan_run
from gradstream.run.records import write_spec
from gradstream.run.result import described, reopen
from gradstream.runtime.base import Report
from late_streams import LateStreams

CUDA = pytest.mark.skipif(not torch.cuda.is_available(), reason="torch has no CUDA device here")


@pytest.fixture(autouse=True)
def _small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each tensor is copied by itself."""
    monkeypatch.setattr(device_model, "COPY_ELEMS", 1)


class Net(nn.Module):
    """Buffers, dropout, a tied weight, one that the loss does not depend on, and one that is frozen."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(6)
        self.first, self.unused, self.second = nn.Linear(6, 9), nn.Linear(9, 9), nn.Linear(9, 9)
        self.again, self.head = nn.Linear(9, 9, bias=False), nn.Linear(9, 3)
        self.again.weight = self.second.weight
        self.scale = nn.Parameter(torch.full((3,), 0.5), requires_grad=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = torch.tanh(self.first(self.norm(x)))
        x = self.again(F.dropout(torch.tanh(self.second(x)), 0.25, self.training))
        return self.head(x) * self.scale  # type: ignore[no-any-return]


def net(loss: Any = F.cross_entropy) -> TorchModel:
    return from_torch(Net, loss)


@pytest.fixture
def batch() -> Batch:
    rng = np.random.default_rng(0)
    return Batch(rng.standard_normal((8, 6)), rng.integers(0, 3, 8), 8, np.arange(8))


def staged(model: TorchModel, streams: Callable[[], Streams]) -> DeviceModel:
    return DeviceModel(*model.given, streams=streams)


Watch = Callable[[torch.Tensor], Report]
"""Makes a report of the vector that is reported on."""


def differentiate(
    model: TorchModel, batch: Batch, watch: Watch = lambda gradient: lambda elems: None
) -> tuple[float, torch.Tensor]:
    """Loss and gradient at the parameters of seed 3."""
    parameters = torch.empty(model.layout.elems)
    model.init(3, parameters)
    gradient = torch.full_like(parameters, torch.nan)
    return model.gradient(parameters, batch, gradient, seed=7, report=watch(gradient)), gradient


def early(model: TorchModel, batch: Batch) -> list[int]:
    """The reports of a gradient that came before their elements had arrived."""
    _, expected = differentiate(net(), batch)
    reports: list[tuple[int, bool]] = []

    differentiate(model, batch, lambda g: lambda n: reports.append((n, torch.equal(g[:n], expected[:n]))))
    assert reports[-1][0] == model.layout.elems
    assert [n for n, _ in reports] == sorted({n for n, _ in reports})
    return [n for n, arrived in reports if not arrived]


# ---- with a stand-in: a second memory, and late copies ----------------------------------


@pytest.mark.parametrize("late", [0, 1, 3, 1000])
def test_bits_of_plain_torch_and_nothing_is_read_before_it_is_there(late: int, batch: Batch) -> None:
    model = staged(net(), lambda: LateStreams(late))
    (loss, gradient), (expected_loss, expected) = differentiate(model, batch), differentiate(net(), batch)
    assert loss == expected_loss
    assert torch.equal(gradient, expected)
    assert early(staged(net(), lambda: LateStreams(late)), batch) == []


def test_copies_that_are_made_at_once(batch: Batch) -> None:
    model = staged(net(), lambda: Streams(torch.device("cpu")))
    assert torch.equal(differentiate(model, batch)[1], differentiate(net(), batch)[1])
    assert early(model, batch) == []


def test_a_report_that_ignores_its_event_is_noticed(batch: Batch, monkeypatch: pytest.MonkeyPatch) -> None:
    """The planted fault."""

    def tell(landing: Landing, *, wait: bool) -> None:
        while landing._under_way:
            landing._under_way.popleft()[1]()

    monkeypatch.setattr(Landing, "_report_arrived", tell)
    with pytest.raises(GradientError, match="loss is nan"):
        differentiate(staged(net(), LateStreams), batch)
    monkeypatch.setattr(Landing, "scalar", lambda landing, value, then: then(0.0))
    assert early(staged(net(), LateStreams), batch) != []


def test_a_gradient_leaves_while_backprop_goes_on(batch: Batch) -> None:
    streams = LateStreams(late=1)
    model = staged(net(), lambda: streams)
    asked: list[int] = []

    differentiate(model, batch, lambda _: lambda n: asked.append(streams.asked))
    assert len(asked) >= 5
    assert asked[0] < streams.asked  # copies of layers whose backprop came after that report
    assert streams.made == streams.asked


def test_small_tensors_leave_together(batch: Batch, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device_model, "COPY_ELEMS", 100)
    streams = LateStreams()
    model = staged(net(), lambda: streams)
    assert torch.equal(differentiate(model, batch)[1], differentiate(net(), batch)[1])
    assert streams.asked == 1 + 2  # the loss; head and second; what waits for the unused, with the rest


def test_a_loss_that_is_not_finite_is_said_before_anything_is_reported(batch: Batch) -> None:
    streams, reports = LateStreams(), list[int]()
    model = staged(net(lambda o, t: F.cross_entropy(o, t) * torch.inf), lambda: streams)
    with pytest.raises(GradientError, match="loss is inf"):
        differentiate(model, batch, lambda _: reports.append)
    assert not reports
    assert streams.made == streams.asked


def test_nothing_is_under_way_after_a_failure(batch: Batch) -> None:
    class Breaks(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
            return x.clone()

        @staticmethod
        def backward(ctx: Any, *gradients: Any) -> Any:
            if broken:
                raise RuntimeError("mine")
            return gradients[0]

    class Broken(Net):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return super().forward(Breaks.apply(x.requires_grad_()))  # type: ignore[no-untyped-call]

    broken, streams = [True], LateStreams(late=1000)
    model = staged(from_torch(Broken, F.cross_entropy), lambda: streams)
    with pytest.raises(RuntimeError, match="mine"):
        differentiate(model, batch)
    assert streams.made == streams.asked > 1
    broken.clear()
    assert torch.equal(differentiate(model, batch)[1], differentiate(net(), batch)[1])


@pytest.mark.parametrize(
    ("loss", "words"),
    [
        (lambda o, t: F.cross_entropy(o, t, reduction="none"), "shape .8,., expected a scalar"),
        (lambda o, t: F.cross_entropy(o, t).detach(), "does not depend on any parameter"),
        (lambda o, t: 1.0, "loss is a float"),
    ],
)
def test_unusable_losses(loss: Any, words: str, batch: Batch) -> None:
    with pytest.raises(GradientError, match=words):
        differentiate(staged(net(loss), LateStreams), batch)


def test_evaluation_buffers_and_names(batch: Batch) -> None:
    plain, model = net(), staged(net(), LateStreams)
    parameters = torch.empty(plain.layout.elems)
    plain.init(3, parameters)
    for one in (plain, model):
        differentiate(one, batch)
    assert torch.equal(model.outputs(parameters, batch.inputs), plain.outputs(parameters, batch.inputs))
    assert model.held_out_loss(parameters, batch) == plain.held_out_loss(parameters, batch)
    for name, buffer in plain.buffers().items():
        assert np.array_equal(model.buffers()[name], buffer), name
    model.load_buffers({name: buffer * 0 for name, buffer in plain.buffers().items()})
    assert not any(buffer.any() for buffer in model.buffers().values())
    model.tree(parameters)["head.bias"][...] = 1  # the exchanged vector, and not what the device has of it
    assert dict(model.layout.views(parameters))["head.bias"].tolist() == [1, 1, 1]
    assert model.tree(parameters).keys() == plain.tree(parameters).keys()
    with pytest.raises(ConfigError, match="take length and dtype from the model's layout"):
        model.outputs(torch.zeros(5), batch.inputs)


def test_the_vectors_of_gradients_are_pinned_and_no_others(batch: Batch) -> None:
    streams = LateStreams()
    model = staged(net(), lambda: streams)
    parameters, gradient = torch.zeros(model.layout.elems), torch.zeros(model.layout.elems)
    model.outputs(parameters, batch.inputs)
    assert not streams.pinned  # an evaluation has a new vector each time
    model.gradient(parameters, batch, gradient, seed=0, report=lambda n: None)
    assert streams.pinned == {parameters.data_ptr(), gradient.data_ptr()}


@pytest.fixture
def _moves_to_meta() -> Iterator[None]:
    """A parameter becomes one of the device "meta" by being swapped; to a GPU it goes by its data."""
    torch.__future__.set_swap_module_params_on_conversion(True)
    yield
    torch.__future__.set_swap_module_params_on_conversion(False)


@pytest.mark.usefixtures("_moves_to_meta")
def test_all_that_is_computed_with_is_on_the_device(batch: Batch) -> None:
    """torch's device without memory refuses to compute with tensors of main memory."""

    class Nowhere(Streams):
        def to_host(self, source: torch.Tensor, view: torch.Tensor) -> Copied:
            assert (source.device.type, view.device.type) == ("meta", "cpu")
            return super().to_host(torch.zeros(source.shape), view)

    weighted = nn.CrossEntropyLoss(weight=torch.ones(3))
    model = staged(net(weighted), lambda: Nowhere(torch.device("meta")))
    reports = list[int]()
    loss, gradient = differentiate(model, batch, lambda _: reports.append)
    assert (loss, gradient.abs().sum().item()) == (0.0, 0.0)
    assert len(reports) >= 5
    assert weighted.weight is not None and weighted.weight.device.type == "cpu"  # the user's own stays
    assert model.tree(gradient)["scale"].tolist() == [0.5] * 3


def test_row_sparse_gradients_and_trees_of_inputs() -> None:
    class Bag(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table, self.head = nn.Embedding(50, 4, sparse=True), nn.Linear(4, 2)

        def forward(self, tokens: torch.Tensor, weights: torch.Tensor) -> dict[str, torch.Tensor]:
            return {"logits": self.head((self.table(tokens) * weights[..., None]).mean(1))}

    rng = np.random.default_rng(0)
    inputs = {"tokens": rng.integers(0, 50, (8, 3)), "weights": rng.random((8, 3))}
    batch = Batch(inputs, rng.integers(0, 2, 8), 8, np.arange(8))
    plain = from_torch(Bag, lambda o, t: F.cross_entropy(o["logits"], t), spread=True)
    found = []
    for model in (plain, staged(plain, LateStreams)):
        parameters = torch.ones(model.layout.elems)
        gradient, rows = torch.zeros(model.layout.rest.elems), RowGradient(model.layout.tables, torch.float32)
        model.gradient(parameters, batch, gradient, seed=0, report=lambda n: None, rows=rows)
        outputs: Any = model.outputs(parameters, inputs)
        found.append((gradient, *rows[model.layout.tables[0]], outputs["logits"]))
    assert all(map(torch.equal, *found))


def test_no_samples(batch: Batch) -> None:
    empty, reports = Batch(batch.inputs[:0], batch.targets[:0], 0, np.arange(0)), list[int]()
    loss, gradient = differentiate(staged(net(), LateStreams), empty, lambda _: reports.append)
    assert (loss, gradient.abs().sum().item(), reports) == (0.0, 0.0, [len(gradient)])


@pytest.mark.parametrize(
    "options",
    [
        {"strategy": "synchronous", "clip_norm": 0.5, "evaluate_every": 2},
        {"strategy": "synchronous", "accumulate": 3},
        {"strategy": "allreduce"},
        {"strategy": "downpour", "evaluate_every": "epoch"},
        {"strategy": "diloco"},
    ],
    ids=lambda options: "-".join(map(str, options.values())),
)
def test_a_run_has_the_bits_of_one_without_a_device(options: Any) -> None:
    rng = np.random.default_rng(0)
    x, y = rng.standard_normal((96, 6)), rng.integers(0, 3, 96)
    data = gs.from_arrays(x[:64], y[:64], x[64:], y[64:])
    options = {"workers": 2, "batch_size": 8, "epochs": 2, "seed": 5, "chunk_elems": 64, **options}
    found = []
    for model in (net(), staged(net(), LateStreams)):
        run = gs.simulate(model, data, optimizer=gs.optim.SGD(lr=0.1), **options)
        found.append((run.parameters, [row["loss"] for row in run.history], run.evaluate(), run.evaluations))
    assert {name: a.tobytes() for name, a in found[0][0].items()} == {
        name: a.tobytes() for name, a in found[1][0].items()
    }
    assert found[0][1:] == found[1][1:]


# ---- names of devices -------------------------------------------------------------------


@pytest.fixture
def two_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.accelerator, "device_count", lambda: 2)
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda: torch.device("cuda"))


@pytest.mark.usefixtures("two_gpus")
def test_workers_share_the_gpus_of_a_machine() -> None:
    for name in ("cuda", "auto"):
        assert [str(device_of(name, rank)) for rank in range(4)] == ["cuda:0", "cuda:1"] * 2
    assert str(device_of("cuda:1", 2)) == "cuda:1"
    assert str(device_of("cpu", 1)) == "cpu"


@pytest.mark.usefixtures("two_gpus")
@pytest.mark.parametrize("name", ["cuda:2", "mps", "gpu", "cpu:1", "", "meta"])
def test_a_device_that_is_not_there_is_named_with_those_that_are(name: str) -> None:
    with pytest.raises(ConfigError, match=r"device='.*': torch .* has cpu, cuda:0, cuda:1 on this machine"):
        device_of(name)


def a_job(model: Any = None, **options: Any) -> Job:
    data = gs.from_arrays(np.zeros((8, 6)), np.zeros(8, np.int64))
    return gs.Job(model or net(), data, **{"epochs": 1, **options})


def test_a_job_is_refused_before_it_is_started(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.accelerator, "device_count", lambda: 0)
    with pytest.raises(ConfigError, match=r"device='cuda': torch .* has cpu on this machine"):
        plan_run(a_job(device="cuda"), "test")
    plan_run(a_job(device="auto"), "test")
    assert (
        build_model(a_job(device="auto")).outputs(torch.zeros(net().layout.elems), np.zeros((1, 6))).sum()
        == 0
    )


@pytest.mark.usefixtures("two_gpus")
def test_what_has_no_device_of_ours_is_refused() -> None:
    functions = gs.from_functions(lambda seed: np.zeros(1), lambda p, x: x * p, lambda p, x, y: p)
    with pytest.raises(ConfigError, match=r"device='cuda': a FunctionsModel computes where it likes"):
        plan_run(a_job(functions, device="cuda"), "test")
    plan_run(a_job(functions, device="auto"), "test")
    with pytest.raises(ConfigError, match=r"device='cuda': this script has a training loop of its own"):
        check_script(a_job(device="cuda"))


JOB = """
import numpy as np, gradstream as gs
from torch import nn

def job():
    rng = np.random.default_rng(0)
    x = rng.standard_normal((64, 2)).astype("float32")
    data = gs.from_arrays(x[:32], x[:32, :1], x[32:], x[32:, :1])
    model = gs.from_torch(lambda: nn.Linear(2, 1), nn.functional.mse_loss)
    return gs.Job(model, data, batch_size=4, steps=3)
"""


def test_where_the_device_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "mine.py"
    file.write_text(JOB)
    assert load_job_with(str(file)).device == "cpu"
    monkeypatch.setenv("GRADSTREAM_DEVICE", "auto")
    assert load_job_with(str(file)).device == "auto"
    assert load_job_with(str(file), device="cuda:1").device == "cuda:1"


def test_a_run_is_evaluated_again_where_its_device_is_not(tmp_path: Path) -> None:
    """`auto`, with processes: on the CPU here, where torch has no accelerator."""
    file, folder = tmp_path / "mine.py", tmp_path / "run"
    file.write_text(JOB)
    run = gs.train(load_job_with(str(file)), device="auto", run_dir=folder)
    told = (folder / "nodes.json").read_text()
    assert '"device": "auto"' in told
    (folder / "nodes.json").write_text(told.replace('"device": "auto"', '"device": "cuda:7"'))
    write_spec(described(folder), folder)  # as on that machine
    again, _ = reopen(folder)
    assert again.evaluate().loss == pytest.approx(run.evaluate().loss)
    assert '"device": "cuda:7"' in (folder / "nodes.json").read_text()


def test_memory_is_pinned_in_its_place_where_that_outlives_a_fork() -> None:
    releases = ["4.18.0-553.el8", "5.9.16", "5.10.0-28-amd64", "6.8.0", "unknown"]
    assert [devices_file._outlive_forks(r) for r in releases] == [False, False, True, True, False]


# ---- with a GPU -------------------------------------------------------------------------


@CUDA
def test_a_gpu_gives_about_the_gradient_of_the_cpu(batch: Batch) -> None:
    """Without dropout, which draws other numbers there."""

    def build() -> nn.Module:
        return nn.Sequential(nn.BatchNorm1d(6), nn.Linear(6, 9), nn.Tanh(), nn.Linear(9, 3))

    plain = from_torch(build, nn.CrossEntropyLoss(weight=torch.tensor([1.0, 2.0, 3.0])))
    model, reports = on_device(plain, "cuda"), list[int]()
    loss, gradient = differentiate(model, batch, lambda _: reports.append)
    expected_loss, expected = differentiate(plain, batch)
    assert loss == pytest.approx(expected_loss, rel=1e-4)
    torch.testing.assert_close(gradient, expected, rtol=1e-3, atol=1e-4)
    assert gradient.device.type == "cpu"
    assert reports == sorted(set(reports))
    assert reports[-1] == len(gradient)
    parameters = torch.empty_like(gradient)
    plain.init(3, parameters)
    outputs = model.outputs(parameters, batch.inputs)
    torch.testing.assert_close(outputs, plain.outputs(parameters, batch.inputs), rtol=1e-3, atol=1e-3)
    for name, buffer in plain.buffers().items():
        np.testing.assert_allclose(model.buffers()[name], buffer, rtol=1e-3, atol=1e-5)


@CUDA
def test_dropout_on_a_gpu_is_a_function_of_the_seed(batch: Batch) -> None:
    model = on_device(net(), "cuda")
    torch.cuda.manual_seed(1)
    expected = torch.rand(1, device="cuda")
    torch.cuda.manual_seed(1)
    first, again = (differentiate(model, batch)[1] for _ in range(2))
    assert torch.equal(torch.rand(1, device="cuda"), expected)  # the caller's generator is left alone
    assert torch.equal(first, again)


@CUDA
@pytest.mark.parametrize("times", [1, 20])
def test_reported_prefixes_of_a_large_gradient_are_final(times: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()  # pieces of the usual size

    def build() -> nn.Module:
        return nn.Sequential(*(nn.Linear(1024, 1024) for _ in range(8)))

    rng = np.random.default_rng(0)
    x = rng.standard_normal((64, 1024), np.float32)
    model, batch = on_device(from_torch(build, F.mse_loss), "cuda"), Batch(x, x, 64, np.arange(64))
    parameters, gradient = torch.empty(model.layout.elems), torch.empty(model.layout.elems)
    model.init(0, parameters)
    parts: list[torch.Tensor] = []

    def report(elems: int) -> None:
        parts.append(gradient[:elems].clone())

    for _ in range(times):
        parts.clear()
        gradient.fill_(torch.nan)
        model.gradient(parameters, batch, gradient, seed=0, report=report)
        assert len(parts) > 1
        assert all(torch.equal(part, gradient[: len(part)]) for part in parts)
    pinned = parameters.is_pinned(), gradient.is_pinned()
    assert pinned == (devices_file._PINS_OUTLIVE_FORKS,) * 2
    del model
    gc.collect()
    assert not gradient.is_pinned()


@CUDA
def test_more_vectors_than_stay_pinned() -> None:
    streams = streams_of(torch.device("cuda", 0))
    vectors = [torch.zeros(devices_file.PIN_BYTES) for _ in range(devices_file.MAX_PINNED + 2)]
    for vector in vectors:
        streams.pin(vector)
    if devices_file._PINS_OUTLIVE_FORKS:
        assert [vector.is_pinned() for vector in vectors] == [False] * 2 + [True] * devices_file.MAX_PINNED
    assert torch.zeros(1, device="cuda").item() == 0  # no error of theirs is left


@CUDA
@pytest.mark.parametrize("strategy", ["synchronous", "downpour", "allreduce"])
def test_a_job_trains_on_a_gpu(strategy: str, tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    x = rng.standard_normal((640, 6), np.float32)
    y = (x @ rng.standard_normal((6, 3))).argmax(1)
    run = gs.train(
        from_torch(lambda: nn.Linear(6, 3), F.cross_entropy),
        gs.from_arrays(x[:512], y[:512], x[512:], y[512:]),
        strategy=strategy,
        optimizer=gs.optim.SGD(lr=0.5),
        workers=2,
        batch_size=16,
        epochs=4,
        evaluate_every="epoch",
        device="cuda",
        processes=False,
        run_dir=tmp_path / "run",
    )
    accuracy = run.evaluate().accuracy
    assert accuracy is not None
    assert accuracy > 0.8


@CUDA
def test_what_runs_out_of_memory_there_says_so(tmp_path: Path) -> None:
    def loss(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        return outputs.sum() + torch.empty(1 << 46, device=outputs.device).sum()

    with pytest.raises(UserCodeError, match="out of memory"):
        gs.train(
            from_torch(lambda: nn.Linear(6, 3), loss),
            gs.from_arrays(np.zeros((8, 6)), np.zeros((8, 3))),
            workers=1,
            epochs=1,
            device="cuda",
            processes=False,
            run_dir=tmp_path / "run",
        )
