"""Measures profiles: transfers through real engines, and a matrix product concurrent with them.

tune        a profile of a device            measure.py
Scale       how much is measured             schedule.py: which transfers; trial_engine.py: engines and rounds
"""

from kvoffload.calibration.measure import Tuning, tune
from kvoffload.calibration.schedule import FULL, MINIATURE, Scale

__all__ = ["FULL", "MINIATURE", "Scale", "Tuning", "tune"]
