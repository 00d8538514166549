"""Random calls of caches from `open_cache`, with finalizers, interrupts, failing headers and kills."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

PROGRAM = Path(__file__).parent / "support" / "fuzz_door.py"


@pytest.mark.long
def test_random_calls_of_caches_give_the_bytes_of_their_keys_and_lose_none(seed: int) -> None:
    command = [sys.executable, str(PROGRAM), "--seconds", "10", "--seed", str(seed)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-5000:] + done.stderr[-2000:]
    assert " 0 wrong, 0 hangs" in done.stdout
