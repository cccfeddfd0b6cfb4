"""Set-up of `.venv` beside the code: made once, skipped while it is fresh. Standard library only; run by `scripts/setup`.

What needs a PyTorch of its own (`--extra ipex`, `--extra xla`) gets an environment of its own, `.venv-ipex` or `.venv-xla`.

Fresh means: a stamp inside `.venv`, written as the very last thing, matches the Python, the place of the checkout and the
requirements. An interrupted set-up leaves a mark instead of a stamp, and the next run starts over.
"""

import argparse
import fcntl
import hashlib
import json
import os
import platform
import shutil
import signal
import subprocess
import sys
import urllib.error
import urllib.request
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
TORCH_CPU_INDEX = "https://download.pytorch.org/whl/cpu"  # as documented by PyTorch; the registry's own builds bring gigabytes of CUDA
TORCH_TESTED = "torch==2.13.0"
TORCH_RANGE = "torch>=2.8"
OWN_TORCH = {"ipex": "torch==2.8.*", "xla": "torch==2.9.0"}
INCLUDES = {"dev": {"dev", "demo"}, "demo": {"demo"}, **{extra: {extra} for extra in OWN_TORCH}}
NETWORK_SIGNS = (
    "NewConnectionError",
    "Temporary failure in name resolution",
    "Connection refused",
    "ConnectTimeout",
    "ReadTimeout",
    "ProxyError",
)
GIB = 1 << 30


class SetupError(Exception):
    """One line for the user: what happened and what to do; `code` is the exit status."""

    def __init__(self, message: str, code: int = 1):
        super().__init__(message)
        self.code = code


def fingerprint(root: Path, python_version: str) -> dict:
    """What an installation depends on; a stamp that differs in any value is stale."""
    requirements = b"".join((root / name).read_bytes() for name in ("setup.cfg", "pyproject.toml", "scripts/install.py"))
    return {"python": python_version, "root": str(root), "requirements": hashlib.sha256(requirements).hexdigest()}


