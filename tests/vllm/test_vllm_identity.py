"""What records in tiers below vLLM depend on: weights that were replaced under the same name are other weights."""

from __future__ import annotations

import json
import os
from enum import IntEnum
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import fake_vllm
import pytest
from tiering import SECONDS

fake_vllm.install()

import vllm.envs  # noqa: E402
from vllm.v1.kv_offload.base import LookupResult  # noqa: E402
from vllm_host import config, server, with_disk  # noqa: E402

import kvoffload  # noqa: E402
from kvoffload import CapabilityError, LayoutError  # noqa: E402
from kvoffload.pool import PoolOwner  # noqa: E402
from kvoffload.vllm.identity import Connector, identity_of, layout_digest  # noqa: E402


class QuantMode(IntEnum):
    """vLLM's KVQuantMode."""

    NONE = 0
    FP8_PER_TENSOR = 1
    INT8_PER_TOKEN_HEAD = 2


PLAIN = SimpleNamespace(dtype="torch.bfloat16", kv_quant_mode=QuantMode.NONE)
FP8 = SimpleNamespace(dtype="torch.uint8", kv_quant_mode=QuantMode.FP8_PER_TENSOR)
SPARSE_MLA = SimpleNamespace(**{**vars(FP8), "cache_dtype_str": "fp8_ds_mla"})
PLAIN_MLA = SimpleNamespace(**{**vars(PLAIN), "cache_dtype_str": "auto"})
INDEXER = SimpleNamespace(dtype="torch.uint8", kv_quant_mode=QuantMode.NONE, cache_dtype_str=None)
STATES = SimpleNamespace(dtypes=("torch.float32", "torch.bfloat16"))


def layers(*specs: Any) -> SimpleNamespace:
    """vLLM's UniformTypeKVCacheSpecs."""
    return SimpleNamespace(kv_cache_specs={f"layers.{number}": spec for number, spec in enumerate(specs)})


def identity(model: Any, *specs: Any, cache: Path | None = None, revision: str | None = None, **changes: Any) -> str:
    """Of a model by that name, a group for each of these specs, and with vLLM's configuration changed: of the model, of
    loading, the draft, the cache.
    """
    cache_dtype, draft = changes.pop("cache_dtype", "bfloat16"), changes.pop("draft", None)
    load = SimpleNamespace(
        load_format=changes.pop("load_format", "auto"),
        model_loader_extra_config=changes.pop("extra", {}),
        download_dir=str(cache),
    )

    def described(name: Any) -> SimpleNamespace:
        model = {"model": str(name), "revision": revision, "quantization": None, "dtype": "torch.bfloat16"}
        return SimpleNamespace(**{**model, **changes})

    config: Any = SimpleNamespace(
        model_config=described(model),
        load_config=load,
        speculative_config=draft and SimpleNamespace(method="eagle", draft_model_config=described(draft)),
    )
    offloading: Any = SimpleNamespace(model=SimpleNamespace(dtype=cache_dtype))
    groups = [SimpleNamespace(kv_cache_spec=spec) for spec in specs or (PLAIN,)]
    caches: Any = SimpleNamespace(kv_cache_groups=groups)
    return identity_of(Connector(config, caches), offloading)


def folder_of(parent: Path, name: str = "model") -> Path:
    folder = parent / name
    folder.mkdir()
    (folder / "config.json").write_text('{"rope_theta": 10000}')
    (folder / "README.md").write_text("a model")
    for part in ("model-1", "model-2"):
        (folder / f"{part}.safetensors").write_bytes(part.encode() * 100)
    return folder


def replace_in_place(file: Path) -> None:
    """Other bytes, as many, at another time; the clock may be too coarse to see that."""
    before = file.stat()
    file.write_bytes(bytes(before.st_size))
    os.utime(file, ns=(before.st_atime_ns, before.st_mtime_ns + 1))


