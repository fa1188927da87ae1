"""What is kept of an observation for learning: the prefix of the vision-language model, or the pictures.

A kept prefix spares a learner the vision-language model, in every epoch and minibatch.  But that of pi0 takes 18 MB an
observation, and where adapters change the model there is none to keep.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from vla_rl.contract.env import EnvSpec
from vla_rl.contract.errors import UserError
from vla_rl.contract.policy import Features
from vla_rl.contract.tracker import is_shard
from vla_rl.policies.vla.options import VLAOptions

PREFIX, PICTURE = "prefix/", "picture/"  # before the names of features
PREFIX_LIMIT = 8_000_000  # bytes of an observation up to which "auto" keeps the prefix


class Views:
    """What the vision-language model sees of a batch: pictures of the checkpoint's cameras, and the prompt.

    cameras  the environment's camera for each of the checkpoint's, None where it is missing
    tokens, mask  the prompts of all tasks, int64 and bool [tasks,L]; mask None where all tokens count
    learnt   the weights that training changes and a prefix depends on
    """

    def __init__(
        self, cameras: Sequence[str | None], tokens: Tensor, mask: Tensor | None, learnt: Sequence[Tensor] = ()
    ) -> None:
        self.cameras, self.tokens, self.mask, self.learnt = tuple(cameras), tokens, mask, tuple(learnt)

    def prefix(self, network: Any, features: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """The prefix of pictures uint8 ``picture/NAME`` [B,h,w,3] under the instructions ``task`` int64 [B]."""
        pictures = [None if name is None else features[PICTURE + name] for name in self.cameras]
        return network.encode(pictures, *self.prompt(features))

    def prompt(self, features: Mapping[str, Tensor]) -> tuple[Tensor, Tensor | None]:
        """Tokens [B,L] and which of them count, None where all do."""
        task = features["task"]
        return self.tokens[task], None if self.mask is None else self.mask[task]

    def stamp(self) -> tuple[tuple[int, int], ...]:
        """Another one whenever ``learnt`` has changed, in place or by other tensors."""
        own = [item._local_tensor if is_shard(item) else item for item in self.learnt]
        return tuple((item.data_ptr(), item._version) for item in own)


class KeepPrefix:
    """The prefix: a learner never runs the vision-language model."""

    @torch.no_grad()
    def features(self, network: Any, views: Views, seen: Features) -> Features:
        """What is kept of ``seen``: ``picture/NAME`` and ``task``; ``pooled`` [B,W] is there in any case."""
        found = views.prefix(network, seen)
        pooled = found.pop("pooled")
        return {"pooled": pooled, **{PREFIX + name: item for name, item in found.items()}}

    def prefix(self, network: Any, views: Views, features: Features) -> Mapping[str, Tensor]:
        return {name.removeprefix(PREFIX): item for name, item in features.items() if name.startswith(PREFIX)}


@dataclass(frozen=True)
class _Encoded:
    """The ``prefix`` of ``features``, by weights of that ``stamp``."""

    features: Features
    prefix: Mapping[str, Tensor]
    stamp: tuple[tuple[int, int], ...]

    def serves(self, views: Views, features: Features) -> bool:
        """Whether it is the prefix of ``features``: of the very same tensors, by weights that have not changed."""
        same = all(features.get(name) is item for name, item in self.features.items())
        return same and self.stamp == views.stamp()


class KeepPictures:
    """The pictures: a learner runs the vision-language model again, with gradient where it is trained.

    Acting does not: the prefix that ``pooled`` was made of waits here for the decision on it, which takes it away.  Any
    other features take it away as well, so that it fills no memory while a learner learns.
    """

    def __init__(self) -> None:
        self._last: _Encoded | None = None

    def __deepcopy__(self, memo: dict[int, Any]) -> KeepPictures:
        return KeepPictures()  # the copy will see other observations

    @torch.no_grad()
    def features(self, network: Any, views: Views, seen: Features) -> Features:
        prefix = views.prefix(network, seen)
        features = {"pooled": prefix["pooled"], **seen}
        self._last = _Encoded(features, prefix, views.stamp())
        return dict(features)

    def prefix(self, network: Any, views: Views, features: Features) -> Mapping[str, Tensor]:
        last, self._last = self._last, None
        if last is not None and not torch.is_grad_enabled() and last.serves(views, features):
            return last.prefix
        return views.prefix(network, features)


def picture_bytes(spec: EnvSpec, cameras: Sequence[str | None]) -> int:
    """Bytes of an observation's pictures as the environment delivers them."""
    return sum(torch.Size(spec.images[name].shape).numel() for name in cameras if name is not None)


def choose(options: VLAOptions, prefix_bytes: int) -> KeepPrefix | KeepPictures:
    """What ``options.kept`` says; "auto" keeps a prefix of at most 8 MB that training does not change.

    Raises UserError for a prefix that is to be kept although training changes it.
    """
    if options.kept == "prefix" and options.trains.reaches_prefix:
        raise UserError(
            f"{type(options.trains).__name__} changes the vision-language model, so a kept prefix would be out of "
            'date; set kept to "pictures".'
        )
    fits = prefix_bytes <= PREFIX_LIMIT and not options.trains.reaches_prefix
    return KeepPrefix() if options.kept == "prefix" or (options.kept == "auto" and fits) else KeepPictures()
