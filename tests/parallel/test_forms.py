"""Which form collectives take for which backend and device; and the way through the host's memory, forced on a CPU."""

from contextlib import contextmanager

import pytest
import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import Backend, BackendConfig

from tests.parallel import test_collectives, test_ddp
from tests.parallel.fsdp import test_hybrid
from tests.parallel.fsdp.training import CASES, assert_same, train_cases
from tests.parallel.nets import train_alone
from tests.parallel.training import OPTIMIZERS, differing, reference
from tests.parallel.zero import test_hybrid as test_zero_hybrid
from tests.parallel.zero import test_optimizer
from trainstep.base.errors import UsageError
from trainstep.measure.collectives import recorded_collectives
from trainstep.parallel import forms
from trainstep.parallel.collectives import all_reduce_mean, all_to_all, broadcast
from trainstep.parallel.forms import FORMS, Form, form_of, host_waits
from trainstep.parallel.staged import Staged, to_host

CPU, GPU = torch.device("cpu"), torch.device("cuda", 0)


class StandIn:
    """A group as far as the choice asks it, by what `init_process_group` is given."""

    def __init__(self, backend):
        self._backends = BackendConfig(Backend(backend)).get_device_backend_map()
        self._device_types = [torch.device(each) for each in self._backends]
        self.asked = []

    def _get_backend(self, device):
        self.asked.append(device.type)
        return self

    def name(self):
        return self._backends[self.asked[-1]]


@pytest.mark.parametrize(
    ("backend", "device", "form", "waits"),
    [
        ("gloo", CPU, Form.HOST, True),
        ("gloo", GPU, Form.STAGED, True),
        ("nccl", GPU, Form.LISTS, False),
        ("cpu:gloo,cuda:nccl", CPU, Form.HOST, True),
        ("cpu:gloo,cuda:nccl", GPU, Form.LISTS, False),
        ("cpu:gloo,cuda:gloo", GPU, Form.STAGED, True),
    ],
)
def test_the_form_follows_backend_and_device_and_is_chosen_once(backend, device, form, waits):
    group = StandIn(backend)
    assert form_of(group, device) is form
    assert host_waits(group, torch.device(device.type, 0)) is waits
    assert group.asked == [device.type, *(["cpu"] if form is Form.STAGED else [])]


def _refused(process):
    found = []
    for backend, device in (("cpu:gloo", GPU), ("cuda:gloo", GPU), ("fake", CPU)):
        group = dist.new_group(backend=backend)
        with pytest.raises(UsageError) as caught:
            form_of(group, device)
        found.append(str(caught.value))
    return found


@pytest.mark.distributed
def test_what_has_no_form_is_an_error_that_says_what_has(two):
    for no_backend, no_copies, unknown in two.run(_refused):
        assert "no backend for cuda tensors (it has cpu:gloo)" in no_backend
        assert "no backend for cpu tensors (it has cuda:gloo)" in no_copies
        assert "has fake for cpu tensors" in unknown
        for message in (no_backend, no_copies, unknown):
            assert "gloo for cpu tensors, nccl for cuda tensors, gloo for cuda tensors" in message


@contextmanager
def _forced():
    """Everything over Gloo is staged, in every group."""
    before = FORMS["gloo", "cpu"]
    FORMS["gloo", "cpu"] = Form.STAGED
    forms._chosen.clear()
    try:
        yield
    finally:
        FORMS["gloo", "cpu"] = before
        forms._chosen.clear()


def staged(process, function, *arguments):
    with _forced():
        assert form_of(process.group, CPU) is Form.STAGED
        return function(process, *arguments)


class Staging:
    """Workers whose collectives are staged."""

    def __init__(self, workers):
        self._workers = workers
        self.world_size = workers.world_size

    def run(self, function, *arguments):
        return self._workers.run(staged, function, *arguments)


@pytest.mark.distributed
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
def test_staged_collectives_give_what_they_say(four, dtype):
    size = 24 * dtype.itemsize
    for calls in test_collectives.check(Staging(four), dtype):
        assert calls[0] == ("all-reduce", 1, size, dtype), "packed here"
        assert calls[1:3] == [("reduce-scatter", 2, size, dtype), ("all-gather", 2, size, dtype)]


