"""Every file of examples/ that is named after a card fits on it, by the table of counts."""

import json

import pytest

from benchmarks import device_memory
from benchmarks.cards import EXAMPLES, ROWS, Counted, Row, check, read_table, row_of, write_table
from swarm.errors import UserError
from tests.conftest import ROOT

FILES = sorted(EXAMPLES.glob("*gb_*.toml"))
ROW = Row("SDXL", "lora", 12)


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_an_example_is_a_row_of_the_table_and_fits_the_card_of_its_name(path):
    assert check(path, read_table()) >= 0


def test_there_is_an_example_for_each_size_of_card():
    assert {int(path.name.split("gb_")[0]) for path in FILES} == {8, 12, 16, 24, 32}


@pytest.fixture
def changed(tmp_path):
    """A copy of an example under a card's name, one of its lines another."""

    def write(old, new, name="12gb_sdxl_lora.toml"):
        text = (EXAMPLES / "12gb_sdxl_lora.toml").read_text(encoding="utf-8")
        assert old in text
        path = tmp_path / name
        path.write_text(text.replace(old, new), encoding="utf-8")
        return path

    return write


@pytest.mark.parametrize(
    ("old", "new", "answer"),
    [
        ("train_batch_size = 1", "train_batch_size = 3", r"no row of the table has its options \(SDXL, lora, batch 3\)"),
        ("rank = 16", "rank = 64", "rank is 64, and all rows are counted with 16"),
        ("gradient_checkpointing = true", "", "gradient_checkpointing is False"),
        ("resolution = 1024", "resolution = 768", "at 768 px is not counted"),
        ("rank = 16", "rank = 16\nuse_dora = true", "what use_dora takes of a GPU's memory is not counted"),
        ("rank = 16", "rank = 16\ntrain_text_encoder = true", "what train_text_encoder takes"),
        ("stabilityai/", "nobody/", "nobody/stable-diffusion-xl-base-1.0 at 1024 px is not counted"),
    ],
)
def test_an_example_with_other_options_than_a_row_fails(changed, old, new, answer):
    with pytest.raises(UserError, match=answer):
        check(changed(old, new), read_table())


def test_an_example_that_is_another_row_is_held_against_that_row(changed):
    assert row_of(changed("# What", "offload = true  #")) == next(row for row in ROWS if row == Row("SDXL", "lora", 8, offload=True))


def test_an_example_on_too_small_a_card_fails(changed):
    with pytest.raises(UserError, match=r"SDXL, lora takes [\d.]+ of 8 GB, and 1 is not ours"):
        check(changed("", "", "8gb_sdxl.toml"), read_table())


def test_with_offload_the_largest_turn_is_needed_and_without_all_parts_and_the_largest_step():
    gb = Counted(frozen=5, trained=1, optimizer=2, step=4, texts=7, vae=0.5, encoding=6)
    assert gb.need(offload=True) == 3 + 9 and gb.need(offload=False) == 3 + 5 + 7 + 0.5 + 6


def test_a_counted_row_takes_its_place_and_rows_that_are_no_more_go(tmp_path):
    path, one, other = tmp_path / "table.json", Counted(*[1.0] * 7), Counted(*[2.0] * 7)
    write_table({ROW: one, ROWS[0]: one, Row("gone", "lora", 8): one}, path)
    write_table({ROW: other}, path)
    assert read_table(path) == {ROWS[0]: one, ROW: other}
    assert len(json.loads(path.read_text(encoding="utf-8"))["rows"]) == 2
    assert read_table(tmp_path / "none.json") == {}


def test_the_benchmark_counts_the_rows_of_examples_into_the_table(tmp_path, monkeypatch, capsys):
    path, counted = tmp_path / "table.json", []
    monkeypatch.setattr(device_memory, "write_table", lambda table: write_table(table, path))
    monkeypatch.setattr(device_memory, "in_gb", lambda row: counted.append(row) or Counted(*[0.9] * 7))
    device_memory.main(["--examples", "--keep", "--rows", "SD 1.5"])
    theirs = {row_of(path) for path in FILES if "sd15" in path.name}
    assert set(counted) == theirs == read_table(path).keys()
    assert json.loads(capsys.readouterr().out.splitlines()[-1])["fits"] == {row.name: True for row in theirs}


def test_the_page_lists_every_example_of_a_card_with_what_was_counted():
    page, table = (ROOT / "docs" / "hardware.md").read_text(encoding="utf-8"), read_table()
    for path in FILES:
        row = row_of(path)
        assert f"[{path.name}](../examples/{path.name}) | {table[row].need(row.offload):.1f} |" in page
