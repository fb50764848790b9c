"""Memory that fits itself: what activations weigh and cost, what is chosen for each block, and what came of it."""
