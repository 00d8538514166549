"""The outputs of a notebook as they are committed, and how they differ from those of another execution.

Every code cell is of one of three kinds, by its tag:

    no tag    what it shows is the same on a GPU and on the simulated device: text to the letter, figures of equal size
    "device"  cards, which show figures and capabilities of the device: the same classes, with the same rows
    "gpu"     what it shows on a GPU differs: `ON_A_GPU` has the text, as a pattern, and the figures
"""

from __future__ import annotations

import base64
import copy
import re
import struct
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from pages import Page

Cell = Any  # of nbformat, which has no types
Notebook = Any

METADATA = {
    "kernelspec": {"display_name": "Python 3", "language": "python", "name": "python3"},
    "language_info": {"name": "python"},
}
TAGS: tuple[list[str], ...] = ([], ["device"], ["gpu"])
LARGEST = 600_000  # bytes of the file
_PNG = b"\x89PNG\r\n\x1a\n"
_GB = r"\d+\.\d GB/s"
_FACTOR = r"a product takes \d+\.\d\d times as long\n"
_OF_A_MACHINE = re.compile(
    r"(?<![\w.:/])/(?:home|root|tmp|work|usr|opt|mnt|var|data)/|\b0x[0-9a-f]{6,}|\\u001b|\bat 0x"
)
_METHOD = re.compile(r"(strided|pack|batch|loop)\b.*")  # a row of a plan: which ones depends on the machine


class OnAGpu(NamedTuple):
    """What a cell shows on a GPU: a pattern of its whole text, and the pixels of its figures, (width, height)."""

    text: str
    figures: tuple[tuple[int, int], ...] = ()


ON_A_GPU: Mapping[str, OnAGpu] = {
    "device": OnAGpu(r"device: (?!.*simulated).+, driver \d+\.\d+, link .+\ntimes are measured: True\n"),
    "compute": OnAGpu(
        "".join(f"{name}: {_GB} on an idle GPU, one contiguous copy {_GB}\n" for name in ("stores", "loads"))
        + "".join(
            f"while the GPU computes: {names}; {_FACTOR}"
            for names in (f"stores {_GB}", f"loads {_GB}", f"stores {_GB}, loads {_GB}")
        )
    ),
    "compute-figure": OnAGpu("", ((945, 306),)),
    "bandwidth": OnAGpu(
        "".join(f"{name}, 128 blocks:  kvoffload {_GB}  cuMemcpyAsync loop {_GB}\n" for name in ("stores", "loads"))
    ),
    "bandwidth-figure": OnAGpu("", ((945, 378),)),
    "numpy": OnAGpu(r"NumPy cannot see GPU memory\.\n"),
    "cupy": OnAGpu("CuPy sees what was loaded: True\n"),
    "jax": OnAGpu("JAX sees what was loaded: True\n"),
}


def code_cells(notebook: Notebook) -> list[Cell]:
    return [cell for cell in notebook.cells if cell.cell_type == "code"]


def cell_of(notebook: Notebook, name: str) -> Cell:
    """The cell with that id."""
    return next(cell for cell in notebook.cells if cell.id == name)


def as_committed(cells: Sequence[Cell], executed: Sequence[Cell]) -> Notebook:
    """The notebook of these cells with the outputs of their executed copies, in the form in which it is committed.

    Nothing in it depends on when it was executed. Its metadata keep the sources that were executed, by cell.

    Args:
        cells: of the notebook, all of them.
        executed: copies of its code cells in their order, with outputs.
    """
    import nbformat

    kept = [copy.deepcopy(cell) for cell in cells]
    code = [cell for cell in kept if cell.cell_type == "code"]
    for number, (cell, ran) in enumerate(zip(code, executed, strict=True), start=1):
        cell.execution_count = number
        cell.outputs = [copy.deepcopy(output) for output in ran.outputs]
        for output in cell.outputs:
            if output.output_type == "execute_result":
                output.execution_count = number
    sources = {cell.id: cell.source.split("\n") for cell in code}
    return nbformat.v4.new_notebook(cells=kept, metadata={**METADATA, "executed_sources": sources})


