"""`kvoffload replay --metadata-only`: which keys a cache would hold, by policy and capacity; no bytes, no device."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

from kvoffload.cache.index import CacheIndex
from kvoffload.cache.policies import make_policy
from kvoffload.replay.belady import belady_hits
from kvoffload.replay.saving import Rates
from kvoffload.replay.trace import Request
from kvoffload.terminal.console import Advance, Output

OPTIMUM = "belady"  # in the place of a policy's name


class Row(NamedTuple):
    """What a cache did with all the requests. Blocks are the cache's, one per key.

    Attributes:
        policy: its name, or `OPTIMUM`: of that only the hits are known.
        slots: keys that the cache holds.
        hit_rate: hits of all blocks that were requested.
        requests_refused: requests of which nothing was stored, because too few keys might go.
        seconds: of this machine, for all of it.
        way_to_optimum: the share of the way from LRU's hits to the optimum; None where that has no length or LRU was
            not asked for.
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
    way_to_optimum: float | None = None


class Served(NamedTuple):
    """What one request did."""

    hits: int
    refused: bool


def serve(index: CacheIndex, keys: Request) -> Served:
    """One request, in the steps of an engine; a request longer than the cache uses its first keys.

    All of its keys are named when room is made, so that none of them is given up for another.
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


def drive(requests: Sequence[Request], slots: int, policy: str, progress: Advance) -> Row:
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
    return Row(
        policy, slots, hits, _rate(hits, requests), done.stored, done.evicted, done.declined, refused, round(seconds, 3)
    )


def optimum(requests: Sequence[Request], slots: int) -> Row:
    """The most hits that there can be."""
    begin = time.perf_counter()
    hits = belady_hits(requests, slots)
    seconds = round(time.perf_counter() - begin, 3)
    return Row(OPTIMUM, slots, hits, _rate(hits, requests), None, None, None, 0, seconds)


def _rate(hits: int, requests: Sequence[Request]) -> float:
    return hits / max(1, sum(map(len, requests)))


def survey(
    requests: Sequence[Request], capacities: Sequence[int], policies: Sequence[str], output: Output
) -> list[Row]:
    """A row for each capacity and policy, and the optimum's below them."""
    rows: list[Row] = []
    for slots in capacities:
        done = []
        for policy in policies:
            with output.progress(f"{policy}, {slots} slots") as progress:
                done.append(drive(requests, slots, policy, progress))
        rows += _with_way([*done, optimum(requests, slots)])
    return rows


def _with_way(rows: Sequence[Row]) -> Iterator[Row]:
    """Rows of one capacity, the optimum last, with their place between LRU and it, if LRU is among them."""
    least = next((row.blocks_hit for row in rows if row.policy == "lru"), None)
    for row in rows:
        length = 0 if least is None else rows[-1].blocks_hit - least
        method = None if least is None or length <= 0 else (row.blocks_hit - least) / length
        yield row._replace(way_to_optimum=method)


def print_rows(rows: Sequence[Row], title: str, rates: Rates | None, output: Output) -> None:
    heads = ["policy", "slots", "hits", "hit rate", "stored", "evicted", "declined", "seconds"]
    with_way = any(row.way_to_optimum is not None for row in rows)
    heads += ["LRU to optimum"] if with_way else []
    heads += ["refused"] if any(row.requests_refused for row in rows) else []
    heads += ["prefill saved", "loading"] if rates is not None else []
    output.table(title, heads, [_cells(row, heads, rates) for row in rows])
    output.line(
        f"{OPTIMUM}: the most that is possible, knowing the future. Seconds are this machine's, for all requests."
    )
    if rates is not None:
        output.line(f"Of {rates.tokens_per_hash} tokens a block, {rates.model.name}: {rates.describe()}.")


def _cells(row: Row, heads: Sequence[str], rates: Rates | None) -> list[str]:
    counts = (row.blocks_hit, row.blocks_stored, row.blocks_evicted, row.blocks_declined)
    hits, stored, evicted, declined = ("-" if count is None else f"{count:,}" for count in counts)
    cells = {
        "policy": row.policy,
        "slots": f"{row.slots:,}",
        "hits": hits,
        "hit rate": f"{row.hit_rate:.2%}",
        "stored": stored,
        "evicted": evicted,
        "declined": declined,
        "seconds": f"{row.seconds:.2f}",
        "LRU to optimum": "-" if row.way_to_optimum is None else f"{row.way_to_optimum:.1%}",
        "refused": f"{row.requests_refused:,}",
    }
    if rates is not None:
        cells["prefill saved"] = f"{rates.prefill_seconds(row.blocks_hit):,.1f} s"
        cells["loading"] = f"{rates.load_seconds(row.blocks_hit) or 0.0:,.1f} s"
    return [cells[head] for head in heads]


def as_fields(rows: Sequence[Row], rates: Rates | None) -> list[dict[str, Any]]:
    """For JSON."""
    return [row._asdict() | ({} if rates is None else rates.fields_of(row.blocks_hit)) for row in rows]
