"""A package whose modules are imported without its hub: what its `__init__` gathers is loaded when somebody asks for it."""

import importlib.util
import sys
from types import ModuleType
from typing import Any


class LazyHub(ModuleType):
    """Stands for the package until a name is wanted that none of its imported modules has. It is then the package itself."""

    def __getattr__(self, name: str) -> Any:
        if (module := sys.modules.get(f"{self.__name__}.{name}")) is not None:  # which is just being imported
            return module
        if name.startswith("__") and name not in ("__all__", "__version__"):  # the others are asked of all modules, and most have none
            raise AttributeError(f"module {self.__name__!r} has no attribute {name!r}")
        self.__class__ = ModuleType
        self.__spec__.loader.exec_module(self)
        return getattr(self, name)


def import_without_hub(package: str) -> None:
    """From now on `import package.module` loads that module alone. Changes nothing where the package is loaded already, or not installed."""
    if package in sys.modules or (spec := importlib.util.find_spec(package)) is None:
        return
    module = importlib.util.module_from_spec(spec)
    module.__class__ = LazyHub
    sys.modules[package] = module
