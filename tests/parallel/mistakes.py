"""Mistakes of users, each with a part of the error that it ends in."""

from trainstep.base.errors import UnsupportedError, UsageError


def message(attempt):
    try:
        attempt()
    except (UsageError, UnsupportedError) as error:
        return str(error)
    return "no error"


def told(attempts):
    """(expected, what was said) of every attempt; `attempts` has them by what is expected."""
    return [(expected, message(attempt)) for expected, attempt in attempts.items()]


def check(by_rank):
    """See that every rank was told what it should be."""
    for found in by_rank:
        for expected, said in found:
            assert expected in said, (expected, said)
