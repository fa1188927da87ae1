"""Wan as a video model: diffusers' own network inside, folders of it, low-rank corrections, and what does not fit."""

from __future__ import annotations

import json
import sys
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from torch import nn

from tests.world_models.test_backbones import ACTION_WIDTH, CONTEXT, FRAMES, MAPS, call, numbers, random_pictures
from vla_rl.contract.errors import UserError
from world_models.backbones.wan import Lora, LoraLinear, WanConfig, WanFolder, WanSizes, WanVideo

WHOLE = WanConfig(lora=None, width=32)


def build(config: WanConfig = WHOLE, cameras: int = 1, side: int = 16, frames: int = FRAMES) -> WanVideo:
    torch.manual_seed(0)
    return config.build((3 * cameras, side, side), CONTEXT, frames, ACTION_WIDTH, MAPS).eval()


@pytest.fixture(scope="module")
def networks() -> tuple[Any, Any]:
    """What Wan's are like: other numbers in every weight, latents with a mean and a scale."""
    torch.manual_seed(7)
    network, vae = WanSizes().load()
    vae.register_to_config(latents_mean=[0.3, -0.2, 0.1, 0.0], latents_std=[2.0, 0.5, 1.5, 3.0])
    return network.eval(), vae.eval()


@pytest.fixture(scope="module")
def folder(networks, tmp_path_factory):
    path = tmp_path_factory.mktemp("wan")
    for name, network in zip(("transformer", "vae"), networks, strict=True):
        network.save_pretrained(path / name)
    return path


@torch.no_grad()
def test_a_folder_gives_the_very_network_that_was_saved(networks, folder):
    """What is new adds nothing at first: the velocity is that of diffusers' network with the moves as its text."""
    video, (network, _) = build(WanConfig(WanFolder(str(folder)), lora=None)), networks
    given = numbers(video)
    embedder = video.network.condition_embedder
    text = embedder.token(torch.cat([torch.zeros(8, CONTEXT, ACTION_WIDTH), given["vector"]], 1)) + embedder.slots
    own, network.condition_embedder.text_embedder = network.condition_embedder.text_embedder, nn.Identity()
    latents = torch.cat([given["frames"], given["noisy"]], 1).transpose(1, 2)
    time = 1000.0 * torch.cat([given["context_noise"], given["level"]], 1)
    time = time.repeat_interleave(4, 1)  # 2 x 2 tokens in a frame
    velocity = network(latents, time, text, return_dict=False)[0].transpose(1, 2)[:, CONTEXT:]
    network.condition_embedder.text_embedder = own
    wanted = given["noisy"] - given["level"][..., None, None, None] * velocity
    torch.testing.assert_close(call(video, given).clean, wanted, rtol=1e-5, atol=1e-5)
    restored = build(WanConfig(WanFolder(str(folder)), lora=None))
    assert torch.equal(call(restored, given).clean, call(video, given).clean)


@torch.no_grad()
def test_every_frame_of_every_camera_is_encoded_by_itself(networks, folder):
    video, (_, vae) = build(WanConfig(WanFolder(str(folder)), lora=None), cameras=2), networks
    shown = random_pictures(2, 2, 3)
    latents = video.encode(shown)
    assert latents.shape == (2, 3, 4, 4, 8)
    mean, std = (torch.tensor(vae.config[name])[:, None, None] for name in ("latents_mean", "latents_std"))
    for camera in range(2):
        one = shown[1, 2, 3 * camera : 3 * camera + 3]
        own = vae.encode(one[None, :, None]).latent_dist.mean[0, :, 0]
        part = latents[1, 2, :, :, 4 * camera : 4 * camera + 4]
        torch.testing.assert_close(part, (own - mean) / std, rtol=1e-4, atol=1e-4)
        back = vae.decode((part * std + mean)[None, :, None]).sample[0, :, 0]
        decoded = video.decode(latents)[1, 2, 3 * camera : 3 * camera + 3]
        torch.testing.assert_close(decoded, back, rtol=1e-4, atol=1e-4)


def test_features_at_a_pixel_are_those_of_its_own_token():
    """A token is taken apart into pixels and put together exactly; a change in one corner changes its features most."""
    video = build()
    hidden = torch.randn(2, 6, 5, 4, 4, generator=torch.Generator().manual_seed(0))
    assert torch.equal(video._unpatchify(video._tokens(hidden)), hidden.transpose(1, 2))
    nn.init.normal_(video.network.patch_embedding.maps.weight)
    given = numbers(video)
    before = call(video, given).features
    given["map"][:, :, :, :2, :2] += 1.0
    change = (call(video, given).features - before).abs().mean((0, 2)).unflatten(0, (4, 4))
    assert change[:2, :2].min() > 2.0 * change[2:, 2:].max()


