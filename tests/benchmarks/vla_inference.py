"""Deciding with SmolVLA: ours against LeRobot's own, on the same weights, pictures, prompts and noise.

LeRobot wants other versions of packages that both need, so it runs in a process of its own, with the same interpreter
and the same torch; the two take turns.  Once, beside ``make install`` (``lerobot.txt`` has the versions)::

    .venv/bin/pip install --no-deps --target .cache/lerobot -r tests/benchmarks/lerobot.txt
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import torch

from tests.benchmarks.measure import Contender, NotRun, Row, interleave, rate_row
from tests.benchmarks.vla_sizes import QUARTER, TINY, Scene, parameters_of, policy_of
from tests.golden.vla.weights import weight
from vla_rl.policies.smolvla.shape import SmolVLAShape
from vla_rl.policies.vla.flow_vla import FlowVLA
from vla_rl.policies.vla.options import VLAOptions

_ROOT = Path(__file__).resolve().parents[2]
PACKAGES = _ROOT / ".cache" / "lerobot"
INSTALL = ".venv/bin/pip install --no-deps --target .cache/lerobot -r tests/benchmarks/lerobot.txt"
THEIRS = (sys.executable, str(Path(__file__).with_name("lerobot_smolvla.py")))
GROUP = "inference_vs_lerobot"
SIZES = {"tiny": (TINY, Scene(side=32, words=8)), "quarter": (QUARTER, Scene())}


def inference_vs_lerobot(quick: bool = False) -> list[Row]:
    """Actions per second of ten denoising steps, one observation or eight at a time; raises NotRun without LeRobot."""
    if not (PACKAGES / "lerobot").is_dir():
        raise NotRun(f"not run: LeRobot is not in .cache/lerobot; install it once with {INSTALL}")
    return rows(THEIRS, ("tiny",) if quick else tuple(SIZES), repeats=1 if quick else 5)


def rows(theirs: Sequence[str], sizes: Sequence[str], repeats: int) -> list[Row]:
    """A row for each of ``sizes`` and batch; ``theirs`` is the command that decides on the other side.

    Raises AssertionError when the two decide differently (1e-4).
    """
    found = []
    for size in sizes:
        shape, scene = SIZES[size]
        policy = policy_of(shape, scene, VLAOptions())
        with torch.no_grad():
            for name, tensor in policy.network.state_dict().items():
                tensor.copy_(torch.from_numpy(weight(name, tensor.shape)))
        with asked([*theirs, *_configs(shape, scene)]) as ask, tempfile.TemporaryDirectory() as folder:
            for batch in (1, 8):
                path = Path(folder) / f"{batch}.npz"
                contenders = {"ours": Contender(_decide(policy, scene, batch, path)), "other": Contender(ask(path))}
                gap = _gap(contenders, path)
                seconds = interleave(contenders, repeats)
                pair, amounts = (seconds["ours"], seconds["other"]), batch * shape.chunk
                detail = {"batch": batch, "millions": round(parameters_of(policy) / 1e6, 1), "gap": f"{gap:.1e}"}
                name = f"{GROUP}_{size}_{batch}"
                found.append(rate_row(name, GROUP, amounts, pair, "actions/s", **detail))
    return found


def _decide(policy: FlowVLA, scene: Scene, batch: int, path: Path) -> Any:
    """Our side, from pictures to actions; writes for the other side what it sees."""
    obs, (count, size) = scene.observe(batch), policy.latent_shape
    noise = torch.randn(batch, count * size, generator=torch.Generator().manual_seed(0))
    given = {f"observation.images.{name}": image for name, image in obs.images.items()}
    tokens, mask = (np.repeat(item.numpy(), batch, 0) for item in (policy.tokens, policy.token_mask))
    np.savez(path, **given, state=obs.state, tokens=tokens, mask=mask, noise=noise.reshape(batch, count, size).numpy())

    def decide() -> torch.Tensor:
        generator = torch.Generator().manual_seed(0)
        return policy.act(policy.encode(obs), {}, "eval", generator)[0].sample

    return decide


def _gap(contenders: dict[str, Contender], path: Path) -> float:
    """By how much the two differ at most."""
    ours: Any = contenders["ours"].run()
    contenders["other"].run()
    gap = float(np.abs(ours.numpy() - np.load(path.with_suffix(".npy"))).max())
    assert gap <= 1e-4, f"the two decide differently, by {gap}"
    return gap


@contextmanager
def asked(command: Sequence[str], first: str = "") -> Iterator[Any]:
    """``ask(line)``: a call that lets ``command``, which runs meanwhile, do what ``line`` says, such as a path.

    It is said ``first`` line before it is ready.
    """
    paths = os.pathsep.join(filter(None, (str(PACKAGES), os.environ.get("PYTHONPATH"))))
    options: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    with subprocess.Popen(command, env={**os.environ, "PYTHONPATH": paths, "OMP_NUM_THREADS": "1"}, **options) as side:
        assert side.stdin is not None and side.stdout is not None

        def answer(word: str) -> None:
            said = side.stdout.readline().strip()
            assert said == word, f"the other side ended or said {said!r}, see above"

        def say(line: object) -> None:
            side.stdin.write(f"{line}\n")
            side.stdin.flush()

        def ask(line: object) -> Any:
            return lambda: (say(line), answer("done"))

        try:
            if first:
                say(first)
            answer("ready")
            yield ask
        finally:
            side.stdin.close()
            side.terminate()


def _configs(shape: SmolVLAShape, scene: Scene) -> tuple[str, str]:
    """``config.json`` of a LeRobot folder with these sizes, and of its vision-language model."""
    vision, text, picture = shape.vision, shape.text, [3, scene.side, scene.side]
    vlm: dict[str, Any] = {
        "scale_factor": shape.pixel_shuffle,
        "vision_config": asdict(vision),
        "text_config": {"model_type": "llama", **asdict(text)},
    }
    config: dict[str, Any] = {
        "max_state_dim": shape.state_size,
        "max_action_dim": shape.action_size,
        "chunk_size": shape.chunk,
        "n_action_steps": shape.chunk,
        "num_vlm_layers": text.num_hidden_layers,
        "resize_imgs_with_padding": shape.picture,
        "vlm_model_name": "made/up",
    }
    assert SmolVLAShape.from_lerobot(config, vlm) == shape
    cameras = {f"observation.images.camera{i}": ("visual", picture) for i in range(scene.cameras)}
    config["input_features"] = {**cameras, "observation.state": ("state", [scene.state])}
    config["output_features"] = {"action": ("action", [scene.action])}
    return json.dumps(config), json.dumps(vlm)
