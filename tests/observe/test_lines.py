"""Whose code a line is."""

import subprocess
import sys

import pytest

from trainstep.base import errors
from trainstep.ladder.changes import loaders
from trainstep.observe import hooks
from trainstep.observe.lines import owner_of


def test_whose_code_a_file_is():
    assert owner_of(sys.modules["torch"].__file__) == "torch"
    for ours in (errors, hooks, loaders):
        assert owner_of(ours.__file__) == "torch", "trainstep's own is as little the user's, in whichever room"
    assert owner_of(pytest.__file__) == "library"
    assert owner_of(subprocess.__file__) == "python"
    assert owner_of("<frozen runpy>") == "python"
    assert owner_of(__file__) == "user"
