"""Rules on randomness: what each rank draws for itself, and seeds that are made of the rank."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator

from shardwise.diagnose.linting.loops import is_step
from shardwise.diagnose.linting.names import Scope, dotted, last, line_of, own_nodes
from shardwise.diagnose.linting.ranks import collective
from shardwise.diagnose.linting.script import Site
from shardwise.diagnose.linting.shards import expressions_behind
from shardwise.diagnose.linting.table import Facts, Hit, rules, source

RANDOM, _rule = rules()

_DRAWS = {
    "random": re.compile(r"^random\.(random|randint|randrange|choice|choices|uniform|gauss|getrandbits|sample)$"),
    "numpy": re.compile(r"^numpy\.random\.(rand|randn|randint|random|random_sample|choice|uniform|binomial|normal)$"),
    "torch": re.compile(r"^torch\.(rand|randn|randint|bernoulli|randperm|multinomial)$"),
}
_SEEDS = {
    "random": {"random.seed"},
    "numpy": {"numpy.random.seed"},
    "torch": {"torch.manual_seed", "torch.random.manual_seed"},
}
_SEED_ALL = re.compile(r"(^|_)(set_|fix_|setup_|init_)?(all_)?seeds?(_everything|_all)?$|^seed_\w+$|^set_\w*seed\w*$")


@_rule(
    "random.control-flow",
    "A branch or a number of iterations that each rank draws for itself, around a backward, an update, a layer or a "
    "collective: ranks go different ways, and hang or train different models. Seeds that differ by rank are no better.",
)
def _random(facts: Facts) -> Iterator[Hit]:
    if not facts.script.is_distributed:
        return
    drawn: dict[int, tuple[ast.expr, str]] = {}
    for site in facts.script.sites:
        iterations = (loop.test if isinstance(loop, ast.While) else loop.iter for loop in site.loops)
        for test in (*site.tests, *iterations):
            draw = _draw(facts, test, site.scope) if id(test) not in drawn and _matters(facts, site) else ""
            if draw:
                drawn[id(test)] = (test, draw)
    for scope in facts.script.scopes:
        for node in own_nodes(scope.node):
            if isinstance(node, ast.If) and id(node.test) not in drawn and _skips(facts, node, scope):
                draw = _draw(facts, node.test, scope)
                if draw:
                    drawn[id(node.test)] = (node.test, draw)
    for test, draw in drawn.values():
        yield Hit(
            node=test,
            what="each rank draws for itself which way it goes",
            found=f"`{draw}`, {_seeded(facts, draw) or 'with no seed set in this script'}",
            fix="draw from a generator that is seeded alike on every rank: `rng = random.Random(seed)`, `rng.random()`",
            severity="warning",
        )


def _draw(facts: Facts, test: ast.expr, scope: Scope) -> str:
    """The random draw that a test depends on; "" where there is none, or the seed is the same everywhere."""
    for node, _ in expressions_behind(test, scope, 1):
        if not isinstance(node, ast.Call) or any(k.arg == "generator" for k in node.keywords):
            continue
        name = facts.script.full_name(node.func)
        for pattern in _DRAWS.values():
            if pattern.match(name) and _seeded(facts, name) != "same":
                return name
    return ""


def _seeded(facts: Facts, draw: str) -> str:
    """`"same"` where its library is seeded alike on all ranks, a sentence where by rank, "" where not at all."""
    library = next(library for library, pattern in _DRAWS.items() if pattern.match(draw))
    state = ""
    for site in facts.script.sites:
        if site.name in _SEEDS[library] or _SEED_ALL.search(last(site.name)):
            if site.name in {n for names in _SEEDS.values() for n in names} - _SEEDS[library]:
                continue
            given = [*site.node.args, *(k.value for k in site.node.keywords)]
            by_rank = any(facts.script.ranks.kind(n, site.scope) for g in given for n, _ in
                          expressions_behind(g, site.scope, 1))  # fmt: skip
            specific = any(k.arg == "device_specific" for k in site.node.keywords)
            if not (by_rank or specific):
                return "same"
            state = f"which line {line_of(site.node)} seeds by rank"
    return state


def _matters(facts: Facts, site: Site) -> bool:
    """True of a call that all ranks have to make, or a layer in a `forward`."""
    word = last(site.name)
    if word == "backward" or is_step(facts, site) or collective(facts, site):
        return True
    if site.scope.name != "forward":
        return False
    name = dotted(site.node.func)
    if name.startswith("self.") and name.count(".") == 1:
        return site.scope.find_function(name) is None
    layers = [n for loop in site.loops if not isinstance(loop, ast.While) for n in ast.walk(loop.target)]
    return bool(name) and name in {dotted(n) for n in layers}


def _skips(facts: Facts, node: ast.If, scope: Scope) -> bool:
    """True where a branch leaves a loop or a function in which something that matters follows."""
    if not isinstance(node.body[-1], ast.Continue | ast.Break | ast.Return):
        return False
    return any(_matters(facts, site) for site in facts.script.sites if site.scope is scope and site.line > node.lineno)


# ---------------------------------------------------------------- seeds

_GIVES = {"shardwise.apply": "initial weights", "shardwise.loader": "order of the samples"}
_MAKES_ALIKE = ("broadcast", "load_state_dict", "set_model_state_dict", "from_pretrained", "DistributedDataParallel")
_FACTORIES = ("partial", "hf_factory")


@_rule(
    "seed.by-rank",
    "A seed made of the rank before a module is built whose weights nobody makes alike afterwards (`shardwise.apply` "
    "of a module, `parallelize_module`, `fully_shard` over replicas): ranks start from other weights. Or one that is "
    "given to `shardwise.apply` or `loader`, where all ranks need the same. DDP takes the weights of rank 0.",
)
def _by_rank(facts: Facts) -> Iterator[Hit]:
    for site in facts.script.sites:
        gives, seed = _GIVES.get(site.name), site.argument(-1, "seed")
        if gives and seed is not None and _is_of_rank(facts, [seed], site.scope):
            yield Hit(
                node=site.node,
                what=f"each rank gives {dotted(site.node.func)} another seed: the {gives} must be the same on all",
                found=f"seed={source(seed)}",
                fix="give the same number on every rank: what a rank gets of it is decided inside",
            )
    for site, built in _builds(facts):
        seeds = [s for s in facts.script.sites if s.scope is site.scope and s.line < built and _seeds_torch(s)]
        for last_one in sorted(seeds, key=lambda s: s.line)[-1:]:
            if _is_of_rank(facts, [*last_one.node.args, *(k.value for k in last_one.node.keywords)], site.scope):
                yield Hit(
                    node=last_one.node,
                    what=f"each rank builds other weights, and {dotted(site.node.func)} does not make them alike",
                    found=f"`{source(last_one.node)}`; the module of line {line_of(site.node)} is built after it",
                    fix="seed all ranks alike until the module is built, and by the rank behind it",
                    severity="error" if site.name == "shardwise.apply" else "warning",
                )


def _is_of_rank(facts: Facts, given: list[ast.expr], scope: Scope) -> bool:
    """Whether the rank is in expressions, or behind a name in them."""
    return any(facts.script.ranks.kind(n, s) for value in given for n, s in expressions_behind(value, scope, 1))


def _seeds_torch(site: Site) -> bool:
    named = _SEED_ALL.search(last(site.name)) and not site.name.startswith(("numpy.", "random."))
    return bool(site.node.args and (site.name in _SEEDS["torch"] or named))


def _builds(facts: Facts) -> Iterator[tuple[Site, int]]:
    """The calls that take a module as each rank has built it, and the line where it was."""
    alike = any(last(site.name).startswith(_MAKES_ALIKE) for site in facts.script.sites)
    for site in facts.script.sites:
        ours = site.name == "shardwise.apply"
        if not (ours or (not alike and (last(site.name) == "parallelize_module" or _over_replicas(site)))):
            continue
        module = site.argument(0, "module")
        bound = site.scope.find(dotted(module), site.line) if dotted(module) else []
        for value in [module, *(b.value for b in bound if b.scope is site.scope)]:
            if isinstance(value, ast.Call) and last(dotted(value.func)) not in _FACTORIES and value is not site.node:
                yield site, value.lineno


def _over_replicas(site: Site) -> bool:
    """Whether `fully_shard` is given a mesh of two dims: parts on one, replicas on the other."""
    mesh = site.argument(-1, "mesh") if last(site.name) == "fully_shard" else None
    calls = [b.value for b in site.scope.find(dotted(mesh), site.line)] if dotted(mesh) else []
    shapes = [c.args[1] for c in calls if isinstance(c, ast.Call) and len(c.args) > 1]
    return any(isinstance(shape, ast.Tuple | ast.List) and len(shape.elts) > 1 for shape in shapes)


_RANDOM_FILLS = re.compile(
    r"^(normal_|uniform_|(xavier|kaiming)_\w+_|trunc_normal_|orthogonal_|sparse_|exponential_|randn?_like)$"
)
_OWN_FILLS = ("apply", "reset_parameters")
"""Methods of modules."""


_OF_SIZES = ("randn", "rand", "normal", "randint")


def _of_a_weight(site: Site) -> bool:
    """Whether it draws as many numbers as what a loop around it goes through has, unless that seeds for each."""
    sized = {
        dotted(n.value)
        for value in [*site.node.args, *(keyword.value for keyword in site.node.keywords)]
        for n in ast.walk(value)
        if isinstance(n, ast.Attribute) and n.attr in ("shape", "size")
    }
    over = [
        loop
        for loop in site.loops
        if not isinstance(loop, ast.While) and sized & {dotted(n) for n in ast.walk(loop.target)}
    ]
    seeds = (n for loop in over for n in ast.walk(loop) if isinstance(n, ast.Attribute) and n.attr == "manual_seed")
    return bool(over) and not any(seeds)


@_rule(
    "init.after-apply",
    "Weights that are drawn after `shardwise.apply`, or noise for them (`torch.randn_like(weight)`, "
    "`torch.randn(weight.shape)` without a generator that is seeded for each): in a pipeline each stage draws for the "
    "layers that it has, so it has other weights than other plans. In the constructor, or as `apply(..., init=)`, they "
    "are the same under all.",
)
def _after_apply(facts: Facts) -> Iterator[Hit]:
    for site in facts.script.sites:
        word = last(site.name)
        fills = bool(_RANDOM_FILLS.match(word)) or (word in _OF_SIZES and _of_a_weight(site))
        if not fills and word not in _OWN_FILLS:
            continue
        receiver = site.node.func.value if isinstance(site.node.func, ast.Attribute) else None
        loops = [loop.iter for loop in site.loops if not isinstance(loop, ast.While)] if fills else []
        given = [*site.node.args[:1], receiver, *loops] if fills else [receiver]
        names = {dotted(n) for value in given if value is not None for n in ast.walk(value) if isinstance(n, ast.Name)}
        placed = [
            b for name in names for b in site.scope.find(name, site.line) if "placed" in facts.kinds.of_binding(b)
        ]
        if placed and site.name != "shardwise.apply":
            yield Hit(
                node=site.node,
                what=f"`{source(site.node)}` draws for weights after apply: in a pipeline a stage for its own layers",
                found="weights of what shardwise.apply gave, of which a rank may have a stage",
                fix="draw in the module's constructor, or give apply(..., init=fn), which calls fn(submodule)",
                severity="warning",
            )
