"""What a server starts as its learner here: it hands its two pipes to the learner's process and ends when that ends.

The learner's process is forked from one that has imported everything already, so that it is there in no time.  The
server knows nothing of that: it writes into the learner's pipe, and reads from it.
"""

import os
import select
import socket
import sys
from contextlib import suppress


def main(path: str) -> int:
    """Wait at the socket ``path`` for the learner; the exit code is 1, as of a learner that was killed."""
    with suppress(FileNotFoundError):
        os.unlink(path)
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(path)
    listener.listen(1)
    waiting = select.poll()
    waiting.register(listener, select.POLLIN)
    waiting.register(0, 0)  # the server has gone
    if any(file == 0 for file, _ in waiting.poll()):
        return 1
    learner, _ = listener.accept()
    socket.send_fds(learner, [b"pipes"], [0, 1])
    os.close(0)
    os.close(1)
    learner.recv(1)
    return 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
