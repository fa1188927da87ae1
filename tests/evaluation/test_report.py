"""The report is one file that needs nothing else, escapes what it is given and shows every number and frame."""

from __future__ import annotations

import base64
import io
import json
import os
import re
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import av
import numpy as np
import pytest

from vla_rl.evaluation import plots, video
from vla_rl.evaluation.report import Bar, Clip, Point, Report, Series, Tile
from vla_rl.evaluation.stats import Rate
from vla_rl.evaluation.video import mosaic

NASTY = "<script>alert('x')</script> & \"quoted\""


def frames(count: int = 7, height: int = 33, width: int = 48) -> np.ndarray:
    ramp = np.arange(count * height * width * 3, dtype=np.uint32) // 97
    return ramp.astype(np.uint8).reshape(count, height, width, 3)


def full_report(text: str = "word") -> Report:
    report = Report(f"title {text}", f"subtitle {text}")
    report.section(f"section {text}", f"lead {text}")
    report.text(f"- item {text}\n- second")
    report.command(f"vla-rl {text}")
    report.tiles([Tile(f"tile {text}", 0.842, 0.771, 0.893, note=f"note {text}"), Tile("minutes", 12.5, percent=False)])
    report.table([f"head {text}", "n"], [[f"cell {text}", 25000], ["other", None]], f"caption {text}")
    report.curves(
        f"curve {text}", f"x {text}", f"y {text}", [Series(f"line {text}", [0, 1], [0, 1], [0, 0.5], [0.5, 1])]
    )
    report.bars(f"bars {text}", [Bar(f"bar {text}", 0.5, 0.4, 0.6, f"group {text}")])
    rate = Rate(0.5, 0.4, 0.6, 80)
    report.scatter(f"scatter {text}", f"true {text}", f"imagined {text}", [Point(f"policy {text}", rate, rate)])
    report.videos(
        f"videos {text}", [Clip(frames(), f"clip {text}", success=True), Clip(frames(), "bad", success=False)]
    )
    return report


