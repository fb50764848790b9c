"""trainstep."""
