import os
import subprocess
import sys

from swarm import sockets


def test_a_killed_processes_folder_is_swept_away_by_the_next(tmp_path, monkeypatch):
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    monkeypatch.setattr(sockets, "_LONGEST", 1000)
    code = "import os, signal; from swarm import sockets; print(sockets.make_folder(), flush=True); os.kill(os.getpid(), signal.SIGKILL)"
    killed = subprocess.run(
        [sys.executable, "-c", code.replace("print", "sockets._LONGEST = 1000; print")], capture_output=True, text=True, timeout=120
    )
    left = killed.stdout.strip()
    assert os.path.isdir(left)

    own = sockets.make_folder()

    assert not os.path.exists(left) and own.is_dir()
    sockets.remove_folder(own)
    assert not own.exists()


def test_a_living_processes_folder_and_strangers_files_stay(tmp_path, monkeypatch):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    monkeypatch.setattr(sockets, "_LONGEST", 1000)
    first = sockets.make_folder()
    stranger = tmp_path / f"{sockets.PREFIX}notes"
    stranger.mkdir()

    second = sockets.make_folder()

    assert first.is_dir() and second.is_dir() and stranger.is_dir() and first != second


def test_a_long_temporary_folder_is_not_used_for_sockets(monkeypatch):
    monkeypatch.setattr("tempfile.tempdir", "/tmp/" + "x" * 100)

    folder = sockets.make_folder()

    assert len(str(folder)) < 60
    sockets.remove_folder(folder)
