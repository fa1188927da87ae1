"""``python libero_assets.py FOLDER`` in LIBERO's installation: write boxes in place of the assets that are not there.

LIBERO itself says what it needs: the categories and regions in its BDDL files, and the files that its classes open.
An object is a box with one body for every region of it; a scene is a table without legs.  Nothing of ours is imported.
"""

from __future__ import annotations

import struct
import sys
import zlib
from collections import defaultdict
from pathlib import Path

from libero.libero import envs
from libero.libero.envs.arenas.style import STYLE_MAPPING
from libero.libero.envs.bddl_utils import robosuite_parse_problem
from libero.libero.envs.objects import get_object_dict

# The moving parts of each category, in the order of LIBERO's initial states, which hold a position for each.
HINGES = {"microwave": ("heating_region",), "flat_stove": ("knob",)}
SLIDES = dict.fromkeys(("white_cabinet", "wooden_cabinet"), ("top_region", "middle_region", "bottom_region"))
SITES = {"flat_stove": {"burner"}}  # which LIBERO switches on and off
# Scene -> its table in LIBERO's classes, and how high that is, in metres; the floor has none.
TABLES = {
    "libero_tabletop_base_style": ("table", 0.9),
    "libero_kitchen_tabletop_base_style": ("table", 0.9),
    "libero_study_base_style": ("study_table", 0.867),
    "libero_living_room_tabletop_base_style": ("living_room_table", 0.41),
    "libero_coffee_table_base_style": ("coffee_table", 0.41),
    "libero_floor_base_style": ("floor", 0.0),
}
_JOINT = 'axis="0 0 1" damping="10"/><inertial pos="0 0 0" mass="0.1" diaginertia="0.001 0.001 0.001"/>'
_VISUAL = 'group="1" contype="0" conaffinity="0" mass="0.01"'


def needed() -> dict[str, set[str]]:
    """{category: its regions} of all tasks."""
    found: dict[str, set[str]] = defaultdict(set)
    for path in sorted((Path(envs.__file__).parents[1] / "bddl_files").rglob("*.bddl")):
        problem = robosuite_parse_problem(str(path))
        of = {name: kind for part in ("fixtures", "objects") for kind, names in problem[part].items() for name in names}
        for kind in of.values():
            found[kind].update(SITES.get(kind, ()))
        for name, region in problem["regions"].items():
            if region["target"] in of:  # some tasks describe regions of what they do not have
                found[of[region["target"]]].add(name.removeprefix(f"{region['target']}_"))
    return {kind: regions for kind, regions in found.items() if kind in get_object_dict()}


def object_xml(kind: str, regions: set[str]) -> str:
    """A box of 4 cm; its moving parts and regions are in a row beside it, so that LIBERO finds room for everything."""
    moving = {**dict.fromkeys(HINGES.get(kind, ()), "hinge"), **dict.fromkeys(SLIDES.get(kind, ()), "slide")}
    parts = []
    for number, name in enumerate([*moving, *sorted(regions - set(moving))]):
        joint = f'<joint name="{name}_joint" type="{moving[name]}" {_JOINT}' if name in moving else ""
        parts.append(
            f'<body name="{name}_part" pos="{0.05 + 0.05 * number} 0 0">{joint}'
            f'<geom name="{name}_geom" size="0.03 0.03 0.005" rgba="0.3 0.4 0.6 1" type="box" {_VISUAL}/>'
            f'<site name="{name}" type="box" pos="0 0 0" quat="1 0 0 0" size="0.08 0.08 0.04" rgba="0 0 0 0"/></body>'
        )
    box = 'size="0.02 0.02 0.02" rgba="0.7 0.5 0.2 1"'
    return (
        f'<mujoco model="{kind}"><worldbody><body><body name="object">'
        f'<geom name="solid" type="box" group="0" mass="0.1" {box}/><geom name="seen" {box} type="box" {_VISUAL}/>'
        f"{''.join(parts)}</body>"
        '<site name="bottom_site" pos="0 0 -0.02"/><site name="top_site" pos="0 0 0.02"/>'
        '<site name="horizontal_radius_site" pos="0.001 0 0"/></body></worldbody></mujoco>'
    )


def scene_xml(table: str, height: float) -> str:
    """A floor, and ``table`` with its top at ``height``, with the names that LIBERO's classes look for."""
    legs = "".join(
        f'<geom name="table_leg{i}_visual" type="cylinder" size="0.01 0.01" {_VISUAL}/>' for i in range(1, 5)
    )
    top = '<geom name="table_collision" type="box" group="0" size="0.5 0.8 0.012"/>'
    top += f'<geom name="table_visual" size="0.5 0.8 0.012" rgba="0.6 0.6 0.6 1" type="box" {_VISUAL}/>{legs}'
    textures = "".join(f'<texture name="{name}" type="2d" file="textures/x.png"/>' for name in ("texplane", "tex-wall"))
    return (
        f'<mujoco model="{table}"><asset>{textures}<material name="floor_material" texture="texplane"/></asset>'
        '<worldbody><light pos="0 0 3" dir="0 0 -1" directional="true"/>'
        '<geom name="floor" type="plane" group="1" size="3 3 0.1" material="floor_material"/>'
        f'<body name="{table}" pos="0 0 {height - 0.012}">{top if height else ""}'
        '<site name="table_top" pos="0 0 0.012"/></body></worldbody></mujoco>'
    )


def png(grey: int) -> bytes:
    """A picture of 2x2 pixels."""

    def chunk(kind: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    header = struct.pack(">IIBBBBB", 2, 2, 8, 2, 0, 0, 0)
    pixels = zlib.compress((b"\0" + bytes([grey] * 6)) * 2)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", pixels) + chunk(b"IEND", b"")


def write(path: Path, content: str | bytes) -> None:
    """Write a file that LIBERO lacks."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content.encode() if isinstance(content, str) else content)


def main(assets: Path) -> None:
    """Write all scenes, and the file of every category where LIBERO's class opens it."""
    for scene, (table, height) in TABLES.items():
        write(assets / "scenes" / f"{scene}.xml", scene_xml(table, height))
    for styles in STYLE_MAPPING.values():
        for number, name in enumerate(styles.values()):
            write(assets / "scenes" / "textures" / name, png(60 + 15 * number))
    for kind, regions in needed().items():
        try:
            get_object_dict()[kind](name=kind)
        except FileNotFoundError as missing:
            write(Path(missing.filename), object_xml(kind, regions))
            get_object_dict()[kind](name=kind)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
