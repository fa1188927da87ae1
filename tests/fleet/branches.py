"""Branch coverage by the interpreter's own trace: of every conditional jump, both ways count."""

from __future__ import annotations

import dis
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from types import CodeType, FrameType
from typing import Any

_NO_CHOICE = "CHECK_EXC_MATCH"  # "except X": that it is something else is no branch of ours


class Branches:
    """The conditional jumps in ``functions`` and what is nested in them, and which ways were gone."""

    def __init__(self, functions: Iterable[Callable]) -> None:
        self._jumps: dict[CodeType, dict[int, int]] = {}  # offset of a jump -> offset behind it
        self._real: dict[CodeType, dict[int, int]] = {}  # of an instruction with a long argument
        self._gone: set[tuple[CodeType, int, bool]] = set()
        for function in functions:
            self._add(function.__code__)

    def _add(self, code: CodeType) -> None:
        found = list(dis.get_instructions(code))
        jumps, real, begin = {}, {}, None
        for before, one, after in zip([None, *found], found, [*found[1:], None], strict=False):
            begin = one.offset if begin is None else begin
            if one.opname == "EXTENDED_ARG":
                continue
            real[begin] = real[one.offset] = one.offset
            conditional = ("JUMP" in one.opname and "_IF_" in one.opname) or one.opname == "FOR_ITER"
            if conditional and after is not None and (before is None or before.opname != _NO_CHOICE):
                jumps[one.offset] = after.offset
            begin = None
        self._jumps[code], self._real[code] = jumps, real
        for constant in code.co_consts:
            if isinstance(constant, CodeType):
                self._add(constant)

    @property
    def total(self) -> int:
        return 2 * sum(map(len, self._jumps.values()))

    @property
    def gone(self) -> int:
        return len(self._gone)

    def missing(self) -> list[str]:
        """Where a way was never gone: file, line and whether it is the jump."""
        found = []
        for code, jumps in self._jumps.items():
            lines = {offset: line for begin, end, line in code.co_lines() for offset in range(begin, end, 2)}
            for offset in jumps:
                for jumped in (False, True):
                    if (code, offset, jumped) not in self._gone:
                        name = code.co_filename.rpartition("/")[2]
                        found.append(f"{name}:{lines.get(offset)} {code.co_name} {'jump' if jumped else 'no jump'}")
        return sorted(found)

    @contextmanager
    def watched(self) -> Iterator[None]:
        before = sys.gettrace()
        sys.settrace(self._call)
        try:
            yield
        finally:
            sys.settrace(before)

    def _call(self, frame: FrameType, event: str, arg: Any) -> Any:
        code = frame.f_code
        if code not in self._jumps:
            return None
        frame.f_trace_opcodes, frame.f_trace_lines = True, False
        jumps, real, last = self._jumps[code], self._real[code], -1

        def trace(frame: FrameType, event: str, arg: Any) -> Any:
            nonlocal last
            if event == "opcode":
                now = frame.f_lasti
                if (behind := jumps.get(real.get(last, last))) is not None and real.get(now, now) != last:
                    self._gone.add((code, real.get(last, last), now != behind))
                last = now
            elif event == "exception":
                last = -1
            return trace

        return trace
