"""The seam: the CUDA driver functions that kvoffload calls, and nothing else.

`Driver` is the one class that talks to a driver API. Behind it stands `cuda.bindings.driver` or the simulator, which
offers the same names, argument types and return tuples; `functions` lists them. Only this package imports
cuda.bindings.
"""

from kvoffload.driver.capabilities import Capabilities, probe
from kvoffload.driver.core import Current, Driver, make_current
from kvoffload.driver.cuda import binding_types
from kvoffload.driver.tables import FlatTable, SourceOrder, StridedTable, address_of

__all__ = [
    "Capabilities", "Current", "Driver", "FlatTable", "SourceOrder", "StridedTable", "address_of", "binding_types",
    "make_current", "probe",
]  # fmt: skip
