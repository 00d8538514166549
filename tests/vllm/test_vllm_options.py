"""kv_connector_extra_config, the spec made from it, and the releases of vLLM."""

from __future__ import annotations

import subprocess
import sys
from types import SimpleNamespace
from typing import Any

import pytest
from vllm_parts import PAGE, Rig

import kvoffload
from kvoffload import CapabilityError
from kvoffload.vllm import KVOffloadSpec, Options
from kvoffload.vllm.identity import making_connector
from kvoffload.vllm.releases import TESTED, check_release

BYTES = {"cpu_bytes_to_use": 1 << 20}


def test_options_have_defaults() -> None:
    options = Options.read({**BYTES, "spec_name": "KVOffloadSpec", "blocks_per_chunk": 4})
    assert options == Options(1 << 20)
    assert options.kvoffload_policy == "prefix"


def test_options_are_read() -> None:
    given: dict[str, Any] = {
        "store_threshold": 2, "max_tracker_size": 10, "kvoffload_policy": "lru", "kvoffload_prefer": "latency",
        "kvoffload_staging_bytes": 0, "kvoffload_max_in_flight": 7, "kvoffload_most_queued_bytes": 1 << 30,
        "kvoffload_tier_write": "back", "kvoffload_tier_identity": "x", "kvoffload_promotion_seconds": 2.5,
    }  # fmt: skip
    options = Options.read({**BYTES, **given})
    assert {name: getattr(options, name) for name in given} == given


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"kvoffload_polcy": "lru"}, "no option kvoffload_polcy .got 'lru'.; did you mean kvoffload_policy"),
        ({"kvoffload_": 1}, "no option kvoffload_ "),
        ({"kvoffload_tiers": "disk"}, "kvoffload_tiers must be a list"),
        ({"kvoffload_tiers": ["disk"]}, "kvoffload_tiers.0. must be an object with a .kind.*, got 'disk'"),
        ({"kvoffload_tiers": [{"path": "x"}]}, "kvoffload_tiers.0. must be an object"),
        ({"kvoffload_tier_write": "often"}, "kvoffload_tier_write must be one of"),
        ({"kvoffload_tier_identity": 7}, "kvoffload_tier_identity must be a string"),
        ({"kvoffload_promotion_seconds": 0}, "kvoffload_promotion_seconds must be a number above 0, got 0"),
        ({"kvoffload_prefill_tokens_per_second": True}, "must be a number above 0, got True"),
        ({"kvoffload_policy": "fifo"}, "kvoffload_policy must be one of .*lru.*, got 'fifo'"),
        ({"kvoffload_policy": 3}, "kvoffload_policy must be one of .*, got 3"),
        ({"kvoffload_prefer": "speed"}, "kvoffload_prefer must be one of overlap, latency, got 'speed'"),
        ({"kvoffload_staging_bytes": -1}, "kvoffload_staging_bytes must be an integer of at least 0, got -1"),
        ({"kvoffload_max_in_flight": "9"}, "kvoffload_max_in_flight must be an integer of at least 1, got '9'"),
        ({"kvoffload_most_queued_bytes": 0}, "kvoffload_most_queued_bytes must be .* at least 1, got 0"),
        ({"store_threshold": True}, "store_threshold must be an integer of at least 0, got True"),
        ({"max_tracker_size": 0}, "max_tracker_size must be an integer of at least 1, got 0"),
        ({"cpu_bytes_to_use": 1.5}, "cpu_bytes_to_use must be an integer of at least 1, got 1.5"),
    ],
)
def test_an_option_that_is_wrong_is_named(given: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        Options.read({**BYTES, **given})


def test_tiers_are_read() -> None:
    [disk, memory] = Options.read(
        {**BYTES, "kvoffload_tiers": [{"kind": "disk", "path": "/x"}, {"kind": "memory", "name": "mine"}]}
    ).kvoffload_tiers
    assert (disk.kind, disk.arguments, memory.arguments) == ("disk", {"path": "/x"}, {"name": "mine"})


def test_the_host_memory_must_be_named() -> None:
    with pytest.raises(ValueError, match="cpu_bytes_to_use must be specified in kv_connector_extra_config"):
        Options.read({})


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"eviction_policy": "arc"}, "eviction_policy='arc' has no effect.*kvoffload_policy"),
        ({"canonical_layout": True}, "canonical_layout=True has no effect"),
        ({"secondary_tiers": [{}]}, "secondary_tiers=.* has no effect"),
        ({"cache_policy_module_path": "a.b"}, "cache_policy_module_path='a.b' has no effect"),
    ],
)
def test_what_is_not_supported_is_refused(given: dict[str, Any], words: str) -> None:
    with pytest.raises(kvoffload.CapabilityError, match=words):
        Options.read({**BYTES, **given})
    Options.read({**BYTES, **({} if "kvoffload_tiers" in given else dict.fromkeys(given, False))})


