"""Golden disk sets: files as ranges of bytes that are not zero. Run this file to write them anew."""

from __future__ import annotations

import json
import re
import tempfile
from pathlib import Path
from typing import Any

from disk_sets import LAYOUT, PAGE, open_set, write_one

GOLDEN = Path(__file__).parent / "golden"
KEY = b"a key of 16 byte"
SETS: dict[str, dict[str, Any]] = {
    "xxh3": {"files": 2, "checksum_key": None, "identity": "llama-3.1-8b@f3c2/日本", "tenant": "batch"},
    "blake2b": {"files": 1, "checksum_key": KEY, "identity": "", "tenant": ""},
}
# slot, key, sequence, position
RECORDS = [(0, b"k", 7, 0), (1, bytes(range(64)), 7, 1), (3, b"sixteen bytes ab", 9, 0)]


def options(name: str) -> dict[str, Any]:
    """What opens a golden set."""
    chosen = SETS[name]
    nbytes = chosen["files"] * (3 * PAGE + 4 * PAGE)
    return {
        "slot_bytes": PAGE,
        "nbytes": nbytes,
        "layout_digest": LAYOUT,
        "identity": chosen["identity"],
        "key": chosen["checksum_key"],
    }


def payload_of(slot: int) -> bytes:
    return bytes([slot + 1]) * 32 + bytes(PAGE - 64) + b"the end of a payload".rjust(32, b".")


def paths_in(folder: Path, name: str) -> list[Path]:
    return [folder / f"{name}-{number}.kv" for number in range(SETS[name]["files"])]


def unpack(name: str, folder: Path) -> list[Path]:
    """The files of a golden set, in `folder`."""
    paths = paths_in(folder, name)
    for path, content in zip(paths, json.loads((GOLDEN / f"{name}.json").read_text()), strict=True):
        data = bytearray(content["nbytes"])
        for offset, digits in content["ranges"].items():
            data[int(offset) : int(offset) + len(digits) // 2] = bytes.fromhex(digits)
        path.write_bytes(data)
        path.chmod(0o600)
    return paths


def pack(name: str, folder: Path) -> None:
    contents = []
    for path in paths_in(folder, name):
        data = path.read_bytes()
        ranges = {found.start(): found[0].hex() for found in re.finditer(rb"[^\0](?:\0{0,15}[^\0])*", data, re.DOTALL)}
        contents.append({"nbytes": len(data), "ranges": ranges})
    GOLDEN.mkdir(exist_ok=True)
    (GOLDEN / f"{name}.json").write_text(json.dumps(contents, indent=1) + "\n")


def write_golden_sets() -> None:
    """Write all sets to `GOLDEN`, in the format of this version."""
    for name, chosen in SETS.items():
        with tempfile.TemporaryDirectory() as folder:
            files = open_set(*paths_in(Path(folder), name), **options(name))
            write_one(files, 2, b"before clear", "", [memoryview(payload_of(2))], 1, 0)
            files.clear()
            for slot, key, sequence, position in RECORDS:
                write_one(files, slot, key, chosen["tenant"], [memoryview(payload_of(slot))], sequence, position)
            files.close()
            pack(name, Path(folder))


if __name__ == "__main__":
    write_golden_sets()
