"""A cart on a rail that should stop at the middle."""

import numpy as np

from vla_rl.contract.env import ArraySpec, EnvSpec, Observation
from vla_rl.contract.tracker import SUCCESS, TIME_LIMIT, EpisodeTracker


class Rail:
    def __init__(self, num_envs, time_limit):
        position, push = ArraySpec((1,), "float32", -2, 2, unit="m"), ArraySpec((1,), "float32", -0.3, 0.3, unit="m")
        self.spec = EnvSpec("rail", {}, position, push, ("stop",), 0.1, time_limit, time_limit)
        self.num_envs, self.book, self.x = num_envs, EpisodeTracker(num_envs), np.zeros((num_envs, 1), np.float32)

    def reset(self, env_ids, seeds):
        env_ids = self.book.index(env_ids)
        self.book.begin(env_ids, self.book.seeds(env_ids, seeds))
        self.x[env_ids, 0] = [np.random.default_rng(int(seed)).uniform(-1, 1) for seed in seeds]
        return Observation({}, self.x.copy(), np.zeros(self.num_envs, np.int64), self.book.time.copy())

    def step(self, chunk, observe="last"):
        action, frames = self.book.chunk(chunk, self.spec), []
        reward, valid = np.zeros(action.shape[:2], np.float32), np.zeros(action.shape[:2], bool)
        for h in range(action.shape[1]):
            active = np.flatnonzero(~self.book.done)
            valid[active, h], self.book.time[active] = True, self.book.time[active] + 1
            self.x[active] = np.clip(self.x[active] + action[active, h], -2, 2)
            near, late = np.abs(self.x[active, 0]) < 0.2, self.book.time[active] >= self.spec.time_limit
            self.book.end(active, near, np.select([near, late], [SUCCESS, TIME_LIMIT], 0))
            reward[active, h] = near
            frames.append(Observation({}, self.x.copy(), np.zeros(self.num_envs, np.int64), self.book.time.copy()))
        return self.book.step(frames[-1], reward, valid, action, frames if observe == "all" else ())

    def close(self):
        pass


def make(num_envs, time_limit=8):
    return Rail(num_envs, time_limit)
