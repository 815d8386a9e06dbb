"""The shape of the package: import direction, sizes, and the things that are nowhere in it.

Every check is a function from sources to offences, so that its negative control can plant one.
A budget that hurts in one place is listed in `EXCEPTIONS` with its reason.
"""

from __future__ import annotations

import ast
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path

import pytest

TESTS = Path(__file__).parents[1]
PACKAGE = TESTS.parent / "src" / "shardwise"
Sources = dict[str, str]  # "plan/plan.py" -> its text

# The longest prefix decides. Imports go to the same folder or to a lower layer.
LAYERS = {
    "errors": 0,
    "extras": 0,
    "findings": 0,
    "journal": 0,
    "records": 0,
    "version": 0,
    "hardware.cluster": 1,
    "hardware.presets": 1,
    "hardware": 3,
    "model.alike": 3,
    "model.tracer": 3,
    "model.known": 3,
    "model.standin": 3,
    "model.infer": 3,
    "model.describe": 3,
    "model.experts": 3,
    "model.operators": 3,
    "model.recording": 3,
    "model.lifetimes": 3,
    "model.copies": 3,
    "model.seen": 3,
    "model.stacks": 3,
    "model.torch_private": 3,
    "model": 1,
    "plan.plan": 1,
    "plan.shorthand": 1,
    "plan": 2,
    "parallel": 3,
    "models": 3,
    "train.kept.lock": 1,  # files and processes; who holds a run's directory, or a store
    "train.kept.owner": 1,
    "train": 4,
    "checkpoint": 4,
    "communicate": 4,
    "compat": 5,
    "launch.environment": 1,  # pure: it reads variables, and open_mesh needs what it read
    "launch.echo": 1,  # pure: texts of errors, which a mesh and the launcher tell from causes
    "launch.stopping": 1,  # pure; the launcher and the loop of a rank count the same signals as one
    "launch.variables": 1,  # hands them over; a training step asks whether somebody verifies it
    "launch.entry": 4,  # one rank: a script as __main__; who verifies runs them too
    "launch.warm": 4,  # names of modules
    "launch.forked": 4,  # processes that run a function; knows nothing of jobs
    "launch": 5,
    "diagnose": 5,
    "board": 5,
    "__main__": 7,
    "cli": 6,
    "testing": 6,
}
FIRST_LAYER_WITH_TORCH = 3
FILE_LINES, FUNCTION_LINES, FUNCTION_LINES_P90, PARAMETERS, OWN_DEPTH = 400, 60, 40, 6, 1

# (check, "file" or "file:name") -> why the budget does not fit there.
EXCEPTIONS = {
    ("depth", "errors.py"): "the tree of exceptions is what users catch by; it is drawn at the top of the file",
    ("depth", "records.py:RecordError"): "a ConfigError that carries its key, private to readers of files",
    ("depth", "checkpoint/format.py:DamagedError"): "a CheckpointError after which an older one is tried",
    ("parameters", "train/optimizers.py:adamw"): "AdamW's own five dials, and how its averages are kept",
    ("parameters", "parallel/compose.py:apply"): "three nouns, and four options that nearly every call leaves out",
    (
        "direction",
        "parallel -> model.infer.flow",
    ): "its rules are of shapes only; rows are followed by them as splits are",
    ("direction", "parallel -> model.tracer"): "the tracer knows of modules only; stages are cut along what it found",
    (
        "direction",
        "cli -> testing.fake",
    ): "`check` and `train` apply the plan in a world of one process, before any start",
    ("direction", "diagnose -> testing.fake"): "a traced step is that of one rank in a world that is not there",
    ("direction", "train -> checkpoint.layout"): "copies in memory and files hold the same parts of the same tensors",
    ("direction", "train -> checkpoint.format"): "the box that such a part is; which values are the same once saved",
    ("unsafe", "launch/forked.py"): "a function goes to processes that this process forked, by a private pipe",
    ("unsafe", "checkpoint/foreign/unsafe.py"): "`--unsafe-pickle`, in a process of its own: the one torch.load",
    ("environment", "launch/forked.py"): "it plays the launcher: it sets in its workers what a launcher sets",
}


@cache
def parse(text: str) -> ast.Module:
    return ast.parse(text)


@cache
def walk(tree: ast.AST) -> tuple[ast.AST, ...]:
    return tuple(ast.walk(tree))


