"""How heavy the package may be. A change that makes it lighter lowers a limit here; one that raises a limit says in the
commit's text what it brings for that, and changes the reason here if that has changed.

`python tests/project/weight.py` prints the figures, `python tests/support/call_counts.py` the calls and their files.
"""

from __future__ import annotations

import gc
import sys
from pathlib import Path
from typing import NamedTuple

import pytest
from call_counts import MEASURED
from documents import ROOT
from weight import code_lines, weigh

SLACK = 0.02  # a figure may be below its limit by so much, and by 1


class Limit(NamedTuple):
    """The most that a figure may be, and why it is what it is."""

    most: int
    reason: str


WEIGHT = {
    "code lines": Limit(
        30_220,
        "it was 36,248; `open_cache` has 340, sessions and hints 805, trees 120, packed loads in parts 60, growth 180, "
        "the codec 590, shared pools 1,920, of which vLLM's replicas have 270; finalizers, descriptors 90, the order "
        "of memory in keys 40, headers and full stores 75, manners of the driver 55, errors of the door 60, "
        "weights 300, session files 970, of which their folder as a tier has 130, the command 90, mlx-lm's caches 80",
    ),
    "files": Limit(
        221,
        "a class and its records are one file, and so is what is read together; hints have three, growth one, the "
        "codec two, shared pools nine, vLLM's and the command's part of them one each, full stores one, "
        "weights one, and session files seven: blocks, format, calls, folder, command, mlx-lm's caches, and their room",
    ),
    "helpers used once, in 1000 functions": Limit(35, "a helper has two uses, or a name that says more than its body"),
    "pages": Limit(
        3,
        "`Tier`, which is for users to derive from; `CacheState` and `RecordCalls`, whose truth may be a shared pool's "
        "owner's",
    ),
    "wide signatures": Limit(0, "options that go together are one object"),
}
CALLS = {
    "engine.store": Limit(37, "check, plan, select, order, enqueue; six are of the driver"),
    "engine.load": Limit(38, "as a store, and in which order the slots may be read"),
    "cache.store": Limit(61, "a store, and the reservation that it fills"),
    "cache.store, evicting": Limit(121, "half of it is the default policy's search for what is worth least"),
    "cache.load": Limit(59, "a load, and the lease of what it reads; `prefix` notes what recency would have found"),
    "cache.fetch": Limit(
        109, "a load, the lease that holds its keys before it is submitted, and the look-up it counts as"
    ),
    "cache.fetch, above a tier": Limit(115, "no tier is asked; its thread hears of the hits"),
    "cache.promote, in the tiers' thread": Limit(
        270, "8 keys, which a tier has done at once; its share of the entries"
    ),
}
FILES = {
    "engine.store": Limit(12, "the engine, what it checks, plans and selects, and the seam"),
    "engine.load": Limit(12, "those of a store"),
    "cache.store": Limit(18, "those of a store, the index, its state and admission; arguments for the engine have one"),
    "cache.store, evicting": Limit(21, "the policy's own, too"),
    "cache.load": Limit(18, "those of a load, the index and its state; arguments for the engine have one"),
    "cache.fetch": Limit(22, "those of a load, the promotion in front of it, its lease and the statistics"),
    "cache.fetch, above a tier": Limit(24, "the tiers' manager, and the hook by which it hears of hits"),
    "cache.promote, in the tiers' thread": Limit(14, "the promoter, the tier's job, the index, its state and policy"),
}
CHANGES = {
    "engine.store": Limit(20, "the engine and its shard, what they ask, and the seam"),
    "engine.load": Limit(21, "those of a store"),
    "cache.store": Limit(30, "those of a store; the index, its state, its entries and its policy"),
    "cache.store, evicting": Limit(48, "the policy's search goes through its model, and asks which keys have to stay"),
    "cache.load": Limit(32, "those of a load; the index, its state, its entries and its policy"),
    "cache.fetch": Limit(67, "four calls of the index: hold, count, load, release"),
    "cache.fetch, above a tier": Limit(69, "the same four calls"),
    "cache.promote, in the tiers' thread": Limit(157, "one reservation for each of 8 keys, settled one by one"),
}


def check(name: str, figure: float, limit: Limit, details: object = "", lowers: bool = True) -> None:
    assert figure <= limit.most, f"{name}: {figure:g}, at most {limit.most} ({limit.reason}) {details}"
    lowest = limit.most * (1 - SLACK) - 1
    assert figure >= lowest or not lowers, (
        f"{name}: {figure:g} is well below {limit.most}: lower the limit, so that it stays there"
    )


@pytest.fixture(scope="module")
def weight() -> dict[str, float]:
    return weigh(ROOT / "kvoffload")


@pytest.mark.parametrize("name", WEIGHT)
def test_the_package_gets_no_heavier(name: str, weight: dict[str, float]) -> None:
    check(name, weight[name], WEIGHT[name])


def test_every_figure_has_a_limit(weight: dict[str, float]) -> None:
    assert list(weight) == list(WEIGHT)
    assert list(MEASURED) == list(CALLS) == list(FILES) == list(CHANGES)
    assert all(len(limit.reason) > 10 for limits in (WEIGHT, CALLS, FILES, CHANGES) for limit in limits.values())


@pytest.mark.parametrize("name", MEASURED)
def test_a_warm_call_takes_no_more_calls_through_no_more_files(name: str) -> None:
    """Counts, not times: every call costs the host about as much as another."""
    gc.disable()  # a collection calls functions of plug-ins of pytest
    try:
        calls = MEASURED[name]()
    finally:
        gc.enable()
    # From 3.12 on a comprehension is no call; and a fetch looks or not, by how far the tiers' thread is.
    lowers = sys.version_info < (3, 12) and "tier" not in name
    check(f"calls of {name}", calls.total, CALLS[name], calls, lowers)
    check(f"files of {name}", len(calls.files), FILES[name], calls, lowers)
    check(f"changes of file of {name}", calls.changes, CHANGES[name], calls, lowers)


@pytest.mark.parametrize("figure", [95, 101])
def test_a_figure_above_its_limit_is_refused_and_one_well_below(figure: int) -> None:
    check("lines", 100, Limit(100, ""))
    check("lines", 97, Limit(100, ""))
    with pytest.raises(AssertionError, match="lines: "):
        check("lines", figure, Limit(100, ""))


def test_what_is_counted(tmp_path: Path) -> None:
    source = '''
"""A docstring."""

import math  # 1


class Base:  # 2
    """More
    lines."""

    value = (  # 3 and 2 more
        1
    )


class Only(Base):  # 6
    def wide(self, a, b, c, d, e, f, g, h, i): ...  # 7


def _once(a, *, b=_twice(1)):  # 8
    # a comment
    return _twice(math.pi)  # 9


def _twice(x): ...  # 10


_once(1)  # 11
'''
    (tmp_path / "a.py").write_text(source)
    assert code_lines(source) == 11
    long = "class Long:\n" + "    a = 1\n" * 50 + "class Page(Long): ...\n"
    (tmp_path / "b.py").write_text(long)
    found = weigh(tmp_path)
    assert (found["code lines"], found["files"], found["pages"], found["wide signatures"]) == (63, 2, 1, 1)
    assert found["helpers used once, in 1000 functions"] == 1000 / 3
