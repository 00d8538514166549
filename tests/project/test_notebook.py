"""The notebook runs as it is, once and again, leaves nothing behind, and is kept without outputs.

KVOFFLOAD_EXECUTED names a folder in which the executed notebooks are kept, with their outputs, to be looked at.
"""

from __future__ import annotations

import copy
import importlib.util
import json
import os
import sys
import uuid
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

NOTEBOOK = Path(__file__).parent.parent.parent / "examples" / "offload_tour.ipynb"
PACKAGES = ("nbclient", "nbformat", "ipykernel", "matplotlib")
HEAD = """\
import warnings

warnings.filterwarnings("always", message=".*never closed", category=ResourceWarning)
"""
COUNT = """\
import gc, json, threading

gc.collect()
device.reclaim()
open_devices = [each for each in gc.get_objects() if isinstance(each, kvoffload.Device) and not each.closed]
descriptors = len(os.listdir("/proc/self/fd"))
counts = {"threads": threading.active_count(), "descriptors": descriptors, "devices": len(open_devices)}
counts |= {"owned": device.owned} | ({} if device.simulator is None else device.simulator.leaks())
simulators = [*globals().get("simulators", []), device.simulator]
print(json.dumps(counts))
"""
TAIL = """\
device.close()
for simulator in simulators:
    simulator.check_guards()
    assert simulator.violations == []
left = [{kind: count for kind, count in simulator.leaks().items() if count} for simulator in simulators]
print(json.dumps(left))
"""

Cell = Any  # of nbformat, which has no types


def read() -> Any:
    import nbformat

    return nbformat.read(NOTEBOOK, as_version=nbformat.NO_CONVERT)


