"""Attention that a script writes out, rewritten in its source as one call of `scaled_dot_product_attention`.

    att = (q @ k.transpose(-2, -1)) * scale
    att = att.masked_fill(hidden, float("-inf"))
    att = self.dropout(F.softmax(att, dim=-1))
    y = att @ v

It is read backwards, from the product with the values. Each name on the way must have got its value in a statement of
the same block, and be read nowhere else in its function, so that these statements can go. A form that is not certain is
left as it is. Whether a mask is causal is what a run has shown: the source alone does not tell.
"""

from __future__ import annotations

import ast
import functools
from collections.abc import Iterator

from trainstep.ladder.patch import end_of_lines, indent_of, lines_of, replaced, statement_at

_LAST_TWO = {"-2, -1", "-1, -2", "2, 3", "3, 2"}
_MINUS_INFINITY = {"float('-inf')", "-float('inf')", "-math.inf", "-torch.inf", "-np.inf", "-inf"}
_LONGEST = 100
"""Columns of a line beyond which each argument gets a line of its own."""


def with_fused_attention(text: str, tree: ast.Module, line: int, how: str) -> str | None:
    """The text with attention in one call; None where it has another form.

    Args:
        line: of the product of probabilities and values.
        how: "is_causal=True", "no mask" or "attn_mask", as a run has shown.
    """
    statement, functional = statement_at(tree, line), _functional(tree)
    if statement is None or functional is None or hasattr(statement, "body"):
        return None
    blocks = (each for node in ast.walk(tree) for each in _blocks(node))
    block = next(each for each in blocks if statement in each)
    before = block[: block.index(statement)]
    found = [(node, _Attention(before, functional)) for node in ast.walk(statement) if isinstance(node, ast.expr)]
    found = [(node, attention) for node, attention in found if attention.is_read(node)]
    if len(found) != 1:
        return None
    node, attention = found[0]
    arguments = attention.arguments(how)
    if arguments is None or not attention.can_go(_function_around(tree, statement), [*before, statement], node):
        return None
    lines, end = lines_of(text), end_of_lines(text)
    indent = indent_of(statement, lines)
    taken = {number for each in attention.used for number in range(each.lineno, (each.end_lineno or 0) + 1)}
    if indent is None or any(_shares_a_line(each, tree) for each in attention.used):
        return None
    call = f"{functional}.scaled_dot_product_attention({', '.join(arguments)})"
    if len(indent) + len(call) > _LONGEST:
        inner = "".join(f"{indent}    {each},{end}" for each in arguments)
        call = f"{functional}.scaled_dot_product_attention({end}{inner}{indent})"
    changed = enumerate(lines_of(replaced(text, node, call)), start=1)  # only lines after those that go are more now
    return "".join(each for number, each in changed if number not in taken)


class _Attention:
    """Attention as statements have it, read from its end."""

    def __init__(self, before: list[ast.stmt], functional: str) -> None:
        self._before, self._functional = before, functional
        self.used: list[ast.stmt] = []
        """Statements that it replaces."""
        self._names = set[str]()
        self._parts: list[ast.expr] = []
        """Expressions that the call has."""
        self._dropped = ""
        self._masks: list[str] = []
        self._scales: list[ast.expr] = []
        self._factors: list[str] = []

    def is_read(self, node: ast.AST) -> bool:
        """True if a node is a product of probabilities and values whose whole way is known."""
        factors = _product(node)
        if factors is None or (scores := self._softmaxed(self._value(factors[0]))) is None:
            return False
        scores = self._value(scores)
        while (masked := self._unmasked(scores)) is not None:
            scores = self._value(masked)
        while isinstance(scores, ast.BinOp) and isinstance(scores.op, ast.Mult | ast.Div):
            right = scores.right
            self._scales.append(
                right if isinstance(scores.op, ast.Mult) else ast.BinOp(ast.Constant(1.0), ast.Div(), right)
            )
            self._parts.append(right)
            scores = self._value(scores.left)
        pair = _product(scores)
        key = None if pair is None else _transposed(pair[1])
        if pair is None or key is None:
            return False
        self._parts += [pair[0], key, factors[1]]
        self._factors = [ast.unparse(each) for each in (pair[0], key, factors[1])]
        return True

    def arguments(self, how: str) -> list[str] | None:
        """Arguments of the call; None where the run has shown another mask than the source has."""
        is_causal = how.startswith("is_causal=True")
        if bool(self._masks) is how.startswith("no mask") or (not is_causal and len(self._masks) > 1):
            return None
        masks = [] if is_causal else [f"attn_mask={each}" for each in self._masks]
        if "attn_mask=" in masks:  # what is filled in there is no infinity
            return None
        dropped = [f"dropout_p={self._dropped}"] if self._dropped else []
        first, *more = [*reversed(self._scales)] or [ast.Constant(1.0)]
        scale = ast.unparse(functools.reduce(lambda product, each: ast.BinOp(product, ast.Mult(), each), more, first))
        return [*self._factors, *masks, *dropped, *["is_causal=True"] * is_causal, f"scale={scale}"]

    def can_go(self, function: ast.AST, through: list[ast.stmt], product: ast.AST) -> bool:
        """True if nobody else reads what the statements compute, and what they read is the same at the product."""
        own = {id(each) for part in (*self.used, product) for each in ast.walk(part)}
        others = [each for each in ast.walk(function) if isinstance(each, ast.Name) and id(each) not in own]
        if any(each.id in self._names and isinstance(each.ctx, ast.Load) for each in others):
            return False
        first = min((through.index(each) for each in self.used), default=len(through))
        between = [each for each in through[first:-1] if each not in self.used]
        read = {each.id for part in self._parts for each in ast.walk(part) if isinstance(each, ast.Name)}
        return not read & {name for each in between for name in _names_set(each)} and not read & self._names

    def _value(self, node: ast.AST | None) -> ast.AST | None:
        """Expression that a name stands for; None where that is not certain."""
        while isinstance(node, ast.Name):
            name = node.id
            at = next((n for n in reversed(range(len(self._before))) if name in _names_set(self._before[n])), None)
            if at is None:
                return None
            statement, self._before = self._before[at], self._before[:at]
            self.used.append(statement)
            self._names.add(name)
            if isinstance(statement, ast.AugAssign):
                node = ast.BinOp(ast.Name(name, ast.Load()), statement.op, statement.value)
            elif isinstance(statement, ast.Assign) and list(map(ast.unparse, statement.targets)) == [name]:
                node = statement.value
            else:
                return None
        return node

    def _softmaxed(self, node: ast.AST | None) -> ast.AST | None:
        """Scores whose softmax a node is, also with dropout after it."""
        if isinstance(node, ast.Call) and "drop" in _called(node) and node.args:
            given = dict(zip(("p", "training", "inplace"), node.args[1:], strict=False))
            given |= {str(each.arg): each.value for each in node.keywords}
            words = {name: _in_brackets(value) for name, value in given.items()}
            of = ast.unparse(node.func)
            if of == f"{self._functional}.dropout":
                words = {"p": "0.5", "training": "True"} | words
            elif not words:
                words = {"p": f"{of}.p", "training": f"{of}.training"}
            if words.keys() != {"p", "training"}:
                return None
            self._parts += [node.func, *given.values()]
            self._dropped = f"{words['p']} if {words['training']} else 0.0"
            node = self._value(node.args[0])
        if (
            not isinstance(node, ast.Call)
            or _called(node) != "softmax"
            or {each.arg for each in node.keywords} - {"dim"}
        ):
            return None
        if node.args and not isinstance(node.args[0], ast.Constant | ast.UnaryOp):
            return node.args[0]
        return node.func.value if isinstance(node.func, ast.Attribute) else None

    def _unmasked(self, node: ast.AST | None) -> ast.AST | None:
        """Scores that a node puts a mask on."""
        if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add):
            self._parts.append(node.right)
            self._masks.append(ast.unparse(node.right))
            return node.left
        if isinstance(node, ast.Call) and _called(node) in ("masked_fill", "masked_fill_") and len(node.args) == 2:
            assert isinstance(node.func, ast.Attribute)
            hidden, fill = node.args
            self._parts.append(hidden)
            self._masks.append(f"~{_in_brackets(hidden)}" if ast.unparse(fill) in _MINUS_INFINITY else "")
            return node.func.value
        return None


