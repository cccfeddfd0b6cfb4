"""A package whose modules are imported without its hub: what its `__init__` gathers is loaded when somebody asks for it."""

import contextlib
import importlib
import importlib.util
import sys
from importlib.machinery import ModuleSpec, PathFinder
from types import ModuleType
from typing import Any


class LazyHub(ModuleType):
    """Stands for the package until a name is wanted that none of its imported modules has. It is then the package itself.

    _homes: the module of names that are wanted without the rest, `{"linear_sum_assignment": "_lsap"}`.
    """

    _homes: dict[str, str]

    def __getattr__(self, name: str) -> Any:
        if (module := sys.modules.get(f"{self.__name__}.{name}")) is not None:  # which is just being imported
            return module
        if name in self._homes:
            with contextlib.suppress(ImportError, AttributeError):  # in another version it may live elsewhere: the hub knows
                return getattr(importlib.import_module(f"{self.__name__}.{self._homes[name]}"), name)
        if name.startswith("__") and name not in ("__all__", "__version__"):  # the others are asked of all modules, and most have none
            raise AttributeError(f"module {self.__name__!r} has no attribute {name!r}")
        self.__class__ = ModuleType
        self.__spec__.loader.exec_module(self)
        return getattr(self, name)


def import_without_hub(package: str, **homes: str) -> None:
    """From now on `import package.module` loads that module alone, and `from package import name` the module of `homes` that has it.

    Changes nothing where the package is loaded already, or not installed. What it is part of is not imported for it.
    """
    if package in sys.modules or (spec := _spec(package)) is None:
        return
    module = importlib.util.module_from_spec(spec)
    module._homes = homes
    module.__class__ = LazyHub
    sys.modules[package] = module
    whole, _, name = package.rpartition(".")
    if whole in sys.modules:  # as after an import of the part, which nobody does any more
        setattr(sys.modules[whole], name, module)


def _spec(package: str) -> ModuleSpec | None:
    """As `importlib.util.find_spec`, which imports the packages around it."""
    whole, _, _ = package.rpartition(".")
    if not whole:
        return importlib.util.find_spec(package)
    around = _spec(whole)
    return around and PathFinder.find_spec(package, around.submodule_search_locations)
