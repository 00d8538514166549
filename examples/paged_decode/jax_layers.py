"""A layer of the model over a paged cache of JAX, whatever its arrays: one of all planes, or one for each."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from paged_decode import model

Keep = Callable[[Any, Any], tuple[Any, tuple[Any, Any]]]
_ATTEND = partial(model.attend, jnp)


def compute_layer(
    size: model.ModelSize,
    layer: model.Weights,
    x: Any,
    step: model.Step,
    rotation: tuple[Any, Any],
    keep: Keep,
    reduce: model.Reduce = model.whole,
    attend: Callable[..., Any] = _ATTEND,
) -> tuple[Any, Any]:
    """The residual stream after a layer, and the cache with K and V of the step's tokens.

    Args:
        keep: writes K and V of the step's tokens; returns the cache, and K and V of the blocks of `step.tables`.
        attend: the residual stream after attention, from the arguments of `model.attend` behind `xp`.
    """
    queries, keys, values = model.project(jnp, size, layer, x, rotation)
    cache, seen = keep(keys, values)
    # So that XLA compiles the rest in the same way, whatever the number of blocks.
    seen_keys, seen_values = jax.lax.optimization_barrier(seen)
    x = attend(size, layer, x, step, queries, seen_keys, seen_values, reduce)
    return model.feed_forward(jnp, size, layer, x, reduce), cache


def write(array: Any, place: tuple[Any, ...], values: Any, *, unique: bool = False) -> Any:
    """An array of the cache with `values` in it, in the same memory if it was donated.

    Keep bfloat16 in an array of uint16. XLA may compute an update of bfloat16 in float32, and convert the whole array
    before and after. That is slow, and would overwrite blocks that are loaded meanwhile.

    Args:
        unique: no two places are equal, and what lies outside of the array is not written. So XLA need not care for
            equal places.
    """
    bits, mode = jax.lax.bitcast_convert_type(values, array.dtype), "drop" if unique else None
    return array.at[place].set(bits, mode=mode, unique_indices=unique)


def read(array: Any, place: tuple[Any, ...], dtype: Any) -> Any:
    """Blocks of an array of the cache, as `dtype`."""
    return jax.lax.bitcast_convert_type(array[place], dtype)
