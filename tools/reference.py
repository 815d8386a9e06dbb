"""Write docs/reference.md from the docstrings of the public names. Reads the source, imports none of it."""

from __future__ import annotations

import ast
import inspect
from pathlib import Path

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "src" / "shardwise"
Definition = ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef
HEAD = """# Reference

Every public name of `shardwise`, from its docstring. Written by `make docs`; a test holds it current.
"""


def public_names() -> list[tuple[str, str]]:
    """(module, name) in the order of `_HOMES` in the package's `__init__.py`."""
    tree = ast.parse((PACKAGE / "__init__.py").read_text(encoding="utf-8"))
    (homes,) = [
        node.value for node in tree.body if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "_HOMES"
    ]
    return [(module, name) for module, names in ast.literal_eval(homes).items() for name in names]


def file_of(module: str) -> Path:
    path = ROOT / "src" / module.replace(".", "/")
    return path / "__init__.py" if path.is_dir() else path.with_suffix(".py")


def find(module: str, name: str) -> tuple[ast.stmt, str]:
    """The statement that defines a name in a module, and the docstring (a string below it, for a constant)."""
    body = ast.parse(file_of(module).read_text(encoding="utf-8")).body
    for node, after in zip(body, [*body[1:], None], strict=True):
        if isinstance(node, Definition) and node.name == name:
            return node, ast.get_docstring(node) or ""
        targets = (
            node.targets if isinstance(node, ast.Assign) else [node.target] if isinstance(node, ast.AnnAssign) else []
        )
        if name in [ast.unparse(target) for target in targets]:
            text = after.value.value if isinstance(after, ast.Expr) and isinstance(after.value, ast.Constant) else ""
            return node, inspect.cleandoc(str(text))
    raise SystemExit(f"{module} defines no {name}: correct _HOMES in src/shardwise/__init__.py")


def signature(node: ast.stmt, name: str) -> str:
    if isinstance(node, ast.ClassDef):
        inits = [item for item in node.body if isinstance(item, ast.FunctionDef) and item.name == "__init__"]
        if inits:
            return f"{name}({ast.unparse(without_self(inits[0].args))})"
        values = [item for item in node.body if isinstance(item, ast.AnnAssign)]
        shown = [ast.unparse(item) for item in values if not ast.unparse(item.target).startswith("_")]
        return f"{name}({', '.join(shown)})" if shown else name
    if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
        returns = f" -> {ast.unparse(node.returns)}" if node.returns else ""
        return f"{name}({ast.unparse(node.args)}){returns}"
    return ast.unparse(node)


def without_self(arguments: ast.arguments) -> ast.arguments:
    kept = {**vars(arguments), "args": arguments.args[1:]}
    return ast.arguments(**kept)


def methods(node: ast.stmt) -> list[tuple[str, str]]:
    """(signature, first paragraph) of the public methods and properties of a class that have a docstring."""
    rows = []
    for item in node.body if isinstance(node, ast.ClassDef) else []:
        if isinstance(item, ast.FunctionDef) and not item.name.startswith("_") and ast.get_docstring(item):
            decorators = [ast.unparse(decorator) for decorator in item.decorator_list]
            returns = f" -> {ast.unparse(item.returns)}" if item.returns else ""
            arguments = ast.unparse(item.args if "staticmethod" in decorators else without_self(item.args))
            shown = item.name if "property" in decorators else f"{item.name}({arguments}){returns}"
            first = (ast.get_docstring(item) or "").split("\n\n")[0].replace("\n", " ")
            rows.append((shown, first))
    return rows


def section(module: str, name: str) -> str:
    node, text = find(module, name)
    # A docstring is plain text: a code fence keeps its examples and its Args as they were written.
    lines = [f"## {name}", "", f"`{module}`", "", "```text", signature(node, name), "```", ""]
    if text:
        lines += ["```text", text.replace("```", "'''"), "```", ""]
    lines += [f"- `{shown}`: {first}" for shown, first in methods(node)]
    return "\n".join(lines).rstrip() + "\n"


def reference() -> str:
    """The whole page."""
    return HEAD + "\n" + "\n".join(section(module, name) for module, name in public_names())


if __name__ == "__main__":
    (ROOT / "docs" / "reference.md").write_text(reference(), encoding="utf-8")
