"""Labelled frames from an environment: the scripted expert acts, partly at random, and the simulator labels."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from vla_rl.contract.env import Observation, VecEnv
from vla_rl.experience.driver import Driver
from vla_rl.experience.expert import ExpertPolicy
from vla_rl.recipes import sims
from vla_rl.recipes.env_config import EnvConfig
from vla_rl.rewards.frames import LabelledFrames

_HORIZON = 5


def label_frames(
    env_config: EnvConfig,
    claims: sims.Claims,
    seeds: list[int],
    num_envs: int,
    random_action_prob: float,
    random: np.random.Generator,
    report: Callable[[int], None] = lambda done: None,
) -> LabelledFrames:
    """Every frame of one episode per seed of ``seeds``, under every instruction that ``claims`` makes a claim about.

    The instruction names a distractor.  In a share ``random_action_prob`` of its decisions the expert moves at random,
    so that there are misses, drops and detours to learn from.  ``episode`` is the episode's seed.
    """
    env, expert = env_config.make_swapped(min(num_envs, len(seeds))), env_config.make_expert(_HORIZON)
    parts: list[LabelledFrames] = []
    for start in range(0, len(seeds), env.num_envs):
        batch = seeds[start : start + env.num_envs]
        parts += _play(env, expert.act, claims, batch, random_action_prob, random)
        report(start + len(batch))
    env.close()
    return LabelledFrames.concatenate(parts)


def _play(
    env: VecEnv,
    act: Callable[[Observation], np.ndarray],
    claims: sims.Claims,
    seeds: list[int],
    random_action_prob: float,
    random: np.random.Generator,
) -> list[LabelledFrames]:
    """One batch of episodes; environments beyond ``seeds`` replay the last seed and are not kept."""
    kept, texts = np.arange(env.num_envs) < len(seeds), np.array(env.spec.tasks)
    low, high = (np.asarray(bound, np.float32) for bound in (env.spec.action.low, env.spec.action.high))

    def act_epsilon_randomly(obs: Observation) -> np.ndarray:
        chunk = act(obs)
        lost = random.random(len(chunk)) < random_action_prob
        chunk[lost] = random.uniform(low, high, chunk[lost].shape)
        return chunk

    driver, parts = Driver(env, ExpertPolicy(act_epsilon_randomly), None, observe="all"), list[LabelledFrames]()
    driver.start(seeds)
    for decision in driver.until_done():
        for h, frame in enumerate(decision.step.frames):
            for task, label, known in claims(frame):
                chosen = decision.step.valid[:, h] & known & kept
                if chosen.any():
                    images = {name: image[chosen] for name, image in frame.images.items()}
                    parts.append(LabelledFrames(images, texts[task[chosen]], label[chosen], decision.seeds[chosen]))
    return parts
