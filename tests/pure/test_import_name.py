"""`import quire`: the public names, and how little the import loads."""

from __future__ import annotations

import subprocess
import sys

import pytest

import quire


def test_the_public_names_are_the_engine_s() -> None:
    import engine.llm
    from engine.system.version import VERSION

    assert {"LLM", "SamplingParams"} < set(quire.__all__)
    assert dir(quire) == sorted(quire.__all__)
    assert quire.__version__ == VERSION
    for name in set(quire.__all__) - {"__version__"}:
        assert getattr(quire, name) is getattr(engine.llm, name)


def test_another_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="no attribute 'serve'; it has LLM"):
        _ = quire.serve


def test_importing_quire_loads_only_the_standard_library() -> None:
    code = (
        "import sys; before = set(sys.modules); import quire; "
        "loaded = {name.split('.')[0] for name in set(sys.modules) - before}; "
        "print(sorted(loaded - set(sys.stdlib_module_names)))"
    )
    output = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert output.stdout.strip() == "['quire']"
