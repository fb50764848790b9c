"""GPU kernels (on a CPU: operators) that ran, in which phase and module, for how long, and what they achieved.

Work is told apart by device: what one GPU does hides nothing that another waits for. Transfers between host and device
are not kernels; they stand beside them.

The operator that launched a kernel says whether it is a matrix product or fused attention, whoever wrote the kernel.
Names say the rest, and all where no operator is known: those that cuBLAS, cuDNN, CUTLASS, PyTorch's own CUDA code,
Triton (our kernels and torch.compile's) and NCCL give, and the products of ROCm, TensorRT-LLM and oneDNN. Products on
NVIDIA's GPUs are of two kinds that must not be confused: on tensor cores, and on the ordinary float32 units (`simt`,
`sgemm`, `ffma`), which are an order of magnitude slower.
"""

from __future__ import annotations

import functools
import re
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from operator import attrgetter
from typing import Literal, cast, get_args

from trainstep.base.operators import ATTENTION, FUSED
from trainstep.measure.costs import UNKNOWN_LISTS, Cost, Lists, operator_cost
from trainstep.measure.profile.trace import Placed, Range, Stream, Trace, WorkKind, attribute, owner_of, parents_of

Lane = Literal["compute", "communication", "copies"]
Matmul = Literal["tensor-core matmul", "FP32 SIMT matmul", "matmul"]
"""`matmul` is a CPU's, where there is only one kind, or on units of a GPU that the kernel's name does not tell."""
MATMULS: tuple[Matmul, ...] = get_args(Matmul)
_Maths = Literal["fused attention", "softmax", "normalisation", "elementwise", "reduction", "optimizer"]
Family = Matmul | _Maths | Literal["copy", "transfer", "communication", "CUDA graph", "other"]
TRANSFER: Family = "transfer"
"""Copies between host and device. They are no kernels: no kernel time, and nothing that a better kernel would save."""
GRAPH: Family = "CUDA graph"
"""A whole graph, where the profiler recorded no more of it than when it ran."""

