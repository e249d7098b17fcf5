"""The wheel is complete: when it is installed in a clean environment, the command line runs."""

import os
import re
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path
from zipfile import ZipFile

import pytest

from fedfleet.algorithms.table import METHODS

ROOT = Path(__file__).parent.parent
FOLDERS = ("engine", "algorithms", "workloads", "tune")
API = "src/fedfleet"


def call(*command: object, cwd: Path) -> str:
    """Standard output of a command that must succeed. The import path of this process is not passed on."""
    env = {k: v for k, v in os.environ.items() if k not in ("PYTHONPATH", "PYTHONHOME")} | {"COLUMNS": "200"}
    done = subprocess.run([str(part) for part in command], cwd=cwd, env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel, built from a copy of the repository: setuptools leaves the folder build/ behind, and would pack
    deleted files that are still in it."""
    source, out = tmp_path_factory.mktemp("source"), tmp_path_factory.mktemp("wheel")
    for name in (*FOLDERS, API):
        shutil.copytree(ROOT / name, source / name, symlinks=True, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source)
    call(sys.executable, "-m", "pip", "wheel", "--no-deps", "--no-build-isolation", "-w", out, source, cwd=source)
    (path,) = out.glob("*.whl")
    return path


@pytest.fixture(scope="module")
def clean(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An environment with the wheel, and the dependencies of this one.

    They come by a .pth line, which appends a folder to the path and reads no .pth file there: the hook of an editable
    installation stays out. It is written after the installation, for pip would take that for an installed fedfleet.
    """
    folder = tmp_path_factory.mktemp("clean")
    call(sys.executable, "-m", "venv", folder, cwd=folder)
    call(folder / "bin/python", "-m", "pip", "install", "--no-deps", "--no-index", wheel, cwd=folder)
    packages = call(folder / "bin/python", "-c", "import sysconfig; print(sysconfig.get_path('purelib'))", cwd=folder)
    here = {sysconfig.get_path("purelib"), sysconfig.get_path("platlib")}
    Path(packages.strip(), "dependencies.pth").write_text("\n".join(sorted(here)) + "\n")
    return folder


@pytest.fixture(scope="module")
def tracked() -> list[str]:
    """The files of the package that git knows, by their paths in the repository. New ones that are not ignored count
    too. A test is skipped in a copy that git does not know."""
    asked = ("git", "ls-files", "-z", "--cached", "--others", "--exclude-standard", *FOLDERS, API)
    try:
        done = subprocess.run(asked, cwd=ROOT, capture_output=True, text=True)
    except FileNotFoundError:
        pytest.skip("git is not here; install it")
    if done.returncode:
        pytest.skip("this copy is no git repository, which would say what belongs to the package")
    return [name for name in done.stdout.split("\0") if (ROOT / name).is_file()]


def test_the_wheel_has_the_tracked_files_and_no_others(wheel: Path, tracked: list[str]):
    """Modules, sources of kernels, templates, scripts and styles of pages, experiments and studies."""
    names = {name.removeprefix("src/") if name.startswith(API) else f"fedfleet/{name}" for name in tracked}
    assert {Path(name).suffix for name in names} >= {
        ".py",
        ".cpp",
        ".h",
        ".j2",
        ".js",
        ".css",
        ".yaml",
        ".json",
        ".typed",
    }
    packed = {name for name in ZipFile(wheel).namelist() if ".dist-info/" not in name}
    assert sorted(packed) == sorted(names)


def test_the_wheel_has_the_licence(wheel: Path):
    packed = ZipFile(wheel).namelist()
    assert any(re.fullmatch(r"fedfleet-[^/]*\.dist-info/licenses/LICENSE", name) for name in packed)


def test_installed_modules_are_the_wheels(clean: Path):
    where = call(clean / "bin/python", "-c", "import fedfleet.tune.cli as cli; print(cli.__file__)", cwd=clean)
    assert Path(where.strip()).resolve().is_relative_to(clean.resolve())


def test_the_package_has_its_names(clean: Path):
    script = "import fedfleet; print(fedfleet.__version__, fedfleet.Experiment.__name__, fedfleet.run.__name__)"
    assert call(clean / "bin/python", "-c", script, cwd=clean).split()[1:] == ["Experiment", "run"]


def test_list_methods(clean: Path):
    words = set(re.findall(r"\w+", call(clean / "bin/fedfleet", "list", "methods", cwd=clean)))
    assert {"fedavg", "scaffold", "local_muon", "fedmuon_bc"} <= words
    assert set(METHODS) <= words


def test_the_package_is_the_command(clean: Path):
    """`python -m fedfleet` does what `fedfleet` does."""
    asked = ("list", "workloads")
    by_module = call(clean / "bin/python", "-m", "fedfleet", *asked, cwd=clean)
    assert by_module == call(clean / "bin/fedfleet", *asked, cwd=clean)
    assert "digits" in by_module
