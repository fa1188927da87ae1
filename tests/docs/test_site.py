"""The site is built strictly, and the targets of its links exist."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from html.parser import HTMLParser
from urllib.parse import unquote

import pytest

from docs.tables import hooks
from tests.docs.conftest import PAGES, ROOT
from vla_rl.contract.load import load

NAMES = [page.relative_to(ROOT).as_posix() for page in PAGES]
_FOLDERS = "vla_rl|sims|world_models|robot_drivers|configs|docs|tests"


class _Links(HTMLParser):
    """Where a page leads to, and the anchors that it has."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.targets: list[str] = []
        self.anchors: set[str] = set()
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        for name, value in attrs:
            if name == "id" and value:
                self.anchors.add(value)
            if name in ("href", "src") and value:
                self.targets.append(value)


def test_every_link_and_anchor_of_the_site_leads_somewhere(site):
    pages = {path: _Links(path.read_text(encoding="utf-8")) for path in site.rglob("*.html")}
    assert len(pages) > 10
    wrong = []
    for path, links in pages.items():
        for target in links.targets:
            if re.match(r"https?:|data:|mailto:", target) or path.name == "404.html":
                continue
            file, _, anchor = unquote(target).partition("#")
            found = (path.parent / file.partition("?")[0]).resolve() if file else path
            if found.is_dir():
                found /= "index.html"
            if not found.exists() or (anchor and found in pages and anchor not in pages[found].anchors):
                wrong.append(f"{path.relative_to(site)}: {target}")
    assert not wrong


def test_the_site_asks_nothing_of_the_network(site):
    page = (site / "index.html").read_text(encoding="utf-8")
    loaded = re.findall(r'<(?:script|link|img)[^>]*(?:src|href)="(https?:[^"]*)"', page)
    assert not loaded


@pytest.mark.parametrize("name", NAMES)
def test_files_links_and_functions_of_a_page_exist(name):
    page = ROOT / name
    text = re.sub(r"^ *```.*?^ *```", "", page.read_text(encoding="utf-8"), flags=re.M | re.S)
    links = [link.partition("#")[0] for link in re.findall(r"\]\(([^)\s]+)\)", text) if not link.startswith("http")]
    assert [*_missing(text), *(link for link in links if link and not (page.parent / link).exists())] == []


def _missing(text: str) -> Iterator[str]:
    """Paths in backquotes below our folders, and functions of configs, that do not exist."""
    for named in re.findall(rf"`((?:{_FOLDERS})/[^`\s<>{{}}]*)`", text):
        path, _, function = named.partition(":")
        file = ROOT / path
        if not file.exists():
            yield named
        elif function:
            tree = ast.parse(file.read_text(encoding="utf-8"))
            known = {node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef | ast.ClassDef)}
            if function.strip(":") not in known:
                yield named


def test_every_meaning_of_a_field_is_that_of_a_field():
    for name in hooks.meanings("fields.yml"):
        config, _, field = name.partition(".")
        assert field in load(hooks.where(config)).__dataclass_fields__, name
