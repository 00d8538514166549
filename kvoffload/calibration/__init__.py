"""Measures profiles: transfers through real engines, and a matrix product concurrent with them."""

from kvoffload.calibration.measure import Tuning, tune
from kvoffload.calibration.schedule import FULL, MINIATURE, Scale

__all__ = ["FULL", "MINIATURE", "Scale", "Tuning", "tune"]
