"""What both ends of the transport agree on: the names of its calls and gRPC's limits."""

from __future__ import annotations

import grpc

from vla_rl.fleet.envelope import MAX_MESSAGE
from vla_rl.fleet.identity import Credentials, check_reach

SERVICE = "vla_rl.fleet.Fleet"
STREAM, MANIFEST, CHUNK = "Stream", "Manifest", "Chunk"
CHUNK_BYTES = 1 << 20  # in one answer
_LIMITS = {
    "grpc.max_receive_message_length": MAX_MESSAGE,
    "grpc.max_send_message_length": MAX_MESSAGE,
    "grpc.max_metadata_size": 8192,
    # Identity alone: a compressed message could become a thousand times its size.
    "grpc.compression_enabled_algorithms_bitset": 1,
    "grpc.so_reuseport": 0,  # a second server on the port fails instead of sharing it
    "grpc.max_concurrent_streams": 8,
    "grpc.max_connection_idle_ms": 60_000,
    "grpc.server_handshake_timeout_ms": 5_000,
    # A connection is made once and belongs to one attempt; what comes after a failure is ours to decide.
    "grpc.use_local_subchannel_pool": 1,
    "grpc.enable_retries": 0,
    "grpc.enable_http_proxy": 0,
}
OPTIONS = tuple(_LIMITS.items())


def path(call: str) -> str:
    """The name of a call as gRPC sends it."""
    return f"/{SERVICE}/{call}"


def open_channel(address: str, credentials: Credentials | None) -> grpc.Channel:
    """A channel to ``HOST:PORT``; raises UserError without credentials, unless it is this machine."""
    check_reach(address.rpartition(":")[0], credentials)
    if credentials is None:
        return grpc.insecure_channel(address, OPTIONS)
    tls = grpc.ssl_channel_credentials(credentials.authority, credentials.private_key, credentials.certificate)
    return grpc.secure_channel(address, tls, OPTIONS)


def add_port(server: grpc.Server, host: str, port: int, credentials: Credentials | None) -> int:
    """Listen and return the port; raises UserError as :func:`open_channel`, RuntimeError when the port is taken."""
    check_reach(host, credentials)
    address = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
    if credentials is None:
        return int(server.add_insecure_port(address))
    pair = (credentials.private_key, credentials.certificate)
    tls = grpc.ssl_server_credentials([pair], credentials.authority, require_client_auth=True)
    return int(server.add_secure_port(address, tls))
