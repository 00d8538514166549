"""No loop goes on where an interrupt would pass by the end of a lock, a `finally` or an `except BaseException`.

From CPython 3.12 on the compiler may leave the jump from a loop's end to its beginning out of the exception table:
where the loop's last statement is an `if`, in a comprehension with an `if`, and where `while` looks at its condition
again. A signal handler that raises there does not run the `__exit__` of a `with` around the loop, nor its `finally`. So
such loops are in functions of their own (`filter` has a lambda), or end otherwise.
"""

from __future__ import annotations

import dis
import types
from collections.abc import Iterator
from typing import Any

import pytest
from documents import ROOT

PACKAGE = ROOT / "kvoffload"
# Commands and tools for tests, which end with the interrupt; and what holds no lock there.
LEFT_OUT = ("calibration/", "commands/", "replay/", "testing/")
# Functions that threads of the library run: Python calls signal handlers in the main thread alone.
OF_THREADS = {("pool/owner.py", "_serve"), ("device/growth.py", "_run"), ("tiers/member_file.py", "write")}
HOLE = """
def passes(lock, items):
    with lock:
        for each in items:
            if each:
                print(each)
    try:
        while items:
            items.pop()
    except BaseException:
        items.clear()
    finally:
        items = None
    try:
        while items:
            items.pop()
    except ValueError:
        pass
"""


def functions(code: types.CodeType) -> Iterator[types.CodeType]:
    yield code
    for each in code.co_consts:
        if isinstance(each, types.CodeType):
            yield from functions(each)


def passed_by(code: types.CodeType) -> list[str]:
    """The ends of statements, and the loops, at whose back edge an interrupt passes by that end."""
    parse: Any = vars(dis)["_parse_exception_table"]
    table, steps = parse(code), {each.offset: each for each in dis.get_instructions(code)}

    def handlers(offset: int) -> list[int]:
        """Of an instruction, the innermost first."""
        found: list[int] = []
        while True:
            of = next((each.target for each in table if each.start <= offset < each.end), None)
            if of is None or of in found:
                return found
            found.append(of)
            offset = of

    def kind(handler: int) -> str | None:
        """Of what a handler is the end; None if it lets an interrupt pass."""
        first, second, *others = [each for at, each in sorted(steps.items()) if at >= handler]
        if first.opname != "PUSH_EXC_INFO":  # of the compiler's own
            return None
        if second.opname == "WITH_EXCEPT_START":
            return "with"
        naming = ("LOAD_GLOBAL", "LOAD_NAME", "LOAD_ATTR", "BUILD_TUPLE")  # what is caught
        after = next(each for each in others if each.opname not in naming)
        if second.opname not in naming or after.opname != "CHECK_EXC_MATCH":
            return "finally"
        return "except BaseException" if second.argval == "BaseException" else None

    found = []
    for step in steps.values():
        if step.opname == "JUMP_BACKWARD":
            ends = map(kind, set(handlers(step.argval)) - set(handlers(step.offset)))
            line = step.positions and step.positions.lineno
            found += [f"{code.co_name}: {end} around line {line}" for end in ends if end is not None]
    return found


def test_no_back_edge_passes_an_end_by() -> None:
    found = []
    for path in sorted(PACKAGE.rglob("*.py")):
        name = path.relative_to(PACKAGE).as_posix()
        if not name.startswith(LEFT_OUT):
            for code in functions(compile(path.read_text(), str(path), "exec")):
                if (name, code.co_name) not in OF_THREADS:
                    found += [f"{name}: {each}" for each in passed_by(code)]
    assert not found


def test_the_search_finds_such_a_loop_where_the_interpreter_makes_it() -> None:
    (code,) = [each for each in functions(compile(HOLE, "hole", "exec")) if each.co_name == "passes"]
    if not passed_by(code):
        pytest.skip("this interpreter leaves no back edge out")
    assert set(passed_by(code)) == {
        "passes: with around line 5",
        "passes: finally around line 8",
        "passes: except BaseException around line 8",
    }
