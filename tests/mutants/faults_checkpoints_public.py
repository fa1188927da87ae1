"""Faults in opening folders that people downloaded, and in what is saved on top of them."""

from __future__ import annotations

from tests.mutants.fault import Fault

_FORMULAS, _STATISTICS = "vla_rl/policies/vla/normalization_formulas.py", "vla_rl/policies/vla/dataset_statistics.py"
_FILES, _WEIGHTS = "vla_rl/policies/vla/files.py", "vla_rl/policies/vla/weights.py"
_CHECKPOINT, _TOKENIZER = "vla_rl/policies/vla/checkpoint.py", "vla_rl/policies/vla/tokenizer.py"
_SAVING, _PUBLIC = "vla_rl/policies/vla/saving.py", "vla_rl/policies/vla/public.py"
_ON_WEIGHTS, _ON_CHECKPOINT = "tests/policies/vla/test_weights.py::", "tests/policies/vla/test_checkpoint.py::"
_ON_TOKENIZER, _ON_SAVING = "tests/policies/vla/test_tokenizer.py::", "tests/policies/vla/test_saving.py::"
_ON_PUBLIC, _ON_COMMANDS = "tests/policies/vla/test_public.py::", "tests/recipes/test_public_folders.py::"
_ON_STATISTICS = "tests/policies/vla/test_dataset_statistics.py::"
_LEROBOT = f"{_ON_STATISTICS}test_lerobot_processors_give_lerobots_numbers"

