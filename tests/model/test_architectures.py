"""What differs between releases of transformers; run against both ends of the range."""

import torch
import transformers as hf

import tiny
from ddtree.model import architectures


def test_the_cache_goes_in_and_comes_out_under_its_name_of_this_release():
    model = tiny.model()
    name = architectures.cache_argument(model)
    assert name in architectures.CACHE_NAMES
    ids = torch.tensor([tiny.prompt(9)])
    with torch.inference_mode():
        whole = model(ids).logits[0, -1]
        cache = architectures.cache_of(model(ids[:, :-1], use_cache=True))
        assert torch.allclose(model(ids[:, -1:], **{name: cache}).logits[0, -1], whole, atol=1e-4)


def test_recurrent_models_have_a_name_too():
    torch.manual_seed(0)
    model = hf.MambaForCausalLM(hf.MambaConfig(vocab_size=tiny.VOCAB, hidden_size=16, num_hidden_layers=1))
    output = model(torch.tensor([tiny.prompt(4)]), use_cache=True)
    assert architectures.cache_argument(model) in architectures.CACHE_NAMES
    assert architectures.cache_of(output) is not None
