"""`open_cache` over the tree of arrays of a JAX host, whose memory kvoffload owns, with a disk."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tier_classes import GatedTier

import kvoffload
from kvoffload.cache.tiering import FetchJob
from kvoffload.jax import OwnedCache

PAGE = (16, 4, 2, 8)
SECONDS = 20.0


def test_a_jax_host_with_an_array_a_layer(jax: Any, device: kvoffload.Device, tmp_path: Path) -> None:
    step = jax.jit(lambda tree, block, value: jax.tree.map(lambda a: a.at[block].set(value), tree), donate_argnums=0)
    owned = OwnedCache(
        device,
        [PAGE] * 4,
        "float32",
        block_axis=0,
        plane_axis=None,
        tokens_per_block=4,
        block_axes=("tokens", "heads", "dim"),
    )
    disk: dict[str, Any] = {"disk": tmp_path / "kv", "disk_bytes": 1 << 20, "identity": "model"}
    for _ in range(2):
        with kvoffload.open_cache(owned, pool_bytes=1 << 18, **disk) as cache:
            assert cache.engine.device is device
            keys = cache.keys(range(12), salt="")
            job = cache.fetch(keys, [5, 6, 7], after=owned)
            hits = job.hits  # before `arrays`: then what is read there follows the load
            for position in range(3):
                if position >= hits:
                    owned.arrays = step(owned.arrays, 5 + position, float(position + 1))
            cache.keep(keys, [5, 6, 7], after=owned)
            found = [set(np.asarray(leaf[block]).ravel().tolist()) for leaf in owned.arrays for block in (5, 6, 7)]
            assert found == [{1.0}, {2.0}, {3.0}] * 4
            for block in (5, 6, 7):
                owned.arrays = step(owned.arrays, block, 0.0)
            assert cache.drain(SECONDS)
    assert hits == 3
    assert not device.closed


# a fetch whose load is submitted later --------------------------------------------------------------------------------


@contextmanager
def waiting(jax: Any, device: kvoffload.Device) -> Iterator[tuple[Any, OwnedCache, GatedTier, Callable[[], FetchJob]]]:
    """A cache whose tier has blocks 5 and 6, which are 1.0 and 2.0, and answers once it is permitted; a step that fills
    a block; and a call that fetches them into blocks 8 and 9.
    """
    step = jax.jit(lambda tree, block, value: jax.tree.map(lambda a: a.at[block].set(value), tree), donate_argnums=0)
    described: dict[str, Any] = {"tokens_per_block": 4, "block_axes": ("tokens", "heads", "dim")}
    owned = OwnedCache(device, [PAGE] * 3, "float32", block_axis=0, plane_axis=None, **described)
    tier = GatedTier()
    with kvoffload.open_cache(owned, pool_bytes=1 << 18, tiers=[tier]) as cache:
        keys = cache.keys(range(8), salt="")
        tier.permit()
        for block in (5, 6):
            owned.arrays = step(owned.arrays, block, float(block - 4))
        for _ in range(2):  # those that are asked for again are written
            cache.keep(keys, [5, 6], after=owned).wait(SECONDS)
        assert cache.drain(SECONDS)
        cache.clear(below=False)
        tier.hold()
        yield step, owned, tier, lambda: cache.fetch(keys, [8, 9], after=owned, deadline=None)
        tier.permit()


def found(arrays: Any) -> list[list[set[float]]]:
    """What each array has in blocks 8 and 9."""
    return [[set(np.asarray(each[block]).ravel().tolist()) for block in (8, 9)] for each in arrays]


LOADED = [[{1.0}, {2.0}]] * 3


def test_arrays_that_were_read_too_early_are_gone_and_not_stale(jax: Any, device: kvoffload.Device) -> None:
    with waiting(jax, device) as (step, owned, tier, fetch):
        job = fetch()
        early = owned.arrays
        assert not job.submitted
        tier.permit()
        job.order_before(owned)
        assert job.hits == 2
        with pytest.raises(RuntimeError, match="deleted"):
            step(early, 3, 1.0)
        assert found(owned.arrays) == LOADED
        job.order_before(owned)
        assert found(owned.arrays) == LOADED


def test_a_step_that_has_the_arrays_meanwhile_keeps_them(jax: Any, device: kvoffload.Device) -> None:
    """Until its result is set, there is nothing to renew."""
    with waiting(jax, device) as (step, owned, tier, fetch):
        job = fetch()
        result = step(owned.arrays, 3, 7.0)
        owned.arrays = result
        result = step(owned.arrays, 4, 8.0)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            owned._follow_transfers()
        assert not any(each.is_deleted() for each in result)
        owned.arrays = result
        tier.permit()
        job.order_before(owned)
        assert found(owned.arrays) == LOADED
        assert [float(each[4, 0, 0, 0]) for each in owned.arrays] == [8.0] * 3


def test_steps_go_on_while_a_tier_is_asked(jax: Any, device: kvoffload.Device) -> None:
    """The load follows what was computed before the fetch; steps of other blocks go on meanwhile."""
    with waiting(jax, device) as (step, owned, tier, fetch):
        job = fetch()
        for turn in range(5):
            owned.arrays = step(owned.arrays, 3, float(turn))
        tier.permit()
        assert job.wait(SECONDS) == 2
        for turn in range(5):
            owned.arrays = step(owned.arrays, 4, float(turn))
        assert found(owned.arrays) == LOADED
        assert {float(each[3, 0, 0, 0]) for each in owned.arrays} == {4.0}


def test_a_fetch_without_hits_orders_nothing(jax: Any, device: kvoffload.Device) -> None:
    with waiting(jax, device) as (_, owned, tier, fetch):
        job = fetch()
        before = owned.arrays
        job.cancel()
        job.order_before(owned)
        assert job.hits == 0
        assert [one is other for one, other in zip(owned.arrays, before, strict=True)] == [True] * 3
        tier.permit()
