"""The figures of ``make house`` are what they say."""

from __future__ import annotations

import ast
from dataclasses import dataclass, field

from tests.house import circles, imported, settings


@dataclass
class Inner:
    one: int = 1
    two: tuple[int, ...] = (1, 2)


@dataclass
class Outer:
    inner: Inner = field(default_factory=Inner)
    none: Inner | None = None


def test_a_setting_is_a_field_that_is_no_config():
    assert settings(Outer()) == 3


def test_a_circle_is_found_whatever_leads_to_it():
    assert circles({"a": {"b"}, "b": {"c"}, "c": {"b", "d"}, "d": set()}) == [["b", "c"]]
    assert circles({"a": {"b"}, "b": set()}) == []


def test_what_is_imported_at_module_level_and_anywhere():
    text = "import p.a\nfrom p import b\nfrom p.c import X\nif TYPE_CHECKING:\n    from p.d import Y\n"
    tree = ast.parse(f"{text}def f():\n    import p.e\nfrom q import r")
    known = dict.fromkeys(["p.a", "p.b", "p.c", "p.d", "p.e"])
    assert set(imported(tree, "p.z", known, everywhere=False)) == {"p.a", "p.b", "p.c", "p.d"}
    assert set(imported(tree, "p.z", known, everywhere=True)) == set(known)
