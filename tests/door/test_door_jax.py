"""`open_cache` over the tree of arrays of a JAX host, whose memory kvoffload owns, with a disk."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

import kvoffload
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
