"""Callbacks that show a run in TensorBoard, wandb, MLflow or trackio."""

__all__ = ()
