"""Faults in pi0."""

from __future__ import annotations

import importlib.util

from tests.mutants.fault import Fault

_NETWORK, _LETTERBOX = "vla_rl/policies/pi0/network.py", "vla_rl/policies/vla/letterbox.py"
_ON = "tests/policies/pi0/test_network.py::"
_GOLDEN = f"{_ON}test_samples_velocities_and_losses_are_the_golden_ones"
_ALONE = f"{_ON}test_a_row_does_not_depend_on_the_other_rows"
_AGAIN = f"{_ON}test_activations_are_computed_again_where_that_is_asked_for"
_POOLED = f"{_ON}test_pooled_is_the_mean_of_the_valid_tokens_last_hidden_states"
_NAMES = f"{_ON}test_names_and_shapes_are_transformers_own_but_for_a_table_that_nothing_reads"
_ROUNDED = f"{_ON}test_a_frozen_model_in_bfloat16_leaves_the_expert_exact"
_BYTES = f"{_ON}test_the_prefix_has_the_bytes_that_it_says"
_GRADIENT = f"{_ON}test_computing_activations_again_changes_no_number"

_POINTS = f"{_ON}test_points_of_a_chain_share_their_observations_keys_and_do_not_see_each_other"

_IN_THE_NETWORK = (
    Fault(
        "points of pi0's chain see each other",
        _NETWORK,
        "(point == point[:, None]) & ",
        "(point >= 0) & ",
        (_POINTS,),
    ),
    Fault(
        "points of pi0's chain take turns over the observations",
        _NETWORK,
        "unflatten(0, (-1, points)).flatten(1, 2)",
        "unflatten(0, (points, -1)).transpose(0, 1).flatten(1, 2)",
        (_POINTS,),
    ),
    Fault(
        "time runs the other way in pi0",
        _NETWORK,
        "* t.to(dtype)[:, None]",
        "* (1.0 - t.to(dtype))[:, None]",
        (_GOLDEN,),
    ),
    Fault(
        "pi0 sees the padding of its prompt while it encodes",
        _NETWORK,
        "mask = torch.cat([seen, token_mask], 1)",
        "mask = torch.cat([seen, torch.ones_like(token_mask)], 1)",
        (_GOLDEN, _ALONE),
    ),
    Fault(
        "pi0's actions see the padding of the prompt",
        _NETWORK,
        "prefix = mask[:, None, :].expand(-1, len(token), -1)",
        "prefix = torch.ones_like(mask)[:, None, :].expand(-1, len(token), -1)",
        (_GOLDEN, _ALONE),
    ),
    Fault(
        "positions of pi0's actions count the padding",
        _NETWORK,
        "mask.sum(1, keepdim=True) + token",
        "mask.shape[1] + torch.zeros_like(mask.sum(1, keepdim=True)) + token",
        (_GOLDEN, _ALONE),
    ),
    Fault(
        "positions of pi0's prefix start at 1, as PaliGemma's do",
        _NETWORK,
        "mask.long().cumsum(1) - 1)",
        "mask.long().cumsum(1))",
        (_GOLDEN,),
    ),
    Fault(
        "pi0's state sees the actions",
        _NETWORK,
        "((token == 0) | (token[:, None] > 0))",
        "(token >= 0)",
        (_GOLDEN,),
    ),
    Fault(
        "pi0's actions are causal",
        _NETWORK,
        "((token == 0) | (token[:, None] > 0))",
        "(token <= token[:, None])",
        (_GOLDEN,),
    ),
    Fault(
        "pi0's actions do not see the state",
        _NETWORK,
        "((token == 0) | (token[:, None] > 0))",
        "((token == 0) == (token[:, None] == 0))",
        (_GOLDEN,),
    ),
    Fault(
        "pi0 forgets its prefix while activations are computed again, as transformers does",
        _NETWORK,
        "if past is not None:",
        "if past is not None and not torch.is_grad_enabled():",
        (_GRADIENT, _ROUNDED),
    ),
    Fault(
        "a denoising step overwrites pi0's prefix",
        _NETWORK,
        'past = condition["keys"][:, i], condition["values"][:, i]',
        'past = condition["keys"][:, i].mul_(0.5), condition["values"][:, i]',
        (f"{_ON}test_a_step_leaves_the_condition_as_it_is",),
    ),
    Fault(
        "every layer of pi0's expert reads the first layer's keys",
        _NETWORK,
        'condition["keys"][:, i]',
        'condition["keys"][:, 0]',
        (_GOLDEN,),
    ),
    Fault(
        "critics of pi0 read a sum instead of a mean",
        _NETWORK,
        "(hidden * mask[..., None]).sum(1) / mask.sum(1, keepdim=True)",
        "(hidden * mask[..., None]).sum(1)",
        (_POOLED,),
    ),
    Fault(
        "critics of pi0 read the padding",
        _NETWORK,
        "(hidden * mask[..., None]).sum(1) / mask.sum(1, keepdim=True)",
        "hidden.mean(1)",
        (_POOLED, _ALONE),
    ),
    Fault(
        "critics of pi0 read hidden states before the last norm",
        _NETWORK,
        "hidden = _exact(_normed(language.norm, hidden))",
        "hidden = _exact(hidden)",
        (_POOLED,),
    ),
    Fault(
        "pi0 adds the state's token to the actions'",
        _NETWORK,
        ".flatten(0, 1)[:, -self.chunk :]",
        ".flatten(0, 1)[:, : self.chunk]",
        (_GOLDEN,),
    ),
    Fault(
        "pi0's trained expert computes in the frozen model's bfloat16",
        _NETWORK,
        "hidden = suffix.to(_dtype(expert))",
        "hidden = suffix.to(_dtype(self.model.vlm)).to(_dtype(expert))",
        (_ROUNDED,),
    ),
    Fault(
        "pi0's activations are kept although they should be computed again",
        _NETWORK,
        "if not (self.gradient_checkpointing and torch.is_grad_enabled()):",
        "if True:",
        (_AGAIN,),
    ),
    Fault(
        "pi0 keeps the expert's table of words",
        _NETWORK,
        "self.model.dit.embed_tokens = None",
        "pass",
        (_NAMES,),
    ),
    Fault(
        "the bytes of pi0's prefix leave the values out",
        _NETWORK,
        "pair = 2 * language.num_hidden_layers",
        "pair = language.num_hidden_layers",
        (_BYTES,),
    ),
)

