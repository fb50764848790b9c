"""Which GPU kernels (on a CPU: operators) ran, in which phase and module, for how long, and what they achieved.

And how much of a step's communication computation hides, by the times of its kernels. Communication is NCCL's kernels
and copies from GPU to GPU; on a CPU, Gloo's threads while a collective runs, and the c10d operators that start one. It
includes waiting for late ranks. Computation is all else that the device does, copies within it included; on a CPU not
the engine's own time, in which hooks wait for collectives. So, from the first kernel's start to the last one's end,

    span = computation + exposed communication + idle,    communication = hidden + exposed.

Kernels are told by their names: those that cuBLAS, cuDNN, CUTLASS, PyTorch's own CUDA code, Triton (our kernels and
torch.compile's) and NCCL give them. Matrix products are of two kinds that must not be confused: on tensor cores, and on
the ordinary float32 units (`simt`, `sgemm`, `ffma`), which are an order of magnitude slower.
"""

from __future__ import annotations

import functools
import itertools
import math
import re
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, get_args

from trainstep.measure.flops import UNKNOWN_LISTS, Cost, Lists, operator_cost
from trainstep.measure.profile.trace import Placed, Range, Stream, Trace, WorkKind, attribute, owner_of, parents_of

Lane = Literal["compute", "communication", "copies"]
Matmul = Literal["tensor-core matmul", "FP32 SIMT matmul", "matmul"]
"""`matmul` is a CPU's, where there is only one kind."""
MATMULS: tuple[Matmul, ...] = get_args(Matmul)
_Maths = Literal["fused attention", "softmax", "normalisation", "elementwise", "reduction", "optimizer"]
Family = Matmul | _Maths | Literal["copy", "communication", "other"]

_OUR_KERNELS = {f"{each}_kernel" for each in ["forward", "delta", "dq", "dkdv", "backward", "prepare_dq", "finish_dq"]}

