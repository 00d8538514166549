"""What the bytes of a KV cache depend on, as far as vLLM's configuration says. Other records are no hits."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from hashlib import blake2b
from typing import TYPE_CHECKING, Any

import vllm
from vllm.v1.kv_offload.config import OffloadingConfig

from kvoffload.layout.layout import KVLayout
from kvoffload.tiers.tier import LAYOUT_BYTES

if TYPE_CHECKING:
    from vllm.config import VllmConfig

_MAKING: ContextVar[VllmConfig | None] = ContextVar("_MAKING", default=None)


@contextmanager
def making_connector(config: VllmConfig) -> Iterator[None]:
    """While a KVOffloadConnector is made: its spec, which vLLM gives less, finds the configuration here."""
    token = _MAKING.set(config)
    try:
        yield
    finally:
        _MAKING.reset(token)


def config_of_connector() -> VllmConfig | None:
    """That of the KVOffloadConnector that is being made; None if vLLM makes a connector of its own."""
    return _MAKING.get()


def identity_of(config: VllmConfig, offloading: OffloadingConfig) -> str:
    """The model as it was named, its revision, quantisation and overrides, the dtypes, and vLLM's release.

    Adapters are not in it: vLLM's keys depend on their names.
    """
    model: Any = config.model_config
    return json.dumps(
        {
            "model": str(model.model),
            "revision": str(model.revision),
            "quantization": str(model.quantization),
            "overrides": _text(getattr(model, "hf_overrides", None)),
            "dtype": str(model.dtype).removeprefix("torch."),
            "cache dtype": offloading.model.dtype,
            "vllm": str(getattr(vllm, "__version__", "unknown")).partition("+")[0],
        }
    )


def _text(value: Any) -> str:
    try:
        return json.dumps(value, sort_keys=True)
    except (TypeError, ValueError):  # a function
        return getattr(value, "__qualname__", type(value).__name__)


def note_of(layout: KVLayout) -> str:
    """What a worker says of its slots: two workers say the same if each could load what the other has stored."""
    groups = [[group.slot_order, [plane.block_bytes for plane in group.planes]] for group in layout.groups]
    return json.dumps({"blocks_per_slot": layout.blocks_per_slot, "groups": groups})


def layout_digest(offloading: OffloadingConfig, notes: Sequence[str]) -> bytes:
    """16 bytes over what `note_of` says in each worker, in the order of their ranks, and how vLLM divides the model."""
    parallel, cache = offloading.parallel, offloading.cache
    said = {
        "workers": list(notes),
        "parallel": [parallel.tp_size, parallel.pp_size, parallel.pcp_size, parallel.dcp_size],
        "tokens": [cache.tokens_per_hash, cache.blocks_per_chunk, *(g.tokens_per_block for g in offloading.groups)],
        "windows": [group.sliding_window_size_in_chunks for group in offloading.groups],
        "layout": offloading.kv_cache_layout,
    }
    message = json.dumps(said, sort_keys=True).encode()
    return blake2b(message, digest_size=LAYOUT_BYTES, person=b"kvoffload vllm").digest()
