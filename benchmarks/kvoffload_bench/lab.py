"""The tools of a benchmark together with the contiguous copy that its figures are compared with."""

from __future__ import annotations

from contextlib import ExitStack, closing

from kvoffload.device.device import Device
from kvoffload_bench.contiguous import ContiguousCopy
from kvoffload_bench.tools import BenchTools, Size


class Lab(BenchTools):
    """A context manager. Close it before the device.

    Attributes:
        contiguous: the contiguous copy, of `size.contiguous_bytes`.
    """

    def __init__(self, device: Device, size: Size, *, repeats: int, seed: int) -> None:
        super().__init__(device, size, repeats=repeats, seed=seed)
        with ExitStack() as undo:
            undo.callback(super().close)
            self.contiguous = undo.enter_context(closing(ContiguousCopy(self, size.contiguous_bytes)))
            self._undo = undo.pop_all()

    def close(self) -> None:
        self._undo.close()

    def __enter__(self) -> Lab:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()