def is_of_a_gpu(notebook: Notebook) -> bool:
    """Whether the outputs are of a GPU, by what the cell that opens the device has printed."""
    return re.fullmatch(ON_A_GPU["device"].text, text_of(cell_of(notebook, "device"))) is not None


def defects(notebook: Notebook) -> list[str]:
    """What is wrong with the outputs of a notebook by themselves: missing, failed, of other sources."""
    found: list[str] = []
    sources = notebook.metadata.get("executed_sources", {})
    code = code_cells(notebook)
    if set(sources) != {cell.id for cell in code}:
        found.append("executed_sources names other cells")
    for number, cell in enumerate(code, start=1):
        if sources.get(cell.id) != cell.source.split("\n"):
            found.append(f"{cell.id}: its source is not what was executed")
        if cell.execution_count != number:
            found.append(f"{cell.id}: execution_count is {cell.execution_count}, not {number}")
        for output in cell.outputs:
            if output.output_type == "error" or output.get("name") == "stderr":
                found.append(f"{cell.id}: an error or a warning was kept")
            if match := _OF_A_MACHINE.search(_shown(output)):
                found.append(f"{cell.id}: its outputs name {match.group()!r}, which is of one machine or run")
    return found


def differences(committed: Notebook, simulated: Notebook) -> list[str]:
    """How committed outputs differ from those of an execution on the simulated device, where they must not."""
    on_a_gpu = is_of_a_gpu(committed)
    found: list[str] = []
    for cell, other in zip(code_cells(committed), code_cells(simulated), strict=True):
        kind = (cell.metadata.get("tags") or [""])[0]
        if kind == "gpu" and on_a_gpu:
            found += _differences_on_a_gpu(cell)
        else:
            outline = _outline if kind == "device" and on_a_gpu else _exactly
            if (here := [*outline(cell)]) != (there := [*outline(other)]):
                found.append(f"{cell.id}: {here} is not {there}")
    return found


def text_of(cell: Cell) -> str:
    """What a cell has printed."""
    return "".join(output.text for output in cell.outputs if output.output_type == "stream")


def _differences_on_a_gpu(cell: Cell) -> Iterator[str]:
    expected = ON_A_GPU[cell.id]
    if re.fullmatch(expected.text, text_of(cell)) is None:
        yield f"{cell.id}: {text_of(cell)!r} does not match {expected.text!r}"
    shown = [_pixels(output) for output in cell.outputs if output.output_type != "stream"]
    if shown != list(expected.figures):
        yield f"{cell.id}: figures of {shown} pixels, not {list(expected.figures)}"


def _exactly(cell: Cell) -> Iterator[object]:
    """Text to the letter, figures by their size in pixels."""
    for output in cell.outputs:
        if output.output_type == "stream":
            yield (output.name, output.text)
        elif output.output_type == "error":
            yield ("error", output.ename)
        else:
            data = {kind: value for kind, value in output.data.items() if kind != "image/png"}
            yield (output.output_type, data, _pixels(output) if "image/png" in output.data else None)


def _outline(cell: Cell) -> Iterator[object]:
    """Of a card: the class that is shown, its heading and its rows, without what they say."""
    for output in cell.outputs:
        if output.output_type == "stream":
            yield (output.name, len(output.text.splitlines()))
        elif output.output_type == "error":
            yield ("error", output.ename)
        else:
            page = Page(output.data["text/html"])
            name = output.data["text/plain"].partition("(")[0]
            rows = [text for text in _rows(page) if _METHOD.fullmatch(text) is None]
            yield (output.output_type, sorted(output.data), name, rows)


def _rows(page: Page) -> list[str]:
    """The title, and the headings of rows and columns."""
    return [text for element, text in page.texts_of if element in ("th", "strong")]


def _pixels(output: Any) -> tuple[int, int]:
    """Width and height of a PNG."""
    content = base64.b64decode(output.data["image/png"])
    assert content.startswith(_PNG)
    width, height = struct.unpack(">II", content[16:24])
    return width, height


def _shown(output: Any) -> str:
    """All text of an output; of a figure nothing."""
    if output.output_type == "stream":
        return str(output.text)
    return "\n".join(str(value) for kind, value in output.get("data", {}).items() if kind.startswith("text/"))
