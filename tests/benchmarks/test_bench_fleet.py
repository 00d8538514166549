"""`bench fleet`: hosts over one shared store count what dictionaries count; routing; bytes over the network."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from benching import Run, running
from documents import snippets
from fleet_oracle import FleetOracle
from replay_oracles import find_real_trace, generated_trace, keys_of, tree_trace, write_lines, write_trace

from kvoffload.commands import main
from kvoffload.internal.models import MODELS
from kvoffload.replay.trace import Request, read_timed_trace
from kvoffload.replay.workloads import WORKLOADS, make_workload
from kvoffload.terminal.console import Output
from kvoffload_bench.fleet import (
    Delay,
    Fleet,
    FleetResult,
    Flow,
    Hosts,
    PrefixRouting,
    RandomRouting,
    SharedStore,
    delay_of,
    drive,
    load_of,
    survey,
)

SMALL = Fleet(40, 0, 200, "lru", "through", "random", 0)
BLOCK_BYTES = 512 * MODELS["llama-3.1-8b"].bytes_per_block // 16

run = pytest.fixture(running("bench", "fleet"))


def replayed(requests: list[Request], fleet: Fleet, count: int) -> FleetResult:
    return drive(requests, fleet, count, lambda *_: None)


# counts ---------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("write", ["through", "second"])
@pytest.mark.parametrize("disk_slots", [0, 70])
@pytest.mark.parametrize(("hosts", "store_slots"), [(1, 100), (3, 60), (3, 100_000), (8, 150)])
def test_every_request_finds_what_dictionaries_find(
    seed: int, hosts: int, store_slots: int, disk_slots: int, write: str
) -> None:
    fleet = SMALL._replace(disk_slots=disk_slots, store_slots=store_slots, write=write)
    real, oracle = Hosts(fleet, hosts), FleetOracle(hosts, fleet.slots, disk_slots, store_slots, write)
    random = np.random.default_rng(seed)
    for trace in range(3):
        for ids in generated_trace(seed + trace):
            host, keys = int(random.integers(hosts)), keys_of(ids)
            served, expected = real.indexes[host].serve(keys), oracle.serve(host, keys)
            assert (served.hits, served.written) == (expected.hits, expected.written), (seed, trace, ids)
    assert real.store is not None
    assert list(real.store.keys) == list(oracle.store)


@pytest.mark.parametrize("policy", ["lru", "prefix", "s3fifo"])
@pytest.mark.parametrize("write", ["through", "admitted", "second", "none"])
@pytest.mark.parametrize("routing", ["random", "prefix"])
def test_counts_add_up(seed: int, routing: str, write: str, policy: str) -> None:
    requests = [keys_of(ids) for ids in generated_trace(seed, 300)]
    fleet = Fleet(60, 90, 250, policy, write, routing, seed)
    found = replayed(requests, fleet, 4)
    flow = found.flow
    assert len(flow.hosts) == len(flow.read) == len(flow.written) == len(requests)
    assert set(flow.hosts) == set(range(4))
    assert found.hits == found.host_hits + found.disk_hits + found.store_hits
    assert found.hit_rate == found.hits / sum(map(len, requests))
    assert (found.store_hits, found.blocks_written) == (sum(flow.read), sum(flow.written))
    assert all(
        reads + writes <= len(set(keys)) for reads, writes, keys in zip(flow.read, flow.written, requests, strict=True)
    )
    assert 0 <= found.blocks_written - found.blocks_evicted <= fleet.store_slots
    assert (found.blocks_written == 0) == (write == "none")
    assert found == replayed(requests, fleet, 4)._replace(seconds=found.seconds), "the same seed, the same counts"


@pytest.mark.parametrize("routing", ["random", "prefix"])
@pytest.mark.parametrize("hosts", [1, 3, 8])
def test_a_store_without_bound_misses_nothing_but_what_is_new(seed: int, hosts: int, routing: str) -> None:
    requests = tree_trace(np.random.default_rng(seed), 400, depth=6, branches=3)
    found = replayed(requests, SMALL._replace(store_slots=10**6, routing=routing), hosts)
    new = len({key for request in requests for key in request})
    assert found.hits == sum(map(len, requests)) - new
    assert found.blocks_written == new, "every record is written once"
    assert found.blocks_evicted == 0


def test_hosts_without_a_store_share_nothing(seed: int) -> None:
    requests = [keys_of(ids) for ids in generated_trace(seed)]
    found = replayed(requests, SMALL._replace(store_slots=0), 3)
    assert (found.store_hits, found.blocks_written) == (0, 0)
    expected = 0
    for host in range(3):
        mine = [keys for keys, chosen in zip(requests, found.flow.hosts, strict=True) if chosen == host]
        expected += replayed(mine, SMALL._replace(store_slots=0), 1).hits
    assert found.hits == expected


def test_rates_of_one_host_are_of_the_sum_of_pools_and_disks(seed: int) -> None:
    requests = [keys_of(ids) for ids in generated_trace(seed, 300)]
    fleet = SMALL._replace(slots=12, disk_slots=9, store_slots=30)
    one, three = survey(requests, fleet, [1, 3], Output(as_json=True))
    for found, count in ((one, 1), (three, 3)):
        same = fleet._replace(slots=12 * count, disk_slots=9 * count)
        assert found.one_host_hit_rate == replayed(requests, same, 1).hit_rate
        assert found.without_store_hit_rate == replayed(requests, same._replace(store_slots=0), 1).hit_rate
    assert one.hit_rate == one.one_host_hit_rate
    assert one.without_store_hit_rate < one.hit_rate < three.one_host_hit_rate


@pytest.mark.parametrize("name", list(WORKLOADS))
def test_three_hosts_at_random_find_nine_tenths_of_what_one_with_their_memory_finds(name: str) -> None:
    requests = make_workload(name, 600)
    fleet = Fleet(256, 0, 1 << 20, "prefix", "through", "random", 0)
    (found,) = survey(requests, fleet, [3], Output(as_json=True))
    assert found.hit_rate >= 0.9 * found.one_host_hit_rate
    assert found.one_host_hit_rate >= found.without_store_hit_rate


@pytest.mark.parametrize("routing", ["random", "prefix"])
def test_three_hosts_replay_the_real_trace(routing: str) -> None:
    fleet = Fleet(2048, 0, 65_536, "prefix", "through", routing, 0)
    (found,) = survey(read_timed_trace(find_real_trace()).requests, fleet, [3], Output(as_json=True))
    assert found.hit_rate >= 0.9 * found.one_host_hit_rate
    assert found.hit_rate >= 0.9 * found.without_store_hit_rate


def test_the_store_evicts_what_was_written_or_read_longest_ago() -> None:
    store = SharedStore(3)
    a, b, c, d = keys_of([1, 2, 3, 4])
    assert store.write([a, b]) == [a, b]
    assert store.write([a, c]) == [c], "a is there, and not written again"
    store.read([a])
    assert store.write([d]) == [d]
    assert list(store.keys) == [c, a, d]


# routing --------------------------------------------------------------------------------------------------------------


def test_random_routing_is_even_and_seeded(seed: int) -> None:
    routing, same = RandomRouting(4, seed), RandomRouting(4, seed)
    chosen = [routing.choose(()) for _ in range(2000)]
    assert chosen == [same.choose(()) for _ in range(2000)]
    assert all(400 < chosen.count(host) < 600 for host in range(4))


def test_by_prefix_a_request_goes_where_its_beginning_is() -> None:
    held = {0: 2, 1: 5, 2: 5}
    routing = PrefixRouting(3, lambda host, _: held[host])
    keys = keys_of(range(6))
    assert [routing.choose(keys) for _ in range(2)] == [1, 2], "of two that hold as much, the less loaded one"
    held[0] = 6
    assert [routing.choose(keys) for _ in range(3)] == [0, 0, 0], "what it holds is no load"


def test_by_prefix_a_loaded_host_gets_no_request() -> None:
    routing = PrefixRouting(4, lambda host, _: 1 if host == 0 else 0)  # what all requests begin with
    chosen = [routing.choose(keys_of(range(10))) for _ in range(400)]
    assert chosen.count(0) < 1.25 * 100 / 0.9 + 5, "it holds a tenth of each request"
    assert min(map(chosen.count, range(4))) > 80


def test_by_prefix_turns_of_a_session_stay_on_one_host() -> None:
    requests = make_workload("agents", 600)
    by_prefix, at_random = (
        replayed(requests, SMALL._replace(slots=512, store_slots=10**6, routing=routing), 4)
        for routing in ("prefix", "random")
    )
    assert by_prefix.hits == at_random.hits
    assert by_prefix.host_hits > 1.3 * at_random.host_hits


def test_the_router_knows_pools_and_disks() -> None:
    hosts = Hosts(SMALL._replace(slots=4, disk_slots=8), 2)
    keys = keys_of([1, 2, 3, 4])
    hosts.indexes[0].serve(keys)
    hosts.indexes[0].serve(keys_of([5, 6, 7]))
    assert [hosts.leading(host, keys) for host in range(2)] == [4, 0], "the store of all is not a host's"
    assert hosts.leading(0, keys_of([1, 2, 9, 4])) == 2


# the network ----------------------------------------------------------------------------------------------------------


def test_bytes_and_rates_of_the_network() -> None:
    flow = Flow([0, 1, 0, 1], [0, 2, 3, 0], [4, 0, 0, 1])
    load = load_of(flow, [0.0, 5.0, 12.0, 40.0], 10**9, tokens=2000)
    assert (load.bytes_read, load.bytes_written) == (5 * 10**9, 5 * 10**9)
    assert (load.bytes_per_request, load.bytes_per_1000_tokens) == (2.5e9, 5e9)
    assert (load.mean_gb_per_s, load.peak_gb_per_s) == (10 / 40, 6 / 10)
    assert (load.host_mean_gb_per_s, load.host_peak_gb_per_s) == (7 / 40, 4 / 10)
    assert load_of(flow, None, 10**9, tokens=2000)[4:] == (None,) * 4


def test_reads_wait_for_each_other() -> None:
    flow = Flow([0, 1, 0, 1], [4, 2, 0, 1], [0, 9, 9, 0])
    assert delay_of(flow, [0.0, 1.0, 2.0, 10.0], 10**9, 2.0) == Delay(3, (2.0 + 2.0 + 0.5) / 3, 2.0)
    assert delay_of(flow, None, 10**9, 2.0) == Delay(3, (2.0 + 1.0 + 0.5) / 3, 2.0)
    assert delay_of(Flow([0], [0], [1]), [0.0], 1, 1.0) == Delay(0, 0.0, 0.0)


# what is printed ------------------------------------------------------------------------------------------------------


def test_json_has_a_record_for_each_number_of_hosts(tmp_path: Path, run: Run, seed: int) -> None:
    ids = generated_trace(seed)
    path = write_trace(tmp_path / "trace.jsonl", ids)
    options = ("--slots", 40, "--disk-slots", 60, "--policy", "lru", "--seed", 5)
    code, fields, error = run(path, "--hosts", "3,1,3", "--store-slots", 200, *options, "--write", "second")
    assert (code, error) == (0, "")
    requests = list(map(keys_of, ids))
    expected = survey(requests, Fleet(40, 60, 200, "lru", "second", "random", 5), [3, 1], Output(as_json=True))
    asked = sum(map(len, requests))
    assert (fields["benchmark"], fields["blocks_requested"], fields["seconds_of_trace"]) == ("fleet", asked, None)
    assert fields["compulsory_misses"] == len({key for request in requests for key in request})
    assert (fields["slots"], fields["disk_slots"], fields["store_slots"], fields["routing"]) == (40, 60, 200, "random")
    for row, result in zip(fields["records"], expected, strict=True):
        assert row["blocks_hit"] + row["misses"] == asked
        assert row["misses"] >= fields["compulsory_misses"]
        assert (row["network"], row["delay"]) == (None, None)
        counted = result._replace(seconds=row["seconds"])._asdict()
        assert {name: row[name] for name in counted if name != "flow"} == {
            name: counted[name] for name in counted if name != "flow"
        }


def test_bytes_of_the_network_are_the_models(tmp_path: Path, run: Run) -> None:
    lines = [{"timestamp": 1000 * second, "hash_ids": ids} for second, ids in ((0, [1, 2]), (5, [3, 4]), (20, [1, 2]))]
    path = write_lines(tmp_path / "trace.jsonl", lines)
    options = ("--hosts", 1, "--slots", 2, "--store-slots", 9, "--policy", "lru", "--model", "llama-3.1-8b")
    _, fields, _ = run(path, *options, "--store-gb-per-s", 2)
    (row,) = fields["records"]
    network, delay = row["network"], row["delay"]
    assert (network["bytes_read"], network["bytes_written"]) == (2 * BLOCK_BYTES, 4 * BLOCK_BYTES)
    assert network["bytes_per_1000_tokens"] == pytest.approx(1000 * 6 * BLOCK_BYTES / (6 * 512))
    assert network["mean_gb_per_s"] == pytest.approx(6 * BLOCK_BYTES / 20e9)
    assert network["peak_gb_per_s"] == network["host_peak_gb_per_s"] == pytest.approx(4 * BLOCK_BYTES / 10e9)
    assert delay == {
        "requests": 1,
        "mean_seconds": pytest.approx(2 * BLOCK_BYTES / 2e9),
        "most_seconds": pytest.approx(2 * BLOCK_BYTES / 2e9),
    }
    assert (fields["seconds_of_trace"], fields["store_gb_per_s"]) == (20.0, 2.0)


@pytest.mark.parametrize("routing", ["random", "prefix"])
def test_the_verdict_comes_first_and_text_has_80_columns(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, routing: str
) -> None:
    random = np.random.default_rng(0)
    lines = [{"timestamp": 100 * line, "hash_ids": random.integers(0, 999, 9).tolist()} for line in range(50)]
    path = write_lines(tmp_path / "trace.jsonl", lines)
    options = ("--slots", "1000000", "--disk-slots", "1000000", "--store-slots", "100000000", "--routing", routing)
    rates = ("--model", "llama-3.1-70b", "--tokens-per-hash", "100000", "--store-gb-per-s", "1")
    assert main(["bench", "fleet", str(path), "--hosts", "2,64", *options, *rates]) == 0
    text = capsys.readouterr().out
    assert text.startswith("bench fleet: 64 hosts over a store of 100,000,000 slots, routing ")
    assert max(map(len, text.splitlines())) <= 80
    assert "peak" in text
    assert "one after the other" in text


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--store-slots", "9"), "required: --hosts"),
        (("--hosts", "2"), "required: --store-slots"),
        (("--hosts", "2", "--store-slots", "9", "--policy", "all"), "argument --policy: invalid choice: 'all'"),
        (("--hosts", "2", "--store-slots", "9", "--slots", "8,9"), "argument --slots: must be an integer"),
        (("--hosts", "2", "--store-slots", "9", "--write", "random"), "argument --write: invalid choice: 'random'"),
        (("--hosts", "2", "--store-slots", "9", "--store-gb-per-s", "9"), "--store-gb-per-s needs --model"),
        (("--hosts", "2000", "--store-slots", "9"), "must be at most 1024"),
    ],
)
def test_options_that_do_not_go_together_are_refused(run: Run, options: tuple[str, ...], message: str) -> None:
    code, _, error = run("--workload", "agents", "--requests", "20", *options)
    assert code == 2
    assert message in error


def test_a_trace_or_a_workload_is_needed(run: Run) -> None:
    code, _, error = run("--hosts", "2", "--store-slots", "9")
    assert code == 2
    assert "bench fleet needs a TRACE, a file, or --workload, one of " in error


def test_the_example_of_its_guide_runs() -> None:
    [snippet] = [each for each in snippets() if each.name == "what a store brings"]
    exec(compile(snippet.code, snippet.document, "exec"), {"__name__": "__document__"})
