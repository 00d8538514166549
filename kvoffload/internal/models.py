"""KV geometries of models that people serve, as facts.

They follow from the models' public configurations (layers, KV heads, head size, attention kind) at 16-bit elements and
16 tokens per block; a suffix such as `-tp4` is one GPU's share under tensor parallelism of that degree.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

ROUNDING_BYTES = 16  # scaled block sizes are multiples of this


@dataclass(frozen=True, slots=True)
class ModelGeometry:
    """The paged KV cache of a model on one GPU.

    Attributes:
        kv_heads: KV heads on this GPU; 1 for a latent that all heads share.
        head_dim: elements of one head; for MLA, of the latent with its rotary part.
        kv_split: K and V are separate tensors, so a layer has two planes.
        groups: names of the block tables, by kind of attention; each has as many layers.
        scale: 1, or the factor by which `block_bytes` was shrunk.
    """

    name: str
    layers: int
    kv_heads: int
    head_dim: int
    kv_split: bool = True
    tokens_per_block: int = 16
    dtype_bytes: int = 2
    groups: tuple[str, ...] = ("full",)
    scale: float = 1.0

    @property
    def planes(self) -> int:
        return self.layers * (2 if self.kv_split else 1)

    @property
    def planes_per_group(self) -> tuple[int, ...]:
        """Planes of each group: equal shares."""
        return (self.planes // len(self.groups),) * len(self.groups)

    @property
    def block_bytes(self) -> int:
        exact = self.tokens_per_block * self.kv_heads * self.head_dim * self.dtype_bytes
        return exact if self.scale == 1 else math.ceil(exact * self.scale / ROUNDING_BYTES) * ROUNDING_BYTES

    @property
    def bytes_per_block(self) -> int:
        return self.planes * self.block_bytes

    def scaled(self, factor: float) -> ModelGeometry:
        """Return the same with `factor` times the block bytes, rounded up to 16."""
        if not 0 < factor <= 1:
            raise ValueError(f"scale must be above 0 and at most 1, got {factor}")
        return replace(self, scale=factor)


_HYBRID = ("full", "sliding_window_128")

MODELS: dict[str, ModelGeometry] = {
    model.name: model
    for model in (
        ModelGeometry("llama-3.1-8b", layers=32, kv_heads=8, head_dim=128),
        ModelGeometry("llama-3.1-70b", layers=80, kv_heads=8, head_dim=128),
        ModelGeometry("llama-3.1-70b-tp4", layers=80, kv_heads=2, head_dim=128),
        ModelGeometry("qwen2.5-7b", layers=28, kv_heads=4, head_dim=128),
        ModelGeometry("qwen2.5-0.5b", layers=24, kv_heads=2, head_dim=64),
        ModelGeometry("mistral-7b", layers=32, kv_heads=8, head_dim=128),
        ModelGeometry("qwen3-14b", layers=40, kv_heads=8, head_dim=128),
        ModelGeometry("gpt-oss-20b", layers=24, kv_heads=8, head_dim=64, groups=_HYBRID),
        ModelGeometry("gpt-oss-120b-tp2", layers=36, kv_heads=4, head_dim=64, groups=_HYBRID),
        ModelGeometry("gpt-oss-120b-tp4", layers=36, kv_heads=2, head_dim=64, groups=_HYBRID),
        ModelGeometry("deepseek-v3-mla", layers=61, kv_heads=1, head_dim=576, kv_split=False),
    )
}


def find_model(name: str) -> ModelGeometry:
    """Return the geometry of that name."""
    if name not in MODELS:
        raise ValueError(f"unknown model {name!r}; known: {', '.join(MODELS)}")
    return MODELS[name]
