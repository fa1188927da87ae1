"""``vla-rl sims``: the table of installations, and the refusals of its commands."""

from __future__ import annotations

import re

import pytest

from sims.installations import SHIPPED
from vla_rl.cli import main


@pytest.fixture(autouse=True)
def nothing_installed(tmp_path, monkeypatch):
    monkeypatch.setenv("VLA_RL_HOME", str(tmp_path))
    monkeypatch.setenv("COLUMNS", "200")


def test_the_table_says_what_is_missing_and_how_to_install_it(capsys, tmp_path):
    (tmp_path / "sims" / "mine").mkdir(parents=True)
    main(["sims"])
    printed = capsys.readouterr().out
    for name in SHIPPED:
        assert re.search(rf"{name} .*missing.*install it: vla-rl sims install {name}", printed)
    assert re.search(r"mine .*unfinished.*finish it: vla-rl sims install mine", printed)


def test_a_simulator_that_nobody_knows_is_refused(complaint, tmp_path):
    assert "no simulator of ours is called 'metaword'" in complaint("sims", "install", "metaword")
    assert "sims install needs NAME" in complaint("sims", "install")
    assert "did you mean 'install'?" in complaint("sims", "instal")
    assert "absent.txt cannot be read" in complaint(
        "sims", "install", "mine", "--requirements", str(tmp_path / "absent.txt")
    )
    assert not (tmp_path / "sims").exists()  # not even a file that locks it


def test_ctrl_c_says_that_a_half_made_installation_is_not_used(capsys, monkeypatch):
    def stop(*given):
        raise KeyboardInterrupt

    monkeypatch.setattr("sims.installations.install", stop)
    with pytest.raises(SystemExit) as ended:
        main(["sims", "install", "metaworld"])
    said = capsys.readouterr().err
    assert ended.value.code == 130 and "metaworld is half installed and will not be used until 'vla-rl sims" in said