def test_weights_replaced_in_place_have_another_identity(tmp_path: Path) -> None:
    folder = folder_of(tmp_path)
    before = identity(folder)
    (folder / "README.md").write_text("a model, described")
    assert identity(folder) == before == identity(folder)
    replace_in_place(folder / "model-2.safetensors")
    replaced = identity(folder)
    (folder / "config.json").write_text('{"rope_theta": 20000}')
    configured = identity(folder)
    (folder / "model-3.safetensors").touch()
    assert len({before, replaced, configured, identity(folder)}) == 4


def test_a_single_file_of_weights_replaced_in_place_has_another_identity(tmp_path: Path) -> None:
    file = tmp_path / "model.gguf"
    file.write_bytes(b"weights")
    before = identity(file)
    replace_in_place(file)
    assert identity(file) != before


def test_weights_of_the_draft_model_replaced_in_place_have_another_identity(tmp_path: Path) -> None:
    folder, draft = folder_of(tmp_path), folder_of(tmp_path, "draft")
    before = identity(folder, draft=draft)
    assert before != identity(folder)
    replace_in_place(draft / "model-1.safetensors")
    assert identity(folder, draft=draft) != before


CHANGES: dict[str, dict[str, Any]] = {
    "the cache's dtype, which its specs do not tell": {"cache_dtype": "fp8_e5m2"},
    "dtype": {"dtype": "torch.float16"},
    "quantisation": {"quantization": "fp8"},
    "overrides": {"hf_overrides": {"rope_theta": 20000}},
    "revision": {"revision": "v2"},
    "format": {"load_format": "dummy"},
    "where else weights are": {"extra": {"tensorizer_uri": "s3://bucket"}},
}


@pytest.mark.parametrize("change", CHANGES)
def test_what_else_bytes_depend_on(change: str, tmp_path: Path) -> None:
    folder = folder_of(tmp_path)
    assert identity(folder) != identity(folder, **CHANGES[change])


# The cache's dtype as vLLM's scheduler sees it under `mp`, and under `uni`, where vLLM has built the model by then.
REWRITTEN: dict[str, tuple[str, str, tuple[Any, ...]]] = {
    "sparse MLA": ("fp8", "fp8_ds_mla", (layers(SPARSE_MLA, INDEXER),)),
    "sparse MLA, unset": ("bfloat16", "fp8_ds_mla", (layers(SPARSE_MLA, INDEXER),)),
    "sparse MLA of another name": ("fp8_e4m3", "fp8_ds_mla", (SPARSE_MLA, FP8)),
    "a checkpoint's": ("bfloat16", "fp8", (FP8,)),
}


@pytest.mark.parametrize("case", REWRITTEN)
def test_a_dtype_that_is_rewritten_where_the_model_is_built_has_one_identity(case: str, tmp_path: Path) -> None:
    under_mp, under_uni, specs = REWRITTEN[case]
    folder = folder_of(tmp_path)
    assert identity(folder, *specs, cache_dtype=under_mp) == identity(folder, *specs, cache_dtype=under_uni)


