"""What interrupts in joining and leaving leave: no descriptor, no thread, and nothing for the collector to close."""

from __future__ import annotations

import os
import threading
import warnings
from itertools import count
from pathlib import Path

import numpy as np
import pytest
from interrupts import count_points, interrupt_at
from pooling import Rows, descriptors, eventually, mapped, serve

import kvoffload
from kvoffload.device.shared_slots import SharedSlots
from kvoffload.pool import SharedPool


def members() -> int:
    """Threads of members in this process."""
    return sum(each.name == "kvoffload-pool" for each in threading.enumerate())


def test_an_interrupt_anywhere_in_attach_and_close_leaves_nothing(tmp_path: Path) -> None:
    with serve(tmp_path) as owner, warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always", ResourceWarning)

        def join() -> None:
            SharedPool.attach(owner.path, Rows(), identity="m").close()

        join()
        eventually(lambda: "0 connections" in repr(owner), "the owner has seen it leave")
        before, there, raised = descriptors(), (members(), mapped()), 0
        for number in count(1):
            outcome = interrupt_at(number, join)
            if outcome.point is None:
                break
            raised += outcome.raised
        assert raised > 100
        eventually(lambda: (members(), mapped()) == there, "the owner alone has the memory")
        eventually(lambda: "0 connections" in repr(owner), "all have left")
        eventually(lambda: descriptors() == before, "nothing is open")
    assert [str(each.message) for each in warned] == []


@pytest.mark.long
def test_an_interrupt_anywhere_in_open_cache_over_a_pool_leaves_nothing_of_the_pool(tmp_path: Path, seed: int) -> None:
    """At some of its points; the test of attach has all of the pool's own."""
    with kvoffload.open_device(backend="simulated") as device, serve(tmp_path) as owner:
        array = device.empty((8, 4, 8), "uint16")

        def use() -> None:
            given = {"pool": owner.path, "identity": "m", "device": device}
            kvoffload.open_cache([array], axes=("blocks", "tokens", "dim"), **given).close()  # type: ignore[arg-type]

        most = count_points(use)
        eventually(lambda: "0 connections" in repr(owner), "the owner has seen it leave")
        before, there = descriptors(), (members(), mapped())
        with warnings.catch_warnings(record=True) as warned:
            warnings.simplefilter("always", ResourceWarning)  # engines say that they were never closed
            for number in np.random.default_rng(seed).choice(most, 60, replace=False):
                interrupt_at(int(number) + 1, use)
            use()
            eventually(lambda: descriptors() == before, "nothing is open")
            eventually(lambda: (members(), mapped()) == there, "the owner alone has the memory")
        assert not [each for each in warned if "socket" in str(each.message)]


def test_an_interrupt_anywhere_in_making_or_receiving_shared_slots_leaves_no_memory() -> None:
    def slots() -> int:
        return Path("/proc/self/maps").read_text().count("kvoffload-slots") + sum(
            "kvoffload-slots" in os.readlink(each) for each in Path("/proc/self/fd").iterdir() if each.is_symlink()
        )

    made = list[SharedSlots]()
    name = f"interrupts {os.getpid()}"

    def make() -> None:
        made[:] = [SharedSlots(1, 4096)]

    def receive() -> None:
        made[:] = [SharedSlots.receive(name)]

    with SharedSlots(1, 4096) as offered:
        offered.offer(name)
        before = slots()
        for call in (make, receive):
            for number in count(1):
                outcome = interrupt_at(number, call)
                if outcome.point is None:
                    break
                assert outcome.raised, outcome
                assert slots() == before, outcome
            made.pop().close()
            assert (number > 10, slots()) == (True, before)
