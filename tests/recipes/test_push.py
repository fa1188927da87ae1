"""Policies and datasets to the Hugging Face hub and back, with the real client and a server on loopback.

What comes back is the same bit for bit, the card says what was recorded, and nothing of the machine goes with it.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import time
from collections.abc import Iterator
from contextlib import closing
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import peft
import pytest
import torch
from huggingface_hub import DatasetCard, ModelCard

from sims.catalog import spec_of
from tests.commands import save_untrained
from tests.experience import lerobot_makers as makers
from tests.fleet.records import chained, episode, introduction
from tests.hub import TOKEN, Hub, alone, at, serving
from tests.policies.vla.tiny_folders import smolvla
from tests.recipes.quick import improve
from vla_rl.cli import main
from vla_rl.contract import trust
from vla_rl.contract.config import to_json
from vla_rl.contract.hub import located
from vla_rl.evaluation.stats import Rate
from vla_rl.experience.datasets import load_demonstrations
from vla_rl.experience.lerobot.reader import DatasetReader
from vla_rl.fleet.ledger import Ledger
from vla_rl.fleet.server import LEDGER
from vla_rl.policies.pretrained import load_policy
from vla_rl.policies.vla.lerobot_folder import save_lerobot
from vla_rl.policies.vla.tokenizer import open_tokenizer
from vla_rl.policies.vla.weights import ADAPTER
from vla_rl.pretrained import save_own
from vla_rl.recipes.inspect import describe_public
from vla_rl.recipes.push import Card, dataset_upload
from vla_rl.training.tracking import RunFolder, read_metrics

NAME = "somebody/lift-ppo"


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    """An empty one; its user is logged in."""
    open_tokenizer.cache_clear()
    with serving(Hub({})) as server:
        at(monkeypatch, server.url)
        alone(monkeypatch, tmp_path)
        monkeypatch.setenv("HF_TOKEN", TOKEN)
        monkeypatch.setattr(trust, "_all", [])
        monkeypatch.chdir(tmp_path)
        yield server
    open_tokenizer.cache_clear()


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """A finished run from a policy that is somewhere on this machine."""
    policy = load_policy(save_untrained(tmp_path / "untrained"))
    folder = RunFolder(tmp_path / "run", improve())
    folder.add_command(["vla-rl", "train", "quick.py:improve", "--policy", str(tmp_path / "untrained"), "--seed", "1"])
    folder.log("rl", 0, {"loss": 1.0})
    save_own(policy, folder.checkpoint("best"))
    (folder.path / "state").mkdir()
    (folder.path / "state" / "optimizer.safetensors").write_bytes(b"moments")
    folder.write_summary({"rl": asdict(Rate.counted(40, 50)), "seed": 1})
    folder.close()
    assert read_metrics(folder.path)
    return folder.path


def weights(policy: Any) -> dict[str, torch.Tensor]:
    return dict(policy.state_dict())


def same(one: Any, other: Any) -> bool:
    first, second = weights(one), weights(other)
    return first.keys() == second.keys() and all(torch.equal(first[name], second[name]) for name in first)


def test_a_run_is_its_best_checkpoint_and_a_card_that_says_what_was_recorded(hub: Hub, run: Path) -> None:
    main(["push", str(run), NAME, "--license", "apache-2.0"])
    sent = hub.head(NAME)
    assert sent.keys() == {".gitattributes", "README.md", "config.json", "model.safetensors"}
    assert not any(str(run.parent).encode() in data for data in sent.values())
    for file in ("config.json", "model.safetensors"):
        assert sent[file] == (run / "checkpoints" / "best" / file).read_bytes()
    card = ModelCard(sent["README.md"].decode())
    data = card.data
    assert (data.license, data.library_name, data.pipeline_tag) == ("apache-2.0", "vla-rl", "robotics")
    assert {"lift", "TinyVLA", "vla-rl"} <= set(data.tags) and data.base_model is None
    (measured,) = data.eval_results
    low, high = measured.metric_args["interval_95"]
    assert (measured.metric_value, measured.dataset_type, measured.metric_args["episodes"]) == (0.8, "lift", 50)
    assert f"80.0% [{100 * low:.1f}, {100 * high:.1f}]" in card.text and "50 test episodes" in card.text
    assert "`vla-rl train quick.py:improve --policy …/untrained --seed 1`" in card.text
    assert '`{"deadline": 5}`' in card.text and "| Seed of training | 1 |" in card.text and "PPO" in card.text


@pytest.mark.full
def test_what_was_pushed_is_opened_by_its_name(hub: Hub, run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    main(["push", str(run), NAME])
    assert same(load_policy(located(NAME)), load_policy(run))
    main(["eval", NAME, "--env", "lift", "--env.options", '{"deadline": 5}', "--episodes", "2", "--num-envs", "2"])
    assert json.loads(capsys.readouterr().out.splitlines()[-1])["episodes"] == 2


def test_a_dry_run_prints_the_card_and_sends_nothing(
    hub: Hub, run: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_TOKEN", "")
    main(["push", str(run), NAME, "--dry-run"])
    assert "named no license" in capsys.readouterr().out and not hub.asked and not hub.repositories


def test_evaluations_of_these_very_weights_are_on_the_card(hub: Hub, run: Path, complaint: Any) -> None:
    few = ["--env", "lift", "--env.options", '{"deadline": 5}', "--episodes", "2", "--num-envs", "2"]
    main(["eval", str(run), *few, "--seeds", "test", "--out", "rate.json"])
    main(["push", str(run), NAME, "--evaluation", "rate.json"])
    text = hub.head(NAME)["README.md"].decode()
    assert "| evaluated | `lift` | 0.0% [0.0, 80.2] | 2 test episodes |" in text
    (run / "checkpoints" / "best" / "extra.json").write_text("{}", encoding="utf-8")
    said = complaint("push", str(run), NAME, "--evaluation", "rate.json")
    assert "is an evaluation of other weights" in said
    assert "is no evaluation of a checkpoint" in complaint("push", str(run), NAME, "--evaluation", str(run / "x.json"))


@pytest.mark.full
def test_a_branch_is_another_one_and_a_later_push_leaves_nothing_of_an_earlier(hub: Hub, run: Path) -> None:
    main(["push", str(run), NAME])
    best = run / "checkpoints" / "best"
    (best / "more").mkdir()
    (best / "more" / "config.json").write_text("{}", encoding="utf-8")
    main(["push", str(run), NAME, "--revision", "try"])
    assert "more/config.json" in hub.head(NAME, "try") and "more/config.json" not in hub.head(NAME)
    shutil.rmtree(best / "more")
    (best / "README.md").write_text("---\nlicense: mit\n---\nmine\n", encoding="utf-8")
    main(["push", str(run), NAME, "--revision", "try"])
    assert "more/config.json" not in hub.head(NAME, "try") and hub.head(NAME, "try")["README.md"].endswith(b"mine\n")


# -- on a base ---------------------------------------------------------------------------------------------------------


@pytest.fixture
def published(tmp_path: Path, hub: Hub) -> Path:
    """A small SmolVLA here, which is on the hub as well."""
    folder = smolvla(tmp_path / "downloads" / "smolvla", spec_of("lift"))
    files = {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}
    hub.repositories |= {"maker/small-vla": {"main": files}, "maker/other": {"main": {**files, "config.json": b"{}"}}}
    return folder


@pytest.mark.full
def test_a_checkpoint_on_a_base_of_the_hub_fetches_it_wherever_it_is_opened(
    hub: Hub, published: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    policy = load_policy(located("maker/small-vla"), spec_of("lift"))
    policy.save_pretrained(tmp_path / "learnt")
    tokens = policy.prompts.encode(["lift"])[0].tolist()
    main(["push", str(tmp_path / "learnt"), NAME])
    sent = hub.head(NAME)
    commit = hub.commit("maker/small-vla", "main")
    assert json.loads(sent["config.json"])["base"]["folder"] == f"maker/small-vla@{commit}"
    assert ModelCard(sent["README.md"].decode()).data.base_model == "maker/small-vla"
    assert not any(str(tmp_path).encode() in data for data in sent.values())
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "elsewhere"))
    shutil.rmtree(tmp_path / "cache")
    found = load_policy(located(NAME))
    assert same(found, policy) and (tmp_path / "elsewhere" / "models--maker--small-vla").is_dir()
    open_tokenizer.cache_clear()
    assert found.prompts.encode(["lift"])[0].tolist() == tokens


def test_a_base_from_elsewhere_has_to_be_named_and_has_to_be_the_same(
    hub: Hub, published: Path, tmp_path: Path, complaint: Any
) -> None:
    policy = load_policy(published, spec_of("lift"))
    policy.save_pretrained(tmp_path / "learnt")
    push = ("push", str(tmp_path / "learnt"), NAME)
    said = complaint(*push)
    assert "did not come from the Hugging Face hub" in said and "--base OWNER/NAME" in said
    assert "has other weights, or another config.json" in complaint(*push, "--base", "maker/other")
    assert NAME not in hub.repositories
    main([*push, "--base", "maker/small-vla"])
    sent = hub.head(NAME)
    assert not any(str(tmp_path).encode() in data for data in sent.values())
    shutil.rmtree(published)
    open_tokenizer.cache_clear()
    assert same(load_policy(located(NAME)), policy)


def test_an_adapter_is_sent_with_the_name_of_what_it_was_trained_on(
    hub: Hub, published: Path, tmp_path: Path, complaint: Any
) -> None:
    beneath = load_policy(published, spec_of("lift"))
    adapter = shutil.copytree(published, tmp_path / "adapter", ignore=shutil.ignore_patterns("*.safetensors"))
    chosen = peft.LoraConfig(r=2, target_modules=r".*lm_expert.*q_proj", init_lora_weights=False)
    wrapped: Any = peft.get_peft_model(load_policy(published, spec_of("lift")).network, chosen)
    wrapped.save_pretrained(adapter)
    for file, changes in (("config.json", {"use_peft": True}), (ADAPTER, {"base_model_name_or_path": str(published)})):
        saved = json.loads((adapter / file).read_text(encoding="utf-8"))
        (adapter / file).write_text(json.dumps(saved | changes), encoding="utf-8")
    policy, push = load_policy(adapter, spec_of("lift")), ("push", str(adapter), NAME)
    assert f"of {published}, under an adapter" in dict(describe_public(adapter))["weights"]
    assert not same(policy.network, beneath.network) and weights(policy).keys() == weights(beneath).keys()
    assert "--base OWNER/NAME" in complaint(*push) and NAME not in hub.repositories
    main([*push, "--base", "maker/small-vla"])
    sent = json.loads(hub.head(NAME)[ADAPTER])
    commit = hub.commit("maker/small-vla", "main")
    assert (sent["base_model_name_or_path"], sent["revision"]) == ("maker/small-vla", commit)
    shutil.rmtree(published)
    found = load_policy(located(NAME), spec_of("lift"))
    assert same(found.network, policy.network)
    found.save_pretrained(tmp_path / "learnt")
    assert same(load_policy(tmp_path / "learnt"), found)
    save_lerobot(found, tmp_path / "whole")
    assert not (tmp_path / "whole" / ADAPTER).exists()
    assert same(load_policy(tmp_path / "whole", spec_of("lift")).network, policy.network)


def test_a_config_that_leads_to_this_machine_is_not_sent(hub: Hub, run: Path, complaint: Any) -> None:
    path = run / "checkpoints" / "best" / "config.json"
    saved = json.loads(path.read_text(encoding="utf-8"))
    path.write_text(json.dumps({**saved, "init_from": "/home/me/secret"}), encoding="utf-8")
    said = complaint("--trust", "push", str(run), NAME)
    assert "names the path '/home/me/secret', which is on this machine alone" in said and NAME not in hub.repositories


# -- datasets ----------------------------------------------------------------------------------------------------------


def test_a_dataset_comes_back_the_same_by_the_version_that_lerobot_looks_for(hub: Hub, tmp_path: Path) -> None:
    makers.write(tmp_path / "set", 3)
    main(["push", str(tmp_path / "set"), "somebody/arm", "--license", "mit"])
    sent, whole = hub.head("datasets/somebody/arm"), load_demonstrations(tmp_path / "set")
    assert sent is hub.head("datasets/somebody/arm", "v3.0")
    found = load_demonstrations("somebody/arm")
    assert np.array_equal(found.images["front"], whole.images["front"]) and np.array_equal(found.action, whole.action)
    card = DatasetCard(sent["README.md"].decode())
    assert card.data.license == "mit" and "LeRobot" in card.data.tags and card.data.task_categories == ["robotics"]
    assert card.data.configs == [{"config_name": "default", "data_files": "data/*/*.parquet"}]
    assert "| Episodes | 3 |" in card.text and "“öffne die Schublade”" in card.text and "x, y, z" in card.text
    shutil.rmtree(tmp_path / "set")
    makers.write(tmp_path / "set", 1, video="never")
    main(["push", str(tmp_path / "set"), "somebody/arm"])
    newer = hub.head("datasets/somebody/arm", "v3.0")
    assert newer is hub.head("datasets/somebody/arm") and not any(file.startswith("videos/") for file in newer)
    assert load_demonstrations("somebody/arm").count == 1


def test_a_dataset_is_sent_with_the_files_that_its_info_names(tmp_path: Path) -> None:
    makers.write(tmp_path / "arm", 2)
    info = tmp_path / "arm/meta/info.json"
    (tmp_path / "arm/data").rename(tmp_path / "arm/numbers")
    given = {"data_path": "numbers/chunk-{chunk_index:03d}/file-{file_index:03d}.parquet"}
    info.write_text(json.dumps({**json.loads(info.read_text()), **given}))
    upload = dataset_upload(tmp_path / "arm", Card("somebody/arm"))
    assert DatasetReader(tmp_path / "arm").files() <= upload.files.keys() and "numbers/*" in upload.replaces


def test_a_recording_that_is_not_finished_is_not_sent(hub: Hub, tmp_path: Path, complaint: Any) -> None:
    makers.write(tmp_path / "set", 1)
    (tmp_path / "set" / "recording").mkdir()
    assert "is not finished, so nothing was sent" in complaint("push", str(tmp_path / "set"), "somebody/arm")
    assert not hub.asked


@pytest.mark.full
def test_collect_pushes_what_it_has_recorded(hub: Hub, tmp_path: Path) -> None:
    main(["collect", "--env", "lift", "--count", "2", "--out", str(tmp_path / "set"), "--push", "somebody/lift"])
    found, whole = load_demonstrations("somebody/lift"), load_demonstrations(tmp_path / "set")
    assert np.array_equal(found.action, whole.action) and found.count == whole.count > 0
    text = hub.head("datasets/somebody/lift")["README.md"].decode()
    assert "`vla-rl collect --env lift --count 2 --out …/set --push somebody/lift`" in text


@pytest.mark.full
def test_a_fleets_episodes_are_pushed_when_they_are_exported(hub: Hub, tmp_path: Path) -> None:
    with closing(Ledger(tmp_path / "fleet" / LEDGER)) as ledger:
        ledger.append(chained([introduction(), *episode("one", 3), *episode("two", 2, "failure")]))
    main(["fleet", "export", "fleet", "--push", "somebody/arm", "--license", "mit"])
    found, whole = load_demonstrations("somebody/arm"), load_demonstrations(tmp_path / "fleet" / "dataset")
    assert np.array_equal(found.action, whole.action) and found.count == whole.count == 2
    text = hub.head("datasets/somebody/arm")["README.md"].decode()
    assert "`vla-rl fleet export fleet --push somebody/arm --license mit`" in text


# -- where it is not taken ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("token", "name", "options", "sentence"),
    [
        ("", NAME, "", "does not know who you are, so nothing was sent"),
        ("hf_wrong", NAME, "", "does not take your token, so nothing was sent"),
        (TOKEN, "another/policy", "", "your token may not write to 'another/policy'"),
        (TOKEN, "another/public", "", "your token may not write to 'another/public'"),
        (TOKEN, "somebody/public", "--private", "is on the hub already and everybody can see it"),
        (TOKEN, NAME, "--license appache", "does not take the head of README.md"),
        (TOKEN, "nobody", "", "cannot be a repository on the Hugging Face hub, so nothing was sent; write OWNER/NAME"),
        (TOKEN, f"{NAME}@main", "", "name the branch with --revision"),
        (TOKEN, NAME, "--base maker/none", "no model that the Hugging Face hub shows you"),
    ],
)
def test_what_the_hub_refuses_is_one_sentence(
    hub: Hub,
    run: Path,
    complaint: Any,
    monkeypatch: pytest.MonkeyPatch,
    token: str,
    name: str,
    options: str,
    sentence: str,
) -> None:
    if "--base" in options:
        config = run / "checkpoints" / "best" / "config.json"
        saved = json.loads(config.read_text(encoding="utf-8"))
        config.write_text(json.dumps({**saved, "base": {"folder": "/x", "fingerprint": "y"}}), encoding="utf-8")
    there = {"main": {".gitattributes": b""}}
    hub.repositories |= {"another/public": dict(there), "somebody/public": dict(there)}
    monkeypatch.setenv("HF_TOKEN", token)
    assert sentence in complaint("--trust", "push", str(run), name, *options.split())
    assert all(not files.keys() - {".gitattributes"} for kept in hub.repositories.values() for files in kept.values())


def test_without_a_network_or_folder_it_is_one_sentence(
    hub: Hub, run: Path, complaint: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    at(monkeypatch, "http://127.0.0.1:9")
    assert "not all of it could be sent to 'somebody/lift-ppo'" in complaint("push", str(run), NAME)
    assert "there is no folder 'nowhere'" in complaint("push", "nowhere", NAME)
    assert "cannot be a repository" in complaint("collect", "--env", "lift", "--push", "nobody")  # before it records
    assert "cannot be a repository" in complaint("fleet", "export", "fleet", "--push", "nobody")
    assert "there is nothing to push" in complaint("robot", "run", "simulated", "--policy", "x", "--push", NAME)


def test_an_upload_that_was_interrupted_goes_on_where_it_was(hub: Hub, tmp_path: Path, complaint: Any) -> None:
    makers.write(tmp_path / "set", 3, video="never")
    sizes: list[int] = []

    def stop_in_the_second(size: int) -> None:
        sizes.append(size)
        if len(sizes) == 2:
            os.kill(os.getpid(), signal.SIGINT)
            time.sleep(1.0)  # so that whoever waits for the answer has heard of it before

    hub.interrupt = stop_in_the_second
    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # tests in the background begin without one
    try:
        said = complaint("push", str(tmp_path / "set"), "somebody/arm", status=130)
    finally:
        signal.signal(signal.SIGINT, before)
    assert "stopped before all was in 'somebody/arm'; the same command goes on" in said
    assert hub.head("datasets/somebody/arm").keys() == {".gitattributes"}
    main(["push", str(tmp_path / "set"), "somebody/arm"])
    large = [path for path in (tmp_path / "set").rglob("*") if path.suffix in (".parquet", ".mp4")]
    assert len(sizes) == len(large) == len(hub.large)  # none of them twice
    assert load_demonstrations("somebody/arm").count == 3


# -- everything that takes a name --------------------------------------------------------------------------------------


@pytest.mark.full
def test_imitation_reads_a_dataset_by_name_and_goes_on_with_the_same_one(hub: Hub, tmp_path: Path) -> None:
    """Two of three episodes and no more; what the run notes is the commit."""
    main(["collect", "--env", "lift", "--count", "4", "--out", "set", "--push", "somebody/lift"])
    given = ["--dataset", "somebody/lift", "--env", "lift", "--imitation.demonstrations", "2"]
    small = ["--imitation.fit.steps", "2", "--imitation.fit.batch", "4", "--cameras", "front"]
    main(["train", "imitate.py:from_dataset", *given, *small, "--out", "run"])
    noted = json.loads(Path("run/config.json").read_text(encoding="utf-8"))["dataset"]
    assert noted == f"somebody/lift@{hub.commit('datasets/somebody/lift', 'main')}"
    main(["push", "run", "somebody/imitated"])
    assert ModelCard(hub.head("somebody/imitated")["README.md"].decode()).data.datasets == ["somebody/lift"]
    assert same(load_policy(located("somebody/imitated")), load_policy("run"))
    assert to_json(load_policy(located("somebody/imitated")).spec) == to_json(load_policy("run").spec)