def excused(check: str, file: str, name: str = "") -> bool:
    return (check, file) in EXCEPTIONS or (check, f"{file}:{name}") in EXCEPTIONS


def module_name(file: str) -> str:
    """`plan/plan.py` is `plan.plan`; `plan/__init__.py` is `plan`; the root `__init__.py` is the empty name."""
    return file.removesuffix(".py").replace("/", ".").removesuffix("__init__").removesuffix(".")


def layer(module: str) -> int | None:
    parts = module.split(".")
    prefixes = [".".join(parts[:length]) for length in range(len(parts), 0, -1)]
    return next((LAYERS[prefix] for prefix in prefixes if prefix in LAYERS), None)


def imports(file: str, tree: ast.AST) -> Iterator[tuple[str, str, ast.stmt]]:
    """(absolute module, imported name or "", statement) of every import in a tree, relative ones resolved."""
    package = ["shardwise", *file.split("/")[:-1]]
    for node in walk(tree):
        if isinstance(node, ast.Import):
            yield from ((alias.name, "", node) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) + 1 - node.level] if node.level else []
            module = ".".join([*base, *(node.module or "").split(".")]).strip(".")
            yield from ((module, alias.name, node) for alias in node.names)


def own_imports(file: str, sources: Sources) -> Iterator[str]:
    """Names (without `shardwise.`) of own modules that a file imports, the most specific ones that exist."""
    known = {module_name(other) for other in sources}
    for module, name, _ in imports(file, parse(sources[file])):
        if module.split(".")[0] == "shardwise":
            own = module.removeprefix("shardwise").removeprefix(".")
            inner = f"{own}.{name}".strip(".")
            yield inner if inner in known else own


def functions(sources: Sources) -> Iterator[tuple[str, ast.FunctionDef | ast.AsyncFunctionDef]]:
    for file, text in sources.items():
        for node in walk(parse(text)):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                yield file, node


