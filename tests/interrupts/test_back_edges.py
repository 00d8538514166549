"""No loop under a lock goes on where an interrupt would pass the lock by.

From CPython 3.12 on the compiler may leave the jump from a loop's end to its beginning out of the exception table:
where the loop's last statement is an `if`, in a comprehension with an `if`, and where `while` looks at its condition
again. A signal handler that raises there does not run the `__exit__` of a `with` around the loop. So such loops are in
functions of their own (`filter` has a lambda), or end otherwise.
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
HOLE = """
def passes(lock, items):
    with lock:
        for each in items:
            if each:
                print(each)
"""


def functions(code: types.CodeType) -> Iterator[types.CodeType]:
    yield code
    for each in code.co_consts:
        if isinstance(each, types.CodeType):
            yield from functions(each)


def passed_by(code: types.CodeType) -> list[str]:
    """The lines of `with` statements that an interrupt at some back edge of this function leaves without `__exit__`."""
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

    def is_with(handler: int) -> bool:
        return any(handler <= at < handler + 8 and each.opname == "WITH_EXCEPT_START" for at, each in steps.items())

    found = []
    for step in steps.values():
        if step.opname == "JUMP_BACKWARD":
            around = set(handlers(step.argval)) - set(handlers(step.offset))
            lines = [steps[each].positions for each in filter(is_with, around)]
            found += [f"{code.co_name}: with in line {each.lineno}" for each in lines if each is not None]
    return found


def test_no_back_edge_passes_a_lock_by() -> None:
    found = []
    for path in sorted(PACKAGE.rglob("*.py")):
        name = path.relative_to(PACKAGE).as_posix()
        if not name.startswith(LEFT_OUT):
            for code in functions(compile(path.read_text(), str(path), "exec")):
                found += [f"{name}: {each}" for each in passed_by(code)]
    assert not found


def test_the_search_finds_such_a_loop_where_the_interpreter_makes_it() -> None:
    (code,) = [each for each in functions(compile(HOLE, "hole", "exec")) if each.co_name == "passes"]
    if not passed_by(code):
        pytest.skip("this interpreter leaves no back edge out")
    assert set(passed_by(code)) == {"passes: with in line 3"}
