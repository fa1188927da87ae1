"""Tables that are made from the code while the site is built, so that they cannot be out of date.

    <!-- config: PPOConfig -->                   the fields of a config, with their defaults
    <!-- metrics: policy/kl critic/loss -->      what these metrics mean

A field's meaning is the entry ``Class.field`` of ``fields.yml``, of the class itself or of one that it inherits from,
or else the comment beside the field.  A metric's is its entry of ``metrics.yml``.  What has no meaning fails the build.
"""

from __future__ import annotations

import dataclasses
import inspect
import re
from functools import cache
from pathlib import Path
from typing import Any

import yaml
from mkdocs.exceptions import PluginError

from vla_rl.contract.load import load, our_classes

_HERE = Path(__file__).parent


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Called by mkdocs: ``markdown`` of ``page`` with its tables."""
    return with_tables(markdown, page.file.src_uri)


def with_tables(markdown: str, page: str = "") -> str:
    """``markdown`` with a table in place of every directive."""
    markdown = re.sub(r"<!-- config: (\S+)\s*-->", lambda found: config_table(found[1], page), markdown)
    markdown = re.sub(r"<!-- metrics:([^>]*)-->", lambda found: metrics_table(found[1].split(), page), markdown)
    return re.sub(r"^\|.*$", lambda found: unbroken(found[0]), markdown, flags=re.M)


def unbroken(row: str) -> str:
    """A row of a table in which "57.0 %" and "[52.7, 61.3]" are never broken into two lines."""
    row = re.sub(r"(?<=\d) (?=%|dB|mm|/s|ms)", "\N{NO-BREAK SPACE}", row)
    return re.sub(r"\[[\d., -]+\]", lambda found: found[0].replace(" ", "\N{NO-BREAK SPACE}"), row)


def config_table(name: str, page: str = "") -> str:
    """One row per field of the dataclass ``name``, wherever in vla_rl it is."""
    config, known = load(where(name, page)), meanings("fields.yml")
    rows = ["| field | default | meaning |", "|---|---|---|"]
    for field in dataclasses.fields(config):
        classes = [one for one in config.__mro__ if field.name in getattr(one, "__annotations__", {})]
        named = [f"{one.__name__}.{field.name}" for one in config.__mro__]
        texts = [known[one] for one in named if one in known] or [
            comment for one in classes if (comment := beside(one, field.name))
        ]
        if not texts:
            raise PluginError(f"{page}: {named[0]} has no meaning; add it to docs/tables/fields.yml.")
        rows.append(f"| `{field.name}` | {default(field)} | {texts[0]} |")
    return "\n".join(rows)


def where(name: str, page: str = "") -> str:
    """``module:name`` of our class of this name."""
    if name not in our_classes():
        raise PluginError(f"{page}: no class of ours is called {name!r}, so it has no fields; name one that exists.")
    return f"{our_classes()[name]}:{name}"


def metrics_table(names: list[str], page: str = "") -> str:
    """One row per metric."""
    known = meanings("metrics.yml")
    if unknown := [name for name in names if name not in known]:
        raise PluginError(f"{page}: the metrics {unknown} have no meaning; add them to docs/tables/metrics.yml.")
    return "\n".join(["| metric | meaning |", "|---|---|", *(f"| `{name}` | {known[name]} |" for name in names)])


@cache
def meanings(file: str) -> dict[str, str]:
    """The texts of a YAML file in this folder."""
    found: dict[str, str] = yaml.safe_load((_HERE / file).read_text(encoding="utf-8"))
    return found


def beside(config: type, field: str) -> str:
    """The comment on the line that declares ``field`` in the source of ``config``; "" without one."""
    found = re.search(rf"^    {field}:[^\n]*?  # ([^\n]+)$", inspect.getsource(config), re.M)
    text = found[1] if found else ""
    return text[:1].upper() + text[1:] + "." * (not text.endswith(".")) if text else ""


def default(field: dataclasses.Field[Any]) -> str:
    """A field's default as the source has it: a literal, or the name of a config's class."""
    value = field.default
    if field.default_factory is not dataclasses.MISSING:
        value = field.default_factory()
    if value is dataclasses.MISSING:
        return "required"
    return f"`{type(value).__name__}`" if dataclasses.is_dataclass(value) else f"`{value!r}`"
