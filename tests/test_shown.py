"""docs/train.md has a table of what is shown for each family, method and source: here it is made from what the tests are run with."""

import ast
import re
from pathlib import Path

from swarm.run.family import families
from swarm.run.method import methods
from tests import tiny
from tests.peer.methods.test_every_family_and_source import FAMILIES
from tests.peer.methods.test_every_pair import PAIRS
from tests.peer.methods.test_every_row import FULLS, LORAS, TURNS, WORDS
from tests.peer.sync.test_every_family import AVERAGED
from tests.sources import tree_of

ROOT = Path(__file__).resolve().parent.parent
PAGE = (ROOT / "docs" / "train.md").read_text(encoding="utf-8")
ONE_FILE = {
    **dict.fromkeys(
        ("sd", "sdxl"),
        "peer/launch/test_starting_model.py::test_a_single_file_is_the_model_and_of_its_config_folder_no_weight_is_read",
    ),
    "flux": "peer/launch/test_starting_model.py::test_a_flux_file_is_all_that_it_holds_and_the_rest_is_the_config_folders",
    "sd3": "peer/models/test_sd3.py::test_a_file_is_all_that_it_holds_and_the_rest_is_the_config_folders",
    **dict.fromkeys(("flux2", "klein"), "peer/models/test_flux2.py::test_a_file_is_the_transformer_and_the_rest_is_the_config_folders"),
    "chroma": "peer/models/test_chroma.py::test_a_file_is_the_transformer_and_the_rest_is_the_config_folders",
    "z_image": "peer/models/test_z_image.py::test_a_file_is_the_transformer_and_all_else_is_the_config_folders",
    "qwen_image": "peer/models/test_qwen_image.py::test_a_file_is_the_transformer_and_all_else_is_the_config_folders",
}


def cell(name: str, method: str) -> str:
    """By which of the page's commands it is shown; '-': it is refused."""
    if not tiny.takes(name, method):
        return "-"
    tried = {"full": name in FULLS, "textual_inversion": name in WORDS, "lora": (name, "") in LORAS}
    product = "P" if TURNS.get(name, method) == method else "p"
    learns = {"full": "F", "textual_inversion": "W", "lora": "L"}.get(method, product)
    shared = [*(["S", "M"] if (name, method) in PAIRS else []), *(["A"] if method == "lora" and name in AVERAGED else [])]
    return " ".join([learns if tried.get(method, (name, method) in LORAS) else "?", *shared])


def row(name: str) -> str:
    cells = [*(cell(name, method) for method in methods()), "D" if name in FAMILIES else "?"]
    return " | ".join([f"| {families()[tiny.FAMILIES[name]].title} | `{name}`", *cells, f"`{ONE_FILE[name]}` |"])


def test_the_table_of_what_is_shown_is_what_the_tests_are_run_with():
    head = f"| family | `NAME` | {' | '.join(f'`{method}`' for method in methods())} | each source | from one file: `tests/` and |"
    wanted = [head, f"|{' --- |' * (len(methods()) + 4)}", *map(row, tiny.ONE_OF_EACH)]
    assert "\n".join(wanted) in PAGE, "docs/train.md, What is shown:\n" + "\n".join(wanted)
    assert not [line for line in wanted if "?" in line]


def test_every_test_that_the_page_names_is_there():
    named = re.findall(r"([\w/]+\.py)::(\w+)", PAGE)
    for file, name in named:
        tree = tree_of((ROOT / "tests" / file.removeprefix("tests/")).read_text(encoding="utf-8"))
        assert name in {node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)}, f"{file}::{name}"
    assert len(named) > 15
