"""What a person meets is documented, and what is documented can be met: endpoints, metrics, exit codes, programs, lines of the log."""

import ast
import configparser
import json
import re
import time
from pathlib import Path

import promql_parser
import pytest
from prometheus_client import generate_latest
from prometheus_client.parser import text_string_to_metric_families

from datasetserver.app import ENDPOINTS
from datasetserver.metrics import Metrics
from peer.figures.metrics import METRICS
from peer.figures.prometheus import PREFIX, registry
from swarm.errors import STOPPED_AT_ONCE, ExitCode
from swarm.protocol import BANNED
from swarm.signed_request import CLOCK_DIFFERS
from swarm.status import summarize
from tests.sources import nodes, tree_of
from tests.swarm.test_status import a_peer, a_run

ROOT = Path(__file__).resolve().parent.parent
DOCS = ROOT / "docs"
PAGES = [ROOT / "README.md", *sorted(DOCS.glob("*.md"))]
DASHBOARD = json.loads((ROOT / "scripts" / "deploy" / "grafana" / "dashboard.json").read_text(encoding="utf-8"))
EXIT_CODES, FIGURES, TROUBLE = "### Exit codes", "## Names of the figures", "## Troubleshooting"
"""Headings of docs/operate.md."""


def page(name: str) -> str:
    return (DOCS / name).read_text(encoding="utf-8")


def section(name: str, heading: str) -> str:
    """What a page says below a heading, up to the next one of its level or above."""
    level = len(heading) - len(heading.lstrip("#"))
    _, found, rest = page(name).partition(f"\n{heading}\n")
    assert found, f"{name} has no heading '{heading}'"
    return re.split(rf"^#{{1,{level}}} ", rest, maxsplit=1, flags=re.MULTILINE)[0]


# -- endpoints


def test_every_endpoint_is_in_the_page_of_the_http_interface_and_no_other():
    code = {(endpoint.method, re.sub(r"{\w+}", "*", endpoint.path)) for endpoint in ENDPOINTS}
    rows = [row.split("|")[1] for row in page("http.md").splitlines() if row.startswith("| `")]
    documented = set()
    for row in rows:
        methods = re.findall(r"\b(GET|POST|PUT|DELETE)\b", row)
        paths = [re.sub(r"<\w+>", "*", path) for path in re.findall(r"[` ](/[^` ]*)`", row)]
        assert methods and paths, f"neither method nor path in {row}"
        documented |= {(method, path) for method in methods for path in paths}
    assert not code - documented, f"docs/http.md has no row for {sorted(code - documented)}: add it under 'Endpoints'"
    assert not documented - code, f"docs/http.md has rows for {sorted(documented - code)}, which ENDPOINTS of datasetserver/app.py does not have"


def test_every_error_code_is_in_the_page_of_the_http_interface_and_no_other():
    written = "".join(path.read_text(encoding="utf-8") for path in (ROOT / "datasetserver").glob("*.py"))
    code = set(re.findall(r"(?:Refused|RefusedWith|error)\(\s*(?:\d{3}|status),\s*\"([a-z_]+)\"", written))
    code |= {BANNED, CLOCK_DIFFERS, "not_found", "method_not_allowed"}  # the last two: aiohttp's own
    table = page("http.md").partition("## Errors")[2].partition("\n## ")[0]
    rows = [row.split("|")[2] for row in table.splitlines() if re.match(r"\| \d", row)]
    assert {name for row in rows for name in re.findall(r"`(\w+)`", row)} == code


# -- metrics


def exposed(text: bytes) -> set[str]:
    """Every name that a query can ask for."""
    return {sample.name for family in text_string_to_metric_families(text.decode()) for sample in family.samples}


def server_metrics() -> set[str]:
    metrics = Metrics()
    with metrics.watch("/", "GET"):
        metrics.sent(1)
    return exposed(metrics.text(peers=2, progress=summarize(a_run(), [a_peer()], now=time.time()) | {"ledger": {"counted": 1}}))


def peer_metrics() -> set[str]:
    return exposed(generate_latest(registry(lambda: {metric.name: 1 for metric in METRICS}, {"run": "x"})))


def test_every_metric_is_in_the_page_about_operating_and_no_other():
    documented = set(re.findall(r"`(dd_\w*[a-z0-9])`", section("operate.md", FIGURES)))
    ours = {name for name in server_metrics() | peer_metrics() if name.startswith("dd_") and not name.endswith("_created")}
    bare = {re.sub(r"_(bucket|sum|count)$", "", name) if name.startswith("dd_http_seconds") else name for name in ours}
    assert documented == bare


def test_the_page_about_operating_gives_each_figure_its_one_name():
    lines = [row for row in section("operate.md", FIGURES).splitlines() if row.startswith("| `")]
    rows = {cells[1].strip(" `"): cells for cells in (row.split("|") for row in lines)}
    for metric in METRICS:
        *_, prometheus, meaning, _ = rows[metric.name]
        assert prometheus.strip(" `") == PREFIX + metric.name + ("_total" if metric.counts else "") and meaning.strip() == metric.help


# -- the dashboard


def queries() -> list[str]:
    variables = [v["query"]["query"] for v in DASHBOARD["templating"]["list"] if v["type"] == "query"]
    asked = [re.fullmatch(r"label_values\((\w+), \w+\)", query)[1] for query in variables]
    return asked + [target["expr"] for panel in DASHBOARD["panels"] for target in panel.get("targets", ())]


