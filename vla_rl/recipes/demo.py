"""The demo: imitation, reinforcement learning and a page about both."""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from dataclasses import asdict, dataclass, field
from operator import itemgetter

import numpy as np

from vla_rl.contract.config import JsonMapping, JsonObject
from vla_rl.contract.env import Observation, Observe, Step, VecEnv, on_host
from vla_rl.evaluation import seed_ranges
from vla_rl.evaluation.report import Bar, Clip, Report, Series, Tile, percent
from vla_rl.evaluation.run import Outcomes
from vla_rl.evaluation.stats import paired_successes
from vla_rl.experience.driver import Driver
from vla_rl.policies.tiny import TinyVLA
from vla_rl.recipes.env_config import EnvConfig
from vla_rl.recipes.evaluators import play
from vla_rl.recipes.imitate import Imitate, NewTiny
from vla_rl.recipes.improve import Improve
from vla_rl.recipes.metrics import curve_of, validation_curve
from vla_rl.recipes.perception_ablation import PerceptionAblation, ablate_perception
from vla_rl.recipes.terminal import clock, console
from vla_rl.recipes.trainers import RLConfig, generator
from vla_rl.recipes.workers import workers
from vla_rl.training.device import shared
from vla_rl.training.tracking import RunFolder


@dataclass(frozen=True)
class Demo(Imitate):
    """Imitation and RL from nothing, both evaluated on the same test seeds, and a page about them."""

    rl: RLConfig
    new: NewTiny = field(default_factory=NewTiny, kw_only=True)

    def run(self, folder: RunFolder) -> JsonObject:
        """Collect, ground, imitate, improve, evaluate, report."""
        seconds: dict[str, float] = {}
        if self.evaluation.processes > 1:
            workers(self.evaluation.processes)  # they start meanwhile
        grounded, episodes = self.ground(folder, seconds)
        assert isinstance(grounded, TinyVLA)  # what NewTiny builds
        with shared() if self.evaluation.processes > 1 else nullcontext():
            imitation = self.imitate(grounded, episodes, folder, seconds)
            assert isinstance(imitation, TinyVLA)
        with clock(seconds, "evaluation"):
            tests = seed_ranges.held_out(seed_ranges.TEST, self.evaluation.test)
            first = play(self.env, imitation, tests, self.evaluation, self.seed, "test imitation")
        console.print(f"imitation: {first.rate.success:.1%} of {first.rate.episodes} test episodes")
        policy = copy.deepcopy(imitation)
        improve = Improve(self.rl, "", seed=self.seed, env=self.env, evaluation=self.evaluation, device=self.device)
        last, summary = improve.improve(policy, folder, seconds)
        console.print(f"after RL:  {last.rate.success:.1%}")
        with clock(seconds, "evaluation"):
            both = {"imitation": imitation, "RL": policy}
            perception = ablate_perception(self.env, both, self.evaluation, self.seed)
        ablated = {who: asdict(item) for who, item in perception.items()}
        summary = {"imitation": asdict(first.rate), **summary, "perception": ablated}
        folder.write_summary(summary)  # safe before the page is made
        with clock(seconds, "report"):
            noise = self.rl.noise()
            content = DemoReport(self.env, imitation, policy, first, last, perception, self.seed, noise)
            write_report(content, summary, folder)
        summary["seconds"] = {name: round(value, 1) for name, value in seconds.items()}
        return summary


_CLIP_SIZE = 192  # pixels
_CLIPS = 4  # of each kind
_TRIED = 16  # scenes of each kind that are played to find them


@dataclass(frozen=True)
class DemoReport:
    """What the page is about."""

    env: EnvConfig
    imitation: TinyVLA
    policy: TinyVLA
    first: Outcomes  # imitation on the test seeds
    last: Outcomes  # the policy after RL on the same seeds
    perception: Mapping[str, PerceptionAblation]
    seed: int
    sampler: str


