"""Statistics of public folders give the numbers of the library that wrote them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.policies.vla.public_folders import GOLDEN, copy_golden, write
from vla_rl.contract.errors import UserError
from vla_rl.policies.vla.dataset_statistics import read_statistics
from vla_rl.policies.vla.normalization_formulas import Modes

MODES = ("mean_std", "min_max", "quantiles", "quantile10", "identity")
QUANTILES = Modes("QUANTILES", "QUANTILES")
MEAN, STD, Q01, Q99 = [0.5, -2.0], [0.25, 3.0], [0.1, -6.0], [0.9, 4.0]


def close(found: torch.Tensor, wanted: Any, tolerance: float = 2e-6) -> None:
    torch.testing.assert_close(found, torch.as_tensor(wanted, dtype=torch.float32), rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("mode", MODES)
def test_lerobot_processors_give_lerobots_numbers(mode: str) -> None:
    found = read_statistics(GOLDEN / mode, Modes())
    wanted = json.loads((GOLDEN / mode / "expected.json").read_text(encoding="utf-8"))
    assert found.state is not None
    states, made = found.state.normalize(torch.tensor(wanted["states"])), torch.tensor(wanted["normalized_states"])
    close(states[:, :2], made[:, :2])
    close(states[:, 2], made[:, 2], 2e-3)  # it never changed
    close(found.action.normalize(torch.tensor(wanted["actions"])), wanted["normalized_actions"])
    close(found.action.unnormalize(torch.tensor(wanted["outputs"])), wanted["unnormalized_outputs"])


@pytest.mark.parametrize("mode", MODES[:2])
def test_lerobots_older_buffers_inside_the_weights(mode: str, tmp_path: Path) -> None:
    """The same statistics as buffers; before its processors LeRobot added 1e-8 to ranges too."""
    processed = load_file(GOLDEN / mode / "policy_preprocessor_step_2_normalizer_processor.safetensors")
    buffers = {"model.weight": torch.ones(2)}
    for name, tensor in processed.items():
        feature, _, statistic = name.rpartition(".")
        for part in ("normalize_inputs", "normalize_targets", "unnormalize_outputs"):
            if (part == "normalize_inputs") == (feature == "observation.state"):
                buffers[f"{part}.buffer_{feature.replace('.', '_')}.{statistic}"] = tensor.clone()
    save_file(buffers, tmp_path / "model.safetensors")
    found = read_statistics(tmp_path, Modes(mode.upper(), mode.upper()))
    wanted = json.loads((GOLDEN / mode / "expected.json").read_text(encoding="utf-8"))
    assert found.state is not None
    close(
        found.state.normalize(torch.tensor(wanted["states"]))[:, :2], torch.tensor(wanted["normalized_states"])[:, :2]
    )
    close(found.action.unnormalize(torch.tensor(wanted["outputs"])), wanted["unnormalized_outputs"])


def test_a_lerobot_dataset_s_statistics() -> None:
    dataset = Path(__file__).parents[2] / "golden" / "lerobot" / "dataset"
    saved = json.loads((dataset / "meta" / "stats.json").read_text(encoding="utf-8"))
    found = read_statistics(dataset, Modes("MEAN_STD", "MIN_MAX"))
    assert found.state is not None
    mean, std = (torch.tensor(saved["observation.state"][name], dtype=torch.float64) for name in ("mean", "std"))
    close(found.state.normalize(mean + std).float(), (std / (std + 1e-8)).float())
    close(
        found.action.unnormalize(torch.tensor([[-1.0, 1.0]])), [[saved["action"]["min"][0], saved["action"]["max"][1]]]
    )


def test_statistics_of_episodes_are_joined_to_those_of_all_steps(tmp_path: Path) -> None:
    random = np.random.default_rng(0)
    episodes = [random.normal(3.0 * i, 1.0 + i, (5 + 7 * i, 2)) for i in range(4)]

    def stats(numbers: Any) -> Any:
        found = {name: getattr(numbers, name)(0).tolist() for name in ("mean", "std", "min", "max")}
        return found | {"count": [len(numbers)]}

    lines = [{"episode_index": i, "stats": {"action": stats(item)}} for i, item in enumerate(episodes)]
    path, steps = tmp_path / "meta" / "episodes_stats.jsonl", torch.from_numpy(np.concatenate(episodes))
    path.parent.mkdir()
    path.write_text("\n".join(map(json.dumps, lines)), encoding="utf-8")
    found = read_statistics(tmp_path, Modes("MEAN_STD", "MEAN_STD")).action.normalize(steps)
    torch.testing.assert_close(found.mean(0), torch.zeros(2).double(), rtol=0, atol=1e-9)
    torch.testing.assert_close(found.std(0, correction=0), torch.ones(2).double(), rtol=0, atol=1e-6)
    bounds = read_statistics(tmp_path, Modes("MIN_MAX", "MIN_MAX"))
    assert bounds.state is None and bounds.action.normalize(steps).abs().amax(0).allclose(torch.ones(2).double())
    with pytest.raises(UserError, match=r"episodes_stats.jsonl.*q01"):
        read_statistics(tmp_path, Modes("QUANTILES", "QUANTILES"))
    del lines[2]["stats"]["action"]["count"]
    for text in ("\n".join(map(json.dumps, lines)), '{"stats": {"action": {"mean": ', "[]", "", '{"stats": {}}'):
        path.write_text(text, encoding="utf-8")
        with pytest.raises(UserError, match=r"episodes_stats\.jsonl"):
            read_statistics(tmp_path, Modes("MEAN_STD", "MEAN_STD"))
    for odd in ([["x", 1.0]], [[1.0], [2.0, 3.0]]):
        text = [{"stats": {"action": stats(episodes[0]) | {"mean": mean}}} for mean in odd]
        path.write_text("\n".join(map(json.dumps, text)), encoding="utf-8")
        with pytest.raises(UserError, match=r"episodes_stats\.jsonl' is damaged"):
            read_statistics(tmp_path, Modes("MEAN_STD", "MEAN_STD"))


def openpi_file(path: Path) -> Path:
    part = {"mean": MEAN, "std": STD, "q01": Q01, "q99": Q99}
    write(path, {"norm_stats": {"state": part, "actions": part}})
    return path


def test_openpi_by_mean_and_by_quantiles(tmp_path: Path) -> None:
    x, output = np.array([[0.2, 1.5]]), np.array([[0.5, -0.75]])
    file = openpi_file(tmp_path / "norm_stats.json")
    standard, quantiles = read_statistics(tmp_path, Modes()), read_statistics(file, QUANTILES)
    assert standard.state is not None and quantiles.state is not None
    mean, std, q01, q99 = map(np.array, (MEAN, STD, Q01, Q99))
    close(standard.state.normalize(torch.tensor(x).float()), (x - mean) / (std + 1e-6))
    close(standard.action.unnormalize(torch.tensor(output).float()), output * (std + 1e-6) + mean)
    close(quantiles.state.normalize(torch.tensor(x).float()), (x - q01) / (q99 - q01 + 1e-6) * 2 - 1)
    close(quantiles.action.unnormalize(torch.tensor(output).float()), (output + 1) / 2 * (q99 - q01 + 1e-6) + q01)


def test_a_constant_entry_has_openpis_epsilon(tmp_path: Path) -> None:
    """float64, where the two epsilons differ visibly: LeRobot would give 100 times as much."""
    part = {"mean": [1.0], "std": [0.0], "q01": [1.0], "q99": [1.0]}
    write(tmp_path / "norm_stats.json", {"norm_stats": {"state": part, "actions": part}})
    moved = torch.tensor([[1.0 + 1e-6]], dtype=torch.float64)
    found, quantiles = read_statistics(tmp_path, Modes()).state, read_statistics(tmp_path, QUANTILES).state
    assert found is not None and quantiles is not None
    torch.testing.assert_close(found.normalize(moved).item(), 1.0, rtol=1e-6, atol=0)
    close(quantiles.normalize(torch.ones(1, 1)), [[-1.0]], 2e-3)


def test_openpi_assets_of_several_robots_are_chosen_by_name(tmp_path: Path) -> None:
    openpi_file(tmp_path / "assets" / "lab" / "arm" / "norm_stats.json")
    assert read_statistics(tmp_path, Modes()).action.offset == tuple(MEAN)
    openpi_file(tmp_path / "assets" / "trossen" / "norm_stats.json")
    assert read_statistics(tmp_path, Modes(), "lab/arm").action.offset == tuple(MEAN)
    with pytest.raises(UserError, match=r"lab/arm, trossen.*--vla.statistics-key NAME"):
        read_statistics(tmp_path, Modes())
    with pytest.raises(UserError, match="none of 'other'"):
        read_statistics(tmp_path, Modes(), "other")


def openvla_dataset() -> dict[str, Any]:
    action = {"q01": [-0.5, 0.0], "q99": [0.7, 1.0], "min": [-1.0, 0.0], "max": [1.0, 1.0], "mask": [True, False]}
    return {"action": action, "proprio": {"q01": [0.0], "q99": [2.0], "min": [-1.0], "max": [3.0]}}


def test_openvla_leaves_masked_entries_alone(tmp_path: Path) -> None:
    write(tmp_path / "config.json", {"norm_stats": {"bridge_orig": openvla_dataset()}})
    found = read_statistics(tmp_path, QUANTILES)
    output = torch.tensor([[0.5, 0.25], [-1.0, -1.0]])
    close(found.action.unnormalize(output), [[0.5 * 1.5 * 1.2 - 0.5, 0.25], [-0.5, -1.0]])
    assert found.state is not None
    close(found.state.normalize(torch.tensor([[0.5]])), [[2 * 0.5 / 2.0 - 1]])
    bounds = read_statistics(tmp_path, Modes("MIN_MAX", "MIN_MAX"))
    close(bounds.action.unnormalize(output), [[0.5, 0.25], [-1.0, -1.0]])


def test_openvlas_dataset_file_goes_before_its_config(tmp_path: Path) -> None:
    write(tmp_path / "config.json", {"norm_stats": {"bridge_orig": openvla_dataset()}})
    own = {"action": {"q01": [0.0], "q99": [4.0]}}
    write(tmp_path / "dataset_statistics.json", {"libero": own, "libero_90": own})
    found = read_statistics(tmp_path, QUANTILES, "libero")
    assert found.state is None
    close(found.action.unnormalize(torch.tensor([[0.5]])), [[3.0]])
    with pytest.raises(UserError, match=r"libero, libero_90, those of 2 datasets.*--vla.statistics-key"):
        read_statistics(tmp_path, QUANTILES)


def test_transformers_pi0_processor(tmp_path: Path) -> None:
    saved = {"state_mean": MEAN, "state_std": STD, "actions_mean": Q01, "actions_std": [0.0, 1.0], "max_state_dim": 32}
    write(tmp_path / "processor_config.json", saved)
    found = read_statistics(tmp_path, QUANTILES)  # the processor knows no other formula than its own
    assert found.state is not None
    x = torch.tensor([[0.2, 1.5]])
    close(found.state.normalize(x), (x - torch.tensor(MEAN)) / (torch.tensor(STD) + 1e-8))
    moved = torch.tensor([[0.1 + 1e-8, -6.0]], dtype=torch.float64)
    torch.testing.assert_close(found.action.normalize(moved)[0, 0].item(), 1.0, rtol=1e-6, atol=0)


def test_padded_statistics_are_cut_and_others_refused(tmp_path: Path) -> None:
    padded = {"mean": [*MEAN, 0.0, 0.0], "std": [*STD, 0.0, 0.0]}
    write(tmp_path / "norm_stats.json", {"norm_stats": {"state": padded, "actions": padded}})
    found = read_statistics(tmp_path, Modes())
    cut = found.cut(2, 2)
    assert cut.state is not None
    assert (cut.state.offset, cut.action.offset) == (tuple(MEAN), tuple(MEAN))
    for sizes in ((1, 2), (2, 1), (5, 2), (2, 5)):
        with pytest.raises(UserError, match=r"statistics of 4 (state|action) entries.*--vla.statistics FOLDER"):
            found.cut(*sizes)


def test_smolvla_base_s_statistics_of_several_robots_need_a_key(tmp_path: Path) -> None:
    """LeRobot itself finds none in that folder and normalizes nothing."""
    copy_golden("mean_std", tmp_path)
    for path in tmp_path.glob("*.safetensors"):
        old = load_file(path)
        both = {
            f"{robot}.buffer.{name}": tensor.clone() for robot in ("so100", "so100-red") for name, tensor in old.items()
        }
        save_file(both, path)
    with pytest.raises(UserError, match=r"so100, so100-red: choose with --vla.statistics-key"):
        read_statistics(tmp_path, Modes())
    found, wanted = read_statistics(tmp_path, Modes(), "so100-red"), read_statistics(GOLDEN / "mean_std", Modes())
    assert (found.state, found.action) == (wanted.state, wanted.action)


def test_what_is_missing_is_said_with_its_cure(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"holds no normalization statistics.*--vla.statistics FOLDER"):
        read_statistics(tmp_path, Modes())
    copy_golden("mean_std", tmp_path)
    preprocessor = json.loads((tmp_path / "policy_preprocessor.json").read_text(encoding="utf-8"))
    state_file = preprocessor["steps"][2].pop("state_file")
    (tmp_path / state_file).unlink()
    with pytest.raises(UserError, match=f"has no {state_file}.*download that file"):
        read_statistics(tmp_path, Modes())
    write(tmp_path / "policy_preprocessor.json", preprocessor)
    with pytest.raises(UserError, match=r"no normalization statistics of 'observation.state'.*--vla.statistics FOLDER"):
        read_statistics(tmp_path, Modes())
    (tmp_path / "policy_preprocessor.json").unlink()
    openpi_file(tmp_path / "norm_stats.json")
    with pytest.raises(
        UserError, match=r"no statistic 'min', which the mode MIN_MAX needs \(it has mean, std, q01, q99"
    ):
        read_statistics(tmp_path, Modes("MIN_MAX", "MIN_MAX"))
    with pytest.raises(UserError, match="normalized by 'LOG', which vla-rl does not know"):
        read_statistics(tmp_path, Modes("LOG", "LOG"))


def test_statistics_that_were_never_filled_in_are_refused(tmp_path: Path) -> None:
    inf = torch.full((2,), torch.inf)
    save_file(
        {f"unnormalize_outputs.buffer_action.{name}": inf.clone() for name in ("mean", "std")},
        tmp_path / "model.safetensors",
    )
    with pytest.raises(UserError, match="not finite"):
        read_statistics(tmp_path, Modes())


def test_damaged_files_and_git_lfs_pointers(tmp_path: Path) -> None:
    copy_golden("mean_std", tmp_path)
    state_file = next(tmp_path.glob("policy_preprocessor_*.safetensors"))
    state_file.write_bytes(state_file.read_bytes()[:50])
    with pytest.raises(UserError, match=f"{state_file.name}' is damaged"):
        read_statistics(tmp_path, Modes())
    state_file.write_bytes(b"version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 1296\n")
    with pytest.raises(UserError, match=r"Git LFS pointer.*git lfs pull"):
        read_statistics(tmp_path, Modes())
    (tmp_path / "policy_preprocessor.json").write_text("{", encoding="utf-8")
    with pytest.raises(UserError, match=r"policy_preprocessor.json' is damaged"):
        read_statistics(tmp_path, Modes())
