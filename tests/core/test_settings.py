import pytest

from tevatron.core.errors import ConfigError
from tevatron.core.settings import Settings


def test_data_lies_under_home_unless_it_is_named(tmp_path):
    assert Settings.from_environment({"TEVATRON_HOME": str(tmp_path)}).data == tmp_path / "data"
    named = {"TEVATRON_HOME": str(tmp_path), "TEVATRON_DATA": str(tmp_path / "other")}
    assert Settings.from_environment(named).data == tmp_path / "other"


def test_a_list_is_split_at_the_path_separator_and_other_variables_are_left_alone():
    settings = Settings.from_environment({"TEVATRON_DATASET_ROOTS": "/a:/b", "HOME": "/root"})
    assert [str(root) for root in settings.dataset_roots] == ["/a", "/b"]


def test_a_malformed_variable_is_named_with_what_came():
    with pytest.raises(ConfigError, match=r"TEVATRON_API_PORT: .* got 'eighty'"):
        Settings.from_environment({"TEVATRON_API_PORT": "eighty"})


def test_a_heartbeat_that_cannot_keep_the_lease_is_refused_without_showing_secrets():
    given = {
        "TEVATRON_LEASE_S": "5",
        "TEVATRON_HEARTBEAT_S": "5",
        "TEVATRON_API_KEY": "canary",
    }
    with pytest.raises(ConfigError) as caught:
        Settings.from_environment(given)
    assert str(caught.value) == "TEVATRON_HEARTBEAT_S(5) must be below TEVATRON_LEASE_S(5)"


def test_secrets_are_masked_in_repr():
    assert "canary" not in repr(Settings.from_environment({"TEVATRON_API_KEY": "canary"}))
