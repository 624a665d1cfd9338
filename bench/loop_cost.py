"""Question: what do the five lines of a session cost a training loop, where nothing has to be sent?

One worker, and in its process two copies of the model: one wrapped by a session, one that torch alone knows. Steps
of the two alternate, so that both meet the same machine at the same moment; the figure is the median of the ratios
of neighbouring steps, with the interval that has it in 95 of 100 cases (order statistics).

    GRADSTREAM_DATA=... python bench/loop_cost.py            # the CNN of Caltech-101, batches of 256

Keeps what it finds with machine, commit and date in bench/results/loop-cost.json.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from contextlib import nullcontext
from pathlib import Path
from typing import Any

from common import RESULTS, ROOT, command_line, keep, origin
from gradstream.run.local.environment import node_environment

RESULT = RESULTS / "loop-cost.json"
BATCH, WARM, GOAL = 256, 3, 1.03


def loop() -> None:
    """Two loops in one: the script that `gradstream train` runs."""
    import torch

    import gradstream
    from gradstream.job.files import load_job

    session = gradstream.join(checkpoint_every=None)
    torch.set_num_threads(1)
    sys.path.insert(0, str(ROOT / "examples"))
    import caltech101

    job: Any = load_job(f"{ROOT / 'examples' / 'caltech101.py'}:cnn")
    rule = job.optimizer
    pairs = []
    for _ in range(2):
        torch.manual_seed(0)
        module = caltech101.conv_network()
        pairs.append(
            (
                module,
                torch.optim.SGD(
                    module.parameters(),
                    lr=rule.lr,
                    momentum=rule.momentum,
                    weight_decay=rule.weight_decay,
                    fused=True,
                ),
            )
        )
    pairs[1] = session.wrap(*pairs[1])
    order = torch.randperm(job.data.num_samples).numpy()

    def step(module: Any, optimizer: Any, number: int) -> float:
        start = number * BATCH % (len(order) - BATCH)
        batch = job.data.batch(order[start : start + BATCH])
        inputs, targets = torch.from_numpy(batch.inputs), torch.from_numpy(batch.targets)
        torch.manual_seed(number)  # dropout is the same in both
        begun = time.perf_counter()
        optimizer.zero_grad()
        caltech101.loss(module(inputs), targets).backward()
        optimizer.step()
        return time.perf_counter() - begun

    found = []
    for number in range(WARM + int(os.environ["LOOP_STEPS"])):
        took = [0.0, 0.0]
        for which in ((0, 1), (1, 0))[number % 2]:
            with nullcontext() if which else session.no_sync():  # of the other loop a session knows nothing
                took[which] = step(*pairs[which], number)
        if number >= WARM:
            found.append(took)
    same = all(
        torch.equal(a, b) for a, b in zip(pairs[0][0].parameters(), pairs[1][0].parameters(), strict=True)
    )
    session.close()
    Path(os.environ["LOOP_OUT"]).write_text(json.dumps({"steps_s": found, "same_bits": same}))


def main() -> None:
    """Measures it, and keeps what it finds."""
    parser = command_line(__doc__)
    parser.add_argument("--steps", type=int, default=80, help="pairs of steps")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        out = f"{folder}/out.json"
        subprocess.run(
            [
                sys.executable,
                "-m",
                "gradstream",
                "train",
                __file__,
                "--workers",
                "1",
                "--run-dir",
                f"{folder}/run",
            ],
            env={
                **os.environ,
                **node_environment(1),
                "LOOP_STEPS": str(given.steps),
                "LOOP_OUT": out,
            },
            capture_output=True,
            check=True,
        )
        found = json.loads(Path(out).read_text())
    ratios = sorted(wrapped / plain for plain, wrapped in found["steps_s"])
    middle, off = len(ratios) / 2, 0.98 * len(ratios) ** 0.5  # of the binomial of its order statistics
    row = {
        "plain_s": statistics.median(plain for plain, _ in found["steps_s"]),
        "wrapped_of_plain": statistics.median(ratios),
        "interval": [ratios[max(0, int(middle - off))], ratios[min(len(ratios) - 1, int(middle + off))]],
        "pairs": len(ratios),
        "same_bits": found["same_bits"],
    }
    low, high = row["interval"]
    print(
        f"{row['wrapped_of_plain']:.3f} of a plain step ({low:.3f} to {high:.3f}), which takes {row['plain_s']:.3f} s; "
        f"goal {GOAL}; same bits: {row['same_bits']}"
    )
    record = {
        "question": (__doc__ or "").splitlines()[0],
        **origin(node_environment(1)),
        "goal": GOAL,
        "rows": {"allreduce": row},
    }
    keep(RESULT, record)


if __name__ == "__main__":
    loop() if "LOOP_OUT" in os.environ else main()
