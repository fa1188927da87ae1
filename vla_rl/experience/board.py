"""A folder in which learners leave their newest rollouts for each other, one file each.

    <learner>-<number>.rollout      a wire message (no pickle): contract version, what all learners share, the rollout

A file is written under another name, synced and renamed, so it is whole or not there, also for machines that share the
disk.  Every learner removes its own files alone, all but the newest ``keep``.  Nobody waits for anybody.

Several learners that read each other's rollouts, with importance weights.

The idea is SAPO's (Gensyn AI team 2025, arXiv 2509.08721), whose nodes learn from rollouts of their own and of others.
The paper reports cumulative rewards up to 94 % higher, of small language models on reasoning tasks.

    rollout of an update = own columns | columns of at most ``rollouts`` rollouts of others

Others' decisions have the version before the learner's own, so they count as stale: the log-probs that were recorded
when they were made are those of their behaviour, and the decoupled objective weighs them by
min(pi_prox / pi_behaviour, w_max), see ``algorithms/policy_gradient.py``.  As for stale decisions of one's own,
advantages and the critic's targets are those of the policy that acted.

Deviations from the paper: the importance weights; features, samples and log-probs are shared and not decoded text, so
learners must have the frozen part of their policies in common.
"""

from __future__ import annotations

import errno
import os
import re
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import torch

from vla_rl.contract import CONTRACT_VERSION
from vla_rl.contract.batch import ExperienceSource, Resumable, Rollout
from vla_rl.contract.errors import ContractError, UserError
from vla_rl.contract.policy import Policy
from vla_rl.contract.wire import read_message, write_message
from vla_rl.experience.background import saved_rollout
from vla_rl.experience.columns import moved, side_by_side
from vla_rl.experience.worker import as_arrays, as_tensors

_FILE = re.compile(r"([0-9a-f]{12})-(\d{8})\.rollout")
_GONE = (errno.ENOENT, errno.ESTALE)  # removed by its owner, on this disk or on a network's


class Board:
    """One learner's view of the folder: it publishes its own rollouts and reads those of others, each at most once.

    ``common`` says what all learners must have in common, for example the policy's frozen weights: rollouts with
    another text are refused.  ``learner`` is a random name; it, the numbers and what was read are the state (see
    ``Resumable``), so a resumed run is the same learner as before.
    """

    def __init__(self, folder: str | Path, common: str, keep: int = 4) -> None:
        """Make the folder; raises UserError where that is impossible."""
        self.folder, self.common, self.keep = Path(folder), common, keep
        self.learner = secrets.token_hex(6)
        self._published = 0  # the number of the last rollout
        self._read: dict[str, int] = {}  # {learner: the newest number read}, the one that was read last at the end
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise self._unusable(error) from error

    def publish(self, rollout: Rollout) -> None:
        """Leave ``rollout``; raises UserError where the folder cannot be written, and for bfloat16 entries."""
        for name, form in layout(rollout).items():
            if form.startswith("bfloat16"):
                raise UserError(
                    f"{name} is bfloat16, which a message cannot hold, so no rollout is shared; let the policy give "
                    "float32 features, or share nothing."
                )
        number = max([self._published, *self._numbers().get(self.learner, [])]) + 1
        message = {"contract_version": CONTRACT_VERSION, "common": self.common, "rollout": saved_rollout(rollout)}
        writing = self.folder / f"{self.learner}.writing"
        try:
            with writing.open("wb") as file:
                write_message(file, as_arrays(message))
                os.fsync(file.fileno())
            os.replace(writing, self._path(self.learner, number))
            self._published = number
            for old in self._numbers()[self.learner]:
                if old <= number - self.keep:
                    self._path(self.learner, old).unlink(missing_ok=True)
        except OSError as error:
            raise self._unusable(error) from error

    def newest(self, count: int) -> list[Rollout]:
        """At most ``count`` rollouts of others that were not read before, on the host; none is waited for.

        The newest of every learner come first, of those longest not read before the others, then the second newest.
        What is not among the newest ``keep`` of its owner is never read.  Raises UserError for a file that is damaged
        or not of this kind.
        """
        turns = {learner: turn for turn, learner in enumerate(self._read)}
        waiting = [
            (place, turns.get(learner, -1), learner, number)
            for learner, numbers in self._numbers().items()
            for place, number in enumerate(sorted(numbers, reverse=True))
            if learner != self.learner and self._read.get(learner, 0) < number and max(numbers) - number < self.keep
        ]
        found: list[tuple[str, int, Rollout]] = []
        for _, _, learner, number in sorted(waiting):
            if len(found) < count and (rollout := self._open(self._path(learner, number))) is not None:
                found.append((learner, number, rollout))
        for learner, number, _ in found:
            self._read[learner] = max(number, self._read.pop(learner, 0))
        return [rollout for _, _, rollout in found]

    def state_dict(self) -> dict[str, Any]:
        """See ``Resumable``."""
        read = [[learner, number] for learner, number in self._read.items()]
        return {"learner": self.learner, "published": self._published, "read": read}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.learner, self._published = state["learner"], state["published"]
        self._read = {learner: number for learner, number in state["read"]}

    def _numbers(self) -> dict[str, list[int]]:
        """{learner: the numbers of its rollouts}, in any order."""
        found: dict[str, list[int]] = {}
        try:
            for match in filter(None, map(_FILE.fullmatch, os.listdir(self.folder))):
                found.setdefault(match[1], []).append(int(match[2]))
        except OSError as error:
            raise self._unusable(error) from error
        return found

    def _path(self, learner: str, number: int) -> Path:
        return self.folder / f"{learner}-{number:08d}.rollout"

    def _open(self, path: Path) -> Rollout | None:
        """The rollout in ``path``; None where its owner has removed it meanwhile."""
        try:
            with path.open("rb") as file:
                return self._from_message(read_message(file), path)
        except OSError as error:
            if error.errno in _GONE:
                return None
            raise self._unusable(error) from error
        except (EOFError, ContractError, TypeError) as error:
            raise UserError(
                f"{str(path)!r} is damaged or no rollout, so nothing can be learnt from it; delete it."
            ) from error

    def _from_message(self, message: Any, path: Path) -> Rollout:
        match message:
            case {"contract_version": version, "common": str(common), "rollout": dict(arrays)}:
                if version == CONTRACT_VERSION and common == self.common:
                    rollout = Rollout(**as_tensors(arrays))
                    layout(rollout)
                    return rollout
        raise UserError(
            f"{str(path)!r} was left by a learner with another frozen policy, other scales or another version of "
            "vla-rl, so its actions would be misread; share only among runs that start from one checkpoint, in a "
            "folder of their own."
        )

    def _unusable(self, error: OSError) -> UserError:
        return UserError(
            f"the folder {str(self.folder)!r} cannot be used ({error}), so no rollout is shared; choose another folder "
            "or make it writable."
        )


