"""A real training loop: `loop.py` is the story, the other files are what it uses, one thing each."""