def _functional(tree: ast.Module) -> str | None:
    """Name under which a file knows torch.nn.functional."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import | ast.ImportFrom):
            of = f"{node.module}." if isinstance(node, ast.ImportFrom) else ""
            for each in node.names:
                if of + each.name == "torch.nn.functional":
                    return each.asname or each.name
    imports = [each for node in ast.walk(tree) if isinstance(node, ast.Import) for each in node.names]
    return "torch.nn.functional" if any(each.name == "torch" and not each.asname for each in imports) else None


def _product(node: ast.AST | None) -> tuple[ast.expr, ast.expr] | None:
    """Factors of a product of matrices."""
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.MatMult):
        return node.left, node.right
    if isinstance(node, ast.Call) and ast.unparse(node.func) in ("torch.matmul", "torch.bmm") and len(node.args) == 2:
        return node.args[0], node.args[1]
    return None


def _transposed(node: ast.expr) -> ast.expr | None:
    """Expression that is transposed in its last two dimensions."""
    if isinstance(node, ast.Attribute) and node.attr == "mT":
        return node.value
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and _called(node) == "transpose":
        return node.func.value if ", ".join(map(ast.unparse, node.args)) in _LAST_TWO else None
    return None


def _called(call: ast.Call) -> str:
    return call.func.attr if isinstance(call.func, ast.Attribute) else getattr(call.func, "id", "")


def _in_brackets(node: ast.expr) -> str:
    words = ast.unparse(node)
    return words if isinstance(node, ast.Name | ast.Attribute | ast.Call | ast.Constant) else f"({words})"


def _blocks(node: ast.AST) -> Iterator[list[ast.stmt]]:
    """Lists of statements of a node."""
    for _, value in ast.iter_fields(node):
        if isinstance(value, list) and value and isinstance(value[0], ast.stmt):
            yield value


def _function_around(tree: ast.Module, statement: ast.stmt) -> ast.AST:
    """The innermost function with a statement; the module where there is none."""
    kinds = (ast.FunctionDef, ast.AsyncFunctionDef)
    found = [each for each in ast.walk(tree) if isinstance(each, kinds) and statement in ast.walk(each)]
    return max(found, key=lambda each: each.lineno, default=tree)


def _names_set(statement: ast.stmt) -> set[str]:
    return {
        each.id for each in ast.walk(statement) if isinstance(each, ast.Name) and not isinstance(each.ctx, ast.Load)
    }


def _shares_a_line(statement: ast.stmt, tree: ast.Module) -> bool:
    """True if another statement begins or ends in one of its lines."""
    lines = range(statement.lineno, (statement.end_lineno or 0) + 1)
    others = [each for each in ast.walk(tree) if isinstance(each, ast.stmt) and each is not statement]
    return any(each.lineno in lines or (not hasattr(each, "body") and each.end_lineno in lines) for each in others)
