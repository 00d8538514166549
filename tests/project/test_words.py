"""The words of the field, and one meaning for each: private words are in no name, and riddles in no text."""

from __future__ import annotations

import re
from collections.abc import Iterator
from functools import cache
from itertools import pairwise

import pytest
from house import ROOT, Word, folder_of, identifiers, prose, table_of, words_of

# What each is to be replaced by. A word in two parts is refused where the two follow each other in a name.
PRIVATE: dict[str, str] = {
    "bed": "the thing itself: a workload, a set-up",
    "toolbox": "copier set",
    "relay": "wait stream",
    "relays": "wait streams",
    "rival": "conflicting transfer",
    "rivals": "conflicting transfers",
    "journal": "statistics recorder",
    "books": "queue",
    "complain": "warn",
    "complains": "warns",
    "complaint": "warning",
    "complaints": "warnings",
    "land": "complete",
    "lands": "completes",
    "landed": "complete",
    "landing": "completion",
    "board": "submit",
    "boarded": "submitted",
    "boarding": "submission",
    "fly": "run",
    "flight": "transfer",
    "flights": "transfers",
    "beside": "concurrent with",
    "big copy": "contiguous copy",
    "way": "copy method",
    "ways": "copy methods",
    "cargo": "payload",
    "claim": "ownership, reservation",
    "claims": "ownership, reservations",
    "claimed": "owned, reserved",
    "let go": "unpin, release",
    "give way": "evict",
    "gives way": "evicts",
    "give up": "evict",
    "tell": "notify, return",
    "tells": "notifies, returns",
    "told": "notified",
    "lose": "fail, mark lost",
    "loses": "fails, marks lost",
    "deck": "the thing itself",
    "made": "synthetic; or what was made",
    "tiling": "the thing itself",
    "piece": "segment, chunk, batch: the thing itself",
    "pieces": "segments, chunks, batches: the thing itself",
}
OF_THE_CACHE: dict[str, str] = {"draw": "allocate", "draws": "allocates", "drawn": "allocated"}  # elsewhere: pictures

# What stays, and why: phrases within names, and words of one folder.
ALLOWED_PHRASES = {"in flight": "transfers in flight: the field's phrase", "under way": "plain English"}
ALLOWED_IN_FOLDER: dict[tuple[str, str], str] = {}
RIDDLES = re.compile(
    r"\b(nobody\w*|somebody\w*|whoever|anybody\w*|everybody\w*|no one|someone|giv\w+ way|gave way|"
    r"let(s|ting)? go|(is|are|was|were) told|what there is|complain\w*|big cop(y|ies)|"
    r"toolbox|relays?|rivals?|journal|boarded|boarding|cargo)\b",
    re.IGNORECASE,
)
ALLOWED_TEXTS: dict[str, str] = {}  # a line of prose, stripped, and why it stays


@cache
def private_words(identifier: str, folder: str) -> list[str]:
    """The private words in a name."""
    parts = list(words_of(identifier))
    for phrase in ALLOWED_PHRASES:
        parts = " ".join(parts).replace(phrase, "").split()
    pairs = [f"{first} {second}" for first, second in pairwise(parts)]
    refused = PRIVATE | (OF_THE_CACHE if folder in ("cache", "engine", "device") else {})
    found = [word for word in (*parts, *pairs) if word in refused]
    return [word for word in found if (folder, word) not in ALLOWED_IN_FOLDER and (word != "made" or parts == ["made"])]


def offending_names() -> Iterator[tuple[Word, str]]:
    for each in identifiers():
        for word in private_words(each.text, folder_of(each.path)):
            yield each, word


def test_names_have_no_private_words() -> None:
    found = list(offending_names())
    by_name = {(each.path, each.text): word for each, word in found}
    places = sorted(
        f"{path.relative_to(ROOT)}: {name} -> {(PRIVATE | OF_THE_CACHE)[word]}"
        for (path, name), word in by_name.items()
    )
    assert not found, f"{len(by_name)} names, {len(found)} uses\n{table_of(each for each, _ in found)}\n\n" + "\n".join(
        places
    )


def test_texts_have_no_riddles() -> None:
    """Docstrings, comments, messages: the thing is named ("the caller", "the engine's lock")."""
    found = [
        (each, match.group(0).lower())
        for each in prose()
        if each.text.strip() not in ALLOWED_TEXTS
        for match in RIDDLES.finditer(each.text)
    ]
    table = table_of(each._replace(text=word) for each, word in found)
    lines = [f"{each.path.relative_to(ROOT)}:{each.line}: {word}: {each.text.strip()}" for each, word in found]
    assert not found, f"{len(found)} places\n{table}\n\n" + "\n".join(lines)


def test_what_is_allowed_is_used() -> None:
    """An exception that nothing needs any more goes."""
    used = {(folder_of(each.path), word) for each in identifiers() for word in words_of(each.text)}
    assert set(ALLOWED_IN_FOLDER) <= used
    lines = {each.text.strip() for each in prose()}
    assert set(ALLOWED_TEXTS) <= lines


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("FlightDeck", ["flight", "deck"]),
        ("big_copy_seconds", ["big copy"]),
        ("_let_go", ["let go"]),
        ("_MOST_IN_FLIGHT", []),
        ("made", ["made"]),
        ("copies_made", []),
        ("always", []),
        ("hardware", []),
    ],
)
def test_words_are_found_in_names(name: str, words: list[str]) -> None:
    assert private_words(name, "cache") == words
