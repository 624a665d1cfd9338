"""Callbacks that show a run in TensorBoard, wandb, MLflow or trackio."""

from gradstream.trackers.tensorboard import TensorBoard

__all__ = ["TensorBoard"]
