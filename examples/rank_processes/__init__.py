"""Tensor-parallel ranks in processes of their own: the index in the scheduler's process, an engine in each rank's.

    messages.py   what travels over the pipes
    rank.py       a rank's process: its share of the model, its KV cache, its engine
    group.py      the scheduler's side of all ranks: the same transfer for each, one end of it, ranks that die
    offload.py    prefixes of conversations: keys and slots from a CacheIndex, transfers through the group

Used by ranks_in_processes.py, which is to be run; the model, the workload and the server are those of paged_decode.
"""