_TRITON_COPIES = "to_copy|copy|clone|unsafe_view|view|transpose|t|permute|expand|cat|slice|unsqueeze|squeeze"
_CPU_LIBRARY = "(aten|mkldnn|mkl|onednn)::_?"
# The first pattern found in a name decides, so the order matters: most kernels carry further words in their template
# arguments, and every kernel of PyTorch's that maps elements is an "elementwise_kernel" of something more telling.
_GPU: tuple[tuple[Family, str], ...] = (
    ("communication", r"^nccl|ncclDevKernel|ncclKernel|all_reduce_kernel|allreduce_kernel|all_gather_kernel|nvshmem"),
    ("communication", r"^Memcpy PtoP|^\[CUDA memcpy Peer-to-Peer"),  # from GPU to GPU, by a copy engine
    ("communication", r"symmetric_memory::|^(void )?barrier_kernel|(put|wait)_signal_kernel"),
    ("copy", r"^Memcpy|^Memset|^\[CUDA mem"),
    ("optimizer", r"multi_tensor_apply_kernel|FusedAdam|fused_adam|FusedSgd|FusedAdagrad|adamw_kernel|lamb_kernel"),
    ("fused attention", r"flash_(fwd|bwd)|flash::|flash_attn|Flash_(fwd|bwd)|FlashAttn|sdpa_(sm|fprop|bprop|flash)"),
    ("fused attention", r"cudnn.*(sdpa|flash)|flex_attention|fmha|mem_eff|attention_kernel_backward_batched"),
    ("fused attention", r"^(flash_attention_\w+|attn_fwd|_attn_\w+)$"),
    ("FP32 SIMT matmul", r"simt|ffma|f32f32_f32f32|(ampere|volta|turing|maxwell|pascal|hopper)_(s|d)gemm"),
    ("FP32 SIMT matmul", r"(^|[^a-z])(gemv|gemvN|gemv2[NT]|gemvNSP|gemmSN|gemmk1|dot_kernel|reduce_1Block)|sgemm_\d"),
    ("reduction", r"splitK_?reduce|splitKreduce"),
    ("tensor-core matmul", r"_(h|fp16_s|bf16_s|tf32_?s?)\d*(884|1688|16816)|16816gemm|1688gemm|cutlass.*gemm"),
    ("tensor-core matmul", r"nvjet|wgmma|tensorop|xmma_gemm|[ish]\d{3,5}gemm|bf16gemm|gemm::|Gemm|GemmUniversal"),
    ("tensor-core matmul", r"cutlass_\d+|sm\d+_gemm|cublasLt|triton_tem_\w*(mm|conv)|(^|_)gemm"),
    ("softmax", r"soft_?max|SoftMax|triton_\w*softmax"),
    ("normalisation", r"layer_?norm|LayerNorm|rms_?norm|RMSNorm|batch_norm|BatchNorm|group_norm|GroupNorm|GammaBeta"),
    ("normalisation", r"RowwiseMoments|cuComputeGradInput|cuComputePartGrad|bn_(fw|bw)|triton_(red|per)_\w*rsqrt"),
    ("copy", r"copy_kernel|CatArrayBatchedCopy|copy_device_to_device|transpose_kernel"),
    ("copy", rf"triton_poi_fused_(_?({_TRITON_COPIES})_)+\d+$"),
    ("reduction", r"reduce_kernel|nll_loss_\w+_reduce|ReduceOp|DeviceReduce|DeviceScan|cub::.*(Reduce|Scan)"),
    ("reduction", r"triton_(red|per)_|segment_reduce"),
    ("elementwise", r"elementwise_kernel|elementwise|FillFunctor|triton_(poi|for)_|dropout|masked_fill|triu_tril"),
)
_CPU: tuple[tuple[Family, str], ...] = (
    ("communication", r"^(c10d::|gloo:|nccl:)|_c10d_functional"),
    ("optimizer", r"^aten::_(fused_(adam|adamw|sgd|adagrad)_?|foreach_)"),
    ("fused attention", r"scaled_dot_product|flash_attention|efficient_attention|flex_attention"),
    ("matmul", rf"^{_CPU_LIBRARY}(mm|addmm|bmm|baddbmm|matmul|linear|addbmm|mv|addmv|dot|mkl_linear)(_out)?$"),
    ("matmul", rf"^{_CPU_LIBRARY}(linear_pointwise|mkldnn_convolution|conv\w*|_convolution|convolution\w*)(_out)?$"),
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
    """The family of a GPU kernel, copy or fill, from its demangled name and the operator that launched it."""
    if re.search(r"(flash|efficient|cudnn)_attention|scaled_dot_product", operator) or name in _OUR_KERNELS:
        return "fused attention"
    return _first_found(_GPU, name)


@functools.cache
def operator_family(name: str) -> Family:
    """The family of an operator on a CPU."""
    return _first_found(_CPU, name)


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


@dataclass(frozen=True, slots=True)
class Kernel:
    """One run of one kernel, copy or fill; on a CPU, one stretch of an operator's own time."""

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
    call: int | None = None  # the operator call it belongs to, where that call's cost is counted
    flops: float | None = None  # of the whole call; at one of its kernels only, the longest
    bytes: float | None = None
    kind: WorkKind = "kernel"

    @property
    def end_us(self) -> float:
        return self.start_us + self.duration_us


@dataclass(frozen=True)
class KernelProfile:
    """The kernels of some whole steps."""

    kernels: tuple[Kernel, ...]  # in the order they started
    steps: int  # how many steps they are of; 1 where the trace has no steps
    has_steps: bool  # whether steps were announced; otherwise all figures are of the whole trace
    is_cpu: bool
    outside_us: float  # time of kernels outside of all steps, which are left out: the preparation of batches

    def per_step_ms(self, kernels: Iterable[Kernel] | None = None) -> float:
        """Milliseconds per step that kernels took, added up."""
        return sum(each.duration_us for each in (self.kernels if kernels is None else kernels)) / self.steps / 1e3

    def share(self, known: Callable[[Kernel], bool]) -> float:
        """Share of all kernel time for which something holds."""
        total = sum(each.duration_us for each in self.kernels)
        return sum(each.duration_us for each in self.kernels if known(each)) / total if total else 0.0

    def hidden_ms(self) -> float:
        """Milliseconds per step of communication while something is computed."""
        hidden = (overlap_of(self.of_step(name)).hidden for name in self.step_names)
        return sum(map(length, hidden)) / self.steps / 1e3

    def of_step(self, step: str | None) -> list[Kernel]:
        return [each for each in self.kernels if each.step == step]

    @property
    def step_names(self) -> list[str | None]:
        return list(dict.fromkeys(each.step for each in self.kernels))


def profile_of(trace: Trace, lists: Lists = UNKNOWN_LISTS) -> KernelProfile:
    """Attribute, classify and count the work of a trace; `lists` tells of the optimizer's lists of tensors."""
    placed = attribute(trace)
    has_steps = any(each.kind == "step" for each in trace.ranges)
    inside = [each for each in placed if each[1].step is not None or not has_steps]
    calls, costs = _costs(trace.ranges, inside, lists, is_cpu=trace.is_cpu)
    kernels = [_kernel(each, trace.ranges, calls.get(index), costs.get(index)) for index, each in enumerate(inside)]
    steps = len({each.step for each in kernels}) if has_steps else 1
    total, kept = (sum(work.duration for work, _ in group) for group in (placed, inside))
    return KernelProfile(tuple(kernels), max(1, steps), has_steps, trace.is_cpu, total - kept)


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


def busy_us(kernels: Iterable[Kernel]) -> float:
    """Time in which at least one of the kernels ran, streams laid over one another."""
    return length(union((each.start_us, each.end_us) for each in kernels))


@dataclass(frozen=True)
class Gap:
    start_us: float
    duration_us: float
    before: Kernel  # the one that ended it


def gaps(kernels: Sequence[Kernel]) -> list[Gap]:
    """All stretches between the first and the last kernel in which none ran, the longest first."""
    ordered = sorted(kernels, key=lambda each: each.start_us)
    ends = itertools.accumulate((each.end_us for each in ordered), max)
    found = (Gap(end, each.start_us - end, each) for end, each in zip(ends, ordered[1:], strict=False))
    return sorted((gap for gap in found if gap.duration_us > 0), key=lambda gap: -gap.duration_us)


@dataclass(frozen=True)
class Overlap:
    """Unions of spans in microseconds."""

    computation: Sequence[Span]
    communication: Sequence[Span]

    @property
    def hidden(self) -> list[Span]:
        """Communication while something is computed."""
        return intersection(self.communication, self.computation)

    @property
    def exposed(self) -> list[Span]:
        """Communication while nothing is computed."""
        return difference(self.communication, self.computation)

    @property
    def idle_us(self) -> float:
        """Time between the first kernel's start and the last one's end in which neither runs."""
        return self.span_us - length(union([*self.computation, *self.communication]))

    @property
    def span_us(self) -> float:
        """From the first kernel's start to the last one's end."""
        both = union([*self.computation, *self.communication])
        return both[-1][1] - both[0][0] if both else 0.0


def overlap_of(kernels: Iterable[Kernel]) -> Overlap:
    """The computation and the communication of one step on one device."""
    found: dict[bool, list[Span]] = {True: [], False: []}
    for each in kernels:
        if each.kind != "engine":
            found[each.lane == "communication"].append((each.start_us, each.end_us))
    return Overlap(union(found[False]), union(found[True]))


Span = tuple[float, float]  # (start, end). A sorted sequence of spans that neither overlap nor touch is a union


def union(spans: Iterable[Span]) -> list[Span]:
    """The same points as a union; empty spans are gone."""
    merged: list[Span] = []
    for start, end in sorted(span for span in spans if span[0] < span[1]):
        if merged and start <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(merged[-1][1], end))
        else:
            merged.append((start, end))
    return merged


def intersection(first: Sequence[Span], second: Sequence[Span]) -> list[Span]:
    """The points that both have. Both are unions."""
    shared: list[Span] = []
    i = j = 0
    while i < len(first) and j < len(second):
        start, end = max(first[i][0], second[j][0]), min(first[i][1], second[j][1])
        if start < end:
            shared.append((start, end))
        ends_first = first[i][1] <= second[j][1]
        i, j = i + ends_first, j + (not ends_first)
    return shared


def difference(first: Sequence[Span], second: Sequence[Span]) -> list[Span]:
    """The points that the first has and the second has not. Both are unions."""
    bounds = [-math.inf, *itertools.chain(*second), math.inf]
    return intersection(first, list(zip(bounds[::2], bounds[1::2], strict=True)))


def length(spans: Sequence[Span]) -> float:
    """How long the spans of a union are together."""
    return sum(end - start for start, end in spans)