def read_stamp(venv: Path) -> dict:
    """The stamp of a finished set-up, or {} where there is none that can be read."""
    try:
        stamp = json.loads((venv / "setup.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return stamp if isinstance(stamp, dict) and not (venv / "setup.unfinished").exists() else {}


def is_fresh(venv: Path, extra: str, wanted: dict) -> bool:
    """Whether `.venv` already holds `extra`, for this Python, this place and these requirements."""
    stamp = read_stamp(venv)
    return stamp.get("fingerprint") == wanted and extra in INCLUDES.get(stamp.get("extra"), ()) and python_runs(venv)


def must_start_over(venv: Path, wanted: dict) -> bool:
    """Whether an existing `.venv` cannot be brought up to date in place: interrupted, moved, or of another Python."""
    if (venv / "setup.unfinished").exists() or not python_runs(venv):
        return True
    theirs = read_stamp(venv).get("fingerprint", wanted)
    return any(theirs.get(name) != wanted[name] for name in ("python", "root"))


def python_runs(venv: Path) -> bool:
    try:
        return subprocess.run([venv / "bin" / "python", "-m", "pip", "--version"], capture_output=True).returncode == 0
    except OSError:
        return False


def has_nvidia_gpu() -> bool:
    """Whether `nvidia-smi` lists a GPU."""
    try:
        listed = subprocess.run(["nvidia-smi", "-L"], capture_output=True, text=True, timeout=20)
    except (OSError, subprocess.TimeoutExpired):
        return False
    return listed.returncode == 0 and "GPU" in listed.stdout


def can_reach(url: str, seconds: float = 5) -> bool:
    try:
        with urllib.request.urlopen(url, timeout=seconds) as answer:
            return answer.status == 200
    except (OSError, ValueError, urllib.error.URLError):
        return False


def torch_command(python_version: tuple, gpu: bool, cpu_index: bool, own: str = "") -> list:
    """Arguments of `pip install` that bring torch before everything else; [] where the requirements alone bring the right build.

    own: the release that an extra needs.
    """
    if gpu:
        return []
    if cpu_index:
        return [own or TORCH_RANGE, "--index-url", TORCH_CPU_INDEX]
    if own:
        return [own]
    return [TORCH_TESTED] if python_version[:2] == (3, 11) else [TORCH_RANGE]


def check_machine(venv: Path, large: bool) -> None:
    """Raise SetupError where set-up cannot end well: another system, or too little space for `venv`, which need not be there."""
    if sys.platform != "linux" or platform.machine() != "x86_64":
        raise SetupError(f"This is {sys.platform} on {platform.machine()}; hivemind runs on Linux x86-64. Use such a machine, or WSL2.", 2)
    place = next(folder for folder in (venv, *venv.parents) if os.path.exists(folder))
    need, free = (10 if large else 3), shutil.disk_usage(place).free / GIB
    if free < need:
        raise SetupError(f"{place} has {free:.1f} GiB free, set-up needs about {need}. Free some space and run it again.", 4)


def make_venv(venv: Path) -> None:
    """Make `.venv` anew, with pip inside."""
    try:
        import ensurepip  # noqa: F401  (Debian and Ubuntu leave it out of python3)
    except ImportError:
        version = f"{sys.version_info.major}.{sys.version_info.minor}"
        raise SetupError(
            f"Python {version} at {sys.executable} cannot make virtual environments. Install them (Debian, Ubuntu: "
            f"sudo apt-get install python{version}-venv), or name another Python with PYTHON=.",
            2,
        ) from None
    if venv.is_symlink():
        raise SetupError(f"{venv} is a link, and what it leads to may be another's. Remove the link and run this again.", 2)
    if venv.is_dir() and any(venv.iterdir()) and not any((venv / name).exists() for name in ("pyvenv.cfg", "setup.unfinished", "setup.json")):
        raise SetupError(f"{venv} holds other files than an environment's. Name an empty folder, or a new one: --venv {venv}/venv.", 2)
    if venv.exists():
        say(f"deleting what is in {venv}")
        shutil.rmtree(venv)
    venv.mkdir(parents=True)
    (venv / "setup.unfinished").touch()
    done = subprocess.run([sys.executable, "-m", "venv", str(venv)], capture_output=True, text=True)
    if done.returncode:
        raise SetupError(f"python -m venv {venv} failed: {(done.stderr or done.stdout).strip().splitlines()[-1]}")


def pip_install(venv: Path, *arguments: str) -> None:
    """Run pip of `.venv`. Raises SetupError that tells a missing network from other failures."""
    quiet = [] if sys.stderr.isatty() else ["--quiet"]
    command = [str(venv / "bin" / "python"), "-m", "pip", "install", "--disable-pip-version-check", *quiet, *arguments]
    say(f"pip install {' '.join(arguments)}")
    process = subprocess.Popen(command, cwd=ROOT, stderr=subprocess.PIPE, text=True, errors="replace")
    heard = []
    try:
        for line in process.stderr:
            heard.append(line)
            sys.stderr.write(line)
        process.wait()
    except KeyboardInterrupt:
        # Left alone, pip would go on in an environment that the next run deletes and makes anew.
        process.terminate()
        try:
            process.wait(10)
        except subprocess.TimeoutExpired:
            process.kill()
        raise
    if process.returncode:
        if any(sign in line for sign in NETWORK_SIGNS for line in heard):
            raise SetupError("pip could not reach its package index. Check the network (or pip's index settings) and run this again.", 6)
        raise SetupError(f"pip install {' '.join(arguments)} failed; its reason is above. Mend that and run this again.")


def environment_of(root: Path, extra: str) -> Path:
    return root / (f".venv-{extra}" if extra in OWN_TORCH else ".venv")


def set_up(root: Path, extra: str, venv: Path) -> bool:
    """Bring `venv` up to date with `extra`; False when it already was."""
    wanted = fingerprint(root, platform.python_version())
    if is_fresh(venv, extra, wanted):
        return False
    gpu = extra not in OWN_TORCH and has_nvidia_gpu()
    check_machine(venv, gpu or extra in OWN_TORCH)
    extra = "dev" if read_stamp(venv).get("extra") == "dev" else extra
    if must_start_over(venv, wanted):
        say(f"making {venv} with Python {platform.python_version()}")
        make_venv(venv)
    else:
        say(f"bringing {venv} up to date")
    (venv / "setup.unfinished").touch()
    install_torch(venv, gpu, OWN_TORCH.get(extra, ""))
    pip_install(venv, "--editable", f".[{extra},test]" if extra in OWN_TORCH else f".[{extra}]")
    (venv / "setup.json").write_text(json.dumps({"fingerprint": wanted, "extra": extra}), encoding="utf-8")
    (venv / "setup.unfinished").unlink()
    say("done; the next run skips this")
    return True


def install_torch(venv: Path, gpu: bool, own: str = "") -> None:
    have = subprocess.run([venv / "bin" / "python", "-m", "pip", "show", "torch"], capture_output=True).returncode == 0
    if have or gpu:
        return
    reachable = can_reach(f"{TORCH_CPU_INDEX}/torch/")
    say(
        f"{own or 'no NVIDIA GPU here: torch'} comes as {'its CPU build' if reachable else 'the registry has it (the CPU index is out of reach)'}"
    )
    try:
        pip_install(venv, *torch_command(sys.version_info[:2], gpu, reachable, own))
    except SetupError:
        if not reachable:
            raise
        say("the CPU index did not work out; going on without it")
        pip_install(venv, *torch_command(sys.version_info[:2], gpu, cpu_index=False, own=own))


def say(message: str) -> None:
    print(f"setup: {message}", flush=True)


def main(argv: list) -> int:
    parser = argparse.ArgumentParser(
        prog="scripts/setup",
        description="Make .venv beside the code and install everything into it. Does nothing while that is fresh. "
        "PYTHON=/path/to/python3.X chooses the Python (3.10-3.13).",
    )
    parser.add_argument(
        "--extra", choices=sorted(INCLUDES), default="demo", help="what to add: demo (quickstart), dev (that and the tests)"
    )
    parser.add_argument("--venv", type=Path, help="where; default: .venv beside the code, .venv-ipex and .venv-xla for these extras")
    options = parser.parse_args(argv)
    extra, venv = options.extra, (options.venv or environment_of(ROOT, options.extra)).absolute()
    try:
        # Two quickstarts started at once must not install over each other.
        with open(ROOT / "setup.cfg", "rb") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            set_up(ROOT, extra, venv)
    except SetupError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.code
    except KeyboardInterrupt:
        print("\nerror: Set-up was interrupted. Run it again: it starts over.", file=sys.stderr)
        return 130
    return 0


def interrupt(_number, _frame) -> None:
    """SIGTERM and a closed terminal end set-up as Ctrl-C does, pip included."""
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    raise KeyboardInterrupt


if __name__ == "__main__":
    os.umask(0o022)
    for number in (signal.SIGTERM, signal.SIGHUP):
        if signal.getsignal(number) is signal.SIG_DFL:  # nohup ignores SIGHUP, and stays so
            signal.signal(number, interrupt)
    sys.exit(main(sys.argv[1:]))
