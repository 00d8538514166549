"""The model for arrays that are written in place (CuPy, numpy), and the numpy backend, which needs no GPU."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

import kvoffload
from paged_decode import model
from paged_decode.backend import Followed, Logits


class ArrayModel:
    """The model for CuPy or numpy (`xp`): a loop over the layers, which writes the cache in place.

    Args:
        size: of the whole model.
        division: compute one rank's share; then the attribute `size` is the share's size.
    """

    def __init__(self, xp: Any, size: model.ModelSize, dtype: str, division: model.Division | None = None) -> None:
        self.xp, self.size, self._division = xp, size, division
        random = xp.random.default_rng(0)
        self.weights = {}
        for name, shape in size.weight_shapes.items():
            weight = (random.standard_normal(shape, dtype="float32") * shape[-2] ** -0.5).astype(dtype)
            if division is not None:
                weight = model.divide(xp, size, name, weight, division.rank, division.ranks)
            self.weights[name] = weight
        if division is not None:
            self.size = size.shard(division.ranks)

    def logits(self, cache: Any, step: model.Step, before_layer: Callable[[int], None]) -> Any:
        """Compute a step.

        Args:
            cache: an array of the shape `ModelSize.cache_shape`.
            before_layer: called with the number of each layer before it is computed.
        """
        xp, size = self.xp, self.size
        step = model.Step(*map(xp.asarray, step))
        rotation = model.rotary(xp, size, step)
        pages = Pages(size, cache, step)
        x = model.embed(self.weights, step)
        for number in range(size.layers):
            before_layer(number)
            layer = {name: self.weights[name][number] for name in model.LAYER_WEIGHTS}
            queries, keys, values = model.project(xp, size, layer, x, rotation)
            pages.write(2 * number, keys)
            pages.write(2 * number + 1, values)
            seen = pages.read(2 * number), pages.read(2 * number + 1)
            x = model.attend(xp, size, layer, x, step, queries, *seen, self._add_up)
            x = model.feed_forward(xp, size, layer, x, self._add_up)
        return model.unembed(xp, size, self.weights, x, step)

    def _add_up(self, product: Any) -> Any:
        """The sum of all ranks' products. The processes exchange them on the host."""
        if self._division is None:
            return product
        on_host = self.xp.asnumpy if hasattr(self.xp, "asnumpy") else np.asarray
        return self.xp.asarray(self._division.add_up(on_host(product.astype("float32"))))


class Pages:
    """Writes and reads a step's part of a cache, plane by plane. A page is a block of one plane. The cache is
    contiguous, so in either layout it is an array of pages, and an array of tokens; only the first index differs.
    """

    def __init__(self, size: model.ModelSize, cache: Any, step: model.Step) -> None:
        self._tokens = cache.reshape(-1, size.kv_heads, size.head_size)
        self._pages = cache.reshape(-1, model.BLOCK_TOKENS, size.kv_heads, size.head_size)
        self._plane_step, block_step = size.page_steps(len(self._pages) // (2 * size.layers))
        self._tables = step.tables * block_step  # pages of plane 0
        self._rows = (
            step.rows // model.BLOCK_TOKENS * (block_step * model.BLOCK_TOKENS) + step.rows % model.BLOCK_TOKENS
        )

    def write(self, plane: int, values: Any) -> None:
        """Write K or V of the step's tokens."""
        self._tokens[plane * self._plane_step * model.BLOCK_TOKENS :][self._rows] = values

    def read(self, plane: int) -> Any:
        """Read the blocks of the step's tables: (batch, table, BLOCK_TOKENS, heads, head_size)."""
        return self._pages[plane * self._plane_step :][self._tables]


class NumpyBackend:
    """numpy on memory of the simulated device, which is ordinary memory.

    numpy computes on no stream, so the host waits for transfers. `division`: see `ArrayModel`.
    """

    stream: int | None = None

    def __init__(self, device: kvoffload.Device, size: model.ModelSize, division: model.Division | None = None) -> None:
        self.device = device
        self.devices: Sequence[kvoffload.Device] = [device]
        self._model = ArrayModel(np, size, "float32", division)
        self.size = self._model.size
        self._load: kvoffload.CacheJob | None = None  # the layers of the next step follow its parts

    def new_cache(self, num_blocks: int) -> kvoffload.KVLayout:
        array = self.device.empty(self.size.cache_shape(num_blocks), "float32")
        self._cache = np.from_dlpack(array)
        self._cache[...] = 0
        return kvoffload.KVLayout.from_stacked(array, **self.size.description)

    def step(self, step: model.Step) -> Logits:
        logits: Logits = self._model.logits(self._cache, step, self._before_layer)
        self._load = None
        return logits

    def after(self) -> Any:
        return kvoffload.NO_WAIT  # numpy has finished when it returns

    def follow(self, job: Followed) -> None:
        job.wait()

    def follow_by_layer(self, job: kvoffload.CacheJob) -> None:
        self._load = job

    def _before_layer(self, number: int) -> None:
        """The host cannot wait for a part, so it waits for a stream that does."""
        if self._load is not None:
            driver = self.device.driver
            with self.device.current():
                stream = driver.stream_create(0)
                self._load.order_before(stream, part=number)
                driver.stream_synchronize(stream)
                driver.stream_destroy(stream)
