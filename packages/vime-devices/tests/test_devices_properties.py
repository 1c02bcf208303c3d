"""What holds for every node, every choice of devices and every stack of masks."""

from hypothesis import given
from hypothesis import strategies as st
from vime_devices import Platform, child_environment, compose, engine_mask, visible_devices
from vime_devices.parsers import read_cuda, read_hip, read_rocr, torch_count, torch_visible
from vime_devices.resolve import resolve
from vime_devices.topology import synthetic_node

HIP, CUDA, ROCR = "HIP_VISIBLE_DEVICES", "CUDA_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES"
BOOLEANS = st.booleans()
INDICES_ONLY = st.just(False)
PLATFORMS = st.sampled_from([Platform.HIP, Platform.CUDA])


@st.composite
def nodes_and_owners(draw, by_uuid=BOOLEANS):
    """A node of up to 64 devices, some of them usable in some order, some of those a process's own."""
    platform = draw(PLATFORMS)
    node = synthetic_node(platform, draw(st.integers(1, 64)))
    names = [device.uuid for device in node.devices] if draw(by_uuid) else [str(d.index) for d in node.devices]
    usable = draw(st.permutations(names))[: draw(st.integers(1, len(names)))]
    own = draw(st.permutations(usable))[: draw(st.integers(1, len(usable)))]
    return platform, node, usable, own


@given(nodes_and_owners())
def test_own_devices_come_first_in_order_and_the_local_indices_find_them(case):
    platform, _, usable, own = case
    mask = engine_mask(platform, own, usable)
    assert list(mask.entries[: len(own)]) == own
    assert [mask.entries[index] for index in mask.local_indices] == own


@given(nodes_and_owners())
def test_nothing_is_lost_on_hip_and_nothing_added_on_cuda(case):
    platform, _, usable, own = case
    entries = engine_mask(platform, own, usable).entries
    assert sorted(entries) == sorted(usable if platform is Platform.HIP else own)
    rest = [entry for entry in entries if entry not in own]
    assert rest == [entry for entry in usable if entry in rest]  # the node's order


@given(nodes_and_owners(), st.data())
def test_composing_masks_never_widens(case, data):
    platform, _, usable, _ = case
    positions = st.permutations(range(len(usable))).flatmap(
        lambda order: st.integers(1, len(order)).map(lambda count: order[:count])
    )
    once = compose(platform, usable, data.draw(positions))
    assert set(once) <= set(usable)
    inner = [index for index in data.draw(positions) if index < len(once)]
    twice = compose(platform, once, inner)
    assert set(twice) <= set(once)


@given(nodes_and_owners())
def test_every_reader_takes_a_written_mask_as_it_was_meant(case):
    platform, node, usable, own = case
    written = child_environment(platform, own=own, node=usable, base={})
    places = {name: d.index for d in node.devices for name in (d.uuid, str(d.index))}
    meant = tuple(places[entry] for entry in written.mask.split(","))
    uuids = [device.uuid for device in node.devices]
    if platform is Platform.HIP:
        assert read_rocr(written.mask, uuids).indices == meant
        assert read_hip(written.env[HIP], uuids).indices == meant
        serials = [uuid.removeprefix("GPU-") for uuid in uuids]
        assert torch_count(platform, torch_visible(platform, hip=written.mask), serials) == meant
    else:
        assert read_cuda(written.mask, uuids).indices == meant
        assert torch_count(platform, torch_visible(platform, cuda=written.mask), uuids) == meant
    resolution = resolve(written.env, node)
    assert not resolution.disagreements
    assert tuple(device.index for device in resolution.devices()) == meant


@given(nodes_and_owners(by_uuid=INDICES_ONLY), st.data())
def test_a_stack_of_masks_means_to_us_what_it_means_to_the_runtime(case, data):
    _, _, usable, _ = case
    node = synthetic_node(Platform.HIP, 64)
    inner = data.draw(st.permutations([str(i) for i in range(len(usable))]))
    environ = {ROCR: ",".join(usable), HIP: ",".join(inner)}
    assert visible_devices(Platform.HIP, environ) == [str(d.index) for d in resolve(environ, node).runtime]


@given(nodes_and_owners())
def test_a_child_of_a_child_sees_what_its_parent_saw_on_hip_and_no_more_on_cuda(case):
    platform, _, usable, own = case
    parent = child_environment(platform, own=own, node=usable, base={})
    seen = visible_devices(platform, parent.env)
    child = child_environment(platform, own=seen[-1:], node=seen, base=parent.env)
    after = visible_devices(platform, child.env)
    assert set(after) == (set(seen) if platform is Platform.HIP else set(seen[-1:]))


@given(st.dictionaries(st.sampled_from([ROCR, HIP, CUDA]), st.text("0123,- xGPU", max_size=8)), PLATFORMS)
def test_no_text_breaks_the_resolver_and_it_never_invents_a_device(environ, platform):
    node = synthetic_node(platform, 3)
    resolution = resolve(environ, node)
    indices = [device.index for device in resolution.runtime]
    assert len(indices) == len(set(indices))
    assert set(indices) <= {0, 1, 2}
