"""vLLM's classes for `bench vllm`; its Python files and a few packages are enough.

Two parts of vLLM are compiled where these classes use them, and are replaced where the compiled part is missing:

    vllm._C_stable_libtorch    vLLM's CUDA platform imports it for its kernels, none of which is used: an empty module
    swap_blocks_batch          one call of cuMemcpyBatchAsync: the same call, by the driver's function that vLLM's own
                               Python files have found for `DmaCopyBackend`
"""

from __future__ import annotations

import importlib
import importlib.metadata
import importlib.util
import os
import sys
import types
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

from kvoffload.driver import address_of
from kvoffload.errors import CapabilityError

TESTED = "0.33."
COMPILED, REBUILT = "vLLM's compiled function", "the same driver call, from Python"
_LOG_STREAM = "VLLM_LOGGING_STREAM"  # read when vLLM is imported
_KERNELS = "vllm._C_stable_libtorch"
_STREAM_ORDER, _ANY_ORDER = 1, 3  # CUmemcpySrcAccessOrder
_REMEDY = (
    f"install vllm=={TESTED}*, or put its Python files and msgspec, psutil, pyzmq, regex and requests on PYTHONPATH, "
    "with PyTorch and Triton installed"
)


class TransferClasses(NamedTuple):
    """What transfers need.

    Attributes:
        torch: PyTorch.
        base, common, worker, backend: vLLM's modules of those classes.
        batch_copy: COMPILED or REBUILT: what `swap_blocks_batch` is.
    """

    torch: Any
    base: Any
    common: Any
    worker: Any
    backend: Any
    batch_copy: str


class ManagerClasses(NamedTuple):
    """What the calls of the scheduler need: vLLM's modules."""

    base: Any
    manager: Any


def version() -> str:
    """Of vLLM.

    Raises:
        CapabilityError: it is not installed, or not a release that was compared.
    """
    try:
        found = importlib.metadata.version("vllm")
    except importlib.metadata.PackageNotFoundError as error:
        raise CapabilityError(f"bench vllm needs vLLM, which is not installed: {_REMEDY}") from error
    if not found.startswith(TESTED):
        raise CapabilityError(f"bench vllm was written for vLLM {TESTED}*, found {found}: {_REMEDY}")
    return found


def transfer_classes() -> TransferClasses:
    """Import what transfers need.

    Raises:
        CapabilityError: a package is missing, or PyTorch has no GPU.
    """
    version()
    _prepare_import()
    base, common, worker, backend, operations = map(
        _import,
        (
            "vllm.v1.kv_offload.base",
            "vllm.v1.kv_offload.cpu.common",
            "vllm.v1.kv_offload.cpu.gpu_worker",
            "vllm.v1.simple_kv_offload.copy_backend",
            "vllm._custom_ops",
        ),
    )
    torch = worker.torch
    if not torch.cuda.is_available():
        raise CapabilityError("bench vllm needs a PyTorch that can use the GPU; this one has no CUDA")
    batch_copy = COMPILED
    if not hasattr(torch.ops._C_cache_ops, "swap_blocks_batch"):
        batch_copy = REBUILT
        operations.swap_blocks_batch = batch_copy_of(_import("vllm.v1.simple_kv_offload.cuda_mem_ops"), torch)
    return TransferClasses(torch, base, common, worker, backend, batch_copy)


def manager_classes() -> ManagerClasses:
    """Import what the calls of the scheduler need.

    Raises:
        CapabilityError: a package is missing; they are more than for transfers.
    """
    version()
    _prepare_import()
    return ManagerClasses(_import("vllm.v1.kv_offload.base"), _import("vllm.v1.kv_offload.cpu.manager"))


def _prepare_import() -> None:
    """Send vLLM's log to standard error, as standard output is for results; replace what is compiled and missing."""
    os.environ.setdefault(_LOG_STREAM, "ext://sys.stderr")
    if _KERNELS not in sys.modules and importlib.util.find_spec(_KERNELS) is None:
        sys.modules[_KERNELS] = types.ModuleType(_KERNELS)


def _import(name: str) -> Any:
    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise CapabilityError(f"bench vllm cannot import {name}: {error}; {_REMEDY}") from error


def batch_copy_of(memory: Any, torch: Any) -> Callable[..., None]:
    """A `swap_blocks_batch`: copies addresses to addresses, in one driver call on PyTorch's current stream.

    Args:
        memory: vLLM's module `cuda_mem_ops`.
    """
    function, _ = memory._resolve_batch_memcpy()
    attributes = np.zeros((2, 6), dtype=np.uint32)  # CUmemcpyAttributes: order, 2 location hints, flags
    attributes[:, 0] = _STREAM_ORDER, _ANY_ORDER
    first, failed = np.zeros(1, dtype=np.uint64), np.zeros(1, dtype=np.uint64)

    def swap_blocks_batch(src_ptrs: Any, dst_ptrs: Any, sizes: Any, is_src_access_order_any: bool = False) -> None:
        count = len(sizes)
        if count == 0:
            return
        status = function(
            dst_ptrs.data_ptr(),
            src_ptrs.data_ptr(),
            sizes.data_ptr(),
            count,
            address_of(attributes[int(is_src_access_order_any)]),
            address_of(first),
            1,
            address_of(failed),
            torch.cuda.current_stream().cuda_stream,
        )
        if status:
            raise RuntimeError(f"cuMemcpyBatchAsync failed with error {status} at copy {failed[0]}")

    return swap_blocks_batch