def write_report(content: DemoReport, summary: JsonMapping, folder: RunFolder) -> None:
    """Write ``report.html`` into ``folder``."""
    first, last = content.first.rate, content.last.rate
    report = Report(
        f"{first.success:.0%} by imitation, {last.success:.0%} after reinforcement learning",
        "A small vision-language-action policy, taught on two CPU cores from 64x64 pixels and an instruction",
    )
    _headline(report, content, summary)
    _curves(report, folder.metrics("rl"))
    _videos(report, content)
    _perception(report, content.perception)
    _imitation(report, content, folder)
    _fine_print(report, content, summary)
    report.write(folder.path / "report.html")


def _headline(report: Report, content: DemoReport, summary: JsonMapping) -> None:
    pairs = paired_successes(content.last.success, content.first.success)
    gain, episodes = pairs.difference, f"{pairs.episodes} test episodes"
    report.tiles(
        [
            Tile.of("Imitation", content.first.rate, episodes),
            Tile.of("After RL", content.last.rate, episodes, "good"),
            Tile("Gain", gain.mean, gain.low, gain.high, note="same episodes, Tango's score interval"),
        ]
    )
    report.text(
        "The task is to lift the cube that the instruction names, among others, and hold it up. On the same "
        f"{pairs.episodes} test scenes RL mended **{pairs.first_alone}** failures of imitation and broke "
        f"**{pairs.second_alone}** of its successes (McNemar's exact test: p = {pairs.p_value:.2g}). It used "
        f"{summary['env_steps']:,} control steps in {summary['episodes']:,} episodes and a reward of 1 for success, "
        "nothing else. All intervals are 95 %."
    )


def _curves(report: Report, rows: list[JsonObject]) -> None:
    report.section("Learning curves")
    report.curves(
        "Success on validation scenes",
        "control steps",
        "success",
        [
            validation_curve("deployed policy", rows, "env/steps_total"),
            _line(rows, "exploring policy", lambda row: row["rollout/successes"] / max(1, row["rollout/episodes"])),
        ],
        percent=True,
    )
    for title, unit, name, key in (
        ("Exact KL per update", "nats", "last epoch", "policy/kl_last"),
        ("Noise of the sampler", "standard deviation", "mean", "policy/noise_std"),
        ("Variance explained by the critic", "share", "critic", "critic/explained_variance"),
    ):
        if any(key in row for row in rows):
            report.curves(title, "control steps", unit, [_line(rows, name, itemgetter(key))])


def _line(rows: list[JsonObject], name: str, value: Callable[[JsonObject], float]) -> Series:
    rows = [row for row in rows if "time/env_s" in row]
    values = np.array([value(row) for row in rows], dtype=float)
    window = min(5, max(1, len(values)))
    smooth = np.convolve(values, np.ones(window) / window, mode="valid") if len(values) else values
    return Series(name, [row["env/steps_total"] for row in rows][window - 1 :], smooth.tolist())


def _videos(report: Report, content: DemoReport) -> None:
    """Every clip is played anew, with other noise than the test; so they are sorted by what they show."""
    a, b, seeds = content.first.success, content.last.success, content.first.seeds
    chosen = np.concatenate([seeds[~b][:_TRIED], seeds[~a & b][:_TRIED], seeds[a & b][:_CLIPS]])
    before = record_clips(content.env, content.imitation, chosen, content.seed)
    after = record_clips(content.env, content.policy, chosen, content.seed)
    pairs = list(zip(before, after, strict=True))
    mended = [pair for pair in pairs if not pair[0].success and pair[1].success][:_CLIPS]
    report.section(
        "Clips",
        "Scenes of the test, played once more and in real time; green frames succeed, red ones fail.",
    )
    report.videos("Imitation fails ...", [first for first, _ in mended])
    report.videos("... the same scenes after RL", [last for _, last in mended])
    report.videos("Imitation succeeds", [first for first, _ in pairs if first.success][:_CLIPS])
    report.videos("Where the final policy still fails", [last for _, last in pairs if not last.success][:_CLIPS])