def layout(rollout: Rollout) -> dict[str, str]:
    """{entry: dtype and shape of one decision}, such as ``{"features/state": "float32[8]"}``.

    Raises ContractError for entries that contradict each other in the number of decisions, environments or truncations.
    """
    length, width = rollout.reward.shape[:2]
    leading = {"features": (length + 1, width), "final_features": (len(rollout.final_index),)}
    leading["final_index"] = leading["final_features"]
    found = {}
    for item in fields(rollout):
        value, first = getattr(rollout, item.name), leading.get(item.name, (length, width))
        if item.name in ("info", "spans", "robot", "stream") or value is None:
            continue
        for name, array in value.items() if isinstance(value, Mapping) else [("", value)]:
            entry = f"{item.name}/{name}".rstrip("/")
            if tuple(array.shape[: len(first)]) != first:
                raise ContractError(f"{entry} is {list(array.shape)} and does not begin with {list(first)}.")
            found[entry] = f"{str(array.dtype).removeprefix('torch.')}{list(array.shape[len(first) :])}"
    return found


_APART = 1 << 40  # between the seeds of two learners: more than there are seeds


class SharedSource:
    """The ``ExperienceSource`` of one learner among several: ``source`` and beside it what others left on ``board``.

    ``policy`` is what the learner changes.  Nobody waits: where nothing new is there, a rollout is one's own alone.  So
    which rollouts meet depends on the learners' speed, and equal seeds do not give equal results.

    ``Rollout.others`` says which columns are others'.  Counters in ``info`` are of one's own; ``rollout/shared`` is the
    share of decisions that are others'.  Seeds of others are moved to negative numbers, so that a group of episodes
    never has members of two learners.  It is for on-policy learners: a replay buffer would continue one learner's
    episodes by another's.  It is ``Resumable`` if ``source`` is.
    """

    def __init__(self, source: ExperienceSource, board: Board, policy: Policy, rollouts: int = 1) -> None:
        self.source, self.board, self.policy, self.rollouts = source, board, policy, rollouts
        if isinstance(source, Resumable):
            self._resumable = source
            self.state_dict, self.load_state_dict = self._state, self._load

    def next(self) -> Rollout:
        """Collect, publish, and read; raises UserError for rollouts of another environment or another form."""
        own = self.source.next()
        self.board.publish(own)
        others = self.board.newest(self.rollouts)
        for other in others:
            _require_like(own, other)
        return beside(own, others, self.policy.version - 1)

    def _state(self) -> dict[str, Any]:
        return {"source": self._resumable.state_dict(), "board": self.board.state_dict()}

    def _load(self, state: dict[str, Any]) -> None:
        self._resumable.load_state_dict(state["source"])
        self.board.load_state_dict(state["board"])


def beside(own: Rollout, others: Sequence[Rollout], version: int) -> Rollout:
    """``own`` and the columns of ``others``, whose decisions have ``version``."""
    if not others:
        return replace(own, info={**own.info, "rollout/shared": 0.0})
    device, width = own.reward.device, own.reward.shape[1]
    columns = [
        replace(
            moved(other, device),
            version=torch.full_like(other.version, version, device=device),
            seeds=other.seeds.to(device) - number * _APART,
        )
        for number, other in enumerate(others, 1)
    ]
    whole = side_by_side([own, *columns])
    active = whole.valid.any(-1)
    share = float(active[:, width:].sum()) / max(1.0, float(active.sum()))
    is_other = torch.arange(active.shape[1], device=device) >= width
    return replace(whole, info={**own.info, "rollout/shared": share}, others=is_other, spans=own.spans)


def _require_like(own: Rollout, other: Rollout) -> None:
    """Raise UserError for another environment, or arrays of another form."""
    if own.robot != other.robot:
        raise UserError(
            f"another learner shares rollouts of {other.robot!r} and this one learns in {own.robot!r}, so they cannot "
            "learn from each other; give each environment a folder of its own."
        )
    here, there = layout(own), layout(other)
    different = [name for name in sorted(here.keys() | there.keys()) if here.get(name) != there.get(name)]
    if different:
        name = different[0]
        raise UserError(
            f"{name} is {there.get(name, 'missing')} in a rollout of another learner and {here.get(name, 'missing')} "
            "here, so they cannot learn from each other; share only among runs with the same policy and experience."
        )
