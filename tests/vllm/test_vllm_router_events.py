"""RouterEvents beside vLLM's own classes of KV events: these read each batch, and would send the same."""

from __future__ import annotations

import ast
from importlib.machinery import PathFinder
from pathlib import Path
from typing import Any

import pytest

from kvoffload.observability.router_events import Form, RouterEvents

msgspec = pytest.importorskip("msgspec")

HASHES = list[bytes | int]
# name, type, and the default where there is one
STORED: list[Any] = [
    *(("block_hashes", HASHES), ("parent_block_hash", bytes | int | None), ("token_ids", list[int])),
    *(("block_size", int), ("lora_id", int | None), ("medium", str | None), ("lora_name", str | None)),
    *(("extra_keys", list[Any] | None, None), ("group_idx", int | None, None)),
    *(("kv_cache_spec_kind", str | None, None), ("kv_cache_spec_sliding_window", int | None, None)),
    *(("locality", str | None, None), ("ownership", str | None, None), ("session_id", str | None, None)),
    ("lookahead_token_ids", list[list[int]] | None, None),
]
REMOVED: list[Any] = [
    *(("block_hashes", HASHES), ("medium", str | None), ("group_idx", int | None, None)),
    *(("locality", str | None, None), ("ownership", str | None, None)),
]


def batches_of(release: str) -> Any:
    """KVEventBatch as that release declares it, but unknown fields are refused."""
    old = release == "0.23"
    settings = {"array_like": old, "omit_defaults": True, "tag": True, "forbid_unknown_fields": True}
    new = ("locality", "ownership", "session_id", "lookahead_token_ids") if old else ()
    kinds = [
        msgspec.defstruct(name, [field for field in fields if field[0] not in new], **settings)
        for name, fields in (("BlockStored", STORED), ("BlockRemoved", REMOVED), ("AllBlocksCleared", []))
    ]
    events = list[kinds[0] | kinds[1] | kinds[2]]  # type: ignore[valid-type]
    fields = [("ts", float), ("events", events), ("data_parallel_rank", int | None, None)]
    return msgspec.defstruct("KVEventBatch", fields, array_like=True, omit_defaults=True)


def batches_of_installed_vllm() -> Any:
    """KVEventBatch of the vLLM that is installed. Its file imports all of vLLM, so the classes are taken out of it."""
    found = PathFinder.find_spec("vllm")
    if found is None or found.origin is None:
        pytest.skip("vLLM is not installed")
    tree = ast.parse(Path(found.origin).with_name("distributed").joinpath("kv_events.py").read_text())
    names = ("EventBatch", "KVCacheEvent", "BlockStored", "BlockRemoved", "AllBlocksCleared", "KVEventBatch")
    body = [node for node in tree.body if getattr(node, "name", "") in names]
    assert [getattr(node, "name", "") for node in body] == list(names)
    space: dict[str, Any] = {"msgspec": msgspec, "Any": Any, "ExternalBlockHash": bytes | int, "__name__": __name__}
    exec(compile(ast.Module(body, []), "kv_events.py", "exec", dont_inherit=True), space)
    return space["KVEventBatch"]


def messages(form: Form | None) -> Any:
    """The payload of a batch with each message that there is."""
    forms = {} if form is None else {"form": form}
    events = RouterEvents(2, rank=1, clock=lambda: 12.5, **forms)  # type: ignore[arg-type]  # only a form
    one, two, three = (bytes(8) + bytes([255 - number]) * 8 for number in range(3))
    events.describe([one, two], [5, 6, 7, 8])
    events.describe([three], [9, 10], parent=two, lora_name="chat")
    events.stored([one, two, three], "CPU")
    events.stored([one], "DISK")
    events.stored([one], "EXTERNAL")
    events.removed([two], "CPU")
    events.removed([one], "EXTERNAL")
    events.cleared()
    batch = events.take()
    assert batch is not None
    return batch.payload


def in_array(fields: list[Any]) -> list[Any]:
    """Of an event as an array: in maps a field that has its default is left out, in arrays it is sent, too."""
    while fields[-1] is None:
        fields = fields[:-1]
    return fields


@pytest.mark.parametrize("release", ["0.33", "0.23", "installed"])
def test_vllm_reads_a_batch_and_would_send_the_same(release: str) -> None:
    kind = batches_of_installed_vllm() if release == "installed" else batches_of(release)
    packed = msgspec.msgpack.encode(messages("array" if release == "0.23" else None))
    read = msgspec.msgpack.decode(packed, type=kind)
    ours, theirs = (msgspec.msgpack.decode(each) for each in (packed, msgspec.msgpack.encode(read)))
    if release == "0.23":
        ours[1], theirs[1] = ([in_array(event) for event in batch[1]] for batch in (ours, theirs))
    assert ours == theirs
    assert (read.ts, read.data_parallel_rank) == (12.5, 1)
    stored = [event for event in read.events if type(event).__name__ == "BlockStored"]
    assert [event.token_ids for event in stored] == [[5, 6, 7, 8], [9, 10], [5, 6], [5, 6]]
    assert [event.lora_name for event in stored] == [None, "chat", None, None]
    assert stored[1].parent_block_hash == stored[0].block_hashes[1]
    if release != "0.23":
        assert [event.locality for event in stored] == ["LOCAL", "LOCAL", "LOCAL", None]
        assert [event.ownership for event in stored] == [None] * 4, "that is for tiers of vLLM's"


@pytest.mark.parametrize("release", ["0.33", "installed"])
def test_vllm_refuses_events_of_releases_before_maps(release: str) -> None:
    kind = batches_of_installed_vllm() if release == "installed" else batches_of(release)
    with pytest.raises(msgspec.ValidationError):
        msgspec.msgpack.decode(msgspec.msgpack.encode(messages("array")), type=kind)
