"""Training with sharded weights."""

import json
import os
import subprocess
import sys

import pytest
import test_train_heads as shared
import torch
from safetensors.torch import load_file
from test_distributed import HERE, network
from test_train_cli import arguments, target  # noqa: F401 (a fixture)

from ddtree.errors import ConfigError, UnsupportedModelError
from ddtree.train.cli import run
from ddtree.train.distributed import Group, fsdp_asked
from ddtree.train.fsdp import alone, parts, shard_target, whole

# One sharded fit and a plain one, in both processes; then each is killed half-way and taken up in the other's manner.
_FITS = """
import sys
import torch
from dataclasses import replace
from pathlib import Path
from ddtree.train import teacher
from ddtree.train.drafter_job import DrafterJob
from ddtree.train.fit import Fit
from ddtree.train.group import Group
from ddtree.train.sharding import shard, shard_target, whole
import test_train_heads as shared

work, device = Path(sys.argv[1]), torch.device("cpu")
corpus = shared.Corpus(work / "answers", held_out=0.2)
# So few that a batch takes several passes of the target, in one process more than in the other.
teacher._PASS_TOKENS = 36

class Killed(Exception):
    pass

def fit(group, name, accumulate, last=4):
    model = shared.tiny.model(num_hidden_layers=4)
    if group.sharded:
        shard_target(model, device)
    target = shared.Target(model)
    layers = shared.feature_layers(target, 2)
    shape = shared.draft_config(target, layers, draft_layers=2, block=4, mask_id=47)
    [example] = corpus.examples(corpus.train[:1], target, layers)
    net = shared.initial_net(target, shape, example)
    config = replace(
        shared.CONFIG, steps=4, conversations=3, accumulate=accumulate, evaluate_every=2, loss="dpace", ema=0.5
    )
    job = DrafterJob(net, shared.vocabulary(target), target.embed.weight.detach(), config.objective)
    if group.sharded:
        shard(job.run, net.layers, device)
    fitting = Fit(job, corpus, work / name, config, device, teacher.Teacher(target, layers, group), group)
    steps = []

    def report(progress):
        steps.append(progress.step)
        if progress.step == last and last < 4:
            raise Killed
    try:
        best = fitting.run(report)["dflash"]
    except Killed:
        return
    moments = [m for state in fitting._optimizer.state.values() for m in state.values() if m.ndim]
    everything = [*target._layers.parameters(), *net.parameters(), *moments, *fitting._averages["dflash"]._means]
    held = sum(getattr(tensor, "_local_tensor", tensor).numel() for tensor in everything)
    weights = torch.cat([w.flatten() for w in whole(net.state_dict()).values()])
    of_all = sum(tensor.numel() for tensor in everything)
    torch.save([weights, best.loss, best.chain, steps, held / of_all], work / f"{name}-{group.rank}.pt")

plain = Group.join(device)
sharded = Group(plain.rank, plain.size, True)
if plain.main:
    fit(Group(), "one", 4)
fit(sharded, "sharded", 2)
fit(sharded, "begun-sharded", 2, last=2)
fit(plain, "begun-sharded", 2)
fit(plain, "begun-plain", 2, last=2)
fit(sharded, "begun-plain", 2)
plain.leave()
"""
_OPTIONS = [
    "all",
    "--features=online",
    "--heads",
    "markov:rank=4",
    "--head-steps=3",
    "--traces=2",
    "--ema=0.5",
]
_STEPS = """
import sys
from ddtree.train.cli import run
from test_train_cli import arguments
target, work, *options = sys.argv[1:]
run(arguments(target, work, *options, "--fsdp"))
"""


def start_two(script, *arguments):
    environment = {**os.environ, **network(), "PYTHONPATH": str(HERE), "OMP_NUM_THREADS": "1"}
    running = [
        subprocess.Popen(
            [sys.executable, "-c", script, *map(str, arguments)], env={**environment, "RANK": str(rank)}
        )
        for rank in range(2)
    ]
    try:
        assert [process.wait(timeout=300) for process in running] == [0, 0]
    finally:
        for process in running:
            process.kill()


@pytest.fixture(scope="module")
def fits(tmp_path_factory):
    work = tmp_path_factory.mktemp("fits")
    shared.write_answers(work / "answers")
    start_two(_FITS, work)
    return work


def of(fits, name, rank=0):
    return torch.load(fits / f"{name}-{rank}.pt")


@pytest.mark.exhaustive
def test_two_sharded_processes_do_what_one_does(fits):
    alone, loss, chain, *_ = of(fits, "one")
    for rank in range(2):
        weights, own, tau, *_ = of(fits, "sharded", rank)
        torch.testing.assert_close(weights, alone, rtol=1e-3, atol=1e-4)
        assert own == pytest.approx(loss, rel=1e-3)
        assert tau == pytest.approx(chain, rel=1e-3)


