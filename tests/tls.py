"""A server's certificate for this machine, and its private key as only its owner may read it."""

from __future__ import annotations

import atexit
import shutil
import tempfile
from functools import cache
from pathlib import Path

_TLS = Path(__file__).resolve().parent / "golden" / "tls"
CERTIFICATE = str(_TLS / "server.pem")


@cache
def private_key() -> str:
    """A copy, because git keeps no modes of files."""
    folder = tempfile.mkdtemp()
    atexit.register(shutil.rmtree, folder)
    return str(secret_file(Path(folder) / "server.key", (_TLS / "server.key").read_bytes()))


def secret_file(path: Path, content: bytes) -> Path:
    """``path`` with ``content``, which its owner alone may read."""
    path.touch(mode=0o600)
    path.write_bytes(content)
    return path
