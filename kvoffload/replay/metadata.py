"""`kvoffload replay --metadata-only`: which keys a cache would hold, by policy and capacity; no bytes, no device."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

from kvoffload.cache.index import CacheIndex
from kvoffload.cache.policies import DEFAULT_POLICY, make_policy
from kvoffload.replay.belady import belady_hits
from kvoffload.replay.saving import Rates
from kvoffload.replay.trace import Request
from kvoffload.terminal.console import Advance, Output

OPTIMUM = "belady"  # in the place of a policy's name


class PolicyResult(NamedTuple):
    """What a cache did with all the requests. Blocks are the cache's, one per key.

    Attributes:
        policy: name of the policy, or `OPTIMUM`, of which only the hits are known.
        slots: keys that the cache holds.
        hit_rate: hits of all blocks that were requested.
        requests_refused: requests of which nothing was stored, because too few keys could be evicted.
        seconds: host time of this machine for all requests.
        share_of_optimum: (hits - LRU's hits) / (optimum - LRU's hits); None if LRU was not replayed, or reaches the
            optimum.
        blocks_beyond_slots: blocks of requests longer than the cache, which uses their first ones alone; None of the
            optimum.
    """

    policy: str
    slots: int
    blocks_hit: int
    hit_rate: float
    blocks_stored: int | None
    blocks_evicted: int | None
    blocks_declined: int | None
    requests_refused: int
    seconds: float
    share_of_optimum: float | None = None
    blocks_beyond_slots: int | None = None


class Served(NamedTuple):
    """The result of one request."""

    hits: int
    refused: bool


def serve(index: CacheIndex, keys: Request) -> Served:
    """One request, in the steps of an engine; a request longer than the cache uses its first keys.

    All of its keys are given to `reserve` together, so that none of them is evicted for another.
    """
    used = keys[: index.capacity]
    hits = index.lookup(used)
    unique = used if len(set(used)) == len(used) else tuple(dict.fromkeys(used))
    found = unique if hits == len(used) else tuple(dict.fromkeys(used[:hits]))
    with index.acquire(found):
        index.load(found)
    with index.reserve(unique) as reservation:
        refused = reservation.short
    index.touch(unique)
    return Served(hits, refused)


def drive(requests: Sequence[Request], slots: int, policy: str, progress: Advance) -> PolicyResult:
    """All requests through an empty cache."""
    index = CacheIndex(slots, policy=make_policy(policy, slots))
    hits = refused = 0
    begin = time.perf_counter()
    for number, request in enumerate(requests, start=1):
        served = serve(index, request)
        hits += served.hits
        refused += served.refused
        progress(number, len(requests))
    seconds = time.perf_counter() - begin
    done = index.statistics()
    beyond = sum(max(0, len(request) - slots) for request in requests)
    return PolicyResult(
        policy,
        slots,
        hits,
        _rate(hits, requests),
        done.stored,
        done.evicted,
        done.declined,
        refused,
        round(seconds, 3),
        blocks_beyond_slots=beyond,
    )


def optimum(requests: Sequence[Request], slots: int) -> PolicyResult:
    """The most hits that any cache of this size can have."""
    begin = time.perf_counter()
    hits = belady_hits(requests, slots)
    seconds = round(time.perf_counter() - begin, 3)
    return PolicyResult(OPTIMUM, slots, hits, _rate(hits, requests), None, None, None, 0, seconds)


def _rate(hits: int, requests: Sequence[Request]) -> float:
    return hits / max(1, sum(map(len, requests)))


def survey(
    requests: Sequence[Request], capacities: Sequence[int], policies: Sequence[str], output: Output
) -> list[PolicyResult]:
    """A result for each capacity and policy, and the optimum's below them."""
    results: list[PolicyResult] = []
    for slots in capacities:
        done = []
        for policy in policies:
            with output.progress(f"{policy}, {slots} slots") as progress:
                done.append(drive(requests, slots, policy, progress))
        with output.progress(f"{OPTIMUM}, {slots} slots"):
            results += _with_shares([*done, optimum(requests, slots)])
    return results