def execute(cells: Sequence[Cell], folder: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> list[str]:
    """Run cells in a kernel of this interpreter, in a folder of its own; what each code cell printed.

    No kernel needs to be installed, and installed ones are not used.
    """
    import nbformat
    from nbclient import NotebookClient

    kernel = folder / "kernels" / "here" / "kernel.json"
    kernel.parent.mkdir(parents=True)
    command = [sys.executable, "-m", "ipykernel_launcher", "-f", "{connection_file}"]
    kernel.write_text(json.dumps({"argv": command, "display_name": "here", "language": "python"}))
    monkeypatch.setenv("JUPYTER_PATH", str(folder))
    for variable in ("JUPYTER_CONFIG_DIR", "JUPYTER_RUNTIME_DIR", "IPYTHONDIR"):
        monkeypatch.setenv(variable, str(folder / variable.lower()))
    monkeypatch.setenv(
        "PYTHONPATH", os.pathsep.join([str(NOTEBOOK.parent.parent), *filter(None, [os.environ.get("PYTHONPATH")])])
    )
    notebook = nbformat.v4.new_notebook(cells=list(cells))
    client = NotebookClient(notebook, kernel_name="here", timeout=100, resources={"metadata": {"path": str(folder)}})
    try:
        client.execute()
    finally:
        if kept := os.environ.get("KVOFFLOAD_EXECUTED"):
            Path(kept).mkdir(parents=True, exist_ok=True)
            nbformat.write(notebook, Path(kept) / f"{name}.ipynb")
    return [printed(cell) for cell in notebook.cells if cell.cell_type == "code"]


def printed(cell: Cell) -> str:
    """The stdout of an executed cell, which has nothing on its stderr: no warning either."""
    streams = [output for output in cell.outputs if output.output_type == "stream"]
    assert [each.text for each in streams if each.name == "stderr"] == []
    return "".join(each.text for each in streams)


def code(source: str) -> Cell:
    import nbformat

    return nbformat.v4.new_code_cell(source)


def copies(cells: Sequence[Cell]) -> list[Cell]:
    """The same cells with ids of their own: a notebook has each once."""
    copied = [copy.deepcopy(cell) for cell in cells]
    for cell in copied:
        cell.id = uuid.uuid4().hex
    return copied


@pytest.fixture
def _jupyter() -> None:
    missing = [name for name in PACKAGES if importlib.util.find_spec(name) is None]
    if missing:
        pytest.skip(f"needs {', '.join(missing)}: pip install 'kvoffload[notebook]'")


@pytest.mark.usefixtures("_jupyter")
def test_the_notebook_runs_again_and_again_and_leaks_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """All cells, all again, and each one twice in a row."""
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")  # on the simulated device, wherever this runs
    cells = [cell for cell in read().cells if cell.cell_type == "code"]
    twice = [each for cell in cells for each in copies([cell, cell])]
    runs = [copies(cells), copies(cells), twice]
    program = [code(HEAD), *(cell for run in runs for cell in [*run, code(COUNT)]), code(TAIL)]
    out = execute(program, tmp_path, monkeypatch, "offload_tour_again")
    once, per_run = out[1 : len(cells) + 1], len(cells) + 1
    text = "".join(once)
    assert "simulated" in text
    assert "every byte came back: True" in text
    assert "turn 3: 14 blocks, 11 found" in text
    assert "there is nothing to measure" in text
    assert "NumPy sees what was loaded: True" in text
    assert "GB/s" not in text
    counts = [json.loads(out[place]) for place in (per_run, 2 * per_run, 2 * per_run + len(twice) + 1)]
    assert counts[0]["devices"] == 1
    opened = [each.pop("descriptors") for each in counts]
    assert counts[0] == counts[1] == counts[2]
    assert opened[2] <= opened[0] + 2, "each cell has run three times more; the kernel itself opens some now and then"
    assert json.loads(out[-1]) == [{}, {}, {}]
    assert out[per_run + 1 : 2 * per_run] == once, "the same again"


@pytest.mark.gpu
@pytest.mark.timeout(300)
@pytest.mark.usefixtures("_jupyter", "only_gpu")
def test_the_notebook_on_a_gpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cells = read().cells
    out = execute([code(HEAD), *copies(cells), code(COUNT), *copies(cells), code(COUNT)], tmp_path, monkeypatch, "gpu")
    once = out[1 : len(out) // 2]  # the cells between HEAD and COUNT
    text = "".join(once)
    assert "simulated" not in text
    assert "every byte came back: True" in text
    assert text.count("GB/s with 256 blocks, the contiguous copy") == 2
    for name, packages in (("CuPy", ["cupy"]), ("JAX", ["jax_cuda12_plugin", "jax_cuda13_plugin"])):
        if any(importlib.util.find_spec(package) for package in packages):
            assert f"{name} sees what was loaded: True" in text
    counts = [json.loads(line) for line in (out[len(out) // 2], out[-1])]
    assert counts[1]["owned"] == counts[0]["owned"]
    assert counts[1]["devices"] == counts[0]["devices"] == 1


@pytest.mark.usefixtures("_jupyter")
def test_the_notebook_is_kept_clean() -> None:
    import nbformat

    notebook = read()
    nbformat.validate(notebook)
    assert NOTEBOOK.read_text() == nbformat.writes(notebook) + "\n", "as nbformat writes it"
    assert notebook.metadata == {
        "kernelspec": {"display_name": "Python 3", "language": "python", "name": "python3"},
        "language_info": {"name": "python"},
    }
    names = [cell.id for cell in notebook.cells]
    assert len(set(names)) == len(names)
    assert all(name.replace("-", "").isalpha() for name in names), "ids are names, which do not change"
    for cell in notebook.cells:
        assert cell.metadata == {}
        if cell.cell_type == "code":
            assert (cell.outputs, cell.execution_count) == ([], None)


@pytest.mark.usefixtures("_jupyter")
def test_each_code_cell_is_short_and_has_words_before_it() -> None:
    cells = read().cells
    code_cells = [cell for cell in cells if cell.cell_type == "code"]
    assert 12 <= len(code_cells) <= 18
    assert max(len(cell.source.splitlines()) for cell in code_cells) <= 40
    kinds = "".join(cell.cell_type[0] for cell in cells)
    assert "cc" not in kinds
