"""Runs Triton kernels in Triton's interpreter, over the memory of the simulated device.

The interpreter replaces functions of `triton.language` while a kernel runs, and holds the program's number in a global
object, so only one kernel runs at a time in a process, and nothing may be compiled meanwhile: that is what `LOCK` is
for. Triton's own launcher looks every replacement up again for every launch, and in some versions leaves them in place;
here they are looked up once, and are swapped in and out.

Triton, and with it a kernel's module, are imported when a kernel is first asked for.
"""

from __future__ import annotations

import dataclasses
import functools
import importlib
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from types import FunctionType, ModuleType
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from kvoffload.simulator.errors import SimulatorError
from kvoffload.simulator.operations import MISALIGNED_ADDRESS, DeviceFaultError

LOCK = threading.RLock()

_ABSENT = object()


Check = Callable[[NDArray[np.int64], int, bool], None]
"""Called before each load and store of a kernel with addresses, at least one, bytes at each, and whether it writes.
Raises DeviceFaultError unless the kernel may touch them.
"""


class Interpreted:
    def __init__(self, rewritten: Callable[..., None], name: str) -> None:
        self._rewritten = rewritten
        self._name = name

    def run(
        self,
        grid: int,
        order: Sequence[int],
        arguments: Sequence[tuple[str, str, int]],
        constants: Mapping[str, int],
        check: Check,
    ) -> None:
        """Run the programs `order` of a grid of `grid`, one after another."""
        import triton.language as tl
        from triton.runtime.interpreter import TensorHandle

        types = {"i64": (np.int64, tl.int64), "i32": (np.int32, tl.int32)}
        values: dict[str, Any] = dict(constants)
        with LOCK, _interpreting(check) as builder:
            for name, kind, value in arguments:  # of the type declared, not of the narrowest type that holds the value
                numpy_type, dtype = types[kind]
                values[name] = tl.tensor(TensorHandle(np.array([value], numpy_type), dtype), dtype)
            builder.set_grid_dim(grid, 1, 1)
            try:
                for program in order:
                    builder.set_grid_idx(program, 0, 0)
                    self._rewritten(**values)
            except (DeviceFaultError, SimulatorError):
                raise
            except Exception as error:
                raise SimulatorError(f"Triton's interpreter cannot run {self._name}: {error!r}") from error


@functools.cache
def load(module: str, function: str) -> Interpreted:
    """Return the kernel `function` of an importable module, in a copy of that module: the interpreter adds names there.

    Jitted functions of the same module that it calls are rewritten as well.
    """
    with LOCK:
        kernel = getattr(importlib.import_module(module), function).fn
        from triton.runtime.jit import KernelInterface

        def is_helper(item: tuple[str, Any]) -> bool:
            helper = getattr(item[1], "fn", None)
            return isinstance(item[1], KernelInterface) and getattr(helper, "__globals__", None) is kernel.__globals__

        scope = dict(kernel.__globals__)
        for name, each in filter(is_helper, kernel.__globals__.items()):
            scope[name] = _rewrite_in(scope, each.fn)
        return Interpreted(_rewrite_in(scope, kernel), f"{module}.{function}")


def _rewrite_in(scope: dict[str, Any], function: Any) -> Any:
    from triton.runtime.interpreter import InterpretedFunction

    copy = FunctionType(function.__code__, scope, function.__name__, function.__defaults__)
    copy.__annotations__, copy.__qualname__ = function.__annotations__, function.__qualname__
    return InterpretedFunction(copy).rewrite()


# replacing functions of triton.language ---------------------------------------------------------------------------


class _Replacement(NamedTuple):
    """An attribute in the dictionary of a module, a class or an object; `_ABSENT` if it is not in it."""

    holder: Any
    name: str
    before: Any
    after: Any

    def apply(self, value: Any) -> None:
        if value is _ABSENT:
            delattr(self.holder, self.name)
        else:
            setattr(self.holder, self.name, value)


