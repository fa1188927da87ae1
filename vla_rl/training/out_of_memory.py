"""Out of memory, on a device or on the host, as an error that says in which phase of a run it happened."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from vla_rl.contract.errors import UserError

BUILD, COLLECT, LEARN, VALIDATE = "build", "collect", "learn", "validate"  # the phases of a run
# What torch's allocator on the host and C++ say, as RuntimeError.
_ON_HOST = ("DefaultCPUAllocator: can't allocate memory", "not enough memory: you tried to allocate", "std::bad_alloc")
_ELSEWHERE = (*_ON_HOST, "OutOfMemoryError:", "MemoryError")  # in a worker process, whose error comes as its text
_ASKED = re.compile(r"(?:[Tt]ried to allocate|Unable to allocate) ([\d.]+ (?:bytes|[KMGTPE]iB))")


class OutOfMemoryError(UserError):
    """Memory ran out in ``phase``; ``asked`` in words, "" where nobody said how much was asked for."""

    def __init__(self, phase: str, asked: str, where: str) -> None:
        super().__init__(phase, asked, where)
        self.phase, self.asked, self.where = phase, asked, where

    def __str__(self) -> str:
        asked = f"{self.asked} more were asked for" if self.asked else "more was asked for"
        return f"{self.where} ran out of memory in the phase {self.phase!r} ({asked})"


@contextmanager
def phase_of_memory(phase: str) -> Iterator[None]:
    """Raise OutOfMemoryError in place of what torch, numpy and Python raise when memory runs out within the block."""
    try:
        yield
    except OutOfMemoryError:
        raise  # of a phase within this one
    except UserError as error:
        if not any(text in str(error) for text in _ELSEWHERE):
            raise
        raise OutOfMemoryError(phase, _asked(error), "another process of the run") from error
    except torch.OutOfMemoryError as error:
        raise OutOfMemoryError(phase, _asked(error), "the device") from error
    except MemoryError as error:
        raise OutOfMemoryError(phase, _asked(error), "this process") from error
    except RuntimeError as error:
        if not any(text in str(error) for text in _ON_HOST):
            raise
        raise OutOfMemoryError(phase, _asked(error), "this process") from error


def _asked(error: Exception) -> str:
    found = _ASKED.search(str(error))
    if not found:
        return ""
    number, _, unit = found[1].partition(" ")
    return f"{int(number) / 1e6:,.1f} MB" if unit == "bytes" else found[1]
