"""The counts of the project's structure."""

import ast

from tools.structure import Module, circles, closure, code_lines, late_imports


def module(name: str, source: str) -> Module:
    return Module(name, name.split(".")[:-1], source, ast.parse(source))


def test_lines_of_code_have_neither_docstrings_nor_comments():
    head = '"""A text\nof two lines."""\n\n# why\nx = """not a\ndocstring"""\n\n\n'
    source = head + 'def f():\n    """Text."""\n    return x  # why\n'
    assert code_lines(module("engine.a", source)) == 4


def test_imports_in_nested_functions_are_counted_once():
    assert (
        late_imports(module("engine.a", "import os\ndef f():\n    import re\n    def g():\n        import io\n")) == 2
    )


def test_circles_over_several_modules_and_in_functions():
    found = [
        module("engine.a", "from .b import x"),
        module("engine.b", "def f():\n    from . import c"),
        module("engine.c", "from fedfleet.engine.a import y"),
        module("engine.d", "from .a import x"),
    ]
    assert circles(found) == [["engine.a", "engine.b", "engine.c"]]


def test_what_is_imported_over_others():
    assert closure("a", {"a": {"b"}, "b": {"c"}, "c": set(), "d": {"a"}}) == {"b", "c"}