def _sent(process, device):
    """What `broadcast` and `all_to_all` make on this rank, and who has waited for what."""
    rank, ranks = process.rank, process.world_size
    number = torch.tensor([rank + 1j, -rank], device=device)
    is_last = torch.tensor([[rank == ranks - 1]] * 3, device=device)
    for tensor in (number, is_last):
        broadcast(tensor, ranks - 1, process.group).wait()
    send = torch.arange(ranks * 3, dtype=torch.bfloat16, device=device).view(ranks, 3) + 10 * rank
    receive = torch.zeros_like(send)
    call = all_to_all(receive, send, process.group)
    before = receive.tolist()
    call.wait()
    again = receive.tolist()
    receive.zero_()
    call.wait()
    assert not receive.any(), "waited for once, nothing is copied a second time"
    return number.tolist(), is_last.tolist(), before, again


def check_sent(by_rank):
    ranks = len(by_rank)
    for rank, (number, is_last, before, received) in enumerate(by_rank):
        assert number == [ranks - 1 + 1j, 1 - ranks]
        assert is_last == [[True]] * 3
        assert received == [[10 * other + 3 * rank + each for each in range(3)] for other in range(ranks)]
        assert before == [[0] * 3] * ranks, "nothing comes back before it is waited for"


@pytest.mark.distributed
def test_staged_broadcast_and_all_to_all(four):
    check_sent(four.run(staged, _sent, CPU))


def _kinds(process):
    tensors = [torch.ones(3), torch.ones(2, 2)]
    found = [type(all_reduce_mean(tensors, process.group))]
    with _forced(), recorded_collectives() as calls:
        call = all_reduce_mean(tensors, process.group)
        found.append(type(call))
        call.wait()
    return found, [call.tensors for call in calls]


@pytest.mark.distributed
def test_between_cpus_an_all_reduce_is_staged_by_force_alone(two):
    for (plain, forced), tensors in two.run(_kinds):
        assert plain is not Staged
        assert forced is Staged
        assert tensors == [1]


def test_copies_lie_side_by_side_in_the_order_of_their_memory():
    memory, parts = to_host([torch.arange(3.0), torch.zeros(0), torch.arange(5.0, 7.0)])
    assert memory.tolist() == [0, 1, 2, 5, 6]
    assert [part.tolist() for part in parts] == [[0, 1, 2], [], [5, 6]]
    assert parts[2].data_ptr() == memory[3:].data_ptr()


@pytest.mark.distributed
@pytest.mark.parametrize("scheme", test_ddp.SCHEMES)
@pytest.mark.parametrize("name", ["Uneven", "Transposed", "Mixed", "Branches"])
def test_staged_ddp_trains_like_one_process(two, name, scheme):
    first, second = two.run(staged, test_ddp.train, name, "AdamW", scheme)
    assert not differing(first, reference(name, "AdamW", 2))
    assert not differing(second, first)


@pytest.mark.distributed
@pytest.mark.parametrize("scattered", [False, True], ids=["all-reduce", "reduce-scatter"])
@pytest.mark.parametrize("name", ["Plain", "Mixed", "Unused"])
def test_staged_sharded_optimizer_trains_like_one_process(two, name, scattered):
    first, second = two.run(staged, test_optimizer.train, name, *OPTIMIZERS["AdamW"], scattered)
    assert not differing(first, reference(name, "AdamW", 2))
    assert not differing(second, first)


@pytest.mark.distributed
def test_staged_fsdp_trains_as_one_process_bit_for_bit(two):
    names = ["tied", "frozen", "bfloat16", "float16"]
    by_rank = two.run(staged, train_cases, [CASES[name] for name in names])
    for name, found, other in zip(names, *by_rank, strict=True):
        options, how, dtype = CASES[name]
        assert_same(found, train_alone(options, how, 4, ranks=2, dtype=dtype), name)
        assert_same(other, found, name)


@pytest.mark.distributed
def test_staged_hybrids_change_no_bit(four):
    names = ["tied", "bfloat16"]
    plain = four.run(test_hybrid._train_cases, (2, 2), names)
    for rank, cases in enumerate(four.run(staged, test_hybrid._train_cases, (2, 2), names)):
        for name, (found, losses, _), (expected, expected_losses, _) in zip(names, cases, plain[rank], strict=True):
            assert_same(found, expected, name)
            assert losses == expected_losses
    for scattered in (False, True):
        arguments = (test_zero_hybrid._train, (2, 2), scattered, None, 0.05)
        for found, expected in zip(four.run(staged, *arguments), four.run(*arguments), strict=True):
            for name in test_zero_hybrid.NAMES:
                assert not differing(found[name][0], expected[name][0]), name
