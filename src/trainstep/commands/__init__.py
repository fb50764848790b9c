"""The commands, one dataclass each: what it takes, what it calls, what it prints. Torch is imported when they run."""
