"""Transfers that are submitted in JAX's own stream."""

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
    """A KV cache in an array that JAX allocated. Transfers are ordered on JAX's own stream.

    `store` and `load` call a jitted function that does nothing but call Python, with XLA's stream, while XLA queues it
    (`jax.experimental.buffer_callback`). The callback submits the transfer after that stream, and makes that stream
    wait for the transfer. So the transfer follows all computations that JAX has dispatched before the call, also those
    that only read the array, and all that JAX dispatches later follow the transfer.

    The interface is experimental, and JAX's documentation says that it is to be replaced. Computations that do not
    touch the copied blocks wait as well. One thread at a time may use the cache.

    Args:
        device, array, plane_axis, block_axis, options: as for `AdoptedCache`.

    Raises:
        CapabilityError: this JAX has no `buffer_callback`.
        LayoutError, TypeError: as `AdoptedCache`.
    """

    def __init__(self, device: Device, array: Any, *, plane_axis: int, block_axis: int, **options: Any) -> None:
        super().__init__(device, array, plane_axis=plane_axis, block_axis=block_axis, **options)
        self._tickets: deque[Ticket] = deque()
        self._pass_through = _pass_through(array, partial(called_back, self.address, self._tickets))

    def store(self, engine: OffloadEngine, blocks: Any, slots: Any, **options: Any) -> Job:
        """`engine.store`, ordered by JAX's stream."""
        return self._submit(lambda after: engine.store(blocks, slots, after=after, **options))

    def load(self, engine: OffloadEngine, slots: Any, blocks: Any, **options: Any) -> Job:
        """`engine.load`, ordered by JAX's stream."""
        return self._submit(lambda after: engine.load(slots, blocks, after=after, **options))

    def _submit(self, submit: Submit) -> Job:
        self._ordered()  # follow transfers that were submitted by other means
        ticket = Ticket(submit)
        self._tickets.append(ticket)
        arrays = self._holder.arrays
        arrays[:] = map(self._pass_through, arrays)  # see Holder; no interrupt comes between this and the next line
        ticket.dispatched = True
        self._check(arrays[0])
        job = ticket.job()
        self._followed = self._transfers()
        return job


class Ticket:
    """A transfer that will be submitted by JAX's call.

    Attributes:
        dispatched: JAX has been given the call. It never will be, for a ticket that an interrupted `_submit` has left.
    """

    def __init__(self, submit: Submit) -> None:
        self.dispatched = False
        self._submit = submit
        self._job: Job | None = None
        self._error: BaseException | None = None
        self._called = threading.Event()

    def submit(self, stream: int) -> None:
        """Submit the transfer behind `stream`, and have `stream` wait for it. Errors are raised by `job` instead: JAX
        cannot handle them."""
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
    """A jitted function that returns its argument, at the same address, and calls back while it is queued."""
    jax = import_jax()
    try:
        from jax.experimental.buffer_callback import buffer_callback
    except ImportError as error:
        raise CapabilityError(f"JAX {jax.__version__} has no buffer_callback ({error}); use OwnedCache") from None
    result = jax.ShapeDtypeStruct(array.shape, array.dtype)
    call = buffer_callback(callback, result, has_side_effect=True, input_output_aliases={0: 0})
    return jax.jit(lambda cache: call(cache), donate_argnums=0)


def called_back(address: int, tickets: deque[Ticket], context: Any, out: Any, _: Any) -> None:
    """What JAX calls, once for each dispatched ticket, in their order. The newest ticket may be one that JAX is being
    given at this moment; an older one that was not dispatched was interrupted before, and is dropped."""
    while len(tickets) > 1 and not tickets[0].dispatched:
        tickets.popleft()
    ticket = tickets.popleft()
    found = _address_of(out)
    if found != address:
        ticket.refuse(LayoutError(f"JAX moved the cache from {address:#x} to {found:#x}; use StagedCache"))
    else:
        ticket.submit(context.stream)


def _address_of(buffer: Any) -> int:
    try:
        return int(buffer.__cuda_array_interface__["data"][0])
    except Exception:  # a dtype that the interface does not have
        return view_dlpack(buffer, None).address
