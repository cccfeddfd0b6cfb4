"""What every benchmark prints."""

import json

from benchmarks import common


def test_a_table_has_all_keys_as_columns_and_leaves_missing_values_empty(capsys):
    common.print_table([{"codec": "fp16", "MB/s": 1234.6}, {"codec": "int4", "note": "x"}])
    assert capsys.readouterr().out.splitlines() == ["codec   MB/s  note", " fp16  1,235      ", " int4            x"]


def test_the_last_line_is_json_that_says_where_it_was_measured(capsys):
    common.print_result({"ratio": 2.5})
    result = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert result["ratio"] == 2.5
    assert result["about"]["cores"] >= 1 and result["about"]["torch"] and result["about"]["memory_gib"] > 0
