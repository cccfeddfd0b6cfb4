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
    pages = [ROOT / "README.md", *(ROOT / "docs").rglob("*.md")]
    broken = [
        f"{page.relative_to(ROOT)}: {target}"
        for page in pages
        for target in re.findall(r"\]\(([^)#\s]+)", page.read_text(encoding="utf-8"))
        if "://" not in target and not (page.parent / target).exists()
    ]

    assert broken == []


def test_the_readmes_table_of_links_is_what_the_arithmetic_gives():
    assert advice.table() in (ROOT / "README.md").read_text(encoding="utf-8"), "python -m swarm.advice prints it"


def test_the_table_of_memory_is_what_the_arithmetic_gives():
    assert memory.table() in (ROOT / "docs" / "memory.md").read_text(encoding="utf-8"), "python -m benchmarks.memory --counted prints it"
