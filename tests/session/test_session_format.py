"""docs/session-format.md: its test vectors, its places, and its reader, on files that the package writes."""

from __future__ import annotations

import hashlib
import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from documents import ROOT, snippets

from kvoffload.errors import SessionFileError
from kvoffload.session.saving import Terms
from kvoffload.session.session_file import Contents, Plan, SessionFile, SessionWriter
from kvoffload.session.whole_blocks import BlockForm, GroupForm

PAGE = (ROOT / "docs" / "session-format.md").read_text()
VECTORS: list[dict[str, Any]] = json.loads(PAGE.partition("<!-- vectors -->\n```json\n")[2].partition("```")[0])
HEADER = PAGE.partition("<!-- header -->\n```\n")[2].partition("```")[0].replace("\n", "")
each_vector = pytest.mark.parametrize("vector", VECTORS, ids=lambda vector: str(vector["dtype"]))


def planned(vector: dict[str, Any]) -> tuple[Plan, Any]:
    """Its plan and tokens."""
    tokens = 1000 + np.arange(vector["blocks"] * vector["block_tokens"], dtype=np.int64)
    groups = tuple(GroupForm(each["planes"], tuple(each["shape"])) for each in vector["groups"])
    form = BlockForm(vector["dtype"], vector["block_tokens"], tuple(vector["axes"]), groups)
    salt = Terms(vector["salt"], bytes.fromhex(vector["extra"]), {}).digest(tokens[: vector["block_tokens"]])
    said = vector["identity"], vector["weights"], salt, vector["producer"]
    return Plan(Contents(form, vector["blocks"], *said)), tokens


def written(vector: dict[str, Any], path: Path) -> tuple[Plan, list[Any]]:
    """Write its file. Returns the plan, and the blocks of each group as rows of bytes."""
    plan, tokens = planned(vector)
    blocks = [
        ((131 * np.arange(plan.blocks)[:, None] + 17 * group + np.arange(nbytes)) % 251).astype(np.uint8)
        for group, nbytes in enumerate(plan.block_bytes)
    ]
    with SessionWriter(path, plan, tokens) as file:
        file.put(0, blocks)
        file.finish()
    return plan, blocks


def read_by_the_page(path: Path) -> Any:
    (reader,) = [each for each in snippets() if each.name == "session reader"]
    assert len([line for line in reader.code.splitlines() if line]) <= 40
    names: dict[str, Any] = {}
    exec(compile(reader.code, reader.document, "exec"), names)
    return names["read_session"](path)


@each_vector
def test_a_file_is_as_the_page_says(vector: dict[str, Any], tmp_path: Path) -> None:
    plan, _ = written(vector, tmp_path / "a")
    data = (tmp_path / "a").read_bytes()
    digests = data[plan.digests_at : plan.digests_at + 16 * plan.blocks].hex()
    found = {
        "salt_digest": plan.contents.salt,
        "root": hashlib.blake2b(plan.header, digest_size=16).hexdigest(),
        "digests": re.findall("." * 32, digests),
        "seal": data[-32:].hex(),
        "nbytes": len(data),
        "sha256": hashlib.sha256(data).hexdigest(),
    }
    assert found == {name: vector[name] for name in found}
    assert plan.header[8:].decode().rstrip(" ") == HEADER or vector is not VECTORS[0]


def test_places_of_a_file_of_several_segments_are_as_the_page_says() -> None:
    groups = [{"planes": 64, "shape": [16, 8, 128]}]
    plan, _ = planned({**VECTORS[0], "block_tokens": 16, "groups": groups, "blocks": 20})
    assert (plan.block_bytes, plan.step) == ([2 << 20], 8)
    begins = [plan.place(block, 0) for block in (0, 8, 16)]
    named = re.findall(r"`(blocks\.0\.\d+)`", PAGE.partition("A file of 20\nblocks")[2].partition("\n\n")[0])
    tensors = json.loads(plan.header[8:])
    assert [len(plan.header) + tensors[name]["data_offsets"][0] for name in named] == begins
    assert f"begin at the bytes {begins[0]}, {begins[1]} and {begins[2]}" in PAGE
    assert f"It has {plan.nbytes} bytes" in PAGE


@each_vector
def test_the_reader_of_the_page_reads_what_is_whole(vector: dict[str, Any], tmp_path: Path) -> None:
    plan, blocks = written(vector, tmp_path / "a")
    data = (tmp_path / "a").read_bytes()
    for size in (len(data), plan.seal_at, plan.seal_at - 1, plan.blocks_at + 1, plan.tokens_at):
        (tmp_path / "cut").write_bytes(data[:size])
        said, tokens, found = read_by_the_page(tmp_path / "cut")
        with SessionFile(tmp_path / "cut") as file:
            whole = file.whole
            assert said == file.contents.metadata()
            assert tokens.tolist() == file.tokens.tolist()
        assert whole == {len(data): plan.blocks, plan.seal_at: plan.blocks, plan.seal_at - 1: plan.blocks - 1}.get(
            size, 0
        )
        for each, rows, group in zip(found, blocks, vector["groups"], strict=True):
            assert each.shape == (whole, group["planes"], *group["shape"])
            assert each.tobytes() == rows[:whole].tobytes()


def test_the_reader_of_the_page_refuses_damage(tmp_path: Path) -> None:
    plan, _ = written(VECTORS[0], tmp_path / "a")
    data = bytearray((tmp_path / "a").read_bytes())
    text = bytes(data)
    for place in (0, 3, 8, 20, 60, text.index(b"bfloat16"), text.index(b"4160"), len(plan.header) - 1):
        damaged = data.copy()
        damaged[place] ^= 1
        (tmp_path / "b").write_bytes(damaged)
        with pytest.raises(SessionFileError):
            SessionFile(tmp_path / "b")
        with pytest.raises((ValueError, KeyError)):
            read_by_the_page(tmp_path / "b")
    for place, whole in ((plan.tokens_at, 0), (plan.place(0, 0), 0), (plan.place(1, 0), 1), (plan.blocks_at - 1, 2)):
        damaged = data.copy()
        damaged[place] ^= 1
        (tmp_path / "b").write_bytes(damaged)
        assert len(read_by_the_page(tmp_path / "b")[2][0]) == whole
