"""What names in a script stand for: imports, what a variable was bound to, and which tests ask for a rank."""

from __future__ import annotations

import ast
import re
from bisect import bisect_left, bisect_right
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Literal

Side = Literal["first", "others", "some", "rest"]
"""Who passes a test: rank 0, all but rank 0, a set of ranks, or those outside that set."""

OPPOSITE: Mapping[Side, Side] = {"first": "others", "others": "first", "some": "rest", "rest": "some"}

ELEMENT = -1
"""The index of a binding to each element in turn: `for x in value`."""

# What a snippet without its imports means by a name.
_USUAL = {
    "dist": "torch.distributed",
    "dcp": "torch.distributed.checkpoint",
    "DDP": "torch.nn.parallel.DistributedDataParallel",
    "FSDP": "torch.distributed.fsdp.FullyShardedDataParallel",
    "FullyShardedDataParallel": "torch.distributed.fsdp.FullyShardedDataParallel",
    "DistributedDataParallel": "torch.nn.parallel.DistributedDataParallel",
    "fully_shard": "torch.distributed.fsdp.fully_shard",
    "F": "torch.nn.functional",
    "nn": "torch.nn",
    "np": "numpy",
    "sw": "shardwise",
    "hvd": "horovod.torch",
    "deepspeed": "deepspeed",
}
_RANK = re.compile(r"(^|_)rank$", re.IGNORECASE)
_LOCAL = re.compile(r"local_?rank$|^local_process_index$", re.IGNORECASE)
_MAIN = re.compile(
    r"^_?(is_)?(local_)?(world_)?(main|master|global_zero|rank_?(zero|0)|process_zero|chief)(_process|_rank|_node)?$"
    r"|^is_(main|master|rank_?(zero|0))\w*$"
)
_RANK_CALLS = {"get_rank", "local_rank", "get_local_rank", "get_node_local_rank", "get_ordinal", "get_global_rank"}
_SCOPES = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef, ast.Lambda)
Function = ast.FunctionDef | ast.AsyncFunctionDef


def dotted(node: ast.AST | None) -> str:
    """`self.model.layers` of the expression that spells it, "" of any other.

    >>> dotted(ast.parse("a.b.c").body[0].value)
    'a.b.c'
    """
    if isinstance(node, ast.Name):
        return node.id
    inner = dotted(node.value) if isinstance(node, ast.Attribute) else ""
    return f"{inner}.{node.attr}" if isinstance(node, ast.Attribute) and inner else ""


def spread(tree: ast.AST) -> None:
    """Give each statement of a line (`a(); b()`) a line of its own: rules tell by lines what comes first.

    `line_of` and `end_of` are the lines in the file.
    """
    statements = [node for node in ast.walk(tree) if isinstance(node, ast.stmt)]
    starts = sorted((node.lineno, node.col_offset) for node in statements)
    later = [after for before, after in zip(starts, starts[1:], strict=False) if before[0] == after[0]]
    for node in ast.walk(tree) if later else ():
        if isinstance(node, ast.stmt | ast.expr | ast.arg | ast.keyword | ast.excepthandler | ast.alias):
            node.__dict__["line"], node.__dict__["end"] = node.lineno, node.end_lineno
            node.lineno += bisect_right(later, (node.lineno, node.col_offset))
            if node.end_lineno is not None and node.end_col_offset is not None:
                node.end_lineno += bisect_left(later, (node.end_lineno, node.end_col_offset))


def line_of(node: ast.AST) -> int:
    """The line of the file in which a node begins."""
    return int(getattr(node, "line", getattr(node, "lineno", 0)))


def end_of(node: ast.AST) -> int:
    """The line of the file in which a node ends."""
    return int(getattr(node, "end", getattr(node, "end_lineno", None)) or line_of(node))


def last(name: str) -> str:
    """The last word of a dotted name."""
    return name.rpartition(".")[2]


def own_nodes(node: ast.AST) -> Iterator[ast.AST]:
    """All nodes below one, without the bodies of functions and classes defined there."""
    for child in ast.iter_child_nodes(node):
        yield child
        if not isinstance(child, _SCOPES):
            yield from own_nodes(child)


def constant(node: ast.AST | None) -> object:
    """The value of a literal (`-1` too), None of anything else."""
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub) and isinstance(node.operand, ast.Constant):
        value = node.operand.value
        return -value if isinstance(value, int | float) else None
    return node.value if isinstance(node, ast.Constant) else None


