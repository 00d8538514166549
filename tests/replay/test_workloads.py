"""Synthetic traffic: seeded, of the shape that its summary names, and served by each policy."""

from __future__ import annotations

import json
from collections.abc import Iterable
from itertools import pairwise

import pytest
from replay_oracles import Oracle
from seeds import rest_long

from kvoffload.cache.policies import DEFAULT_POLICY, POLICIES
from kvoffload.commands import main
from kvoffload.replay.hits import hits_of_policy, optimum
from kvoffload.replay.trace import KEY_BYTES, Request, Trace
from kvoffload.replay.workloads import WORKLOADS, make_workload

EACH = pytest.mark.parametrize("name", WORKLOADS)


def shared(one: Request, other: Request) -> int:
    """Leading keys that two requests have in common."""
    count = 0
    while count < min(len(one), len(other)) and one[count] == other[count]:
        count += 1
    return count


@EACH
def test_a_workload_follows_from_its_seed(name: str, seed: int) -> None:
    traffic = make_workload(name, 150, seed)
    assert len(traffic) == 150
    assert traffic == make_workload(name, 150, seed)
    assert traffic[:100] == make_workload(name, 100, seed) or name == "change"  # which happens half way
    assert traffic != make_workload(name, 150, seed + 1)


@EACH
def test_a_key_is_always_preceded_by_the_same_keys(name: str, seed: int) -> None:
    before: dict[bytes, bytes] = {}
    for request in make_workload(name, 400, seed):
        assert len(set(request)) == len(request) > 0
        assert {len(key) for key in request} == {KEY_BYTES}
        for key, previous in zip(request, (b"", *request), strict=False):
            assert before.setdefault(key, previous) == previous


def test_an_unknown_workload_is_refused() -> None:
    with pytest.raises(ValueError, match="unknown workload 'talk'; known: chat, system-prompts"):
        make_workload("talk")


def test_no_requests_are_legal() -> None:
    assert all(make_workload(name, 0) == [] for name in WORKLOADS)


# shapes ---------------------------------------------------------------------------------------------------------------


def uses(requests: list[Request]) -> dict[bytes, int]:
    counts: dict[bytes, int] = {}
    for request in requests:
        for key in request:
            counts[key] = counts.get(key, 0) + 1
    return counts


def test_chat_continues_conversations_that_have_had_more_turns(seed: int) -> None:
    requests = make_workload("chat", 4000, seed)
    turns: list[int] = []  # of each request, how many its conversation has had
    last: dict[bytes, int] = {}  # the turn that a prompt's last key ended
    for request in requests:
        before = [last.pop(key) for key in request[1:] if key in last]
        assert len(before) <= 1, "the whole history, and some more"
        turns.append(sum(before) + 1)
        last[request[-1]] = turns[-1]
    assert len({request[0] for request in requests}) == 1, "the system prompt"
    first, second, third, fourth = (turns.count(turn) for turn in (1, 2, 3, 4))
    assert 0.5 < first / len(requests) < 0.8
    assert second / first < third / second < fourth / third, "0.25, 0.4, 0.5, but for turns after the end"


def test_system_prompts_are_shared_and_questions_are_not(seed: int) -> None:
    requests = make_workload("system-prompts", 2000, seed)
    counts = uses(requests)
    prompts = {request[0]: counts[request[0]] for request in requests}
    assert len(prompts) == 40
    assert max(prompts.values()) > 8 * min(prompts.values())
    for request in requests:
        prompt = sum(counts[key] == prompts[request[0]] for key in request)
        assert 4 <= prompt <= 39
        assert prompts[request[0]] == 1 or 1 <= len(request) - prompt <= 19


def test_documents_follow_common_instructions(seed: int) -> None:
    requests = make_workload("documents", 3000, seed)
    counts = uses(requests)
    assert all(counts[key] == 3000 for key in requests[0][:10])
    assert all(request[:10] == requests[0][:10] for request in requests)
    assert all(10 + 5 + 1 <= len(request) <= 10 + 60 + 5 for request in requests)
    documents = {request[10]: counts[request[10]] for request in requests}
    assert 700 < len(documents) <= 2000
    assert max(documents.values()) > 50
    assert all(counts[request[-1]] == 1 for request in requests)  # the question


