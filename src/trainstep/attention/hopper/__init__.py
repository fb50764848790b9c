"""The same three kernels for Hopper in Gluon, with explicit warp roles, for 16-bit inputs."""
