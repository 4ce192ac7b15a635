"""Names of a package that load on first use, so that importing the package is light."""

import importlib
from collections.abc import Callable, Mapping


def loader(package: str, home: Mapping[str, str]) -> Callable[[str], object]:
    """The `__getattr__` of a package whose public names are the keys of `home`; the values are the modules of each."""

    def load(name: str) -> object:
        if name not in home:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        return getattr(importlib.import_module(home[name]), name)

    return load