@pytest.mark.exhaustive
def test_each_process_holds_half(fits):
    assert of(fits, "one")[-1] == 1.0
    for rank in range(2):
        assert of(fits, "sharded", rank)[-1] == pytest.approx(0.5, abs=0.02)


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", ["begun-sharded", "begun-plain"])
def test_a_fit_is_taken_up_in_the_other_manner(fits, name):
    expected, loss, *_ = of(fits, "sharded")
    for rank in range(2):
        weights, own, _, steps, _ = of(fits, name, rank)
        assert steps == [3, 4]
        torch.testing.assert_close(weights, expected, rtol=1e-3, atol=1e-4)
        assert own == pytest.approx(loss, rel=1e-3)
    states = [torch.load(fits / folder / "fit.pt") for folder in (name, "one")]
    assert shapes(states[0]) == shapes(states[1])
    assert (fits / name / "log.jsonl").read_text().count("\n") == 2


def shapes(state):
    """The form of a nested state."""
    if isinstance(state, torch.Tensor):
        return type(state), state.shape, state.dtype
    if isinstance(state, dict):
        return {name: shapes(part) for name, part in state.items()}
    return [*map(shapes, state)] if isinstance(state, list) else type(state)


@pytest.mark.exhaustive
def test_all_steps_run_sharded_and_make_the_same(target, tmp_path):  # noqa: F811
    works = [tmp_path / "sharded", tmp_path / "plain"]
    start_two(_STEPS, target, works[0], *_OPTIONS)
    run(arguments(target, works[1], *_OPTIONS, "--accumulate=2"))
    for part in ("dflash", "markov"):
        ours, theirs = (load_file(work / part / "model.safetensors") for work in works)
        assert ours.keys() == theirs.keys()
        for name, tensor in ours.items():
            torch.testing.assert_close(tensor, theirs[name], rtol=1e-2, atol=1e-3)
    ours, theirs = (json.loads((work / "summary.json").read_text())["recipe"] for work in works)
    assert ours["coupling_kappa"] == pytest.approx(theirs["coupling_kappa"], rel=0.05)
    ours, theirs = (json.loads((work / "evaluation.json").read_text()) for work in works)
    assert len(ours) == len(theirs) > 0


def test_sharding_over_one_process_is_refused(target, tmp_path, monkeypatch):  # noqa: F811
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    with pytest.raises(ConfigError, match="here is 1 on cpu: start several with torchrun"):
        run(arguments(target, tmp_path, "synthesize", "--fsdp"))


def test_accelerates_launcher_may_ask_for_sharding(monkeypatch):
    cpu = torch.device("cpu")
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.delenv("ACCELERATE_USE_FSDP", raising=False)
    monkeypatch.setenv("FSDP_OFFLOAD_PARAMS", "true")
    assert (fsdp_asked(False, cpu), fsdp_asked(True, cpu)) == (False, True)
    monkeypatch.setenv("ACCELERATE_USE_FSDP", "true")
    with pytest.raises(ConfigError, match="FSDP_OFFLOAD_PARAMS=true, and only false is supported"):
        fsdp_asked(False, cpu)
    monkeypatch.setenv("FSDP_OFFLOAD_PARAMS", "false")
    monkeypatch.setenv("FSDP_RESHARD_AFTER_FORWARD", "FULL_SHARD")
    assert fsdp_asked(False, cpu)
    with pytest.raises(ConfigError, match="here is 2 on mps"):
        fsdp_asked(False, torch.device("mps"))
    monkeypatch.setenv("FSDP_SHARDING_STRATEGY", "NO_SHARD")
    with pytest.raises(ConfigError, match="FSDP_SHARDING_STRATEGY=no_shard, and only full_shard"):
        fsdp_asked(True, cpu)


def test_layers_of_several_dtypes_are_refused():
    model = shared.tiny.model()
    model.model.layers[1].mlp.half()
    with pytest.raises(UnsupportedModelError, match=r"float16, torch\.float32.*give one with --dtype"):
        shard_target(model, torch.device("cpu"))


def test_what_is_not_sharded_stays_as_it_is():
    state = {"weights": [torch.ones(2)], "step": 3}
    assert whole(state, keep=False)["weights"][0] is state["weights"][0]
    assert parts(state, state)["weights"][0] is state["weights"][0]


def test_without_sharding_nobody_follows_the_main_process():
    for rank in range(2):
        with alone(Group(rank, 2), None) as main:
            assert main == (rank == 0)
