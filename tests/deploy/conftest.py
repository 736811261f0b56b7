"""What Kustomize makes of k8s/, rendered once: `dev`, `gpu`, `overlay` for each of both, and `rendered` for all."""

import pytest
from tests.support.manifests import EXAMPLE, FOLDER, OVERLAYS, render, render_with

OPTIONS = ["kueue", "hub", "webhooks", "tracking"]


@pytest.fixture(scope="session")
def rendered(tmp_path_factory):
    """Everything that can be applied; `options` is the gpu overlay with the components that it leaves out."""
    everything = {name: render(FOLDER / name) for name in (*OVERLAYS, EXAMPLE)}
    folder = tmp_path_factory.mktemp("options")
    everything["options"] = render_with("overlays/gpu", OPTIONS, folder=folder)
    return everything


@pytest.fixture(params=OVERLAYS)
def overlay(request, rendered):
    return rendered[request.param]


@pytest.fixture
def gpu(rendered):
    return rendered["overlays/gpu"]


@pytest.fixture
def dev(rendered):
    return rendered["overlays/dev"]
