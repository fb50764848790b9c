"""Odd models and odd ways to train them: what data parallel wrappers are held to, each beside one process."""