@pytest.mark.parametrize(
    "given",
    [
        {"kvoffload_policy": "lru"},
        {"kvoffload_tiers": [{"kind": "memory"}]},
        {"self_describing_kv_events": True},
        BYTES,
    ],
    ids=str,
)
def test_with_a_pool_what_its_owner_decides_is_refused(given: dict[str, Any]) -> None:
    [name] = given
    with pytest.raises(kvoffload.CapabilityError, match=f"{name}=.* has no effect with kvoffload_pool"):
        Options.read({"kvoffload_pool": "/run/pool", **given})


def test_the_path_of_a_pool_is_a_text() -> None:
    assert Options.read({"kvoffload_pool": "/run/pool"}).kvoffload_pool == "/run/pool"
    for path in ("", 7):
        with pytest.raises(ValueError, match="kvoffload_pool must be a string that is not empty"):
            Options.read({"kvoffload_pool": path})


# the spec -------------------------------------------------------------------------------------------------------------


def config(chunk_bytes: int = 2 * PAGE, workers: int = 1, blocks_per_chunk: int = 1, **extra: Any) -> Any:
    group = SimpleNamespace(group_id=0, tokens_per_block=4, sliding_window_size_in_chunks=None)
    return SimpleNamespace(
        extra_config={"cpu_bytes_to_use": 10 * 4096, **extra},
        worker_kv_bytes_per_block=chunk_bytes,
        cache=SimpleNamespace(blocks_per_chunk=blocks_per_chunk, tokens_per_hash=4),
        parallel=SimpleNamespace(world_size=workers),
        model=SimpleNamespace(max_model_len=100),
        groups=(group,),
        enable_kv_cache_events=True,
    )


class Spec(KVOffloadSpec):
    rig: Rig

    def open_device(self, kv_caches: Any) -> kvoffload.Device:
        return self.rig.device

    def current_stream(self, kv_caches: Any) -> Any:
        return lambda: self.rig.stream


def test_host_memory_is_divided_among_workers() -> None:
    assert KVOffloadSpec(config()).num_chunks == 10
    assert KVOffloadSpec(config(workers=2)).num_chunks == 5
    assert KVOffloadSpec(config(chunk_bytes=5000)).num_chunks == 5  # slots are rounded up to 4096 bytes
    assert KVOffloadSpec(config(chunk_bytes=5000, blocks_per_chunk=2)).num_chunks == 3
    assert KVOffloadSpec(config(chunk_bytes=1 << 20)).num_chunks == 0


def test_a_spec_makes_one_manager_and_one_worker() -> None:
    spec = Spec(config(kvoffload_policy="lru", kvoffload_staging_bytes=0, kvoffload_max_in_flight=3))
    manager = spec.get_manager()
    assert spec.get_manager() is manager
    assert manager.index.capacity == 10
    assert manager.config_info()[0]["kvoffload_policy"] == "lru"
    assert set(manager.config_info()[0]) == set(spec.config_info_keys({}))
    with Rig() as spec.rig:
        worker = spec.get_worker(spec.rig.caches)
        assert spec.get_worker(spec.rig.caches) is worker
        assert (len(worker.engine.slots), worker.engine.max_in_flight, worker.engine.staging_bytes) == (10, 3, 0)
        worker.shutdown()


