"""Where the blocks of a KV cache lie in GPU memory and in host slots. Nothing here touches a device.

Plane, Group      a device tensor indexed by block; planes that share a block table       planes.py
KVLayout          the groups, and the slot that holds their blocks                        layout.py
fold              planes that one strided copy covers                                     fold.py
as_ids            a caller's block ids, copied and checked                                ids.py
dtype_name        one spelling for each type of elements                                  dtypes.py
plane_of_view     arrays of CuPy, JAX, PyTorch, ... as planes                             arrays.py, dlpack.py
"""
