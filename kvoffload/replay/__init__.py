"""`kvoffload replay`: a trace or synthetic traffic through the cache.

command     the parser and the result                                                      command.py
trace       reads a trace: JSON lines with `hash_ids`                                      trace.py
workloads   synthetic traffic                                                              workloads.py
verified    a cache with bytes, every loaded byte verified; several requests at a time     verified.py, overlap.py
metadata    hits of each policy and capacity, without bytes                                metadata.py, hitplot.py
belady      the most hits that any cache of a capacity can have                            belady.py
saving      the prefill time that hits save                                                saving.py
"""