def _with_shares(results: Sequence[PolicyResult]) -> Iterator[PolicyResult]:
    """Rows of one capacity, the optimum last, with their place between LRU and it, if LRU is among them."""
    least = next((result.blocks_hit for result in results if result.policy == "lru"), None)
    for result in results:
        length = 0 if least is None else results[-1].blocks_hit - least
        share = None if least is None or length <= 0 else (result.blocks_hit - least) / length
        yield result._replace(share_of_optimum=share)


def print_results(results: Sequence[PolicyResult], title: str, rates: Rates | None, output: Output) -> None:
    headings = ["policy", "slots", "hits", "hit rate", "stored", "declined"]
    headings += ["evicted", "seconds"] if output.wide else []
    with_share = any(result.share_of_optimum is not None for result in results)
    headings += ["LRU to optimum"] if with_share else []
    headings += ["refused"] if any(result.requests_refused for result in results) else []
    output.line(verdict(results))
    output.table(title, headings, [_cells(result, headings) for result in results])
    if rates is not None:
        lines = [(result.policy, f"{result.slots:,}", *_worth(result, rates)) for result in results]
        output.table("the time that hits save", ("policy", "slots", "prefill saved", "loading"), lines)
        output.line(f"Of {rates.tokens_per_hash} tokens a block, {rates.model.name}: {rates.describe()}.")
    output.line("")
    for text in _legend(results, with_share):
        output.line(text)


def _legend(results: Sequence[PolicyResult], with_share: bool) -> Iterator[str]:
    """What the words of the table mean, and which blocks it leaves out."""
    for slots, beyond in dict.fromkeys((each.slots, each.blocks_beyond_slots) for each in results):
        if beyond:
            yield f"not tried with {slots:,} slots: {beyond:,} blocks beyond the first {slots:,} of a request."
    if any(result.blocks_declined for result in results):
        yield "declined: not stored, since the policy holds what they would displace worth more."
    if with_share:
        yield f"LRU to optimum: 0% is as many hits as lru, 100% as many as {OPTIMUM}."
    yield f"{OPTIMUM}: the most that is possible, knowing the future."


def verdict(results: Sequence[PolicyResult]) -> str:
    """The hit rate of the default policy, or else of the first one, with the most slots, and the highest possible."""
    slots = max(result.slots for result in results)
    of_them = {result.policy: result for result in results if result.slots == slots}
    shown = of_them.get(DEFAULT_POLICY) or next(iter(of_them.values()))
    return (
        f"replay: with {slots:,} slots, {shown.policy} finds {shown.hit_rate:.2%} of the blocks asked for; at most "
        f"{of_them[OPTIMUM].hit_rate:.2%} are possible"
    )


def _worth(result: PolicyResult, rates: Rates) -> tuple[str, str]:
    hits = result.blocks_hit
    return f"{rates.prefill_seconds(hits):,.1f} s", f"{rates.load_seconds(hits) or 0.0:,.1f} s"


def _cells(result: PolicyResult, headings: Sequence[str]) -> list[str]:
    counts = (result.blocks_hit, result.blocks_stored, result.blocks_evicted, result.blocks_declined)
    hits, stored, evicted, declined = ("-" if count is None else f"{count:,}" for count in counts)
    cells = {
        "policy": result.policy,
        "slots": f"{result.slots:,}",
        "hits": hits,
        "hit rate": f"{result.hit_rate:.2%}",
        "stored": stored,
        "evicted": evicted,
        "declined": declined,
        "seconds": f"{result.seconds:.2f}",
        "LRU to optimum": "-" if result.share_of_optimum is None else f"{result.share_of_optimum:.1%}",
        "refused": f"{result.requests_refused:,}",
    }
    return [cells[heading] for heading in headings]


def as_fields(results: Sequence[PolicyResult], rates: Rates | None) -> list[dict[str, Any]]:
    """For JSON."""
    return [result._asdict() | ({} if rates is None else rates.fields_of(result.blocks_hit)) for result in results]
