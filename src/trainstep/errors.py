"""The one exception that means "the user can mend this".

It is a `ValueError`, so library callers catch it as usual. The command line prints its message alone, without a
traceback, and exits with 2; every other exception is a fault of ours and keeps its traceback.
"""


class UsageError(ValueError):
    """Bad input: the message says what came, what was expected and what to do."""
