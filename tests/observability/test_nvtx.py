"""`nvtx_tracer`: a range for each transfer, with the package nvtx where it is installed."""

from __future__ import annotations

import sys
from types import ModuleType
from typing import Any

import pytest

import kvoffload
from kvoffload import KVLayout, OffloadEngine


class Nvtx(ModuleType):
    """Records what the package nvtx is called with."""

    def __init__(self) -> None:
        super().__init__("nvtx")
        self.calls: list[Any] = []

    def start_range(self, message: str, *, domain: str, category: str) -> int:
        self.calls.append((message, domain, category))
        return len(self.calls)

    def end_range(self, number: int) -> None:
        self.calls.append(number)


def test_a_transfer_is_a_range(device: kvoffload.Device, monkeypatch: pytest.MonkeyPatch) -> None:
    nvtx = Nvtx()
    monkeypatch.setitem(sys.modules, "nvtx", nvtx)
    layout = KVLayout([device.allocate_blocks(4, planes=2, block_bytes=64)])
    kvoffload.set_tracer(kvoffload.nvtx_tracer("serving"))
    try:
        with OffloadEngine(layout, device=device, num_slots=4) as engine:
            job = engine.store([0], [0])
            assert nvtx.calls == [(f"store 128 bytes, {job.copier}", "serving", "store")]
            job.wait(10)
            assert nvtx.calls[1:] == [1]
    finally:
        kvoffload.set_tracer(None)


def test_without_the_package_the_error_has_the_command(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "nvtx", None)
    with pytest.raises(kvoffload.CapabilityError, match=r"need the package nvtx.*pip install 'kvoffload\[nvtx\]'"):
        kvoffload.nvtx_tracer()
