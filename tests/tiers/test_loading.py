"""load_tier: tiers by name, and entry points of other packages."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from kvoffload.tiers import Limits, MemoryTier, load_tier


@pytest.fixture(autouse=True)
def _packages(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two packages that have tiers: `one` and `both`; `both`, `wrong` and `memory`."""
    module = "from kvoffload.tiers import MemoryTier\nclass OwnTier(MemoryTier): ...\ndef wrong(): return 7\n"
    own = {
        "first": "one = first:OwnTier\nboth = first:OwnTier\n",
        "second": "both = second:OwnTier\nwrong = second:wrong\nmemory = second:OwnTier\n",
    }
    for package, names in own.items():
        (tmp_path / f"{package}.py").write_text(module)
        metadata = tmp_path / f"{package}-1.dist-info"
        metadata.mkdir()
        (metadata / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {package}\nVersion: 1\n")
        (metadata / "entry_points.txt").write_text(f"[kvoffload.tiers]\n{names}")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "first", raising=False)
    monkeypatch.delitem(sys.modules, "second", raising=False)


def test_a_tier_of_this_package() -> None:
    tier = load_tier("memory", 1 << 20, name="mine")
    assert type(tier) is MemoryTier
    assert tier.name == "mine"
    assert "second" not in sys.modules


def test_options_of_a_configuration_are_flat() -> None:
    tier = load_tier("memory", nbytes=1 << 20, threads=3, max_queued=7)
    assert isinstance(tier, MemoryTier)
    assert (tier.threads, tier.max_queued) == (3, 7)
    tier = load_tier("memory", nbytes=1 << 20, limits=Limits(threads=5))
    assert isinstance(tier, MemoryTier)
    assert (tier.threads, tier.max_queued) == (5, 4096)
    with pytest.raises(TypeError, match=r"limits and threads are two ways to say the same; give one of them"):
        load_tier("memory", nbytes=1 << 20, threads=3, limits=Limits())
    with pytest.raises(ValueError, match="threads must be an integer of at least 1, got 0"):
        load_tier("memory", nbytes=1 << 20, threads=0)
    with pytest.raises(ValueError, match="max_queued must be an integer of at least 1, got 'x'"):
        load_tier("memory", nbytes=1 << 20, max_queued="x")


def test_a_tier_of_another_package_is_imported_when_it_is_asked_for() -> None:
    tier = load_tier("one", nbytes=1 << 20)
    assert type(tier).__module__ == "first"
    assert isinstance(tier, MemoryTier)
    assert tier.nbytes == 1 << 20
    assert "second" not in sys.modules


@pytest.mark.parametrize("kind", ["none", "both", ""])
def test_names_that_none_or_two_packages_have_are_refused(kind: str) -> None:
    with pytest.raises(ValueError, match=r"kind must be one of both, disk, .*one, .*valkey, .*, got .* packages have"):
        load_tier(kind)


def test_what_makes_no_tier_is_refused() -> None:
    with pytest.raises(TypeError, match=r"must make a kvoffload\.tiers\.Tier, got 7"):
        load_tier("wrong")