def test_the_dashboard_asks_only_for_metrics_that_server_or_peer_expose():
    there = server_metrics() | peer_metrics()
    for query in queries():
        words = re.sub(r"\{[^}]*\}|\[[^]]*\]|\"[^\"]*\"", " ", query)
        asked = set(re.findall(r"\b(?:dd|process)_\w+", words))
        assert asked and asked <= there, query


def test_every_query_of_the_dashboard_is_one():
    with pytest.raises(ValueError):
        promql_parser.parse("sum by (le (rate(x[5m]))")
    for query in queries():
        promql_parser.parse(query)


def test_the_dashboards_panels_have_a_place_and_a_source_each():
    panels = DASHBOARD["panels"]
    assert len({panel["id"] for panel in panels}) == len(panels)
    taken = set()
    for panel in panels:
        place = panel["gridPos"]
        cells = {(x, y) for x in range(place["x"], place["x"] + place["w"]) for y in range(place["y"], place["y"] + place["h"])}
        assert not cells & taken and max(x for x, _ in cells) < 24, panel["title"]
        taken |= cells
        if panel["type"] != "row":
            assert panel["datasource"] == {"type": "prometheus", "uid": "${datasource}"} and panel["title"] and panel["targets"]
            assert len({target["refId"] for target in panel["targets"]}) == len(panel["targets"])
    assert {v["name"] for v in DASHBOARD["templating"]["list"]} == {"datasource", "server", "peer"}


# -- exit codes


def exit_codes() -> dict[int, tuple[str, str]]:
    """What a code means, and what dd-peer does about it."""
    table = re.search(r"\| code \| meaning \| `dd-peer` \|\n\|[-|]+\|\n((?:\|.*\n)+)", section("operate.md", EXIT_CODES))
    rows = [[cell.strip() for cell in row.strip("|").split("|")] for row in table[1].splitlines()]
    assert len({int(code) for code, _, _ in rows}) == len(rows)
    return {int(code): (meaning, action) for code, meaning, action in rows}


def test_every_exit_code_is_in_the_table_and_no_other():
    assert sorted(exit_codes()) == sorted([*map(int, ExitCode), STOPPED_AT_ONCE])


def test_what_each_exit_code_means_and_what_dd_peer_does_about_it_is_said():
    assert [code for code, said in exit_codes().items() if not all(said)] == []


# -- programs


def programs() -> set[str]:
    setup = configparser.ConfigParser()
    setup.read(ROOT / "setup.cfg")
    return {line.split("=")[0].strip() for line in setup["options.entry_points"]["console_scripts"].strip().splitlines()}


def test_every_program_is_in_the_docs_and_no_other():
    text = "\n".join(path.read_text(encoding="utf-8") for path in PAGES)
    text = re.sub(r"--[\w-]+ dd-\w+", "", text)  # what somebody's cloud calls its machines
    named = set(re.findall(r"(?<![\w/-])(?:\.venv/bin/)?(dd-[a-z]+)\b(?!-|/)", text))
    assert named == programs()
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    assert {name for name in programs() if name not in readme} == set()


# -- lines of the log


def said_by_the_code() -> set[str]:
    """Every text that the code can say, with … for what differs. Docstrings and what is written below a field are read by nobody who runs it."""
    found = set()
    for package in ("swarm", "peer", "datasetserver"):
        for path in (ROOT / package).rglob("*.py"):
            tree = tree_of(path.read_text(encoding="utf-8"))
            unsaid, said = set(), []
            for node in nodes(tree):
                if isinstance(node, ast.Expr):
                    unsaid.add(id(node.value))
                elif isinstance(node, ast.JoinedStr):
                    unsaid.update(map(id, node.values))
                    said.append(node)
                elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                    said.append(node)
            for node in said:
                if id(node) not in unsaid:
                    parts = node.values if isinstance(node, ast.JoinedStr) else [node]
                    text = "".join(part.value if isinstance(part, ast.Constant) else "…" for part in parts)
                    found.add(re.sub(r"%[-\d.]*[a-z]", "…", text))
    return found


def words(text: str) -> list[str]:
    return re.findall(r"\w+", text)


def is_said(line: str, texts: set[str]) -> bool:
    """Whether one of `texts` has all words of `line`, in their order, where … is anything.

    Only words: whether the code puts another figure between them, or a full stop after them, is no concern of the page's reader.
    """
    pattern = r"\b.*\b".join(r"\W+".join(map(re.escape, words(part))) for part in line.split("…") if words(part))
    begun = "" if line.startswith("…") else r"(?:^|[.;:] )\W*"  # of a text, or of a sentence in it
    first = words(line)[0]  # of 6,000 texts a few have it
    return any(re.search(begun + pattern, text, re.DOTALL) for text in texts if first in text)


def test_every_line_in_the_page_about_trouble_is_one_that_the_code_says():
    quoted = [re.match(r"\| `(.*?)`", row)[1] for row in section("operate.md", TROUBLE).splitlines() if row.startswith("| `")]
    texts = said_by_the_code()
    assert len(quoted) == len(set(quoted)) > 40
    assert [line for line in quoted if not is_said(line, texts)] == []  # change the page with the code


def test_a_line_is_known_by_its_words_and_not_by_what_stands_between_them():
    texts = {"round=… peers=… not averaged: …", "Cannot write …"}
    assert is_said("round=… not averaged: …", texts) and is_said("Cannot write …: ….", texts)
    assert not is_said("round=… was not averaged: …", texts) and not is_said("averaged: …", texts)
    assert not is_said("round=… Cannot write …", texts), "half of it in one text, half in another"
