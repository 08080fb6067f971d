import os
import random

import pytest

from ddtree.policy import cache
from ddtree.sampling import params
from ddtree.storage import cache_folder


@pytest.fixture(scope="session", autouse=True)
def measurements_stay_out_of_the_users_cache(tmp_path_factory):
    """Unless a test names a cache folder of its own."""
    before, folder = os.environ.get("XDG_CACHE_HOME"), tmp_path_factory.mktemp("cache")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            cache,
            "cache_folder",
            lambda: folder if os.environ.get("XDG_CACHE_HOME") == before else cache_folder(),
        )
        yield


@pytest.fixture(autouse=True)
def drawn_seeds_are_the_same_in_every_run(monkeypatch, request):
    """A request without a seed gets one from the test's name, so that what fails once fails again."""
    monkeypatch.setattr(params.secrets, "randbits", random.Random(request.node.nodeid).getrandbits)
