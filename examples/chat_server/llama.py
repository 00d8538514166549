"""Llama in JAX over a paged cache with two arrays a layer, K and V: geometries, weights, and the two steps.

A layer is `paged_decode.jax_layers.compute_layer`, as in jax_paged_decode.py. A step has one of two shapes, and what it
computes for a token depends neither on the blocks that it uses nor on the other rows: see engine.py.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import numpy.typing as npt
from paged_decode import jax_layers, model
from paged_decode.model import BLOCK_TOKENS, NULL_BLOCK, ModelSize, Step

from chat_server.gguf import GgufFile

GEOMETRIES = {
    "smollm2": ModelSize(30, 576, 9, 3, 64, 1536, 49152, rope_base=100000.0, epsilon=1e-5),
    "llama-1b": ModelSize(16, 2048, 32, 8, 64, 8192, 128256, rope_base=500000.0, epsilon=1e-5),
    "llama-8b": ModelSize(32, 4096, 32, 8, 128, 14336, 128256, rope_base=500000.0, epsilon=1e-5),
    "tiny": ModelSize(2, 64, 4, 2, 16, 128, 49152),
}


class Sampling(NamedTuple):
    """How the next token of each sequence is chosen: (batch,) each. With temperature 0, the likeliest is."""

    temperatures: npt.NDArray[np.float32]
    seeds: npt.NDArray[np.uint32]


def read_weights(file: GgufFile, dtype: str) -> dict[str, Any]:
    """The weights of SmolLM2 as `model.py` wants them: (inputs, outputs), Q, K and V in one, and the weights of each
    RMSNorm multiplied into the matrix that follows it.
    """
    size = GEOMETRIES["smollm2"]

    def heads(name: str) -> npt.NDArray[np.float32]:
        """llama.cpp rotates pairs of neighbours in a head, and model.py the two halves of it."""
        matrix = file.tensor(name)
        return matrix.reshape(-1, size.head_size // 2, 2, size.width).swapaxes(1, 2).reshape(matrix.shape)

    def joined(norm: str, *matrices: npt.NDArray[np.float32]) -> Any:
        return jnp.asarray((np.concatenate(matrices) * file.tensor(norm)).T, dtype)

    def layer(name: str) -> dict[str, Any]:
        parts = "attn_v", "attn_output", "ffn_gate", "ffn_up", "ffn_down"
        values, out, gate, up, down = (file.tensor(f"{name}.{part}.weight") for part in parts)
        queries, keys = heads(f"{name}.attn_q.weight"), heads(f"{name}.attn_k.weight")
        return {
            "query_key_value": joined(f"{name}.attn_norm.weight", queries, keys, values),
            "attention_out": jnp.asarray(out.T, dtype),
            "gate_up": joined(f"{name}.ffn_norm.weight", gate, up),
            "down": jnp.asarray(down.T, dtype),
        }

    embedding = file.tensor("token_embd.weight")  # of both ends
    ends = {"embedding": jnp.asarray(embedding, dtype), "unembedding": joined("output_norm.weight", embedding)}
    return {"layers": [layer(f"blk.{number}") for number in range(size.layers)], **ends}


def random_weights(size: ModelSize, dtype: str, seed: int = 0) -> dict[str, Any]:
    keys = iter(jax.random.split(jax.random.key(seed), 4 * size.layers + 2))

    def draw(shape: Sequence[int]) -> Any:
        return jax.random.normal(next(keys), shape, dtype) * shape[-2] ** -0.5

    shapes = size.weight_shapes
    layers = [{name: draw(shapes[name][1:]) for name in model.LAYER_WEIGHTS} for _ in range(size.layers)]
    return {"layers": layers, **{name: draw(shapes[name]) for name in ("embedding", "unembedding")}}


def cache_shapes(size: ModelSize, num_blocks: int) -> list[tuple[int, ...]]:
    """K and V of each layer: (blocks, tokens, heads, head size)."""
    return [(num_blocks, BLOCK_TOKENS, size.kv_heads, size.head_size)] * (2 * size.layers)


@partial(jax.jit, static_argnums=0, donate_argnums=2)
def compute_step(
    size: ModelSize, weights: dict[str, Any], cache: list[Any], step: Step, sampling: Sampling
) -> tuple[list[Any], Any]:
    """The cache with K and V of the step's tokens, in the same memory, and the next token of each sequence, (batch,).

    The cache is donated.
    """
    rotation = model.rotary(jnp, size, step)
    blocks = step.rows // BLOCK_TOKENS
    outside = len(cache[0]) + jnp.arange(blocks.size).reshape(blocks.shape)  # padding is not written
    place = jnp.where(blocks == NULL_BLOCK, outside, blocks), step.rows % BLOCK_TOKENS
    new, x = list(cache), model.embed(weights, step)
    for number, layer in enumerate(weights["layers"]):

        def keep(keys: Any, values: Any, planes: slice = slice(2 * number, 2 * number + 2)) -> tuple[Any, Any]:
            pairs = zip(cache[planes], (keys, values), strict=True)
            new[planes] = [jax_layers.write(array, place, each, unique=True) for array, each in pairs]
            return new, tuple(jax_layers.read(array, (step.tables,), keys.dtype) for array in new[planes])

        x, _ = jax_layers.compute_layer(size, layer, x, step, rotation, keep, attend=attend)
    logits = model.unembed(jnp, size, weights, x, step)
    return new, _choose(logits, step.positions.reshape(-1)[step.last], sampling)


def attend(
    size: ModelSize,
    layer: dict[str, Any],
    x: Any,
    step: Step,
    queries: Any,
    keys: Any,
    values: Any,
    reduce: model.Reduce,
) -> Any:
    """See `model.attend`. Products are of the cache's dtype, and added up in float32, as tensor cores do."""
    batch, length = step.positions.shape
    context = step.tables.shape[1] * BLOCK_TOKENS
    shared = size.query_heads // size.kv_heads
    queries = queries.astype(keys.dtype).reshape(batch, length, size.kv_heads, shared, size.head_size)
    keys, values = (each.reshape(batch, context, size.kv_heads, size.head_size) for each in (keys, values))
    scores = jnp.einsum("blhgd,bchd->bhglc", queries, keys, preferred_element_type="float32") * size.head_size**-0.5
    visible = jnp.arange(context, dtype="int32") <= step.positions[:, None, None, :, None]
    scores = jnp.where(visible, scores, -jnp.inf)
    scores = jnp.exp(scores - scores.max(axis=-1, keepdims=True))  # exactly 0 for masked tokens
    seen = jnp.einsum("bhglc,bchd->bhgld", scores.astype(values.dtype), values, preferred_element_type="float32")
    seen = (seen / scores.sum(axis=-1, keepdims=True)).transpose(0, 3, 1, 2, 4).reshape(batch * length, -1)
    return x + reduce(seen.astype(values.dtype) @ layer["attention_out"])


def _choose(logits: Any, positions: Any, sampling: Sampling) -> Any:
    """The likeliest token; or a random one, which depends on the request's seed and the position alone."""

    def noisy(logits: Any) -> Any:
        def noise(seed: Any, position: Any) -> Any:
            return jax.random.gumbel(jax.random.fold_in(jax.random.key(seed), position), logits.shape[1:])

        hot = sampling.temperatures[:, None]
        drawn = logits / jnp.where(hot > 0, hot, 1) + jax.vmap(noise)(sampling.seeds, positions)
        return jnp.where(hot > 0, drawn, logits)

    logits = jax.lax.cond((sampling.temperatures > 0).any(), noisy, lambda given: given, logits)
    return jnp.argmax(logits, axis=-1).astype("int32")
