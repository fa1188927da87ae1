"""Faults in OpenVLA: its network, its decodings, its likelihood."""

from __future__ import annotations

from tests.mutants.fault import Fault

_VISION, _NETWORK = "vla_rl/policies/openvla/vision.py", "vla_rl/policies/openvla/network.py"
_PICTURES, _DECODING = "vla_rl/policies/openvla/pictures.py", "vla_rl/policies/openvla/decoding.py"
_ON_NETWORK = "tests/policies/openvla/test_network.py::"
_ON_DECODING = "tests/policies/openvla/test_decoding.py::"
_POLICY, _ON_POLICY = "vla_rl/policies/openvla/policy.py", "tests/policies/openvla/test_policy.py::"
_PUBLIC, _ON_PUBLIC = "vla_rl/policies/openvla/public.py", "tests/policies/openvla/test_public.py::"
_ENUMERATED = (f"{_ON_POLICY}test_probabilities_of_all_chunks_and_the_score_gradient_are_those_by_enumeration",)
_DRAWN = (f"{_ON_POLICY}test_chunks_are_drawn_as_often_as_their_density_says",)
_TORCH = (f"{_ON_POLICY}test_density_entropy_and_kl_are_those_of_torch",)
_BINS = (f"{_ON_POLICY}test_bins_are_openvlas",)
_FEATURES = (f"{_ON_NETWORK}test_vision_features_are_those_of_timm",)
_NAMES = (f"{_ON_NETWORK}test_names_and_shapes_are_those_of_the_published_checkpoint",)
_IN_TURN = (f"{_ON_DECODING}test_token_after_token_gives_what_transformers_gives_without_padding",)
_AT_ONCE = (f"{_ON_DECODING}test_all_at_once_gives_what_transformers_gives_without_padding",)

_READING = (
    Fault(
        "OpenVLA's features are those of the last block",
        _VISION,
        "for block in list(self.blocks)[:-1]:",
        "for block in list(self.blocks):",
        _FEATURES,
    ),
    Fault("DINOv2's register tokens count as patches", _VISION, "return x[:, extra:]", "return x", _FEATURES),
    Fault(
        "LayerScale has timm's name",
        _VISION,
        "self.scale_factor = nn.Parameter(torch.full((width,), 1e-5))",
        "self.gamma = self.scale_factor = nn.Parameter(torch.full((width,), 1e-5))",
        _NAMES,
    ),
    Fault(
        "DINOv2's pictures are normalised like SigLIP's",
        _PICTURES,
        "return _normalized(pictures / 255.0, *_IMAGENET), _n",
        "return _normalized(pictures / 255.0, *_HALF), _n",
        _FEATURES,
    ),
    Fault(
        "the crop takes a share of each side instead of the area",
        _PICTURES,
        "side = area**0.5",
        "side = area",
        (f"{_ON_NETWORK}test_the_middle_of_a_picture_is_that_of_tensorflow",),
    ),
    Fault(
        "bins count up from the first action token",
        _NETWORK,
        "weight.to(dtype)).flip(-1)",
        "weight.to(dtype))",
        (*_IN_TURN, *_AT_ONCE),
    ),
    Fault(
        "the padded rows of the vocabulary are taken for actions",
        _NETWORK,
        "return int(self.language_model.config.vocab_size) - self.shape.padding",
        "return int(self.language_model.config.vocab_size)",
        (*_IN_TURN, *_AT_ONCE),
    ),
)

