"""Rules on training and evaluation loops: accumulation, synchronisation, samplers, randomness, ends."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterable, Iterator

from shardwise.diagnose.linting.names import Scope, constant, dotted, last, line_of, own_nodes
from shardwise.diagnose.linting.ranks import collective, who
from shardwise.diagnose.linting.samplers import SAMPLERS
from shardwise.diagnose.linting.script import Guard, Loop, Site, functions_below, is_modulo_test
from shardwise.diagnose.linting.shards import expressions_behind
from shardwise.diagnose.linting.table import Facts, Hit, rules, source
from shardwise.findings import Severity

_OWN, _rule = rules()

_ACCUMULATION = re.compile(
    r"accum|grad_?acc|(^|_)gas$|micro_?(steps|batches)|^n(um)?_?micro|steps_per_update", re.IGNORECASE
)
_OPTIMIZER_NAME = re.compile(r"optim|^opt(_|$)|_opt$|^scaler$|_scaler$", re.IGNORECASE)
_UNEQUAL = ("ignore_index", "attention_mask", "pad_token_id", "padding=", "collate_fn", "loss_mask")


def is_step(facts: Facts, site: Site) -> bool:
    """True of `optimizer.step()`, `scaler.step(optimizer)`."""
    function = site.node.func
    if not isinstance(function, ast.Attribute) or function.attr != "step":
        return False
    kinds = facts.kinds.of(function.value, site.scope)
    return bool(kinds & {"optimizer", "zero", "scaler"} or _OPTIMIZER_NAME.search(last(dotted(function.value))))


def _backwards(facts: Facts) -> list[Site]:
    return [site for site in facts.script.sites if last(site.name) == "backward"]


def _accumulating(facts: Facts) -> dict[int, tuple[Loop, ast.AST]]:
    """Backward calls that add up over micro-batches: id of the call -> its loop, and what says how often."""
    steps = [site for site in facts.script.sites if is_step(facts, site)]
    found: dict[int, tuple[Loop, ast.AST]] = {}
    for site in _backwards(facts):
        if not site.loops:
            continue
        loop = site.loops[-1]
        here = [step for step in steps if step.scope is site.scope]
        inside = [step for step in here if loop in step.loops]
        tests = [t for step in inside for t in (*step.tests, *(g.test for g in step.guards)) if _is_boundary(t, facts)]
        outside = [step for step in here if step.loops == site.loops[:-1] and step.line > site.line]
        contexts = [c for c in site.contexts if isinstance(c, ast.Call) and last(dotted(c.func)) == "accumulate"]
        if contexts:
            found[id(site.node)] = (loop, contexts[0])
        elif inside and len([s for s in inside if any(_is_boundary(t, facts) for t in s.tests)]) == len(inside):
            found[id(site.node)] = (loop, tests[0])
        elif outside and not inside and isinstance(loop, ast.For):
            found[id(site.node)] = (loop, loop.iter)
    return found


def _is_boundary(test: ast.AST, facts: Facts) -> bool:
    """True of a test that asks whether a group of micro-batches is complete."""
    names = [last(dotted(node)) for node in ast.walk(test)]
    if is_modulo_test(test) or "sync_gradients" in names:
        return True
    behind = [b.value for n in ast.walk(test) if isinstance(n, ast.Name) for s in facts.script.scopes
              for b in s.bindings.get(n.id, ())]  # fmt: skip
    return any(value is not None and is_modulo_test(value) for value in behind)


@_rule(
    "sync.item",
    "`.item()` or `float(loss)` on every micro-batch makes the host wait for the device each time, so that it cannot "
    "run ahead. Once per update, or every so many steps, is enough.",
)
def _item(facts: Facts) -> Iterator[Hit]:
    if not facts.script.is_distributed and not _accumulating(facts):
        return
    loops = {id(loop) for loop, _ in _accumulating(facts).values()}
    for site in facts.script.sites:
        if not site.loops or id(site.loops[-1]) not in loops or not _reads_device(site):
            continue
        around = (*site.tests, *(guard.test for guard in site.guards))
        if any(_is_boundary(test, facts) for test in around) or any(_is_count(test) for test in site.tests):
            continue
        yield Hit(
            node=site.node,
            what=f"`{source(site.node)}` waits for the device on every micro-batch",
            found=f"it stands in the loop of line {line_of(site.loops[-1])}, which accumulates gradients",
            fix="add up `loss.detach()` on the device and read it once per update",
            severity="warning",
        )


def _is_count(test: ast.expr) -> bool:
    """True of `i == 0` and the like: not on every micro-batch."""
    return (
        isinstance(test, ast.Compare) and isinstance(test.ops[0], ast.Eq) and constant(test.comparators[0]) is not None
    )


def _reads_device(site: Site) -> bool:
    function = site.node.func
    if isinstance(function, ast.Attribute) and function.attr in ("item", "tolist") and not site.node.args:
        return True
    argument = site.node.args[0] if len(site.node.args) == 1 else None
    return dotted(function) == "float" and "loss" in last(dotted(argument)).lower()


@_rule(
    "accumulate.division",
    "A loss divided by the number of micro-batches by hand. Error: the framework divides too. Warning: micro-batches "
    "weigh differently (padding, ignored labels), and the mean of means is another number. Note: it is right for equal "
    "micro-batches and complete groups only.",
)
def _division(facts: Facts) -> Iterator[Hit]:
    accumulating = _accumulating(facts)
    seen: set[int] = set()
    for site in _backwards(facts):
        loop_and_count, framework = accumulating.get(id(site.node)), _framework(facts, site)
        counts = [loop_and_count[1] if loop_and_count else None, *([_given_count(facts)] if framework else [])]
        for node in (each for count in counts for each in _divisions(site, site.scope, count)):
            if node.lineno in seen or not (loop_and_count or framework):
                continue
            seen.add(node.lineno)
            yield _divided(facts, node, framework, site.scope)
    yield from _divided_losses(facts)


def _divisions(site: Site, scope: Scope, count: ast.AST | None) -> Iterator[ast.expr | ast.stmt]:
    """Divisions by the number of micro-batches in what a backward starts from."""
    function = site.node.func
    starts = list(site.node.args[:1])
    if isinstance(function, ast.Attribute):
        starts.append(function.value)
    names = {dotted(node) for start in starts for node in ast.walk(start)} - {""}
    for start in starts:
        for node, _ in expressions_behind(start, scope, 2):
            if isinstance(node, ast.BinOp) and _is_share(node, count):
                yield node
    for statement in ast.walk(scope.node):
        if not isinstance(statement, ast.AugAssign) or not isinstance(statement.op, ast.Div):
            continue
        on_the_way = not _on_other_branch(scope, statement.lineno, site.line)
        if on_the_way and dotted(statement.target) in names and _counts(statement.value, count):
            yield statement


def _on_other_branch(scope: Scope, line: int, other: int) -> bool:
    """True where an `if` has one line in its body and the other in its `else`."""
    for node in ast.walk(scope.node):
        if isinstance(node, ast.If) and node.orelse:
            middle = node.orelse[0].lineno
            sides = [node.lineno < at < middle for at in (line, other) if node.lineno < at <= (node.end_lineno or 0)]
            if sorted(sides) == [False, True]:
                return True
    return False


def _is_share(node: ast.BinOp, count: ast.AST | None) -> bool:
    """True of `x / k`, and of the `1 / k` of `x * (1 / k)`."""
    return isinstance(node.op, ast.Div) and _counts(node.right, count) and not _counts(node.left, None)


def _counts(node: ast.expr, count: ast.AST | None) -> bool:
    """True of an expression that is the number of micro-batches."""
    if dotted(node):
        named = bool(_ACCUMULATION.search(last(dotted(node))))
        return named or (count is not None and dotted(node) in {dotted(n) for n in ast.walk(count)} - {""})
    if isinstance(node, ast.Call):
        asked = not node.args and _ACCUMULATION.search(last(dotted(node.func)))  # engine.gradient_accumulation_steps()
        return (
            bool(asked)
            or any(_counts(arg, count) for arg in node.args)
            and dotted(node.func) in ("float", "int", "max")
        )
    value = constant(node)
    return isinstance(value, int) and value > 1 and count is not None and value in _numbers(count)


def _numbers(count: ast.AST) -> set[object]:
    return (
        {constant(count)}
        | {constant(node.right) for node in ast.walk(count) if isinstance(node, ast.BinOp)}
        | {constant(arg) for node in ast.walk(count) if isinstance(node, ast.Call) for arg in node.args}
    )


def _given_count(facts: Facts) -> ast.AST | None:
    """The number of micro-batches that a script gives Accelerate or DeepSpeed, as an argument or in a dict."""
    for node in ast.walk(facts.script.tree):
        if isinstance(node, ast.keyword) and node.arg == "gradient_accumulation_steps":
            return node.value
        if isinstance(node, ast.Dict):
            for key, value in zip(node.keys, node.values, strict=True):
                if key is not None and constant(key) == "gradient_accumulation_steps":
                    return value
    return None


def _framework(facts: Facts, site: Site) -> str:
    """Who divides by the number of micro-batches as well; "" where nobody does."""
    function = site.node.func
    owner = function.value if isinstance(function, ast.Attribute) else None
    if owner is None:
        return ""
    name = last(dotted(owner))
    if "engine" in facts.kinds.of(owner, site.scope) or (facts.script.imports("deepspeed") and "engine" in name):
        return "DeepSpeed's `engine.backward`"
    if name == "accelerator" or "accelerator" in facts.kinds.of(owner, site.scope):
        made = facts.script.called("Accelerator")
        counts = any(k.arg in ("gradient_accumulation_steps", "gradient_accumulation_plugin")
                     for m in made for k in m.node.keywords)  # fmt: skip
        if counts or facts.script.called("accumulate"):
            return "`accelerator.backward`"
    return ""


def _divided(facts: Facts, node: ast.expr | ast.stmt, framework: str, scope: Scope) -> Hit:
    severity: Severity = "note"
    fix = "weigh by what counts: sum the losses and divide once by the number of tokens or samples of the whole step"
    evidence = [word for word in _UNEQUAL if word in facts.script.text]
    divided = node.left if isinstance(node, ast.BinOp) else node.target if isinstance(node, ast.AugAssign) else None
    behind = expressions_behind(divided, scope, 1) if divided is not None else ()
    model_loss = any(isinstance(n, ast.Attribute) and n.attr == "loss" for n, _ in behind)
    if framework:
        severity, what = "error", f"the loss is divided here and again by {framework}: gradients are too small"
        fix = "hand over the loss as it is"
    elif evidence or model_loss:
        severity = "warning"
        what = "micro-batches weigh the same here, whatever number of labels they have"
        evidence = evidence or ["the model's own mean over labels"]
    else:
        what = "dividing by hand is right only for micro-batches of equal size and for complete groups"
        evidence = []
    found = f"`{source(node)}`" + (f"; the script has {', '.join(evidence)}" if evidence and not framework else "")
    return Hit(node=node, what=what, found=found, fix=fix, severity=severity)


def _divided_losses(facts: Facts) -> Iterator[Hit]:
    """Losses handed to a loop that weighs them by itself."""
    for scope in facts.script.scopes:
        owner = "Lightning" if scope.name == "training_step" and facts.script.imports("lightning", "pytorch_lightning")\
            else "Shardwise's step" if facts.script.imports("shardwise") and "loss" in scope.name else ""  # fmt: skip
        if not owner:
            continue
        for node in ast.walk(scope.node):
            if isinstance(node, ast.BinOp) and _is_share(node, None) and not isinstance(node.left, ast.Constant):
                yield _divided(facts, node, owner, scope)


@_rule(
    "loss.backward",
    "A `backward()` in a loss function that `shardwise.steps` or `make_step` is given: the step makes the backward "
    "pass itself, and gradients of both would be added.",
)
def _own_backward(facts: Facts) -> Iterator[Hit]:
    given = [s for s in facts.script.sites if s.name in ("shardwise.steps", "shardwise.make_step")]
    functions = {s.scope.find_function(dotted(s.argument(1, "loss_fn"))) for s in given} - {None}
    for site in _backwards(facts):
        if site.scope in functions:
            yield Hit(
                node=site.node,
                what=f"{site.scope.name}() makes a backward pass, and the step makes one from what it returns",
                found=f"`{source(site.node)}` in a loss function",
                fix="return the loss, as Loss(sum, weight) or a mean, and leave the backward pass to the step",
            )


# ---------------------------------------------------------------- ends of loops


@_rule(
    "loop.left-by-some",
    "A training loop that only some ranks leave, by `break` or `return` (early stopping on rank 0): the others wait in "
    "their next backward, update or collective until the time limit.",
)
def _left_by_some(facts: Facts) -> Iterator[Hit]:
    if not facts.script.is_distributed:
        return
    for scope in facts.script.scopes:
        for loop in own_nodes(scope.node):
            if not isinstance(loop, Loop) or not _trains(facts, loop):
                continue
            for node in _without_loops(loop.body):
                if not isinstance(node, ast.If) or not (side := facts.script.ranks.side(node.test, scope)):
                    continue
                ends = _ends(node.body)
                if ends and not _ends(node.orelse):
                    yield Hit(
                        node=ends[0],
                        what=f"the loop of line {line_of(loop)} trains, and only some ranks leave it here",
                        found=who(Guard(node.test, side)),
                        fix="decide on one rank, broadcast the decision (or sum it over the ranks), and leave on all "
                        "of them after the same step",
                    )


def _ends(body: list[ast.stmt]) -> list[ast.Break | ast.Return]:
    return [node for node in _without_loops(body) if isinstance(node, ast.Break | ast.Return)]


def _without_loops(body: Iterable[ast.AST]) -> Iterator[ast.AST]:
    """The nodes of statements, without those of loops, functions and classes within."""
    for node in body:
        yield node
        if not isinstance(node, Loop | ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            yield from _without_loops(ast.iter_child_nodes(node))


def _trains(facts: Facts, loop: ast.For | ast.AsyncFor | ast.While) -> bool:
    """True where a turn of a loop makes what all ranks have to make, itself or in functions of the file."""
    script = facts.script
    here = [site for site in script.sites if loop in site.loops or site.node is getattr(loop, "iter", None)]
    called = {function for site in here if (function := script.function_of(site))}
    below = called.union(*(functions_below(script, function) for function in called))
    sites = [*here, *(site for site in script.sites if site.scope in below)]
    return any(last(s.name) == "backward" or is_step(facts, s) or collective(facts, s) for s in sites)


LOOPS = {**_OWN, **SAMPLERS}
"""The section of the table."""
