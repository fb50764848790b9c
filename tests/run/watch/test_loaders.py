"""What is said of the loaders that a script took batches from, and of how long it waited for them."""

from trainstep.run.watch.loaders import main_loader, share_of_waiting


def test_the_loader_that_most_batches_came_from_is_the_one_that_is_named():
    found = [
        {"line": "train.py:3", "workers": 0, "is_pinned": False, "batches": 2},
        {"line": "train.py:9", "workers": 2, "is_pinned": True, "batches": 30},
    ]
    assert main_loader(found) == "train.py:9, 2 workers, memory pinned"
    assert main_loader(found[:1]) == "train.py:3, no workers, memory not pinned"
    assert main_loader([]) is None


def test_what_share_of_a_run_waits_for_data_is_the_devices_where_there_is_one():
    host = {"data": 5.0, "other": 5.0}
    steps = [{"host": {"data": 99.0}}, {"host": host, "device": {"data": 1.0, "other": 9.0}}, {"host": host}]
    assert share_of_waiting(steps) == 0.3
    assert share_of_waiting([{"host": {"other": 1.0}}] * 2) == 0.0
    assert share_of_waiting(steps[:1]) is None
