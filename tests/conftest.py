"""What many tests share: a tiny real model, a folder of captioned pictures, one thread of torch and no network."""

import collections
import contextlib
import functools
import gc
import importlib.util
import logging
import os
import random
import signal

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TRANSFORMERS_OFFLINE", "1")

from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

from tests import forking

# By default an example may take 0.2 s, which on a busy machine any may take.
settings.register_profile("patient", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.register_profile("deep", deadline=None, suppress_health_check=[HealthCheck.too_slow])  # long versions, where a test has one
settings.load_profile("patient")

# The shell has SIGINT ignored in `./scripts/test &`, and so would have every program that the tests start and stop.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

ROOT = Path(__file__).resolve().parent.parent
collect_ignore = [] if importlib.util.find_spec("torch_xla") else ["xla"]  # an environment of its own: scripts/test_xla


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_setupnodes(config, specs):
    python = forking.python(config.args)
    for spec in specs:
        spec.python = python


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config, log):
    if config.getvalue("dist") == "loadfile":
        from tests.scheduling import Scheduling  # which needs xdist

        return Scheduling(config, log)


def pytest_collection_modifyitems(config, items):
    if hasattr(config, "workerinput"):  # beside others, who would wait in the end for what takes long; a worker takes two tests ahead
        items.sort(key=lambda item: item.get_closest_marker("slow") is None)
    for_gpus = [item for item in items if item.get_closest_marker("gpu")]
    if for_gpus:
        import torch

        if not torch.cuda.is_available():
            for item in for_gpus:
                item.add_marker(pytest.mark.skip(reason="this machine has no GPU that PyTorch can use"))


@pytest.fixture
def seed(request) -> int:
    """Printed with a failure, so that it can be repeated."""
    value = random.randrange(1 << 30)
    print(f"seed={value}")
    return value


@pytest.fixture(scope="session", autouse=True)
def imported_once():
    forking.lend_to_multiprocessing()


@pytest.fixture(scope="session", autouse=True)
def one_thread():
    """Tests compare losses to the bit, and sums depend on the number of threads."""
    import torch

    torch.set_num_threads(1)


@pytest.fixture(autouse=True)
def loggers_as_before():
    """Programs set up logging to a stderr that pytest closes after the test; the next test's lines must not go there."""
    root, ours = logging.getLogger(), [logging.getLogger(name) for name in ("swarm", "peer", "datasetserver", "quickstart")]
    handlers, levels = root.handlers[:], [logger.level for logger in (root, *ours)]
    yield
    root.handlers[:] = handlers
    for logger, level in zip((root, *ours), levels, strict=True):  # ranks other than 0 are told to say errors only
        if logger.level != level:  # each time it is set, logging goes over all of its 600 loggers: 0.1 ms
            logger.setLevel(level)


_MANY_FILES, _MOST_FILES = 300, 900  # `select` takes none from 1,024 on
_THRESHOLDS = gc.get_threshold()


@pytest.fixture(scope="module", autouse=True)
def files_closed():
    """A worker runs thousands of tests, and what some leave open for the collector would add up.

    It comes by seldom once a server's program has run in this process, and never to what training or a simulated world has frozen.
    """
    yield
    gc.set_threshold(*_THRESHOLDS)
    if len(os.listdir("/proc/self/fd")) > _MANY_FILES:
        gc.unfreeze()
        gc.collect()
    left = collections.Counter()
    for number in os.listdir("/proc/self/fd"):
        with contextlib.suppress(FileNotFoundError):  # that of the list itself
            left[os.readlink(f"/proc/self/fd/{number}").partition(":")[0]] += 1
    assert left.total() <= _MOST_FILES, f"open files: {left.most_common(10)}"


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory) -> Path:
    """A diffusers folder of a Stable Diffusion of about 250 k parameters; shared, so do not change it."""
    from tests import tiny

    return tiny.write_model(tmp_path_factory.mktemp("model") / "tiny")


@pytest.fixture(scope="session")
def tiny_family(tmp_path_factory):
    """`tiny_family("sdxl")`: a diffusers folder of one of `tiny.FAMILIES`, built once; shared, so do not change it."""
    from tests import tiny

    return functools.cache(lambda family: tiny.write_family(tmp_path_factory.mktemp(family) / "tiny", family))


@pytest.fixture
def pictures(tmp_path) -> Path:
    """A folder of 12 PNGs of 16x16 pixels with captions; this test's own."""
    from tests import tiny

    return tiny.write_pictures(tmp_path / "pictures")


@pytest.fixture
def key(tmp_path):
    """A host's, drawn for this test."""
    from swarm.signing import HostKey

    return HostKey(tmp_path / "host.key")


@pytest.fixture
def serve(tmp_path):
    """`serve(*flags, samples=40)`: a dataset server's program, started; all are stopped in the end."""
    from tests.datasetserver.hosting import Host

    hosts: list[Host] = []

    def start(*flags, **options) -> Host:
        hosts.append(Host(tmp_path / f"host{len(hosts)}", *flags, **options))
        return hosts[-1].start()

    yield start
    for host in hosts:
        host.stop()
