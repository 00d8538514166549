"""A decoder in JAX with an array for each layer's K and V. Offloaded, by fetch and keep, it gives the same bits as with
all pages on the device.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from random_programs import jax_on
from sharded_jax import JaxDevices, simulated_devices
from tier_classes import DictTier

import kvoffload
from kvoffload.jax import OwnedCache

LAYERS, HEADS, DIM, TOKENS, VOCABULARY = 3, 2, 8, 4, 50
WIDTH = HEADS * DIM
TABLE = 12  # pages of the longest conversation
PAGES = 3 * TABLE
PAGE = (PAGES, TOKENS, HEADS, DIM)
SECONDS = 20.0


@pytest.fixture(params=[1, 2, pytest.param(0, marks=[pytest.mark.gpu, pytest.mark.timeout(300)], id="gpu")])
def on(request: pytest.FixtureRequest, seed: int) -> Iterator[JaxDevices]:
    if request.param:
        with simulated_devices(request.param, seed) as devices:
            yield devices
        return
    device = request.getfixturevalue("gpu_device")
    with jax_on(device) as jax:
        yield JaxDevices(jax, [device])


class Decoder:
    """One token at a time, in steps of one shape, so that a token has the same bits whoever computes it."""

    def __init__(self, on: JaxDevices) -> None:
        several = len(on.devices) > 1
        self.jax, self.on = on.jax, on
        self.owned = OwnedCache(
            on.devices if several else on.devices[0],
            {"k": [PAGE] * LAYERS, "v": [PAGE] * LAYERS},
            "float32",
            sharding=on.sharding(None, None, "heads") if several else None,
            block_axis=0,
            plane_axis=None,
            tokens_per_block=TOKENS,
            block_axes=("tokens", "heads", "dim"),
        )
        chance = np.random.default_rng(7)
        shapes = {"embedding": (VOCABULARY, WIDTH), "qkv": (LAYERS, 3, WIDTH, WIDTH), "out": (LAYERS, WIDTH, WIDTH)}
        weights = {name: chance.normal(size=shape).astype(np.float32) / 4 for name, shape in shapes.items()}
        options: dict[str, Any] = {"out_shardings": (self.owned.sharding, on.sharding())} if several else {}
        self.step = on.jax.jit(lambda *given: self._step(weights, *given), donate_argnums=0, **options)
        erase = {"out_shardings": self.owned.sharding} if several else {}
        self.erase = on.jax.jit(
            lambda tree, pages: on.jax.tree.map(lambda array: array.at[pages].set(np.nan), tree),
            donate_argnums=0,
            **erase,
        )

    def _step(self, weights: Any, tree: Any, token: Any, table: Any, position: Any) -> tuple[Any, Any]:
        jnp = self.jax.numpy
        x = jnp.asarray(weights["embedding"])[token]
        there = jnp.arange(TABLE * TOKENS) <= position
        for layer in range(LAYERS):
            q, k, v = (jnp.dot(x, each).reshape(HEADS, DIM) for each in weights["qkv"][layer])
            seen = []
            for name, new in (("k", k), ("v", v)):
                pages = tree[name][layer].at[table[position // TOKENS], position % TOKENS].set(new)
                tree[name][layer] = pages
                seen.append(jnp.where(there[:, None, None], pages[table].reshape(-1, HEADS, DIM), 0))
            scores = jnp.where(there, jnp.einsum("hd,thd->ht", q, seen[0]), -jnp.inf)
            mixed = jnp.einsum("ht,thd->hd", self.jax.nn.softmax(scores), seen[1])
            x = x + jnp.tanh(mixed.reshape(-1) @ weights["out"][layer])
        return tree, weights["embedding"] @ x

    def compute(self, tokens: list[int], pages: list[int], first: int, more: int) -> list[Any]:
        """Compute the tokens from `first` on, then append `more` greedy ones. Returns the logits of the latter."""
        table = np.array(pages + [0] * (TABLE - len(pages)))
        seen, position = list[Any](), first
        while True:
            self.owned.arrays, logits = self.step(self.owned.arrays, tokens[position], table, position)
            position += 1
            if position < len(tokens):
                continue
            seen.append(np.asarray(logits))
            if len(seen) == more:
                return seen
            tokens.append(int(seen[-1].argmax()))


def conversations() -> list[list[list[int]]]:
    """For each turn, what the user of each of three conversations says. Two begin alike."""
    chance = np.random.default_rng(3)
    begin = chance.integers(VOCABULARY, size=9).tolist()
    return [
        [(begin if turn == 0 and who < 2 else []) + chance.integers(VOCABULARY, size=5).tolist() for who in range(3)]
        for turn in range(3)
    ]


def resident(decoder: Decoder) -> list[list[Any]]:
    """All pages stay on the device."""
    tokens: list[list[int]] = [[], [], []]
    computed, said = [0, 0, 0], []
    for turn in conversations():
        for who, words in enumerate(turn):
            tokens[who] += words
            pages = list(range(who * TABLE, (who + 1) * TABLE))
            said.append(decoder.compute(tokens[who], pages, computed[who], 4))
            computed[who] = len(tokens[who])
    return said


def offloaded(decoder: Decoder, cache: kvoffload.BlockCache[Any]) -> tuple[list[list[Any]], int]:
    """One conversation has pages at a time, other ones each turn, which hold NaN first. Returns the hits, too."""
    tokens: list[list[int]] = [[], [], []]
    said, hits, owned = list[list[Any]](), 0, decoder.owned
    chance = np.random.default_rng(5)
    for turn in conversations():
        for who, words in enumerate(turn):
            tokens[who] += words
            pages = chance.permutation(PAGES)[:TABLE].tolist()
            owned.arrays = decoder.erase(owned.arrays, np.array(pages))
            keys = cache.keys(tokens[who][:-1], salt="")  # at least the last token is computed
            job = cache.fetch(keys, pages[: len(keys)], after=owned)
            job.order_before(owned)
            hits += job.hits
            said.append(decoder.compute(tokens[who], pages, job.hits * TOKENS, 4))
            keys = cache.keys(tokens[who], salt="")
            cache.keep(keys, pages[: len(keys)], after=owned)
            assert cache.drain(SECONDS)
    return said, hits


@pytest.mark.parametrize("below", ["host memory", "a tier"])
def test_offloaded_it_gives_the_same_bits(on: JaxDevices, below: str) -> None:
    decoder = Decoder(on)  # one, since XLA may compile a step in another way the second time
    expected = resident(decoder)
    decoder.owned.arrays = decoder.erase(decoder.owned.arrays, np.arange(PAGES))
    slots, tiers = (64, []) if below == "host memory" else (14, [DictTier()])
    with kvoffload.open_cache(decoder.owned, pool_bytes=slots * 4096 * len(on.devices), tiers=tiers) as cache:
        said, hits = offloaded(decoder, cache)
        found = cache.statistics()
    assert [len(each) for each in said] == [4] * 9
    for turn, (mine, other) in enumerate(zip(said, expected, strict=True)):
        assert all((one == another).all() for one, another in zip(mine, other, strict=True)), turn
    assert hits >= 10
    assert (dict(found.hits_from).get("dict", 0) > 0) is bool(tiers)
