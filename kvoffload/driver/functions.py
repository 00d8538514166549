"""The CUDA driver functions that kvoffload calls: the whole surface of the seam.

A provider of these names is a *driver API*: `cuda.bindings.driver`, or `kvoffload.simulator`. Both take and
return what `cuda.bindings.driver` does: a tuple whose first element is a `CUresult`.
"""

REQUIRED = (
    # process, device, context
    *("cuInit", "cuDriverGetVersion", "cuDeviceGetCount", "cuDeviceGet", "cuDeviceGetName", "cuDeviceGetAttribute"),
    *("cuDeviceGetPCIBusId", "cuDevicePrimaryCtxRetain", "cuDevicePrimaryCtxRelease", "cuCtxPushCurrent"),
    *("cuCtxPopCurrent", "cuCtxGetCurrent", "cuCtxGetDevice", "cuThreadExchangeStreamCaptureMode"),
    "cuCtxGetStreamPriorityRange",
    # memory
    *("cuMemGetInfo", "cuMemAlloc", "cuMemFree", "cuMemGetAddressRange", "cuPointerGetAttribute"),
    *("cuMemHostRegister", "cuMemHostUnregister"),
    # copies
    *("cuMemcpyHtoD", "cuMemcpyDtoH", "cuMemcpyAsync", "cuMemcpy2DAsync", "cuMemsetD8Async"),
    # streams and events
    *("cuStreamCreateWithPriority", "cuStreamDestroy", "cuStreamQuery", "cuStreamSynchronize", "cuStreamWaitEvent"),
    *("cuStreamIsCapturing", "cuEventCreate", "cuEventDestroy", "cuEventRecord", "cuEventQuery", "cuEventElapsedTime"),
)
KERNELS = (  # all of them, or no kernel is launched
    *("cuModuleLoadData", "cuModuleUnload", "cuModuleGetFunction", "cuFuncGetAttribute", "cuFuncSetAttribute"),
    *("cuLaunchKernel", "cuMemHostGetDevicePointer"),
)
POINTERS = (  # on which GPU memory is that cuMemAlloc did not allocate; see `pointers`
    *("cuMemRetainAllocationHandle", "cuMemGetAllocationPropertiesFromHandle", "cuMemRelease"),
    *("cuDeviceGetDefaultMemPool", "cuDeviceGetMemPool", "cuMemPoolGetAttribute", "cuMemPoolGetAccess"),
)
OPTIONAL = (
    "cuMemcpyBatchAsync",  # CUDA 12.8; the 13.x bindings bind only the 13.0 entry point
    "cuMemcpy3DBatchAsync",  # the same
    "cuStreamWaitValue32",  # stream memory operations: a device attribute says whether they work
    *KERNELS,
    *POINTERS,
)

RAW = (
    "memcpy_batch_async_v2",  # bindings 13.5, cuda.bindings._v2.driver: raw array addresses, returns None and raises
    "memcpy_3d_batch_async_v2",
)
