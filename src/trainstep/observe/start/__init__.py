"""The folder that PYTHONPATH names in a script's process, for the file that Python imports by its name."""
