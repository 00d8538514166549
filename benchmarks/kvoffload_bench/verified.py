"""How many transfers a benchmark verified, and which of them were wrong."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

from kvoffload.terminal.console import Output

_NAMES = (  # of the fields that say which transfer a record is of
    *(
        "framework",
        "allocator",
        "model",
        "computation",
        "layout",
        "placement",
        "situation",
        "method",
        "copier",
        "back_to_back",
    ),
    *("direction", "block_bytes", "row_bytes", "blocks_per_slot", "descriptors", "blocks", "copies", "parts", "cold"),
)


ALONE = "alone"  # of `bench interference`: the computation without a transfer


class Verified(NamedTuple):
    """A transfer whose bytes were compared, in all rounds together; `wrong` rows of them differed."""

    what: str
    wrong: int


def verified(fields: Mapping[str, Any]) -> Iterator[Verified]:
    """Each transfer in the records of a benchmark, counted once however often it was repeated."""
    for value in fields.values():
        if isinstance(value, list):
            for record in value:
                if isinstance(record, dict) and "wrong" in record and record.get("method") != ALONE:
                    yield from _of_record(record)


def _of_record(record: Mapping[str, Any]) -> Iterator[Verified]:
    name = ", ".join(f"{key} {record[key]}" for key in _NAMES if record.get(key) is not None)
    wrong = record["wrong"]
    if isinstance(wrong, dict):
        for scenario, rows in wrong.items():
            yield Verified(f"{name}: {scenario}", rows)
    else:
        yield Verified(name, wrong)


def verdict(fields: Mapping[str, Any]) -> str:
    """How many were verified, and how many were wrong: "120 transfers verified, 0 wrong"."""
    found = list(verified(fields))
    wrong = sum(each.wrong > 0 for each in found)
    rows = fields["wrong_rows"]
    if rows and not wrong:  # in contiguous copies, which have no record of their own
        return f"{len(found):,} transfers verified, WRONG BYTES in {rows:,} rows of other copies"
    return f"{len(found):,} transfers verified, {wrong:,} wrong" + (f" ({rows:,} rows of bytes)" if rows else "")


def print_wrong(fields: Mapping[str, Any], output: Output) -> None:
    """Print which transfers were wrong, if any was."""
    wrong = [each for each in verified(fields) if each.wrong]
    if wrong:
        output.table("wrong bytes", ("transfer", "rows"), wrong)
