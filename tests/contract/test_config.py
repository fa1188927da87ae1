"""Configs survive JSON, and errors name the field that does not fit."""

from __future__ import annotations

import json
from dataclasses import dataclass, field

import pytest

from vla_rl.contract.config import from_json, to_json
from vla_rl.contract.errors import UserError
from vla_rl.contract.load import load
from vla_rl.contract.trust import accept


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


def test_values_that_json_lacks_are_refused():
    with pytest.raises(TypeError, match="type set cannot be written as JSON"):
        to_json({"a": [{1, 2}]})
    with pytest.raises(TypeError, match="type type"):
        to_json(Inner)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda data: data["inner"].update(raet=1.0), "Inner has no field 'raet'.*did you mean 'rate'"),
        (lambda data: data.pop("seed"), "Outer cannot be rebuilt.*'seed'"),
        (lambda data: data["inner"].update({"class": "json:JSONDecoder"}), "'json:JSONDecoder' is no class of vla-rl"),
        (lambda data: data["inner"].update({"class": "os:getcwd"}), "'os:getcwd' is no class of vla-rl"),
        (lambda data: data["inner"].update({"class": "nonsense"}), "'nonsense' is no class of vla-rl"),
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


def test_a_missing_package_is_named(tmp_path, monkeypatch):
    (tmp_path / "wants_more.py").write_text("import no_such_package\n")
    monkeypatch.syspath_prepend(tmp_path)
    accept(["wants_more"])
    with pytest.raises(ModuleNotFoundError, match="no_such_package"):
        from_json({"class": "wants_more:Config"})
