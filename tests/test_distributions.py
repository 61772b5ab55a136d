"""The wheel and the sdist: contents, metadata, one version, and an import of the wheel alone."""

import email
import re
import subprocess
import sys
import tarfile
import zipfile

import pytest
import yaml

import shardfield
from shardfield import cli
from tests.distributions import build
from tests.launch import ROOT, clean_env

MODULES = {str(p.relative_to(ROOT / "src")) for p in (ROOT / "src/shardfield").rglob("*.py")}


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    return build("wheel", tmp_path_factory.mktemp("wheel"))


def test_the_wheel_has_the_package_and_nothing_else(wheel):
    names = set(zipfile.ZipFile(wheel).namelist())
    info = f"shardfield-{shardfield.__version__}.dist-info"
    others = {"shardfield/py.typed", "shardfield/native/leaves.cpp"}
    assert {n for n in names if not n.startswith(f"{info}/")} == MODULES | others
    assert f"{info}/licenses/LICENSE" in names
    scripts = zipfile.ZipFile(wheel).read(f"{info}/entry_points.txt").decode()
    assert "shardfield = shardfield.cli:main" in scripts


def test_the_metadata(wheel):
    content = zipfile.ZipFile(wheel).read(f"shardfield-{shardfield.__version__}.dist-info/METADATA")
    metadata = email.message_from_bytes(content)
    assert metadata["Version"] == shardfield.__version__
    assert metadata["Requires-Python"] == ">=3.11" and metadata["License-Expression"] == "Apache-2.0"
    classifiers = metadata.get_all("Classifier")
    assert {f"Programming Language :: Python :: 3.{minor}" for minor in (11, 12, 13)} <= set(classifiers)
    assert "Typing :: Typed" in classifiers
    required = [r for r in metadata.get_all("Requires-Dist") if "extra ==" not in r]
    assert sorted(required) == ["numpy", "torch>=2.11"]
    assert {"recipes", "meshes", "safetensors"} <= set(metadata.get_all("Provides-Extra"))


def test_the_wheel_alone_runs(wheel, tmp_path):
    """Import the unpacked wheel outside the repository: a module that is missing in it would be found."""
    zipfile.ZipFile(wheel).extractall(tmp_path / "packages")
    env = clean_env() | {"PYTHONPATH": str(tmp_path / "packages")}
    code = (
        "import shardfield, shardfield.train.recipes, shardfield.cli; print(shardfield.__file__); "
        "raise SystemExit(shardfield.cli.main(['info']))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path, env=env, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
    assert str(tmp_path) in done.stdout and f"shardfield {shardfield.__version__}, torch" in done.stdout


def test_the_sdist_has_the_sources_and_the_tests(tmp_path):
    path = build("sdist", tmp_path)
    root = f"shardfield-{shardfield.__version__}"
    names = {n.removeprefix(f"{root}/") for n in tarfile.open(path).getnames()}
    expected = {"pyproject.toml", "README.md", "LICENSE", "Makefile", "constraints.txt", "CITATION.cff", "SECURITY.md"}
    assert expected | {"tests/conftest.py", "docs/index.md"} | {f"src/{m}" for m in MODULES} <= names
    assert not [n for n in names if ".venv" in n or "__pycache__" in n]


def test_one_version(capsys):
    version = shardfield.__version__
    assert re.fullmatch(r"\d+\.\d+\.\d+", version)
    assert yaml.safe_load((ROOT / "CITATION.cff").read_text())["version"] == version
    sections = re.findall(r"^## (.+)$", (ROOT / "CHANGELOG.md").read_text(), re.M)
    assert sections[0] == "Unreleased" and sections[1].startswith(f"{version} - ")
    assert cli.main(["--version"]) == 0
    assert capsys.readouterr().out == f"shardfield {version}\n"
    assert f'"{version}"' not in (ROOT / "pyproject.toml").read_text()


def test_the_workflow_runs_what_developers_run():
    workflow = yaml.safe_load((ROOT / ".github/workflows/test.yml").read_text())
    test = workflow["jobs"]["test"]
    assert any(step.get("run", "").startswith("make test") for step in test["steps"])
    assert test["strategy"]["matrix"]["python"] == ["3.11", "3.12", "3.13"]
