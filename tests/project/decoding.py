"""Runs of the examples that decode with a paged KV cache, and what they print."""

from __future__ import annotations

import importlib.util
import os
import re
import subprocess
import sys
import textwrap
from importlib import import_module
from pathlib import Path

import pytest
from programs import run_program

EXAMPLES = Path(__file__).resolve().parent.parent.parent / "examples"
LAYOUTS = ("plane-major", "block-major")  # the first is what the examples take by default
BOTH = ("cupy_paged_decode.py", "jax_paged_decode.py")
HAS_JAX = importlib.util.find_spec("jax") is not None
COUNTS = re.compile(r"^(.+): (\d+) blocks evicted, (\d+) stored \(.*\), (\d+) loaded", re.MULTILINE)
VERDICTS = re.compile(r"^(.+): (\d+) of (\d+) tokens have the bits of the first run: (.+)$", re.MULTILINE)
TIMES = re.compile(r"tokens/s|TTFT|\d m?s\b|seconds")
FITS, PREFETCHED, ON_DEMAND = "cache that fits", "offload, prefetched", "offload, on demand"
# XLA for the CPU: what LLVM optimises takes longer to compile than to run.
QUICK_XLA = "--xla_backend_optimization_level=0"
LAYER_WISE, RECOMPUTED = "offload, layer-wise", "recomputation"


def run(name: str, *options: str, exit_code: int = 0, warnings: str = "error") -> str:
    """What an example prints."""
    done = end_of(name, *options, warnings=warnings)
    assert done.returncode == exit_code, done.stdout + done.stderr
    return done.stdout


def run_here(
    name: str,
    *options: str,
    exit_code: int = 0,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> str:
    """What an example prints that is called in this process: a process of its own takes longer to start than to run."""
    monkeypatch.syspath_prepend(EXAMPLES)
    monkeypatch.setattr(sys, "argv", [name, *options])
    code = import_module(name.removesuffix(".py")).main()
    done = capsys.readouterr()
    assert (code, done.err) == (exit_code, ""), done.out + done.err
    return done.out


def refusal(name: str, *options: str) -> str:
    """What an example that fails prints to stderr."""
    done = end_of(name, *options)
    assert done.returncode != 0, done.stdout
    return done.stderr


def refused(
    name: str, *options: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> tuple[object, str]:
    """The exit code of an example called in this process, which must exit; and what it prints to stderr."""
    monkeypatch.syspath_prepend(EXAMPLES)
    monkeypatch.setattr(sys, "argv", [name, *options])
    with pytest.raises(SystemExit) as ended:
        sys.exit(import_module(name.removesuffix(".py")).main())
    code, said = ended.value.code, capsys.readouterr().err
    return (1, said + code) if isinstance(code, str) else (code, said)  # as Python ends a program


def end_of(name: str, *options: str, warnings: str = "error") -> subprocess.CompletedProcess[str]:
    environment = os.environ | {"PYTHONPATH": str(EXAMPLES.parent), "XLA_PYTHON_CLIENT_PREALLOCATE": "false"}
    if "simulated" in options:
        environment["XLA_FLAGS"] = QUICK_XLA
    return subprocess.run(
        [sys.executable, "-W", warnings, str(EXAMPLES / name), *options],
        env=environment,
        capture_output=True,
        text=True,
        timeout=110,
        check=False,
    )


def counts(output: str) -> dict[str, tuple[int, ...]]:
    """Blocks evicted, stored and loaded, by mode."""
    return {mode: tuple(map(int, numbers)) for mode, *numbers in COUNTS.findall(output)}


def verdicts(output: str) -> dict[str, str]:
    return {mode: verdict for mode, *_, verdict in VERDICTS.findall(output)}


def check_run(output: str, *modes: str, extra: str | None = None) -> None:
    """All offloading modes moved blocks, and changed no bit; `extra` changed none."""
    moved, said = counts(output), verdicts(output)
    assert moved[FITS] == (0, 0, 0)
    assert set(moved) == {FITS, *modes, RECOMPUTED} | ({extra} if extra else set())
    assert extra is None or said[extra] == "bitwise equal"
    for mode in modes:
        assert min(moved[mode]) > 0
        assert said[mode] == "bitwise equal"
    evicted, *transferred = moved[RECOMPUTED]
    assert evicted > 0
    assert transferred == [0, 0]


def run_jax(program: str) -> str:
    """What a program prints that computes with JAX on the CPU and imports modules of the examples."""
    if not HAS_JAX:
        pytest.skip("jax is not installed")
    begin = f"import os, sys\nos.environ['XLA_FLAGS'] = {QUICK_XLA!r}\nsys.path.insert(0, {str(EXAMPLES)!r})\n"
    return run_program(begin + textwrap.dedent(program), dev_mode=False, timeout=110)
