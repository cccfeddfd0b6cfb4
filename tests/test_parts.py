"""A part's facts are in its own files: nothing else of the programs knows it by its name. And contracts that every part keeps."""

import ast
import dataclasses
import functools
import re
from pathlib import Path

import pytest

from swarm.errors import UserError
from swarm.founding import check_founding, takes
from swarm.options import build, names_of
from swarm.run.family import families, refused
from swarm.run.loss import losses
from swarm.run.method import methods, owners
from swarm.run.optimizer import OPTIMIZERS
from swarm.run.strategy import strategies
from swarm.run_config import SECTIONS, RunConfig
from swarm.run_defaults import DEFAULTS
from tests.sources import nodes, tree_of

ROOT = Path(__file__).resolve().parent.parent
COMMON_WORDS = ("none", "parameters", "gradients")
"""Strategies whose names are words of other things, too: see test_a_runs_strategy_is_compared_with_no_name."""
FROZEN = "run_defaults.py"
"""What names were in 0.1.0."""
FILES = sorted(path for package in ("swarm", "datasetserver", "peer") for path in (ROOT / package).rglob("*.py"))


@functools.cache
def said_and_compared(path: Path) -> tuple[dict[str, list[int]], list[ast.Compare]]:
    """One look at a file, whose tree is not kept: of all files it is half a million nodes."""
    tree = tree_of(path.read_text(encoding="utf-8"))
    return said_in(tree), [node for node in nodes(tree) if isinstance(node, ast.Compare)]


def said(path: Path) -> dict[str, list[int]]:
    """The texts in a file with their lines, docstrings and notes below fields left out: nothing is decided by those."""
    return said_and_compared(path)[0]


def said_in(tree: ast.AST) -> dict[str, list[int]]:
    unsaid: set[int] = set()
    texts: list[ast.Constant] = []
    for node in nodes(tree):
        if isinstance(node, ast.Expr):
            unsaid.add(id(node.value))
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            texts.append(node)
    found: dict[str, list[int]] = {}
    for node in texts:
        if id(node) not in unsaid:
            found.setdefault(node.value, []).append(node.lineno)
    return found


def own(*homes: str, name: str) -> set[Path]:
    return {ROOT / home / f"{name}.py" for home in homes}


def pattern_of(family) -> re.Pattern:
    """Its name, its class and what people call it, anywhere in a text; what its denoiser is called, as a whole text: `getattr(x, "unet")`."""
    words = "|".join(rf"\b{re.escape(word)}\b" for word in (family.name, family.pipeline, family.title))
    parts = [family.denoiser, *[*family.text_encoders][1:]]
    return re.compile(rf"{words}|^(?:{'|'.join(map(re.escape, parts))})$")


@pytest.mark.parametrize("name", families())
def test_a_familys_names_are_in_its_own_files_alone(name):
    homes = own("swarm/run/families", "peer/models", name=name)
    assert all(path.is_file() for path in homes)
    others = {path for family in families() for path in own("swarm/run/families", "peer/models", name=family)}  # its like: the same parts
    pattern = pattern_of(families()[name])
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
    pattern = pattern_of(families()["sdxl"])
    for code in ("run.family == 'sdxl'", "{'sdxl': 1}", "hasattr(p, 'text_encoder_2')", "type(p).__name__ == 'StableDiffusionXLPipeline'", "f'of SDXL: {x}'"):
        assert any(pattern.search(text) for text in said_in(tree_of(code))), code
    assert not any(pattern.search(text) for text in said_in(tree_of("def f():\n    'Of SDXL.'\n    return 'sdxlarge'")))


@pytest.mark.parametrize(
    ("name", "homes"),
    [
        *((name, ("swarm/run/methods", "peer/methods")) for name in methods()),
        *((name, ("swarm/run/strategies", "peer/sync")) for name in strategies() if name not in COMMON_WORDS),
        *((name, ("swarm/run/losses",)) for name in losses()),
    ],
)
def test_nothing_is_decided_by_a_parts_name_outside_its_own_files(name, homes):
    mine = own(*homes, name=name)
    assert all(path.is_file() for path in mine)
    theirs = set((ROOT / "swarm/run/families").glob("*.py")) if name in losses() else set()  # a family says by which loss it is trained
    others = [path for path in FILES if path not in mine | theirs and path.name != FROZEN]
    assert not [f"{path.relative_to(ROOT)}:{line}" for path in others for line in said(path).get(name, ())]


