"""A run of a script for its ladder, from inside the script's process: seeds, the changes that a task names, and what
the run is checked by.

`script` has a `Trial` (`trial`) where its task says so. It looks for models before they are first called,
notes what the script sets itself (`settings`), and leaves gradients, losses and weights on disk (`capture`).
"""
