"""Times what is queued on one stream, by the GPU's clock."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack

from kvoffload.device.device import Device


class GpuTimer:
    """A stream with two timing events. Free it with `close` before the device is closed.

    Attributes:
        stream: handle of the stream; it is idle whenever no method of the timer is being called.
    """

    def __init__(self, device: Device) -> None:
        self._device, driver = device, device.driver
        self._driver = driver
        with device.current(), ExitStack() as undo:
            self.stream = driver.stream_create(0)
            undo.callback(driver.stream_destroy, self.stream)
            self._start, self._end = driver.event_create(timing=True), 0
            undo.callback(driver.event_destroy, self._start)
            self._end = driver.event_create(timing=True)
            undo.pop_all()

    def seconds(self, submit: Callable[[], object]) -> float:
        """Call `submit`, which queues work on the idle stream, and wait. Returns its seconds on the GPU clock."""
        with self._device.current():
            try:
                self._driver.event_record(self._start, self.stream)
                submit()
                self._driver.event_record(self._end, self.stream)
                while not self._driver.event_query(self._end):
                    pass
            except BaseException:  # the queued work may use memory that the caller frees next
                self._driver.stream_synchronize(self.stream)
                raise
            return self._driver.event_seconds(self._start, self._end)

    def close(self) -> None:
        """Destroy the stream and the events."""
        with self._device.current():
            self._driver.stream_destroy(self.stream)
            self._driver.event_destroy(self._start)
            self._driver.event_destroy(self._end)
