"""A policy that imitates on a device that is not the host learns what it learns on the host."""

from __future__ import annotations

from dataclasses import replace

import torch
from safetensors.torch import load_file

from tests.cli import quick
from tests.elsewhere import ELSEWHERE, elsewhere
from vla_rl.recipes import imitate
from vla_rl.training.tracking import RunFolder


def trained(recipe, out):
    folder = RunFolder(out, recipe)
    recipe.run(folder)
    return load_file(folder.checkpoint("imitation") / "model.safetensors")


def test_imitation_on_the_device_of_the_config(tmp_path, monkeypatch):
    recipe, devices = quick.imitate_lift(), set()
    on_host = trained(recipe, tmp_path / "host")
    imitate_policy = imitate.imitate_policy

    def noted(policy, *given):
        devices.update(item.device for item in policy.parameters())
        imitate_policy(policy, *given)

    monkeypatch.setattr(imitate, "imitate_policy", noted)
    with elsewhere():
        on_device = trained(replace(recipe, device="meta"), tmp_path / "elsewhere")
    assert devices == {ELSEWHERE} and on_host.keys() == on_device.keys()
    for name, item in on_host.items():
        torch.testing.assert_close(item, on_device[name], rtol=1e-4, atol=1e-6, msg=name)
