"""What of plain English a program can measure, in the pages that people read: lines, sentences, and terms that we no longer use."""

import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
MADE = {"options.md"}
"""Written by scripts/write-options from the code's own texts."""
MOST_CHARACTERS, OF_README, MOST_WORDS = 120, 160, 35
"""The README has wider lines, so that it stays within 120 of them."""
RETIRED = {
    "landing": "rebase",
    "takeover": "catch-up",
    "swarm_epoch": "round",
    "book of who has come": "pending group",
    "found out by itself": "detected automatically",
    "so many": "a number",
    "so long": "a number",
    "so often": "a number",
    "shares the fate": "fails like",
}


def lines(page: Path) -> Iterator[tuple[int, str]]:
    """(number, text) of the lines that are read as text: without code and pictures."""
    code = False
    for number, line in enumerate(page.read_text(encoding="utf-8").splitlines(), start=1):
        code ^= line.lstrip().startswith("```")
        if not code and not line.lstrip().startswith(("```", "    ", "![")):
            yield number, line


def sentences(text: str) -> list[str]:
    """Of paragraphs and points, each by itself; a table's cell is one."""
    plain = re.sub(r"\[([^]]*)\]\([^)]*\)", r"\1", re.sub(r"`[^`]*`", "code", text))
    blocks = re.split(r"\n\s*\n|\n(?=\s*(?:[*|#-]|\d+\.) )|(?<=\|)\n|(?<!\|) \| ", plain)
    return [sentence for block in blocks for sentence in re.split(r"(?<=[.!?:;])\s+", block.strip()) if sentence]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_lines_of_text_fit_a_screen(page):
    most = OF_README if page.name == "README.md" else MOST_CHARACTERS
    long = [f"{page.name}:{number}: {len(line)}" for number, line in lines(page) if len(line) > most and not line.startswith("|")]
    assert page.name in MADE or not long, "break these lines"


def test_the_readme_is_read_in_a_sitting():
    assert len((ROOT / "README.md").read_text(encoding="utf-8").splitlines()) <= 120


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_a_sentence_is_read_once(page):
    text = "\n".join(line for _, line in lines(page))
    long = [f"{len(one.split())} words: {one}" for one in sentences(text) if len(one.split()) > MOST_WORDS]
    assert page.name in MADE or not long, f"split these sentences of {page.name}"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_a_term_that_we_gave_up_does_not_come_back(page):
    found = [
        f"{page.name}:{number}: {term}; write: {instead}"
        for number, line in lines(page)
        for term, instead in RETIRED.items()
        if re.search(rf"\b{re.escape(term)}\b", line, re.IGNORECASE)
    ]
    assert not found


def test_code_says_numbers_too():
    rooms = ("swarm", "peer", "datasetserver", "simulation", "scripts", "benchmarks")
    sources = [source for room in rooms for source in (ROOT / room).rglob("*.py")]
    assert len(sources) > 300
    found = [
        f"{source.relative_to(ROOT)}:{number}: {line.strip()}"
        for source in sources
        for number, line in enumerate(source.read_text(encoding="utf-8").splitlines(), start=1)
        if re.search(r"\b[Ss]o (many|long)\b", line)
    ]
    assert not found, "name the parameter, or say how many"
