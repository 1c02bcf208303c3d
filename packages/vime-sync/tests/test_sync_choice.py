"""Choosing a transport and a way of writing: every placement gets one, and every refusal of aliasing its reasons."""

import itertools

import pytest
from vime_sync import AliasError, TransactionError, TransportError, choose_transport
from vime_sync.transports import EXPORTERS


@pytest.mark.parametrize(
    ("platform", "same_host", "transport"),
    [
        ("cpu", True, "shm"),
        ("cuda", True, "ipc"),
        ("hip", True, "ipc"),
        ("cpu", False, "collective"),
        ("cuda", False, "collective"),
        ("hip", False, "collective"),
    ],
)
def test_a_placement_has_a_transport_and_it_says_why(platform, same_host, transport):
    choice = choose_transport(platform, same_devices=False, same_host=same_host)
    assert (choice.transport, choice.mode, choice.weights) == (transport, "copy", "dummy")
    assert choice.reasons
    assert choice.alias_refused
    assert str(choice).startswith(f"transport {transport}, mode copy: ")
    assert "unconfirmed" in str(choice) or platform != "hip" or not same_host


@pytest.mark.parametrize(("platform", "transport"), [("cpu", "shm"), ("cuda", "ipc")])
def test_engines_on_the_trainers_devices_are_aliased_where_that_is_wanted(platform, transport):
    auto, alias, copy = (choose_transport(platform, same_devices=True, mode=m) for m in ("auto", "alias", "copy"))
    assert [(c.transport, c.mode, c.weights, c.alias_refused) for c in (auto, alias, copy)] == [
        (transport, "alias", "auto", ()),
        (transport, "alias", "alias", ()),
        (transport, "copy", "dummy", ()),
    ]
    assert "asked for" in copy.reasons[-1]


def test_every_reason_against_aliasing_is_named():
    against = {"same_devices": False, "quantized": True, "sleep_mode": True}
    words = {"same_devices": "other devices", "quantized": "quantised", "sleep_mode": "sleep mode"}
    for count in range(1, 4):
        for names in itertools.combinations(against, count):
            options = {"same_devices": True} | {name: against[name] for name in names}
            choice = choose_transport("cuda", **options)
            assert choice.mode == "copy"
            assert len(choice.alias_refused) == count
            with pytest.raises(AliasError) as refused:
                choose_transport("cuda", mode="alias", **options)
            assert all(words[name] in str(refused.value) for name in names)
            assert all(reason in str(refused.value) for reason in choice.alias_refused)
    with pytest.raises(AliasError, match="disk transport maps no memory"):
        choose_transport("cpu", same_devices=True, transport="disk", mode="alias")


@pytest.mark.parametrize(
    ("platform", "transport", "same_host", "match"),
    [
        ("cuda", "shm", True, "CPU memory for shm"),
        ("cpu", "ipc", True, "device memory for ipc"),
        ("cpu", "shm", False, "several hosts"),
        ("hip", "ipc", False, "several hosts"),
        ("cpu", "pigeon", True, "unknown transport"),
    ],
)
def test_a_transport_that_cannot_carry_a_placement_is_refused(platform, transport, same_host, match):
    with pytest.raises(TransportError, match=match):
        choose_transport(platform, same_devices=True, same_host=same_host, transport=transport)


def test_whatever_was_asked_for_is_chosen_or_refused():
    for platform, name, same, host in itertools.product(
        ("cpu", "cuda", "hip"), (*EXPORTERS, "auto"), (True, False), (True, False)
    ):
        try:
            choice = choose_transport(platform, same_devices=same, same_host=host, transport=name)
        except TransportError:
            assert name in ("shm", "ipc")
            continue
        assert choice.transport in EXPORTERS
        assert name in ("auto", choice.transport)
        assert (choice.mode == "alias") == (not choice.alias_refused)


def test_unknown_words_are_named():
    with pytest.raises(TransactionError, match="unknown platform"):
        choose_transport("tpu", same_devices=True)
    with pytest.raises(TransactionError, match="unknown mode"):
        choose_transport("cpu", same_devices=True, mode="shadow")
