"""Triton kernels without PyTorch: compiled for a compute capability, kept in the cache folder, loaded and launched.

    KernelSpec      names a kernel and its constants                            compiler.py
    why_not         the reason why a device can launch no kernel, or None       loader.py
    load_kernel     a LoadedKernel, from the cache folder or from Triton        loader.py, compiler.py
    compile_kernel  machine code and PTX; needs neither a GPU nor a driver      compiler.py

The kernels themselves are in modules of their own (pack.py, compute.py), which import Triton and so are
imported by name, when they are compiled. A kernel in the cache folder is loaded without Triton.
"""

from kvoffload.kernels.compiler import THREADS_PER_WARP, Compiled, KernelSpec, compile_kernel
from kvoffload.kernels.loader import LoadedKernel, load_kernel, why_not

__all__ = ["THREADS_PER_WARP", "Compiled", "KernelSpec", "LoadedKernel", "compile_kernel", "load_kernel", "why_not"]
