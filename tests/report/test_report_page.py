"""The report as a file: complete, safe, and quiet in a browser."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

import gradstream as gs
from gradstream._simulate import simulate
from gradstream.cli import main
from gradstream.job.files import load_job
from gradstream.report.page import PageSource, page
from gradstream.run.result import Run
from gradstream.runtime.simulation import Cost, SimulationConfig
from gradstream.telemetry.events import EvaluatedEvent, encode
from gradstream.testing.runs import least_squares

VOID = {"meta", "br"}
HOSTILE = "</script><script>alert(1)</script>&\"'\x1b[2J\u202e"


class Balance(HTMLParser):
    """Collects the elements, and fails where one is closed that was not opened last."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.seen: list[tuple[str, dict[str, str | None]]] = []
        self.feed(text)
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.seen.append((tag, dict(attrs)))
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.seen.append((tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag


@pytest.fixture(scope="module")
def slow_run() -> Run:
    """Three workers, of which one takes three times as long; two shards; an evaluation."""
    model, data = least_squares(48, 200)
    config = SimulationConfig(costs={"gradient": Cost(base_s=0.1)}, speeds={"worker-2": 1 / 3})
    options: dict[str, Any] = {"workers": 3, "servers": 2, "steps": 8, "chunk_elems": 64, "batch_size": 2}
    run = simulate(
        model, data, strategy="synchronous", optimizer=gs.optim.SGD(lr=0.01), config=config, **options
    )
    found = EvaluatedEvent(step=4, epoch=0, samples=24, accuracy=0.5, loss=2.0, metrics={"top5": 0.75})
    evaluated = json.loads(encode(found, node="worker-0", time_s=1.5))
    return Run(events=[*run.events, evaluated], info=run.info)


def test_the_report_names_the_slow_worker(slow_run: Run, tmp_path: Path) -> None:
    text = slow_run.report(tmp_path / "r.html", price=2.0).read_text()
    assert "worker-2 computes 3.0 times slower than the median; the others waited 67% of their time" in text
    for heading in ("Learning", "Timeline", "Workers", "Staleness", "Links", "Nodes", "What happened"):
        assert f"<h2>{heading}</h2>" in text
    for caption in ("loss over samples", "accuracy over time", "top5 over samples", "samples a second"):
        assert caption in text
    assert "waiting for worker-2" in text
    assert "cost, 1 machine" in text
    assert "times are virtual" in text


def test_the_report_is_one_balanced_file_that_asks_for_nothing(slow_run: Run, tmp_path: Path) -> None:
    text = slow_run.report(tmp_path / "r.html").read_text()
    seen = Balance(text).seen
    assert not [tag for tag, attributes in seen if {"src", "href", "srcset"} & set(attributes)]
    assert not re.search(r"url\(|@import|fetch\(|XMLHttpRequest", text)
    assert [tag for tag, attributes in seen if tag == "svg" and "aria-label" not in attributes] == []
    assert ("div", "0") in [(tag, attributes.get("tabindex")) for tag, attributes in seen]


def test_text_of_a_run_never_becomes_markup(slow_run: Run) -> None:
    renamed = [{**e, "node": HOSTILE if e["node"] == "worker-1" else e["node"]} for e in slow_run.events]
    failed = {
        "event": "failed",
        "node": "c",
        "time_s": 1.0,
        "culprit": HOSTILE,
        "error": "E",
        "message": HOSTILE,
    }
    text = page(
        PageSource(
            events=[*renamed, {**failed, "traceback": ""}],
            title=HOSTILE,
            config=HOSTILE,
            info={"name": HOSTILE},
        )
    )
    assert "<script>alert" not in text
    assert "\x1b" not in text and "\u202e" not in text
    assert "\\x1b[2J\\u202e" in text
    assert [tag for tag, _ in Balance(text).seen].count("script") == 2  # the data, and what zooms it


@pytest.mark.parametrize(
    "kinds",
    [{"started", "joined"}, {"step"}, {"failed"}, set()],
    ids=lambda kinds: " and ".join(sorted(kinds)) or "nothing",
)
def test_a_run_cut_short_has_a_report(slow_run: Run, kinds: set[str]) -> None:
    events = [event for event in slow_run.events if event["event"] in kinds]
    Balance(page(PageSource(events=events, title="cut short")))


def test_a_run_shows_itself_in_a_notebook(slow_run: Run) -> None:
    html = slow_run._repr_html_()
    assert "script" not in [tag for tag, _ in Balance(html).seen]
    assert "<svg" in html and "<th>strategy</th><td>synchronous</td>" in html
    assert "script" not in [tag for tag, _ in Balance(Run()._repr_html_()).seen]


def test_commands(slow_run: Run, tmp_path: Path) -> None:
    folder = tmp_path / "runs" / "20261120-net"
    folder.mkdir(parents=True)
    (folder / "run.json").write_text('{"name": "net", "began_unix_s": 1795000000.0}')
    (folder / "events.jsonl").write_text("".join(json.dumps(event) + "\n" for event in slow_run.events))

    def call(*words: object) -> str:
        result = CliRunner().invoke(main, [str(word) for word in words])
        assert result.exit_code == 0, result.output
        return result.stdout

    assert call("report", folder, "--price", 1).strip() == str(folder / "report.html")
    assert "<h1>net</h1>" in (folder / "report.html").read_text()
    call("report", folder, "-o", tmp_path / "r.html", "--tensorboard", tmp_path / "boards")
    assert (tmp_path / "boards" / "events.out.tfevents.1795000000.net").is_file()
    assert json.loads(Path(call("trace", folder).strip()).read_text())["displayTimeUnit"] == "ms"
    (line,) = call("runs", tmp_path / "runs", "--json").splitlines()
    assert json.loads(line)["status"] == "finished"
    assert "20261120-net" in call("runs", tmp_path / "runs")
    assert CliRunner().invoke(main, ["report", str(tmp_path)]).exit_code == 2


SLOW_JOB = """
import threading
import time

import numpy as np

import gradstream as gs


def gradients(parameters, inputs, targets):
    if threading.current_thread().name.startswith("worker-1"):
        time.sleep(0.3)
    error = inputs @ parameters["w"] - targets
    return float(np.mean(error**2)), {"w": 2 * inputs.T @ error / len(error)}


def job():
    inputs = np.ones((60, 3), dtype="float32")
    model = gs.from_functions(lambda seed: {"w": np.zeros(3)}, lambda p, x: x @ p["w"], gradients)
    data = gs.from_arrays(inputs, inputs.sum(axis=1))
    return gs.Job(model, data, strategy="synchronous", workers=3, steps=6, batch_size=2)
"""


def test_a_run_of_processes_names_its_slow_worker(tmp_path: Path) -> None:
    (tmp_path / "slow.py").write_text(SLOW_JOB)
    run = gs.train(load_job(str(tmp_path / "slow.py")), run_dir=tmp_path / "run")
    text = run.report(tmp_path / "r.html").read_text()
    said = re.search(
        r"worker-1 computes [\d.,]+ times slower than the median; the others waited (\d+)%", text
    )
    assert said is not None
    assert int(said[1]) > 50


# ---- in a browser -----------------------------------------------------------------------

FLAGS = [
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--enable-logging=stderr",
    "--virtual-time-budget=1000",
]

# Keys, buttons and the pointer, as a reader would use them; what came of it becomes the title.
USE = """
const lanes = document.querySelector(".lanes"), svg = lanes.querySelector("svg");
const seen = [];
const look = () => seen.push(svg.getAttribute("viewBox").split(" ").map(Math.round).join(" "));
for (const key of ["+", "ArrowRight", "-", "+", "0"]) {
  lanes.dispatchEvent(new KeyboardEvent("keydown", {key}));
  look();
}
document.querySelector('button[value="+"]').click(); look();
const box = lanes.getBoundingClientRect();
const middle = {clientX: box.left + 0.4 * box.width, clientY: box.top + 5};
lanes.dispatchEvent(new PointerEvent("pointermove", middle));
document.title = seen.join("|") + "|" + document.querySelector("output").textContent;
"""


def browse(file: Path, profile: Path) -> tuple[str, list[str]]:
    """(the document after its scripts have run, what it said on the console)."""
    chromium = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
    if chromium is None:
        pytest.skip("no chromium on this machine: apt-get install chromium")
    command = [chromium, *FLAGS, f"--user-data-dir={profile}", "--dump-dom", file.as_uri()]
    done = subprocess.run(command, capture_output=True, text=True, timeout=90, check=False)
    if done.returncode != 0 or "</html>" not in done.stdout:
        pytest.skip(f"chromium does not start here: {done.stderr[-300:]}")
    return done.stdout, [line for line in done.stderr.splitlines() if "CONSOLE" in line]


def test_a_browser_has_nothing_to_complain_about(slow_run: Run, tmp_path: Path) -> None:
    file = slow_run.report(tmp_path / "r.html")
    text = file.read_text()
    file.write_text(text.replace("</body>", f"<script>{USE}</script></body>"))
    document, console = browse(file, tmp_path / "profile")
    assert console == []
    title = re.search(r"<title>(.*?)</title>", document)
    assert title is not None
    *views, told = title[1].split("|")
    lefts_and_widths = [tuple(map(int, view.split()[::2])) for view in views]
    assert lefts_and_widths == [
        (25000, 50000), (35000, 50000), (0, 100000), (25000, 50000), (0, 100000), (25000, 50000),
    ]  # fmt: skip
    assert re.match(r"worker-0, .*: step \d+ · computed 100 ms · waited 20\d ms for worker-2", told)
    # The checker notices: a page with a fault in it, and one that wants the network.
    file.write_text(
        text.replace("</body>", "<script>missing()</script><img src='http://127.0.0.1:9/x'></body>")
    )
    _, console = browse(file, tmp_path / "profile")
    assert any("missing is not defined" in line for line in console)
    assert any("Content Security Policy" in line for line in console)
