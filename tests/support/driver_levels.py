"""What drivers and bindings can do: the combinations that tests run on."""

from __future__ import annotations

# (driver version, bindings version): no batch calls, with a fail index, entry points missing, full, raw addresses
LEVELS = {
    "driver12.4-bindings12.9": ((12, 4), (12, 9)),
    "driver12.8-bindings12.9": ((12, 8), (12, 9)),
    "driver12.8-bindings13.3": ((12, 8), (13, 3)),
    "driver13.0-bindings13.3": ((13, 0), (13, 3)),
    "driver13.0-bindings13.5": ((13, 0), (13, 5)),
}
