"""Our sources as several tests of rules read them: walks over their syntax trees, and the modules of a room."""

import ast
import gc
import importlib
import pkgutil
from collections.abc import Iterator


def parts(room: str) -> list[str]:
    """Names that may be chosen in `peer/<room>`: its modules, sub-packages left out."""
    package = importlib.import_module(f"peer.{room}")
    return sorted(info.name for info in pkgutil.iter_modules(package.__path__) if not info.ispkg)


def tree_of(source: str) -> ast.Module:
    """The syntax tree of a file's text.

    Without the collector meanwhile: where that ends what an earlier test left open, and an error is told, Python 3.11 parses within parsing,
    and fails with "AST constructor recursion depth mismatch".
    """
    collects = gc.isenabled()
    gc.disable()
    try:
        return ast.parse(source)
    finally:
        if collects:
            gc.enable()


def nodes(tree: ast.AST) -> Iterator[ast.AST]:
    """`tree` and all below it, in no order that anybody may rely on: in a third of the time that `ast.walk` takes for the 300 files."""
    waiting = [tree]
    while waiting:
        yield (node := waiting.pop())
        for value in vars(node).values():
            if type(value) is list:
                waiting += [each for each in value if isinstance(each, ast.AST)]
            elif isinstance(value, ast.AST):
                waiting.append(value)


def statements(tree: ast.Module) -> Iterator[ast.stmt]:
    """All statements of a module, those within others too: a tenth of its nodes."""
    waiting: list[ast.AST] = [tree]
    while waiting:
        node = waiting.pop()
        if isinstance(node, ast.stmt):
            yield node
        for inner in ("body", "orelse", "finalbody", "handlers", "cases"):
            waiting += getattr(node, inner, ())
