"""mlx-lm's prompt cache (`mlx_lm.models.cache.save_prompt_cache`) as a session file, and back.

It is a safetensors file: tensors "<layer>.0", keys, and "<layer>.1", values, (1, heads, room, dim), where mlx-lm makes
room for 256 tokens at a time; "<layer>.2" says how many there are. Metadata has the class of each layer: "1.<layer>".
Before mlx-lm 0.32 there was no more room than tokens, no "<layer>.2", and the classes were "2.<layer>". Both are read.

The package safetensors would need ml_dtypes for bfloat16, and views of all tensors to write them.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from tempfile import NamedTemporaryFile, TemporaryDirectory
from typing import Any

import numpy as np

from kvoffload.cache.keys import as_tokens
from kvoffload.errors import SessionFileError
from kvoffload.session.saving import Terms
from kvoffload.session.session_file import Contents, Plan, SessionFile, SessionWriter
from kvoffload.session.whole_blocks import BlockForm, GroupForm

PLANES = {"planes": "keys and values by layer"}  # of the identity
_AXES = ("tokens", "heads", "dim")
_TYPES = {"float32": "F32", "float16": "F16", "bfloat16": "BF16"}
_MOST_HEADER, _MOST_PLANES = 1 << 20, 4096


def convert(source: Path, target: Path, ids: Any, identity: dict[str, str], salt: str, size: int, producer: str) -> int:
    """Write the full blocks of a prompt cache into a session file, or a session file into a prompt cache, by what the
    source is. Returns how many tokens the target has. What is neither may raise any exception.

    Args:
        ids: of the tokens, as many as the prompt cache has; a session file has its own.
        identity: of the session file to make, but for its planes; or what adds to that of the one that is read.
        salt, size, producer: of the session file to make: as for `save`, tokens of a block, and program.
    """
    with open(os.open(source, os.O_RDONLY | os.O_NONBLOCK), "rb") as file:
        if b'"kvoffload session"' in file.read(64):
            return _to_mlx(source, target, identity)
        data = np.memmap(file, np.uint8, "r")
    start = 8 + int.from_bytes(data[:8].tobytes(), "little")
    header = json.loads(data[8 : min(start, _MOST_HEADER)].tobytes())  # a longer one ends too early for JSON
    metadata = header.pop("__metadata__")
    classes = [name for key, name in metadata.items() if key.startswith("1." if metadata.get("2.0") == "" else "2.")]
    if {*classes} != {"KVCache"}:
        raise SessionFileError(f"its layers must have the class KVCache, got {sorted({*classes})}")
    forms = {name: (each["dtype"], each["shape"]) for name, each in header.items()}
    planes, counts = _tensors(len(classes), *forms["0.0"])
    ends = [*sum(sorted(each["data_offsets"] for each in header.values()), [0]), len(data) - start]
    (kind, (batch, heads, room, dim)), counts = forms["0.0"], counts if metadata.get("2.0") == "" else {}
    wrong = batch != 1 or kind not in _TYPES.values() or min(heads, room, dim) < 1
    if forms != planes | counts or ends[::2] != ends[1::2] or wrong:
        raise SessionFileError(f"its tensors must be (1, heads, tokens, dim), alike, and without gaps, got {forms}")
    parts = {name: data[start:][slice(*each["data_offsets"])] for name, each in header.items()}
    tokens, found = as_tokens(ids), {int(parts[name].view("<i4")[0]) for name in counts} or {room}
    if found != {len(tokens)} or not size <= len(tokens) <= room:
        raise ValueError(f"it has {found} tokens, and room for {room}, got {len(tokens)} ids; a block needs {size}")
    blocks, [dtype] = len(tokens) // size, [name for name in _TYPES if _TYPES[name] == kind]
    tokens, form = tokens[: blocks * size], BlockForm(dtype, size, _AXES, (GroupForm(len(planes), (size, heads, dim)),))
    terms = Terms.checked(salt, b"", identity | PLANES)
    plan = Plan(Contents(form, blocks, terms.identity, "", terms.digest(tokens[:size]), producer))
    tensors = [parts[name].view(form.element).reshape(heads, room, dim)[:, : len(tokens)] for name in planes]
    views = [each.reshape(heads, blocks, size, dim).transpose(1, 2, 0, 3) for each in tensors]
    with SessionWriter(target, plan, tokens) as writer:
        for first, run in plan.runs(0, blocks):
            writer.put(first, [np.stack([each[first : first + run] for each in views], axis=1)])
        writer.finish()
    return len(tokens)


def _to_mlx(source: Path, target: Path, identity: dict[str, str]) -> int:
    with SessionFile(source) as file, TemporaryDirectory(dir=target.parent, prefix=".kvoffload-") as folder:
        form, said, tokens = file.contents.form, file.contents.identity | identity, len(file.tokens)
        fits = form.axes == _AXES and len(form.groups) == 1 and form.dtype in _TYPES and said.items() >= PLANES.items()
        if not fits or form.groups[0].planes not in range(2, _MOST_PLANES, 2):
            raise SessionFileError(f"it must have {PLANES}, {_AXES}, one group, {[*_TYPES]}, got {said}, {form}")
        (planes, (size, heads, dim)), header, end = form.groups[0], dict[str, Any](), 0
        tensors, counts = _tensors(planes // 2, _TYPES[form.dtype], [1, heads, tokens, dim])
        metadata = {"2.0": "", **{f"0.{name}": value for name, value in said.items()}}
        for layer, name in enumerate(counts):
            metadata |= {f"1.{layer}": "KVCache", f"2.{layer + 1}.0": name, f"2.{layer + 1}.1": "scalar"}
        for name, (kind, shape) in (counts | tensors).items():
            begin, end = end, end + (file.plan.block_bytes[0] // planes * file.whole if shape else 4)
            header[name] = {"dtype": kind, "shape": shape, "data_offsets": [begin, end]}
        text = json.dumps({"__metadata__": metadata, **header}).encode()
        with NamedTemporaryFile(dir=folder, delete=False) as part:
            part.write(len(text).to_bytes(8, "little") + text + np.full(len(counts), tokens, "<i4").tobytes())
            os.posix_fallocate(part.fileno(), 0, 8 + len(text) + end)
            values = np.memmap(part, form.element, "r+", part.tell(), (planes, heads, file.whole, size, dim))
            good, blocks = 0, values.transpose(2, 0, 3, 1, 4)
            for first, run in file.plan.runs(0, file.whole):
                [blocks[first : first + run]], same = file.read(first, run)
                good += same
            if good < file.plan.blocks:
                raise SessionFileError("it is damaged or cut: `kvoffload session verify` says where")
            os.fsync(part.fileno())
            os.replace(part.name, target)
    return tokens


def _tensors(layers: int, kind: str, shape: list[int]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return type and shape of the tensors of keys and values, in the order of planes, and of the numbers of tokens."""
    planes = {f"{layer}.{part}": (kind, shape) for layer in range(layers) for part in range(2)}
    return planes, {f"{layer}.2": ("I32", []) for layer in range(layers)}
