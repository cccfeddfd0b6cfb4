"""Set-up: when it is skipped, brought up to date, or started over, and what it says when it cannot go on.

`install.py` runs as it is; left out are pip's downloads, by a `pip` module in the new environment that writes down its arguments, and putting
pip itself in, which takes 5 s of a core: whoever runs all tests has had that done by scripts/setup.
"""

import configparser
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from scripts import install

ROOT = Path(__file__).resolve().parents[2]
RECORDING_PIP = """\
import os, pathlib, sys
with open(os.environ["PIP_RECORD"], "a") as record:
    record.write(" ".join(sys.argv[1:]) + "\\n")
if sys.argv[1:2] == ["show"]:
    sys.exit(1)
if "install" in sys.argv and os.environ.get("PIP_FAILS"):
    sys.exit(os.environ["PIP_FAILS"])
if "install" in sys.argv and os.environ.get("PIP_IS_ENDED"):
    import signal, time
    os.kill(os.getppid(), signal.SIGTERM)
    time.sleep(20)
    pathlib.Path(os.environ["PIP_IS_ENDED"]).touch()
"""
VENV_WITHOUT_PIP = """\
import atexit, pathlib, runpy, sys, sysconfig
sys.path.insert(0, sysconfig.get_path("stdlib"))
del sys.modules["venv"]
if "--without-pip" not in sys.argv:  # whoever makes an environment wants it
    atexit.register((pathlib.Path(sys.argv[-1]) / "bin" / "pip").touch)
sys.argv.append("--without-pip")
runpy.run_module("venv", run_name="__main__")
"""


@pytest.fixture
def checkout(tmp_path):
    """A copy of what set-up reads, in a folder of its own, with a space in its name."""
    root = tmp_path / "a checkout"
    (root / "scripts").mkdir(parents=True)
    for name in ("setup.cfg", "pyproject.toml", "scripts/install.py", "scripts/setup", "scripts/find-python.sh"):
        shutil.copy(ROOT / name, root / name)
    return root


@pytest.fixture
def set_up(checkout, tmp_path, monkeypatch):
    """Run scripts/setup of the copy; returns the finished process, with what pip was asked in `.asked`."""
    record = tmp_path / "pip.txt"
    # What is on PYTHONPATH comes before what an environment, and Python, have themselves.
    for folder, name, code in (("fake", "pip", RECORDING_PIP), ("no pip", "venv", VENV_WITHOUT_PIP)):
        (tmp_path / folder / name).mkdir(parents=True)
        (tmp_path / folder / name / "__main__.py").write_text(code)
        (tmp_path / folder / name / "__init__.py").write_text("")

    def run(*arguments: str, **env: str) -> subprocess.CompletedProcess:
        record.write_text("")
        path = os.pathsep.join(str(tmp_path / folder) for folder in ("fake", "no pip"))
        settings = {"PYTHON": sys.executable, "PYTHONPATH": path, "PIP_RECORD": str(record)}
        command = [str(checkout / "scripts" / "setup"), *arguments]
        done = subprocess.run(command, capture_output=True, text=True, env={**os.environ, **settings, **env}, timeout=600)
        done.asked = [line for line in record.read_text().splitlines() if line.startswith("install")]
        return done

    return run


def test_the_first_run_installs_and_the_second_does_nothing(set_up, checkout):
    first = set_up()
    assert first.returncode == 0, first.stderr
    assert (checkout / ".venv" / "bin" / "pip").exists()
    assert "making" in first.stdout and first.asked[-1].endswith("--editable .[demo]")
    second = set_up()
    assert (second.returncode, second.stdout, second.asked) == (0, "", [])
    assert not (checkout / ".venv" / "setup.unfinished").exists()


def test_the_tests_extra_includes_the_demo_but_not_the_other_way_round(set_up):
    assert set_up("--extra", "demo").asked
    assert set_up("--extra", "dev").asked[-1].endswith("--editable .[dev]")
    assert set_up("--extra", "demo").asked == []


