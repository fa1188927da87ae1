"""Faults in opening folders that people downloaded: statistics."""

from __future__ import annotations

from tests.mutants.fault import Fault

_FORMULAS, _STATISTICS = "vla_rl/policies/vla/normalization_formulas.py", "vla_rl/policies/vla/dataset_statistics.py"
_FILES = "vla_rl/policies/vla/files.py"
_ON_STATISTICS = "tests/policies/vla/test_dataset_statistics.py::"
_LEROBOT = f"{_ON_STATISTICS}test_lerobot_processors_give_lerobots_numbers"

FAULTS: tuple[Fault, ...] = (
    Fault(
        "quantiles are read as minimum and maximum",
        _FORMULAS,
        '"QUANTILES": ("q01", "q99")',
        '"QUANTILES": ("min", "max")',
        (_LEROBOT, f"{_ON_STATISTICS}test_openpi_by_mean_and_by_quantiles"),
    ),
    Fault(
        "a range is mapped to [-2, 0]",
        _FORMULAS,
        "offset = [a + half for a, half in zip(low, scale, strict=True)]",
        "offset = [b for b in high]",
        (_LEROBOT,),
    ),
    Fault(
        "masked entries are normalized",
        _FORMULAS,
        'mask = numbers.get("mask", [True] * len(offset))',
        "mask = [True] * len(offset)",
        (f"{_ON_STATISTICS}test_openvla_leaves_masked_entries_alone",),
    ),
    Fault(
        "openpi has the epsilon of LeRobot",
        _FORMULAS,
        "OPENPI = Formula(added=1e-6, added_range=1e-6)",
        "OPENPI = Formula(added=1e-8, added_range=1e-8)",
        (f"{_ON_STATISTICS}test_a_constant_entry_has_openpis_epsilon",),
    ),
    Fault(
        "what never changed becomes 0 in float32",
        _FORMULAS,
        "return half if high != low else max(half, abs(low) * 2.0**-15)",
        "return half",
        (_LEROBOT,),
    ),
    Fault(
        "longer statistics are cut although the rest is no padding",
        _FORMULAS,
        "if len(affine.offset) < size or any(abs(offset) > _PADDING or scale > _PADDING for offset, scale in rest):",
        "if len(affine.offset) < size:",
        (f"{_ON_STATISTICS}test_padded_statistics_are_cut_and_others_refused",),
    ),
    Fault(
        "statistics that were never filled in are used",
        _FORMULAS,
        "if not all(map(math.isfinite, (*offset, *scale))):",
        "if False:",
        (f"{_ON_STATISTICS}test_statistics_that_were_never_filled_in_are_refused",),
    ),
    Fault(
        "the state is normalized by the action's mode",
        _STATISTICS,
        'mode = config.get("norm_map", {}).get(declared["type"], "IDENTITY")',
        'mode = config.get("norm_map", {}).get("ACTION", "MIN_MAX") if feature == ACTION else "IDENTITY"',
        (_LEROBOT,),
    ),
    Fault(
        "the first of several robots is taken",
        _STATISTICS,
        "if key in datasets or (not key and len(datasets) == 1):",
        "if key in datasets or not key:",
        (
            f"{_ON_STATISTICS}test_openpi_assets_of_several_robots_are_chosen_by_name",
            f"{_ON_STATISTICS}test_openvla_s_dataset_file_goes_before_its_config_and_needs_a_key_among_several",
        ),
    ),
    Fault(
        "statistics that are not there are taken for none needed",
        _STATISTICS,
        'raise _no_numbers(path, feature, (name.partition(".buffer.")[0] for name in names if ".buffer." in name))',
        'numbers = {"mean": [0.0] * 3, "std": [1.0] * 3}',
        (f"{_ON_STATISTICS}test_smolvla_base_s_statistics_of_several_robots_need_a_key",),
    ),
    Fault(
        "OpenVLA's config goes before its dataset's file",
        _STATISTICS,
        'path = place / "dataset_statistics.json"',
        'path = place / "statistics.json"',
        (f"{_ON_STATISTICS}test_openvla_s_dataset_file_goes_before_its_config_and_needs_a_key_among_several",),
    ),
    Fault(
        "a Git LFS pointer is called damaged",
        _FILES,
        "pointer = file.read(len(_POINTER)) == _POINTER",
        "pointer = file.read(0) == _POINTER",
        (f"{_ON_STATISTICS}test_damaged_files_and_git_lfs_pointers",),
    ),
)
