"""A package's modules are loaded without its hub, which is there for who wants it."""

import subprocess
import sys

import pytest

from swarm.lazy_hub import import_without_hub
from tests import warm


@pytest.fixture
def package(tmp_path, monkeypatch):
    """A package whose `__init__` gathers what two modules have; one imports the other by its whole name."""
    folder = tmp_path / "hubbed"
    (folder / "deep").mkdir(parents=True)
    (folder / "__init__.py").write_text("from hubbed.heavy import weight\nversion = 7\n__version__ = '7'\n")
    (folder / "heavy.py").write_text("weight = 'tons'\n")
    (folder / "deep" / "__init__.py").write_text("from hubbed.deep.light import twice\n")
    (folder / "deep" / "light.py").write_text("import hubbed.deep.other as other\ntwice = 2 * other.one\n")
    (folder / "deep" / "other.py").write_text("one = 1\n")
    monkeypatch.syspath_prepend(tmp_path)
    yield "hubbed"
    for name in [name for name in sys.modules if name.split(".")[0] == "hubbed"]:
        del sys.modules[name]


def test_a_module_is_loaded_alone_and_the_hub_when_a_name_of_it_is_wanted(package):
    import_without_hub(package)
    import hubbed.deep

    assert hubbed.deep.twice == 2 and not hasattr(hubbed, "__wrapped__") and "hubbed.heavy" not in sys.modules
    from hubbed import version, weight

    assert (version, weight) == (7, "tons") and hubbed.heavy.weight is weight and hubbed.deep is sys.modules["hubbed.deep"]
    assert not hasattr(hubbed, "no_such_name")


def test_a_name_whose_home_is_said_is_had_without_the_hub_also_of_a_package_in_a_package(package):
    import_without_hub("hubbed.deep", twice="light")
    assert "hubbed" not in sys.modules
    from hubbed.deep import twice

    assert twice == 2 and "twice" not in vars(sys.modules["hubbed.deep"])


def test_a_package_in_a_package_that_is_loaded_is_an_attribute_of_it_and_stays_one(package):
    import_without_hub(package)
    import_without_hub("hubbed.deep")
    import hubbed.deep.other

    assert hubbed.deep.other.one == 1 and "hubbed.deep.light" not in sys.modules
    assert hubbed.weight == "tons" and hubbed.deep is sys.modules["hubbed.deep"] and hubbed.deep.twice == 2


@pytest.mark.parametrize("home", ["no_such_module", "other"])
def test_a_name_that_lives_elsewhere_by_now_is_the_hubs(package, home):
    import_without_hub("hubbed.deep", twice=home)
    from hubbed.deep import twice

    assert twice == 2 and "twice" in vars(sys.modules["hubbed.deep"])


def test_a_package_that_is_loaded_stays(package):
    import hubbed

    import_without_hub(package)
    assert sys.modules[package] is hubbed and "heavy" in vars(hubbed)


@pytest.mark.parametrize("name", ["__version__", "version", "heavy"])
def test_whichever_name_is_wanted_first_loads_the_hub(package, name):
    import_without_hub(package)
    import hubbed

    assert "hubbed.heavy" not in sys.modules and getattr(hubbed, name) is vars(hubbed)[name] and hubbed.weight == "tons"


def test_a_package_that_is_not_installed_is_missed_as_ever():
    import_without_hub("no_such_package")
    with pytest.raises(ModuleNotFoundError, match="no_such_package"):
        import no_such_package  # noqa: F401


def test_a_peer_leaves_bitsandbytes_to_whoever_wants_its_optimizers():
    """diffusers and peft import it in every trainer: a sixth of its start."""
    pytest.importorskip("bitsandbytes")
    program = "import sys, peer, bitsandbytes; print([name for name in sys.modules if name.startswith('bitsandbytes.')])"
    assert subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True).stdout == "[]\n"


def test_a_dht_node_loads_neither_hiveminds_optimizers_nor_torch():
    pytest.importorskip("hivemind")
    program = """
import sys, swarm.dht, hivemind
print([name for name in ("hivemind.optim", "hivemind.moe", "hivemind.averaging", "scipy", "torch") if name in sys.modules])
"""
    assert subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True).stdout == "[]\n"


def test_a_trainer_leaves_scipy_to_the_samplers_that_compute_with_it_and_who_wants_all_of_a_hub_has_it():
    """In a process that has imported what a trainer imports, and the modules of transformers and diffusers that want scipy."""
    pytest.importorskip("hivemind")
    program = """
import sys, peer.wiring, hivemind, scipy
import transformers.modeling_utils
from diffusers import EulerDiscreteScheduler, LMSDiscreteScheduler
print([name for name in ("hivemind.optim", "scipy.stats._stats_py", "scipy.optimize._optimize", "scipy.integrate._quadrature") if name in sys.modules])
sampler = EulerDiscreteScheduler(use_beta_sigmas=True)
sampler.set_timesteps(4)
lms = LMSDiscreteScheduler()
lms.set_timesteps(4)
print(len(sampler.sigmas), round(lms.get_lms_coefficient(1, 0, 0), 3) < 0)
from scipy.optimize import linear_sum_assignment, minimize
print(linear_sum_assignment([[1, 0], [0, 1]])[1].tolist(), minimize(lambda x: (x - 1) ** 2, 0).x.round())
from hivemind import DHT, Optimizer
print(DHT is hivemind.dht.DHT, Optimizer is hivemind.optim.Optimizer, hivemind.utils.MPFuture.__name__)
"""
    said = warm.run(program)
    assert said.stdout.splitlines() == ["[]", "5 True", "[1, 0] [1.]", "True True MPFuture"], said.stderr
