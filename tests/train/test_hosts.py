"""The command on several hosts: what breaks is named everywhere, and torchrun goes on with what is left, to the bit."""

import re
import shutil
import time
from contextlib import contextmanager

import pytest

from tests.hosts import Hosts
from tests.train.on_hosts import NAME, SETTINGS, TIMEOUT_S, Training, resumed, said
from tests.train.runs import losses, names, updates
from tests.train.test_own import alone, on_rank, own
from tests.workers import Workers

pytestmark = [pytest.mark.hosts, pytest.mark.distributed]


def goes_on_to_the_bit(out, step, again, train):
    """Whether the curve after a restart is that of a run that goes on from the same checkpoint and is left in peace."""
    shutil.copytree(out, again)
    train(own(NAME, **SETTINGS), again, resume_from=f"step-{step:08d}")
    assert len(losses(out)) == SETTINGS["steps"]
    assert losses(again)[step:] == losses(out)[step:]
    assert len(set(losses(out))) == SETTINGS["steps"]


@contextmanager
def training(tmp_path, count, *words, **options):
    with Hosts(count) as hosts:
        yield Training(hosts, tmp_path / "run", *words, **options)


@pytest.mark.thorough
def test_a_host_that_dies_is_named_and_the_other_goes_on_alone(tmp_path):
    with training(tmp_path, 2, least=1) as run:
        run.until(12)
        run.hosts.kill(1)
        code, output = run.ends()
    assert code == 0, output
    # on a busy machine ranks may come together at the second or third attempt only
    told = [each for each in said(output) if not each.startswith("the ranks did not come together")]
    assert len(told) == 1, output
    assert told[0].startswith("rank 1 (host b) does not answer: killed, stopped, hung or cut off; rank 0 was in "), told
    assert re.search(r" no\. \d+ of update \d+ \(ddp\) for \d", told[0])
    (step,) = resumed(output)
    goes_on_to_the_bit(run.out, step, tmp_path / "again", alone)


@pytest.mark.thorough
@pytest.mark.parametrize("what", ["hang", "raise"])
def test_a_rank_that_fails_in_the_users_code_is_named_by_its_line_and_all_start_again(tmp_path, what):
    with training(tmp_path, 2, fault={"what": what, "rank": 1, "update": 90}) as run:
        (code, first), (_, second) = run.ends(0), run.ends(1)
    assert code == 0, first + second
    told = said(first) + said(second)
    assert told
    if what == "hang":
        hung = re.compile(
            r"rank 1 \(host [ab]\) hangs or is late: it is at faulty.py:\d+ \(misbehave\) of update \d+ \(ddp\)"
        )
        assert all(hung.match(each) for each in told), told
        assert len(told) == 2, "the hung one says so when it is ended"
    else:
        assert any("stopped with ArithmeticError: a mistake of one rank's" in each for each in told), told
    (step,) = resumed(first + second)
    with Workers(2) as workers:
        goes_on_to_the_bit(
            run.out, step, tmp_path / "again", lambda *words, **options: workers.run(_go_on, words, options)
        )


def _go_on(process, words, options):
    on_rank(process, *words, **options)


@pytest.mark.thorough
def test_a_host_that_is_ten_times_slower_is_waited_for_and_named_where_that_is_too_long(tmp_path):
    with Hosts(2) as hosts:
        hosts.limit(100)
        hosts.limit(10, [1])
        run = Training(hosts, tmp_path / "run", fault={"what": "slow", "rank": 1, "update": 90, "seconds": 9})
        (code, first), (_, second) = run.ends(0), run.ends(1)
    assert code == 0, first + second
    assert any("hangs or is late: it is at faulty.py:" in each for each in said(first) + said(second))
    assert len(losses(run.out)) == SETTINGS["steps"]


@pytest.mark.thorough
def test_without_the_host_of_the_rendezvous_nothing_goes_on_and_that_is_said(tmp_path):
    with training(tmp_path, 2, least=1) as run:
        run.until(12)
        run.hosts.kill(0)
        sentence = run.says(1, "the store at 10.77.0.1:", seconds=TIMEOUT_S + 15)
        assert re.search(
            r"does not answer, so its host is down .* \(host b\); rank \d was in .* of update \d+", sentence
        )
        time.sleep(5)
        made, there = updates(run.out), names(run.out)
    assert updates(run.out) == made < SETTINGS["steps"]
    assert "step-00000010" in there


@pytest.mark.thorough
def test_of_three_hosts_two_go_on(tmp_path):
    with training(tmp_path, 3, least=2) as run:
        run.until(12)
        run.hosts.pull(2)
        run.says(2, "the store at 10.77.0.1:", seconds=TIMEOUT_S + 15)
        (code, first), (_, second) = run.ends(0), run.ends(1)
    assert code == 0, first
    for each in said(first) + said(second):
        assert re.match(r"rank \d \(host c\) does not answer: ", each), each
    assert resumed(first + second)
