"""Where tensors lie when a model is on an accelerator, without one: PyTorch's fake tensors refuse to mix devices.

`test_fake_device.py` runs this file in a process of its own, since the device is there for a whole process.
"""

from contextlib import nullcontext

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils import backend_registration

# Under inference mode tensors made of lists pass the fake mode by. Decorators take it when they are imported.
torch.inference_mode = lambda mode=True: torch.no_grad() if mode else nullcontext()

import tiny  # noqa: E402
from ddtree.drafters import DraftRow  # noqa: E402
from ddtree.model import kv_cache  # noqa: E402
from ddtree.model.cuda_graphs import CudaGraphs  # noqa: E402
from ddtree.model.target import Target  # noqa: E402
from ddtree.sampling.params import SamplingParams  # noqa: E402
from ddtree.sampling.sampler import Sampler, choose_ahead  # noqa: E402
from ddtree.stats import Clock  # noqa: E402
from ddtree.tree import DraftTree, ancestor_mask  # noqa: E402

if torch.cuda.is_available():
    DEVICE = torch.device("cuda:0")
else:
    # A build for CPUs lacks what even fake tensors ask of CUDA; of this device it has it.
    backend_registration._setup_privateuseone_for_python_backend("fake")
    DEVICE = torch.device("fake:0")
LENGTH = 9


class _Mode(FakeTensorMode):
    """Fake tensors that never wake the device."""

    avoid_device_init = True


MODE = _Mode()


@pytest.fixture(autouse=True)
def fake(monkeypatch):
    """A GPU that keeps no values, and models that are not tried before they are used: that reads values."""
    monkeypatch.setattr(Target, "_find_windows", lambda self: setattr(self, "_windowed", False))
    monkeypatch.setattr(Target, "_probe", lambda self: None)
    monkeypatch.setattr(kv_cache, "available_bytes", lambda device: None)
    # Modules are made where they stay; fake parameters cannot be moved, not even to where they are.
    monkeypatch.setattr(torch.nn.Module, "to", lambda module, *_: module)
    with MODE:
        yield


def model_of(family="llama"):
    with DEVICE:
        return tiny.model(family)


def target_of(family="llama", rows=2):
    target = Target(model_of(family), feature_layers=(0, 1), graphs=False)
    cache = target.new_cache()
    for row in range(rows):
        for _ in target.prefill(cache, cache.add_row(), list(range(1, LENGTH + 1 + row))):
            pass
    return target, cache


def tree(rows=2):
    columns = [[5, 6, 7, 8]], [[0, 0, 0, 1]], [[0, 1, 1, 2]]
    tokens, parents, depths = (torch.tensor(part * rows, device=DEVICE) for part in columns)
    return DraftTree(tokens, parents, depths, torch.zeros((rows, 4), device=DEVICE), [4, 3][:rows])


def test_a_tensor_on_the_wrong_device_is_found():
    with pytest.raises(RuntimeError, match="device"):
        torch.zeros(2, device=DEVICE) + torch.zeros(2)


@pytest.mark.parametrize("family", ["llama", "mistral", "gemma3", "qwen3"])
def test_a_tree_is_verified_and_its_path_committed_on_the_device(family):
    target, cache = target_of(family)
    forward = target.verify(cache, tree())
    assert forward.logits.shape == (2, 4, tiny.VOCAB)
    assert forward.logits.device == forward.features.device == DEVICE
    cache.commit([[0, 2], [0, 1]])
    assert ancestor_mask(tree()).device == DEVICE


def test_padded_passes_stay_on_the_device():
    target, cache = target_of()
    logits, features = CudaGraphs(target.run, target.dtype, record=False).verify(cache, tree())
    assert logits.device == features.device == DEVICE and logits.shape == (2, 4, tiny.VOCAB)


def test_all_choices_are_made_on_the_device():
    every = [SamplingParams(temperature=0.0), SamplingParams(temperature=0.7, seed=1)]
    samplers = [Sampler(params, tiny.VOCAB, (), prompt_length=LENGTH, device=DEVICE) for params in every]
    logits = torch.zeros((2, 4, tiny.VOCAB), device=DEVICE)
    assert choose_ahead(samplers, logits, tree().depths, [LENGTH, LENGTH], 3).device == DEVICE


@pytest.mark.parametrize("coupled", [False, True])
def test_a_block_is_drafted_and_its_tree_built_without_a_look_at_a_value(coupled):
    model = model_of()
    with DEVICE:
        drafter = tiny.drafter("tree", model, coupled)
    for row in range(2):
        drafter.add_row()
        width = len(drafter.feature_layers) * model.config.hidden_size
        drafter.observe(row, [1, 2, 3], torch.zeros((3, width), device=DEVICE))
    params = SamplingParams(temperature=0.7, seed=1)
    noise = Sampler(params, tiny.VOCAB, (), prompt_length=3, device=DEVICE).noise
    rows = [
        DraftRow([1, 2, 3, 4], 9, 4),
        DraftRow([1, 2, 3, 5], 5, 3, chain=True, noise=noise, temperature=0.7),
    ]
    drafted = drafter.draft(rows, Clock())
    assert drafted.tokens.device == DEVICE and drafted.sizes == [10, 4]
