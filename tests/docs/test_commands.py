"""Every command on a page is one that the command line takes; the cheap ones run."""

from __future__ import annotations

import importlib
import pkgutil
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from tyro import _docstrings

import vla_rl.cli
from tests.docs import command_page
from tests.docs.conftest import ROOT, Command, commands
from vla_rl.cli import COMMANDS, main
from vla_rl.contract import hub
from vla_rl.training.tracking import RunFolder

ALL = list(commands())
_TARGETS = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(encoding="utf-8"), re.M))
# What belongs to the reader's shell.
_SHELL = {"git", "cd", ".", "diff", "pip", "cp", "ls", "mkdir", "export"}


_tokens_of = cache(_docstrings._ClassTokenization.make)


class _Parsed(BaseException):
    """The arguments were understood; nothing was run."""


@pytest.fixture
def parse(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """``vla-rl`` with these arguments, until they are understood; a mistake in them is a SystemExit."""
    # tyro reads the source of the same classes for every command.
    monkeypatch.setattr(_docstrings._ClassTokenization, "make", _tokens_of)
    names = [module.name for module in pkgutil.walk_packages(vla_rl.cli.__path__, "vla_rl.cli.")]
    # All are imported before the first is changed: one that is imported later would keep another's changed function.
    for module in [importlib.import_module(name) for name in names if not name.endswith("__main__")]:
        _stop_after_parsing(module, monkeypatch)
    monkeypatch.setattr(hub, "repository", lambda name, kind="model": None)  # nothing is downloaded
    monkeypatch.setattr(RunFolder, "resume", _stop)
    monkeypatch.setattr("vla_rl.recipes.recipe.resume", _stop)

    def run(words: Sequence[str], folder: Path = ROOT) -> None:
        monkeypatch.chdir(folder)
        with pytest.raises(_Parsed):
            main(list(words))

    return run


def _stop_after_parsing(module: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    if hasattr(module, "override"):
        real = module.override

        def parsed(*arguments: Any) -> None:
            real(*arguments)
            raise _Parsed

        monkeypatch.setattr(module, "override", parsed)
    for name in ("inspect", "find_run", "evaluate_world_model", "resume"):
        if callable(getattr(module, name, None)):
            monkeypatch.setattr(module, name, _stop)


def _stop(*_: Any, **__: Any) -> None:
    raise _Parsed


def _ours() -> Iterator[Any]:
    """Every ``vla-rl ...`` once; in the gate those alone that bring an option which their command had not had yet."""
    seen: set[tuple[str, ...]] = set()
    for command in {one.words: one for one in ALL}.values():
        for name in {"vla-rl", "vla_rl.cli"} & set(command.words):
            arguments = list(command.words[command.words.index(name) + 1 :])
            options = {word.partition("=")[0] for word in arguments if word.startswith("--")}
            new = {(*arguments[:2], option) for option in ("", *options)} - seen
            seen |= new
            yield pytest.param(command, arguments, marks=[] if new else pytest.mark.full, id=str(command))


@pytest.mark.parametrize(("command", "arguments"), list(_ours()))
def test_the_command_line_understands_it(command, arguments, parse):
    if not arguments or arguments[-1] == "--help":
        with pytest.raises(SystemExit) if len(arguments) > 1 else nullcontext():
            main(arguments)
    else:
        parse(arguments, command.folder)


@pytest.mark.parametrize("arguments", ["train configs/demo.py:demo --rl.loop.iterations many", "evil", "demo --sed 1"])
def test_a_mistake_in_a_command_is_noticed(arguments, parse):
    with pytest.raises(SystemExit):
        parse(arguments.split())


def test_other_commands_exist():
    wrong = [str(one) for one in ALL if not _known(one)]
    assert not wrong


def _known(command: Command) -> bool:
    first, words = command.words[0], command.words
    if first == "make":
        return all(word in _TARGETS for word in words[1:] if "=" not in word)
    if first.endswith("python"):
        if words[1] != "-m":
            return (ROOT / words[1]).is_file()
        named = words[2]
        file = ROOT / named.replace(".", "/")
        return named == "pytest" or file.with_suffix(".py").is_file() or (file / "__main__.py").is_file()
    return first in {"vla-rl", "torchrun", "ray", *_SHELL}


def test_the_page_of_commands_is_that_of_the_parsers():
    """``python -m tests.docs.command_page`` makes it anew."""
    assert list(command_page.SECTIONS) == list(COMMANDS)
    assert command_page.PAGE.read_text(encoding="utf-8") == command_page.page()
