"""What every benchmark prints."""

import json
import mmap
import os
import subprocess
import sys

from benchmarks import common


def test_a_table_has_all_keys_as_columns_and_leaves_missing_values_empty(capsys):
    common.print_table([{"codec": "fp16", "MB/s": 1234.6}, {"codec": "int4", "note": "x"}])
    assert capsys.readouterr().out.splitlines() == ["codec   MB/s  note", " fp16  1,235      ", " int4            x"]


def test_the_last_line_is_json_that_says_where_it_was_measured(capsys):
    common.print_result({"ratio": 2.5})
    result = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert result["ratio"] == 2.5
    assert result["about"]["cores"] >= 1 and result["about"]["torch"] and result["about"]["memory_gib"] > 0


SHARING = """
import mmap, os, sys
kept = os.memfd_create("kept")
os.ftruncate(kept, 32 << 20)
pages = mmap.mmap(kept, 32 << 20)
os.fork()
for place in range(0, 32 << 20, 4096):
    pages[place] = 1
print(flush=True)
sys.stdin.read()
"""


def test_memory_is_that_of_all_processes_and_what_they_share_counts_once():
    with subprocess.Popen([sys.executable, "-c", SHARING], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        process.stdout.readline(), process.stdout.readline()
        own, with_files = common.held(process.pid)
        process.stdin.close()
    assert 32 << 20 < own < 64 << 20 and own < with_files
    assert common.held(process.pid) == (0, 0)


def test_what_was_written_over_a_file_is_no_page_of_it(tmp_path):
    (tmp_path / "file").write_bytes(bytes(32 << 20))
    with (tmp_path / "file").open("rb") as file, mmap.mmap(file.fileno(), 0, mmap.MAP_PRIVATE) as pages:
        read, with_files = common.held(os.getpid())
        for place in range(0, len(pages), mmap.PAGESIZE):
            pages[place] = 1
        written, _ = common.held(os.getpid())
    assert written - read > 30 << 20 and with_files > read