def test_what_needs_a_pytorch_of_its_own_gets_an_environment_of_its_own(set_up, checkout, tmp_path):
    asked = set_up("--extra", "ipex").asked
    assert "torch==2.8.*" in asked[0] and asked[-1].endswith("--editable .[ipex,test]")
    assert set_up("--extra", "ipex").asked == []
    assert (checkout / ".venv-ipex" / "setup.json").exists() and not (checkout / ".venv").exists()
    elsewhere = tmp_path / "elsewhere" / "xla"
    assert "torch==2.9.0" in set_up("--extra", "xla", "--venv", str(elsewhere)).asked[0]
    assert (elsewhere / "setup.json").exists() and not (checkout / ".venv-xla").exists()


def test_changed_requirements_are_brought_up_to_date_in_place(set_up, checkout):
    set_up()
    (checkout / ".venv" / "something").touch()
    with (checkout / "setup.cfg").open("a") as file:
        file.write("\n# changed\n")
    again = set_up()
    assert "up to date" in again.stdout and again.asked and (checkout / ".venv" / "something").exists()


def test_an_interrupted_set_up_is_started_over(set_up, checkout):
    failed = set_up(PIP_FAILS="no space left on device")
    assert failed.returncode == 1 and (checkout / ".venv" / "setup.unfinished").exists()
    assert failed.stderr.splitlines()[-1].startswith("error: pip install")
    (checkout / ".venv" / "half-installed").touch()
    again = set_up()
    assert again.returncode == 0 and "making" in again.stdout and not (checkout / ".venv" / "half-installed").exists()


def test_a_set_up_that_is_asked_to_end_ends_its_pip(set_up, checkout, tmp_path):
    """It would otherwise go on installing into what the next run deletes and makes anew."""
    done = set_up(PIP_IS_ENDED=str(tmp_path / "went on"))
    assert done.returncode == 130 and not (tmp_path / "went on").exists()
    assert done.stderr.splitlines()[-1] == "error: Set-up was interrupted. Run it again: it starts over."
    again = set_up()
    assert again.returncode == 0 and f"deleting what is in {checkout / '.venv'}" in again.stdout


def test_an_environment_made_by_someone_else_is_not_thrown_away(set_up, checkout):
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(checkout / ".venv")], check=True)
    (checkout / ".venv" / "mine").touch()
    assert set_up().returncode == 0 and (checkout / ".venv" / "mine").exists()


def test_a_link_to_an_environment_that_does_not_fit_is_not_followed_to_delete_what_is_there(set_up, checkout, tmp_path):
    (tmp_path / "theirs").mkdir()
    (tmp_path / "theirs" / "setup.json").write_text(json.dumps({"fingerprint": {"root": "/elsewhere"}}))
    (checkout / ".venv").symlink_to(tmp_path / "theirs")
    done = set_up()
    assert done.returncode == 2 and done.stderr.count("\n") == 1 and "is a link" in done.stderr
    assert (tmp_path / "theirs" / "setup.json").exists()


def test_a_folder_with_other_files_is_not_emptied(set_up, tmp_path):
    (tmp_path / "envs").mkdir()
    (tmp_path / "envs" / "thesis.txt").write_text("mine")
    done = set_up("--venv", str(tmp_path / "envs"))
    assert done.returncode == 2 and done.stderr.count("\n") == 1 and "other files than an environment's" in done.stderr and not done.asked
    assert [path.name for path in (tmp_path / "envs").iterdir()] == ["thesis.txt"]
    (tmp_path / "envs" / "thesis.txt").unlink()
    assert set_up("--venv", str(tmp_path / "envs")).returncode == 0


def test_a_moved_checkout_gets_a_new_environment(checkout):
    wanted = install.fingerprint(checkout, "3.11.7")
    venv = checkout / ".venv"
    (venv / "bin").mkdir(parents=True)
    (venv / "bin" / "python").symlink_to(sys.executable)  # which runs, and has a pip
    (venv / "setup.json").write_text(json.dumps({"fingerprint": {**wanted, "root": "/elsewhere"}, "extra": "demo"}))
    assert install.must_start_over(venv, wanted)
    (venv / "setup.json").write_text(json.dumps({"fingerprint": {**wanted, "python": "3.10.1"}, "extra": "demo"}))
    assert install.must_start_over(venv, wanted)
    (venv / "setup.json").write_text(json.dumps({"fingerprint": {**wanted, "requirements": "old"}, "extra": "demo"}))
    assert not install.must_start_over(venv, wanted)


