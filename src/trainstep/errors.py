"""The exceptions that mean "the user can mend this".

They are `ValueError`s, so library callers catch them as usual. The command line prints their message alone, without a
traceback, and exits with 2; every other exception is a fault of ours and keeps its traceback.
"""


class UsageError(ValueError):
    """Bad input: the message says what came, what was expected and what to do."""


class UnsupportedError(UsageError):
    """Sound input that this machine, or this combination, cannot run. A grid records it as a row and goes on."""
