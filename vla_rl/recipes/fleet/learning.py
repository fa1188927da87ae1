"""``python -m vla_rl.recipes.fleet.learning FOLDER KEY``: the learner of a fleet, a child of its server.

It reads the ledger's records from standard input, writes its run to ``FOLDER/learner``, publishes to
``FOLDER/registry``, signed with the key in the file ``KEY``, and says how it goes on standard output; what both ends
write is in ``fleet/server.py``.  Killed at any moment, it goes on from its last publication: each episode behind that
is learnt from again, each before it is not.  With its weights it saves where in the ledger the oldest episode begins
that is not in them, and the server sends records from there on.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np

from vla_rl.contract.errors import ContractError, NonFiniteError, UserError
from vla_rl.experience.datasets import load_demonstrations
from vla_rl.fleet.episodes import EpisodeReader, FleetEpisode, tell_log
from vla_rl.fleet.manifest import SigningKey, spec_hash
from vla_rl.fleet.record import FleetRecord
from vla_rl.fleet.registry import Registry
from vla_rl.fleet.server import INBOX, REGISTRY, Inbox
from vla_rl.policies.pretrained import load_policy
from vla_rl.pretrained import save_own
from vla_rl.recipes.config_files import load_kept_files
from vla_rl.recipes.fleet.learners import LEARNER, Learn
from vla_rl.recipes.fleet.publishing import publish
from vla_rl.training.device import alone
from vla_rl.training.tracking import RunFolder

_WAIT_S = 0.1  # for records, when there is nothing to learn
_SAY_S = 1.0  # between two messages to the server
_NOT_GIVEN = "robots do not get what was learnt and keep what they run"
_NOT_SAVED = "what was learnt is not saved, so a learner that is killed now learns it again"
_NUMBERS = ("position", "episodes", "updates", "published")  # of the state
_TOLD, _ROBOTS = 10, 1000  # alarms of one robot in a life of this process, and robots that have any


class Learning:
    """The learner of ``config``, which goes on with what is in ``run``."""

    def __init__(
        self,
        config: Learn,
        run: RunFolder,
        releasing: Releasing,
        alarm: Callable[[str], None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.config, self.run, self.releasing, self._alarm, self._clock = config, run, releasing, alarm, clock
        base: Any = load_policy(config.policy)
        shown = load_demonstrations(config.demonstrations).for_env(base.spec)
        self.learner: Any = config.method.build(base, shown, config.seed)
        self.position, self.episodes, self.updates, self.published = 0, 0, 0, 0
        self._known = dict[int, bytes]()  # the ends of episodes that it has learnt from, or put aside: their hashes
        self.metrics: dict[str, float] = {}
        self._reader, self._complained = EpisodeReader(self._complain), dict[str, set[str]]()
        self._last = b""  # by which the record at ``position`` is known again
        self._begin = 1  # the first record that it needs again
        self._robots = set[str]()  # that ended an episode since the last publication
        self._saved = 0  # updates that the newest state has
        self._restore()
        if not self._finite():
            raise UserError("the policy's weights are not finite, so nothing can be learnt; begin with another policy.")
        self._heard, self._due, self._again = -float("inf"), clock(), -float("inf")
        self.learner.policy.version = releasing.newest

    # -- what robots sent -------------------------------------------------------------------------------------------

    def take(self, position: int, record: FleetRecord) -> None:
        """The next record of the ledger; episodes that were learnt from before it was killed are passed over.

        One is known by the position and the hash of its end: in a ledger that was set back to a copy, others are there.
        """
        if position < self._begin:  # so all of them come again
            self._reader, self._begin = EpisodeReader(self._complain), 1
        ends, self.position, self._last = record.kind == "episode_end", position, _name(record)
        if ends and self._known.get(position) == _name(record):
            self._reader.skip(record, position)
            return
        episode = self._reader.add(record, position)
        if ends:
            self._known[position] = _name(record)
        if episode is not None:
            self._learn_from(episode)

    def wanted(self) -> dict[str, Any]:
        """Which records it needs, for ``Wanted`` at the server's end."""
        return {"begin": self._begin, "position": self.position, "name": self._last.hex()}

    def _learn_from(self, episode: FleetEpisode) -> None:
        policy, stages = self.learner.policy, self.releasing.registry.releases.stages
        policy.version = max([policy.version, *stages])
        try:
            if spec_hash(episode.spec) != spec_hash(policy.spec):
                raise ContractError("it has other cameras, another state, other actions or another control rate")
            self.learner.add(self.config.method.rollout(policy, episode, stages))
        except (ContractError, NonFiniteError) as error:
            self._complain(episode.sender.robot, episode.name, str(error))
            return
        self.episodes += 1
        self._robots.add(episode.sender.robot)
        self._heard = self._clock()

    def _complain(self, robot: str, episode: str, why: str) -> None:
        """Put an episode aside by its name: all are in the log, and every reason of a robot is an alarm once."""
        tell_log(robot, episode, why)
        if robot not in self._complained and len(self._complained) == _ROBOTS:
            return
        told = self._complained.setdefault(robot, set())
        if why not in told and len(told) < _TOLD:
            told.add(why)
            self._alarm(
                f"nothing is learnt from episode {episode} of robot {robot} and others like it ({why}); they are "
                "stored, so look at that robot, or serve robots of another kind from a folder of their own."
            )

    # -- learning ---------------------------------------------------------------------------------------------------

    def turn(self) -> bool:
        """Some updates, if they are due, and what follows from them; returns whether there were any."""
        self._write(self.releasing.promote, _NOT_GIVEN)
        now, config = self._clock(), self.config
        if now < self._due or now - self._heard > config.rest_after:
            return False
        metrics = self._learnt()
        if not metrics:
            return False
        self.metrics, self.updates = metrics, self.updates + config.turn
        self._due = max(now, self._due) + config.turn / config.updates_per_second
        if self.updates - self.published >= config.publish_every and self._robots and self.releasing.free():
            self._write(self.publish, _NOT_GIVEN)
        if self._saved < self.published:
            self._write(self.keep, _NOT_SAVED)
        return True

    def _write(self, change: Callable[[], object], otherwise: str) -> None:
        """Have ``change`` write to the fleet's folder; where that fails, it is tried again in a while."""
        if self._clock() < self._again:
            return
        try:
            change()
        except (OSError, UserError) as error:
            self._again = self._clock() + self.config.rest_after
            self._alarm(f"{otherwise} ({error.__cause__ or error}); it is tried again in {self.config.rest_after:g} s.")

    def _learnt(self) -> dict[str, float]:
        """The metrics of some gradient steps; none where the numbers went wrong, and the last good state is back."""
        try:
            metrics: dict[str, float] = self.learner.learn(self.config.turn)
            if self._finite():
                return metrics
            why = "a weight is not finite"
        except (ContractError, NonFiniteError) as error:
            why = str(error)
        state = self.run.load_state(LEARNER)
        assert state is not None, "one is saved at the beginning"
        self.learner.load_state_dict(state["learner"])
        self._due = self._clock() + self.config.rest_after
        self._alarm(
            f"the learner went back to what it had learnt by update {state['updates']} ({why}), without the "
            f"{self.episodes - state['episodes']} episodes since; robots keep their policy and it learns from what "
            f"comes next, in {self.config.rest_after:g} s; lower its learning rate if it happens again."
        )
        return {}

    def _finite(self) -> bool:
        return all(bool(item.isfinite().all()) for item in self.learner.policy.trainable().values())

    def publish(self) -> None:
        """Give robots what was learnt."""
        checkpoint, policy = self.run.checkpoint("published"), self.learner.policy
        save_own(policy, checkpoint)
        why = f"{self.updates} updates, {self.episodes} episodes of robots"
        policy.version = max(policy.version, self.releasing.release(checkpoint, self._robots, why))
        self._robots = set()
        self.published = self.updates

    def keep(self) -> None:
        """Save the state and the metrics of what was published."""
        self.save()
        self.run.log(LEARNER, self.updates, self.seen())

    def end(self) -> None:
        """Save what was learnt since the last publication; a disk that takes nothing leaves the last good save."""
        try:
            self.save()
        except (UserError, OSError) as error:
            self._alarm(
                f"what was learnt since update {self._saved} is not saved ({error.__cause__ or error}); make room, and "
                "the learner goes on from there and learns it again from what robots sent."
            )

    def seen(self) -> dict[str, float]:
        return {
            **self.metrics,
            "version": float(self.learner.policy.version),
            "updates": float(self.updates),
            "episodes": float(self.episodes),
            "position": float(self.position),
        }

    def save(self) -> None:
        """Save everything that a later process needs to go on from here."""
        numbers = {name: getattr(self, name) for name in _NUMBERS}
        ends = (np.array([*self._known], np.int64), np.array([*map(list, self._known.values())], np.uint8))
        oldest = self._reader.oldest()
        numbers |= {"begin": self.position + 1 if oldest is None else oldest}
        seen = {"last": self._last.hex(), "reader": json.dumps(self._reader.state_dict())}
        learner = self.learner.state_dict()
        state = {**numbers, **seen, "robots": sorted(self._robots), "ends": ends, "learner": learner}
        self.run.save_state(self.updates, state)
        self._saved = self.updates

    def _restore(self) -> None:
        state = self.run.load_state(LEARNER)
        if state is None:
            self.save()
            return
        if missing := {*_NUMBERS, "begin", "last", "reader", "robots", "ends", "learner"} - state.keys():
            raise UserError(
                f"the state of the learner in {str(self.run.path)!r} has no {', '.join(sorted(missing))}, so it cannot "
                "go on: another vla-rl saved it; move that folder away, and it learns again from what robots sent."
            )
        self.learner.load_state_dict(state["learner"])
        for name in _NUMBERS:
            setattr(self, name, state[name])
        self._saved, self._robots = self.updates, set(state["robots"])
        self._begin, self._last = state["begin"], bytes.fromhex(state["last"])
        self._reader.load_state_dict(json.loads(state["reader"]))
        positions, names = (np.asarray(item) for item in state["ends"])
        self._known = {int(at): name.tobytes() for at, name in zip(positions, names, strict=True)}