_STATISTICAL = (
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

_WEIGHTED = (
    Fault(
        "a model is built with its weights before they are read",
        _WEIGHTS,
        'return nn.Parameter(parameter.to("meta"), parameter.requires_grad)',
        "return parameter",
        (f"{_ON_WEIGHTS}test_a_module_without_weights_has_real_buffers_and_shares_what_it_shared",),
    ),
    Fault(
        "a shared parameter is filled under one of its names",
        _WEIGHTS,
        "names = shared.get(name, (name,))",
        "names = (name,)",
        (f"{_ON_WEIGHTS}test_one_file_and_shards_fill_a_module",),
    ),
    Fault(
        "tensors that have no place are dropped",
        _WEIGHTS,
        "extra.append(key)",
        "continue",
        (f"{_ON_WEIGHTS}test_missing_extra_and_misshapen_tensors_are_listed",),
    ),
    Fault(
        "tensors that are missing stay undefined",
        _WEIGHTS,
        "_require_complete(folder, sorted(wanted.keys() - filled - set(absent)), extra, misshapen)",
        "_require_complete(folder, [], extra, misshapen)",
        (
            f"{_ON_WEIGHTS}test_what_may_be_absent_keeps_what_it_holds",
            f"{_ON_PUBLIC}test_what_is_missing_is_one_sentence_with_its_key_and_cure",
        ),
    ),
    Fault(
        "a missing shard is found while loading",
        _WEIGHTS,
        "missing = [name for name in shards if not (folder / name).is_file()]",
        "missing = []",
        (f"{_ON_WEIGHTS}test_a_missing_or_damaged_shard_is_named",),
    ),
    Fault(
        "weights take the precision of the file",
        _WEIGHTS,
        "kept = dtype if dtype is not None and tensor.is_floating_point() else tensor.dtype",
        "kept = tensor.dtype",
        (f"{_ON_WEIGHTS}test_names_are_mapped_and_left_out_and_numbers_converted",),
    ),
)

_OPENED = (
    Fault(
        "a checkpoint of ours with a type is taken for a public one",
        _CHECKPOINT,
        'and "contract_version" not in saved and',
        "and",
        (f"{_ON_CHECKPOINT}test_ours_other_families_and_damaged_ones",),
    ),
    Fault(
        "cameras are matched by their order",
        _CHECKPOINT,
        "elif len(names) == len(spec.images) == 1:",
        "elif spec.images:",
        (f"{_ON_CHECKPOINT}test_cameras_that_do_not_match_are_said_with_both_lists_and_the_option",),
    ),
    Fault(
        "what the data called a camera is ignored",
        _CHECKPOINT,
        "same = next((item for item in (name, checkpoint.renamed.get(name)) if item in spec.images), None)",
        "same = name if name in spec.images else None",
        (f"{_ON_CHECKPOINT}test_its_preprocessor_renames_cameras_and_names_the_tokenizer",),
    ),
    Fault(
        "an unknown camera in --vla.cameras is ignored",
        _CHECKPOINT,
        "unknown = [name for name in chosen if name not in names]",
        "unknown = []",
        (f"{_ON_CHECKPOINT}test_cameras_that_do_not_match_are_said_with_both_lists_and_the_option",),
    ),
    Fault(
        "padding of a prompt counts",
        _TOKENIZER,
        "mask = torch.tensor([[True] * len(row) + [False] * (length - len(row)) for row in rows])",
        "mask = torch.tensor([[True] * length for row in rows])",
        (f"{_ON_TOKENIZER}test_prompts_are_padded_on_the_right_with_a_mask",),
    ),
    Fault(
        "a prompt starts twice",
        _TOKENIZER,
        "return tokens if tokens[:1] == [first] else [first, *tokens]",
        "return [first, *tokens]",
        (f"{_ON_TOKENIZER}test_every_prompt_starts_with_one_start_token",),
    ),
    Fault(
        "the end of a long instruction is cut",
        _TOKENIZER,
        "if len(found) > self.longest:",
        "if False:",
        (f"{_ON_TOKENIZER}test_an_instruction_of_too_many_tokens_is_refused",),
    ),
    Fault(
        "statistics that were named are not read",
        _PUBLIC,
        "place = Path(options.statistics) if options.statistics else folder",
        "place = folder",
        (f"{_ON_PUBLIC}test_options_choose_horizon_cameras_and_statistics",),
    ),
    Fault(
        "a run forgets how its folder was to be opened",
        "vla_rl/recipes/improve.py",
        "start_policy(name, self.env, self.seed, self.vla)",
        "start_policy(name, self.env, self.seed)",
        (f"{_ON_COMMANDS}test_a_command_trains_a_downloaded_folder",),
    ),
    Fault(
        "imitation forgets how its folder was to be opened",
        "vla_rl/recipes/imitate_dataset.py",
        "load_policy(self.policy, spec, self.vla)",
        "load_policy(self.policy, spec)",
        (f"{_ON_COMMANDS}test_a_dataset_is_imitated_without_an_environment",),
    ),
    Fault(
        "an evaluation forgets how a folder was to be opened",
        "vla_rl/recipes/deployed.py",
        "policy = placed(load_policy(name, spec, options), where)",
        "policy = placed(load_policy(name, spec), where)",
        (f"{_ON_COMMANDS}test_a_downloaded_folder_is_evaluated_as_it_is",),
    ),
)

_SAVED = (
    Fault(
        "a checkpoint on a base holds the whole model",
        _SAVING,
        "tensors = {name: item for name, item in tensors.items() if name in learnt}",
        "tensors = dict(tensors)",
        (
            f"{_ON_SAVING}test_a_checkpoint_holds_the_trained_tensors_only",
            f"{_ON_SAVING}test_the_bytes_of_a_save_are_those_of_what_was_learnt",
        ),
    ),
    Fault(
        "a changed base is loaded",
        _SAVING,
        "if fingerprint(folder) != self.fingerprint:",
        "if False:",
        (f"{_ON_SAVING}test_a_base_that_has_changed_is_refused",),
    ),
    Fault(
        "the fingerprint is that of the header",
        _SAVING,
        "file.seek(i * max(0, size - _SAMPLE) // (_SAMPLES - 1))",
        "file.seek(0)",
        (f"{_ON_SAVING}test_the_fingerprint_sees_a_change_at_the_end",),
    ),
    Fault(
        "learnt tensors may be absent from a checkpoint",
        _SAVING,
        "absent = () if base is None else everything - set(learnt)",
        "absent = () if base is None else everything",
        (f"{_ON_SAVING}test_a_checkpoint_that_lacks_a_learnt_tensor_or_has_another_is_refused",),
    ),
)

_FOLLOWED = (
    Fault(
        "relative actions are executed as absolute ones",
        _CHECKPOINT,
        '"use_relative_actions": (False,),',
        '"use_relative_actions": _ANY,',
        (f"{_ON_CHECKPOINT}test_a_field_that_changes_actions_and_is_not_followed_is_refused_by_name",),
    ),
    Fault(
        "fields that nobody knows are passed over",
        _CHECKPOINT,
        "allowed = known.get(name, (None,))",
        "allowed = known.get(name, _ANY)",
        (f"{_ON_CHECKPOINT}test_a_field_that_changes_actions_and_is_not_followed_is_refused_by_name",),
    ),
    Fault(
        "an image processor of transformers is passed over",
        _CHECKPOINT,
        "saved = read_json(folder / file) if (folder / file).is_file() else {}",
        "saved = {}",
        (f"{_ON_CHECKPOINT}test_an_image_processor_that_is_not_followed_is_refused_by_name",),
    ),
    Fault(
        "a network of transformers that computes otherwise is built all the same",
        "vla_rl/policies/pi0/public.py",
        "if getattr(given, name, value) != value:",
        "if False:",
        (
            "tests/policies/pi0/test_policy.py::test_a_network_of_transformers_that_computes_otherwise_is_refused_by_name",
        ),
    ),
    Fault(
        "processor steps that nobody knows are passed over",
        _CHECKPOINT,
        "if name not in known or name in found:",
        "if name in found:",
        (f"{_ON_CHECKPOINT}test_a_processor_step_that_is_not_followed_is_refused_by_name",),
    ),
    Fault(
        "every prompt ends with a newline",
        _CHECKPOINT,
        "newline=not before or any(name in before for name in _NEW_LINES),",
        "newline=True,",
        (f"{_ON_CHECKPOINT}test_lerobot_s_processors_say_how_long_prompts_are_and_how_they_end",),
    ),
    Fault(
        "a folder's number of flow steps is not read",
        _PUBLIC,
        "if checkpoint.steps and sampler == VLAOptions().sampler:",
        "if not checkpoint.steps and sampler == VLAOptions().sampler:",
        ("tests/policies/smolvla/test_policy.py::test_chains_have_the_folder_s_steps_unless_a_sampler_is_chosen",),
    ),
)

FAULTS: tuple[Fault, ...] = (*_FOLLOWED, *_STATISTICAL, *_WEIGHTED, *_OPENED, *_SAVED)