_TRITON_COPIES = "to_copy|copy|clone|unsafe_view|view|transpose|t|permute|expand|cat|slice|unsqueeze|squeeze"
_LIBRARY = "(aten|mkldnn|mkl|onednn)::_?"
# The first pattern found in a name decides, so the order matters: most kernels carry further words in their template
# arguments, and every kernel of PyTorch's that maps elements is an "elementwise_kernel" of something more telling.
_GPU: tuple[tuple[Family, str], ...] = (
    ("communication", r"^nccl|ncclDevKernel|ncclKernel|all_reduce_kernel|allreduce_kernel|all_gather_kernel|nvshmem"),
    ("communication", r"^Memcpy PtoP|^\[CUDA memcpy Peer-to-Peer"),  # from GPU to GPU, by a copy engine
    ("communication", r"symmetric_memory::|^(void )?barrier_kernel|(put|wait)_signal_kernel"),
    (TRANSFER, r"^Memcpy (HtoD|DtoH|HtoH|M2D|D2M)|^\[CUDA memcpy (Host|Device)-to-Host|^\[CUDA memcpy Host-to-"),
    (TRANSFER, r"^Copy(HostToDevice|DeviceToHost)"),  # as ROCm calls them
    ("copy", r"^Memcpy|^Memset|^\[CUDA mem"),
    (GRAPH, r"^CUDA graph \d+$"),
    ("copy", r"multi_tensor_apply_kernel<.*at::native::Copy<"),
    ("optimizer", r"multi_tensor_apply_kernel|FusedAdam|fused_adam|FusedSgd|FusedAdagrad|adamw_kernel|lamb_kernel"),
    ("fused attention", r"flash_(fwd|bwd)|flash::|flash_attn|Flash_(fwd|bwd)|FlashAttn|sdpa_(sm|fprop|bprop|flash)"),
    ("fused attention", r"cudnn.*(sdpa|flash)|flex_attention|mem_eff|attention_kernel_backward_batched|micro_sdpa"),
    ("fused attention", r"(?i)fmha|(paged|unified|ragged|flash)_?attention_|PagedKVCache"),
    ("fused attention", r"^(attn_fwd|_attn_\w+)(\.kd)?$"),
    ("FP32 SIMT matmul", r"simt|ffma|f32f32_f32f32|(ampere|volta|turing|maxwell|pascal|hopper)_(s|d)gemm"),
    ("FP32 SIMT matmul", r"(^|[^a-z])(gemv|gemvN|gemv2[NT]|gemvNSP|gemmSN|gemmk1|dot_kernel|reduce_1Block)|sgemm_\d"),
    ("reduction", r"splitK_?reduce|splitKreduce"),
    ("tensor-core matmul", r"_(h|fp16_s|bf16_s|tf32_?s?)\d*(884|1688|16816)|16816gemm|1688gemm|cutlass.*gemm"),
    ("tensor-core matmul", r"nvjet|wgmma|tensorop|xmma_gemm|[ish]\d{3,5}gemm|bf16gemm|gemm::|Gemm|GemmUniversal"),
    ("tensor-core matmul", r"cutlass_\d+|sm\d+_gemm|cublasLt|triton_tem_\w*(mm|conv)|(^|_)gemm"),
    ("matmul", r"^Cijk_|igemm_|miopen\w*[Cc]onv|naive_conv|\bck(_tile)?::\w*conv|_ZN2ck\w*conv|^gen_conv"),
    ("matmul", r"^bmm_\w*_t\d+x\d+|_matmul_ogs_|^_?(\w+_)?matmul_kernel"),
    ("softmax", r"soft_?max|SoftMax|triton_\w*softmax"),
    ("normalisation", r"layer_?norm|LayerNorm|rms_?norm|RMSNorm|batch_norm|BatchNorm|group_norm|GroupNorm|GammaBeta"),
    ("normalisation", r"RowwiseMoments|cuComputeGradInput|cuComputePartGrad|bn_(fw|bw)|triton_(red|per)_\w*rsqrt"),
    ("copy", r"copy_kernel|CatArrayBatchedCopy|copy_device_to_device|transpose_kernel"),
    ("copy", rf"triton_poi_fused_(_?({_TRITON_COPIES})_)+\d+$"),
    ("reduction", r"reduce_kernel|nll_loss_\w+_reduce|ReduceOp|DeviceReduce|DeviceScan|cub::.*(Reduce|Scan)"),
    ("reduction", r"triton_(red|per)_|segment_reduce"),
    ("elementwise", r"[Ee]lementwise|FillFunctor|triton_(poi|for)_|dropout|masked_fill|triu_tril"),
)
_OPERATORS: tuple[tuple[Family, str], ...] = (
    ("communication", r"^(c10d::|gloo:|nccl:|trainstep_exchanges::)|_c10d_functional"),
    ("copy", r"^aten::_foreach_copy_$"),
    ("optimizer", r"^aten::_(fused_(adam|adamw|sgd|adagrad)_?|foreach_)"),
    ("fused attention", r"scaled_dot_product|(flash|efficient|cudnn|flex|paged|unified)_attention|flash_attn|fmha"),
    ("matmul", rf"^{_LIBRARY}((int|scaled|grouped|scaled_grouped)_)?(mm|addmm|(add|badd)?bmm|matmul|linear)(_out)?$"),
    ("matmul", rf"^{_LIBRARY}(mv|addmv|dot|mkl_linear|addmm_activation|(\w+_)?linear_(pointwise|backward\w*))(_out)?$"),
    ("matmul", rf"^{_LIBRARY}(\w+_)?conv(olution|\d|_transpose|_depthwise|_tbc)\w*$"),
    ("softmax", r"softmax"),
    ("normalisation", r"(layer|rms|batch|group)_norm"),
    ("copy", r"^aten::(copy_|_to_copy|to|clone|contiguous|cat|stack|_reshape_copy|repeat|repeat_interleave)$"),
    ("reduction", r"^aten::(sum|mean|max|min|amax|amin|norm|linalg_vector_norm|logsumexp|argmax|argmin|all|any|var)$"),
    ("reduction", r"^aten::(std|cumsum|prod|nll_loss\w*|cross_entropy_loss)$"),
    ("elementwise", r"^aten::(add|sub|mul|div|pow|exp|log|neg|sqrt|rsqrt|silu|gelu|relu|tanh|sigmoid|sin|cos|abs)_?$"),
    ("elementwise", r"^aten::(where|masked_fill|fill|zero|lerp|addcmul|addcdiv|clamp|reciprocal|tril|triu)_?$"),
    ("elementwise", r"^aten::(bitwise_\w+|logical_\w+|(threshold|silu|gelu|sigmoid|tanh)_backward)_?$"),
    ("elementwise", r"^aten::(ne|eq|lt|gt|le|ge|maximum|minimum|square|dropout|native_dropout)_?$"),
)


