import pytest

from tevatron.core.errors import ConfigError
from tevatron.core.settings import Settings
from tevatron.scorer.host.child import Bound
from tevatron.scorer.host.main import places
from tevatron.scorer.host.slot import Place

LOOPBACK = Bound(bind_host="127.0.0.1", port=0, advertised_host="127.0.0.1")


def test_a_cpu_host_has_two_places_unless_told_otherwise():
    assert places(Settings(devices="cpu")) == [Place(bound=LOOPBACK, devices="cpu")] * 2
    assert places(Settings(scorer_slots=3)) == [Place(bound=LOOPBACK, devices=None)] * 3


def test_a_gpu_host_has_a_place_for_each_gpu():
    assert [place.devices for place in places(Settings(devices="0,2", scorer_slots=5))] == [
        "0",
        "2",
    ]


def test_an_advertised_host_is_bound_on_all_addresses():
    (place, _) = places(Settings(advertise_url="http://scorer-0.pods"))
    assert place.bound == Bound(bind_host="0.0.0.0", port=0, advertised_host="scorer-0.pods")


def test_an_advertised_port_is_the_first_places():
    ports = [place.bound.port for place in places(Settings(advertise_url="http://h:8100"))]
    assert ports == [8100, 8101]


@pytest.mark.parametrize("url", ["https://h", "h:80", "http://"])
def test_an_advertise_url_that_is_none_is_refused(url):
    with pytest.raises(ConfigError, match="TEVATRON_ADVERTISE_URL: expected http://host"):
        places(Settings(advertise_url=url))


def test_no_place_at_all_is_refused():
    with pytest.raises(ConfigError, match="scorer_slots must be at least 1, got 0"):
        places(Settings(scorer_slots=0))
