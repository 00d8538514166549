"""Keys of a prefix cache: digests of token ids, chained, the same in every process and on every machine.

A key names the tokens that the model has seen up to the end of its blocks, and the meaning of the stored bytes.
docs/keys.md has the byte layout, so that you can compute the same keys in another language, and test vectors.
"""

from __future__ import annotations

import struct
from hashlib import blake2b
from typing import Any

import numpy as np

from kvoffload.errors import LayoutError
from kvoffload.internal.types import Int64Array
from kvoffload.layout.ids import as_ids
from kvoffload.layout.layout import KVLayout, ShardedLayout

KEY_BYTES = 16
KEY_VERSION = 1  # of the byte layout; another one gives other keys throughout

_TOKEN_LIMIT = 1 << 32
_TOKEN_BYTES = 4


def chain_keys(
    token_ids: Any, *, layout: KVLayout | ShardedLayout, salt: str, extra: bytes = b"", parent: bytes | None = None
) -> list[bytes]:
    """Compute one key for each `layout.tokens_per_block * layout.blocks_per_slot` tokens. Tokens after the last full
    key get none.

    Each key covers all tokens from the first to the end of its own. So two sequences share exactly the keys of their
    common prefix. Another layout, salt or extra changes every key.

    Args:
        token_ids: anything numpy turns into a 1-D integer array, values in `[0, 2**32)`. Its dtype does not matter.
        layout: the engine's, `engine.layout`, also of a ShardedEngine. Its `fingerprint` goes into every key;
            numbers of blocks do not, nor do addresses and strides, unless the order of a slot follows from them: see
            `slot_order` of `KVLayout`.
        salt: everything else that the bytes depend on, and who may share them: model and revision, adapter, rank among
            the GPUs that split the model, tenant. Any string, "" too.
        extra: like `salt`, but bytes, for digests of images and adapters. Hash long ones yourself.
        parent: extends a chain without hashing it again: the last key of the tokens before these. With the other
            arguments unchanged, you get the keys that one call with all tokens returns after `parent`.

    Returns:
        Keys of 16 bytes, in the order of the tokens; [] if there are fewer tokens than one key has.

    Raises:
        ValueError: token_ids are not such integers, or parent does not have 16 bytes.
        LayoutError: the layout lacks dtype, block_axes or tokens_per_block.
        TypeError: layout, salt, extra or parent has the wrong type.
    """
    root = _root(layout, salt, extra)
    if parent is not None and not isinstance(parent, bytes):
        raise TypeError(f"parent must be a key from chain_keys, or None, got {parent!r:.80}")
    if parent is not None and len(parent) != KEY_BYTES:
        raise ValueError(
            f"parent must be a key of {KEY_BYTES} bytes from chain_keys, got {len(parent)}: {parent!r:.80}"
        )
    previous = root if parent is None else parent
    data = as_tokens(token_ids).astype("<u4").tobytes()
    assert layout.tokens_per_block is not None, "else it has no fingerprint"
    step = _TOKEN_BYTES * layout.tokens_per_block * layout.blocks_per_slot
    begin = blake2b(root, digest_size=KEY_BYTES, person=b"kvoffload key").copy  # half as long as options each time
    keys = []
    for start in range(0, len(data) - step + 1, step):
        digest = begin()
        digest.update(previous + data[start : start + step])
        previous = digest.digest()
        keys.append(previous)
    return keys


def _root(layout: KVLayout | ShardedLayout, salt: str, extra: bytes) -> bytes:
    """Return the digest of all but tokens. Each field's length comes before it, so that no two messages are equal."""
    if not isinstance(layout, KVLayout | ShardedLayout):
        raise TypeError(f"layout must be a KVLayout, got {layout!r:.80}")
    if not isinstance(salt, str):
        raise TypeError(f'salt must be a string such as "model/adapter/tenant", got {salt!r:.80}')
    if not isinstance(extra, bytes):
        raise TypeError(f'extra must be bytes such as a digest, b"" for nothing, got {extra!r:.80}')
    message = struct.pack("<Q", KEY_VERSION)
    for field in (layout.fingerprint, salt.encode("utf-8", "surrogatepass"), extra):
        message += struct.pack("<Q", len(field)) + field
    return blake2b(message, digest_size=KEY_BYTES, person=b"kvoffload root").digest()


def as_tokens(token_ids: Any) -> Int64Array:
    """Return token ids as `chain_keys` takes them; raises its ValueError."""
    try:
        return as_ids("token_ids", token_ids, _TOKEN_LIMIT)
    except LayoutError as error:
        raise ValueError(
            f"{_culprit(token_ids) or error}; token_ids must be one sequence of integers in [0, 2**32): give the "
            "prompts of a batch one by one, and anything else as extra"
        ) from None


def _culprit(token_ids: Any) -> str | None:
    try:
        len(token_ids)  # has an end
        for position, value in enumerate(token_ids):
            plain = value.item() if isinstance(value, np.generic) else value
            if not isinstance(plain, int) or isinstance(plain, bool) or not 0 <= plain < _TOKEN_LIMIT:
                return f"token_ids[{position}] is {' '.join(repr(plain).split()):.80}"
    except TypeError:
        pass
    return None
