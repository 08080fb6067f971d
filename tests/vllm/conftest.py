import os
import sys
from pathlib import Path

import pytest

from ddtree.integrations.vllm import validate

# These tests need an environment with vLLM, which `make test-vllm` makes.
collect_ignore_glob = [] if validate.installed() else ["test_*.py"]

# The engine in this process, on one thread, with little memory.
os.environ.update(
    VLLM_ENABLE_V1_MULTIPROCESSING="0",
    VLLM_CPU_KVCACHE_SPACE="1",
    VLLM_LOGGING_LEVEL="ERROR",
    HF_HUB_OFFLINE="1",
    OMP_NUM_THREADS="1",
)
# Helpers of the other tests, and of these.
sys.path += [str(Path(__file__).parents[1]), str(Path(__file__).parent)]


@pytest.fixture(scope="session")
def checkpoints(tmp_path_factory):
    """Folders of tiny models by family, as vLLM loads them."""
    from engines import FAMILIES

    import tiny

    made = {}

    def folder(family):
        if family not in made:
            made[family] = tmp_path_factory.mktemp(family)
            tiny.model(family, **FAMILIES[family]).save_pretrained(made[family])
        return made[family]

    return folder


@pytest.fixture(scope="session")
def known(checkpoints):
    """A tiny model's folder, and stock vLLM's answers to the prompts, each asked alone."""
    from engines import PROMPTS, TOKENS, answers, engine, params

    folder = checkpoints("llama")
    with engine(folder) as stock:
        return folder, [answers(stock, [prompt], params(TOKENS))[0] for prompt in PROMPTS]
