"""Finalizers that call the library in its own threads, while these hold its locks: see `finalizers.py`.

The default suite takes a sample of the lines; `-m long` takes all.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from programs import ROOT
from seeds import seeds

PROGRAM = Path(__file__).with_name("finalizers.py")
SHARES = {"tiers": 0.03, "growing": 0.2, "pools": 0.03}
THREADS = {"tiers": ("-tiers", "-disk"), "growing": ("-growth",), "pools": ("-tiers", "-pool", "-pool-owner")}


@pytest.mark.parametrize("every", [False, pytest.param(True, marks=pytest.mark.long)], ids=["some", "all"])
@pytest.mark.parametrize("scenario", SHARES)
def test_finalizers_in_our_threads_wait_for_none_of_them(scenario: str, every: bool) -> None:
    """No call stands still, none that waits for our threads is let in, and no two locks are taken in both orders."""
    done = subprocess.run(
        [sys.executable, str(PROGRAM), scenario, str(seeds(1)[0]), str(1.0 if every else SHARES[scenario])],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=110,
        check=False,
    )
    assert done.returncode == 0, f"{done.stdout[-4000:]}\n{done.stderr[-4000:]}"
    assert all(f"'kvoffload{name}':" in done.stdout for name in THREADS[scenario]), done.stdout