_DECODED = (
    Fault(
        "padding counts as a position",
        _DECODING,
        "return (mask.long().cumsum(1) - 1).clamp_min(0)",
        "return torch.arange(mask.shape[1], device=mask.device).expand(mask.shape)",
        (*_IN_TURN, *_AT_ONCE),
    ),
    Fault(
        "padding of a prompt is read",
        _DECODING,
        "return mask[:, None] & torch.ones",
        "return mask[:, None] | torch.ones",
        _IN_TURN,
    ),
    Fault(
        "the token before the last is fed again",
        _DECODING,
        "network.embed(network.bin_tokens(bins[-1]))",
        "network.embed(network.bin_tokens(bins[0]))",
        (f"{_ON_DECODING}test_token_after_token_gives_what_transformers_gives_without_padding",),
    ),
    Fault(
        "a parallel action reads its own placeholder's output",
        _DECODING,
        "first = before.shape[1] - 1",
        "first = before.shape[1]",
        _AT_ONCE,
    ),
    Fault(
        "parallel decoding is causal",
        _DECODING,
        "attends = mask[:, None].expand(-1, mask.shape[1], -1)",
        "attends = _causal(mask)",
        _AT_ONCE,
    ),
    Fault(
        "no stop token follows parallel actions",
        _DECODING,
        "stop = network.embed(torch.full((len(before), 1), STOP",
        "stop = 0.0 * network.embed(torch.full((len(before), 1), STOP",
        _AT_ONCE,
    ),
)

_CHOSEN = (
    Fault(
        "the temperature multiplies logits",
        _POLICY,
        "return (logits / self.config.temperature).log_softmax(-1)",
        "return (logits * self.config.temperature).log_softmax(-1)",
        (*_ENUMERATED, *_TORCH),
    ),
    Fault(
        "acting is hotter than its likelihood says",
        _POLICY,
        "lambda some, first: (self._log_probs(some) + noise",
        "lambda some, first: (self._log_probs(some) + 1.5 * noise",
        _DRAWN,
    ),
    Fault(
        "the same noise for every token",
        _POLICY,
        "noise[:, first : first + some.shape[1]]",
        "noise[:, : some.shape[1]]",
        _DRAWN,
    ),
    Fault(
        "a deployed OpenVLA draws its tokens",
        _POLICY,
        'if mode == "sample":',
        'if mode != "sample":',
        (f"{_ON_POLICY}test_what_is_deployed_is_greedy_token_by_token",),
    ),
    Fault(
        "as many intervals as edges",
        _POLICY,
        "middle = (bins.clamp_max(intervals - 1).to(self.action_low) + 0.5) * 2.0 / intervals - 1.0",
        "middle = (bins.to(self.action_low) + 0.5) * 2.0 / (intervals + 1) - 1.0",
        _BINS,
    ),
    Fault(
        "the highest bin is an interval of its own",
        _POLICY,
        "bins.clamp_max(intervals - 1).to(",
        "bins.to(",
        _BINS,
    ),
    Fault("bins are rounded", _POLICY, "/ 2.0 * intervals).floor()", "/ 2.0 * intervals).round()", _BINS),
    Fault(
        "imitation is learnt at the temperature of exploration",
        _POLICY,
        "cross_entropy(logits.flatten(0, 1), bins.flatten(),",
        "cross_entropy(logits.flatten(0, 1) / self.config.temperature, bins.flatten(),",
        (f"{_ON_POLICY}test_imitation_is_the_cross_entropy_of_the_bins_and_is_learnt",),
    ),
    Fault(
        "an OpenVLA's dataset stays where its weights are not",
        _POLICY,
        "seen = {name: item.to(chunks.device) for name, item in features.items()}",
        "seen = dict(features)",
        (f"{_ON_POLICY}test_imitation_takes_a_dataset_on_the_host_to_the_weights",),
    ),
    Fault(
        "the KL of tokens goes the other way",
        _POLICY,
        "return (one.exp() * (one - other)).sum((1, 2))",
        "return (other.exp() * (other - one)).sum((1, 2))",
        _TORCH,
    ),
    Fault(
        "patches are kept that training changes",
        _POLICY,
        "and smaller and not changed)",
        "and smaller)",
        (f"{_ON_POLICY}test_it_keeps_patches_or_pictures_whichever_is_smaller_and_right",),
    ),
    Fault(
        "large patches are kept instead of small pictures",
        _POLICY,
        "smaller = size < picture_bytes(policy.spec, policy.cameras)",
        "smaller = True",
        (f"{_ON_POLICY}test_it_keeps_patches_or_pictures_whichever_is_smaller_and_right",),
    ),
    Fault(
        "every observation has the first task's prompt",
        _POLICY,
        "return self.network.prefix(patches, self.tokens[task], self.token_mask[task], features",
        "return self.network.prefix(patches, self.tokens[0 * task], self.token_mask[0 * task], features",
        (f"{_ON_POLICY}test_every_task_has_its_own_prompt_and_every_camera_is_seen",),
    ),
    Fault(
        "the state is read without its non-linearity",
        _NETWORK,
        "self.fc2(nn.functional.gelu(self.fc1(state.to(self.fc1.weight.dtype))))",
        "self.fc2(self.fc1(state.to(self.fc1.weight.dtype)))",
        (f"{_ON_POLICY}test_the_state_is_read_where_the_network_has_a_projector_for_it",),
    ),
)

