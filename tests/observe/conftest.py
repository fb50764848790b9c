"""What one process is to a script: nothing was compiled in it before."""

import sys

import pytest


@pytest.fixture(autouse=True)
def _nothing_compiled():
    if "torch._dynamo.utils" in sys.modules:
        sys.modules["torch._dynamo.utils"].clear_compilation_metrics()
