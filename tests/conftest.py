import os

import pytest

from ddtree.demo import cache_folder
from ddtree.policy import store


@pytest.fixture(scope="session", autouse=True)
def measurements_stay_out_of_the_users_cache(tmp_path_factory):
    """Unless a test names a cache folder of its own."""
    before, folder = os.environ.get("XDG_CACHE_HOME"), tmp_path_factory.mktemp("cache")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            store,
            "cache_folder",
            lambda: folder if os.environ.get("XDG_CACHE_HOME") == before else cache_folder(),
        )
        yield