class Page(HTMLParser):
    """Tags still open, what is loaded from where, and the text."""

    VOID = ("meta", "img", "br", "path", "line", "rect")

    def __init__(self, html: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.tags: list[str] = []
        self.loaded: list[str] = []
        self.text = ""
        self.feed(html)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.loaded += [value or "" for name, value in attrs if name in ("src", "href", "srcset", "poster", "action")]
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        if tag not in self.VOID:
            assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if self.open and self.open[-1] not in ("style", "script"):
            self.text += data


def videos(html: str) -> list[bytes]:
    return [base64.b64decode(data) for data in re.findall(r"data:video/mp4;base64,([^\"]+)", html)]


def test_needs_nothing_but_itself() -> None:
    html = full_report().html()
    page = Page(html)
    assert not page.open, "every tag is closed"
    assert page.loaded and all(source.startswith("data:") for source in page.loaded)
    assert "//" not in re.sub(r"base64,[^\"]+", "", html), "no address of any kind"
    assert "link" not in page.tags and "@import" not in html and "url(" not in html
    assert "default-src 'none'" in html


def test_shows_everything_it_was_given() -> None:
    text = Page(full_report().html()).text
    parts = "title subtitle section lead item tile note head cell caption curve x y bar group bars videos clip scatter "
    parts += "true imagined"
    for part in parts.split():
        assert f"{part} word" in text, part
    assert "vla-rl word" in text
    for value in ("84.2%", "[77.1%, 89.3%]", "12.5", "25k", "50.0%", "[40.0%, 60.0%]"):
        assert value in text, value


def test_escapes_whatever_it_is_given() -> None:
    html = full_report(NASTY).html()
    page = Page(html)
    assert NASTY not in html
    assert page.tags.count("script") == 1 and not page.open
    for part in ("title", "cell", "clip", "bar", "x", "tile"):
        assert f"{part} {NASTY}" in page.text, part
    data = json.loads(re.findall(r"data-chart='([^']+)'", html)[0])
    assert data["series"][0]["name"] == f"line {NASTY}"


@pytest.mark.parametrize("size", [(33, 48), (224, 301)])
def test_video_decodes_to_the_same_frames(size: tuple[int, int]) -> None:
    shown = np.zeros((7, *size, 3), np.uint8)
    shown += np.linspace(30, 220, 7, dtype=np.uint8)[:, None, None, None]
    report = Report("t")
    report.videos("v", [Clip(shown, "a", fps=12.5)])
    with av.open(io.BytesIO(videos(report.html())[0])) as container:
        assert float(container.streams.video[0].average_rate) == 12.5
        decoded = np.stack([frame.to_ndarray(format="rgb24") for frame in container.decode(video=0)])
    assert len(decoded) == 7
    height, width = decoded.shape[1:3]
    assert height % 2 == width % 2 == 0 and min(height, width) >= video._SMALLEST_SIDE * 0.8
    assert np.abs(decoded.mean((1, 2, 3)) - shown.mean((1, 2, 3))).max() < 4, "in order, and as bright"


def test_same_clip_gives_the_same_bytes() -> None:
    clip, noise = Clip(frames(7, 224, 301), "a"), np.random.default_rng(0)
    encoded = set()
    for _ in range(3):
        _ = [noise.integers(1, 255, size, dtype=np.uint8) for size in noise.integers(1000, 900_000, 3)]  # dirty memory
        encoded.add(clip.media().data)
    assert len(encoded) == 1


def test_webp_where_nothing_encodes_h264(monkeypatch: pytest.MonkeyPatch) -> None:
    from PIL import Image

    monkeypatch.setattr(video, "_has_h264", lambda: False)
    media = Clip(frames(5), "a").media()
    assert media.mime == "image/webp" and getattr(Image.open(io.BytesIO(media.data)), "n_frames", 1) == 5
    report = Report("t")
    report.videos("v", [Clip(frames(5), "a")])
    assert '<img alt="a" src="data:image/webp;base64,' in report.html()


def test_two_rates_cross_where_their_values_are() -> None:
    point = Point("a", x=Rate(0.25, 0.1, 0.5, 20), y=Rate(0.75, 0.6, 0.9, 40))
    _, plane = plots.scatter("t", "true", "imagined", [point])
    assert plane["lines"][0]["path"] == "M0 100L100 0", "the diagonal"
    assert plane["crosses"] == [{"whiskers": "M10.0 25.0H50.0M25.0 40.0V10.0", "dot": "M25.0 25.0h0"}]
    shown = {"name": "a", "colour": "var(--c1)", "x": [0.25], "y": [0.75], "low": [0.6], "high": [0.9]}
    assert plane["data"]["series"] == [shown]
    assert plots.scatter("t", "true", "imagined", [])[0] == "nothing"


def drawn(bars: list[Bar], percent: bool = True) -> list[dict[str, Any]]:
    return [bar for group in plots.bars("t", bars, percent)[1]["groups"] for bar in group["bars"]]


def test_bar_and_whisker_are_as_long_as_they_should_be() -> None:
    (bar,) = drawn([Bar("a", 0.5, 0.4, 0.65)])
    assert (bar["left"], bar["width"], bar["whisker"]) == (0.0, 50.0, [40.0, 65.0])
    below = drawn([Bar("a", -1.0), Bar("b", 1.0), Bar("c", float("nan"))], percent=False)
    assert [(bar["left"], bar["width"]) for bar in below] == [(0.0, 50.0), (50.0, 50.0), (None, None)]


@pytest.mark.parametrize(
    ("value", "percent", "text"),
    [
        (0.8421, True, "84.2%"),
        (12345, False, "12.35k"),
        (-2.5e9, False, "-2.5G"),
        (0.000123456, False, "0.0001235"),
        (float("nan"), False, "–"),
    ],
)
def test_numbers_as_people_read_them(value: float, percent: bool, text: str) -> None:
    assert plots.number(value, percent) == text


def test_writes_all_or_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = full_report().write(tmp_path / "deep" / "report.html")
    before = path.read_text(encoding="utf-8")
    assert before == full_report().html()

    def full_disk(source: Path, target: Path) -> None:
        raise OSError("no space left")

    monkeypatch.setattr(os, "replace", full_disk)
    with pytest.raises(OSError, match="no space"):
        Report("other").write(path)
    assert path.read_text(encoding="utf-8") == before
    assert [item.name for item in path.parent.iterdir()] == ["report.html"]


def test_cameras_of_several_sizes_are_shown_together():
    """In the order of their names; a grey one is grey, and what is smaller is followed by black."""
    images = {"wrist": np.full((2, 3, 4, 1), 7, np.uint8), "front": np.full((2, 5, 6, 3), 9, np.uint8)}
    above, beside = mosaic(images, 1), mosaic(images, 2)
    assert above.shape == (2, 8, 6, 3) and beside.shape == (2, 5, 10, 3)
    assert (above[:, :5] == 9).all() and (above[:, 5:, :4] == 7).all() and not above[:, 5:, 4:].any()
    assert (beside[:, :, :6] == 9).all() and (beside[:, :3, 6:] == 7).all() and not beside[:, 3:, 6:].any()
    alone = {name: image[0] for name, image in images.items()}
    assert np.array_equal(mosaic(alone, 1), beside[0]) and np.array_equal(mosaic(alone, 0), above[0])
