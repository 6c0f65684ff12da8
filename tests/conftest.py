"""What every test starts from."""

import pytest


@pytest.fixture(autouse=True)
def no_consent_yet(tmp_path_factory, monkeypatch):
    """Each test starts on a machine where the user has named nothing, and leaves no traces."""
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path_factory.mktemp("state")))
