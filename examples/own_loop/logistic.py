"""Logistic regression in numpy."""

import numpy as np

import gradstream

EPOCHS, BATCH, RATE = 20, 20, 0.5

session = gradstream.join()
random = np.random.default_rng(0)
inputs = random.standard_normal((2000, 10))
truth = random.standard_normal(10)
labels = (inputs @ truth + random.logistic(size=2000) > 0).astype(float)
train, held_out = slice(1600), slice(1600, None)


def probability(weights: np.ndarray, samples: np.ndarray) -> np.ndarray:
    return 1 / (1 + np.exp(-samples @ weights))


weights = np.zeros(10)
for _ in range(EPOCHS):
    batches = np.split(random.permutation(1600), 1600 // BATCH)
    for batch in session.shard(batches):
        error = probability(weights, inputs[batch]) - labels[batch]
        gradient = inputs[batch].T @ error / len(batch)
        session.exchange(weights, gradient, gradstream.optim.SGD(RATE))
session.close()

right = (probability(weights, inputs[held_out]) > 0.5) == (labels[held_out] > 0.5)
print(f"held-out accuracy {right.mean():.3f}")
