"""Analyses of a finished run: how sharp its minimum is, and the loss between it and other runs."""

from gradstream.ext.analysis.full_loss import FullLoss
from gradstream.ext.analysis.sharpness import Sharpness, sharpness
from gradstream.ext.analysis.surface import Surface, surface

__all__ = ["FullLoss", "Sharpness", "Surface", "sharpness", "surface"]
