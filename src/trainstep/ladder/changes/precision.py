"""Products in fewer digits: TF32, and autocast to bf16."""

from __future__ import annotations

import ast
import functools
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from trainstep.base import advice
from trainstep.base.advice import Line
from trainstep.base.config import StepConfig
from trainstep.base.precision import PRECISIONS
from trainstep.ladder.change import UNCALLED, Change, Settings
from trainstep.ladder.patch import (
    Files,
    Writer,
    end_of_lines,
    imports_torch,
    indent_of,
    inserted,
    lines_of,
    statement_at,
)
from trainstep.ladder.trial.trial import Trial

if TYPE_CHECKING:
    from trainstep.step.workload import WorkloadSource


def _keeps_float32(source: WorkloadSource, base: StepConfig) -> bool:
    return not PRECISIONS[base.precision].is_stored_half


def tf32(trial: Trial) -> None:
    """Products of float32 on TF32 units."""
    import torch

    torch.set_float32_matmul_precision("high")


def _sets_products(settings: Settings) -> str:
    set_to = settings["matmul"]
    return f'the script sets it itself: float32 products are at "{set_to}"' if set_to != "highest" else ""


def _write_tf32(files: Files, place: Mapping[str, Any]) -> bool:
    """After the imports that begin with or before torch's."""

    def change(text: str, tree: ast.Module) -> str | None:
        imports = [number for number, each in enumerate(tree.body) if imports_torch(each)]
        if not imports:
            return None
        last = imports[0]
        while last + 1 < len(tree.body) and isinstance(tree.body[last + 1], (ast.Import, ast.ImportFrom)):
            last += 1
        return inserted(text, tree.body[last].end_lineno or 0, ["", TF32.line.code])

    return files.edit(place["file"], change)


TF32 = Change(
    "TF32 matmuls",
    advice.TF32,
    {"script": 2.9, "cuda": 2.9},
    answers=("kernels.float32-products", "utilisation.high-fp32"),
    step={"precision": "tf32"},
    step_if=_keeps_float32,
    script=tf32,
    why_not=_sets_products,
    where=("cuda",),
    precision="tf32",
    write=Writer(lambda settings, script: [{"file": str(script.resolve()), "line": 0}], _write_tf32),
)


def bf16_autocast(trial: Trial) -> None:
    """Every model that is called in training runs under autocast, and its floating-point results are float32."""
    import torch
    from torch.utils._pytree import tree_map_only

    def change(module: Any) -> None:
        forward, device = module.forward, next(module.parameters()).device.type

        @functools.wraps(forward)
        def cast(*args: Any, **kwargs: Any) -> Any:
            with torch.autocast(device, torch.bfloat16):
                result = forward(*args, **kwargs)
            return tree_map_only(
                torch.Tensor, lambda each: each.float() if each.dtype == torch.bfloat16 else each, result
            )

        module.forward = cast

    trial.on_first_call.append(change)


def _is_narrow(settings: Settings) -> str:
    if not settings["models"]:
        return UNCALLED
    if settings["autocast"]:
        return f"the script sets it itself: autocast to {' and '.join(settings['autocast'])}"
    half = {name for model in settings["models"] for name in model["dtypes"]} - {"float32"}
    return f"its weights are {' and '.join(sorted(half))}" if half else ""


def _write_autocast(files: Files, place: Mapping[str, Any]) -> bool:
    """Around the statement that calls the model, if it is a simple one; tensors that it then has are float32 again."""

    def change(text: str, tree: ast.Module) -> str | None:
        statement = statement_at(tree, place["line"])
        simple = (ast.Assign, ast.AnnAssign, ast.AugAssign, ast.Expr)
        if not isinstance(statement, simple) or not any(map(imports_torch, tree.body)):
            return None
        lines, end, first, last = lines_of(text), end_of_lines(text), statement.lineno, statement.end_lineno or 0
        indent = indent_of(statement, lines)
        if indent is None or _spans_lines(statement) or sum(map(len, lines[:last])) > len(text):
            return None
        if any(each is not statement and _shares_line(each, first, last) for each in ast.walk(tree)):
            return None
        own = [line.lstrip("\f") for line in lines[first - 1 : last]]  # which starts the indentation anew
        indented = "".join(f"    {line}" if line.strip() else line for line in own)
        if not indented.endswith(("\r", "\n")):
            indented += end
        header = f'{indent}with torch.autocast("{place["device"]}", torch.bfloat16):{end}'
        widened = [f"{indent}{name} = {name}.float(){end}" for name in _narrow_names(statement, place["floats"])]
        return "".join([*lines[: first - 1], header, indented, *widened, *lines[last:]])

    return files.edit(place["file"], change)


def _narrow_names(statement: ast.stmt, floats: Sequence[bool] | None) -> list[str]:
    """The names that a statement gives to floating-point results of the one call in it, which autocast narrows.

    Args:
        floats: of each result whether it is such a tensor; None where it is something else than a tensor or several.
    """
    calls = sum(isinstance(each, ast.Call) for each in ast.walk(statement))
    if floats is None or calls != 1 or not isinstance(statement, ast.Assign) or len(statement.targets) != 1:
        return []
    (target,) = statement.targets
    names = target.elts if isinstance(target, (ast.Tuple, ast.List)) else [target]
    if not isinstance(statement.value, ast.Call) or len(names) != len(floats):
        return []
    return [name.id for name, is_float in zip(names, floats, strict=True) if is_float and isinstance(name, ast.Name)]


def _spans_lines(statement: ast.stmt) -> bool:
    """True if a text in it goes over several lines, which another indentation would change."""
    texts = (ast.Constant, ast.JoinedStr)
    return any(isinstance(each, texts) and each.lineno != each.end_lineno for each in ast.walk(statement))


def _shares_line(node: ast.AST, first: int, last: int) -> bool:
    """True if a statement begins or ends on one of these lines, beside one that has them to itself."""
    return isinstance(node, ast.stmt) and (first <= node.lineno <= last or node.end_lineno == first)


BF16 = Change(
    "bf16 autocast",
    Line("with torch.autocast(device.type, torch.bfloat16):", "around the model's call; .float() on what it returns"),
    {"script": 1.9, "cuda": 1.9, "cpu": 1.1},
    answers=("kernels.float32-products", "utilisation.high-fp32", "utilisation.high-tf32"),
    step={"precision": "bf16"},
    step_if=_keeps_float32,
    script=bf16_autocast,
    why_not=_is_narrow,
    precision="bf16",
    write=Writer(lambda settings, script: settings["models"], _write_autocast),
)
