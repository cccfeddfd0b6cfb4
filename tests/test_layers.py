"""The rules of dependency in docs/internals.md, read from the code itself."""

import ast
import functools
import re
from pathlib import Path

import pytest

from tests.sources import nodes, statements, tree_of

ROOT = Path(__file__).resolve().parent.parent
FILES = sorted(
    path.relative_to(ROOT).as_posix() for package in ("swarm", "datasetserver", "peer") for path in (ROOT / package).rglob("*.py")
)
ROOMS = ("models", "methods", "data", "sync")

HOMES = {  # a library: the files and folders that may import it
    "hivemind": (
        "swarm/daemon.py",
        "swarm/dht.py",
        "swarm/dht_",
        "swarm/identity.py",
        "swarm/maddrs.py",
        "swarm/places.py",
        "swarm/ports.py",
        "swarm/reachability.py",
        "peer/sync/",
    ),
    "diffusers": (
        "peer/models/",
        "peer/methods/",
        "peer/drawing/",
        "peer/results/",
        "peer/generate.py",
        "peer/loop/schedule.py",
        "peer/loop/ema.py",
    ),
    "transformers": ("peer/models/", "peer/methods/", "peer/results/", "peer/loop/optim.py"),
    "peft": ("peer/methods/", "peer/results/"),
    "aiohttp": ("datasetserver/", "peer/data/client/", "swarm/page/"),
    "bitsandbytes": ("peer/loop/optim.py", "peer/models/diffusion/packed.py"),
    "wandb": ("peer/figures/trackers.py",),
    "PIL": ("swarm/picture_file.py", "peer/samples/pictures.py", "datasetserver/"),
}

BY_NAME = {  # an extra: the one file that computes with it; device.py looks whether PyTorch/XLA is there
    "torch_xla": {"peer/machine/xla.py", "peer/machine/device.py"},
    "intel_extension_for_pytorch": {"peer/machine/ipex.py"},
}


# What the loop is handed: it knows the parts' classes by name, for type checkers only, and makes none of them.
HANDED_TO_THE_LOOP = (
    "peer.loop.accounts.Accounts",
    "peer.loop.clipping.Clip",
    "peer.loop.fused.FusedStep",
    "peer.machine.device.Precision",
    "peer.machine.device.RankGroup",
    "peer.loop.ema.Ema",
    "peer.samples.feed.Feed",
    "peer.samples.feed.Work",
    "peer.figures.metrics.Progress",
    "peer.loop.occasions.Occasions",
)


def for_type_checkers(tree: ast.Module) -> set[ast.AST]:
    guarded = (node for node in ast.walk(tree) if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.dump(node.test))
    return {inner for node in guarded for statement in node.body for inner in ast.walk(statement)}


@functools.cache
def imports(file: str) -> set[str]:
    """Modules that `file` imports anywhere, for type checkers only too, as 'a.b' for both `import a.b` and `from a import b`."""
    tree = tree_of((ROOT / file).read_text(encoding="utf-8"))
    found: set[str] = set()
    for node in statements(tree):
        if isinstance(node, ast.Import):
            found |= {name.name for name in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{file}: relative import"
            found |= {f"{node.module}.{name.name}" for name in node.names}
    return found


def starts(module: str, *prefixes: str) -> bool:
    return any(module == prefix or module.startswith(prefix + ".") for prefix in prefixes)


@pytest.mark.parametrize("file", FILES)
def test_a_file_imports_only_what_its_layer_may(file):
    package, *rest = file.removesuffix(".py").split("/")
    forbidden = {"swarm": ("peer", "datasetserver"), "datasetserver": ("peer",), "peer": ("datasetserver",)}[package]
    ours = {module for module in imports(file) if starts(module, "swarm", "peer", "datasetserver")}
    wrong = {module for module in ours if starts(module, *forbidden)}
    wrong |= {module for module in imports(file) if starts(module, "simulation", "benchmarks", "tests")}
    inside = {module for module in ours if starts(module, "peer")}
    if package == "peer" and rest[0] in ROOMS:
        # What several parts of a room share lies in a folder of it, such as sync/engine; the parts themselves are the room's modules.
        shared = [f"peer.{rest[0]}.{path.name}" for path in (ROOT / "peer" / rest[0]).iterdir() if path.is_dir()]
        wrong |= {
            module
            for module in inside
            if not starts(module, "peer.contracts", "peer.machine.device", "peer.loop.rounding", "peer.loop.schedule", *shared)
        }
    if file == "peer/loop/train.py":
        wrong |= {module for module in inside if not starts(module, "peer.contracts", *HANDED_TO_THE_LOOP)}
    assert not wrong, f"{file} imports {sorted(wrong)}"


def test_the_loop_makes_no_part_itself():
    """Nothing of what it is handed is there when it runs; and no exception stands in the list that is not needed."""
    tree = tree_of((ROOT / "peer/loop/train.py").read_text(encoding="utf-8"))
    guarded = {
        f"{node.module}.{name.name}" for node in for_type_checkers(tree) if isinstance(node, ast.ImportFrom) for name in node.names
    }
    assert guarded >= set(HANDED_TO_THE_LOOP)
    hidden = for_type_checkers(tree)
    others = [node for node in ast.walk(tree) if isinstance(node, ast.ImportFrom) and node not in hidden]
    assert not {f"{node.module}.{name.name}" for node in others for name in node.names} & set(HANDED_TO_THE_LOOP)


@pytest.mark.parametrize("library", HOMES)
def test_a_big_library_is_imported_in_its_home_only(library):
    wrong = [file for file in FILES if not file.startswith(HOMES[library]) and any(starts(module, library) for module in imports(file))]
    assert not wrong


@pytest.mark.parametrize("library", BY_NAME)
def test_an_extra_is_imported_in_one_file(library):
    """By its name as a text, so that nothing imports it unasked."""
    found = set()
    for file in FILES:
        if library in (text := (ROOT / file).read_text(encoding="utf-8")):
            texts = [str(node.value) for node in nodes(tree_of(text)) if isinstance(node, ast.Constant)]
            if any(re.fullmatch(rf"{library}(\.\w*)*", value) for value in texts) or any(starts(module, library) for module in imports(file)):
                found.add(file)
    assert found == BY_NAME[library]
