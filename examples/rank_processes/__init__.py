"""Tensor-parallel ranks, each in its own process with an engine; the index is in the scheduler's process.

    messages.py   the messages over the pipes
    rank.py       a rank's process: its share of the model, its KV cache, its engine
    group.py      the scheduler's side: makes the same transfer in all ranks, sees when all have ended, handles deaths
    offload.py    prefixes of conversations: keys and slots from a CacheIndex, transfers through the group

Run ranks_in_processes.py, which uses this. Model, workload and server come from paged_decode.
"""