@functools.cache
def kernel_family(name: str, operator: str = "") -> Family:
    """The family of a GPU kernel, copy or fill, from its demangled name and the operator that launched it.

    A product may launch helpers, of which sums of split products and copies are told by their names.
    """
    inside = operator_family(operator)
    ours = next((each.kernels[name] for each in (*ATTENTION.values(), *FUSED.values()) if name in each.kernels), None)
    named = _first_found(_GPU, name) if ours is None else cast(Family, ours)
    decides = inside == "matmul" and named not in (*MATMULS, "reduction", "copy", GRAPH)
    return inside if decides or inside == "fused attention" or named == "other" else named


@functools.cache
def operator_family(name: str) -> Family:
    """The family of an operator."""
    return _first_found(_OPERATORS, name)


def _first_found(patterns: Sequence[tuple[Family, str]], name: str) -> Family:
    return next((family for family, pattern in patterns if re.search(pattern, name)), "other")


def short_name(name: str, limit: int = 90) -> str:
    """A kernel's name for tables: without return type, namespaces and arguments, but with what tells kernels apart.

    `void at::native::vectorized_elementwise_kernel<4, at::native::MulFunctor<float>, …>(int, …)` becomes
    `vectorized_elementwise_kernel<4, MulFunctor<float>, …>`. Operators, copies and fills keep their names.
    """
    if re.match(r"Memcpy|Memset|\[CUDA|\w+::\w+$", name):
        return name
    text = re.sub(r"^(void|static|inline) +", "", name.strip())
    text = text.replace("(anonymous namespace)::", "").replace("<unnamed>::", "")
    text = re.sub(r"::operator\(\)\(\) const|::\{lambda\([^{}]*?\)#\d+\}|\((at::)?TensorIterator[^()<>]*\)", "", text)
    text = _without_arguments(text)
    text = re.sub(r"\b(?:[A-Za-z_]\w*::)+", "", text)
    return text if len(text) <= limit else text[: limit - 1] + "…"


def _without_arguments(text: str) -> str:
    depth = 0  # of angle brackets: the arguments begin at the first parenthesis outside of all
    for index, character in enumerate(text):
        if character == "<":
            depth += 1
        elif character == ">":
            depth -= text[index - 1] != "-"
        elif character == "(" and depth == 0 and index > 0:
            return text[:index]
    return text


@dataclass(slots=True)  # not frozen, which takes twice the time to make
class Kernel:
    """A run of one kernel, copy or fill; on a CPU, one stretch of an operator's own time."""

    name: str
    family: Family
    start_us: float
    duration_us: float
    stream: Stream
    lane: Lane
    is_call: bool  # False for further stretches of a call that was counted already
    step: str | None
    phase: str | None
    module: str | None  # also `(loss)` and `(optimizer)`, what no module owns; None where unknown
    piece: str | None
    operator: str | None
    call: int | None = None  # the operator call it belongs to, where its cost is counted; a transfer's own number
    flops: float | None = None  # of the whole call; at one of its kernels only, the longest
    bytes: float | None = None
    kind: WorkKind = "kernel"

    @property
    def end_us(self) -> float:
        return self.start_us + self.duration_us

    @property
    def is_undecided(self) -> bool:
        """True if neither an operator of torch's nor the name tells what it computes."""
        if self.kind != "kernel" or self.family != "other":
            return self.family == GRAPH
        return not ((self.operator or "").startswith("aten::") or "at::native" in self.name)


