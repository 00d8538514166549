"""A model with a paged KV cache, conversations that need more blocks than the device has, and what becomes of them.

    model.py         the layers of a small transformer, for numpy, CuPy and JAX alike
    workload.py      synthetic conversations; which of them has which device blocks
    server.py        what is where, what is loaded when, what waits for what; what a framework has to do for that
    shared_store.py  two processes over one store: one computes and puts blocks there, the other continues
    timeline.py      when computations and transfers ran, and a figure of it
    report.py        the modes one after the other; whether all logits are the same bits; tokens a second

Shared by cupy_paged_decode.py and jax_paged_decode.py, which are to be run.
"""