_OPENED = (
    Fault(
        "the empty token is not inserted before the actions",
        _PUBLIC,
        "return found if found[-1] == _EMPTY else [*found, _EMPTY]",
        "return found",
        (f"{_ON_PUBLIC}test_the_prompt_is_openvlas",),
    ),
    Fault(
        "instructions keep their capitals",
        _PUBLIC,
        "found = list(super()._tokens(text.lower()))",
        "found = list(super()._tokens(text))",
        (f"{_ON_PUBLIC}test_the_prompt_is_openvlas",),
    ),
    Fault(
        "tokens of a checkpoint with a continuous head are drawn",
        _PUBLIC,
        "    if heads:",
        "    if not folder.exists():",
        (f"{_ON_PUBLIC}test_what_is_missing_or_not_supported_is_named",),
    ),
    Fault(
        "a letterboxed model's pictures are stretched",
        _PUBLIC,
        "if config.get(name, assumed) != assumed:",
        'if name != "image_resize_strategy" and config.get(name, assumed) != assumed:',
        (f"{_ON_PUBLIC}test_what_does_not_fit_is_named",),
    ),
    Fault(
        "instructions with capitals need the tokenizer again",
        _PUBLIC,
        "        if text in self.known:",
        "        if text.lower() in self.known:",
        (f"{_ON_PUBLIC}test_the_prompt_is_openvlas",),
    ),
    Fault(
        "OFT's projector of the state stays random",
        _PUBLIC,
        "        network.proprio_projector.load_state_dict(_proprio_tensors(folder), assign=True)",
        "        network.proprio_projector.to_empty(device='cpu')",
        (f"{_ON_PUBLIC}test_oft_reads_the_state_where_the_folder_has_its_projector",),
    ),
    Fault(
        "every checkpoint of an OpenVLA holds its base",
        "vla_rl/policies/vla/saved_vla.py",
        "self, self.trainable(), self.base, {",
        "self, self.state_dict(), self.base, {",
        (f"{_ON_PUBLIC}test_a_checkpoint_on_a_base_holds_what_was_learnt",),
    ),
    Fault(
        "LoRA trains OpenVLA's vocabulary as well",
        "vla_rl/policies/vla/lora.py",
        "for part in (_LAYERS, *_VOCABULARY))",
        "for part in (_LAYERS,))",
        (f"{_ON_PUBLIC}test_a_checkpoint_on_a_base_holds_what_was_learnt",),
    ),
    Fault(
        "an OpenVLA's activations are kept although they should be computed again",
        _NETWORK,
        "self.language_model.train(torch.is_grad_enabled() and cache is None)",
        "self.language_model.train(False)",
        (f"{_ON_POLICY}test_gradient_checkpointing_computes_layers_again_and_changes_no_number",),
    ),
    Fault(
        "the wanted crop is forgotten",
        _PUBLIC,
        "        crop=crop,",
        "        crop=1.0,",
        (f"{_ON_PUBLIC}test_oft_sees_several_pictures_and_executes_a_part_of_its_chunk",),
    ),
    Fault(
        "the gripper closes where it should open",
        _PUBLIC,
        "    closed, opened = gripper",
        "    opened, closed = gripper",
        (f"{_ON_PUBLIC}test_the_gripper_opens_where_the_environment_opens_it",),
    ),
)

FAULTS = (*_READING, *_DECODED, *_CHOSEN, *_OPENED)
