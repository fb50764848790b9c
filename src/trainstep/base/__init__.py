"""Lists, settings, errors and statistics that every room reads; none imports torch when it is imported."""
