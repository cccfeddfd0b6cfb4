"""What is in scripts/deploy fits this project: every path, program, flag, port and exit code that these files name."""

import configparser
import re
import shlex
import shutil
import subprocess
from pathlib import Path

import pytest
import yaml

from datasetserver import template
from datasetserver.__main__ import _read
from peer.launch.command_line import parse
from swarm.errors import ExitCode
from tests.conftest import ROOT

DEPLOY = ROOT / "scripts" / "deploy"
DOCKER, SYSTEMD = DEPLOY / "docker", DEPLOY / "systemd"
VALUES = {"DD_SERVER": "http://203.0.113.7:9090", "DD_DATASET": "/srv/pictures", "DD_URL": "http://203.0.113.7:9090"}
VALUES |= {"DD_MADDR": "/ip4/203.0.113.7/tcp/31337", "DD_FLAGS": "", "PICTURES": "/srv/pictures", "MODEL": "/srv/model"}


def check_command(command: list[str], folder: Path) -> None:
    """The program is one of ours, and takes these flags, with a file as `dd-datasetserver init` writes it."""
    scripts = configparser.ConfigParser(delimiters=["="])
    scripts.read(ROOT / "setup.cfg")
    program, *flags = command
    assert f"{program} =" in scripts["options.entry_points"]["console_scripts"]
    if program == "dd-peer":
        peer, _ = parse(flags, {})
        assert peer.datasetserver and peer.output_dir != "output"
    else:
        assert program == "dd-datasetserver"
        if "--config" in flags:
            (folder / "run.toml").write_text(template.text({"dataset": "pictures", "model": "my-model", "tokens": "tokens.txt"}))
            flags[flags.index("--config") + 1] = str(folder / "run.toml")
        config, _ = _read(flags)
        assert config.dataset and config.host_maddrs and config.public_url


def unit(name: str) -> dict[str, list[str]]:
    lines = [line.partition("=") for line in (SYSTEMD / name).read_text().splitlines() if "=" in line and not line.startswith("#")]
    return {key: [value for other, _, value in lines if other == key] for key, _, _ in lines}


@pytest.mark.parametrize("name", ["dd-peer", "dd-datasetserver"])
def test_units_start_our_programs_with_flags_that_they_take(name, tmp_path):
    (start,) = unit(f"{name}.service")["ExecStart"]
    conf = (SYSTEMD / ("peer.conf" if name == "dd-peer" else "server.conf")).read_text()
    given = dict(line.split("=", 1) for line in conf.splitlines() if line and not line.startswith("#"))
    assert set(re.findall(r"\$\{?(DD_(?!TOKEN)\w+)", start)) == set(given)
    for variable, value in given.items():
        start = start.replace(f'"${variable}"', value).replace(f"${{{variable}}}", value).replace(f"${variable}", value)
    words = shlex.split(start)
    if words[:2] == ["/bin/sh", "-c"]:
        words = shlex.split(words[2].partition("exec ")[2])
    assert words[0] == f"/opt/distributed-diffusion/.venv/bin/{name}"
    check_command([name, *words[1:]], tmp_path)


@pytest.mark.parametrize("name", ["dd-peer", "dd-datasetserver"])
def test_units_do_not_start_again_what_only_the_owner_can_mend(name):
    values = unit(f"{name}.service")
    hopeless = {ExitCode.CONFIG, ExitCode.AUTH} | ({ExitCode.OVER} if name == "dd-peer" else set())
    assert {int(code) for code in values["RestartPreventExitStatus"][0].split()} == hopeless
    assert values["KillMode"] == ["mixed"] and values["NoNewPrivileges"] == ["yes"] and "LoadCredential" in values


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="needs systemd-analyze")
@pytest.mark.parametrize("name", ["dd-peer", "dd-datasetserver"])
def test_systemd_finds_nothing_wrong_in_the_units(name, tmp_path):
    program = tmp_path / name
    program.write_text("#!/bin/sh\n")
    program.chmod(0o755)
    copy = tmp_path / f"{name}.service"
    copy.write_text((SYSTEMD / f"{name}.service").read_text().replace("/opt/distributed-diffusion/.venv/bin", str(tmp_path)))
    done = subprocess.run(["systemd-analyze", "verify", "--man=no", copy], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0 and f"{name}.service" not in done.stderr, done.stderr


def compose(name: str = "compose.yaml") -> dict:
    text = (DOCKER / name).read_text()
    text = re.sub(r"\$\{(\w+)(?::(?:-([^}]*)|\?[^}]*))?\}", lambda match: VALUES.get(match[1], match[2] or ""), text)
    return yaml.safe_load(text)


def test_the_compose_file_starts_a_host_and_two_peers_that_find_each_other(tmp_path):
    services = compose()["services"]
    assert list(services) == ["server", "peer-1", "peer-2"]
    for name, service in services.items():
        check_command(service["command"], tmp_path)
        assert service["init"] and service["restart"] != "no"
        build = service["build"]
        context = (DOCKER / build["context"]).resolve()
        assert context == ROOT and (context / build["dockerfile"]).is_file()
        for volume in service["volumes"]:
            source = volume.split(":")[0]
            assert source.startswith("/") or source in compose()["volumes"], volume
        if name != "server":
            peer, _ = parse(service["command"][1:], {})
            assert peer.datasetserver == "http://server:9090" and service["shm_size"] == "2gb"
    host, run = _read(services["server"]["command"][1:])
    assert host.public_url == "http://server:9090" and f"127.0.0.1:9090:{host.port}" in services["server"]["ports"]
    assert run["total_samples"] == 100_000, "a run has an end"
    assert host.announce_maddrs == ("/dns4/server/tcp/31337",) and "/healthz" in services["server"]["healthcheck"]["test"][-1]


def test_the_file_for_gpus_changes_only_services_that_there_are():
    gpu, cpu = compose("compose.gpu.yaml")["services"], compose()["services"]
    assert set(gpu) < set(cpu)
    # One name for images of two PyTorch builds: whichever was built last would run everywhere.
    assert {service["image"] for service in gpu.values()}.isdisjoint(service["image"] for service in cpu.values())


def test_the_image_is_built_of_what_there_is_and_the_context_lets_through():
    lines = (DOCKER / "Dockerfile").read_text().replace("\\\n", " ").splitlines()
    let_through = {line[1:] for line in (DOCKER / "Dockerfile.dockerignore").read_text().splitlines() if line.startswith("!")}
    copied = [source for line in lines if line.startswith("COPY ") for source in line.split()[1:-1]]
    assert copied and set(copied) == let_through and all((ROOT / source).exists() for source in copied)
    known = {"FROM", "ARG", "ENV", "WORKDIR", "COPY", "RUN", "USER", "VOLUME", "STOPSIGNAL", "EXPOSE", "CMD"}
    assert {line.split()[0] for line in lines if line and not line.startswith("#")} <= known
    assert [line for line in lines if line.startswith("USER")] == ["USER dd"]  # nobody in it is root
    ports = {port for line in lines if line.startswith("EXPOSE") for port in line.split()[1:]}
    assert ports == {"9090", "31337", "31338"}


def test_the_pages_about_operating_and_hardware_name_every_file_of_these():
    page = "".join((ROOT / "docs" / name).read_text() for name in ("operate.md", "hardware.md"))
    assert all(path.name in page for path in DEPLOY.rglob("*") if path.is_file() and path.suffix != ".dockerignore")
