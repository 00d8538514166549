"""One pool of host memory, and one index of what it holds, for the engines of a host."""
