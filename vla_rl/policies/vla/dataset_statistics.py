"""Normalization statistics from the files in which public checkpoints and datasets hold them.

Formats: LeRobot's processors (``policy_preprocessor.json`` with its safetensors), its older buffers inside
``model.safetensors``, and a dataset's ``meta/stats.json`` or, of v2.1, ``meta/episodes_stats.jsonl``; openpi's
``norm_stats.json``; OpenVLA's ``norm_stats`` in ``config.json`` or ``dataset_statistics.json``; transformers'
``processor_config.json`` of a ``PI0Processor``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from vla_rl.contract import hub
from vla_rl.contract.errors import UserError
from vla_rl.policies.vla import normalization_formulas as formulas
from vla_rl.policies.vla.normalization_formulas import Formula, Modes, Numbers, Statistics, identity
from vla_rl.policies.vla.weights import damaged, open_tensors, read_json, read_json_lines

STATE, ACTION = "observation.state", "action"  # LeRobot's names
_PREPROCESSOR, _POSTPROCESSOR = "policy_preprocessor.json", "policy_postprocessor.json"
_OLD_STATE = ("normalize_inputs.{}buffer_observation_state.",)
_OLD_ACTION = ("unnormalize_outputs.{}buffer_action.", "normalize_targets.{}buffer_action.")


def read_statistics(place: Path, modes: Modes, key: str = "") -> Statistics:
    """The statistics in ``place``, a folder of any of the formats above or an openpi ``norm_stats.json``.

    ``place`` may also be the name of a dataset on the Hugging Face hub.

    ``modes`` are used where the files do not name their own.  ``key`` chooses among several datasets or robots:
    OpenVLA's ``unnorm_key``, openpi's asset.  Raises UserError when there are none, or several and no ``key``.
    """
    if place.is_file():
        return _openpi_file(place, modes)
    if found := hub.repository(str(place), "dataset"):
        place = found.download((hub.DATASET_META,))
    for reader in _READERS:
        statistics = reader(place, modes, key)
        if statistics is not None:
            return statistics
    raise UserError(
        f"{str(place)!r} holds no normalization statistics ({_PREPROCESSOR}, norm_stats.json, dataset_statistics.json "
        "or meta/stats.json), so states and actions would be misread; name the dataset or folder that has them with "
        "--vla.statistics FOLDER."
    )


def _lerobot_processors(place: Path, modes: Modes, key: str) -> Statistics | None:
    """State by the preprocessor's normalizer, action by the postprocessor's unnormalizer: what acts."""
    if not (place / _PREPROCESSOR).is_file():
        return None
    state = _step_affine(place, _PREPROCESSOR, "normalizer_processor", STATE, key)
    action = _step_affine(place, _POSTPROCESSOR, "unnormalizer_processor", ACTION, key)
    return Statistics(state, action, str(place / _PREPROCESSOR))


def _step_affine(place: Path, file: str, kind: str, feature: str, key: str) -> formulas.Affine:
    """What the step ``kind`` of the pipeline in ``file`` does with ``feature``."""
    step = _pipeline_step(place / file, kind)
    config = step.get("config", {})
    declared = config.get("features", {}).get(feature)
    if declared is None:
        raise UserError(
            f"the step {kind!r} of {str(place / file)!r} has no feature {feature!r}, so it cannot be normalized; "
            "name statistics that have it with --vla.statistics FOLDER."
        )
    mode = config.get("norm_map", {}).get(declared["type"], "IDENTITY")
    chosen = config.get("normalize_observation_keys")
    if mode == "IDENTITY" or (feature != ACTION and chosen is not None and feature not in chosen):
        return identity(declared["shape"][-1])
    numbers = _step_numbers(place, step, feature, key)
    eps = config.get("eps", formulas.LEROBOT.added)
    return Formula(added=eps, empty_range=eps).affine(numbers, mode, f"{feature!r} in {place}")


def _pipeline_step(path: Path, kind: str) -> dict[str, Any]:
    """The step with registry name ``kind`` of LeRobot's pipeline in ``path``; raises UserError when it has none."""
    for step in read_json(path).get("steps", []):
        if step.get("registry_name") == kind:
            return dict(step)
    raise UserError(f"{str(path)!r} has no step {kind!r}, so the folder is not what its type says; download it again.")


def _step_numbers(place: Path, step: Mapping[str, Any], feature: str, key: str) -> Numbers:
    """Statistics of ``feature``: tensors ``FEATURE.STATISTIC``, or ``KEY.buffer.FEATURE.STATISTIC`` of several robots.

    The second are in ``smolvla_base``, which LeRobot converted from buffers of several robots.
    """
    if "state_file" not in step:
        raise _no_numbers(place, feature, ())
    prefix = f"{key}.buffer.{feature}." if key else f"{feature}."
    path = place / step["state_file"]
    with open_tensors(path) as tensors:
        names = list(tensors.keys())
        numbers = {
            name.removeprefix(prefix): tensors.get_tensor(name).flatten().tolist()
            for name in names
            if name.startswith(prefix)
        }
    if not numbers:
        raise _no_numbers(path, feature, (name.partition(".buffer.")[0] for name in names if ".buffer." in name))
    return numbers


def _no_numbers(place: Path, feature: str, keys: Iterable[str]) -> UserError:
    robots = ", ".join(sorted(set(keys)))
    which = f"; it has some of {robots}: choose with --vla.statistics-key, or" if robots else ";"
    return UserError(
        f"{str(place)!r} has no normalization statistics of {feature!r}, so it would be misread{which} name the "
        "dataset that has them with --vla.statistics FOLDER."
    )


