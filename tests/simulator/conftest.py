"""The program of the simulator's tests."""

from __future__ import annotations

import pytest
from simulator_program import Program


@pytest.fixture
def program() -> Program:
    return Program()
