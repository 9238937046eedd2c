"""Modules that are imported at their first use, so that workers which do not need them start faster."""

import importlib


class LazyModule:
    """Stands for a module, for example SymPy, whose import takes half a second."""

    def __init__(self, name: str):
        self.name = name

    def __getattr__(self, attribute: str):
        """Import the module, and keep the attribute for the next use."""
        value = getattr(importlib.import_module(self.name), attribute)
        setattr(self, attribute, value)
        return value