class _FilmedEnv:
    """``env`` with a picture of each running environment after the reset and every control step, in ``frames``."""

    def __init__(self, env: VecEnv) -> None:
        self.env, self.spec, self.num_envs, self.close = env, env.spec, env.num_envs, env.close
        self.frames: list[list[np.ndarray]] = [[] for _ in range(env.num_envs)]

    def reset(self, env_ids: np.ndarray, seeds: np.ndarray) -> Observation:
        obs = self.env.reset(env_ids, seeds)
        self._film(obs, env_ids)
        return obs

    def step(self, chunk: np.ndarray, observe: Observe = "last") -> Step:
        """The last of ``chunk``'s single steps, whose flags are latched."""
        running = np.arange(self.num_envs)
        for i in range(chunk.shape[1]):
            step = self.env.step(chunk[:, i : i + 1], observe)
            self._film(step.obs, running[on_host(step.valid)[:, 0]])
        return step

    def _film(self, obs: Observation, env_ids: np.ndarray) -> None:
        """Rendered for people where the environment can (not in another process), else as its first camera shows it."""
        if hasattr(self.env, "render_rows"):
            pictures = self.env.render_rows(env_ids, _CLIP_SIZE)
        else:
            pictures = on_host(next(iter(obs.images.values())))[env_ids]
        for env_id, picture in zip(env_ids, pictures, strict=True):
            self.frames[env_id].append(picture)


def record_clips(env_config: EnvConfig, policy: TinyVLA, seeds: np.ndarray, seed: int) -> list[Clip]:
    """Play ``seeds`` side by side, rendering after every control step."""
    if not len(seeds):
        return []
    env = _FilmedEnv(env_config.make(len(seeds)))
    driver = Driver(env, policy, generator(seed, 6), "eval")
    driver.start(seeds)
    *_, last = driver.until_done()
    env.close()
    step = last.step
    return [
        Clip(
            np.stack(env.frames[i]),
            f"{env.spec.tasks[int(step.obs.task[i])]} (seed {seeds[i]}): {step.cause[i].replace('_', ' ')}",
            bool(step.success[i]),
            fps=1 / env.spec.control_dt,
        )
        for i in range(len(seeds))
    ]


def _perception(report: Report, perception: Mapping[str, PerceptionAblation]) -> None:
    report.section(
        "Perception ablations",
        "The same validation scenes with black images, with the images of other episodes, and with an instruction that "
        "names a distractor: then that cube should be lifted and the former target left alone.",
    )
    views = ["named cube lifted", "images black", "images of others", "swapped: named cube", "swapped: original target"]
    report.table(["policy", *views], [[name, *map(percent, vars(item).values())] for name, item in perception.items()])


def _imitation(report: Report, content: DemoReport, folder: RunFolder) -> None:
    report.section("Imitation")
    losses = curve_of("imitation", folder.metrics("imitation"), "step", "loss")
    report.curves("Flow-matching loss", "step", "loss", [losses])
    report.bars(
        "Test success", [Bar.of("imitation", content.first.rate, reference=True), Bar.of("after RL", content.last.rate)]
    )


def _fine_print(report: Report, content: DemoReport, summary: JsonMapping) -> None:
    ends = sorted(Counter(content.last.cause).items())
    report.section(
        "How it was done",
        "The backbone was first **grounded**: it learnt on rendered random scenes to point at what a caption names. "
        "That stands in for a pretrained vision-language model, and it uses labels only a simulator gives (where in "
        "the image an object is), but no demonstration and no success label. It is frozen afterwards; imitation and RL "
        "train the connector and the flow expert. The weights were chosen on validation seeds; the test seeds were "
        "played once.",
    )
    report.table(
        ["what", "value"],
        [
            ["sampler", content.sampler],
            ["parameters", f"{sum(p.numel() for p in content.policy.parameters()):,}"],
            ["training seed", str(content.seed)],
            ["test seeds", f"{content.first.seeds[0]} to {content.first.seeds[-1]}"],
            ["how test episodes ended after RL", ", ".join(f"{name.replace('_', ' ')} {n}" for name, n in ends)],
            *[[f"seconds: {name}", f"{value:.0f}"] for name, value in summary["seconds"].items()],
        ],
    )
    report.command(f"vla-rl demo --seed {content.seed}")