def _name(record: FleetRecord) -> bytes:
    """By which an end of an episode is known again."""
    return record.hash[:8]


def until_the_server_ends(learning: Learning, inbox: Inbox, say: Callable[[dict[str, Any]], None]) -> None:
    """Learn from what comes in; the state is saved at the end."""
    say({"wanted": learning.wanted()})
    said, idle = -float("inf"), False
    while not inbox.ended:
        found = inbox.take(_WAIT_S if idle else 0.0)
        for position, record in found:
            learning.take(position, record)
        idle = len(found) < INBOX and not learning.turn()  # else there is more at once
        if time.monotonic() - said > _SAY_S:
            said = time.monotonic()
            say({"learner": learning.seen()})
    learning.end()


def main(given: Sequence[str]) -> int:
    """Run until the server ends; returns the exit code."""
    fleet, key = Path(given[0]), SigningKey.load(Path(given[1]))
    server = sys.stdout
    sys.stdout = sys.stderr  # libraries may print

    def say(message: dict[str, Any]) -> None:
        server.write(json.dumps(message) + "\n")
        server.flush()

    def alarm(sentence: str) -> None:
        say({"alarm": sentence})

    try:
        load_kept_files(fleet / LEARNER)
        with closing(RunFolder.resume(fleet / LEARNER)) as run, alone():
            config: Learn = run.config
            releasing = Releasing(Registry(fleet / REGISTRY, config.canary), key, config.patience)
            until_the_server_ends(Learning(config, run, releasing, alarm), Inbox(sys.stdin.buffer), say)
    except BrokenPipeError:  # the server was killed
        return 0
    except (UserError, ContractError, OSError) as error:
        alarm(f"the learner ends: {error}")
        return 1
    return 0


