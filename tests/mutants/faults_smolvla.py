"""Faults in SmolVLA's network: what is easily got wrong when a checkpoint of another library is read."""

from __future__ import annotations

from tests.mutants.fault import Fault

_NETWORK, _LAYERS = "vla_rl/policies/smolvla/network.py", "vla_rl/policies/smolvla/layers.py"
_POLICY, _ON_POLICY = "vla_rl/policies/smolvla/policy.py", "tests/policies/smolvla/test_policy.py::"
_SHAPE, _PICTURES = "vla_rl/policies/smolvla/shape.py", "vla_rl/policies/vla/pictures.py"
_PARITY = "tests/policies/smolvla/test_parity.py::test_velocity_sample_and_loss_are_those_of_lerobot"
_NAMES = "tests/policies/smolvla/test_parity.py::test_every_tensor_has_lerobots_name_and_shape"
_ON = "tests/policies/smolvla/test_network.py::"
_SIZES, _PADDING = f"{_ON}test_the_published_sizes", f"{_ON}test_padding_of_prompts_changes_nothing"
_FOLDER, _REACHED = (
    f"{_ON}test_a_lerobot_folder_says_the_sizes",
    f"{_ON}test_the_gradient_of_the_expert_is_the_true_one",
)

FAULTS = (
    Fault(
        "actions of a chunk see those after them",
        _NETWORK,
        "(steps <= steps[:, None])",
        "(steps <= steps[:, None] + 99)",
        (_PARITY, f"{_ON}test_an_action_sees_those_before_it_alone"),
    ),
    Fault(
        "actions of a point see those of another",
        _NETWORK,
        " & (point == point[:, None])",
        "",
        (f"{_ON}test_points_of_a_sample_do_not_see_each_other",),
    ),
    Fault(
        "pictures are not scaled by the root of the width",
        _NETWORK,
        "parts += [start, seen * scale, end]",
        "parts += [start, seen, end]",
        (_PARITY,),
    ),
    Fault(
        "words are not scaled by the root of the width", _NETWORK, "embed(tokens) * scale", "embed(tokens)", (_PARITY,)
    ),
    Fault(
        "the padding of prompts is attended to",
        _NETWORK,
        "torch.cat((around, token_mask), 1)",
        "torch.cat((around, torch.ones_like(token_mask)), 1)",
        (_PARITY, _PADDING),
    ),
    Fault(
        "positions count masked tokens",
        _NETWORK,
        'angle = angles(prefix["mask"].sum(1, keepdim=True), size)',
        "angle = angles(torch.full_like(mask[:, :1], mask.shape[1] - 1, dtype=torch.int64), size)",
        (_PARITY, _PADDING),
    ),
    Fault(
        "the position of an action counts masked tokens",
        _NETWORK,
        "angles(mask.sum(1, keepdim=True) + steps, size)",
        "angles((mask.shape[1] + steps)[None], size)",
        (_PARITY, _PADDING),
    ),
    Fault(
        "actions that attend to the prefix alone keep their later positions",
        _NETWORK,
        "rotated(query, alone)",
        "rotated(query, after)",
        (_PARITY,),
    ),
    Fault(
        "actions do not see the state",
        _NETWORK,
        'functional.pad(prefix["mask"], (0, 1), value=True)',
        'functional.pad(prefix["mask"], (0, 1), value=False)',
        (_PARITY, f"{_ON}test_everything_seen_matters"),
    ),
    Fault(
        "the state is not learnt from",
        _NETWORK,
        'hidden = self.model["state_proj"](state.to(exact))',
        'hidden = self.model["state_proj"](state.to(exact)).detach()',
        (_REACHED,),
    ),
    Fault(
        "the expert's last norm is left out",
        _NETWORK,
        "hidden = normalized(self._expert.norm, hidden)",
        "hidden = 1 * hidden",
        (_PARITY,),
    ),
    Fault(
        "cosines come before sines",
        _NETWORK,
        "torch.cat((radians.sin(), radians.cos()), 1)",
        "torch.cat((radians.cos(), radians.sin()), 1)",
        (_PARITY,),
    ),
    Fault(
        "the embedding of t has half its period",
        _NETWORK,
        "radians = 2.0 * math.pi",
        "radians = 4.0 * math.pi",
        (_PARITY,),
    ),
    Fault(
        "the mean over a prefix counts padding",
        _NETWORK,
        '"pooled": hidden.sum(1) / mask.sum(1, keepdim=True)',
        '"pooled": hidden.mean(1)',
        (_PADDING,),
    ),
    Fault(
        "expert layers project keys of their own width",
        _NETWORK,
        "(nn.Linear(keys, keys, bias=False) for _ in range(2))",
        "(nn.Linear(shape.expert_width, keys, bias=False) for _ in range(2))",
        (_SIZES, _NAMES),
    ),
    Fault(
        "RoPE has the wavelength of the language model's configuration",
        _LAYERS,
        "WAVELENGTH = 10_000.0",
        "WAVELENGTH = 100_000.0",
        (_PARITY,),
    ),
    Fault(
        "RoPE turns neighbours",
        _LAYERS,
        "x.to(torch.promote_types(x.dtype, torch.float32)).chunk(2, -1)",
        "x.to(torch.promote_types(x.dtype, torch.float32)).unflatten(-1, (-1, 2)).unbind(-1)",
        (_PARITY,),
    ),
    Fault(
        "heads share keys in turn",
        _LAYERS,
        "query.unflatten(2, (-1, shared)).permute(0, 2, 3, 1, 4)",
        "query.unflatten(2, (shared, -1)).permute(0, 3, 2, 1, 4)",
        (_PARITY,),
    ),
    Fault(
        "the mask of a head is that of another query",
        _LAYERS,
        "mask = mask.repeat(1, shared, 1)",
        "mask = mask.repeat_interleave(shared, 1)",
        (_PARITY,),
    ),
    Fault(
        "an expert of fewer layers stands beside the first ones",
        _SHAPE,
        "return None if rest else index",
        "return layer if layer < self.expert_layers else None",
        (_PARITY,),
    ),
    Fault(
        "all layers of the language model are used",
        _SHAPE,
        'int(config.get("num_vlm_layers", 16))',
        "0",
        (_FOLDER, _NAMES),
    ),
    Fault(
        "a foreign language model is taken for SmolVLM2",
        _SHAPE,
        'if vlm is None and name.rpartition("/")[2]',
        'if vlm is not None and name.rpartition("/")[2]',
        (_FOLDER,),
    ),
    Fault(
        "pictures are padded on the right and below",
        _PICTURES,
        "(width - fitted[1], 0, height - fitted[0], 0)",
        "(0, width - fitted[1], 0, height - fitted[0])",
        (_PARITY, f"{_ON}test_pictures_are_fitted_with_black_on_the_left_and_on_top"),
    ),
    Fault("pictures lie in [0, 1]", _PICTURES, "return pictures * 2.0 - 1.0", "return pictures", (_PARITY,)),
    Fault(
        "statistics among the weights are taken for tensors of the model",
        _NETWORK,
        "return None if name in UNUSED or name.startswith(_STATISTICS) else name",
        "return None if name in UNUSED else name",
        (f"{_ON_POLICY}test_a_lerobot_folder_acts_as_lerobots_policy",),
    ),
    Fault(
        "the next-token head has a place in the model",
        _NETWORK,
        "return None if name in UNUSED or name.startswith(_STATISTICS) else name",
        "return None if name.startswith(_STATISTICS) else name",
        (f"{_ON_POLICY}test_a_lerobot_folder_acts_as_lerobots_policy",),
    ),
    Fault(
        "tensors of a compiled policy are not known",
        _NETWORK,
        'name.replace(_COMPILED, "model.", 1) if',
        "name if",
        (f"{_ON_POLICY}test_a_lerobot_folder_acts_as_lerobots_policy",),
    ),
    Fault(
        "an Aloha's joints are taken as they are",
        "vla_rl/policies/vla/checkpoint.py",
        '"adapt_to_pi_aloha": (False,),',
        '"adapt_to_pi_aloha": _ANY,',
        (f"{_ON_POLICY}test_what_does_not_fit_is_one_sentence",),
    ),
    Fault(
        "the vision-language model beside the folder's config is not looked at",
        _POLICY,
        'checkpoint.folder / "vlm" / "config.json"',
        'checkpoint.folder / "config" / "vlm.json"',
        (f"{_ON_POLICY}test_a_lerobot_folder_acts_as_lerobots_policy",),
    ),
    Fault(
        "the last word of the tasks has no embedding",
        "vla_rl/policies/vla/flow_vla.py",
        "sizes.with_words(len(vocabulary.words) + 1)",
        "sizes.with_words(len(vocabulary.words))",
        (f"{_ON_POLICY}test_it_is_a_likelihood_policy_and_small",),
    ),
    Fault(
        "actions that are not executed are denoised",
        _NETWORK,
        "        return horizon",
        "        return self.chunk",
        (f"{_ON_POLICY}test_a_lerobot_folder_acts_as_lerobots_policy",),
    ),
    Fault(
        "a chain holds the executed actions alone where all see each other",
        "vla_rl/policies/vla/flow_vla.py",
        "return self.network.denoised(self.horizon), self.network.action_size",
        "return self.horizon, self.network.action_size",
        ("tests/policies/vla/test_flow_vla.py::test_the_chain_is_padded_and_its_first_actions_are_executed",),
    ),
)
