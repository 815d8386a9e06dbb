"""A script as its rules see it: every call with the tests, loops and contexts around it, and what variables hold."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

from shardwise.diagnose.linting.names import (
    ELEMENT,
    OPPOSITE,
    Binding,
    Function,
    Ranks,
    Scope,
    Side,
    aliases,
    constant,
    dotted,
    last,
    own_nodes,
    spread,
)

Loop = ast.For | ast.AsyncFor | ast.While
_DISTRIBUTED = (
    "torch.distributed",
    "torch.nn.parallel",
    "torch.utils.data.distributed",
    "accelerate",
    "deepspeed",
    "horovod",
    "lightning",
    "pytorch_lightning",
    "torch_xla",
    "transformers.Trainer",
    "transformers.Seq2SeqTrainer",
    "trl.SFTTrainer",
    "shardwise",
    "ray.train",
)
_ONLY_FIRST = ("rank_zero_only", "on_main_process", "on_local_main_process", "main_process_only", "rank0_only")
_EXITS = {"exit", "sys.exit", "os._exit", "quit"}


@dataclass(frozen=True)
class Guard:
    """A test on the rank that stands before a statement, and who passes."""

    test: ast.AST
    side: Side


@dataclass(frozen=True, kw_only=True)
class Site:
    """One call in its place."""

    node: ast.Call
    name: str
    """The full name: aliases of imports are resolved."""
    scope: Scope
    guards: tuple[Guard, ...]
    tests: tuple[ast.expr, ...]
    """Other tests around it, outermost first."""
    loops: tuple[Loop, ...]
    contexts: tuple[ast.expr, ...]

    @property
    def line(self) -> int:
        """The first line of the call, as `spread` counts."""
        return self.node.lineno

    def argument(self, index: int, name: str) -> ast.expr | None:
        """An argument by position or by name; position -1: by name only."""
        for keyword in self.node.keywords:
            if keyword.arg == name:
                return keyword.value
        plain = [arg for arg in self.node.args if not isinstance(arg, ast.Starred)]
        return plain[index] if 0 <= index < len(plain) else None


@dataclass(frozen=True)
class _Around:
    scope: Scope
    guards: tuple[Guard, ...] = ()
    tests: tuple[ast.expr, ...] = ()
    loops: tuple[Loop, ...] = ()
    contexts: tuple[ast.expr, ...] = ()


class Script:
    """A parsed file: `sites` in order, `kinds` of expressions, who reaches what.

    Args:
        tree: the file.
        text: its text, for comments.
    """

    def __init__(self, tree: ast.Module, text: str) -> None:
        self.tree, self.text = tree, text
        spread(tree)
        self.aliases = aliases(tree)
        self.ranks = Ranks(self.aliases)
        self.root = Scope(tree)
        self.scopes = [self.root]
        self.sites: list[Site] = []
        self._declare(tree, self.root, ())
        self._walk(tree.body, _Around(self.root))
        self._bind_parameters()

    @cached_property
    def is_distributed(self) -> bool:
        """True where anything says that several processes run this file."""
        roots = {last(root) if "." not in root else root for root in self.aliases.values()}
        imported = any(r == d or r.startswith(f"{d}.") for r in self._imported for d in _DISTRIBUTED)
        calls = any(site.name.startswith(_DISTRIBUTED) for site in self.sites)
        return imported or calls or bool(roots & set(_DISTRIBUTED) & self._imported)

    @cached_property
    def _imported(self) -> set[str]:
        names: set[str] = set()
        for node in ast.walk(self.tree):
            if isinstance(node, ast.Import):
                names |= {alias.name for alias in node.names}
            elif isinstance(node, ast.ImportFrom) and node.module:
                names |= {node.module} | {f"{node.module}.{alias.name}" for alias in node.names}
        return names

    def imports(self, *roots: str) -> bool:
        """True where the file imports one of these packages."""
        return any(name == root or name.startswith(f"{root}.") for name in self._imported for root in roots)

    def full_name(self, node: ast.AST | None) -> str:
        """A dotted name with its import resolved."""
        name = dotted(node)
        root, dot, rest = name.partition(".")
        return f"{self.aliases[root]}{dot}{rest}" if root in self.aliases else name

    def called(self, *names: str) -> list[Site]:
        """The calls whose last word is one of these."""
        return [site for site in self.sites if last(site.name) in names]

    def function_of(self, site: Site) -> Scope | None:
        """The function of this file that a call means."""
        return site.scope.find_function(dotted(site.node.func))

    # ------------------------------------------------------------ names

    def _declare(self, node: ast.AST, scope: Scope, tests: tuple[ast.expr, ...]) -> None:
        """Scopes and bindings, in the order of the file."""
        for child in ast.iter_child_nodes(node):
            if isinstance(child, Function | ast.ClassDef):
                inner = Scope(child, scope)
                scope.functions[child.name] = inner
                self.scopes.append(inner)
                self._declare(child, inner, ())
                continue
            self._bind(child, scope, tests)
            self._declare(child, scope, (*tests, child.test) if isinstance(child, ast.If) else tests)

    def _bind(self, node: ast.AST, scope: Scope, tests: tuple[ast.expr, ...]) -> None:
        if isinstance(node, ast.Assign):
            for target in node.targets:
                self._bind_target(target, node.value, scope, tests, is_statement=True)
        elif isinstance(node, ast.AnnAssign | ast.NamedExpr) and node.value is not None:
            is_statement = isinstance(node, ast.AnnAssign)
            self._bind_target(node.target, node.value, scope, tests, is_statement=is_statement)
        elif isinstance(node, ast.withitem) and node.optional_vars is not None:
            self._bind_target(node.optional_vars, node.context_expr, scope, tests, is_statement=False)
        elif isinstance(node, ast.For | ast.AsyncFor | ast.comprehension):
            line = node.iter.lineno
            for name in {dotted(n) for n in ast.walk(node.target)} - {""}:
                bound = Binding(line=line, value=node.iter, scope=scope, index=ELEMENT, tests=tests)
                scope.bindings.setdefault(name, []).append(bound)

    def _bind_target(
        self, target: ast.expr, value: ast.expr, scope: Scope, tests: tuple[ast.expr, ...], *, is_statement: bool
    ) -> None:
        line = (value.end_lineno or target.lineno) + is_statement  # in `x = f(x)` the second x is the one before
        if isinstance(target, ast.Tuple | ast.List):
            same = isinstance(value, ast.Tuple | ast.List) and len(value.elts) == len(target.elts)
            for index, element in enumerate(target.elts):
                part = value.elts[index] if same and isinstance(value, ast.Tuple | ast.List) else value
                binding = Binding(line=line, value=part, scope=scope, index=None if same else index, tests=tests)
                scope.bindings.setdefault(dotted(element), []).append(binding)
        elif dotted(target):
            binding = Binding(line=line, value=value, scope=scope, tests=tests)
            scope.bindings.setdefault(dotted(target), []).append(binding)

    def _bind_parameters(self) -> None:
        """What callers in this file hand over, and what calls do to their arguments in place."""
        for site in self.sites:
            function = self.function_of(site)
            if function and isinstance(function.node, Function):
                names = [a.arg for a in (*function.node.args.posonlyargs, *function.node.args.args)]
                names = names[1:] if names[:1] == ["self"] else names
                handed = [*zip(names, site.node.args, strict=False)]
                handed += [(k.arg, k.value) for k in site.node.keywords if k.arg]
                for name, value in handed:
                    binding = Binding(line=0, value=value, scope=site.scope, tests=site.tests)
                    function.bindings.setdefault(name, []).append(binding)
            mark = {"fully_shard": "fsdp2", "parallelize_module": "tp"}.get(last(site.name))
            if mark and site.node.args:
                for name in self.sharded_names(site.node.args[0], site):
                    site.scope.bindings.setdefault(name, []).append(
                        Binding(line=site.line, value=None, scope=site.scope, tests=site.tests, marks=frozenset({mark}))
                    )

    def sharded_names(self, argument: ast.expr, site: Site) -> Iterator[str]:
        """The argument's name, and the model's where the argument runs over its layers."""
        name = dotted(argument)
        if name:
            yield name
        for loop in site.loops:
            if isinstance(loop, ast.While) or not any(dotted(n) == name for n in ast.walk(loop.target)):
                continue
            for node in ast.walk(loop.iter):
                owner = dotted(node).rpartition(".")[0]
                if isinstance(node, ast.Attribute) and owner and owner != "self":
                    yield owner

    # ------------------------------------------------------------ walking

    def _walk(self, body: list[ast.stmt], around: _Around) -> tuple[Guard, ...]:
        """Visit statements in order; give the guards of what follows after ranks have left the function here."""
        left: tuple[Guard, ...] = ()
        for statement in body:
            left += self._statement(statement, _with(around, guards=left))
        return left

    def _statement(self, node: ast.stmt, around: _Around) -> tuple[Guard, ...]:
        if isinstance(node, Function | ast.ClassDef):
            self._expressions(node.decorator_list, around)
            scope = next(s for s in self.scopes if s.node is node)
            only = [d for d in node.decorator_list if last(dotted(d)) in _ONLY_FIRST]
            self._walk(node.body, _Around(scope, guards=tuple(Guard(d, "first") for d in only)))
            return ()
        if isinstance(node, ast.If):
            return self._if(node, around)
        if isinstance(node, Loop):
            self._expressions([node.test] if isinstance(node, ast.While) else [node.iter], around)
            side = self.ranks.side(node.test, around.scope) if isinstance(node, ast.While) else None
            guards = (Guard(node.test, side),) if isinstance(node, ast.While) and side else ()
            self._walk(node.body, _with(around, loop=node, guards=guards))
            return self._walk(node.orelse, around)
        if isinstance(node, ast.With | ast.AsyncWith):
            items = [item.context_expr for item in node.items]
            self._expressions(items, around)
            return self._walk(node.body, _with(around, contexts=tuple(items)))
        if isinstance(node, ast.Try):
            left = self._walk(node.body, around)
            for handler in node.handlers:
                self._walk(handler.body, around)
            return left + self._walk(node.orelse, around) + self._walk(node.finalbody, around)
        if isinstance(node, ast.Match):
            self._expressions([node.subject], around)
            guards = (Guard(node.subject, "some"),) if self.ranks.side(node.subject, around.scope) else ()
            for case in node.cases:
                plain = None if guards else node.subject
                self._walk(case.body, _with(around, guards=guards, test=plain))
            return ()
        self._expressions([c for c in ast.iter_child_nodes(node) if isinstance(c, ast.expr)], around)
        return ()

    def _if(self, node: ast.If, around: _Around) -> tuple[Guard, ...]:
        self._expressions([node.test], around)
        side = self.ranks.side(node.test, around.scope)
        if side is None:
            inside = self._walk(node.body, _with(around, test=node.test))
            return inside + self._walk(node.orelse, _with(around, test=node.test))
        here, rest = Guard(node.test, side), Guard(node.test, OPPOSITE[side])
        self._walk(node.body, _with(around, guards=(here,)))
        self._walk(node.orelse, _with(around, guards=(rest,)))
        if isinstance(node.test, ast.BoolOp) and isinstance(node.test.op, ast.And):
            return ()  # another condition decides too who goes on
        if _leaves(node.body) and not _leaves(node.orelse):
            return (rest,)
        return (here,) if node.orelse and _leaves(node.orelse) and not _leaves(node.body) else ()

    def _expressions(self, nodes: list[ast.expr], around: _Around) -> None:
        for node in nodes:
            self._expression(node, around)

    def _expression(self, node: ast.AST, around: _Around) -> None:
        if isinstance(node, ast.IfExp):
            side = self.ranks.side(node.test, around.scope)
            self._expression(node.test, around)
            one = (Guard(node.test, side),) if side else ()
            other = (Guard(node.test, OPPOSITE[side]),) if side else ()
            plain = None if side else node.test
            self._expression(node.body, _with(around, guards=one, test=plain))
            self._expression(node.orelse, _with(around, guards=other, test=plain))
            return
        if isinstance(node, ast.Call):
            name = self.full_name(node.func) or _method_name(node.func)
            self.sites.append(
                Site(
                    node=node,
                    name=name,
                    scope=around.scope,
                    guards=around.guards,
                    tests=around.tests,
                    loops=around.loops,
                    contexts=around.contexts,
                )
            )
        if isinstance(node, ast.BoolOp) and isinstance(node.op, ast.And):
            for value in node.values:
                self._expression(value, around)
                side = self.ranks.side(value, around.scope)
                around = _with(around, guards=(Guard(value, side),)) if side else around
            return
        for child in ast.iter_child_nodes(node):
            self._expression(child, around)


def _method_name(node: ast.expr) -> str:
    """`?.item` of a method of what is no plain name: `loss(x).item`."""
    return f"?.{node.attr}" if isinstance(node, ast.Attribute) else ""


def _with(
    around: _Around,
    *,
    guards: tuple[Guard, ...] = (),
    test: ast.expr | None = None,
    loop: Loop | None = None,
    contexts: tuple[ast.expr, ...] = (),
) -> _Around:
    return _Around(
        around.scope,
        around.guards + guards,
        around.tests + ((test,) if test is not None else ()),
        around.loops + ((loop,) if loop is not None else ()),
        around.contexts + contexts,
    )


def _leaves(body: list[ast.stmt]) -> bool:
    """True where the statements end in return, continue, break or exit; an error is no way that a script goes on."""
    if not body:
        return False
    end = body[-1]
    if isinstance(end, ast.If):
        return _leaves(end.body) and _leaves(end.orelse)
    if isinstance(end, ast.Expr) and isinstance(end.value, ast.Call):
        return dotted(end.value.func) in _EXITS
    return isinstance(end, ast.Return | ast.Continue | ast.Break)


def is_modulo_test(node: ast.AST) -> bool:
    """True of `(i + 1) % k == 0`, `not i % k`, and of what contains one."""
    return any(
        isinstance(n, ast.BinOp) and isinstance(n.op, ast.Mod) and not isinstance(constant(n.left), str)
        for n in ast.walk(node)
    )


def functions_below(script: Script, scope: Scope) -> set[Scope]:
    """The functions of the file that one calls, directly and through others."""
    found: set[Scope] = set()
    todo = [scope]
    while todo:
        here = todo.pop()
        for site in script.sites:
            function = script.function_of(site) if site.scope is here else None
            if function and function not in found:
                found.add(function)
                todo.append(function)
    return found


__all__ = ["Binding", "Guard", "Loop", "Scope", "Script", "Site", "functions_below", "is_modulo_test", "own_nodes"]
