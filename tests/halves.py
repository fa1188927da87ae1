"""An environment in two halves, which pretend to compute elsewhere and note when they are asked and waited for."""

from __future__ import annotations

from sims.catalog import make


class Later:
    """Half of an environment that computes elsewhere: a step is computed when it is waited for; ``log`` says when."""

    def __init__(self, name: str, env_name: str, num_envs: int, log: list[str]) -> None:
        self.env, self.name, self.log = make(env_name, num_envs=num_envs), name, log
        self.spec, self.num_envs, self.close = self.env.spec, num_envs, self.env.close
        self.snapshot, self.restore = self.env.snapshot, self.env.restore
        self.asked = None

    def reset(self, env_ids, seeds):
        assert self.asked is None, "a reset gives a step up"
        return self.env.reset(env_ids, seeds)

    def step(self, chunk, observe="last"):
        raise AssertionError("nobody may wait for one half alone")

    def step_async(self, chunk, observe="last"):
        assert self.asked is None
        self.log.append(f"begin {self.name}")
        self.asked = chunk.copy(), observe

    def step_wait(self):
        self.log.append(f"wait {self.name}")
        asked, self.asked = self.asked, None
        return self.env.step(*asked)


class Split:
    """An environment with two halves of unequal size where the number is odd."""

    def __init__(self, num_envs: int, name: str = "counting") -> None:
        self.log: list[str] = []
        sizes = num_envs // 2, num_envs - num_envs // 2
        self.parts = [Later("first", name, sizes[0], self.log), Later("second", name, sizes[1], self.log)]
        self.spec, self.num_envs = self.parts[0].spec, num_envs
        self.reset = self.step = None  # it is its halves that are stepped

    def halves(self):
        return tuple(self.parts)

    def close(self):
        self.log.append("closed")
