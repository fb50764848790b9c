"""Attention on a GPU that other processes use too, where kernels are interrupted half-way and resumed."""

import subprocess
import sys

import pytest

PROCESSES, TIMES = 3, 10

# Many programs of dK and dV, of few steps each: interruptions then fall into every part of a program.
WORK = """
import torch
from trainstep.attention import flash_attention

torch.use_deterministic_algorithms({deterministic})
torch.manual_seed(0)
q = torch.randn(1, 4, 70, {head_dim}, device="cuda", dtype=torch.bfloat16, requires_grad=True)
k = torch.randn(1, 4, 1_000_000, {head_dim}, device="cuda", dtype=torch.bfloat16, requires_grad=True)
v = torch.randn_like(k, requires_grad=True)
do = torch.randn_like(q)

def results():
    o = flash_attention(q, k, v)
    return o, *torch.autograd.grad(o, (q, k, v), do)

first = results()
for _ in range({times}):
    o, dq, dk, dv = results()
    assert all(map(torch.equal, (o, dk, dv), (first[0], *first[2:])))
    if {deterministic}:
        assert torch.equal(dq, first[1])
    else:
        assert (dq - first[1]).float().norm() <= torch.finfo(dq.dtype).eps * first[1].float().norm()
"""


@pytest.mark.gpu
@pytest.mark.parametrize("head_dim", [64, 128, 256])
@pytest.mark.parametrize("deterministic", [False, True], ids=["default", "deterministic"])
def test_processes_that_share_a_gpu_get_the_same_every_time(head_dim: int, deterministic: bool) -> None:
    command = [sys.executable, "-c", WORK.format(head_dim=head_dim, times=TIMES, deterministic=deterministic)]
    processes = [subprocess.Popen(command, stderr=subprocess.PIPE, text=True) for _ in range(PROCESSES)]
    errors = [process.communicate(timeout=300)[1] for process in processes]
    assert [process.returncode for process in processes] == [0] * PROCESSES, errors