OPTIMIZERS_TABLE = {ROOT / path for path in ("swarm/run/optimizer.py", "peer/loop/optim.py")}
SAY_AN_OPTIMIZER = {ROOT / path for path in ("swarm/run/core.py", "swarm/run/strategies/gradients.py")}
"""What a flag of old stands for, and whose step a strategy takes."""


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_nothing_is_decided_by_an_optimizers_name_outside_the_table_and_its_builder(name):
    assert all(name in said(path) for path in OPTIMIZERS_TABLE)
    others = [path for path in FILES if path not in OPTIMIZERS_TABLE | SAY_AN_OPTIMIZER and path.name != FROZEN]
    assert not [f"{path.relative_to(ROOT)}:{line}" for path in others for line in said(path).get(name, ())]


def test_a_runs_strategy_is_compared_with_no_name():
    wrong, names = [], {*families(), *methods(), *strategies()}
    for path in FILES:
        for node in said_and_compared(path)[1]:
            sides = (node.left, *node.comparators)
            if any(isinstance(side, ast.Attribute) and side.attr in ("sync", "method", "family") for side in sides):
                with_ = [side.value for side in sides if isinstance(side, ast.Constant)]
                wrong += [f"{path.relative_to(ROOT)}:{node.lineno}" for value in with_ if value in names]
    assert not wrong


# -- every part


PAIRS = [(family, name) for family in families() for name in methods()]
TAKEN = [(family, name) for family, name in PAIRS if takes(families()[family], name)]


def asked_for(name: str) -> dict[str, str]:
    return {"method": name} | ({"placeholder_token": "<x>", "initializer_token": "x"} if methods()[name].asked_by else {})


@pytest.mark.parametrize(("family", "name"), TAKEN)
def test_an_option_of_another_method_or_family_is_refused_where_the_run_is_founded_and_where_it_is_joined(family, name):
    mine = {each for section in methods()[name].sections for each in names_of(section)}
    options = {each: owner for each, owner in owners().items() if each not in mine}
    for each in options:
        with pytest.raises(UserError, match=rf"^{each} is for --method "):
            build(RunConfig, {"family": family, **asked_for(name), each: other_than(each)})
    for each in refused(families()[family]):
        values = {"family": family, **asked_for(name), each: other_than(each)}
        for read in (build, lambda cls, said: cls.from_mapping(said, where="here")):
            with pytest.raises(UserError, match=rf"^{each} is .*, but {family} "):
                check_founding(read(RunConfig, values))
    check_founding(build(RunConfig, {"family": family, **asked_for(name)}))


def test_a_word_is_learned_only_where_diffusers_pipeline_reads_it():
    import diffusers

    words = [name for name, method in methods().items() if method.learns_words]
    for name, family in families().items():
        reads = issubclass(getattr(diffusers, family.pipeline), diffusers.loaders.TextualInversionLoaderMixin)
        assert reads == family.learned_words == all((name, word) in TAKEN for word in words)


@pytest.mark.parametrize("family", families())
def test_text_encoders_are_trained_only_where_one_may_be(family):
    values = {"family": family, "method": "full", "train_text_encoder": True}
    for read in (build, lambda cls, said: cls.from_mapping(said, where="here")):
        if families()[family].trains_texts:
            check_founding(read(RunConfig, values))
        else:
            with pytest.raises(UserError, match=rf"^train_text_encoder is True, but no text encoder of {family} .*Remove --train_text_encoder\."):
                check_founding(read(RunConfig, values))


@pytest.mark.parametrize("name", [name for name, method in methods().items() if method.learns_words])
def test_a_method_that_a_family_cannot_have_is_refused_where_the_run_is_founded_and_where_it_is_joined(name, monkeypatch):
    for family, facts in families().items():
        monkeypatch.setitem(families(), family, dataclasses.replace(facts, learned_words=False))
        values = {"family": family, **asked_for(name)}
        for read in (build, lambda cls, said: cls.from_mapping(said, where="here")):
            with pytest.raises(UserError, match=rf"^method is {name}, but {family} cannot take it.*Use --method full or loha or lokr or lora"):
                check_founding(read(RunConfig, values))


def other_than(name: str):
    """A right value that is not the default."""
    (field,) = (field for field in dataclasses.fields(RunConfig) if field.name == name)
    if field.metadata["choices"]:
        return next(choice for choice in field.metadata["choices"] if choice not in (field.default, "auto", DEFAULTS[name]))
    return {bool: not field.default, int: 3, float: 0.125, str: "word", type(None): True}[type(field.default)]


def test_each_option_belongs_to_one_part_and_each_part_of_a_run_is_known():
    names = [name for section in SECTIONS for name in names_of(section)]
    assert len(names) == len(set(names)) and set(names) == set(DEFAULTS)
    assert {family.loss for family in families().values()} == set(losses())
    assert [method.usual for method in methods().values()].count(True) == 1
    for name, family in families().items():
        taken = {*names} - refused(family).keys()
        assert family.defaults.keys() <= taken and not build(RunConfig, {"family": name}, family.defaults).differing(family.defaults)
        assert family.reader and len(set(family.parts)) == len(family.parts)
