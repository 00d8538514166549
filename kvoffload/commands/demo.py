"""`kvoffload demo`: a synthetic chat workload that stores, evicts and loads, every byte verified."""

from __future__ import annotations

import argparse
import time
from collections.abc import Iterator
from hashlib import blake2b
from typing import Any

import numpy as np

from kvoffload.internal.models import MODELS
from kvoffload.replay.verified import VerifiedCache
from kvoffload.terminal.console import Output, counted, mib, open_backend, verified_text
from kvoffload.terminal.options import COMMON, add_command, add_common_options, add_seed, model, whole

_SYSTEM_BLOCKS = 8
_MOST_NEW_BLOCKS = 8  # added by a turn: its question and the answer before it
_SIMULATED_SCALE = 0.01
_TEXT = """\
Conversations with one system prompt take turns. The cache cannot hold all of them, so blocks are stored, evicted and \
loaded. Every byte of every load is verified. Takes seconds, with or without a GPU."""


_CHAT = ("hit rates of chat, by policy", "kvoffload replay --workload chat --slots 2048 --metadata-only --policy all")
_NEXT = {  # by whether the device is simulated
    True: (("why no GPU can be used here", "kvoffload doctor"), _CHAT),
    False: (
        ("measure copy methods on this machine", "kvoffload tune"),
        ("transfers concurrent with computation", "kvoffload bench field --quick"),
        _CHAT,
    ),
}


def add_parser(commands: Any) -> None:
    parser = add_command(
        commands,
        "demo",
        "a chat workload through the cache, every byte verified",
        _TEXT,
        example="demo --model qwen2.5-0.5b --slots 80",
        common=COMMON,
    )
    parser.add_argument(
        "--model",
        type=model,
        default=MODELS["llama-3.1-8b"],
        metavar="NAME",
        help="default llama-3.1-8b; an unknown name lists all",
    )
    parser.add_argument("--conversations", type=whole(1, 1000), default=8, metavar="N", help="default 8")
    parser.add_argument(
        "--turns", type=whole(1, 1000), default=8, metavar="N", help="turns of each conversation (default 8)"
    )
    parser.add_argument("--slots", type=whole(1), default=160, metavar="N", help="blocks the cache holds (default 160)")
    add_seed(parser, "the workload")
    add_common_options(parser)
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Serve the turns; 0 if every loaded byte was right, else 1."""
    output = Output(arguments.json)
    turns = list(chat(arguments.conversations, arguments.turns, arguments.seed))
    with open_backend(arguments, arguments.seed) as device:
        geometry = arguments.model.scaled(_SIMULATED_SCALE if device.simulated else 1.0)
        begin = time.perf_counter()
        with VerifiedCache(
            device,
            geometry,
            capacity=arguments.slots,
            longest=max(map(len, turns)),
            seed=arguments.seed,
        ) as served:
            with output.progress("turns") as progress:
                for number, keys in enumerate(turns, start=1):
                    served.serve(keys)
                    progress(number, len(turns))
            served.cache.check()
            fields = {
                "simulated": device.simulated,
                "device": device.name,
                "model": arguments.model.name,
                "bytes_per_block": served.bytes_per_key,
                "slots": arguments.slots,
                "conversations": arguments.conversations,
                "turns": len(turns),
                "distinct_blocks": len({key for keys in turns for key in keys}),
                **served.fields(),
                "blocks_beyond_slots": sum(max(0, len(keys) - arguments.slots) for keys in turns),
            }
        fields["seconds"] = round(time.perf_counter() - begin, 3)
    output.result(fields)
    _print(fields, geometry.tokens_per_block, output)
    return 1 if fields["corrupt_blocks"] else 0


def chat(conversations: int, turns: int, seed: int) -> Iterator[tuple[bytes, ...]]:
    """Yield the keys of `turns` turns of each conversation, in a seeded order; a key is a digest of everything up to
    its block.
    """
    random = np.random.default_rng(seed)
    system = _chain((), _SYSTEM_BLOCKS, "system")
    histories = [system] * conversations
    order = random.permutation(np.repeat(np.arange(conversations), turns))
    for number, conversation in enumerate(order.tolist()):
        added = int(random.integers(1, _MOST_NEW_BLOCKS + 1))
        histories[conversation] = _chain(histories[conversation], added, f"turn {number}")
        yield histories[conversation]


def _chain(keys: tuple[bytes, ...], count: int, content: str) -> tuple[bytes, ...]:
    grown = list(keys)
    for index in range(count):
        before = grown[-1] if grown else b""
        grown.append(blake2b(before + f"{content}, block {index}".encode(), digest_size=16).digest())
    return tuple(grown)


def _print(fields: dict[str, Any], tokens_per_block: int, output: Output) -> None:
    simulated = fields["simulated"]
    hit, asked = (tokens_per_block * fields[f"blocks_{what}"] for what in ("hit", "requested"))
    rate = fields["blocks_hit"] / fields["blocks_requested"]
    output.line(
        f"demo: {hit:,} of {asked:,} prompt tokens not recomputed (hit rate {rate:.1%}); "
        + verified_text(fields["verified_blocks"], fields["corrupt_blocks"])
    )
    where = "simulated device" if simulated else fields["device"]
    slots = f"{counted(fields['slots'], 'slot')} of {mib(fields['bytes_per_block'])}"
    slots += f" ({_SIMULATED_SCALE:.0%} of the model's)" if simulated else ""
    stored, loaded = (mib(fields[f"bytes_{what}"]) for what in ("stored", "loaded"))
    lines = [
        ("turns", f"{fields['turns']:,}, in {counted(fields['conversations'], 'conversation')}"),
        ("blocks of their prompts", f"{fields['blocks_requested']:,} ({fields['distinct_blocks']:,} different)"),
        ("  found and loaded", f"{fields['blocks_hit']:,} ({loaded}{_rate(fields, 'load')})"),
        ("  not found: stored", f"{fields['blocks_stored']:,} ({stored}{_rate(fields, 'store')})"),
        ("  not found: not worth storing", f"{fields['blocks_declined']:,}"),
    ]  # indented lines add up to the line above them
    if fields["blocks_beyond_slots"]:
        beyond = f"  beyond the first {fields['slots']:,} of a prompt: not tried"
        lines.append((beyond, f"{fields['blocks_beyond_slots']:,}"))
    lines += [
        ("stored blocks", f"{fields['blocks_stored']:,}"),
        ("  evicted for others", f"{fields['blocks_evicted']:,}"),
        ("  in the cache at the end", f"{fields['blocks_stored'] - fields['blocks_evicted']:,}"),
        ("loaded blocks verified, every byte", f"{fields['verified_blocks']:,}"),
        ("  with wrong bytes", f"{fields['corrupt_blocks']:,}"),
    ]
    output.table(f"{fields['model']}, {slots}, {where}", ("what", "how many"), lines)
    output.line("")
    output.line("try next:")
    for what, command in _NEXT[simulated]:
        output.line(f"  {what}:")
        output.line(f"    {command}")


def _rate(fields: dict[str, Any], what: str) -> str:
    rate = fields.get(f"{what}_gb_per_s")
    return "" if rate is None else f", {rate} GB/s on the GPU clock"
