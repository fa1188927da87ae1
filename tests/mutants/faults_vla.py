"""Faults in the policy around a flow VLA, and in what it keeps of an observation."""

from __future__ import annotations

from tests.mutants.fault import Fault

_FLOW, _FEATURES = "vla_rl/policies/vla/flow_vla.py", "vla_rl/policies/vla/features.py"
_FLOW_POLICY = "vla_rl/policies/flow_policy.py"
_LATENT, _IMITATION = "vla_rl/policies/latent_noise.py", "vla_rl/recipes/imitation.py"
_ON = "tests/policies/vla/test_flow_vla.py::"
_ONCE = f"{_ON}test_acting_on_pictures_encodes_them_once_and_again_where_anything_changed"
_LEARNER = f"{_ON}test_a_learner_encodes_with_gradient_and_holds_no_prefix_of_acting"
_OPENVLA = "tests/policies/openvla/test_policy.py::test_it_keeps_patches_or_pictures_whichever_is_smaller_and_right"

FAULTS = (
    Fault(
        "the chain of a VLA is cut before it is stored",
        _FLOW_POLICY,
        'aux = {"points": chain.points,',
        'aux = {"points": chain.points[..., :8],',
        (f"{_ON}test_the_chain_is_padded_and_its_first_actions_are_executed",),
    ),
    Fault(
        "a VLA executes its last actions",
        _FLOW_POLICY,
        "[:, : self.horizon, : self.spec.action_dim]",
        "[:, -self.horizon :, : self.spec.action_dim]",
        (f"{_ON}test_the_chain_is_padded_and_its_first_actions_are_executed",),
    ),
    Fault(
        "a VLA's conditions are repeated in another order than its points",
        "vla_rl/policies/vla/network.py",
        "item.repeat_interleave(times, 0)",
        "item.repeat(times, *(1 for _ in item.shape[1:]))",
        (f"{_ON}test_acting_and_learning_agree_on_the_density",),
    ),
    Fault(
        "a VLA imitates at uniform times",
        _FLOW,
        "uniforms ** (1 / 1.5)",
        "uniforms",
        (f"{_ON}test_times_of_imitation_are_beta_distributed",),
    ),
    Fault(
        "imitation of a VLA leaves out the padding",
        _FLOW,
        "errors.unflatten(-1, (chunks.shape[1], -1))",
        "errors.unflatten(-1, (chunks.shape[1], -1))[..., :2]",
        (f"{_ON}test_the_imitation_loss_is_that_of_flow_matching_by_hand",),
    ),
    Fault(
        "what a VLA trains is rounded to bfloat16 as well",
        "vla_rl/policies/vla/trainable.py",
        "parameter.data = parameter.data.to(torch.float32 if name in trained else dtype)",
        "parameter.data = parameter.data.to(dtype)",
        (f"{_ON}test_a_frozen_model_in_bfloat16_leaves_the_expert_in_float32",),
    ),
    Fault(
        "a VLA's state is not normalized",
        _FLOW,
        "return self.state_scale.normalize(self._tensor(obs.state).float())",
        "return self._tensor(obs.state).float()",
        (f"{_ON}test_the_imitation_loss_is_that_of_flow_matching_by_hand",),
    ),
    Fault(
        "acting on pictures encodes them twice",
        _FEATURES,
        "return last.prefix",
        "return views.prefix(network, features)",
        (_ONCE, f"{_ON}test_a_kept_prefix_spares_the_model_and_changes_nothing", _OPENVLA),
    ),
    Fault(
        "a decision is made on what older weights saw",
        _FEATURES,
        "return same and self.stamp == views.stamp()",
        "return same",
        (_ONCE,),
    ),
    Fault(
        "a decision is made on other pictures than are given",
        _FEATURES,
        "same = all(features.get(name) is item for name, item in self.features.items())",
        'same = features.get("pooled") is self.features["pooled"]',
        (_ONCE,),
    ),
    Fault(
        "what was acted on stays in memory",
        _FEATURES,
        "last, self._last = self._last, None",
        "last = self._last",
        (_ONCE, _LEARNER),
    ),
    Fault(
        "a copy of a policy acts on what the first one saw",
        _FEATURES,
        "return KeepPictures()  # the copy will see other observations",
        "return self",
        (_ONCE,),
    ),
    Fault(
        "a learner gets a prefix without gradient",
        _FEATURES,
        "if last is not None and not torch.is_grad_enabled() and last.serves(views, features):",
        "if last is not None and last.serves(views, features):",
        (_LEARNER,),
    ),
    Fault(
        "missing cameras count among the bytes of pi0's prefix",
        "vla_rl/policies/pi0/network.py",
        "shown = sum(name is not None for name in cameras)",
        "shown = len(cameras)",
        ("tests/policies/pi0/test_network.py::test_the_prefix_has_the_bytes_that_it_says",),
    ),
    Fault(
        "what is around a missing camera does not count among the bytes of SmolVLA's prefix",
        "vla_rl/policies/smolvla/network.py",
        "missing = min(len(cameras) - shown, self.shape.empty_cameras)",
        "missing = 0",
        ("tests/policies/smolvla/test_network.py::test_a_missing_camera_takes_what_is_around_its_place_alone",),
    ),
    Fault(
        "a learner with a kept prefix runs the model again",
        _FEATURES,
        "fits = prefix_bytes <= PREFIX_LIMIT and",
        "fits = prefix_bytes > PREFIX_LIMIT and",
        (f"{_ON}test_auto_keeps_what_is_small_and_what_training_leaves",),
    ),
    Fault(
        "a kept prefix grows stale while the model is trained",
        _FEATURES,
        "fits = prefix_bytes <= PREFIX_LIMIT and not options.trains.reaches_prefix",
        "fits = prefix_bytes <= PREFIX_LIMIT",
        (f"{_ON}test_auto_keeps_what_is_small_and_what_training_leaves",),
    ),
    Fault(
        "pictures are encoded under the instruction of the first task",
        _FEATURES,
        "self.tokens[task], self.mask[task]",
        "self.tokens[0 * task], self.mask[0 * task]",
        (f"{_ON}test_every_task_has_its_own_prompt",),
    ),
    Fault(
        "the rows of noise that are not chosen are those of another sample",
        _LATENT,
        "last = rows[:, -1:].expand(",
        "last = rows.flip(0)[:, -1:].expand(",
        (f"{_ON}test_latent_noise_steers_it",),
    ),
    Fault(
        "a VLA's pictures stay in the features of a residual",
        "vla_rl/policies/residual.py",
        'for name in (*self.encoder.feature_sizes, "time") if name in features}',
        "for name in features if not name.startswith(_BASE)}",
        (f"{_ON}test_replay_buffers_keep_no_pictures_of_a_frozen_vla",),
    ),
    Fault(
        "a VLA's pictures are recorded for a head over its noise",
        "vla_rl/experience/driver.py",
        "return Decision(obs, recorded(self.policy, features), out, step, self.seeds.copy(), host)",
        "return Decision(obs, features, out, step, self.seeds.copy(), host)",
        (f"{_ON}test_replay_buffers_keep_no_pictures_of_a_frozen_vla",),
    ),
    Fault(
        "a small SmolVLA is grounded with a frozen vision-language model",
        "vla_rl/recipes/smolvla.py",
        "vlm.requires_grad_(True)",
        "vlm.requires_grad_(False).head.requires_grad_(True)",
        ("tests/recipes/test_smolvla_recipe.py::test_the_vision_language_model_learns_to_point_and_the_expert_stays",),
    ),
    Fault(
        "a VLA imitates no more actions than it executes",
        _IMITATION,
        "length = policy.chunk_length if isinstance(policy, OwnImitationFeatures) else policy.horizon",
        "length = policy.horizon",
        (f"{_ON}test_imitation_learns_the_whole_chunk",),
    ),
)
