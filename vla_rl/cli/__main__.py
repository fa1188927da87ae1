"""``python -m vla_rl.cli`` is ``vla-rl``.

With ``--owned`` before the command it is that for a program which holds the other end of its standard input: the
command ends with that program, at once and however the program ended, so it never writes to a folder in which another
has gone on.
"""

import sys

from vla_rl.cli import main
from vla_rl.contract.child import end_with_owner

if sys.argv[1:2] == ["--owned"]:
    del sys.argv[1]
    end_with_owner()  # before the seconds that imports take
main()
