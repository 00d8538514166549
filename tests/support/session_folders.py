"""Session files that are written without a cache, whose blocks follow from their tokens, and layouts that hold them."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from kvoffload import KVLayout, Plane, ShardedLayout
from kvoffload.session.saving import Terms
from kvoffload.session.session_file import Contents, Plan, SessionWriter
from kvoffload.session.whole_blocks import Blocks, WholeBlocks

TOKENS, HEADS, DIM, PLANES = 4, 4, 64, 2  # of a block
GIVEN: dict[str, Any] = {"salt": "s", "identity": {"model": "m", "revision": "1"}}


def layout_of(
    axes: Sequence[str] = ("tokens", "heads", "dim"),
    *,
    heads: int = HEADS,
    groups: int = 1,
    at: int = 1,
    **options: Any,
) -> KVLayout:
    """A layout in memory that nobody touches, from `at` MiB on."""
    extents = {"tokens": TOKENS, "heads": heads, "dim": DIM}
    planes = [
        [Plane((at + PLANES * group + plane) << 20, block_bytes=TOKENS * heads * DIM * 2, num_blocks=8)
         for plane in range(PLANES)]
        for group in range(groups)
    ]  # fmt: skip
    shape = [extents[axis] for axis in axes]
    return KVLayout(
        planes, dtype="bfloat16", tokens_per_block=TOKENS, block_axes=axes, block_shape=shape, **options
    )  # fmt: skip


LAYOUTS: dict[str, KVLayout | ShardedLayout] = {
    "raw": layout_of(),
    "slots of four, plane-major": layout_of(blocks_per_slot=4, slot_order="plane-major"),
    "coded": layout_of(codec="bf16-12"),
    "two shards": ShardedLayout([layout_of(heads=2), layout_of(heads=2, at=100)]),
    "two groups, heads first": layout_of(("heads", "tokens", "dim"), groups=2, blocks_per_slot=2),
}


def blocks_of(tokens: Sequence[int], groups: int = 1) -> list[Blocks]:
    """The whole blocks of each group: each depends on all tokens up to its own, and the codec holds it."""
    found = []
    for group in range(groups):
        ends = range(TOKENS, len(tokens) + 1, TOKENS)
        made = [
            np.random.default_rng([group, *tokens[:end]]).integers(0, 1 << 16, 2048, dtype=np.uint16) for end in ends
        ]
        found.append((np.array(made) & 0x83FF | 0x3C00).astype(np.uint16).reshape(-1, PLANES, TOKENS, HEADS, DIM))
    return found


def write(
    path: Path,
    tokens: Sequence[int],
    layout: KVLayout | ShardedLayout = LAYOUTS["raw"],
    *,
    blocks: list[Blocks] | None = None,
    weights: str = "",
    producer: str = "a test",
    **given: Any,
) -> Path:
    """Write the file that a cache with this layout would save."""
    given = GIVEN | given
    count = len(tokens) // TOKENS
    ids = np.array(tokens[: count * TOKENS], dtype=np.int64)
    terms = Terms.checked(given["salt"], b"", given["identity"])
    plan = Plan(
        Contents(
            WholeBlocks(layout, ()).form,
            count,
            given["identity"],
            weights,
            terms.digest(ids[: layout.tokens_per_block]),
            producer,
        )
    )
    with SessionWriter(path, plan, ids) as file:
        file.put(0, blocks or blocks_of(tokens, layout.num_groups))
        file.finish()
    return path


def flip(path: Path, at: int) -> None:
    content = bytearray(path.read_bytes())
    content[at] ^= 1
    path.write_bytes(content)