def test_agents_send_their_whole_history(seed: int) -> None:
    requests = make_workload("agents", 3000, seed)
    latest: dict[bytes, Request] = {}  # by the first block after the instructions
    turns: dict[bytes, int] = {}
    live: dict[bytes, tuple[int, int]] = {}
    for number, request in enumerate(requests):
        session = request[10]
        assert request[:10] == requests[0][:10]
        if session in latest:
            assert shared(latest[session], request) == len(latest[session])
            assert 1 <= len(request) - len(latest[session]) <= 6
        else:
            assert 10 + 8 + 1 <= len(request) <= 10 + 23 + 6
        latest[session] = request
        turns[session] = turns.get(session, 0) + 1
        live[session] = (live.get(session, (number, 0))[0], number)
    assert max(turns.values()) <= 120
    assert len(turns) > 40
    at_once = max(sum(first <= number <= last for first, last in live.values()) for number in range(0, 3000, 50))
    assert 30 < at_once <= 40


def test_evaluation_repeats_its_prompts_in_order(seed: int) -> None:
    requests = make_workload("evaluation", 250, seed)
    assert len(set(requests)) == 100
    assert requests[100:200] == requests[:100]
    assert requests[200:] == requests[:50]
    assert len(uses(requests)) == sum(map(len, requests[:100]))
    assert all(20 <= len(request) <= 60 for request in requests)


def test_without_reuse_nothing_comes_twice(seed: int) -> None:
    requests = make_workload("no-reuse", 500, seed)
    assert set(uses(requests).values()) == {1}
    assert {len(request) for request in requests} <= set(range(1, 60))


def test_one_off_prompts_are_seldom_asked_again(seed: int) -> None:
    requests = make_workload("one-off", 3000, seed)
    counts = uses(requests)
    known = [request for request in requests if counts[request[0]] > 1]
    assert 90 < len(known) < 210
    assert len({request[0] for request in known}) <= 50
    assert all(10 <= len(request) <= 50 for request in requests if counts[request[0]] == 1 and len(request) <= 50)
    assert all(counts[request[-1]] == 1 for request in requests)


def test_the_kind_changes_half_way(seed: int) -> None:
    requests = make_workload("change", 301, seed)
    assert requests[:150] == make_workload("documents", 150, seed)
    first, second = requests[:150], requests[150:]
    assert not set(uses(first)) & set(uses(second))
    assert len({request[10] for request in second}) <= 45
    assert any(shared(one, other) > 18 for one, other in pairwise(sorted(second)))


# what policies make of them -------------------------------------------------------------------------------------------


def hits_of(requests: list[Request], slots: int, policies: Iterable[str]) -> dict[str, int]:
    return {each: hits_of_policy(Trace(requests), slots, each, lambda *_: None).blocks_hit for each in policies}


# At once: turns of conversations, prompts that policies differ on most, and a change (from documents to agents). The
# others take longer and are of these shapes or, as no reuse, of none; evaluation has a test of its own below.
SERVED = rest_long(["chat", *(name for name in WORKLOADS if name != "chat")], 1)


@pytest.mark.parametrize("name", SERVED)
@pytest.mark.parametrize("slots", rest_long([256, 1024], 1))
def test_the_default_is_never_much_worse_than_lru_and_nothing_beats_the_optimum(name: str, slots: int) -> None:
    requests = make_workload(name, 1000)
    hits = hits_of(requests, slots, POLICIES)
    keys = [[int.from_bytes(key, "big") for key in request] for request in requests]
    assert hits["lru"] == Oracle(slots).serve_all(keys).hits
    few = 0.002 * sum(map(len, requests))  # of one-off prompts hardly any is found by any policy
    assert hits[DEFAULT_POLICY] >= 0.97 * hits["lru"] - few, hits
    assert max(hits.values()) <= optimum(requests, slots).blocks_hit, hits


def test_the_default_finds_what_lru_does_not_where_prompts_come_round(seed: int) -> None:
    requests = make_workload("evaluation", 2000, seed)
    hits = hits_of(requests, 1024, ("lru", DEFAULT_POLICY))
    assert hits["lru"] == 0
    assert hits[DEFAULT_POLICY] > 0.1 * sum(map(len, requests))


def test_in_chat_the_default_policy_has_more_hits_than_lru(seed: int) -> None:
    requests = make_workload("chat", 4000, seed)
    hits = hits_of(requests, 2048, ("lru", DEFAULT_POLICY))
    assert hits[DEFAULT_POLICY] > 1.15 * hits["lru"]


def test_replay_serves_a_workload(capsys: pytest.CaptureFixture[str]) -> None:
    options = ("--workload", "documents", "--requests", "60", "--seed", "3", "--slots", "200", "--policy", "lru")
    assert main(["replay", *options, "--metadata-only", "--json"]) == 0
    fields = json.loads(capsys.readouterr().out)
    requests = make_workload("documents", 60, 3)
    assert (fields["workload"], fields["trace"], fields["seed"]) == ("documents", None, 3)
    assert (fields["requests"], fields["blocks_requested"]) == (60, sum(map(len, requests)))
    assert fields["records"][0]["blocks_hit"] == Oracle(200).serve_all(requests).hits
