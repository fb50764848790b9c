"""Which kernels run: those with explicit warp roles on Hopper for 16-bit inputs, the portable ones everywhere else."""

import torch
from torch import Tensor

from trainstep.attention.triton import dkdv as portable_dkdv
from trainstep.attention.triton import dq as portable_dq
from trainstep.attention.triton import forward as portable_forward
from trainstep.attention.triton.schedule import four_dims
from trainstep.attention.triton.tuning import hopper_tile_for, tile_for


def launch_forward(q: Tensor, k: Tensor, v: Tensor, is_causal: bool, scale: float) -> tuple[Tensor, Tensor]:
    """Checked inputs of any number of dimensions, scale > 0 → o in q's shape, lse (q.shape[:-1], float32)."""
    shape = q.shape
    q, k, v = four_dims(q), four_dims(k), four_dims(v)
    o = torch.empty_like(q)
    lse = torch.empty(q.shape[:-1], dtype=torch.float32, device=q.device)
    if runs_hopper_kernels(q):
        from trainstep.attention.triton.hopper import forward as hopper_forward

        q, k, v = map(for_copy_engine, (q, k, v))
        tile = hopper_tile_for("forward", q.shape[-1], is_causal)
        hopper_forward.launch_forward(q, k, v, o, lse, is_causal, scale, tile)
    else:
        portable_forward.launch_forward(q, k, v, o, lse, is_causal, scale, tile_for("forward", q, is_causal))
    return o.reshape(shape), lse.reshape(shape[:-1])


def launch_backward(
    q: Tensor, k: Tensor, v: Tensor, o: Tensor, lse: Tensor, do: Tensor, is_causal: bool, scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    """What `launch_forward` took and returned, and do (q's shape) → dq, dk, dv in the inputs' shapes and dtype."""
    q_shape, k_shape = q.shape, k.shape
    q, k, v, o, do = (four_dims(t) for t in (q, k, v, o, do))
    lse = lse.reshape(q.shape[:-1]).contiguous()
    dq, dk, dv = torch.empty_like(q), torch.empty_like(k), torch.empty_like(v)
    if runs_hopper_kernels(q):
        from trainstep.attention.triton.hopper import dkdv as hopper_dkdv
        from trainstep.attention.triton.hopper import dq as hopper_dq

        q, k, v, do = map(for_copy_engine, (q, k, v, do))
        dq_tile, dkdv_tile = (hopper_tile_for(kernel, q.shape[-1], is_causal) for kernel in ("dq", "dkdv"))
        stat = hopper_dq.launch_dq(q, k, v, o, lse, do, dq, is_causal, scale, dq_tile)
        hopper_dkdv.launch_dkdv(q, k, v, stat, do, dk, dv, is_causal, scale, dkdv_tile)
    else:
        dq_portable, dkdv_portable = (tile_for(kernel, q, is_causal) for kernel in ("dq", "dkdv"))
        delta = portable_dq.launch_dq(q, k, v, o, lse, do, dq, is_causal, scale, dq_portable)
        portable_dkdv.launch_dkdv(q, k, v, lse, delta, do, dk, dv, is_causal, scale, dkdv_portable)
    return dq.reshape(q_shape), dk.reshape(k_shape), dv.reshape(k_shape)


def runs_hopper_kernels(q: Tensor) -> bool:
    """Whether the Hopper kernels take these inputs; up to head_dim 32 their tiles would be mostly padding."""
    return q.dtype != torch.float32 and q.shape[-1] > 32 and torch.cuda.get_device_capability(q.device) == (9, 0)


def for_copy_engine(t: Tensor) -> Tensor:
    """`t`, or a copy with rows that the copy engine can address: 16-byte aligned, none shared by a stride of 0."""
    unit = 16 // t.element_size()
    if t.data_ptr() % 16 == 0 and all(stride % unit == 0 and stride > 0 for stride in t.stride()[:-1]):
        return t
    head_dim = t.shape[-1]
    padded = t.new_empty((*t.shape[:-1], -(-head_dim // unit) * unit))[..., :head_dim]
    return padded.copy_(t)
