"""A real training loop: `loop.py` is the whole of it, the other files are what it uses."""
