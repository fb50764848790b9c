"""The fastest implementation of forward + backward, measured: written by `measure_choice.measure`, not by hand.

(architecture, dtype, head_dim, causal) → (from this length on, implementation), ascending.
"""

FASTEST: dict[tuple[str, str, int, bool], tuple[tuple[int, str], ...]] = {}