DURATION = attrgetter("duration_us")


@dataclass(frozen=True)
class KernelProfile:
    """The kernels that one device ran in some whole steps."""

    kernels: tuple[Kernel, ...]  # in the order they started
    steps: int  # how many steps they are of; 1 where the trace has no steps
    has_steps: bool  # whether steps were announced; otherwise all figures are of the whole trace
    is_cpu: bool
    outside_us: float  # time of kernels outside of all steps, which are left out: the preparation of batches
    transfers: tuple[Kernel, ...] = ()  # between host and device, in the order they started
    notes: tuple[str, ...] = ()  # what the trace's reader left out or could not tell, as sentences
    busy_ms: dict[str | None, float] = field(default_factory=dict, compare=False)  # by phase, once it is known

    def per_step_ms(self, kernels: Iterable[Kernel] | None = None) -> float:
        """Milliseconds per step that kernels took, added up."""
        own_us = self.total_us if kernels is None else sum(map(DURATION, kernels))
        return own_us / self.steps / 1e3

    @cached_property
    def total_us(self) -> float:
        """Microseconds of all kernels."""
        return sum(map(DURATION, self.kernels))

    def share(self, known: Callable[[Kernel], bool]) -> float:
        """Share of all kernel time for which something holds."""
        own_us = sum(each.duration_us for each in self.kernels if known(each))
        return own_us / self.total_us if self.total_us else 0.0

    @cached_property
    def by_step(self) -> dict[str | None, list[Kernel]]:
        """Step → its kernels and transfers, in the order they started."""
        found: dict[str | None, list[Kernel]] = {}
        for each in sorted((*self.kernels, *self.transfers), key=lambda each: each.start_us):
            found.setdefault(each.step, []).append(each)
        return found


def profiles_of(trace: Trace, lists: Lists = UNKNOWN_LISTS) -> dict[str, KernelProfile]:
    """Device → its profile, in the order of their names.

    Attributes, classifies and counts the work of a trace; `lists` tells of the optimizer's lists of tensors.
    """
    placed: dict[str, list[Placed]] = {}
    for each in attribute(trace):
        placed.setdefault(_device_name(each[0].stream.owner, is_cpu=trace.is_cpu), []).append(each)
    found = {device: _profile(trace, own, lists) for device, own in placed.items()}
    return dict(sorted(found.items(), key=lambda each: (len(each[0]), each[0])))


def profile_of(trace: Trace, lists: Lists = UNKNOWN_LISTS) -> KernelProfile:
    """The profile of a trace that is of one device, or of none.

    Raises:
        ValueError: it is of several; `profiles_of` tells them apart.
    """
    found = profiles_of(trace, lists)
    if len(found) > 1:
        raise ValueError(f"the trace is of {len(found)} devices: {', '.join(found)}; expected one")
    return next(iter(found.values()), KernelProfile((), 1, False, trace.is_cpu, 0.0, notes=trace.notes))


def _device_name(owner: int | str, *, is_cpu: bool) -> str:
    return f"process {owner}" if is_cpu else f"GPU {owner}" if isinstance(owner, int) else owner


