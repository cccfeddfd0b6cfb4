"""A part's facts are in its own files: nothing else of the programs knows a family by its name."""

import ast
import re
from pathlib import Path

import pytest

from swarm.run.family import families

ROOT = Path(__file__).resolve().parent.parent
FILES = sorted(path for package in ("swarm", "datasetserver", "peer") for path in (ROOT / package).rglob("*.py"))


def said(path: Path) -> dict[str, list[int]]:
    """The texts in a file with their lines, docstrings and notes below fields left out: nothing is decided by those."""
    return said_in(ast.parse(path.read_text(encoding="utf-8")))


def said_in(tree: ast.AST) -> dict[str, list[int]]:
    unsaid = {node.value for node in ast.walk(tree) if isinstance(node, ast.Expr)}
    found: dict[str, list[int]] = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and node not in unsaid:
            found.setdefault(node.value, []).append(node.lineno)
    return found


def own(*homes: str, name: str) -> set[Path]:
    return {ROOT / home / f"{name}.py" for home in homes}


def names_of(family) -> re.Pattern:
    """Its name, its class and what people call it, anywhere in a text; what its denoiser is called, as a whole text: `getattr(x, "unet")`."""
    words = "|".join(rf"\b{re.escape(word)}\b" for word in (family.name, family.pipeline, family.title))
    parts = [family.denoiser, *[*family.text_encoders][1:]]
    return re.compile(rf"{words}|^(?:{'|'.join(map(re.escape, parts))})$")


@pytest.mark.parametrize("name", families())
def test_a_familys_names_are_in_its_own_files_alone(name):
    homes = own("swarm/run/families", "peer/models", name=name)
    assert all(path.is_file() for path in homes)
    others = {path for family in families() for path in own("swarm/run/families", "peer/models", name=family)}  # its like: the same parts
    pattern = names_of(families()[name])
    wrong = [
        f"{path.relative_to(ROOT)}:{line} {text!r}"
        for path in FILES
        if path not in homes | others
        for text, lines in said(path).items()
        if pattern.search(text)
        for line in lines
    ]
    assert not wrong, "ask swarm/run/family.py instead"


def test_a_name_is_found_wherever_something_could_be_decided_by_it():
    pattern = names_of(families()["sdxl"])
    for code in ("run.family == 'sdxl'", "{'sdxl': 1}", "hasattr(p, 'text_encoder_2')", "type(p).__name__ == 'StableDiffusionXLPipeline'", "f'of SDXL: {x}'"):
        assert any(pattern.search(text) for text in said_in(ast.parse(code))), code
    assert not any(pattern.search(text) for text in said_in(ast.parse("def f():\n    'Of SDXL.'\n    return 'sdxlarge'")))