_POLICY, _PUBLIC, _ON_POLICY = (
    "vla_rl/policies/pi0/policy.py",
    "vla_rl/policies/pi0/public.py",
    "tests/policies/pi0/test_policy.py::",
)
_LEROBOT = f"{_ON_POLICY}test_a_folder_of_lerobot_acts_as_its_policy"
_THEIRS = f"{_ON_POLICY}test_a_folder_of_transformers_acts_as_its_model"
_REFUSED = f"{_ON_POLICY}test_what_does_not_fit_is_one_sentence"

_IN_FOLDERS = (
    Fault(
        "the choice of gradient checkpointing is not passed on",
        "vla_rl/policies/vla/trainable.py",
        "network.gradient_checkpointing = wanted",
        "network.gradient_checkpointing = False",
        (f"{_ON_POLICY}test_gradient_checkpointing_changes_no_number",),
    ),
    Fault(
        "gradient checkpointing is asked of a network that has none, in silence",
        "vla_rl/policies/vla/trainable.py",
        "    elif wanted:",
        "    elif wanted is None:",
        (f"{_ON_POLICY}test_a_network_that_cannot_compute_activations_again_says_so",),
    ),
    Fault(
        "LeRobot's waves of the time are rounded as transformers' are",
        _NETWORK,
        'time_dtype: str = "float64"',
        'time_dtype: str = "float32"',
        (_LEROBOT,),
    ),
    Fault(
        "pictures for transformers' pi0 are fitted as LeRobot does",
        _PUBLIC,
        "        pictures=TransformersLetterbox(),",
        "        pictures=Letterbox(),",
        (_THEIRS,),
    ),
    Fault(
        "pictures for LeRobot's pi0 have the bars of its first versions",
        _PUBLIC,
        "        pictures=Letterbox(),",
        "        pictures=Letterbox(bar=-3.0),",
        (_LEROBOT,),
    ),
    Fault(
        "the language model's words are those of the expert",
        "vla_rl/policies/pi0/names.py",
        r"_expert\.paligemma\.lm_head\.",
        r"_expert\.gemma_expert\.lm_head\.",
        (_LEROBOT,),
    ),
    Fault(
        "a pi0 of an old LeRobot is opened",
        _PUBLIC,
        'if "paligemma_variant" not in config:',
        "if False:",
        (_REFUSED,),
    ),
    Fault(
        "pi0's prompt has no <bos>",
        _POLICY,
        'start="<bos>",',
        'start="",',
        (f"{_ON_POLICY}test_the_prompt_is_bos_the_instruction_and_a_newline",),
    ),
    Fault(
        "norms of pi0 round float64 to float32",
        _NETWORK,
        "wide = _exact(hidden)",
        "wide = hidden.float()",
        (f"{_ON}test_in_float64_nothing_is_rounded_to_less",),
    ),
)

_ON_PICTURES = "tests/policies/test_letterbox.py::"
_BARS = f"{_ON_PICTURES}test_bars_are_what_each_library_fills_them_with"
_TRANSFORMERS = f"{_ON_PICTURES}test_transformers_makes_the_same_of_it"

_IN_PICTURES = (
    Fault(
        "LeRobot's bars are darker than black",
        _LETTERBOX,
        "bar: float = -1.0",
        "bar: float = -3.0",
        (_BARS,),
    ),
    Fault(
        "bars are below and on the right in every library",
        _LETTERBOX,
        "before: float = 0.5",
        "before: float = 0.0",
        (_BARS,),
    ),
    Fault(
        "LeRobot's pictures are antialiased",
        _LETTERBOX,
        "antialias: bool = False",
        "antialias: bool = True",
        (f"{_ON_PICTURES}test_lerobot_resizes_without_antialiasing",),
    ),
    Fault(
        "pictures are rounded to 8 bits at the end alone",
        _LETTERBOX,
        "wide = super().resized(image, image.shape[2], width).clamp(0.0, 255.0).round()",
        "wide = super().resized(image, image.shape[2], width)",
        (_TRANSFORMERS,),
    ),
    Fault(
        "transformers' sizes are rounded as the others' are",
        _LETTERBOX,
        "return int(height * scale), int(width * scale)",
        "return super().fitted(height, width, side)",
        (_TRANSFORMERS,),
    ),
)

# Without transformers the tests of the network are skipped.
_HAS_TRANSFORMERS = importlib.util.find_spec("transformers") is not None
FAULTS: tuple[Fault, ...] = (*_IN_PICTURES, *((*_IN_THE_NETWORK, *_IN_FOLDERS) if _HAS_TRANSFORMERS else ()))
