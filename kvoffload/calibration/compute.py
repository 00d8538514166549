"""Products of matrices to time transfers beside: large ones, and small ones as in decoding."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import NamedTuple

import numpy as np

from kvoffload.device.device import Device
from kvoffload.device.pinned import PAGE_BYTES, PinnedMemory
from kvoffload.errors import CapabilityError
from kvoffload.internal.teardown import Undoing
from kvoffload.kernels import KernelSpec, LoadedKernel, load_kernel

_CHUNK_BYTES = 32 << 20


def in_context(device: Device, call: Callable[[], None]) -> None:
    """Call with the device's context current."""
    with device.current():
        call()


@contextmanager
def pinned_memory(device: Device, nbytes: int) -> Iterator[PinnedMemory]:
    """Yield pinned memory in one registered range: `nbytes`, rounded up to pages. It is freed at the end."""
    whole = -(-nbytes // PAGE_BYTES) * PAGE_BYTES
    with device.current():
        memory = PinnedMemory(device.driver, whole, unit_bytes=whole)
    try:
        yield memory
    finally:
        in_context(device, memory.release)


@contextmanager
def new_events(device: Device, count: int, *, timing: bool) -> Iterator[list[int]]:
    """Yield handles of new events, which are destroyed at the end."""
    events: list[int] = []
    try:
        with device.current():
            events.extend(device.driver.event_create(timing=timing) for _ in range(count))
        yield events
    finally:
        with device.current():
            for event in events:
                device.driver.event_destroy(event)


class ProductTile(NamedTuple):
    """One program computes one tile of the result, `inner` elements of a row or column at a time."""

    rows: int
    columns: int
    inner: int
    stages: int
    warps: int


class Product(NamedTuple):
    """(rows, inner) @ (inner, columns). The first of `tiles` that the GPU has room for is taken."""

    name: str
    rows: int
    columns: int
    inner: int
    tiles: tuple[ProductTile, ...]


_TILES = (ProductTile(128, 256, 64, 4, 8), ProductTile(128, 256, 64, 3, 8), ProductTile(128, 128, 32, 3, 8))
LARGE = Product("large product", 8192, 8192, 8192, _TILES)
MEDIUM = Product("small product", 2048, 2048, 2048, _TILES)
SMALL = Product("small product", 16, 32, 16, (ProductTile(16, 32, 16, 2, 4),))  # where it is interpreted: one program


class Computation(Undoing):
    """A product of random matrices on a stream of its own. A context manager; close it before the device.

    On the simulated device the elements are fp16 instead of bf16; see `kernels.compute`.

    Attributes:
        stream: its handle.
        left, right, result: the matrices, row-major.

    Raises:
        CapabilityError: no kernel can be loaded here; the message says why.
        CapacityError: GPU memory is short.
    """

    def __init__(self, device: Device, product: Product) -> None:
        self.product = product
        self._device, self._driver = device, device.driver
        with ExitStack() as undo:
            with device.current():
                self._kernel, tile = _load(device, product)
                undo.callback(in_context, device, self._kernel.close)
            self.stream = undo.enter_context(device.stream()).handle
            rows, columns, inner = product.rows, product.columns, product.inner
            self.left, self.right, self.result = (
                undo.enter_context(device.allocate(2 * count))
                for count in (rows * inner, inner * columns, rows * columns)
            )
            random = np.random.default_rng(0)
            # Normally distributed elements, repeated every 32 MiB: with zeros the GPU would clock higher.
            for buffer in (self.left, self.right):
                values = random.standard_normal(min(buffer.nbytes, _CHUNK_BYTES) // 2, dtype=np.float32)
                halves = values.astype(np.float16).view(np.uint16)
                bits = halves if device.simulated else (values.view(np.uint32) >> 16).astype(np.uint16)
                for offset in range(0, buffer.nbytes, bits.nbytes):
                    buffer.copy_from(bits[: (buffer.nbytes - offset) // 2], offset=offset)
            self._grid = product.rows // tile.rows * (product.columns // tile.columns)
            self._arguments = (self.left.address, self.right.address, self.result.address)
            self._undo = undo.pop_all()

    def queue(self, count: int) -> None:
        """Queue the product `count` times, and return; the device's context must be current."""
        for _ in range(count):
            self._kernel.launch(self.stream, self._grid, self._arguments)

    def seconds_each(self, count: int) -> list[float]:
        """Compute the product `count` times in a row. Returns the seconds of each on the GPU's clock.

        Args:
            count: at most 256: a stream's queue holds no more than about 1000 operations.
        """
        with self._device.current(), new_events(self._device, count + 1, timing=True) as events:
            self._driver.event_record(events[0], self.stream)
            for event in events[1:]:
                self.queue(1)
                self._driver.event_record(event, self.stream)
            self._driver.stream_synchronize(self.stream)
            return [self._driver.event_seconds(*pair) for pair in itertools.pairwise(events)]


def _load(device: Device, product: Product) -> tuple[LoadedKernel, ProductTile]:
    for tile in product.tiles:
        try:
            spec = kernel_spec(product, tile, half=device.simulated)
            return load_kernel(device.driver, device.capabilities, spec), tile
        except CapabilityError:
            if tile is product.tiles[-1]:
                raise
    raise AssertionError("a product has tiles")


def kernel_spec(product: Product, tile: ProductTile, *, half: bool) -> KernelSpec:
    """Return the kernel for a product; its parameters are the addresses of left, right and result."""
    constants = {
        "M": product.rows, "N": product.columns, "K": product.inner,
        "TILE_M": tile.rows, "TILE_N": tile.columns, "TILE_K": tile.inner,
        "STAGES": tile.stages, "HALF": int(half),
    }  # fmt: skip
    parameters = (("left", "i64"), ("right", "i64"), ("result", "i64"))
    return KernelSpec("kvoffload.kernels.compute", "product", parameters, tuple(constants.items()), tile.warps)
