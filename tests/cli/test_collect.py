"""``vla-rl collect``: demonstrations on disk, all of them successes, the same for the same seed."""

from __future__ import annotations

import numpy as np

from vla_rl.cli.main import main
from vla_rl.evaluation import suite
from vla_rl.experience.episodes import Episodes


def collect(path, *arguments) -> Episodes:
    main(["collect", "--count", "3", "--out", str(path), *arguments])
    return Episodes.load(path)


def test_demonstrations_are_kept_with_everything_that_imitation_needs(tmp_path, capsys):
    episodes = collect(tmp_path / "new" / "demonstrations.npz")
    assert "3 episodes" in capsys.readouterr().err
    assert episodes.count == 3
    assert episodes.images["front"].shape == (len(episodes.state), 64, 64, 3)
    assert set(np.diff(episodes.episode)) == {0, 1}
    assert np.array_equal(episodes.time[np.diff(episodes.episode, prepend=-1) == 1], [0, 0, 0])
    assert set(episodes.seed) <= set(suite.training_seeds(1, "demonstrations"))


def test_the_seed_decides_and_options_reach_the_environment(tmp_path):
    small = ("--world.options", '{"image_size": 16}')
    one, again, other = (collect(tmp_path / "e.npz", "--seed", seed, *small) for seed in ("5", "5", "6"))
    assert one.images["front"].shape[1:] == (16, 16, 3)
    assert np.array_equal(one.action, again.action)
    assert not np.array_equal(one.action[:10], other.action[:10])


def test_what_cannot_be_recorded_is_said(complaint, tmp_path):
    """An expert that never succeeds, and a place that cannot be written to."""
    idle = ("--world.expert", "sims.mujoco.tasks.lift_expert:LiftExpert", "--world.options", '{"deadline": 2}')
    assert "none of 2 demonstrations" in complaint("collect", "--count", "2", *idle, "--out", tmp_path / "e.npz")
    (tmp_path / "file").touch()
    out = tmp_path / "file" / "e.npz"
    assert "nothing there has changed" in complaint("collect", "--count", "1", "--out", out)
