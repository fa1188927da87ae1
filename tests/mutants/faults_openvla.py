"""Faults in OpenVLA: its network, its decodings, its likelihood."""

from __future__ import annotations

from tests.mutants.fault import Fault

_VISION, _NETWORK = "vla_rl/policies/openvla_vision.py", "vla_rl/policies/openvla_network.py"
_PICTURES, _DECODING = "vla_rl/policies/openvla_pictures.py", "vla_rl/policies/openvla_decoding.py"
_ON_NETWORK = "tests/policies/test_openvla_network.py::"
_ON_DECODING = "tests/policies/test_openvla_decoding.py::"
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
        ".float().flip(-1)",
        ".float()",
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
        "stop = network.embed(torch.full((len(before), 1), _STOP",
        "stop = 0.0 * network.embed(torch.full((len(before), 1), _STOP",
        _AT_ONCE,
    ),
)

FAULTS = (*_READING, *_DECODED)
