"""Every public name has an example that test_docs.py runs: a docstring session, or the program on the API page."""

import importlib
import inspect
import re

import pytest

from tests.launch import ROOT
from tests.test_docs import blocks_of
from tests.test_public import PUBLIC

PAGE = ROOT / "docs/api.md"
PROGRAM = "".join(block.code for block in blocks_of(PAGE) if block.lang == "python")


def in_docstring(value) -> bool:
    """Return whether a docstring has a session, which test_docs.py runs."""
    return bool(re.search(r"^ *>>> ", inspect.getdoc(value) or "", re.M))


def in_program(name: str) -> bool:
    """Return whether the program uses a name outside its imports."""
    used = re.sub(r"^from [\w.]+ import (\((?s:.*?)\)|.*)$", "", PROGRAM, flags=re.M)
    return bool(re.search(rf"\b{name}\b", used))


@pytest.mark.parametrize("module", PUBLIC)
def test_every_public_name_has_an_example(module):
    values = {name: getattr(importlib.import_module(module), name) for name in PUBLIC[module]}
    without = [
        name
        for name, value in values.items()
        if not inspect.ismodule(value) and not in_docstring(value) and not in_program(name)
    ]
    assert without == [], f"{module}: add an example to the docstring, or to its section in docs/api.md"


def test_names_in_imports_alone_do_not_count():
    assert "uninstall" in PROGRAM and in_program("uninstall") and not in_program("PhysicsNeMoNothing")
