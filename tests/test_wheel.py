"""The wheel holds exactly what is meant to be installed, works outside the checkout, and shares its short names with nobody."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
import re
import resource
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from tests.docs.markdown import ROOT, tracked

PACKAGES, MODULES = ("mm_models", "specs", "converters"), ("pretrain_vlm.py", "pretrain_fsdp2.py")
DATA = (".jinja", ".json")
SCRIPTS = {"mm-convert": "mm_models.cli.convert:main", "mm-models": "mm_models.cli.models:main"}
PIP = [sys.executable, "-m", "pip", "--disable-pip-version-check", "-q"]


@pytest.fixture(scope="module")
def wheel(tmp_path_factory) -> Path:
    """Built from a copy: a build folder left in the checkout would put deleted files into it."""
    copy, out = tmp_path_factory.mktemp("source"), tmp_path_factory.mktemp("wheel")
    for path in tracked():
        target = copy / path.relative_to(ROOT)
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(path, target)
    offline = ["--no-build-isolation"] if importlib.util.find_spec("setuptools") else []
    subprocess.run([*PIP, "wheel", "--no-deps", *offline, "-w", str(out), str(copy)], check=True)
    (found,) = out.glob("*.whl")
    return found


@pytest.fixture(scope="module")
def installed(wheel, tmp_path_factory) -> Path:
    """The wheel's content in a folder of its own, without its dependencies."""
    target = tmp_path_factory.mktemp("installed")
    subprocess.run([*PIP, "install", "--no-deps", "--no-index", "--target", str(target), str(wheel)], check=True)
    return target


def test_it_holds_exactly_the_three_packages_and_the_entry_script(wheel):
    names = {name for name in zipfile.ZipFile(wheel).namelist() if ".dist-info/" not in name}
    files = {path.relative_to(ROOT) for path in tracked()}
    code = {str(path) for path in files if path.parts[0] in PACKAGES and path.suffix == ".py"}
    data = {str(path) for path in files if path.parts[0] == "mm_models" and path.suffix in DATA}
    assert names == code | data | set(MODULES)
    assert not [path for path in files if path.parts[0] in PACKAGES and path.suffix not in (".py", *DATA)]


def test_every_package_folder_has_an_init():
    """One without would be left out of the wheel and still work in the checkout."""
    folders = {path.parent for path in tracked() if path.relative_to(ROOT).parts[0] in PACKAGES}
    assert not [str(folder) for folder in folders if not (folder / "__init__.py").exists()]


def test_it_declares_the_console_scripts(wheel):
    with zipfile.ZipFile(wheel) as opened:
        (name,) = (name for name in opened.namelist() if name.endswith("entry_points.txt"))
        text = opened.read(name).decode()
    assert dict(re.findall(r"^(\S+) = (\S+)$", text, flags=re.M)) == SCRIPTS


def test_no_other_distribution_owns_the_short_names():
    owners = importlib.metadata.packages_distributions()
    for name in (*PACKAGES, "pretrain_vlm", "pretrain_fsdp2"):
        assert {re.sub(r"[-_.]+", "-", owner) for owner in owners.get(name, ())} <= {"mm-models"}, name


@pytest.mark.parametrize("program", SCRIPTS)
def test_help_answers_in_under_a_second_outside_the_checkout(installed, tmp_path, program):
    """Processor time, best of three: the wall time of a busy machine says little."""
    environment = os.environ | {"PYTHONPATH": str(installed)}
    seconds = []
    for _ in range(3):
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        done = subprocess.run(
            [installed / "bin" / program, "--help"], cwd=tmp_path, env=environment, capture_output=True, text=True
        )
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        assert done.returncode == 0, done.stderr
        assert program in done.stdout
        seconds.append(after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime)
    assert min(seconds) < 1, seconds


def test_it_works_outside_the_checkout(installed, tmp_path):
    """The registry finds specs and converters of the wheel, not of the checkout."""
    code = "import mm_models, specs, converters; print(mm_models.__file__, specs.__file__, converters.__file__)"
    environment = os.environ | {"PYTHONPATH": str(installed)}
    where = subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path, env=environment, check=True, capture_output=True, text=True
    ).stdout
    assert all(Path(path).is_relative_to(installed) for path in where.split()), where
    listed = subprocess.run(
        [installed / "bin" / "mm-models", "list"],
        cwd=tmp_path,
        env=environment,
        check=True,
        capture_output=True,
        text=True,
    )
    assert "glm4v_moe_lm" in listed.stdout
