"""Training in several processes."""

import os
import socket
import subprocess
import sys

import pytest
import torch
from torch import distributed
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from ddtree.errors import ConfigError
from ddtree.train.distributed import Group, gradients, local_device, wants_fsdp
from ddtree.train.trainer import MovingAverage

_SCRIPT = """
import sys
from ddtree.cli import main
sys.exit(main(["train", *sys.argv[1:]]))
"""


def start(*options, **environment):
    return subprocess.Popen(
        [sys.executable, "-c", _SCRIPT, *map(str, options)],
        env={**os.environ, "OMP_NUM_THREADS": "1", **environment},
    )


def launcher():
    """What a launcher tells two processes that shall meet."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    return {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "WORLD_SIZE": "2"}


@pytest.mark.exhaustive
def test_two_processes_do_what_one_does_in_two_passes(chat_target, tmp_path):
    both, one = tmp_path / "both", tmp_path / "one"
    made = ["--target", chat_target, "--tokens=600", "--rows=12", "--max-answer=30"]
    fit = ["--block=4", "--steps=4", "--evaluate-every=2", "--conversations=3", "--loss=dpace", "--ema=0.5"]
    rest = ["--features=online", "--traces=2", "--heads", "markov:rank=4", "--head-steps=2"]
    for work in (both, one):
        assert start("synthesize", *made, "--work", work).wait(timeout=300) == 0
    for step in ("fit", "heads"):
        meeting = launcher()
        options = [step, *made, *fit, *rest]
        running = [
            start(*options, "--work", both, RANK=str(rank), LOCAL_RANK=str(rank), **meeting)
            for rank in (0, 1)
        ]
        running.append(start(*options, "--work", one, "--accumulate=2"))
        assert [process.wait(timeout=300) for process in running] == [0, 0, 0]
    for name in ("fit/dflash.pt", "heads/markov.pt"):
        ours, theirs = (torch.load(work / name, weights_only=True) for work in (both, one))
        assert ours.keys() == theirs.keys()
        for key, tensor in ours.items():
            torch.testing.assert_close(tensor, theirs[key], rtol=1e-3, atol=1e-4)
    # Only the main process writes.
    assert (both / "fit" / "log.jsonl").read_text().count("\n") == 2


def test_a_process_without_a_launcher_is_alone(monkeypatch):
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    group = Group.join(torch.device("cpu"))
    assert (group.rank, group.size, group.main, group.sharded) == (0, 1, True, False)
    assert (group.from_main(3.5), group.largest(7)) == (3.5, 7)
    tensor = torch.ones(2)
    group.sum([tensor])
    assert tensor.tolist() == [1, 1]


class Doubling:
    """Plays the accelerator of two processes that hold the same."""

    process_index, num_processes, is_fsdp2 = 1, 2, False

    def reduce(self, tensor, reduction):
        assert reduction == "sum"
        return 2 * tensor


def test_tensors_of_any_shape_are_summed_in_place():
    group = Group(Doubling())
    assert (group.rank, group.size, group.main) == (1, 2, False)
    tensors = [torch.tensor(1.0), torch.ones(2, 3), torch.zeros(0), torch.full((2,), 5.0)]
    group.sum(tensors)
    assert [tensor.tolist() for tensor in tensors] == [2.0, [[2.0] * 3] * 2, [], [10.0, 10.0]]


def test_several_processes_without_accelerate_are_refused(monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setattr("ddtree.train.distributed.find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"pip install 'ddtree\[train\]'"):
        Group.join(torch.device("cpu"))


def test_sharding_needs_several_gpus(monkeypatch):
    cpu, gpu = torch.device("cpu"), torch.device("cuda")
    monkeypatch.delenv("ACCELERATE_USE_FSDP", raising=False)
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert (wants_fsdp(False, cpu), wants_fsdp(False, gpu), wants_fsdp(True, gpu)) == (False, False, True)
    monkeypatch.setenv("ACCELERATE_USE_FSDP", "true")
    assert wants_fsdp(False, gpu)
    with pytest.raises(ConfigError, match="here is 2 on cpu: start several with torchrun"):
        wants_fsdp(False, cpu)
    monkeypatch.delenv("WORLD_SIZE")
    with pytest.raises(ConfigError, match="here is 1 on cuda"):
        wants_fsdp(False, gpu)


def test_each_process_on_a_machine_has_its_own_gpu(monkeypatch):
    monkeypatch.setenv("LOCAL_RANK", "3")
    assert (local_device("cuda"), local_device("cpu")) == ("cuda:3", "cpu")
    monkeypatch.delenv("LOCAL_RANK")
    assert local_device("cuda") == "cuda"


def test_parameters_without_a_gradient_are_summed_too():
    net = torch.nn.Linear(2, 2).requires_grad_(True)
    net.weight.grad = torch.ones(2, 2)
    assert [gradient.sum().item() for gradient in gradients(net)] == [4.0, 0.0]


@pytest.fixture
def mesh():
    """A process group of this process alone."""
    distributed.init_process_group("gloo", store=distributed.HashStore(), rank=0, world_size=1)
    yield init_device_mesh("cpu", (1,))
    distributed.destroy_process_group()


def test_the_average_of_sharded_weights_is_that_of_whole_ones(mesh):
    whole = torch.nn.Linear(3, 2)
    sharded = torch.nn.Linear(3, 2)
    sharded.load_state_dict(whole.state_dict())
    fully_shard(sharded, mesh=mesh)
    assert isinstance(sharded.weight, DTensor)
    averages = []
    for net in (whole, sharded):
        average = MovingAverage(net, 0.5)
        with torch.no_grad():
            net.weight.mul_(3.0)
        average.update()
        with average.in_place():
            averages.append(net.weight.detach().clone())
    assert torch.equal(averages[1].full_tensor(), averages[0])
    assert torch.equal(sharded.weight.full_tensor(), whole.weight)
    assert not torch.equal(averages[0], whole.weight)
