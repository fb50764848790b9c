"""A step under a profiler: its ranges, its kernels, and to which phase and module each kernel belongs."""
