"""Changes that find their own places in a script: calls that are recognised as it runs, and what takes their place."""