WHO = "learner"  # in the registry's history
KEPT = 10  # versions, besides those in use


class Releasing:
    """Versions of one learner, one on trial at a time; ``patience`` is how many seconds a trial may take.

    What a person tries, pins or promotes is left alone.
    """

    def __init__(
        self, registry: Registry, key: SigningKey, patience: float, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.registry, self._key, self._patience, self._clock = registry, key, patience, clock
        self._began = clock()  # the trial, as far as this process knows

    @property
    def newest(self) -> int:
        """The highest version that was published, by whomever; 0 for none."""
        return max([0, *self.registry.releases.stages])

    def free(self) -> bool:
        """Whether another version can be tried: none is on trial, or one of the learner's for too long."""
        canary = self.registry.releases.canary
        return canary is None or (self._own(canary) and self._clock() - self._began > self._patience)

    def promote(self) -> int | None:
        """Promote the learner's version on trial if its episodes are enough and not worse; returns it."""
        version, verdict = self.registry.releases.canary, self.registry.verdict()
        if version is None or verdict is None or not verdict.compared or verdict.rollback or not self._own(version):
            return None
        try:
            self.registry.promote(version, WHO, verdict.why)
        except UserError:  # a person was quicker
            return None
        return version

    def release(self, checkpoint: Path, robots: Iterable[str], why: str) -> int:
        """Publish ``checkpoint`` and have some of ``robots`` try it; returns its version.

        Where all are pinned, it stays staged.
        """
        version = publish(self.registry, self._key, checkpoint, why, WHO)
        try:
            self.registry.try_on(version, robots, WHO, why)
            self._began = self._clock()
        except UserError:
            pass
        self.registry.remove_old(KEPT, WHO, "newer ones are there")
        return version

    def _own(self, version: int) -> bool:
        return any(
            change["do"] == "publish" and change["version"] == version and change["who"] == WHO
            for change in self.registry.history()
        )


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
