import pytest

from ddtree.policy import store


@pytest.fixture(scope="session", autouse=True)
def measurements_of_tests_stay_out_of_the_users_cache(tmp_path_factory):
    with pytest.MonkeyPatch.context() as patch:
        folder = tmp_path_factory.mktemp("cache")
        patch.setattr(store, "cache_folder", lambda: folder)
        yield
