"""Models by their names on the Hugging Face hub, with the real client and a server on loopback."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from sims.catalog import spec_of
from tests.hub import TOKEN, Hub, alone, at, serving
from tests.policies.vla.tiny_folders import smolvla
from vla_rl.cli import main
from vla_rl.contract.errors import UserError
from vla_rl.contract.hub import is_pinned, located, portable
from vla_rl.contract.trust import check_folder
from vla_rl.policies.vla.tokenizer import open_tokenizer

NAME = "somebody/small-vla"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return smolvla(tmp_path_factory.mktemp("published") / "policy", spec_of("lift"))


@pytest.fixture
def hub(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    """A public and a private repository of the folder, with code and a pickle that nobody asked for."""
    files = {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}
    more = {"modeling.py": b"raise SystemExit", "pytorch_model.bin": b"\x80\x04."}
    older = {**files, "config.json": b"{}"}
    named = {
        NAME: {"main": {**files, **more}, "v1": older},
        "somebody/secret": {"main": files},
        "somebody/gated": {"main": files},
        "somebody/oft": {"main": {"dataset_statistics.json": b"{}", "action_head--1_checkpoint.pt": b"it"}},
    }
    open_tokenizer.cache_clear()
    with serving(Hub(named, private={"somebody/secret"}, gated=("somebody/gated",))) as server:
        at(monkeypatch, server.url)
        alone(monkeypatch, tmp_path)
        monkeypatch.chdir(tmp_path)
        yield server
    open_tokenizer.cache_clear()


def test_a_name_is_the_folder_of_its_revision_and_holds_data_alone(hub: Hub, folder: Path) -> None:
    found = Path(located(NAME))
    assert {path.name for path in found.rglob("*") if path.is_file()} == {
        path.name for path in folder.rglob("*") if path.is_file()
    }
    assert found.name == hub.commit(NAME, "main") and not any("modeling" in path for path in hub.asked)
    older = Path(located(f"{NAME}@v1"))
    assert older.name == hub.commit(NAME, "v1") and json.loads((older / "config.json").read_text()) == {}
    assert located(f"{NAME}@{found.name}") == str(found)


def test_a_head_that_is_a_pickle_is_missed(hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(UserError, match=r"a part that is a pickle \(action_head--1_checkpoint.pt\).*vla.md"):
        located("somebody/oft")
    hub.repositories["somebody/oft"]["main"].pop("action_head--1_checkpoint.pt")  # type: ignore[attr-defined]
    assert (Path(located("somebody/oft")) / "dataset_statistics.json").is_file()


def test_what_is_a_folder_here_is_none_on_the_hub(hub: Hub, tmp_path: Path) -> None:
    """Nor is one that is missing from a folder that is here: it is a mistake, and no download."""
    (tmp_path / "mine").mkdir()
    for name in (
        "mine/demo",
        "runs/demo",
        "mine",
        "module:Class",
        "ws://host:1",
        "expert",
        str(tmp_path / "x"),
        "a/b/c",
        "",
        "../x",
    ):
        assert located(name) == name
    assert not hub.asked


def test_cached_it_needs_no_network(hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    found = located(NAME)
    at(monkeypatch, "http://127.0.0.1:9")
    assert located(NAME) == found
    with pytest.raises(UserError, match=r"^'somebody/other' is no folder here, and it could not be downloaded .* try"):
        located("somebody/other")


@pytest.mark.parametrize(
    ("name", "sentence"),
    [
        (
            "somebody/misspelt",
            r"^'somebody/misspelt' is no folder here and no model that the Hugging Face hub shows you",
        ),
        ("somebody/secret", r"^'somebody/secret' is no folder .* log in \(hf auth login\) if it is private\.$"),
        ("somebody/gated", r"^'somebody/gated' asks for an agreement .* accept it on its page and log in"),
        (f"{NAME}@v2", r"^'somebody/small-vla' has no revision 'v2' .* name a branch, tag or commit"),
    ],
)
def test_what_the_hub_refuses_is_one_sentence(hub: Hub, name: str, sentence: str) -> None:
    with pytest.raises(UserError, match=sentence):
        located(name)


def test_a_private_model_is_shown_to_who_is_logged_in(hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    assert Path(located("somebody/secret"), "model.safetensors").exists()


def test_a_download_that_was_cut_goes_on(hub: Hub, folder: Path) -> None:
    """Either at once or at the next try; what is opened is whole."""
    hub.cut = 1000
    try:
        found = located(NAME)
    except UserError as error:
        assert "a download goes on" in str(error)
        found = located(NAME)
    assert (Path(found) / "model.safetensors").read_bytes() == (folder / "model.safetensors").read_bytes()


def test_files_that_repositories_share_in_the_cache_are_its_own_and_others_are_not(hub: Hub, tmp_path: Path) -> None:
    """As the client keeps what it has by Xet: a repository's file is a link to a store beside all repositories."""
    found, store = Path(located(NAME)), tmp_path / "cache" / "blobs"
    blob = (found / "model.safetensors").resolve()
    store.mkdir()
    blob.rename(store / "whole")
    blob.symlink_to(store / "whole")
    with pytest.raises(UserError, match="leads out of its folder"):
        check_folder(found)
    (store / ".huggingface-shared-blobs").write_text("1\n", encoding="utf-8")
    assert check_folder(found) > 0
    (found / "more.json").symlink_to(tmp_path / "token")
    with pytest.raises(UserError, match=r"more\.json' leads out of its folder"):
        check_folder(found)


def test_a_folder_of_the_cache_is_named_by_its_commit_elsewhere(hub: Hub, tmp_path: Path) -> None:
    found = located(NAME)
    name = f"{NAME}@{hub.commit(NAME, 'main')}"
    assert portable(found) == portable(name) == name and located(name) == found
    assert portable(tmp_path / "mine") == str(tmp_path / "mine") and not is_pinned(f"{NAME}@main")
    (tmp_path / "somebody").mkdir()  # which a name without its commit would be in
    assert located(NAME) == NAME and located(name) == found


@pytest.mark.full
def test_every_command_takes_a_name(hub: Hub, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Inspect, eval and train; a run notes the folder of the revision, and goes on without the hub."""
    main(["inspect", NAME])
    assert "smolvla" in capsys.readouterr().out.lower()
    few = ["--episodes", "2", "--num-envs", "2"]
    main(["eval", NAME, "--env", "lift", "--env.options", '{"deadline": 10}', *few])
    small = {"evaluation.validation": 2, "evaluation.test": 2, "evaluation.num-envs": 2, "rl.experience.num-envs": 2}
    small |= {"rl.experience.decisions": 2, "rl.algorithm.minibatch": 4, "rl.loop.iterations": 1}
    options: list[Any] = [word for name, value in small.items() for word in (f"--{name}", str(value))]
    run = ["train", "smolvla.py:ppo", "--policy", NAME, "--env", "lift", "--env.options", '{"deadline": 10}']
    main([*run, *options, "--out", str(tmp_path / "run")])
    assert hub.commit(NAME, "main") in json.loads((tmp_path / "run" / "config.json").read_text())["policy"]
    hub.asked.clear()
    main(["train", "--resume", str(tmp_path / "run"), "--rl.loop.iterations", "2"])
    assert not hub.asked
