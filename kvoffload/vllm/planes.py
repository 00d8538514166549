"""vLLM's KV cache tensors as a KVLayout."""

from __future__ import annotations

from collections.abc import Sequence

from vllm.v1.kv_offload.base import CanonicalKVCacheRef, CanonicalKVCaches

from kvoffload.layout.layout import KVLayout
from kvoffload.layout.planes import Plane


def layout_of(kv_caches: CanonicalKVCaches, blocks_per_chunk: int) -> KVLayout:
    """A layout with vLLM's groups; a slot holds `blocks_per_chunk` blocks of one of them.

    The tensors are `(num_blocks, page bytes)`, with any stride between blocks. Groups may lie over each other: no block
    number is of two groups. The layout keeps the tensors alive.
    """
    groups = [_planes(kv_caches, refs) for refs in kv_caches.group_data_refs]
    return KVLayout(groups, blocks_per_slot=blocks_per_chunk)


def _planes(kv_caches: CanonicalKVCaches, refs: Sequence[CanonicalKVCacheRef]) -> list[Plane]:
    """One plane for each tensor of a group: layers of the group may share one, and the largest page counts."""
    page_bytes: dict[int, int] = {}
    for ref in refs:
        page_bytes[ref.tensor_idx] = max(page_bytes.get(ref.tensor_idx, 0), ref.page_size_bytes)
    planes = []
    for index, nbytes in page_bytes.items():
        tensor = kv_caches.tensors[index].tensor
        planes.append(
            Plane(
                tensor.data_ptr(),
                block_bytes=nbytes,
                num_blocks=tensor.shape[0],
                block_stride=tensor.stride(0) * tensor.element_size(),
                owner=tensor,
            )
        )
    return planes
