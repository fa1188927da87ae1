"""``python -m tests.fleet.generate``: vla_rl/fleet/fleet_pb2.py and its types, again from fleet.proto."""

from __future__ import annotations

from pathlib import Path

from tests.test_layout import ROOT

PROTO, GENERATED = "vla_rl/fleet/fleet.proto", ("vla_rl/fleet/fleet_pb2.py", "vla_rl/fleet/fleet_pb2.pyi")


def generate(folder: Path) -> None:
    """Write both files below ``folder``; raises ImportError where grpcio-tools is not installed."""
    from grpc_tools import protoc

    status = protoc.main(["protoc", f"-I{ROOT}", f"--python_out={folder}", f"--pyi_out={folder}", str(ROOT / PROTO)])
    if status:
        raise RuntimeError(f"protoc ended with status {status}; look at {PROTO}.")


if __name__ == "__main__":
    generate(ROOT)
