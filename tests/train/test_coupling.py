"""The coupling's fit: finds how far a drafter can be trusted, and never loses to no coupling."""

import pytest
import torch

import tiny
from ddtree.drafters import DraftRow
from ddtree.drafters.dflash import DFlash
from ddtree.drafters.dflash.backbone import Backbone
from ddtree.errors import ConfigError
from ddtree.model.target import Target
from ddtree.sampling.noise import PLAIN, Noise
from ddtree.train.coupling import _TraceRecorder, fit_coupling, fit_traces


def traces(error, positions=1500, vocab=50):
    """Log-probabilities of a drafter that misses the target's by normal errors, the noise, the target's choices."""
    generator = torch.Generator().manual_seed(0)
    logp = (2.0 * torch.randn(positions, vocab, generator=generator)).log_softmax(-1)
    logq = (logp + error * torch.randn(positions, vocab, generator=generator)).log_softmax(-1)
    uniform = torch.rand(positions, vocab, generator=generator).double().clamp(1e-12, 1 - 1e-12)
    noise = (-(-uniform.log()).log()).float()
    return logq, noise, (logp + noise).argmax(-1)


def test_a_perfect_drafter_is_trusted_wholly_and_sharply():
    fit = fit_traces(*traces(error=0.0))
    assert fit.beta == pytest.approx(1.0, abs=0.05)
    assert fit.kappa < 0.1
    assert fit.after < 0.1 * fit.before


def test_trust_falls_with_the_drafters_error():
    kappas = [fit_traces(*traces(error)).kappa for error in (0.3, 1.0, 2.0)]
    assert kappas == sorted(kappas)
    assert all(fit_traces(*traces(error)).after < fit_traces(*traces(error)).before for error in (0.3, 1.0))


def test_noise_that_says_nothing_is_not_listened_to():
    logq, noise, chosen = traces(error=0.5)
    fit = fit_traces(
        logq, noise[torch.randperm(len(noise), generator=torch.Generator().manual_seed(1))], chosen
    )
    assert fit.beta < 0.05
    assert fit.after <= fit.before


@pytest.mark.parametrize("kind", ["tree", "markov", "treeflash", "domino"])
def test_a_drafter_is_fitted_at_work_and_keeps_the_parameters(kind):
    model = tiny.model("llama")
    target = Target(model)
    drafter = tiny.drafter(kind, model)
    fit = fit_coupling(target, drafter, [tiny.prompt(5), tiny.prompt(9)], max_tokens=20)
    assert drafter.coupling == (fit.beta, fit.kappa)
    assert drafter.trace is None
    # Every token after the first of each answer is some round's choice; the last round may have no room to draft.
    assert 2 * 18 <= fit.positions <= 2 * 19
    assert fit.after <= fit.before


def test_greedy_decoding_has_no_noise_to_fit():
    model = tiny.model("llama")
    target = Target(model)
    with pytest.raises(ConfigError, match=r"temperature=0\.0 has no noise"):
        fit_coupling(target, DFlash(Backbone(tiny.network(model), target)), [[1]], temperature=0.0)
    assert PLAIN == (0.0, 1.0)


def test_a_head_is_asked_for_its_view_of_the_path_that_was_taken():
    traces = _TraceRecorder(tiny.drafter("markov", tiny.model("llama")), 1.0)
    noise = Noise(0, tiny.VOCAB)
    for tokens in ([5, 6], [5, 6, 7, 8], [5, 6, 7, 8, 9]):
        row = DraftRow(tokens, budget=4, depth=0 if len(tokens) == 5 else 2, noise=noise, temperature=1.0)
        traces(row, lambda before: torch.nn.functional.one_hot(before, tiny.VOCAB).float())
    traces.close([5, 6, 7, 8, 9, 10])
    assert traces.chosen == [7, 8, 9]
    assert [int(logq.argmax()) for logq in traces.logq] == [6, 7, 8]
    assert all(torch.equal(traces.noise[i], noise.gumbel(2 + i)) for i in range(3))
