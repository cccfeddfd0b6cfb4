"""What of plain English a program can measure, in pages and in messages: lines, sentences, and terms that we no longer use."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.sources import nodes, tree_of

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

RETIRED_IN_MESSAGES = {
    r"\b(?<!there )(is|are) no (?!longer\b|more\b)": "is not a",
    r"\bwhoever\b": "anyone who",
    r"\banew\b": "again",
    r"\bshall\b": "is to, or the present tense",
    r"\bpassed over\b": "ignored",
    r"\bsays? nothing\b": "has no effect, or: does not answer",
    r"\bvouch": "sign",
    r"\bas to the (server|peer)\b": "the server's",
    r"\bin vain\b": "name what is lost",
}
"""Of these, documentation has a few in other senses."""
ROOMS = ("swarm", "peer", "datasetserver", "simulation", "scripts", "benchmarks")
LOGS = {"debug", "info", "warning", "error", "exception", "log"}
ERRORS = re.compile(r"(Error|Refused|Refusal|Lost|add_argument|print)$")


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
    assert len(sources()) > 300
    found = [
        f"{source.relative_to(ROOT)}:{number}: {line.strip()}"
        for source in sources()
        for number, line in enumerate(source.read_text(encoding="utf-8").splitlines(), start=1)
        if re.search(r"\b[Ss]o (many|long)\b", line)
    ]
    assert not found, "name the parameter, or say how many"


def sources() -> list[Path]:
    """Every program and module; some scripts have no suffix."""
    files = [path for room in ROOMS for path in (ROOT / room).rglob("*") if path.is_file()]
    return [path for path in files if path.suffix == ".py" or (not path.suffix and re.match(rb"#!.*python", path.read_bytes()))]


def text_of(node: ast.AST) -> str:
    """What a program may say by an expression: a text's own words, with {} for a value; "" for what has none."""
    if isinstance(node, ast.Constant):
        return node.value if isinstance(node.value, str) else ""
    if isinstance(node, ast.JoinedStr):
        return "".join(text_of(part) if isinstance(part, ast.Constant) else "{}" for part in node.values)
    if isinstance(node, ast.BinOp):
        return text_of(node.left) + text_of(node.right)
    if isinstance(node, ast.IfExp):
        return f"{text_of(node.body)}\n\n{text_of(node.orelse)}"
    return ""


def messages(source: str) -> list[tuple[int, str]]:
    """(line, text) of log lines, errors, a flag's help and printed lines."""
    found = []
    for call in nodes(tree_of(source)):
        if isinstance(call, ast.Call):
            logs = isinstance(call.func, ast.Attribute) and call.func.attr in LOGS
            name = call.func.attr if isinstance(call.func, ast.Attribute) else getattr(call.func, "id", "")
            if logs or ERRORS.search(name):
                said = [*call.args, *(keyword.value for keyword in call.keywords)]
                found += [(call.lineno, text) for text in map(text_of, said) if text]
    return found


def faults(text: str) -> list[str]:
    """What is wrong with a message."""
    retired = {rf"\b{re.escape(term)}\b": instead for term, instead in RETIRED.items()} | RETIRED_IN_MESSAGES
    found = [f"write: {instead}" for term, instead in retired.items() if re.search(term, text, re.IGNORECASE)]
    return found + [f"split: {one}" for one in sentences(text) if len(one.split()) > MOST_WORDS]


def test_log_lines_and_errors_are_plain_english():
    found, seen = [], 0
    for source in sources():
        for number, text in messages(source.read_text(encoding="utf-8")):
            seen += 1
            found += [f"{source.relative_to(ROOT)}:{number}: {text!r}: {fault}" for fault in faults(text)]
    assert seen > 2000 and not found


@pytest.mark.parametrize(
    ("call", "instead"),
    [
        ('log.info("the landing of round %d", 3)', "rebase"),
        ('raise UserError(f"{path} is no LoRA.", fix="Give one.")', "is not a"),
        ('raise UserError("It is wrong.", fix="Give --dataset " "as to the server.")', "the server's"),
        ('parser.add_argument("--host", help="open to whoever comes")', "anyone who"),
        ('say.warning("left" if gone else "begins anew")', "again"),
        (f'print("{"word " * 36}")', "split"),
    ],
)
def test_a_message_in_words_that_we_gave_up_is_found(call, instead):
    assert instead in " ".join(fault for _, text in messages(call) for fault in faults(text))


@pytest.mark.parametrize("text", ["There is no file {}.", "It is no longer here.", "--token is not a token."])
def test_a_plain_message_has_no_faults(text):
    assert faults(text) == []
