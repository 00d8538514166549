"""Transfers that are queued from inside JAX's own stream."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from functools import partial
from typing import Any

from kvoffload.device.device import Device
from kvoffload.engine.engine import OffloadEngine
from kvoffload.engine.job import Job
from kvoffload.errors import CapabilityError, LayoutError, TransferError
from kvoffload.jax.adopted import AdoptedCache
from kvoffload.jax.imports import import_jax
from kvoffload.layout.dlpack import view_dlpack

_CALLBACK_SECONDS = 60.0  # how long to wait until JAX calls back; it does so while it dispatches, or soon after

Submit = Callable[[int], Job]  # given the stream that the transfer is to follow


class CallbackCache(AdoptedCache):
    """A KV cache in an array of JAX's, copied by transfers that have their place in JAX's own stream.

    `store` and `load` run a jitted function that does nothing but call back, with XLA's stream, while it is queued
    (`jax.experimental.buffer_callback`). There the transfer is submitted, behind that stream, and that stream is made
    to wait for it. So everything that JAX was given before comes before the transfer, readers included, and everything
    after it, after it.

    The interface is experimental, and JAX's documentation says that it is to be replaced. Steps of which the blocks
    being copied are no business wait all the same.

    Args:
        device, array, plane_axis, block_axis, options: as for `AdoptedCache`.

    Raises:
        CapabilityError: this JAX has no `buffer_callback`.
        LayoutError: as `AdoptedCache`.
    """

    def __init__(self, device: Device, array: Any, plane_axis: int = 0, block_axis: int = 1, **options: Any) -> None:
        super().__init__(device, array, plane_axis, block_axis, **options)
        self._tickets: deque[_Ticket] = deque()
        self._pass_through = _pass_through(array, partial(_called_back, self.address, self._tickets))

    def store(self, engine: OffloadEngine, blocks: Any, slots: Any, **options: Any) -> Job:
        """`engine.store` at this place in JAX's stream."""
        return self._submit(lambda after: engine.store(blocks, slots, after=after, **options))

    def load(self, engine: OffloadEngine, slots: Any, blocks: Any, **options: Any) -> Job:
        """`engine.load` at this place in JAX's stream."""
        return self._submit(lambda after: engine.load(slots, blocks, after=after, **options))

    def _submit(self, submit: Submit) -> Job:
        behind = self._ordered()  # transfers that were submitted elsewhere
        ticket = _Ticket(submit)
        self._tickets.append(ticket)
        try:
            self.array = self._pass_through(behind)
        except BaseException:
            if ticket in self._tickets:
                self._tickets.remove(ticket)
            raise
        job = ticket.job()
        self._followed = self._transfers()
        return job


class _Ticket:
    """A transfer that waits for JAX's call."""

    def __init__(self, submit: Submit) -> None:
        self._submit = submit
        self._job: Job | None = None
        self._error: BaseException | None = None
        self._called = threading.Event()

    def run(self, stream: int) -> None:
        """Submit it behind the stream, and have that wait for it. Raises nothing: JAX would not know what to do."""
        try:
            self._job = self._submit(stream)
            self._job.order_before(stream)
        except BaseException as error:
            self._error = error
        self._called.set()

    def refuse(self, error: Exception) -> None:
        self._error = error
        self._called.set()

    def job(self) -> Job:
        if not self._called.wait(_CALLBACK_SECONDS):
            raise TransferError(f"JAX has not called back for {_CALLBACK_SECONDS:.0f} s; its stream may be stuck")
        if self._error is not None:
            raise self._error
        assert self._job is not None
        return self._job


def _pass_through(array: Any, callback: Callable[..., None]) -> Any:
    """A jitted function that returns its argument, in its place, and calls back while it is queued."""
    jax = import_jax()
    try:
        from jax.experimental.buffer_callback import buffer_callback
    except ImportError as error:
        raise CapabilityError(f"JAX {jax.__version__} has no buffer_callback ({error}); take OwnedCache") from None
    result = jax.ShapeDtypeStruct(array.shape, array.dtype)
    call = buffer_callback(callback, result, has_side_effect=True, input_output_aliases={0: 0})
    return jax.jit(lambda cache: call(cache), donate_argnums=0)


def _called_back(address: int, tickets: deque[_Ticket], context: Any, out: Any, _: Any) -> None:
    """What JAX calls; `tickets` are in the order in which it was given their calls."""
    ticket = tickets.popleft()
    found = _address_of(out)
    if found != address:
        ticket.refuse(LayoutError(f"JAX moved the cache from {address:#x} to {found:#x}; take StagedCache"))
    else:
        ticket.run(context.stream)


def _address_of(buffer: Any) -> int:
    try:
        return int(buffer.__cuda_array_interface__["data"][0])
    except Exception:  # a type that it does not carry
        return view_dlpack(buffer, None).address
