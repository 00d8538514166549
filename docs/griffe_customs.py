"""For mkdocstrings: customs of the source here that it does not know.

1. An entry may describe several names, "keys, blocks: ...". Each gets an entry of its own.
2. A `Raises:` section may end with sentences about all of its cases, "Nothing has changed in any of these cases." The
   parser would drop them with a warning. They become a paragraph behind the section.
3. Names that a class's `__dir__` leaves out are for other parts of the library, and are not shown.
4. A method without a docstring keeps the contract of the one that it overrides, and shows that.
5. What several classes inherit is shown once. The others name it, with a link, at the end of their docstring.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

from griffe import Extension

_SECTION = re.compile(r"^(Args|Attributes|Raises):\n((?:    .*\n?|\n(?=    ))+)", re.MULTILINE)
_NAME = re.compile(r"[\"'](\w+)[\"']")
_SHOWN_BY = {  # the base classes that the reference does not show, and the classes that show what they have
    "Engine": "kvoffload.OffloadEngine",
    "KeyCache": "kvoffload.BlockCache",
    "PromotedLoad": "kvoffload.cache.tiering.ChainedLoad",
    "TwoQueues": "kvoffload.cache.policies.Policy",
    "Waitable": "kvoffload.Job",
}
_ENTRY = re.compile(r"    (\w+(?:, \w+)*):(?= |$)")


class Customs(Extension):
    """Applied to every docstring, before it is parsed."""

    def on_instance(self, *, obj: Any, **_: Any) -> None:
        if obj.docstring is not None:
            obj.docstring.value = parsable(obj.docstring.value)

    def on_package(self, *, pkg: Any, **_: Any) -> None:
        for cls in _classes(pkg):
            family = [cls, *cls.mro()]
            hidden = set().union(*map(hidden_names, family))
            for each in family:  # bases, too: what is inherited is shown
                for name in hidden & each.members.keys():
                    del each.members[name]
            for name, member in cls.members.items():
                if not member.is_alias and member.docstring is None:
                    inherited = (each.members[name] for each in family[1:] if name in each.members)
                    member.docstring = next((each.docstring for each in inherited if each.docstring), None)
        for cls in _classes(pkg):
            if cls.docstring is not None:
                cls.docstring.value += _inherited(cls)


def _inherited(cls: Any) -> str:
    """A line for each class whose page shows members that this one inherits."""
    seen, text = set(cls.members), ""
    for base in cls.mro():
        named = [name for name, each in base.members.items() if not name.startswith("_") and not each.is_alias]
        new = [f"`{name}`" for name in named if name not in seen and base.members[name].docstring]
        shown_by = _SHOWN_BY.get(base.name, base.canonical_path)
        if new and not base.name.startswith("_") and not shown_by.endswith(f".{cls.name}"):
            text += f"\n\nThe same as in [`{shown_by.rpartition('.')[2]}`][{shown_by}]: {', '.join(new)}."
        seen.update(named)
    return text


def _classes(parent: Any) -> Iterator[Any]:
    for member in parent.members.values():
        if not member.is_alias and (member.is_module or member.is_class):
            yield from (member,) if member.is_class else _classes(member)


def hidden_names(cls: Any) -> set[str]:
    """What the class's own `__dir__` names, by itself or by a constant of its module."""
    method = cls.members.get("__dir__")
    if method is None or method.is_alias:
        return set()
    named = [cls.module.members.get(name) for name in re.findall(r"\b_[A-Z_]+\b", method.source)]
    constants = [each for each in named if each is not None and not each.is_alias]
    return {name for text in (method.source, *(each.source for each in constants)) for name in _NAME.findall(text)}


def parsable(docstring: str) -> str:
    """The docstring as the parser takes it, with everything that it said."""
    return _SECTION.sub(_section, docstring)


def _section(section: re.Match[str]) -> str:
    entries: list[list[str]] = []
    sentences: list[str] = []
    latest = sentences
    for line in filter(str.strip, section[2].splitlines()):
        if not line.startswith("     "):  # else it goes on with what the line before it began
            latest = sentences
            if section[1] != "Raises" or _ENTRY.match(line):
                entries.append(latest := [])
        latest.append(line)
    text = "".join(f"\n{line}" for entry in entries for line in _for_each_name(entry))
    behind = " ".join(map(str.strip, sentences))
    if not entries:
        return f"{section[1]}: {behind}\n"
    return f"{section[1]}:{text}\n" + (f"\n{behind}\n" if behind else "\n" if section[2].endswith("\n\n") else "")


def _for_each_name(entry: list[str]) -> list[str]:
    found = _ENTRY.match(entry[0])
    if found is None:
        return entry
    text = entry[0][found.end() :]
    return [line for name in found[1].split(", ") for line in (f"    {name}:{text}", *entry[1:])]
