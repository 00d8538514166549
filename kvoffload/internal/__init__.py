"""Helpers for every floor. Nothing here knows of a device.

at_least, shown       checks of arguments, and values in messages            checks.py
Int64Array, ...       names of types                                         types.py
run_all               steps that are all tried, even if one fails            teardown.py
HtmlRepresentation    objects that notebooks show as cards                   representation.py
KeyPatterns           bytes that follow from a key, to verify copies         patterns.py
MODELS, find_model    KV geometries of models                                models.py
cache_folder          files of compiled kernels and measured profiles        cachefiles.py
available_bytes, ...  memory, NUMA nodes and PCIe slots, from /proc, /sys    hostinfo.py
"""
