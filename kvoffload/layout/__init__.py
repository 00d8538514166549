"""Where the blocks of a KV cache lie in GPU memory and in host slots. Nothing here touches a device."""
