"""Small matrices on several threads are no faster, and on a busy machine much slower."""

from tests.parallel.conftest import one_thread as one_thread
