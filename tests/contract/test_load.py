"""Import strings load objects, configs survive JSON, secrets are their owner's, and errors name what does not fit."""

from __future__ import annotations

import json
import os
import stat
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from sims.catalog import CATALOG
from tests.classes import table
from tests.tls import secret_file
from vla_rl.contract.config import from_json, to_json
from vla_rl.contract.env import EnvSpec
from vla_rl.contract.errors import UserError, did_you_mean
from vla_rl.contract.load import load, name_of, our_classes
from vla_rl.contract.trust import accept, named_class, read_key, write_whole


def test_a_string_loads_the_object_it_names():
    assert load("sims.catalog:CATALOG") is CATALOG
    assert load("vla_rl.contract.load:load") is load


def test_the_table_of_our_classes_is_that_of_the_source():
    assert our_classes() == table(), "run python -m tests.classes"


def test_a_class_of_the_table_is_named_by_itself_and_found():
    kinds = [load(f"{module}:{name}") for name, module in our_classes().items() if module.startswith("vla_rl.contract")]
    assert EnvSpec in kinds and all(named_class(name_of(kind)) is kind and ":" not in name_of(kind) for kind in kinds)


def test_a_class_of_somebody_else_is_named_with_its_module():
    assert name_of(Path) == f"{Path.__module__}:Path"


def test_a_class_of_ours_that_is_not_in_the_table_says_so():
    double = type("EnvSpec", (), {"__module__": "vla_rl.elsewhere"})
    with pytest.raises(TypeError, match=r"classes.json has no class 'EnvSpec' of vla_rl.elsewhere"):
        name_of(double)


def test_an_unknown_name_gets_the_nearest_one():
    with pytest.raises(UserError, match=r"'sims.catalog' has no 'mkae'.*did you mean 'make'"):
        load("sims.catalog:mkae")
    assert did_you_mean("lfit", ["lift", "stack"]) == "did you mean 'lift'?"
    assert did_you_mean("zzz", ["stack", "lift"]) == "known: lift, stack."
    assert did_you_mean("zzz", []) == "known: none."


@dataclass(frozen=True)
class Inner:
    rate: float = 0.5
    bounds: tuple[float, float] = (0.0, 1.0)


@dataclass(frozen=True)
class Outer:
    seed: int
    name: str = "x"
    flag: bool = True
    nothing: None = None
    inner: Inner = field(default_factory=Inner)
    many: tuple[Inner, ...] = ()
    table: dict[str, Inner] = field(default_factory=dict)


CONFIG = Outer(3, "grüße", False, inner=Inner(1e-5), many=(Inner(), Inner(2.0, (-1.0, 3.0))), table={"a": Inner(7.0)})


def test_json_text_rebuilds_an_equal_config():
    text = json.dumps(to_json(CONFIG))
    back = from_json(json.loads(text))
    assert back == CONFIG and type(back.inner) is Inner and type(back.many) is tuple
    assert json.dumps(to_json(back)) == text
    assert to_json(CONFIG)["class"] == f"{__name__}:Outer"


def test_a_whole_recipe_survives():
    recipe = load("configs.demo:demo")()
    assert from_json(json.loads(json.dumps(to_json(recipe)))) == recipe


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda data: data["inner"].update(raet=1.0), "Inner has no field 'raet'.*did you mean 'rate'"),
        (lambda data: data.pop("seed"), "Outer cannot be rebuilt.*'seed'"),
        (lambda data: data["inner"].update({"class": "json:JSONDecoder"}), "'json:JSONDecoder' is no class of vla-rl"),
        (lambda data: data["inner"].update({"class": f"{__name__}:Iner"}), "did you mean 'Inner'"),
    ],
)
def test_a_field_or_class_that_does_not_fit_is_named(change, message):
    data = to_json(CONFIG)
    change(data)
    with pytest.raises(UserError, match=message):
        from_json(data)


@pytest.mark.parametrize(
    ("name", "why"),
    [
        ("vla_rl.contract.env:EnvSpec", "is how earlier versions of vla-rl named a class"),
        ("of_another_version:Recipe", "does not exist here.*use the version of vla-rl that wrote it"),
    ],
)
def test_a_class_of_another_version_is_refused_in_a_sentence(name, why):
    accept([name.partition(":")[0]])
    with pytest.raises(UserError, match=f"'{name}' {why}"):
        from_json({"class": name, "steps": 3})


def test_a_secret_is_read_without_blanks_around_it(tmp_path):
    assert read_key(secret_file(tmp_path / "key", b" 0123456789abcdef\n")) == b"0123456789abcdef"


@pytest.mark.parametrize(
    ("content", "mode", "says"),
    [
        *(
            (content, 0o600, r"holds \d+ bytes, so whoever guesses them .* openssl rand")
            for content in (b"", b" " * 20)
        ),
        (b"0123456789abcde", 0o600, r"holds 15 bytes"),
        *((b"0123456789abcdef", mode, r"other users of this machine.* chmod 600") for mode in (0o640, 0o604, 0o620)),
    ],
)
def test_a_secret_that_is_short_or_read_by_others_is_refused(content, mode, says, tmp_path):
    secret_file(tmp_path / "key", content).chmod(mode)
    with pytest.raises(UserError, match=says):
        read_key(tmp_path / "key")
    with pytest.raises(UserError, match="cannot be read"):
        read_key(tmp_path / "none")


def test_what_guards_is_its_owners_at_once_and_never_in_part(tmp_path, monkeypatch):
    path, before, seen = tmp_path / "signing.key", b"old", list[tuple[bytes, set[int]]]()
    path.write_bytes(before)

    def look(real):
        def called(*given, **options):
            asides = {stat.S_IMODE(one.stat().st_mode) for one in tmp_path.iterdir() if one != path}
            seen.append((path.read_bytes(), asides))
            return real(*given, **options)

        return called

    for name in ("fsync", "replace"):
        monkeypatch.setattr(f"os.{name}", look(getattr(os, name)))
    write_whole(path, b"new")
    assert seen == [(before, {0o600}), (before, {0o600}), (b"new", set())]
    assert path.read_bytes() == b"new" and [one.name for one in tmp_path.iterdir()] == ["signing.key"]


def test_a_disk_that_takes_nothing_leaves_the_file_as_it_was(tmp_path, monkeypatch):
    def full(_):
        raise OSError(28, "No space left on device")

    (tmp_path / "list").write_bytes(b"old")
    monkeypatch.setattr("os.fsync", full)
    with pytest.raises(OSError, match="No space"):
        write_whole(tmp_path / "list", b"new")
    assert [(one.name, one.read_bytes()) for one in tmp_path.iterdir()] == [("list", b"old")]
