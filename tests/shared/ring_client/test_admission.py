"""Which models are served and where there is room."""

import msgspec
import pytest

from blockyard.shared.errors import RequestError
from blockyard.shared.messages import Role, Room
from blockyard.shared.ring_client.admission import FULL_FOR_S, Admission
from blockyard.shared.ring_client.fake_ring import CARD, member

FULL, FREE = Room(0, 100, 2.5), Room(3, 100)


def scheduler(incarnation: int, ready: bool = True, name: str = "tiny") -> object:
    return member(Role.SCHEDULER, incarnation, ready, msgspec.structs.replace(CARD, names=[name]))


def status(admission: Admission, model: str | None) -> int:
    try:
        admission.card(model)
    except RequestError as e:
        return e.status
    return 200


def test_models_come_and_go() -> None:
    admission = Admission(["tiny"])
    assert [status(admission, m) for m in ("tiny", "other", None)] == [503, 404, 503]
    admission.changed(scheduler(1))
    assert [status(admission, m) for m in ("tiny", "other", None)] == [200, 404, 200]
    admission.changed(scheduler(2, name="other"))
    assert [status(admission, m) for m in ("tiny", "other", None)] == [200, 200, 400]
    admission.gone(scheduler(2, name="other"))
    assert [status(admission, m) for m in ("tiny", "other", None)] == [200, 503, 200], "it will be back"
    admission.changed(scheduler(1, ready=False))
    assert [status(admission, m) for m in ("tiny", "nix")] == [503, 404]


def test_before_anything_is_known_nothing_is_denied() -> None:
    assert status(Admission([]), "whatever") == 503


def test_full_means_full_everywhere_and_lately() -> None:
    admission = Admission([])
    admission.changed(scheduler(1))
    admission.changed(scheduler(2))
    admission.heard(1, FULL, 10.0)
    admission.check_room("tiny", 10.0)
    admission.heard(2, Room(5, 0, 1.5), 10.0)
    with pytest.raises(RequestError) as caught:
        admission.check_room("tiny", 10.0)
    assert (caught.value.status, caught.value.retry_after_s) == (429, 1.5)
    admission.check_room("tiny", 10.0 + FULL_FOR_S)  # should the news of room have been lost
    admission.heard(1, FREE, 11.0)
    admission.check_room("tiny", 11.0)
    assert admission.roomiest([1, 2], 11.0) == 1
    admission.gone(scheduler(1))
    with pytest.raises(RequestError):
        admission.check_room("tiny", 11.0)
    assert admission.roomiest([], 11.0) is None