def aliases(tree: ast.AST) -> dict[str, str]:
    """Local name -> full name, of every import in a file and of what snippets leave out."""
    names = dict(_USUAL)
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                root = alias.name.split(".")[0]
                names[alias.asname or root] = alias.name if alias.asname else root
        elif isinstance(node, ast.ImportFrom):
            for alias in node.names:
                names[alias.asname or alias.name] = f"{node.module or ''}.{alias.name}".strip(".")
    return names


@dataclass(frozen=True, kw_only=True)
class Binding:
    """One assignment: the value, its scope, the line from which it holds, the tests it stands under."""

    line: int
    value: ast.expr | None
    scope: Scope
    index: int | None = None
    """Which element of a tuple on the right."""
    tests: tuple[ast.expr, ...] = ()
    marks: frozenset[str] = frozenset()
    """Kinds that a call gave to it in place."""


@dataclass(eq=False)
class Scope:
    """A module, class or function, and what its names are bound to."""

    node: ast.AST
    parent: Scope | None = None
    bindings: dict[str, list[Binding]] = field(default_factory=dict)
    functions: dict[str, Scope] = field(default_factory=dict)

    @property
    def owner(self) -> Scope | None:
        """The class whose method this is, or encloses this."""
        if isinstance(self.node, ast.ClassDef):
            return self
        return self.parent.owner if self.parent else None

    @property
    def name(self) -> str:
        """The function's or class's name; "" of a module."""
        return getattr(self.node, "name", "")

    def find_function(self, name: str) -> Scope | None:
        """The function of the file that a call of `name` or `self.name` means; a class stands for its `__init__`."""
        if name.startswith("self."):
            found = self.owner.functions.get(name[5:]) if self.owner else None
        else:
            here: Scope | None = self
            while here and (isinstance(here.node, ast.ClassDef) or name not in here.functions):
                here = here.parent
            found = here.functions.get(name) if here else None
        if found and isinstance(found.node, ast.ClassDef):
            return found.functions.get("__init__")
        return found

    def find(self, name: str, line: int | None = None) -> list[Binding]:
        """What a name may be bound to: in this function the last ones before the line, else wherever it is bound.

        Going back from the line, the search ends at the first assignment that stands under no test.
        """
        here: Scope | None = self
        while here:
            if here is self or not isinstance(here.node, ast.ClassDef):
                own = here.bindings.get(name, [])
                if here is self and line is not None:
                    own = _until_certain([b for b in own if b.line <= line])
                if own:
                    return own
            here = here.parent
        if name.startswith("self.") and self.owner:
            methods = self.owner.functions.values()
            return [binding for method in methods for binding in method.bindings.get(name, ())]
        return []


def _until_certain(bindings: list[Binding]) -> list[Binding]:
    kept: list[Binding] = []
    for binding in sorted(bindings, key=lambda b: b.line, reverse=True):
        kept.append(binding)
        if not binding.tests and not binding.marks:
            break
    return kept


