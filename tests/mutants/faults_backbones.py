"""Faults in the video models that work on latents."""

from __future__ import annotations

from tests.mutants.fault import Fault

_HOME = "world_models/backbones/"
_DIT, _LENS, _LORA = f"{_HOME}dit.py", f"{_HOME}autoencoder.py", f"{_HOME}lora.py"
_WAN, _WEIGHTS = f"{_HOME}wan.py", f"{_HOME}wan_weights.py"
_ON_DIT, _ON_WAN = "tests/world_models/test_dit.py::", "tests/world_models/test_wan.py::"
_VARIANCE = f"{_ON_DIT}test_the_network_sees_and_learns_unit_variance_and_its_zero_is_the_best_linear_guess"
_AT_FIRST = f"{_ON_DIT}test_at_first_it_guesses_what_is_likeliest_without_having_learnt_anything"
_SCALE = f"{_ON_DIT}test_latents_have_a_scale_that_no_weights_can_change"
_RECONSTRUCTION = f"{_ON_DIT}test_latents_learn_from_reconstruction_alone"
_VERY = f"{_ON_WAN}test_a_folder_gives_the_very_network_that_was_saved"
_CAMERAS = f"{_ON_WAN}test_every_frame_of_every_camera_is_encoded_as_a_video_of_its_own"
_TOKENS = f"{_ON_WAN}test_features_at_a_pixel_are_those_of_its_own_token"
_LOW_RANK = f"{_ON_WAN}test_low_rank_corrections_are_nothing_at_first_and_then_b_times_a"
_REFUSED = f"{_ON_WAN}test_a_folder_that_is_not_wan_is_refused"
_COUNTS = "tests/world_models/test_backbones.py::test_every_input_of_a_frame_changes_the_prediction_of_every_frame"

_ON_LATENTS = (
    Fault(
        "the skip of a variance-preserving noise",
        _DIT,
        "return enter, clean * spread**2 * enter.square(), level * spread * enter",
        "return enter, spread**2 * enter.square(), level * spread * enter",
        (_VARIANCE,),
    ),
    Fault(
        "the network's output weighs the same at every level",
        _DIT,
        "level * spread * enter",
        "spread * enter",
        (_VARIANCE,),
    ),
    Fault(
        "the latest frame is taken away unscaled",
        _DIT,
        "change = noisy - (1.0 - share) * latest",
        "change = noisy - latest",
        (_AT_FIRST,),
    ),
    Fault(
        "no gate is closed at first",
        _DIT,
        "_zero(nn.Linear(width, 2 * width)), _zero(nn.Linear(width, size))",
        "_zero(nn.Linear(width, 2 * width)), nn.Linear(width, size)",
        (_AT_FIRST,),
    ),
    Fault(
        "the noise level of context frames is ignored",
        _DIT,
        "_waves(torch.cat([context.level, level], 1))",
        "_waves(torch.cat([torch.zeros_like(context.level), level], 1))",
        (f"{_COUNTS}[context_noise-dit]",),
    ),
    Fault(
        "the prediction loss trains the latents",
        _DIT,
        "self.autoencoder.encode(pictures).detach()",
        "self.autoencoder.encode(pictures)",
        (_RECONSTRUCTION,),
    ),
    Fault(
        "latents of any scale",
        _LENS,
        "return _unit(latents).unflatten(0, lead)",
        "return latents.unflatten(0, lead)",
        (_SCALE,),
    ),
    Fault(
        "the loss of latents is left out",
        "world_models/model.py",
        'loss = loss + parts["latents"]',
        "pass",
        (_RECONSTRUCTION,),
    ),
)

_ON_WANS = (
    Fault("timesteps from 0 to 1", _WAN, "_TIMESTEPS = 1000.0", "_TIMESTEPS = 1.0", (_VERY,)),
    Fault("the velocity points the other way", _WAN, "clean = noisy - level", "clean = noisy + level", (_VERY,)),
    Fault(
        "actions belong to the frames before",
        _WAN,
        "functional.pad(action_input.vector, (0, 0, self.num_context, 0))",
        "functional.pad(action_input.vector, (0, 0, 0, self.num_context))",
        (_VERY,),
    ),
    Fault(
        "a new layer that is not zero",
        _WAN,
        "nn.init.zeros_(self.maps.weight)",
        "nn.init.normal_(self.maps.weight)",
        (_VERY,),
    ),
    Fault(
        "the new addition to the time is not zero",
        _WAN,
        "for parameter in self.action[2].parameters():",
        "for parameter in self.action[1].parameters():",
        (_VERY,),
    ),
    Fault(
        "a frame's last token has its level",
        _WAN,
        "time.repeat_interleave(self.cells[0] * self.cells[1], 1)",
        "time.repeat(1, self.cells[0] * self.cells[1])",
        (_VERY,),
    ),
    Fault("latents keep their mean", _WAN, "((latents - self.mean) / self.std)", "(latents / self.std)", (_CAMERAS,)),
    Fault(
        "columns of cameras are shuffled",
        _WAN,
        "latents.movedim(1, 3).flatten(3)",
        "latents.movedim(1, 4).flatten(3)",
        (_CAMERAS,),
    ),
    Fault(
        "rows and columns of a token are swapped",
        _WAN,
        "permute(0, 1, 6, 2, 4, 3, 5)",
        "permute(0, 1, 6, 2, 5, 3, 4)",
        (_TOKENS,),
    ),
    Fault(
        "corrections begin at random",
        _LORA,
        "nn.init.zeros_(self.up.weight)",
        "nn.init.normal_(self.up.weight)",
        (_LOW_RANK,),
    ),
    Fault("corrections without their scale", _LORA, "self.scale * self.up", "self.up", (_LOW_RANK,)),
    Fault(
        "the corrected weights are trained as well",
        _LORA,
        "requires_grad_(False)",
        "requires_grad_(True)",
        (_LOW_RANK,),
    ),
    Fault("weights that are missing stay random", _WEIGHTS, 'if loading["missing_keys"]:', "if False:", (_REFUSED,)),
    Fault("pickled weights are read", _WEIGHTS, "use_safetensors=True", "use_safetensors=None", (_REFUSED,)),
)

FAULTS = (*_ON_LATENTS, *_ON_WANS)