def test_low_rank_corrections_are_nothing_first_then_b_times_a():
    torch.manual_seed(0)
    linear = nn.Linear(5, 3)
    holder = nn.ModuleDict({"to_q": linear, "other": nn.Linear(5, 3)})
    Lora(rank=2, scale=0.5).adapt(holder)
    adapted, x = holder["to_q"], torch.randn(4, 5)
    assert isinstance(adapted, LoraLinear) and isinstance(holder["other"], nn.Linear)
    assert torch.equal(adapted(x), linear(x))
    nn.init.normal_(adapted.up.weight)
    dense = linear.weight + 0.5 * adapted.up.weight @ adapted.down.weight
    torch.testing.assert_close(adapted(x), x @ dense.T + linear.bias)
    assert [name for name, p in holder.named_parameters() if p.requires_grad] == ["to_q.down.weight", "to_q.up.weight"]
    adapted(x).sum().backward()
    assert linear.weight.grad is None


def test_low_rank_corrections_change_nothing_in_wan_at_first():
    plain, small = build(), build(replace(WHOLE, lora=Lora(rank=1)))
    for video in (plain, small):  # the new layers draw numbers, so that those after them differ
        torch.manual_seed(1)
        for part in (video.network.condition_embedder.action, video.network.condition_embedder.token, video.mix):
            for parameter in part.parameters():
                nn.init.normal_(parameter, std=0.2)
        nn.init.zeros_(video.network.condition_embedder.slots)
    given = numbers(plain)
    torch.testing.assert_close(call(small, given).clean, call(plain, given).clean)
    learnt = {name for name, p in small.network.named_parameters() if p.requires_grad}
    assert not any(name.endswith(("linear.weight", "scale_shift_table")) for name in learnt)
    assert sum(".down." in name for name in learnt) == 2 * 10  # of 2 blocks: two attentions of 4, two of the MLP
    assert {"patch_embedding.maps.weight", "condition_embedder.slots"} <= learnt
    assert "patch_embedding.latents.weight" not in learnt


@dataclass(frozen=True)
class Foreign:
    """A transformer that does not belong to its autoencoder, or whose tokens hold several frames."""

    channels: int = 4
    joined: int = 1

    def load(self) -> tuple[Any, Any]:
        network, vae = WanSizes(channels=self.channels).load()[0], WanSizes().load()[1]
        network.register_to_config(patch_size=[self.joined, 2, 2])
        return network, vae


@pytest.mark.parametrize(
    ("config", "sizes", "message"),
    [
        ({"lora": Lora(rank=0)}, {}, "nothing to train"),
        ({"lora": Lora(layers=("nowhere",))}, {}, "nothing to train"),
        ({}, {"side": 12}, "multiples of 8 and 8"),
        ({"weights": WanSizes(positions=4)}, {}, "5 frames .* 4, so it cannot tell them apart"),
        ({"weights": WanSizes(positions=5)}, {"cameras": 3}, "3 cameras need 6"),
        ({"weights": Foreign(channels=8)}, {}, "takes 8 channels and gives 8, its autoencoder has 4"),
        ({"weights": Foreign(joined=2)}, {}, "joins 2 frames in a token"),
    ],
)
def test_what_does_not_fit_is_refused(config, sizes, message):
    with pytest.raises(UserError, match=message):
        build(replace(WHOLE, **config), **sizes)


def test_a_folder_that_is_not_wan_is_refused(networks, folder, tmp_path):
    def refused(message: str) -> None:
        with pytest.raises(UserError, match=message):
            WanFolder(str(tmp_path)).load()

    refused("has no config.json of diffusers")
    for name in ("transformer", "vae"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").write_bytes((folder / name / "config.json").read_bytes())
    weights = tmp_path / "transformer" / "diffusion_pytorch_model.safetensors"
    torch.save(networks[0].state_dict(), weights.with_suffix(".bin"))  # sound, but a pickle
    refused(r"no file named diffusion_pytorch_model.safetensors.*\(pickled weights are not read\)")
    weights.write_bytes(b"damaged")
    refused("cannot be loaded")
    own = json.loads((folder / "transformer" / "config.json").read_text())
    weights.write_bytes((folder / "transformer" / weights.name).read_bytes())
    (weights.parent / "config.json").write_text(json.dumps(own | {"num_layers": 3}))
    refused("missing from the weights")
    (weights.parent / "config.json").write_text(json.dumps(own | {"_class_name": "CogVideoXTransformer3DModel"}))
    refused("holds a CogVideoXTransformer3DModel")


def test_without_diffusers_the_extra_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "diffusers", None)
    with pytest.raises(UserError, match=r"diffusers with Wan is not installed.*pip install 'vla-rl\[world\]'"):
        build()
