"""OpenFile: what an interrupt leaves of one."""

from __future__ import annotations

import os
from itertools import count
from pathlib import Path

from interrupts import interrupt_at

from kvoffload.tiers.files import PAGE, SYSTEM, OpenFile


def test_an_interrupt_anywhere_in_opening_a_file_leaves_no_descriptor(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(bytes(2 * PAGE))

    def opened() -> None:
        OpenFile(str(path), SYSTEM, os.O_RDWR).try_direct(PAGE)

    before, raised = len(os.listdir("/proc/self/fd")), 0
    for number in count(1):
        outcome = interrupt_at(number, opened)
        if outcome.point is None:
            break
        raised += outcome.raised
        assert len(os.listdir("/proc/self/fd")) == before, outcome
    assert raised > 5


def test_a_file_that_an_interrupt_kept_from_being_opened_says_nothing_at_its_end() -> None:
    """Python prints what `__del__` raises, and pytest fails a test for that."""
    OpenFile.__new__(OpenFile)  # all that there is, where the interrupt comes before the first line of `__init__`
