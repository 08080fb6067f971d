"""Training in several processes."""

import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from ddtree.train.distributed import Group, gradients, local_device

HERE = Path(__file__).parents[1]
_SCRIPT = """
import sys
import torch
from dataclasses import replace
from pathlib import Path
from ddtree.train.drafter_job import DrafterJob
from ddtree.train.fit import Fit
from ddtree.train.group import Group
from ddtree.train.teacher import Teacher
import test_train_heads as shared

work, accumulate = Path(sys.argv[1]), int(sys.argv[2])
target = shared.Target(shared.tiny.model(num_hidden_layers=4))
corpus = shared.Corpus(work / "answers", held_out=0.2)
layers = shared.feature_layers(target, 2)
shape = shared.draft_config(target, layers, draft_layers=2, block=4, mask_id=47)
[example] = corpus.examples(corpus.train[:1], target, layers)
net = shared.initial_net(target, shape, example)
config = replace(shared.CONFIG, steps=4, conversations=3, accumulate=accumulate, evaluate_every=2, loss="dpace")
job = DrafterJob(net, shared.vocabulary(target), target.embed.weight.detach(), config.objective)
group = Group.join(target.device)
folder = work / f"fit{group.size}"
fit = Fit(job, corpus, folder, config, target.device, Teacher(target, layers), group)
best = fit.run()["dflash"]
weights = torch.cat([p.detach().flatten() for p in net.parameters()])
torch.save([weights, best.loss, best.chain], work / f"weights{group.size}-{group.rank}.pt")
group.leave()
"""


def network():
    """What a launcher tells two processes that shall meet."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    return {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "WORLD_SIZE": "2"}


def start(work, accumulate, **environment):
    code = [sys.executable, "-c", _SCRIPT, str(work), str(accumulate)]
    paths = os.pathsep.join([str(HERE), os.environ.get("PYTHONPATH", "")])
    return subprocess.Popen(
        code, env={**os.environ, "PYTHONPATH": paths, "OMP_NUM_THREADS": "1", **environment}
    )


@pytest.mark.exhaustive
def test_two_processes_do_what_one_does_in_two_passes(tmp_path):
    import test_train_heads as shared

    shared.write_answers(tmp_path / "answers")
    meeting = network()
    running = [start(tmp_path, 1, RANK=str(rank), **meeting) for rank in range(2)]
    running.append(start(tmp_path, 2))
    assert [process.wait(timeout=120) for process in running] == [0, 0, 0]
    alone, loss, chain = torch.load(tmp_path / "weights1-0.pt")
    for rank in range(2):
        weights, own, tau = torch.load(tmp_path / f"weights2-{rank}.pt")
        torch.testing.assert_close(weights, alone, rtol=1e-3, atol=1e-4)
        assert own == pytest.approx(loss, rel=1e-3)
        assert tau == pytest.approx(chain, rel=1e-3)
    # Only the main process writes.
    assert (tmp_path / "fit2" / "log.jsonl").read_text().count("\n") == 2


def test_a_process_without_a_launcher_is_alone(monkeypatch):
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    group = Group.join(torch.device("cpu"))
    assert (group.rank, group.size, group.main) == (0, 1, True)
    assert group.agree(3.5, torch.device("cpu")) == 3.5
    tensor = torch.ones(2)
    group.add([tensor])
    assert tensor.tolist() == [1, 1]


def test_each_process_on_a_machine_has_its_own_gpu(monkeypatch):
    monkeypatch.setenv("LOCAL_RANK", "3")
    assert (local_device("cuda"), local_device("cpu")) == ("cuda:3", "cpu")
    monkeypatch.delenv("LOCAL_RANK")
    assert local_device("cuda") == "cuda"


def test_parameters_without_a_gradient_are_added_up_too():
    net = torch.nn.Linear(2, 2).requires_grad_(True)
    net.weight.grad = torch.ones(2, 2)
    assert [gradient.sum().item() for gradient in gradients(net)] == [4.0, 0.0]