@contextmanager
def _interpreting(check: Check) -> Iterator[Any]:
    """Make `triton.language` compute on checked memory; the interpreter's builder."""
    from triton.runtime import interpreter

    builder = interpreter.interpreter_builder
    # Triton computes 32-bit sums again in 64 bits, for an assertion that only `debug` makes.
    options = dataclasses.replace(builder.options, sanitize_overflow=False)
    replacements = (
        *_language_replacements(),
        _checked_access(builder, "create_masked_load", check, mask_at=0, writes=False),
        _checked_access(builder, "create_masked_store", check, mask_at=1, writes=True),
        _Replacement(builder, "options", builder.options, options),
    )
    try:
        for each in replacements:
            each.apply(each.after)
        yield builder
    finally:
        for each in reversed(replacements):
            each.apply(each.before)


@functools.cache
def _language_replacements() -> tuple[_Replacement, ...]:
    """Return the attributes that Triton's interpreter replaces: found by comparing them before and after it does."""
    import triton.language as tl
    from triton.runtime import interpreter

    def visible() -> None: ...

    modules = [each for each in vars(tl).values() if isinstance(each, ModuleType)]
    modules = [tl, *(each for each in modules if each.__name__.startswith("triton.language"))]
    classes = {each for module in modules for each in vars(module).values() if isinstance(each, type)}
    holders = [*modules, *(each for each in classes if each.__module__.startswith("triton."))]
    befores = [dict(vars(holder)) for holder in holders]
    interpreter._patch_lang(FunctionType(visible.__code__, {"tl": tl}))
    found = []
    for holder, before in zip(holders, befores, strict=True):
        for name, after in list(vars(holder).items()):
            old = before.get(name, _ABSENT)
            if old is not after:
                found.append(_Replacement(holder, name, old, after))
    for each in found:
        each.apply(each.before)
    merged = {(id(each.holder), each.name): each for each in found}
    # As of Triton 3.9; before, it fails on numpy 2.4, where an array of one element is no longer a number.
    before_index = tl.tensor.__dict__.get("__index__", _ABSENT)
    index = _Replacement(tl.tensor, "__index__", before_index, lambda self: int(self.handle.data.item()))
    for ours in (_checked_promise(tl), index):
        theirs = merged.get((id(ours.holder), ours.name), ours)
        merged[id(ours.holder), ours.name] = ours._replace(before=theirs.before)
    return tuple(merged.values())


def _checked_promise(tl: Any) -> _Replacement:
    """A GPU relies on `multiple_of`, and faults if it was wrong; so does this."""

    def multiple_of(tensor: Any, values: Any) -> Any:
        first: Any = values[0] if isinstance(values, list | tuple) else values
        factor = int(first.value if hasattr(first, "value") else first)  # a tl.constexpr has one
        handle = getattr(tensor, "handle", None)  # a constant has none
        if handle is not None and (handle.data % factor != 0).any():
            raise DeviceFaultError(f"multiple_of(..., {factor}) of {handle.data.reshape(-1)[:4]}", MISALIGNED_ADDRESS)
        return tensor

    return _Replacement(tl, "multiple_of", tl.multiple_of, multiple_of)


def _checked_access(builder: Any, name: str, check: Check, *, mask_at: int, writes: bool) -> _Replacement:
    """A method of the builder that reaches memory (all others go through these), which checks addresses first."""
    original = getattr(builder, name)

    def method(pointers: Any, *arguments: Any, **options: Any) -> Any:
        addresses, mask = pointers.data.view(np.int64), arguments[mask_at].data
        nbytes = max(1, pointers.get_element_ty().primitive_bitwidth // 8)
        if not mask.all():
            addresses = np.broadcast_to(addresses, mask.shape)[mask]
        if addresses.size:
            if nbytes > 1 and int(np.bitwise_or.reduce(addresses, axis=None)) & (nbytes - 1):
                raise DeviceFaultError(f"a kernel touched {nbytes} bytes at unaligned addresses", MISALIGNED_ADDRESS)
            check(addresses, nbytes, writes)
        return original(pointers, *arguments, **options)

    return _Replacement(builder, name, _ABSENT, method)