def test_a_post_release_has_the_identity_of_its_release(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder, found = folder_of(tmp_path), []
    for version in ("0.33.0", "0.33.0+cu130", "0.33.0.post1", "0.33.1"):
        monkeypatch.setattr(vllm, "__version__", version, raising=False)
        found.append(identity(folder))
    assert found[0] == found[1] == found[2] != found[3]


def test_other_specs_have_another_identity(tmp_path: Path) -> None:
    folder = folder_of(tmp_path)
    int8 = SimpleNamespace(dtype="torch.int8", kv_quant_mode=QuantMode.INT8_PER_TOKEN_HEAD)
    caches = ((PLAIN,), (FP8,), (SPARSE_MLA,), (int8,), (layers(PLAIN_MLA, INDEXER),), (PLAIN, FP8), (STATES,))
    assert len({identity(folder, *specs) for specs in caches}) == len(caches)
    assert identity(folder, PLAIN, PLAIN_MLA) == identity(folder, PLAIN), "both hold the model's dtype"


def snapshot(cache: Path, commit: str, *, ref: str = "main") -> None:
    model = cache / "models--someone--model"
    (model / "snapshots" / commit).mkdir(parents=True)
    (model / "refs").mkdir(exist_ok=True)
    (model / "refs" / ref).write_text(commit)


def test_a_branch_of_a_hub_that_moves_has_another_identity(tmp_path: Path) -> None:
    snapshot(tmp_path, "aaaa")
    before = identity("someone/model", cache=tmp_path)
    assert json.loads(before)["weights"] == "commit aaaa"
    snapshot(tmp_path, "bbbb")
    assert json.loads(identity("someone/model", cache=tmp_path))["weights"] == "commit bbbb"
    assert json.loads(identity("someone/model", cache=tmp_path, revision="aaaa"))["weights"] == "commit aaaa"


def test_weights_that_cannot_be_told_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    snapshot(tmp_path, "aaaa")
    empty = tmp_path / "empty"
    empty.mkdir()
    (empty / "config.json").touch()
    unknown = {"someone/other": None, "someone/model": "v2", str(empty): None}
    for name, revision in unknown.items():
        with pytest.raises(CapabilityError, match=f"model='{name}'.*Set kvoffload_tier_identity"):
            identity(name, cache=tmp_path, revision=revision)
    with pytest.raises(CapabilityError, match="model='s3://bucket/model'"):
        identity(folder_of(tmp_path), cache=tmp_path, model_weights="s3://bucket/model")
    with pytest.raises(CapabilityError, match="model='someone/draft'"):
        identity("someone/model", cache=tmp_path, draft="someone/draft")
    monkeypatch.setattr(vllm.envs, "VLLM_USE_MODELSCOPE", True, raising=False)
    with pytest.raises(CapabilityError, match="model='someone/model'"):
        identity("someone/model", cache=tmp_path)


# the order of heads and tokens in memory, which vLLM chooses by its attention backend, or an environment variable


ORDERS = ("LBHNC", "LBNHC", "LHBNC", "BLHNC", "BLNHC", "BHLNC")  # vLLM 0.33's KVCacheLayout


def test_every_memory_layout_of_vllms_has_a_digest_of_its_own() -> None:
    digests = [layout_digest(config("engine", kv_cache_layout=order), ["a note"]) for order in ORDERS]
    assert len(set(digests)) == len(ORDERS)
    assert digests == [layout_digest(config("another", kv_cache_layout=order), ["a note"]) for order in ORDERS]


def test_a_disk_is_refused_to_an_engine_with_another_memory_layout(device: kvoffload.Device, tmp_path: Path) -> None:
    with server(device, f"{tmp_path} 1", kv_cache_layout="LBNHC", **with_disk(tmp_path)) as bench:
        bench.store([1, 2])
        assert bench.index.drain(SECONDS)
    with (
        pytest.raises(LayoutError, match=r"records\.0: the digest of the layout"),
        server(device, f"{tmp_path} 2", kv_cache_layout="LBHNC", **with_disk(tmp_path)),
    ):
        pass
    with server(device, f"{tmp_path} 3", kv_cache_layout="LBNHC", **with_disk(tmp_path)) as bench:
        bench.check([1, 2])


def test_a_pool_has_no_hits_for_an_engine_with_another_memory_layout(device: kvoffload.Device, tmp_path: Path) -> None:
    pool: dict[str, Any] = {"kvoffload_pool": str(tmp_path / "pool"), "kvoffload_tier_identity": "a model"}
    with (
        PoolOwner(tmp_path / "pool", nbytes=1 << 20, region_bytes=1 << 18),
        server(device, f"{tmp_path} 1", kv_cache_layout="LBNHC", **pool) as one,
        server(device, f"{tmp_path} 2", kv_cache_layout="LBHNC", **pool) as other,
        server(device, f"{tmp_path} 3", kv_cache_layout="LBNHC", **pool) as third,
    ):
        one.store([1, 2])
        context = other.context([1, 2])
        assert other.look_up([1, 2], context) == [LookupResult.MISS] * 2
        other.manager.on_request_finished(context)
        third.check([1, 2])
