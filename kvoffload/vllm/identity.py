"""The part of vLLM's configuration that the bytes of a KV cache depend on. Records of another identity are misses."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from hashlib import blake2b
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import vllm
import vllm.envs
from vllm.v1.kv_offload.config import OffloadingConfig

from kvoffload.cache.tiering.tier import LAYOUT_BYTES
from kvoffload.errors import CapabilityError
from kvoffload.layout.layout import KVLayout
from kvoffload.vllm.releases import release_of

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.kv_cache_interface import KVCacheConfig

# Files of weights, as vLLM loads them; they are too long to be read once more.
_WEIGHTS = frozenset({".safetensors", ".bin", ".pt", ".pth", ".gguf"})
# Dtypes of caches that vLLM puts in place of what was configured, and those that it replaces, where it builds a model.
_REPLACED = frozenset({"auto", "fp8", "fp8_e4m3", "fp8_ds_mla"})


class Connector(NamedTuple):
    """The arguments with which vLLM makes a KVOffloadConnector."""

    config: VllmConfig
    cache: KVCacheConfig


_MAKING: ContextVar[Connector | None] = ContextVar("_MAKING", default=None)


@contextmanager
def making_connector(config: VllmConfig, cache: KVCacheConfig) -> Iterator[None]:
    """Keep the configuration while a KVOffloadConnector is made, for its spec, to which vLLM gives less."""
    token = _MAKING.set(Connector(config, cache))
    try:
        yield
    finally:
        _MAKING.reset(token)


def connector_for(option: str, why: str) -> Connector:
    """Return the arguments of the connector that is being made.

    Raises:
        CapabilityError: it is vLLM's own, with which `option` cannot be used; `why` ends the message.
    """
    if (connector := _MAKING.get()) is None:
        needs = 'kv_connector="KVOffloadConnector", kv_connector_module_path="kvoffload.vllm"'
        raise CapabilityError(f"{option} needs {needs}: {why}")
    return connector


def identity_of(connector: Connector, offloading: OffloadingConfig, given: str | None = None) -> str:
    """Return `given`, kvoffload_tier_identity; if that is None, describe the model and its draft model, with their
    weights, dtypes, and vLLM's release.

    Adapters are left out: vLLM's keys depend on their names and paths.

    Raises:
        CapabilityError: nothing tells which weights a model has.
    """
    if given is not None:
        return given
    config = connector.config
    draft: Any = config.speculative_config
    drafts: Any = None if draft is None else draft.draft_model_config
    return json.dumps(
        {
            **_identity_of_model(config.model_config, config.load_config),
            "cache dtype": cache_dtypes(connector, offloading),
            "vllm": release_of(str(getattr(vllm, "__version__", "unknown"))),
            "draft": None if drafts is None else [draft.method, _identity_of_model(drafts, config.load_config)],
        }
    )


def cache_dtypes(connector: Connector, offloading: OffloadingConfig) -> str:
    """Return the dtypes of the layers' caches, as their specs say.

    vLLM may write another dtype over the configured one where it builds the model. The scheduler's process sees that
    under the `uni` executor, and not under `mp`, so the configured one counts only where specs cannot tell it.
    """
    said = set()
    for group in connector.cache.kv_cache_groups:
        spec: Any = group.kv_cache_spec
        for layer in getattr(spec, "kv_cache_specs", {"": spec}).values():
            mode, dtypes = getattr(layer, "kv_quant_mode", None), getattr(layer, "dtypes", None)
            words = [*(dtypes or [getattr(layer, "dtype", "")]), getattr(layer, "cache_dtype_str", None) or "auto"]
            words += [mode.name] if mode else []
            said.add(" ".join(dict.fromkeys(str(word).removeprefix("torch.") for word in words if word != "auto")))
    model = str(connector.config.model_config.dtype).removeprefix("torch.")
    return ", ".join(sorted(said | {offloading.model.dtype} - _REPLACED - {model}))


def _identity_of_model(model: Any, load: Any) -> dict[str, Any]:
    return {
        "model": str(model.model),
        "revision": str(model.revision),
        "quantization": str(model.quantization),
        "overrides": _text(getattr(model, "hf_overrides", None)),
        "dtype": str(model.dtype).removeprefix("torch."),
        "loaded": [str(load.load_format), _text(load.model_loader_extra_config)],
        "weights": _weights(getattr(model, "model_weights", "") or str(model.model), model.revision, load.download_dir),
    }


def _weights(model: str, revision: str | None, cache: str | None) -> str:
    """Return a text that differs for other weights of that name. Raises CapabilityError: nothing tells them apart."""
    path = Path(model)
    files = sorted(path.iterdir()) if path.is_dir() else [path]
    if any(file.suffix in _WEIGHTS and file.is_file() for file in files):
        digest = blake2b(digest_size=16)
        for file in files:
            status = file.stat() if file.suffix in _WEIGHTS and file.is_file() else None
            if status is not None:
                digest.update(json.dumps([file.name, status.st_size, status.st_mtime_ns]).encode())
            elif file.suffix == ".json" and file.is_file():
                digest.update(file.name.encode() + blake2b(file.read_bytes()).digest())
        return f"files {digest.hexdigest()}"
    if cache is None:
        from huggingface_hub.constants import HF_HUB_CACHE

        cache = HF_HUB_CACHE
    hub = Path(cache, "models--" + model.replace("/", "--"))
    ref = hub / "refs" / (revision or "main")
    commit = ref.read_text().strip() if ref.is_file() else revision
    if commit and not vllm.envs.VLLM_USE_MODELSCOPE and (hub / "snapshots" / commit).is_dir():
        return f"commit {commit}"
    raise CapabilityError(
        f"kvoffload cannot tell which weights model={model!r} has: there is no folder or file of weights by that "
        "name, and no snapshot of it in the hub's cache. Set kvoffload_tier_identity to a text that changes whenever "
        "the weights do"
    )


def _text(value: Any) -> str:
    try:
        return json.dumps(value, sort_keys=True)
    except (TypeError, ValueError):  # a function
        return getattr(value, "__qualname__", type(value).__name__)


def note_of(layout: KVLayout) -> str:
    """Describe a worker's slots: equally for two workers if each could load the other's slots."""
    groups = [[group.slot_order, [plane.block_bytes for plane in group.planes]] for group in layout.groups]
    coded = {"codecs": layout.codecs} if set(layout.codecs) != {"raw"} else {}  # records without are as before
    return json.dumps({"blocks_per_slot": layout.blocks_per_slot, "groups": groups, **coded})


def layout_digest(offloading: OffloadingConfig, notes: Sequence[str]) -> bytes:
    """Digest, into 16 bytes, each worker's `note_of`, in the order of their ranks, and how vLLM divides the model."""
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