def num_lines(node: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    return (node.end_lineno or node.lineno) - node.lineno + 1


def dotted(node: ast.AST) -> str:
    """`torch.distributed.barrier` of the expression that spells it, and "" of any other."""
    if isinstance(node, ast.Name):
        return node.id
    inner = dotted(node.value) if isinstance(node, ast.Attribute) else ""
    return f"{inner}.{node.attr}" if isinstance(node, ast.Attribute) and inner else ""


# ---------------------------------------------------------------- checks


def module_names(tree: ast.Module) -> Iterator[str]:
    """What a module's own statements bind, those inside of its ifs and tries too."""
    for node in walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            yield node.name
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield node.id
        elif isinstance(node, ast.alias):
            yield (node.asname or node.name).split(".")[0]


def check_direction(sources: Sources) -> list[str]:
    folders = {file.split("/")[0] for file in sources if "/" in file}
    offences = []

    def folder(module: str) -> str:
        return module.split(".")[0] if module.split(".")[0] in folders else ""

    for here, there in {(module_name(f), t) for f in sources for t in own_imports(f, sources) if module_name(f)}:
        low, high = layer(there), layer(here)
        if high is None or low is None or not there:
            offences.append(f"{here}: imports shardwise.{there}, and one of them is in no layer")
        elif excused("direction", f"{folder(here)} -> {there}"):
            continue
        elif low > high or (low == high and folder(here) != folder(there)):
            offences.append(f"{folder(here)} -> {there}: {here} (layer {high}) imports layer {low}")
    return offences + [f"{file}: is in no layer" for file in sources if module_name(file) and not layered(file)]


def layered(file: str) -> bool:
    return layer(module_name(file)) is not None


def in_rings(edges: dict[str, set[str]]) -> list[str]:
    """Those that can be reached from themselves."""

    def reaches(start: str) -> set[str]:
        seen: set[str] = set()
        frontier = set(edges.get(start, ()))
        while frontier:
            seen |= frontier
            frontier = {after for module in frontier for after in edges.get(module, ())} - seen
        return seen

    return [f"{module}: imports itself through others" for module in edges if module in reaches(module)]


def check_rings(sources: Sources) -> list[str]:
    return in_rings({module_name(file): set(own_imports(file, sources)) for file in sources if module_name(file)})


def check_folder_rings(sources: Sources) -> list[str]:
    """A folder inside of a folder counts as one module: it stands above all that it imports."""
    inner = {".".join(file.split("/")[:2]) for file in sources if file.count("/") == 2}
    edges: dict[str, set[str]] = {}

    def room(module: str) -> str:
        outer = ".".join(module.split(".")[:2])
        return outer if outer in inner else module

    for file in sources:
        here = room(module_name(file))
        edges.setdefault(here, set()).update({room(there) for there in own_imports(file, sources)} - {here})
    return in_rings(edges)


def check_torch_free(sources: Sources) -> list[str]:
    low = [file for file in sources if (layer(module_name(file)) or 0) < FIRST_LAYER_WITH_TORCH]
    low += [file for file in sources if file.startswith("cli/") or file == "__init__.py"]
    found = []
    for file in dict.fromkeys(low):
        body = parse(sources[file])
        inside = {
            id(node)
            for function in walk(body)
            if file.startswith("cli/") and isinstance(function, ast.FunctionDef)
            for node in walk(function)
        }
        guarded = {
            id(node)
            for branch in walk(body)
            if file == "__init__.py" and isinstance(branch, ast.If) and dotted(branch.test) == "TYPE_CHECKING"
            for node in walk(branch)
        }
        found += [
            f"{file}: imports {module}"
            for module, _, node in imports(file, body)
            if module.split(".")[0] in ("torch", "torchao", "transformers")
            and id(node) not in inside
            and id(node) not in guarded
        ]
    return found


def check_local_imports(sources: Sources) -> list[str]:
    return [
        f"{file}: {function.name} imports {module}"
        for file, function in functions(sources)
        if not file.startswith("cli/") and not excused("local import", file, function.name)
        for module, _, _ in imports(file, function)
    ]


def check_sizes(sources: Sources) -> list[str]:
    files = [
        f"{file}: {lines} lines"
        for file, text in sources.items()
        if (lines := len(text.splitlines())) > FILE_LINES and not excused("file", file)
    ]
    lengths = [(num_lines(node), file, node.name) for file, node in functions(sources)]
    long = [
        f"{file}: {name} has {lines} lines"
        for lines, file, name in lengths
        if lines > FUNCTION_LINES and not excused("function", file, name)
    ]
    ordered = sorted(lines for lines, _, _ in lengths)
    p90 = ordered[int(0.9 * (len(ordered) - 1))] if ordered else 0
    return files + long + ([f"90th percentile of function lines is {p90}"] if p90 > FUNCTION_LINES_P90 else [])


def check_parameters(sources: Sources) -> list[str]:
    found = []
    for file, node in functions(sources):
        names = [arg.arg for arg in (*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs)]
        count = len([name for name in names if name not in ("self", "cls")])
        verb = file.startswith("cli/")  # a verb's flags are its parameters
        if count > PARAMETERS and not verb and not excused("parameters", file, node.name):
            found.append(f"{file}: {node.name} takes {count} parameters")
    return found


def check_depth(sources: Sources) -> list[str]:
    bases = {
        node.name: ([dotted(base).split(".")[-1] for base in node.bases], file)
        for file, text in sources.items()
        for node in walk(parse(text))
        if isinstance(node, ast.ClassDef)
    }

    def depth(name: str) -> int:
        return max((1 + depth(base) for base in bases[name][0] if base in bases and base != name), default=0)

    return [
        f"{file}: {name} is {depth(name)} own classes deep"
        for name, (_, file) in bases.items()
        if depth(name) > OWN_DEPTH and not excused("depth", file, name)
    ]


def check_statements(sources: Sources) -> list[str]:
    """`global`, a bare `except`, and promises instead of code."""
    found = []
    for file, text in sources.items():
        for node in walk(parse(text)):
            if isinstance(node, ast.Global):
                found.append(f"{file}:{node.lineno}: global {', '.join(node.names)}")
            if isinstance(node, ast.ExceptHandler) and node.type is None:
                found.append(f"{file}:{node.lineno}: bare except")
            if isinstance(node, ast.Raise) and node.exc is not None and "NotImplementedError" in ast.dump(node.exc):
                found.append(f"{file}:{node.lineno}: NotImplementedError")
        found += [
            f"{file}:{n}: TODO" for n, line in enumerate(text.splitlines(), 1) if "TODO" in line or "FIXME" in line
        ]
    return found


UNSAFE_MODULES = ("pickle", "cloudpickle", "dill", "marshal", "shelve")
UNSAFE_CALLS = ("eval", "exec", "torch.load", "yaml.load", "yaml.unsafe_load", "numpy.load", "np.load")


def check_unsafe(sources: Sources) -> list[str]:
    found = []
    for file, text in sources.items():
        tree = parse(text)
        found += [
            f"{file}: imports {module}"
            for module, name, _ in imports(file, tree)
            if module.split(".")[0] in UNSAFE_MODULES or f"{module}.{name}" in UNSAFE_CALLS
        ]
        found += [
            f"{file}:{node.lineno}: calls {dotted(node.func)}"
            for node in walk(tree)
            if isinstance(node, ast.Call) and dotted(node.func) in UNSAFE_CALLS
        ]
    return [offence for offence in found if not excused("unsafe", offence.split(":")[0])]


# launch/environment.py interprets the variables of every launcher; it is given them.
READS_ENVIRONMENT = {
    "launch/variables.py": "what launchers and their ranks tell each other",
    "parallel/mesh.py": "open_mesh hands them to launch.environment, a function of a mapping",
}


def check_environment(sources: Sources) -> list[str]:
    names = ("os.environ", "os.getenv", "os.putenv", "os.environb")
    found = []
    for file, text in sources.items():
        if file in READS_ENVIRONMENT or excused("environment", file):
            continue
        nodes = walk(parse(text))
        found += [f"{file}:{node.lineno}: {dotted(node)}" for node in nodes if dotted(node) in names]  # type: ignore[attr-defined]
        found += [f"{file}: {m}.{n}" for m, n, _ in imports(file, parse(text)) if f"{m}.{n}" in names]
    return found


def is_private(name: str) -> bool:
    return any(part.startswith("_") and not part.startswith("__") for part in name.split("."))


def foreign_names(file: str, tree: ast.AST) -> dict[str, str]:
    """Local name -> the torch module or thing that it stands for."""
    names = {}
    for node in walk(tree):
        if isinstance(node, ast.Import | ast.ImportFrom):
            origin = next(iter(imports(file, node)))[0]
            if origin.split(".")[0] == "torch":
                whole = isinstance(node, ast.Import)
                for alias in node.names:
                    local = alias.asname or (alias.name.split(".")[0] if whole else alias.name)
                    names[local] = local if whole and not alias.asname else f"{origin}.{alias.name}"
    return names


def check_private_torch(sources: Sources) -> list[str]:
    found = []
    for file, text in sources.items():
        if file.endswith("torch_private.py"):
            continue
        tree = parse(text)
        names = foreign_names(file, tree)
        found += [
            f"{file}: imports {module} {name}"
            for module, name, _ in imports(file, tree)
            if module.split(".")[0] == "torch" and is_private(f"{module}.{name}")
        ]
        found += [
            f"{file}:{node.lineno}: {dotted(node)}"
            for node in walk(tree)
            if isinstance(node, ast.Attribute) and dotted(node).split(".")[0] in names and is_private(dotted(node))
            if node.attr.startswith("_")
        ]
    return found


SETTINGS = ("torch.backends",)  # switches that torch documents as assignments


def check_patches(sources: Sources) -> list[str]:
    """Assignments to attributes of torch's modules and classes."""
    found = []
    for file, text in sources.items():
        names = foreign_names(file, parse(text))
        for node in walk(parse(text)):
            targets = (
                node.targets
                if isinstance(node, ast.Assign)
                else [node.target]
                if isinstance(node, ast.AugAssign)
                else []
            )
            for target in targets:
                name = dotted(target) if isinstance(target, ast.Attribute) else ""
                if name.split(".")[0] in names and not name.startswith(SETTINGS):
                    found.append(f"{file}:{node.lineno}: assigns {name}")
    return found


# ---------------------------------------------------------------- the package, and a planted offence for each check

PLANTED: dict[Callable[[Sources], list[str]], Sources] = {
    check_direction: {"plan/plan.py": "from shardwise.train import step\n", "train/step.py": ""},
    check_rings: {"plan/a.py": "from shardwise.plan import b\n", "plan/b.py": "from shardwise.plan.a import x\n"},
    check_folder_rings: {
        "plan/a/b.py": "from shardwise.plan import c\n",
        "plan/c.py": "import shardwise.plan.a.d",
        "plan/a/d.py": "",
    },
    check_torch_free: {"plan/memory.py": "import torch.nn as nn\n"},
    check_local_imports: {"train/step.py": "def f():\n    import json\n"},
    check_sizes: {"train/step.py": "def f():\n" + "    x = 1\n" * 60},
    check_parameters: {"train/step.py": "def f(a, b, c, d, *, e, f, g): ...\n"},
    check_depth: {"a.py": "class A: ...\nclass B(A): ...\n", "b.py": "class C(a.B): ...\n"},
    check_statements: {"train/step.py": "def f():\n    global x\n    try:\n        x = 1\n    except:\n        pass\n"},
    check_unsafe: {"train/step.py": "import torch\ntorch.load('x')\n"},
    check_environment: {"train/step.py": "import os\nrank = os.environ['RANK']\n"},
    check_private_torch: {"train/step.py": "import torch.distributed as dist\ndist._coalescing_manager()\n"},
    check_patches: {"train/step.py": "from torch import nn\nnn.Linear.forward = None\n"},
}
MORE_PLANTED: list[tuple[Callable[[Sources], list[str]], Sources]] = [
    (check_direction, {"cache.py": ""}),
    (check_direction, {"plan/plan.py": "from .memory import x\n", "plan/memory.py": ""}),
    (check_direction, {"plan/plan.py": "import shardwise\n"}),
    (check_torch_free, {"cli/train.py": "import torch\n"}),
    (check_sizes, {"train/step.py": "x = 1\n" * 401}),
    (check_sizes, {"train/step.py": ("def f():\n" + "    x = 1\n" * 44) * 5}),
    (check_statements, {"train/step.py": "def f():\n    raise NotImplementedError\n"}),
    (check_unsafe, {"train/step.py": "from pickle import loads\n"}),
    (check_environment, {"train/step.py": "from os import getenv\n"}),
    (check_private_torch, {"train/step.py": "from torch.distributed._tensor import x\n"}),
    (check_private_torch, {"train/step.py": "import torch\ntorch._foreach_norm([])\n"}),
]


@cache
def package() -> tuple[tuple[str, str], ...]:
    files = sorted(PACKAGE.rglob("*.py"))
    return tuple((file.relative_to(PACKAGE).as_posix(), file.read_text(encoding="utf-8")) for file in files)


def test_there_is_a_package() -> None:
    assert len(package()) > 10


@pytest.mark.parametrize("check", PLANTED, ids=lambda check: check.__name__)
def test_package(check: Callable[[Sources], list[str]]) -> None:
    offences = check(dict(package()))
    assert not offences, "\n" + "\n".join(offences)


@pytest.mark.parametrize(
    ("check", "sources"), [*PLANTED.items(), *MORE_PLANTED], ids=lambda v: getattr(v, "__name__", "")
)
def test_planted_offence_is_found(check: Callable[[Sources], list[str]], sources: Sources) -> None:
    assert check(sources)


def test_what_tests_take_from_each_other_is_there() -> None:
    """An import that fails in one file of tests is otherwise seen only when all of them run."""
    trees = {file: parse(file.read_text(encoding="utf-8")) for file in sorted(TESTS.rglob("*.py"))}
    defined = {
        ".".join(("tests", *file.relative_to(TESTS).with_suffix("").parts)): set(module_names(tree))
        for file, tree in trees.items()
    }
    missing = [
        f"{file.name}:{node.lineno} takes {alias.name} from {node.module}"
        for file, tree in trees.items()
        for node in walk(tree)
        if isinstance(node, ast.ImportFrom) and node.module in defined
        for alias in node.names
        if alias.name not in defined[node.module]
    ]
    assert missing == []


def test_exceptions_are_still_needed(monkeypatch: pytest.MonkeyPatch) -> None:
    excuses = [place for _, place in EXCEPTIONS] + [file for file in READS_ENVIRONMENT]
    monkeypatch.setattr(f"{__name__}.EXCEPTIONS", {})
    monkeypatch.setattr(f"{__name__}.READS_ENVIRONMENT", {})
    offences = "\n".join(offence for check in PLANTED for offence in check(dict(package())))
    assert [place for place in excuses if place.split(":")[0] not in offences] == []
