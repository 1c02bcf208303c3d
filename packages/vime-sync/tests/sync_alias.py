"""Trainers whose buffers are laid out as the fake engine's live weights, and engines that run on them."""

import functools

import torch
from sync_fake_engine import FakeControl, FakeModel, checkpoint
from vime_sync import CheckpointTensor, Piece, Publisher, Region, WeightSource, merge_manifests, shared_empty
from vime_sync.aliasing import bind
from vime_sync.layout import contiguous_strides, whole
from vime_sync.model import plan_model

ALIGN = 64


@functools.cache
def plan_of(rank, world):
    """Where the loaders of one worker put each checkpoint tensor, and the shapes of its live tensors."""
    described = []
    for name, tensor in checkpoint(0).items():
        shape = tuple(tensor.shape)
        region = Region(0, name, 0, shape, contiguous_strides(shape))
        described.append(CheckpointTensor(name, shape, tensor.dtype, (Piece(whole(shape), region),)))
    model = FakeModel(rank, world)
    plan = plan_model(model, described)
    return plan, {name: tuple(model.live()[name].shape) for name in plan.live_names}


def laid_out(rank=0, world=1, dtype=torch.float32, gap=0, order=None, owner=None):
    """A source with one shared buffer in which every live tensor of a worker is one contiguous region."""
    plan, shapes = plan_of(rank, world)
    owner = rank if owner is None else owner
    begins, end = {}, gap
    for name in order or shapes:
        begins[name] = end
        end += -(-torch.Size(shapes[name]).numel() // ALIGN) * ALIGN
    flat = shared_empty(end, dtype)
    flat.zero_()
    pieces, full = {}, {}
    for copy in plan.copies:
        region = Region(owner, "flat", begins[copy.live] + copy.view.offset, copy.box.shape, copy.view.strides)
        pieces.setdefault(copy.tensor, []).append(Piece(copy.box, region))
        full[copy.tensor] = copy.full
    tensors = [CheckpointTensor(name, full[name], dtype, tuple(found)) for name, found in pieces.items()]
    return WeightSource.from_regions({"flat": flat}, tensors, rank=owner)


class AliasTrainer:
    """Ranks in this process, as many as an engine has workers, and engines on their memory."""

    def __init__(self, world=1, dtype=torch.float32, seed=1, digest="full", version=0):
        self.dtype = dtype
        self.publishers = [Publisher(laid_out(rank, world, dtype), digest=digest) for rank in range(world)]
        self.manifest = merge_manifests([publisher.manifest() for publisher in self.publishers])
        self.fill(seed)
        for publisher in self.publishers:
            publisher.stage(version)

    @property
    def publisher(self):
        return self.publishers[0]

    def fill(self, seed):
        """Write a checkpoint into the buffers, and so into every engine that aliases them."""
        values = checkpoint(seed, self.dtype)
        with torch.no_grad():
            for publisher in self.publishers:
                for tensor in publisher.source.tensors:
                    for piece in tensor.pieces:
                        at = tuple(slice(a, a + n) for a, n in zip(piece.box.start, piece.box.shape, strict=True))
                        publisher.source.view(piece.region).copy_(values[tensor.name][at])

    def control(self, world=1):
        """Workers of an engine whose parameters are views of the buffers."""
        return FakeControl([on_memory(FakeModel(r, world, self.dtype), self.manifest) for r in range(world)])

    def write(self, session, version, seed):
        """One writing block; what it reported."""
        with session.writing(version) as block:
            for publisher in self.publishers:
                publisher._control.begin()
            self.fill(seed)
            for publisher in self.publishers:
                publisher.stage(version)
        return block.report

    def close(self):
        for publisher in self.publishers:
            publisher.close(force=True)


def on_memory(model, manifest):
    """Make a fake worker's parameters views of a trainer's buffers."""

    def assign(name, view):
        address = model.parameters[name].data_ptr()
        for tied in [key for key, tensor in model.parameters.items() if tensor.data_ptr() == address]:
            model.parameters[tied] = view

    model.binding = bind(model, manifest, assign)
    return model


def let_go(control):
    """Give the leases back, as the end of the engine's process does."""
    for model in control.models:
        for lease in model.binding.leases:
            lease.close()
