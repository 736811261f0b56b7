import pytest

from tevatron.core.environment import child_environment, without_passwords

KNOBS = {
    "PATH": "/bin",
    "HF_HOME": "/hf",
    "HTTPS_PROXY": "http://proxy:3128",
    "LD_PRELOAD": "libtcmalloc.so",
    "NCCL_SOCKET_IFNAME": "eth0",
    "TOKENIZERS_PARALLELISM": "false",
    "TRITON_CACHE_DIR": "/cache",
    "XDG_CACHE_HOME": "/home/u/.cache",
}


@pytest.mark.parametrize(
    "name",
    [
        "AWS_ACCESS_KEY_ID",
        "AWS_PROFILE",
        "AZURE_CLIENT_SECRET",
        "CELERY_BROKER_URL",
        "DATABASE_URL",
        "DB_PASSWORD",
        "GITHUB_TOKEN",
        "GOOGLE_APPLICATION_CREDENTIALS",
        "HF_TOKEN",
        "HUGGING_FACE_HUB_TOKEN",
        "OPENAI_API_KEY",
        "PGPASSWORD",
        "SENTRY_DSN",
        "TEVATRON_API_KEY",
        "TEVATRON_HOME",
        "WANDB_API_KEY",
        "wandb_api_key",
    ],
)
def test_secrets_are_told_by_their_names(name):
    given = {**KNOBS, name: "x"}
    assert child_environment(given, devices=None) == {**KNOBS, "HF_HUB_OFFLINE": "1"}


def test_a_url_with_a_password_is_a_secret_under_any_name():
    given = {**KNOBS, "PIP_INDEX_URL": "https://user:canary@host/simple"}
    assert "canary" not in str(child_environment(given, devices=None))


def test_the_hub_and_its_token_are_for_children_that_may_fetch():
    given = {"HF_TOKEN": "t", "HF_HUB_CACHE": "/cache"}
    assert child_environment(given, devices=None, allow_hub=True) == given
    assert child_environment(given, devices=None) == {
        "HF_HUB_CACHE": "/cache",
        "HF_HUB_OFFLINE": "1",
    }


@pytest.mark.parametrize(("devices", "visible"), [("cpu", ""), ("1", "1"), (None, "0,1,2")])
def test_a_child_sees_its_own_devices_only(devices, visible):
    environment = child_environment({"CUDA_VISIBLE_DEVICES": "0,1,2"}, devices=devices)
    assert environment["CUDA_VISIBLE_DEVICES"] == visible


def test_a_child_that_reports_gets_the_secrets_of_its_trackers_alone():
    given = {
        "WANDB_API_KEY": "k",
        "WANDB_MODE": "offline",
        "MLFLOW_TRACKING_URI": "https://user:password@mlflow",
        "MLFLOW_TRACKING_TOKEN": "t",
        "HF_TOKEN": "h",
    }

    def passed(*trackers: str) -> set[str]:
        return {*child_environment(given, devices=None, trackers=trackers)} - {"HF_HUB_OFFLINE"}

    assert passed() == {"WANDB_MODE"}
    assert passed("wandb") == {"WANDB_MODE", "WANDB_API_KEY"}
    assert passed("mlflow") == {"WANDB_MODE", "MLFLOW_TRACKING_URI", "MLFLOW_TRACKING_TOKEN"}


def test_a_message_is_shown_without_the_passwords_in_its_urls():
    assert (
        without_passwords("GET https://user:p@ss@host/x failed") == "GET https://***@host/x failed"
    )
