"""Sections that are not in their subjects yet (interim)."""