class Ranks:
    """Which expressions are ranks, and who passes a test."""

    def __init__(self, names: Mapping[str, str]) -> None:
        self._names = names

    def kind(self, node: ast.expr | None, scope: Scope, depth: int = 0) -> str:
        """`"global"`, `"local"`, `"rank"` (by its name only), or "" of what is no rank."""
        if node is None or depth > 4:
            return ""
        environment = _environment_name(node)
        if environment:
            return "local" if _LOCAL.search(environment) else "global" if _RANK.search(environment) else ""
        if isinstance(node, ast.Call):
            return self._kind_of_call(node, scope, depth)
        name = dotted(node)
        if not name or name == "self":
            return ""
        bound = [b for b in scope.find(name, getattr(node, "lineno", None)) if b.value is not None]
        if any(b.index == ELEMENT for b in bound):
            return ""  # `for rank in range(world_size)` runs over all of them
        kinds = {self.kind(b.value, b.scope, depth + 1) for b in bound if b.index is None}
        if kinds - {""}:
            return "local" if "local" in kinds else "global" if "global" in kinds else "rank"
        if any(b.index is None and isinstance(b.value, ast.Constant | ast.BinOp) for b in bound):
            return "local" if any(isinstance(b.value, ast.BinOp) for b in bound) and _RANK.search(last(name)) else ""
        if _LOCAL.search(last(name)):
            return "local"
        return "rank" if _RANK.search(last(name)) or last(name) == "process_index" else ""

    def _kind_of_call(self, node: ast.Call, scope: Scope, depth: int) -> str:
        name = dotted(node.func)
        if name in ("int", "str") and node.args:
            return self.kind(node.args[0], scope, depth + 1)
        if last(name) in _RANK_CALLS or (last(name) == "rank" and not node.args):
            return "local" if "local" in last(name) else "global"
        return ""

    def side(self, test: ast.expr, scope: Scope, depth: int = 0) -> Side | None:
        """Who passes a test; None where it does not ask for a rank."""
        if depth > 4:
            return None
        if isinstance(test, ast.UnaryOp) and isinstance(test.op, ast.Not):
            inner = self.side(test.operand, scope, depth + 1)
            return OPPOSITE[inner] if inner else None
        if isinstance(test, ast.BoolOp):
            sides = {side for value in test.values if (side := self.side(value, scope, depth + 1))}
            return (sides.pop() if len(sides) == 1 else "some") if sides else None
        if isinstance(test, ast.Compare) and len(test.ops) == 1:
            return self._side_of_comparison(test, scope)
        if self.kind(test, scope) and not _environment_name(test):  # a variable's text is true, "0" too
            return "others"
        if isinstance(test, ast.BinOp) and any(self.kind(n, scope) for n in (test.left, test.right)):
            return "some"
        return self._side_of_name(test, scope, depth)

    def _side_of_name(self, test: ast.expr, scope: Scope, depth: int) -> Side | None:
        name = dotted(test.func if isinstance(test, ast.Call) else test)
        if not name:
            return None
        if _MAIN.match(last(name)) or (last(name) == "is_first" and "mesh" in name.split(".")[-2:-1]):
            return "first"
        if isinstance(test, ast.Call):
            function = scope.find_function(name)
            returned = [r.value for r in own_nodes(function.node) if isinstance(r, ast.Return)] if function else []
            sides = {self.side(value, function, depth + 1) for value in returned if value and function}
        else:
            bound = scope.find(name, getattr(test, "lineno", None))
            sides = {self.side(b.value, b.scope, depth + 1) for b in bound if b.value is not None and b.index is None}
        known = sides - {None}
        return known.pop() if len(known) == 1 else None

    def _side_of_comparison(self, test: ast.Compare, scope: Scope) -> Side | None:
        left, op, right = test.left, test.ops[0], test.comparators[0]
        if not self.kind(left, scope) and self.kind(right, scope) and isinstance(op, ast.Eq | ast.NotEq):
            left, right = right, left
        if not self.kind(left, scope):
            inside = [n for n in ast.walk(left) if isinstance(n, ast.expr) and n is not left]
            computed = isinstance(left, ast.BinOp) and any(self.kind(n, scope) for n in inside)
            return "some" if computed else None
        value = constant(right)
        if isinstance(right, ast.Constant) and not isinstance(value, int):
            return None  # None, or a text
        if isinstance(right, ast.List | ast.Tuple | ast.Set):
            numbers = {constant(element) for element in right.elts}
            named: Side | None = "first" if numbers in ({0}, {-1, 0}) else "some"
        elif value == -1 and isinstance(op, ast.Eq | ast.NotEq | ast.Gt):
            return None  # "started by no launcher", the same everywhere
        elif value == 0 and isinstance(op, ast.Gt):
            return "others"
        else:
            named = "first" if value == 0 or (value == 1 and isinstance(op, ast.Lt)) else "some"
        if isinstance(op, ast.GtE) and value == 0:
            return None
        return OPPOSITE[named] if isinstance(op, ast.NotEq | ast.NotIn | ast.IsNot) and named else named


def _environment_name(node: ast.AST) -> str:
    """The variable that `os.environ["X"]`, `os.environ.get("X")`, `os.getenv("X")` read."""
    if isinstance(node, ast.Subscript) and last(dotted(node.value)) == "environ":
        return str(constant(node.slice))
    if isinstance(node, ast.Call) and node.args:
        name = dotted(node.func)
        if name.endswith("environ.get") or last(name) == "getenv":
            return str(constant(node.args[0]))
    return ""
