import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

from peer.machine import allocator
from peer.machine.allocator import keep_freed_memory, library

ROOT = Path(__file__).resolve().parents[3]
FAULTS = """
import resource
from peer.machine.allocator import keep_freed_memory
{call}
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
for _ in range(10):
    b"x" * (40 << 20)
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""


def faults(call):
    done = subprocess.run([sys.executable, "-c", FAULTS.format(call=call)], capture_output=True, text=True, cwd=ROOT, check=True)
    return int(done.stdout)


def test_what_is_freed_is_used_again_and_not_asked_of_the_system_anew():
    assert faults("keep_freed_memory()") * 4 < faults("")


def test_tcmalloc_is_advised_with_the_line_that_preloads_it_unless_such_an_allocator_is_there(monkeypatch):
    told = []  # in place of glibc: else this process keeps what it frees, and tests after this one measure that
    monkeypatch.setattr(allocator.ctypes, "CDLL", lambda name: SimpleNamespace(mallopt=lambda *option: told.append(option)))
    assert keep_freed_memory("7f00 r-xp /lib/libtcmalloc_minimal.so.4", lambda patterns: "x") == "" and not told
    assert keep_freed_memory("7f00 r-xp /lib/libc.so.6", lambda patterns: "/opt/lib/libtcmalloc.so.4") == (
        "start with LD_PRELOAD=/opt/lib/libtcmalloc.so.4"
    )
    assert told == [(-4, 0), (-1, -1)]
    install = keep_freed_memory("", lambda patterns: "")
    assert install.startswith("sudo apt-get install google-perftools, then start with LD_PRELOAD=/usr/lib/")


def test_a_library_is_found_where_python_has_its_own_first(tmp_path, monkeypatch):
    (tmp_path / "lib").mkdir()
    (tmp_path / "lib" / "libdd_test.so.4").touch()
    monkeypatch.setattr(sys, "prefix", str(tmp_path))
    assert library(("libmissing.so*", "libdd_test.so*")) == str(tmp_path / "lib" / "libdd_test.so.4")
    assert library(("libmissing.so*",)) == ""
