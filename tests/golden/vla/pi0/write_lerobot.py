"""Writes ``lerobot.npz`` and ``lerobot_pi05.npz`` beside this file with LeRobot's own pi0 and pi0.5.

Made with Python 3.12, lerobot 0.6.1 (installed with --no-deps, as it asks for a torch before 2.12), transformers 5.5.4,
torch 2.13.0, torchvision 0.28.0 and numpy 2.2.6, by ``PYTHONPATH=. python tests/golden/vla/pi0/write_lerobot.py``.
"""

from __future__ import annotations

import functools
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import torch

HERE = Path(__file__).parent
sys.modules["tests"] = ModuleType("tests")  # other packages may have one
sys.modules["tests"].__path__ = [str(HERE.parents[2])]

from lerobot.configs.types import FeatureType, PolicyFeature  # noqa: E402
from lerobot.policies.pi0 import modeling_pi0  # noqa: E402
from lerobot.policies.pi0.configuration_pi0 import PI0Config  # noqa: E402
from lerobot.policies.pi05 import modeling_pi05  # noqa: E402
from lerobot.policies.pi05.configuration_pi05 import PI05Config  # noqa: E402
from lerobot.policies.pi05.processor_pi05 import Pi05PrepareStateTokenizerProcessorStep  # noqa: E402

from tests.golden.vla.pi0.cases import (  # noqa: E402
    ACTION,
    CHUNK,
    LEROBOT_CAMERAS,
    LEROBOT_EXPERT,
    LEROBOT_LENGTHS,
    LEROBOT_MISSING,
    LEROBOT_STATES,
    LEROBOT_TASKS,
    LEROBOT_TEXT,
    LEROBOT_TIED,
    LEROBOT_VISION,
    SIDE,
    STATE,
    STEPS,
    TIMES,
    lerobot_inputs,
)
from tests.golden.vla.weights import weight  # noqa: E402

FAMILIES = {"pi0": (modeling_pi0, "PI0Policy", PI0Config), "pi05": (modeling_pi05, "PI05Policy", PI05Config)}
_HEADS = {"num_attention_heads": 8, "num_key_value_heads": 1, "head_dim": 16}


def small(real: Any, config: Any) -> Any:
    """LeRobot's PaliGemma with the sizes of the cases."""
    for key, value in {**LEROBOT_TEXT, **_HEADS}.items():
        setattr(config.text_config, key, value)
    for key, value in {**LEROBOT_VISION, "image_size": SIDE, "patch_size": 14, "num_attention_heads": 16}.items():
        setattr(config.vision_config, key, value)
    config.projection_dim = LEROBOT_VISION["projection_dim"]
    return real(config)


def small_expert(real: Any, config: Any) -> Any:
    """Its expert, whose unused head is as large as the vocabulary."""
    config.vocab_size = LEROBOT_TEXT["vocab_size"]
    return real(config)


def gemma(model: Any, variant: str) -> Any:
    sizes = LEROBOT_TEXT if variant == "gemma_2b" else {**LEROBOT_TEXT, **LEROBOT_EXPERT}
    return model.GemmaConfig(
        sizes["hidden_size"], sizes["num_hidden_layers"], sizes["intermediate_size"], 8, 1, _HEADS["head_dim"]
    )


def patch(model: Any) -> None:
    """Make the module's model small."""
    for name, made in (("PaliGemmaForConditionalGenerationWithPiGemma", small), ("PiGemmaForCausalLM", small_expert)):
        setattr(model, name, functools.partial(made, getattr(model, name)))
    model.get_gemma_config = functools.partial(gemma, model)


def policy(family: str) -> Any:
    model, kind, config_of = FAMILIES[family]
    names = {**LEROBOT_CAMERAS, LEROBOT_MISSING: (SIDE, SIDE)}
    features = {name: PolicyFeature(FeatureType.VISUAL, (3, *size)) for name, size in names.items()}
    features["observation.state"] = PolicyFeature(FeatureType.STATE, (STATE,))
    config = config_of(
        input_features=features,
        output_features={"action": PolicyFeature(FeatureType.ACTION, (ACTION,))},
        chunk_size=CHUNK,
        n_action_steps=CHUNK,
        max_state_dim=STATE,
        max_action_dim=ACTION,
        image_resolution=(SIDE, SIDE),
        device="cpu",
    )
    made = getattr(model, kind)(config).eval()
    with torch.no_grad():
        for name, item in made.state_dict().items():
            head = name.replace("model.language_model.embed_tokens", "lm_head") if name == LEROBOT_TIED else name
            item.copy_(torch.from_numpy(weight(head, item.shape)))  # published weights are tied
    return made


@torch.no_grad()
def outputs(family: str, name: str, of: Any) -> dict[str, np.ndarray]:
    """``sample`` [B,C,A] from the noise, ``velocity`` [times,B,C,A] at it, ``pixels`` of the first camera."""
    given = {key: torch.from_numpy(item) for key, item in lerobot_inputs(name).items()}
    batch = {camera: given[camera].permute(0, 3, 1, 2).float() / 255.0 for camera in LEROBOT_CAMERAS}
    images, present = of._preprocess_images(batch)

    def end(steps: int) -> torch.Tensor:
        state = (given["state"],) if family == "pi0" else ()  # pi0.5 reads it in the prompt
        seen = (images, present, given["tokens"], given["mask"], *state)
        return of.model.sample_actions(*seen, noise=given["noise"], num_steps=steps)

    model = FAMILIES[family][0]
    waves, velocity = model.create_sinusoidal_pos_embedding, []
    for time in TIMES:  # one step of length 1 from the noise shows the velocity there
        model.create_sinusoidal_pos_embedding = functools.partial(_at, time, waves)
        velocity.append(given["noise"] - end(1))
    model.create_sinusoidal_pos_embedding = waves
    return {"sample": end(STEPS).numpy(), "velocity": torch.stack(velocity).numpy(), "pixels": images[0].numpy()}


def _at(time: float, waves: Any, t: torch.Tensor, *rest: Any, **kwargs: Any) -> torch.Tensor:
    """The waves of ``time`` whatever ``t`` is."""
    return waves(torch.full_like(t, time), *rest, **kwargs)


def prompts() -> list[str]:
    """What LeRobot writes for pi0.5 of the cases' instructions and normalised states."""
    step = Pi05PrepareStateTokenizerProcessorStep()
    given = {"observation": {"observation.state": torch.tensor(LEROBOT_STATES)}}
    return step({**given, "complementary_data": {"task": list(LEROBOT_TASKS)}})["complementary_data"]["task"]


if __name__ == "__main__":
    for family, file in (("pi0", "lerobot.npz"), ("pi05", "lerobot_pi05.npz")):
        patch(FAMILIES[family][0])
        network = policy(family)
        shapes = sorted(f"{name} {'x'.join(map(str, item.shape))}" for name, item in network.state_dict().items())
        made = {
            f"{name}/{key}": item for name in LEROBOT_LENGTHS for key, item in outputs(family, name, network).items()
        }
        more = {"prompts": np.array(prompts())} if family == "pi05" else {}
        np.savez_compressed(HERE / file, tensors=np.array(shapes), **more, **made)
        for key, item in made.items():
            print(f"{family} {key:30} {item.shape!s:15} std {item.std():.3f}")
