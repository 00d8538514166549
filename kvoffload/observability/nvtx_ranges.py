"""NVTX ranges around transfers, for NVIDIA's profilers."""

from __future__ import annotations

from typing import Any

from kvoffload.engine.job import Job, TransferResult
from kvoffload.engine.tracing import Tracer
from kvoffload.errors import CapabilityError


class _NvtxTracer:
    """A range for each transfer, from its submission until the host has found its end."""

    def __init__(self, nvtx: Any, domain: str) -> None:
        self._nvtx = nvtx
        self._domain = domain

    def on_submit(self, job: Job) -> Any:
        message = f"{job.direction} {job.nbytes} bytes, {job.copier}"
        return self._nvtx.start_range(message=message, domain=self._domain, category=str(job.direction))

    def on_end(self, started: Any, result: TransferResult) -> None:  # noqa: ARG002
        self._nvtx.end_range(started)


def nvtx_tracer(domain: str = "kvoffload") -> Tracer:
    """Return a tracer for `set_tracer`. Once set, it makes an NVTX range for each transfer, which Nsight Systems shows.

    A range lasts from the submission until the host finds the transfer's end, in a call such as the engine's
    `poll` or a job's `wait`. That is later than its end on the GPU.

    Args:
        domain: of the ranges: a row of its own in the profiler.

    Raises:
        CapabilityError: the package nvtx is not installed; the message has the command.
    """
    try:
        import nvtx
    except ImportError as error:
        raise CapabilityError(
            f"NVTX ranges need the package nvtx, which cannot be imported ({error}); install it: pip install "
            "'kvoffload[nvtx]'"
        ) from None
    return _NvtxTracer(nvtx, domain)
