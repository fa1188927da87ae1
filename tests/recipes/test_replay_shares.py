"""What a batch of an off-policy run consists of."""

from __future__ import annotations

from typing import Any

from tests.experience.test_mixture import Learner, episode
from tests.toys import seeded
from vla_rl.experience.mixture import Strata
from vla_rl.experience.replay import Replay
from vla_rl.recipes.trainers import AdaptiveReplay, ReplayConfig


def joined(config: ReplayConfig) -> Any:
    online, recorded = Replay(100, 1.0), Replay(100, 1.0)
    online.add(episode(0, 0))
    online.add(episode(100, 0, human=True))
    recorded.add(episode(200, 0))
    return config.joined(online, {"demonstrations": recorded} if config.share else {}, Learner())  # type: ignore[arg-type]


def parts(buffer: Any) -> list[int]:
    numbers = (buffer.sample(100, seeded()).features["id"] // 100).flatten().tolist()
    return [numbers.count(part) for part in range(3)]


def test_corrections_have_a_share_of_their_own_besides_being_drawn_with_the_others() -> None:
    autonomous, corrected, recorded = parts(joined(ReplayConfig(share=0.25, corrections=0.5)))
    assert recorded == 25 and autonomous + corrected == 75 and corrected > 50
    autonomous, corrected, recorded = parts(joined(ReplayConfig(share=0.0, corrections=0.5)))
    assert recorded == 0 and corrected > 60


def test_without_shares_the_replay_is_the_runs_own() -> None:
    assert isinstance(joined(ReplayConfig(share=0.0)), Replay)


def test_an_adaptive_replay_draws_by_strata() -> None:
    buffer = joined(AdaptiveReplay(share=0.25, max_age=7))
    assert isinstance(buffer, Strata) and buffer.max_age == 7
    assert buffer.counts().tolist() == [[3, 3, 3]]
    assert joined(AdaptiveReplay(share=0.0)).counts().tolist() == [[3, 3, 0]]
