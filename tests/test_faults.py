"""Faults come, are said, and lose nothing: ten of the campaign's, and what it draws and judges."""

from collections import Counter

import pytest

from tools.trust.faults import FEWER, KINDS, SCHEMES, drawn, lost, suffer


def test_a_seed_draws_every_kind_and_scheme():
    faults = drawn(30, 19)
    assert faults == drawn(30, 19) != drawn(30, 20)
    kinds, schemes = Counter(each.kind for each in faults), Counter(each.scheme for each in faults)
    assert set(kinds) == set(KINDS)
    assert set(schemes) == set(SCHEMES)
    assert max(kinds.values()) - min(kinds.values()) <= 1
    assert max(schemes.values()) - min(schemes.values()) <= 1
    assert all(each.rank < 2 * each.ranks_each for each in faults)


def test_what_is_lost():
    assert lost([3.0, 2.0, 1.0], [3.0, 2.0, 1.0], is_on_fewer=False) == 0
    assert lost([3.0, 2.0], [3.0, 2.0, 1.0], is_on_fewer=True) == 1
    assert lost([3.0, 2.0, 1.0 + 1e-7], [3.0, 2.0, 1.0], is_on_fewer=False) == 1
    assert lost([3.0, 2.0, 1.0 + 1e-7], [3.0, 2.0, 1.0], is_on_fewer=True) == 0
    assert lost([3.0, 2.0, 1.0 + 1e-4], [3.0, 2.0, 1.0], is_on_fewer=True) == 1


@pytest.mark.hosts
@pytest.mark.distributed
@pytest.mark.thorough
@pytest.mark.parametrize("fault", drawn(10, 7), ids=lambda fault: f"{fault.kind}-{fault.scheme}")
def test_a_fault_is_said_and_nothing_is_lost(fault):
    found = suffer(fault)  # which looks at what was said, too
    assert found.lost == 0
    assert found.said_s < 30
    assert found.again > 0 or fault.kind == "two" or fault.kind in FEWER