def _openpi(place: Path, modes: Modes, key: str) -> Statistics | None:
    direct = place / "norm_stats.json"
    if direct.is_file():
        return _openpi_file(direct, modes)
    assets = place / "assets"
    files = {path.parent.relative_to(assets).as_posix(): path for path in sorted(assets.glob("**/norm_stats.json"))}
    return _openpi_file(files[_choose(files, key, assets)], modes) if files else None


def _openpi_file(path: Path, modes: Modes) -> Statistics:
    entries = _entry(read_json(path), "norm_stats", path)
    state, action = (
        {name: item for name, item in _entry(entries, part, path).items() if item is not None}
        for part in ("state", "actions")
    )
    return _statistics(state, action, formulas.OPENPI, modes, path)


def _openvla(place: Path, modes: Modes, key: str) -> Statistics | None:
    path = place / "dataset_statistics.json"
    if path.is_file():
        datasets = read_json(path)
    else:
        path = place / "config.json"
        datasets = read_json(path).get("norm_stats") or {} if path.is_file() else {}
    if not datasets:
        return None
    chosen = datasets[_choose(datasets, key, path)]
    proprio = chosen.get("proprio")
    return _statistics(proprio, _entry(chosen, "action", path), formulas.OPENVLA, modes, path)


def _pi0_processor(place: Path, modes: Modes, key: str) -> Statistics | None:
    path = place / "processor_config.json"
    saved = read_json(path) if path.is_file() else {}
    if saved.get("actions_mean") is None:
        return None
    state, action = (
        {name: _entry(saved, f"{part}_{name}", path) for name in ("mean", "std")} for part in ("state", "actions")
    )
    return _statistics(state, action, formulas.PI0_PROCESSOR, Modes(), path)


def _dataset(place: Path, modes: Modes, key: str) -> Statistics | None:
    whole, parts = place / "meta" / "stats.json", place / "meta" / "episodes_stats.jsonl"
    path = whole if whole.is_file() else parts
    if not path.is_file():
        return None
    saved = read_json(path) if path == whole else _joined(path)
    return _statistics(saved.get(STATE), _entry(saved, ACTION, path), formulas.LEROBOT, modes, path)


def _joined(path: Path) -> dict[str, Numbers]:
    """Statistics of all control steps from those of each episode (v2.1): episodes count by their lengths.

    The variance is that within episodes and that of their means, as in LeRobot's ``aggregate_stats``.  Quantiles do not
    follow from those of episodes, so there are none.
    """
    found: dict[str, list[Any]] = {}
    for line in read_json_lines(path):
        episode = _entry(line, "stats", path)
        for feature in found or {STATE, ACTION} & set(episode):
            found.setdefault(feature, []).append(_entry(episode, feature, path))
    return {feature: _of_all(items, path) for feature, items in found.items()}


def _of_all(episodes: list[Any], path: Path) -> Numbers:
    """The statistics of one feature."""
    names = "mean", "std", "min", "max", "count"
    try:
        mean, std, low, high, count = (
            np.array([_entry(item, name, path) for item in episodes], dtype=np.float64) for name in names
        )
    except (TypeError, ValueError) as error:
        raise damaged(path, error) from error
    weight = count / count.sum()
    middle = (weight * mean).sum(0)
    spread = np.sqrt((weight * (std**2 + (mean - middle) ** 2)).sum(0))
    joined = {"mean": middle, "std": spread, "min": low.min(0), "max": high.max(0)}
    return {name: item.tolist() for name, item in joined.items()}


def _lerobot_buffers(place: Path, modes: Modes, key: str) -> Statistics | None:
    """LeRobot before its processors: buffers among the weights."""
    path = place / "model.safetensors"
    if not path.is_file():
        return None
    robot = f"{key}_" if key else ""
    with open_tensors(path) as tensors:
        found = {
            part: {
                name.rpartition(".")[2]: tensors.get_tensor(name).flatten().tolist()
                for name in tensors.keys()  # noqa: SIM118  # a file, no dict
                if name.startswith(tuple(item.format(robot) for item in prefixes))
            }
            for part, prefixes in ((STATE, _OLD_STATE), (ACTION, _OLD_ACTION))
        }
    if not found[ACTION]:
        return None
    return _statistics(found[STATE] or None, found[ACTION], formulas.LEROBOT_BUFFERS, modes, path)


_Reader = Callable[[Path, Modes, str], Statistics | None]
_READERS: tuple[_Reader, ...] = (_lerobot_processors, _openpi, _openvla, _pi0_processor, _dataset, _lerobot_buffers)


def _statistics(state: Numbers | None, action: Numbers, formula: Formula, modes: Modes, path: Path) -> Statistics:
    return Statistics(
        None if state is None else formula.affine(state, modes.state, f"the state in {str(path)!r}"),
        formula.affine(action, modes.action, f"the action in {str(path)!r}"),
        str(path),
    )


def _entry(saved: Mapping[str, Any], name: str, path: Path) -> Any:
    if name not in saved:
        raise UserError(
            f"{str(path)!r} has no entry {name!r} (it has {', '.join(saved)}), so it holds no statistics that can be "
            "used; name others with --vla.statistics FOLDER."
        )
    return saved[name]


def _choose(datasets: Mapping[str, object], key: str, path: Path) -> str:
    """``key``, or the only one; raises UserError when it is unknown or when there are several."""
    if key in datasets or (not key and len(datasets) == 1):
        return key or next(iter(datasets))
    names = ", ".join(list(datasets)[:10]) + (f" and {len(datasets) - 10} more" if len(datasets) > 10 else "")
    problem = f"none of {key!r}" if key else f"those of {len(datasets)} datasets"
    raise UserError(
        f"{str(path)!r} holds statistics of {names}, {problem}, so actions would be scaled wrongly; choose one with "
        "--vla.statistics-key NAME."
    )