def test_tensors_larger_than_the_configuration_says_are_refused() -> None:
    spec = Spec(config(kvoffload_staging_bytes=0))
    with Rig(blocks_per_chunk=1) as spec.rig:
        spec.blocks_per_chunk = 8
        for _ in range(2):  # the second call gives no worker that was shut down
            with pytest.raises(kvoffload.CapacityError, match=r"a chunk of this worker takes 8192 bytes.*4096"):
                spec.get_worker(spec.rig.caches)
        spec.blocks_per_chunk = 1
        worker = spec.get_worker(spec.rig.caches)
        assert not worker.engine.closed
        worker.shutdown()


def test_every_metric_that_is_reported_is_declared() -> None:
    for threshold in (1, 2):
        manager = KVOffloadSpec(config(store_threshold=threshold)).get_manager()
        names = {name.removesuffix("_count").removesuffix("_sum") for name in manager.get_stats().reduce()}
        declared = set(KVOffloadSpec.build_metric_definitions({"store_threshold": threshold}))
        assert names <= declared
        assert ("vllm:kv_offload_stores_skipped" in declared) == (threshold == 2)


def test_the_size_that_is_reported_is_of_all_workers() -> None:
    [info] = KVOffloadSpec(config(workers=2)).get_manager().config_info()
    assert (info["cpu_num_chunks"], info["cpu_kv_cache_size_bytes"]) == (5, 2 * 5 * 4096)


# releases -------------------------------------------------------------------------------------------------------------


def test_the_release_is_checked(monkeypatch: pytest.MonkeyPatch) -> None:
    import vllm

    for build in ("+cu130", ".post1", ".post12+cu130"):
        monkeypatch.setattr(vllm, "__version__", f"{TESTED[-1]}{build}", raising=False)
        check_release({})
    monkeypatch.setattr(vllm, "__version__", f"{TESTED[-1]}.post1.dev3+g1a2b3c4")
    with pytest.raises(kvoffload.CapabilityError, match=r"this is 0\.33\.0\.post1\.dev3"):
        check_release({})
    monkeypatch.setattr(vllm, "__version__", "0.12.3")
    with pytest.raises(kvoffload.CapabilityError, match=r"0\.33\.0, and this is 0.12.3.*KVOFFLOAD_VLLM_UNTESTED"):
        check_release({})
    check_release({"KVOFFLOAD_VLLM_UNTESTED": "1"})


def test_without_vllm_the_error_says_what_to_install() -> None:
    program = "import sys; sys.modules['vllm'] = None\nimport kvoffload\nimport kvoffload.vllm"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert "CapabilityError: kvoffload.vllm needs vLLM" in done.stderr
    assert "pip install vllm==" in done.stderr


def test_importing_kvoffload_loads_neither_vllm_nor_torch() -> None:
    program = (
        "import sys, kvoffload; print([name for name in ('vllm', 'torch', 'kvoffload.vllm') if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_a_codec_makes_chunks_smaller_and_needs_the_connector() -> None:
    of_vllm = SimpleNamespace(model_config=SimpleNamespace(dtype="torch.bfloat16"))
    given = config(chunk_bytes=64 << 10, kvoffload_codec="bf16-12")
    given.extra_config["cpu_bytes_to_use"] = 26 << 14
    given.model.dtype = "auto"
    with pytest.raises(CapabilityError, match='kvoffload_codec needs kv_connector="KVOffloadConnector"'):
        KVOffloadSpec(given)
    layer = SimpleNamespace(dtype="torch.bfloat16", kv_quant_mode=0)
    caches: Any = SimpleNamespace(kv_cache_groups=[SimpleNamespace(kv_cache_spec=layer)])
    with making_connector(of_vllm, caches):
        assert KVOffloadSpec(given).num_chunks == 8  # of 13 pages; raw ones have 16
        layer.dtype = "torch.uint8"
        with pytest.raises(CapabilityError, match="for a KV cache of bfloat16, and this one is of uint8"):
            KVOffloadSpec(given)
    raw = config(chunk_bytes=64 << 10)
    raw.extra_config["cpu_bytes_to_use"] = 26 << 14
    assert KVOffloadSpec(raw).num_chunks == 6
