"""What control groups say of memory, from files as the kernel writes them: those of version 2, of version 1, and of both at once."""

import math

import pytest

from swarm.cgroups import MemoryGroups


@pytest.fixture
def written(tmp_path):
    """`written(own, {path: text})`: the groups of a process whose /proc/self/cgroup is `own`."""

    def write(own, files):
        (tmp_path / "own").write_text(own)
        for name, text in files.items():
            path = tmp_path / "mount" / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)
        return MemoryGroups(tmp_path / "mount", tmp_path / "own")

    return write


def test_pages_of_files_give_way(written):
    groups = written("0::/\n", {"memory.max": "1000\n", "memory.current": "700\n", "memory.stat": "anon 400\ninactive_file 200\n"})
    assert groups.free_bytes() == 500


def test_the_tightest_of_the_groups_around_counts(written):
    unit = {"user.slice/memory.max": "5000\n", "user.slice/memory.current": "4900\n"}
    own = {"user.slice/run.scope/memory.max": "1000\n", "user.slice/run.scope/memory.current": "10\n"}
    assert written("0::/user.slice/run.scope\n", {**unit, **own}).free_bytes() == 100


def test_version_1_has_other_names(written):
    files = {"limit_in_bytes": "1000\n", "usage_in_bytes": "300\n", "stat": "cache 9\ntotal_inactive_file 50\n", "oom_control": "under_oom 0\noom_kill 3\n"}
    groups = written("9:cpu,cpuacct:/x\n4:memory:/run\n0::/\n", {f"memory/run/memory.{name}": text for name, text in files.items()})
    assert (groups.free_bytes(), groups.kills()) == (750, 3)


def test_a_container_without_a_namespace_finds_its_group_at_the_mount(written):
    groups = written("4:memory:/docker/5f3a\n", {"memory/memory.limit_in_bytes": "1000\n", "memory/memory.usage_in_bytes": "1\n"})
    assert groups.free_bytes() == 999


@pytest.mark.parametrize("text", ["max\n", "", "many\n"])
def test_without_a_limit_all_is_free(written, text):
    assert written("0::/\n", {"memory.max": text, "memory.current": "700\n"}).free_bytes() == math.inf


def test_where_there_are_no_groups_nothing_is_said(tmp_path):
    groups = MemoryGroups(tmp_path / "mount", tmp_path / "own")
    assert (groups.free_bytes(), groups.kills()) == (math.inf, None)


def test_only_kills_of_the_own_group_count(written):
    own, around = "oom 2\noom_kill 1\n", "oom 9\noom_kill 9\n"
    assert written("0::/user/me\n", {"user/me/memory.events": own, "user/memory.events": around}).kills() == 1
