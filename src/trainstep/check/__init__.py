"""Right or wrong, and by how much: steps, scripts, ranks, attention and fused operators beside their references."""
