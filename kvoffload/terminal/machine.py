"""The device at hand in words: its description, and which copiers can run on it."""

from __future__ import annotations

from typing import Any

from kvoffload.copiers import FragmentShape, kernel_spec, why_not
from kvoffload.device.device import Device
from kvoffload.errors import CapabilityError
from kvoffload.kernels import KernelSpec, load_kernel
from kvoffload.planning.transfer_plan import Direction


def aligned_pack_kernel(direction: Direction, row_bytes: int = 2048) -> KernelSpec:
    """Return the kernel of pack for planes whose addresses and strides are multiples of 16 bytes, in rows of
    `row_bytes` (a power of two that divides the bytes of a block) and words of 8 bytes.
    """
    return kernel_spec(FragmentShape(fragment_bytes=row_bytes, word_bytes=8, alignment=16), direction)


def missing_copiers(device: Device) -> dict[str, str | None]:
    """Return, for every copier, None or why it cannot run on the device; a kernel is tried by loading one."""
    missing = why_not(device.capabilities)
    if missing["pack"] is None:
        try:
            with device.current():
                load_kernel(device.driver, device.capabilities, aligned_pack_kernel(Direction.LOAD)).close()
        except CapabilityError as error:
            missing["pack"] = str(error)
    return missing


def describe_device(device: Device) -> dict[str, Any]:
    """Return the fields of JSON that describe the machine behind a figure; versions are None for the simulated device,
    which has no driver.
    """
    capabilities, pci = device.capabilities, device.pci
    return {
        "simulated": device.simulated,
        "device": device.name,
        "driver": None if device.simulated else ".".join(map(str, capabilities.driver_version)),
        "bindings": None if device.simulated else ".".join(map(str, capabilities.bindings_version)),
        "link": "simulated" if device.simulated else f"{pci.link_speed or 'speed unknown'} x{pci.link_width or '?'}",
    }
