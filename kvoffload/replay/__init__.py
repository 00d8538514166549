"""`kvoffload replay`: a trace or synthetic traffic through the cache.

command     the options, and a replay with bytes                                     command.py
report      a replay without bytes: tables, JSON and a figure                        report.py, hitplot.py
trace       reads a trace: JSON lines with `hash_ids`                                trace.py
workloads   synthetic traffic                                                        workloads.py
hits        hits of a host pool and of tiers below it; the most that are possible    hits.py
saving      the prefill time that hits save                                          saving.py
verified    a cache with bytes, every loaded byte verified                           verified.py
"""
