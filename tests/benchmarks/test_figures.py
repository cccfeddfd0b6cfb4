"""benchmarks/all: one command for each figure, and the page that it writes."""

import dataclasses
import json
import sys

import pytest

from benchmarks import figures
from benchmarks.figures import CLAIMS, Claim, page, run
from swarm.errors import UserError
from tests.conftest import ROOT

BODY = "import json, pathlib, sys; pathlib.Path(sys.argv[1], 'told').write_text(json.dumps({'rounds': 7})); print('so'); print('{\"rounds\":3}'); sys.exit(%d)"


def claim(tmp_path, file="", code=0):
    (tmp_path / "program.py").write_text(BODY % code)
    command = f"{sys.executable} {tmp_path}/program.py {{folder}}"
    return Claim("Rounds", command, "3 rounds", lambda said: f"{said['rounds']} rounds", lambda said: said["rounds"] == 3, file)


def test_a_figure_is_taken_from_the_last_line_or_the_file_that_a_program_writes(tmp_path):
    one = run("rounds", claim(tmp_path))
    assert one["figure"] == "3 rounds" and one["met"] and one["commit"]
    one = run("rounds", claim(tmp_path, "told"))
    assert one["figure"] == "7 rounds" and not one["met"]
    assert not run("rounds", claim(tmp_path, code=1))["met"]


def test_a_program_that_ends_without_its_last_line_is_named(tmp_path):
    broken = Claim("Rounds", f"{sys.executable} -c 1/0", "3", str, bool)
    with pytest.raises(UserError, match=r"rounds: .* ended with 1 and said: "):
        run("rounds", broken)


def test_root_needs_no_sudo_and_others_without_it_are_told(tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    asking = dataclasses.replace(claim(tmp_path), command=f"sudo {claim(tmp_path).command}")
    monkeypatch.setattr("os.geteuid", lambda: 0)
    assert run("rounds", asking)["met"]
    monkeypatch.setattr("os.geteuid", lambda: 1000)
    with pytest.raises(UserError, match="rounds: there is no 'sudo' here"):
        run("rounds", asking)


def test_a_row_that_fails_leaves_the_others_and_the_page_is_written_after_each(tmp_path, monkeypatch, capsys):
    broken = Claim("Broken", f"{sys.executable} -c 1/0", "3", str, bool)
    monkeypatch.setattr(figures, "CLAIMS", {"broken": broken, "rounds": claim(tmp_path)})
    monkeypatch.setattr(figures, "RECORD", tmp_path / "figures.json")
    monkeypatch.setattr(figures, "PAGE", tmp_path / "figures.md")
    assert figures.main([]) == 1 and figures.main(["--only", "rounds"]) == 0
    text = (tmp_path / "figures.md").read_text()
    assert "3 rounds | 3 rounds | yes" in text and "not run yet" in text and "error: broken: " in capsys.readouterr().err


def test_the_page_is_what_was_recorded_and_each_program_is_there():
    kept = json.loads(figures.RECORD.read_text(encoding="utf-8"))
    assert figures.PAGE.read_text(encoding="utf-8") == page(kept) and kept.keys() <= CLAIMS.keys()
    for one in CLAIMS.values():
        words = [word for word in one.command.split() if word not in ("sudo", figures.PYTHON)]
        assert words[:2] == ["-m", "simulation"] or (ROOT / words[0]).is_file(), one.command


@pytest.mark.parametrize(
    ("name", "record"), [("soak", "soak/100-kills"), ("quickstart", "quickstart/churn"), ("strangers", "soak/strangers")]
)
def test_a_programs_record_tells_what_the_page_asks_of_it(name, record):
    said = json.loads((ROOT / "benchmarks" / "records" / f"{record}.json").read_text(encoding="utf-8"))
    assert CLAIMS[name].figure(said) and CLAIMS[name].met(said) in (True, False)