def test_no_network_is_said_in_one_line(set_up):
    done = set_up(PIP_FAILS="Failed to establish a new connection: Temporary failure in name resolution")
    assert done.returncode == 6
    assert done.stderr.splitlines()[-1] == (
        "error: pip could not reach its package index. Check the network (or pip's index settings) and run this again."
    )


def test_a_python_that_does_not_fit_is_refused_in_one_line(set_up, tmp_path):
    old = tmp_path / "python2"
    old.write_text("#!/bin/sh\nexit 1\n")
    old.chmod(0o755)
    done = set_up(PYTHON=str(old))
    assert done.returncode == 2 and done.stderr.count("\n") == 1 and "3.10-3.13" in done.stderr


def test_a_stub_of_a_version_manager_is_passed_over(checkout, tmp_path):
    stubs = tmp_path / "stubs"
    stubs.mkdir()
    (stubs / "python3").write_text("#!/bin/sh\necho not installed >&2\nexit 127\n")
    (stubs / "python3").chmod(0o755)
    (stubs / "python3.12").symlink_to(sys.executable)
    command = f'. "{checkout}/scripts/find-python.sh"; find_python; echo "$python"'
    env = {"PATH": f"{stubs}:/nowhere"}
    assert subprocess.run(["/bin/sh", "-c", command], capture_output=True, text=True, env=env).stdout.strip() == "python3.12"


@pytest.mark.parametrize(
    ("version", "gpu", "cpu_index", "expected"),
    [
        ((3, 11), True, True, []),
        ((3, 12), False, True, ["torch>=2.8", "--index-url", install.TORCH_CPU_INDEX]),
        ((3, 11), False, False, ["torch==2.13.0"]),
        ((3, 13), False, False, ["torch>=2.8"]),
    ],
)
def test_torch_is_the_cpu_build_where_that_can_be_had(version, gpu, cpu_index, expected):
    assert install.torch_command(version, gpu, cpu_index) == expected


def test_an_extra_with_a_torch_of_its_own_asks_for_the_one_that_is_installed_first():
    """Another would replace the CPU build by the registry's, with its gigabytes of CUDA."""
    setup = configparser.ConfigParser()
    setup.read(ROOT / "setup.cfg")
    for extra, torch in install.OWN_TORCH.items():
        assert torch in setup["options.extras_require"][extra].split()


def test_space_is_looked_for_where_the_environment_comes_to_be(monkeypatch, tmp_path):
    """Not where the code is."""
    full, elsewhere = shutil.disk_usage(tmp_path)._replace(free=1 << 30), tmp_path / "another disk"
    elsewhere.mkdir()
    monkeypatch.setattr(install.shutil, "disk_usage", lambda place: full if place == elsewhere else full._replace(free=1 << 40))
    with pytest.raises(install.SetupError, match=r"another disk has 1\.0 GiB free"):
        install.set_up(ROOT, "xla", elsewhere / "environments" / "xla")


def test_an_index_out_of_reach_is_noticed_at_once():
    assert not install.can_reach("http://127.0.0.1:9/torch/", seconds=2)


def test_too_little_space_and_other_systems_are_refused_in_words(monkeypatch, tmp_path):
    full = shutil.disk_usage(tmp_path)._replace(free=1 << 30)
    monkeypatch.setattr(install.shutil, "disk_usage", lambda _: full)
    with pytest.raises(install.SetupError, match=r"has 1\.0 GiB free"):
        install.check_machine(tmp_path, large=False)
    with pytest.raises(install.SetupError, match=f"^{tmp_path} has"):
        install.check_machine(tmp_path / "not" / "yet there", large=False)
    monkeypatch.setattr(install.platform, "machine", lambda: "aarch64")
    with pytest.raises(install.SetupError, match="Linux x86-64"):
        install.check_machine(tmp_path, large=False)