def _profile(trace: Trace, placed: Sequence[Placed], lists: Lists) -> KernelProfile:
    """The profile of one device's work; where none of it is in a step, of all of it."""
    inside = [each for each in placed if each[1].step is not None]
    has_steps = bool(inside)
    inside = inside or list(placed)
    calls, costs = _costs(trace.ranges, inside, lists, is_cpu=trace.is_cpu)
    found = [_kernel(each, trace.ranges, calls.get(index), costs.get(index)) for index, each in enumerate(inside)]
    kernels = tuple(each for each in found if each.family != TRANSFER)
    transfers = tuple(
        replace(each, bytes=work.bytes, call=-1 - index)
        for index, (each, (work, _)) in enumerate(zip(found, inside, strict=True))
        if each.family == TRANSFER
    )
    steps = len({each.step for each in found}) if has_steps else 1
    total, kept = (sum(work.duration for work, _ in group) for group in (placed, inside))
    return KernelProfile(kernels, steps, has_steps, trace.is_cpu, total - kept, transfers, trace.notes)


def _kernel(placed: Placed, ranges: Sequence[Range], call: int | None, cost: Cost | None) -> Kernel:
    work, place = placed
    operator = ranges[place.operator].name if place.operator is not None else None
    family: Family
    if work.kind in ("kernel", "copy"):  # what a copy engine does is told by its own name, not by the operator
        family = kernel_family(work.name, operator or "" if work.kind == "kernel" else "")
    else:
        family = "other" if work.kind in ("compiled", "engine") else operator_family(work.name)
    lane: Lane = "communication" if family == "communication" else "copies" if work.kind == "copy" else "compute"
    what = (work.name, family, work.start, work.duration, work.stream, lane, not work.is_continued)
    where = (place.step, place.phase, owner_of(place), place.piece, operator)
    flops, moved = (cost.flops, cost.bytes) if cost else (None, None)
    return Kernel(*what, *where, call, flops, moved, work.kind)


def _costs(
    ranges: Sequence[Range], placed: Sequence[Placed], lists: Lists, *, is_cpu: bool
) -> tuple[dict[int, int], dict[int, Cost]]:
    """Index of a piece of work → the innermost operator call around it whose cost is known; and → that call's cost.

    A call that launches several kernels has its cost at the longest, so that sums count it once. On a CPU work is
    operators' own time, which belongs to that one alone; one that leaves all it does to others is not counted.
    """
    parents = {
        index: parent if parent is not None and ranges[parent].kind == "operator" else None
        for index, parent in enumerate(parents_of(ranges))
        if ranges[index].kind == "operator"
    }
    cost_of: dict[int | None, Cost | None] = {None: None}  # call → its cost

    def counted_call(call: int | None) -> int | None:
        if call not in cost_of:
            assert call is not None, "no call costs nothing"
            cost_of[call] = operator_cost(ranges[call].name, ranges[call].tensors, lists)
        if call is None or cost_of[call] is not None:
            return call
        return None if is_cpu else counted_call(parents[call])

    found = ((index, counted_call(place.operator)) for index, (_, place) in enumerate(placed))
    calls = {index: call for index, call in found if call is not None}
    # Call → index of its longest work, of several the first.
    by_duration = sorted(calls, key=lambda index: (placed[index][0].duration, -index))
    longest = {calls[index]: index for index in by_duration}
    costs = {call: cost for call in longest if (cost := cost_of[call]) is not None}
    left = _left_to_others(costs, parents) if is_cpu else set()
    calls = {index: call for index, call in calls.items() if call not in left}
    return calls, {longest[call]: cost for call, cost in costs.items() if call not in left}


def _left_to_others(cost_of: Mapping[int, Cost], parents: Mapping[int, int | None]) -> set[int]:
    """The calls whose FLOPs and bytes are all found again in calls that they make."""
    flops: dict[int, float] = defaultdict(float)
    size: dict[int, float] = defaultdict(float)
    for call, cost in cost_of.items():
        outer = parents.get(call)
        while outer is not None:
            flops[outer] += cost.flops or 0
            size[outer] += cost.bytes or 0
            outer = parents.get(outer)
    told = ((call, cost.flops or 0, cost.bytes or 0) for call, cost in cost_of.items())
    return {call for call, own, moved in told if size[call] and flops[call] >= own and size[call] >= moved}
