"""The layers of a small decoder-only transformer with a paged KV cache, for numpy, CuPy and JAX: `xp` is any of them.

RMSNorm, rotary embedding, grouped-query attention, SwiGLU. The weights are random, which costs as much to compute.
arrays.py and jax_paged_decode.py write the cache and order transfers.

A step has a fixed shape, and attention reads block tables that are padded to the longest conversation. Masked tokens
count for exactly nothing. So a token's logits have the same bits wherever its blocks lie.
"""

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

BLOCK_TOKENS = 16
NULL_BLOCK = 0  # belongs to no conversation: padding is written there, and tables are padded with it

Int32Array = npt.NDArray[np.int32]
Weights = Mapping[str, Any]
Reduce = Callable[[Any], Any]  # adds up the products of all devices


BLOCK_MAJOR, PLANE_MAJOR = "block-major", "plane-major"  # layouts of the KV cache


class ModelSize(NamedTuple):
    """Extents of the model. Its KV cache has two planes a layer: 2k and 2k + 1 are K and V of layer k.

    Attributes:
        layout: of the cache: BLOCK_MAJOR, (blocks, planes, ...), or PLANE_MAJOR, (planes, blocks, ...).
        rope_base: of the rotary embedding's frequencies.
        epsilon: what RMSNorm adds to the mean square.
    """

    layers: int = 16
    width: int = 2048
    query_heads: int = 16
    kv_heads: int = 8
    head_size: int = 128
    hidden: int = 5632
    vocabulary: int = 4096
    layout: str = BLOCK_MAJOR
    rope_base: float = 10000.0
    epsilon: float = 1e-6

    @property
    def weight_shapes(self) -> dict[str, tuple[int, ...]]:
        """Shapes by name, (..., inputs, outputs); the weights of all layers are stacked."""
        heads = self.query_heads + 2 * self.kv_heads
        return {
            "query_key_value": (self.layers, self.width, heads * self.head_size),
            "attention_out": (self.layers, self.query_heads * self.head_size, self.width),
            "gate_up": (self.layers, self.width, 2 * self.hidden),
            "down": (self.layers, self.hidden, self.width),
            "embedding": (self.vocabulary, self.width),
            "unembedding": (self.width, self.vocabulary),
        }

    def cache_shape(self, num_blocks: int) -> tuple[int, ...]:
        """(blocks, planes, tokens, heads, head size): a block is one range; or with the first two exchanged."""
        return (*self.place(2 * self.layers, num_blocks), BLOCK_TOKENS, self.kv_heads, self.head_size)

    def place(self, plane: Any, blocks: Any) -> tuple[Any, Any]:
        """The first two indices into the cache."""
        return (blocks, plane) if self.layout == BLOCK_MAJOR else (plane, blocks)

    def page_steps(self, num_blocks: int) -> tuple[int, int]:
        """Distances from a page to the same block of the next plane, and to the next block; in pages."""
        return (1, 2 * self.layers) if self.layout == BLOCK_MAJOR else (num_blocks, 1)

    def shard(self, devices: int) -> "ModelSize":
        """The size of each device's share: an equal number of heads and of hidden units."""
        heads, kv_heads = self.query_heads // devices, self.kv_heads // devices
        return self._replace(query_heads=heads, kv_heads=kv_heads, hidden=self.hidden // devices)

    @property
    def description(self) -> dict[str, Any]:
        """The arguments of `KVLayout.from_stacked` that describe the cache's array."""
        plane_axis = self.place("plane", "block").index("plane")
        return {
            "plane_axis": plane_axis,
            "block_axis": 1 - plane_axis,
            "tokens_per_block": BLOCK_TOKENS,
            "block_axes": ("tokens", "heads", "dim"),
        }


LAYER_WEIGHTS = ("query_key_value", "attention_out", "gate_up", "down")
SMALL = ModelSize(layers=3, width=64, query_heads=4, kv_heads=2, head_size=16, hidden=128, vocabulary=256)


class Step(NamedTuple):
    """The input of a step, which computes `length` tokens of each of `batch` conversations. On the host, int32.

    Attributes:
        tokens, positions: (batch, length); positions count from the conversation's first token.
        rows: (batch, length): block * BLOCK_TOKENS + offset, where a token's K and V go; in NULL_BLOCK for padding.
        tables: (batch, blocks of the longest conversation): the blocks of all tokens so far, including these.
        last: (batch,): row in (batch * length) of each conversation's last token. The step returns its logits.
    """

    tokens: Int32Array
    positions: Int32Array
    rows: Int32Array
    tables: Int32Array
    last: Int32Array

    @classmethod
    def padding(cls, batch: int, length: int, longest: int) -> "Step":
        """A step of only padding, with tables of `longest` blocks."""
        table = np.full((batch, longest), NULL_BLOCK, dtype=np.int32)
        rows = np.full((batch, length), NULL_BLOCK * BLOCK_TOKENS, dtype=np.int32)
        nothing = np.zeros((batch, length), dtype=np.int32)
        return cls(nothing, nothing.copy(), rows, table, np.arange(batch, dtype=np.int32) * length)

    def put(self, index: int, tokens: list[int], first: int, blocks: list[int]) -> None:
        """Fill in the tokens of conversation `index` of the batch, from `first` on, as many as fit."""
        given = tokens[first : first + self.tokens.shape[1]]
        positions = np.arange(first, first + len(given))
        self.tables[index, : len(blocks)] = blocks
        self.tokens[index, : len(given)] = given
        self.positions[index, : len(given)] = positions
        self.rows[index, : len(given)] = (
            self.tables[index, positions // BLOCK_TOKENS] * BLOCK_TOKENS + positions % BLOCK_TOKENS
        )
        self.last[index] += len(given) - 1


class Division(NamedTuple):
    """One rank's share of a model that is divided among processes.

    Attributes:
        rank, ranks: this rank's number, and how many there are; `ModelSize.shard` is the size of each share.
        add_up: takes a product of this rank, float32 on the host; returns the sum of all ranks' products.
    """

    rank: int
    ranks: int
    add_up: Callable[[npt.NDArray[np.float32]], npt.NDArray[np.float32]]


def divide(xp: Any, size: ModelSize, name: str, weight: Any, rank: int, ranks: int) -> Any:
    """A rank's share of a weight: the columns, or rows, of its heads or hidden units. Embeddings stay whole."""
    head_counts = (size.query_heads, size.kv_heads, size.kv_heads)
    columns = {"query_key_value": [count * size.head_size for count in head_counts], "gate_up": [size.hidden] * 2}
    if name in columns:
        ends = np.cumsum(columns[name])[:-1].tolist()
        shares = [xp.split(part, ranks, axis=-1)[rank] for part in xp.split(weight, ends, axis=-1)]
        return xp.concatenate(shares, axis=-1)
    return xp.ascontiguousarray(xp.split(weight, ranks, axis=-2)[rank]) if name in LAYER_WEIGHTS else weight


def embed(weights: Weights, step: Step) -> Any:
    """The residual stream before the first layer: float32, (batch * length, width)."""
    return weights["embedding"][step.tokens.reshape(-1)].astype("float32")


def rotary(xp: Any, size: ModelSize, step: Step) -> tuple[Any, Any]:
    """Cosines and sines of the rotary embedding: float32, (batch, length, 1, head_size / 2)."""
    half = size.head_size // 2
    frequencies = size.rope_base ** (xp.arange(half, dtype="float32") * (-1.0 / half))
    angles = step.positions[:, :, None, None].astype("float32") * frequencies
    return xp.cos(angles), xp.sin(angles)


def project(xp: Any, size: ModelSize, layer: Weights, x: Any, rotation: tuple[Any, Any]) -> tuple[Any, Any, Any]:
    """Q, K, V of the tokens of a step, rotated: (batch, length, heads, head_size); Q in float32."""
    batch, length = rotation[0].shape[:2]
    weight = layer["query_key_value"]
    heads = (_normalise(xp, size, x).astype(weight.dtype) @ weight).reshape(batch, length, -1, size.head_size)
    values_from = size.query_heads + size.kv_heads
    low, high = xp.split(heads[:, :, :values_from].astype("float32"), 2, axis=-1)
    cosine, sine = rotation
    rotated = xp.concatenate([low * cosine - high * sine, high * cosine + low * sine], axis=-1)
    keys = rotated[:, :, size.query_heads :].astype(weight.dtype)
    return rotated[:, :, : size.query_heads], keys, heads[:, :, values_from:]


def whole(product: Any) -> Any:
    """The `Reduce` of one device, which has all heads and hidden units."""
    return product


def attend(
    xp: Any,
    size: ModelSize,
    layer: Weights,
    x: Any,
    step: Step,
    queries: Any,
    keys: Any,
    values: Any,
    reduce: Reduce = whole,
) -> Any:
    """The residual stream after attention. Keys and values: (batch, table, BLOCK_TOKENS, heads, head_size)."""
    batch, length = step.positions.shape
    context = step.tables.shape[1] * BLOCK_TOKENS
    shared = size.query_heads // size.kv_heads  # query heads that share a head of K and V
    queries = queries.reshape(batch, length, size.kv_heads, shared, size.head_size).transpose(0, 2, 3, 1, 4)
    queries = queries.reshape(batch, size.kv_heads, shared * length, size.head_size)
    keys = keys.astype("float32").reshape(batch, context, size.kv_heads, size.head_size).transpose(0, 2, 3, 1)
    values = values.astype("float32").reshape(batch, context, size.kv_heads, size.head_size).transpose(0, 2, 1, 3)
    scores = xp.matmul(queries, keys) * size.head_size**-0.5
    visible = xp.arange(context, dtype="int32") <= step.positions[:, None, None, :, None]
    scores = xp.where(visible, scores.reshape(batch, size.kv_heads, shared, length, context), -xp.inf)
    scores = xp.exp(scores - scores.max(axis=-1, keepdims=True))  # exactly 0 for masked tokens
    scores = (scores / scores.sum(axis=-1, keepdims=True)).reshape(batch, size.kv_heads, shared * length, context)
    seen = xp.matmul(scores, values).reshape(batch, size.kv_heads, shared, length, size.head_size)
    weight = layer["attention_out"]
    return x + reduce(seen.transpose(0, 3, 1, 2, 4).reshape(batch * length, -1).astype(weight.dtype) @ weight)


def feed_forward(xp: Any, size: ModelSize, layer: Weights, x: Any, reduce: Reduce = whole) -> Any:
    """The residual stream after the SwiGLU."""
    weight = layer["gate_up"]
    gate, up = xp.split((_normalise(xp, size, x).astype(weight.dtype) @ weight).astype("float32"), 2, axis=-1)
    return x + reduce((gate / (1 + xp.exp(-gate)) * up).astype(weight.dtype) @ layer["down"])


def unembed(xp: Any, size: ModelSize, weights: Weights, x: Any, step: Step) -> Any:
    """Logits of each conversation's last token: float32, (batch, vocabulary)."""
    weight = weights["unembedding"]
    return (_normalise(xp, size, x[step.last]).astype(weight.dtype) @ weight).astype("float32")


def _normalise(xp: Any, size: ModelSize, x: Any) -> Any:
    """RMSNorm without weights of its own: those are multiplied into the matrix that follows."""
    return x / xp.sqrt((x * x).mean(axis=-1, keepdims=True) + size.epsilon)
