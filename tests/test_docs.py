"""The documentation says what the code does."""

import importlib.machinery
import importlib.util
import re
from pathlib import Path

from benchmarks import memory
from swarm import advice

ROOT = Path(__file__).resolve().parent.parent


def test_the_page_of_options_is_what_the_code_declares():
    loader = importlib.machinery.SourceFileLoader("write_options", str(ROOT / "scripts" / "write-options"))
    module = importlib.util.module_from_spec(importlib.util.spec_from_loader("write_options", loader))
    loader.exec_module(module)

    assert (ROOT / "docs" / "options.md").read_text(encoding="utf-8") == module.page(), "run scripts/write-options"


def test_every_link_between_our_pages_leads_somewhere():
    pages = [ROOT / "README.md", *(ROOT / "docs").rglob("*.md"), *(ROOT / "benchmarks").rglob("*.md")]
    broken = [
        f"{page.relative_to(ROOT)}: {target}"
        for page in pages
        for target in re.findall(r"\]\(([^)#\s]+)", page.read_text(encoding="utf-8"))
        if "://" not in target and not (page.parent / target).exists()
    ]

    assert broken == []


def test_the_table_of_links_is_what_the_arithmetic_gives():
    assert advice.table() in (ROOT / "docs" / "host.md").read_text(encoding="utf-8"), "python -m swarm.advice prints it"


def test_the_table_of_memory_is_what_the_arithmetic_gives():
    assert memory.table() in (ROOT / "docs" / "hardware.md").read_text(encoding="utf-8"), "python -m benchmarks.memory --counted prints it"


def test_the_way_of_a_sample_is_told_in_files_and_containers_that_there_are():
    page = (ROOT / "docs" / "internals.md").read_text(encoding="utf-8")
    rows = [row.split(" | ") for row in page.partition("## The way of a sample")[2].partition("## Processes")[0].splitlines() if row.startswith("| `")]
    files, beside = [], ROOT
    for told, *_ in rows:
        for name in re.findall(r"`([^`]+\.py)`", told):
            whole = name.split("/")[0] in ("swarm", "datasetserver", "peer")
            files.append(ROOT / name if whole else beside / name)
            beside = files[-1].parent if whole else beside
    there = [path for path in files if path.is_file()]
    assert [path for path in files if path not in there and not (path.name == "NAME.py" and path.parent.is_dir())] == []
    code = "".join(path.read_text(encoding="utf-8") for path in [ROOT / "peer" / "contracts.py", *there])
    containers = [name for *_, hands_on in rows for name in re.findall(r"`(\w+)`", hands_on)]
    assert [name for name in containers if f"class {name}" not in code] == []
    assert f"These are {len(files)} files" in page and f"and {len(containers) - containers.index('Sample')} containers" in page
